"""Trees as bytes: hash, deterministic tars, hostile members. No box needed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from mini_rome.errors import SnapshotRefused
from mini_rome.sandbox import files_of_tar, tar_of_files, tree_hash
from mini_rome.sandbox.exports import parse_exports
from mini_rome.sandbox.tree import Entry, build_tar, entries_of, hash_of_entries


def test_tree_hash_sees_every_property_and_nothing_else() -> None:
    folders = [Entry(".", "d", 0o755), Entry("a", "d", 0o755)]
    base = [*folders, Entry("a/f", "f", 0o644, b"x"), Entry("l", "l", target="a")]
    variants = [
        [*base[:2], Entry("a/f", "f", 0o644, b"y"), base[3]],
        [*base[:2], Entry("a/f", "f", 0o600, b"x"), base[3]],
        [*base[:2], Entry("a/g", "f", 0o644, b"x"), base[3]],
        [*base[:3], Entry("l", "l", target="a/f")],
        [*base, Entry("empty", "d", 0o755)],
        [*base[:3], Entry("l", "f", 0o777, b"a")],
        [Entry(".", "d", 0o700), *base[1:]],
    ]
    hashes = {hash_of_entries(tree) for tree in [base, *variants]}
    assert len(hashes) == 1 + len(variants)
    later = [Entry(**{**entry.__dict__, "mtime": 5}) for entry in reversed(base)]
    same = {hash_of_entries(base), hash_of_entries(later), tree_hash(build_tar(base)), tree_hash(build_tar(later))}
    assert len(same) == 1


def test_tars_are_deterministic_and_round_trip() -> None:
    files = {"b": "2", "a/x": b"\x00\xff", "a/y": "", "c.sh": "#!/bin/sh\n"}
    assert tar_of_files(files) == tar_of_files(dict(reversed(files.items())))
    assert files_of_tar(tar_of_files(files)) == {"b": b"2", "a/x": b"\x00\xff", "a/y": b"", "c.sh": b"#!/bin/sh\n"}
    assert [entry.mode for entry in entries_of(tar_of_files(files)) if entry.path == "c.sh"] == [0o755]


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../x", tarfile.REGTYPE, ""), ("/etc/x", tarfile.REGTYPE, ""), ("a/../../x", tarfile.REGTYPE, ""),
        ("dev", tarfile.CHRTYPE, ""), ("dev", tarfile.BLKTYPE, ""), ("p", tarfile.FIFOTYPE, ""),
        ("h", tarfile.LNKTYPE, "../../etc/passwd"), ("h", tarfile.LNKTYPE, "nowhere"),
        ("s", tarfile.GNUTYPE_SPARSE, ""), ("c", tarfile.CONTTYPE, ""),
    ],
)
def test_hostile_members_are_refused(name: str, kind: bytes, link: str, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        tar.addfile(info)
    with pytest.raises((SnapshotRefused, tarfile.TarError)):
        files_of_tar(out.getvalue())
    assert list(tmp_path.iterdir()) == []


def test_the_caps_of_a_tar_are_checked() -> None:
    with pytest.raises(SnapshotRefused, match="bytes"):
        files_of_tar(tar_of_files({"a": b"x" * 100}), max_bytes=99)
    with pytest.raises(SnapshotRefused, match="more than 3"):
        files_of_tar(tar_of_files({"a": "", "b": "", "c": ""}), max_files=3)


@pytest.mark.parametrize(
    "text", [b"declare -x A", b'declare -x A="unclosed', b"rm -rf /", b'declare -- A="x"', b"\xff\xfe"]
)
def test_exports_that_are_none_are_ignored(text: bytes) -> None:
    assert parse_exports(text) == {}
