#!/bin/bash
set -e
cat > /app/verify.py <<'PY'
import hashlib
import hmac
import json
import os
import sys

FIELDS = {"release": int, "previous": str, "key": str, "files": dict, "signature": str}


def contents(path):
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return None


def parse(data, number):
    """The manifest, or None."""
    try:
        manifest = json.loads(data)
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or manifest.get("release") != number:
        return None
    typed = all(isinstance(manifest.get(name), kind) for name, kind in FIELDS.items())
    return manifest if typed and all(isinstance(digest, str) for digest in manifest["files"].values()) else None


def signed(manifest, keys):
    key = keys.get(manifest["key"])
    if key is None:
        return False
    lines = [f"{name} {manifest[name]}" for name in ("release", "previous", "key")]
    lines += [f"{digest}  {path}" for path, digest in sorted(manifest["files"].items())]
    text = "".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass")
    wanted = hmac.new(bytes.fromhex(key["secret"]), text, "sha256").hexdigest()
    return hmac.compare_digest(wanted.encode(), manifest["signature"].encode("utf-8", "surrogatepass"))


def present(folder):
    """{path: SHA-256, or None for what is no regular file}, links not followed."""
    found = {}
    for top, folders, files in os.walk(folder):
        for name in files + [name for name in folders if os.path.islink(os.path.join(top, name))]:
            path = os.path.join(top, name)
            data = contents(path) if os.path.isfile(path) and not os.path.islink(path) else None
            found[os.path.relpath(path, folder)] = None if data is None else hashlib.sha256(data).hexdigest()
    found.pop("manifest.json", None)
    return found


def verdict(root, number, keys):
    folder = os.path.join(root, f"{number:04}")
    manifest = parse(contents(os.path.join(folder, "manifest.json")), number)
    if manifest is None:
        return "manifest"
    if not signed(manifest, keys):
        return "signature"
    before = contents(os.path.join(root, f"{number - 1:04}", "manifest.json")) if number > 1 else b""
    if before is None or manifest["previous"] != (hashlib.sha256(before).hexdigest() if number > 1 else ""):
        return "chain"
    if any(path.startswith("/") or ".." in path.split("/") for path in manifest["files"]):
        return "path"
    return "ok" if present(folder) == manifest["files"] else "files"


def main(root, keyring):
    with open(keyring) as stream:
        keys = json.load(stream)
    good = True
    for name in sorted(os.listdir(root)):
        word = verdict(root, int(name), keys)
        good &= word == "ok"
        print(name, word)
    return 0 if good else 1


sys.exit(main(*sys.argv[1:]))
PY
python3 /app/verify.py /app/releases /app/keyring.json > /app/report.txt || true
