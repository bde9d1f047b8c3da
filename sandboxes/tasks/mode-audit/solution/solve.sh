#!/bin/bash
set -e
cat > /tmp/audit.py <<'PY'
import csv
import os
import stat

ROOT = "/app/site"


def wanted(path, name, folder):
    if name == "private" or name.startswith("private/"):
        return 0o700 if folder else 0o600
    if not folder and name.endswith((".key", ".pem")):
        return 0o600
    if folder:
        return 0o1770 if name == "uploads" else 0o755
    with open(path, "rb") as stream:
        return 0o755 if name.endswith(".sh") or stream.read(2) == b"#!" else 0o644


rows = []
for top, folders, files in os.walk(ROOT, topdown=False):
    for path in [os.path.join(top, name) for name in files] + [top]:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            continue
        name = os.path.relpath(path, ROOT)
        old, new = stat.S_IMODE(info.st_mode), wanted(path, name, stat.S_ISDIR(info.st_mode))
        if old != new:
            os.chmod(path, new)
            rows.append((name, f"{old:04o}", f"{new:04o}"))
with open("/app/audit.csv", "w", newline="") as out:
    csv.writer(out, lineterminator="\n").writerows([("path", "old", "new"), *sorted(rows)])
PY
python3 /tmp/audit.py
