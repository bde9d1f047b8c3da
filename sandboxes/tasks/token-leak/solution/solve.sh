#!/bin/bash
set -e
cat > /tmp/rotate.py <<'PY'
import base64
import gzip
import hashlib
import ipaddress
import json
import os
import re
import secrets
import string

SERVICE = "/app/service"
LOGS = f"{SERVICE}/logs"
TOKEN = re.compile(r"mr_[a-z0-9]{24}(?![a-z0-9])")
BASIC = re.compile(r"(?<=authorization=Basic )[A-Za-z0-9+/]+=*")


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def load(name):
    opener = gzip.open if name.endswith(".gz") else open
    with opener(f"{LOGS}/{name}", "rt", newline="") as stream:
        return stream.read()


def save(name, text):
    opener = gzip.open if name.endswith(".gz") else open
    with opener(f"{LOGS}/{name}", "wt", newline="") as stream:
        stream.write(text)


def forms(line):
    """(text as it stands in the log, token)."""
    for text in BASIC.findall(line):
        yield text, base64.b64decode(text).decode().partition(":")[2]
    for text in TOKEN.findall(line):
        yield text, text


logs = {name: load(name) for name in sorted(os.listdir(LOGS))}
with open(f"{SERVICE}/tokens.json") as stream:
    store = json.load(stream)
active = {entry["sha256"]: entry for entry in store["tokens"] if entry["status"] == "active"}
found = []
for name, text in logs.items():
    for line in text.splitlines():
        for form, token in forms(line):
            if sha(token) in active:
                found.append((line.split()[0], name, re.search(r"req=(\w+)", line)[1], form, token))
(old,) = {token for *_, token in found}
entry = active[sha(old)]
time, name, request = min(found)[:3]

with open("/app/allowlist.txt") as stream:
    ours = [ipaddress.ip_network(line.strip()) for line in stream if line.strip() and not line.startswith("#")]
addresses, objects = set(), set()
for text in logs.values():
    for address, path, tok in re.findall(r" (\S+) GET (\S+) 200 tok=(\w+)", text):
        inside = any(ipaddress.ip_address(address) in network for network in ours)
        if tok == sha(old)[:10] and not inside:
            addresses.add(address)
            objects.add(path.partition("?")[0])
incident = {
    "token": entry["id"],
    "first_leak": {"file": name, "time": time, "request": request},
    "addresses": sorted(addresses),
    "objects": sorted(objects),
}
with open("/app/incident.json", "w") as stream:
    json.dump(incident, stream, indent=1)

for name, text in logs.items():
    clean = text
    for form in {form for *_, form, _ in found}:
        clean = clean.replace(form, "[redacted]")
    if clean != text:
        save(name, clean)
new = "mr_" + "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(24))
entry["status"] = "revoked"
store["tokens"].append({**entry, "id": "t-07", "status": "active", "sha256": sha(new)})
with open(f"{SERVICE}/tokens.json", "w") as stream:
    json.dump(store, stream, indent=2)
with open(f"{SERVICE}/secrets/{entry['owner']}.token", "w") as stream:
    stream.write(new + "\n")
PY
python3 /tmp/rotate.py
sed -i 's/^dump_headers = yes/dump_headers = no/' /app/service/gateway.ini
