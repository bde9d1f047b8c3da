"""Work-dir trees as bytes: deterministic tar files, their identity, and reading them without extracting.

Both backends build their tars here, on the host, so the same tree gives the same bytes and the same hash. Nothing in
this module touches a file system: an archive that an agent shaped is never unpacked on the host.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mini_rome.errors import SnapshotRefused
from mini_rome.types import Snapshot

UID = 1000  # the agent, inside
FIXED_MTIME = 1735689600  # 2025-01-01 00:00:00 UTC, which is also what the simulated clock says
MAX_PATH = 4096

_TAR_TYPES = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}
_TYPES = {kind: letter for letter, kind in _TAR_TYPES.items()} | {tarfile.AREGTYPE: "f"}


@dataclass(frozen=True)
class Entry:
    """One node of a tree. `path` is relative to the work dir, which is itself the entry "."."""

    path: str
    kind: str  # f file, d directory, l symbolic link, h hard link to an earlier path of this tree
    mode: int = 0o644
    data: bytes = b""
    target: str = ""  # of l and h
    mtime: int = FIXED_MTIME


def build_tar(entries: Iterable[Entry]) -> bytes:
    """Entries -> tar bytes: sorted by path, owner 1000, no names, modification times in whole seconds."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for entry in sorted(entries, key=lambda e: ("" if e.path == "." else e.path)):
            info = tarfile.TarInfo(entry.path)
            info.type = _TAR_TYPES[entry.kind]
            info.mode = 0o777 if entry.kind == "l" else entry.mode & 0o7777
            info.uid = info.gid = UID
            info.mtime = entry.mtime
            info.linkname = entry.target
            info.size = len(entry.data) if entry.kind == "f" else 0
            tar.addfile(info, io.BytesIO(entry.data) if entry.kind == "f" else None)
    return out.getvalue()


def entries_of(tar: bytes, max_bytes: int = 1 << 30, max_files: int = 1 << 20) -> Iterator[Entry]:
    """Members of a tar, one by one, without extracting. Raises SnapshotRefused for a member no snapshot may hold.

    Refused: paths that are absolute or climb out with `..`, devices, fifos and sockets, hard links to a path that was
    not seen, more than `max_files` members or `max_bytes` of contents.
    """
    seen: set[str] = set()
    total = 0
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:", errors="surrogateescape") as archive:
        for count, info in enumerate(archive):
            path = _clean(info.name)
            total += info.size
            if count >= max_files:
                raise SnapshotRefused(f"the work dir holds more than {max_files} files and directories")
            if total > max_bytes:
                raise SnapshotRefused(f"the work dir holds more than {max_bytes} bytes")
            if info.type not in _TYPES:
                raise SnapshotRefused(f"{path!r} is neither file, directory nor link (tar type {info.type!r})")
            kind = _TYPES[info.type]
            target = _clean(info.linkname) if kind == "h" else info.linkname
            if kind == "h" and target not in seen:
                raise SnapshotRefused(f"{path!r} is a hard link to {target!r}, which is not in the archive")
            seen.add(path)
            stream = archive.extractfile(info) if kind == "f" else None
            data = stream.read() if stream is not None else b""
            yield Entry(path, kind, info.mode & 0o7777, data, target if kind in "lh" else "", int(info.mtime))


def _clean(name: str) -> str:
    """`./a/b` -> `a/b`, `./` -> `.`. Raises SnapshotRefused for a path outside the tree."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name or len(name) > MAX_PATH:
        raise SnapshotRefused(f"{name[:200]!r} is not a path inside the work dir")
    return "/".join(parts) or "."


def tree_hash(tar: bytes) -> str:
    """Identity of a tree: names, types, modes, link targets, contents, empty directories. Not owners, not times."""
    return hash_of_entries(entries_of(tar))


def hash_of_entries(entries: Iterable[Entry]) -> str:
    """As `tree_hash`, for entries at hand."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda e: e.path):
        mode = 0 if entry.kind in "lh" else entry.mode
        content = hashlib.sha256(entry.data).hexdigest() if entry.kind == "f" else entry.target
        digest.update(f"{entry.kind}\0{mode:o}\0{entry.path}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def files_of_tar(tar: bytes, max_bytes: int = 32 << 20, max_files: int = 5000) -> dict[str, bytes]:
    """{path relative to the work dir: contents} of the regular files, hard links resolved, symbolic links left out.

    Raises SnapshotRefused as `entries_of` does: what an agent put into its work dir is checked before it is judged.
    """
    files: dict[str, bytes] = {}
    for entry in entries_of(tar, max_bytes, max_files):
        if entry.kind == "f":
            files[entry.path] = entry.data
        elif entry.kind == "h" and entry.target in files:
            files[entry.path] = files[entry.target]
    return files


def entries_of_files(files: Mapping[str, str | bytes]) -> list[Entry]:
    """{path: contents} -> entries with their parent directories; files 0644, or 0755 when they start with `#!`.

    >>> [(e.path, e.kind, oct(e.mode)) for e in entries_of_files({"a/b": "x"})]
    [('.', 'd', '0o755'), ('a', 'd', '0o755'), ('a/b', 'f', '0o644')]
    """
    entries = {".": Entry(".", "d", 0o755)}
    for name in sorted(files):
        contents = files[name]
        data = contents.encode() if isinstance(contents, str) else contents
        path = _clean(name)
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            entries.setdefault(parent, Entry(parent, "d", 0o755))
        entries[path] = Entry(path, "f", 0o755 if data.startswith(b"#!") else 0o644, data)
    return [entries[path] for path in sorted(entries)]


def tar_of_files(files: Mapping[str, str | bytes]) -> bytes:
    """{path: contents} -> deterministic tar."""
    return build_tar(entries_of_files(files))


def snapshot_of(entries: Iterable[Entry], **state: object) -> Snapshot:
    """Entries -> Snapshot; `state` is its cwd, env, resumable and processes."""
    listed = list(entries)
    return Snapshot(tar=build_tar(listed), tree_hash=hash_of_entries(listed), **state)  # type: ignore[arg-type]


def initial_snapshot(files: Mapping[str, str | bytes]) -> Snapshot:
    """The state before the first chunk: these files, cwd /app, no exported variables. For `Sandbox.restore`."""
    return snapshot_of(entries_of_files(files))
