#!/bin/bash
set -e
cat > /tmp/restore.py <<'PY'
import csv
import datetime
import hashlib
import json
import pathlib
import shutil
import subprocess

APP = pathlib.Path("/app")
MOMENT = datetime.datetime.fromisoformat("2025-06-05T12:00:00+00:00")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


with open(APP / "backups/catalog.tsv") as stream:
    catalog = {row["id"]: row for row in csv.DictReader(stream, delimiter="\t")}
taken = {name: datetime.datetime.fromisoformat(row["taken"]) for name, row in catalog.items()}
chain = [max((name for name in catalog if taken[name] <= MOMENT), key=taken.get)]
while catalog[chain[0]]["kind"] != "full":
    chain.insert(0, catalog[chain[0]]["parent"])
copies = {digest(path): path for path in (APP / "offsite").rglob("*") if path.is_file()}
target, replaced = APP / "restored", []
target.mkdir()
for name in chain:
    archive = APP / "backups" / catalog[name]["file"]
    if digest(archive) != catalog[name]["sha256"]:
        archive = copies[catalog[name]["sha256"]]
        replaced.append(name)
    listed = subprocess.run(["tar", "-xzOf", archive, "./.deleted"], capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        remove(target / line)
    subprocess.run(["tar", "-xpzf", archive, "-C", target, "--exclude=./.deleted"], check=True)
files = [path for path in target.rglob("*") if path.is_file() and not path.is_symlink()]
report = {"chain": chain, "replaced": replaced, "files": len(files), "bytes": sum(p.stat().st_size for p in files)}
(APP / "restore.json").write_text(json.dumps(report))
PY
python3 /tmp/restore.py
