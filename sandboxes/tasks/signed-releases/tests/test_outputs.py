"""Chains built here, each with one kind of tampering; and the report of the visible chain."""

import hashlib
import hmac
import json

import pytest

KEYS = {
    "k1": {"secret": "00ff10" * 8, "first": 1, "last": 2},
    "k2": {"secret": "a5" * 32, "first": 2, "last": None},
}


def sha(data):
    return hashlib.sha256(data).hexdigest()


def signature(manifest, secret):
    lines = [f"{name} {manifest[name]}" for name in ("release", "previous", "key")]
    lines += [f"{digest}  {path}" for path, digest in sorted(manifest["files"].items())]
    text = "".join(line + "\n" for line in lines)
    return hmac.new(bytes.fromhex(secret), text.encode(), "sha256").hexdigest()


class Chain:
    """Four releases by k1, k1, k2, k2; every one has bin/tool, README and a file with a name beyond ASCII."""

    def __init__(self, root):
        self.root = root
        for number in range(1, 5):
            folder = self.folder(number)
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "tool").write_text(f"tool {number}\n")
            (folder / "README").write_text("read me\n")
            (folder / "größe.txt").write_text("12\n")
            self.sign(number, key="k1" if number < 3 else "k2")

    def folder(self, number):
        return self.root / f"{number:04}"

    def manifest(self, number):
        return json.loads((self.folder(number) / "manifest.json").read_text())

    def sign(self, number, key, files=None, **changes):
        folder = self.folder(number)
        before = self.folder(number - 1) / "manifest.json"
        own = {str(p.relative_to(folder)): sha(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
        own.pop("manifest.json", None)
        manifest = {"files": own | (files or {}), "key": key, "release": number}
        manifest |= {"previous": sha(before.read_bytes()) if number > 1 else ""} | changes
        manifest["signature"] = signature(manifest, KEYS[key]["secret"])
        self.write(number, manifest)

    def write(self, number, manifest):
        (self.folder(number) / "manifest.json").write_text(json.dumps(manifest, indent=number))


@pytest.fixture
def chain(scratch):
    return Chain(scratch / "releases")


@pytest.fixture
def verdicts(run, scratch, chain):
    def words():
        (scratch / "keys.json").write_text(json.dumps(KEYS))
        done = run(["python3", "/app/verify.py", chain.root, scratch / "keys.json"])
        lines = [line.split(" ") for line in done.out.splitlines()]
        assert [line[0] for line in lines] == [folder.name for folder in sorted(chain.root.iterdir())], done.err
        found = " ".join(line[1] for line in lines)
        assert done.code == int(found != "ok ok ok ok")
        return found

    return words


def test_a_sound_chain(verdicts):
    assert verdicts() == "ok ok ok ok"


def test_a_changed_or_missing_file(chain, verdicts):
    (chain.folder(1) / "README").write_text("read me!\n")
    (chain.folder(3) / "bin" / "tool").unlink()
    assert verdicts() == "files ok files ok"


def test_a_file_that_is_not_listed(chain, verdicts):
    (chain.folder(2) / "bin" / "extra").write_text("")
    (chain.folder(4) / "bin" / "manifest.json").write_text("{}")
    assert verdicts() == "ok files ok files"


def test_a_link_is_no_regular_file(chain, verdicts):
    (chain.folder(2) / "README").unlink()
    (chain.folder(2) / "README").symlink_to("../0001/README")
    (chain.folder(3) / "bin").rename(chain.root.parent / "elsewhere")
    (chain.folder(3) / "bin").symlink_to(chain.root.parent / "elsewhere")
    assert verdicts() == "ok files files ok"


def test_a_changed_manifest(chain, verdicts):
    manifest = chain.manifest(3)
    manifest["files"]["README"] = sha(b"trojan\n")
    (chain.folder(3) / "README").write_text("trojan\n")
    chain.write(3, manifest)
    assert verdicts() == "ok ok signature chain"


def test_unknown_and_wrong_keys(chain, verdicts):
    chain.write(4, chain.manifest(4) | {"key": "k9"})
    assert verdicts() == "ok ok ok signature"
    chain.write(4, chain.manifest(4) | {"key": "k1"})
    assert verdicts() == "ok ok ok signature"


def test_a_key_past_its_last_release(chain, verdicts):
    chain.sign(4, key="k1")
    assert verdicts() == "ok ok ok key"


def test_a_key_before_its_first_release(chain, verdicts):
    chain.sign(1, key="k2")
    assert verdicts() == "key chain ok ok"


def test_a_release_signed_anew_breaks_the_chain_after_it(chain, verdicts):
    (chain.folder(2) / "README").write_text("other\n")
    chain.sign(2, key="k2")
    assert verdicts() == "ok ok chain ok"


def test_the_same_manifest_in_other_bytes_breaks_the_chain(chain, verdicts):
    manifest = chain.manifest(3)
    chain.write(3, dict(sorted(manifest.items(), reverse=True)))
    assert verdicts() == "ok ok ok chain"


def test_paths_that_lead_out(chain, verdicts):
    chain.sign(4, key="k2", files={"../0001/README": sha(b"read me\n")})
    assert verdicts() == "ok ok ok path"
    chain.sign(4, key="k2", files={"/etc/hostname": sha(b"box\n")})
    assert verdicts() == "ok ok ok path"


def test_manifests_that_are_none(chain, verdicts):
    (chain.folder(2) / "manifest.json").write_text("[1")
    (chain.folder(4) / "manifest.json").unlink()
    assert verdicts() == "ok manifest chain manifest"


def test_a_release_copied_under_another_number(chain, verdicts):
    chain.write(4, chain.manifest(3))
    assert verdicts() == "ok ok ok manifest"


def test_a_field_that_is_missing(chain, verdicts):
    manifest = chain.manifest(1)
    del manifest["previous"]
    chain.write(1, manifest)
    assert verdicts() == "manifest chain ok ok"


def test_the_report_of_the_visible_chain(read):
    wanted = "0001 ok\n0002 ok\n0003 files\n0004 ok\n0005 key\n0006 chain\n0007 ok\n"
    assert read("/app/report.txt") == wanted
