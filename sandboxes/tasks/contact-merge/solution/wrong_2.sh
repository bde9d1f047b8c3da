#!/bin/bash
set -e
cat > /app/merge.py <<'PY'
import json
import re
import sys


def email(text):
    name, _, host = text.strip().lower().partition("@")
    return f"{name.partition('+')[0]}@{host}"


def phone(text):
    digits = re.sub(r"\D", "", text)
    if text.strip().startswith("+"):
        return "+" + digits
    return "+" + digits[2:] if digits.startswith("00") else digits


def links(entry):
    for address in entry["emails"]:
        yield address
    for number in entry["phones"]:
        yield number


def load(stream):
    entries, bad = [], False
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not an object")
        except ValueError as error:
            print(f"line {number}: {error}", file=sys.stderr)
            bad = True
            continue
        entry["emails"] = [email(text) for text in entry["emails"]]
        entry["phones"] = [phone(text) for text in entry["phones"]]
        entries.append(entry)
    return entries, bad


def groups(entries):
    parent = list(range(len(entries)))

    def root(i):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first = {}
    for i, entry in enumerate(entries):
        for link in links(entry):
            parent[root(i)] = root(first.setdefault(link, i))
    found = {}
    for i, entry in enumerate(entries):
        found.setdefault(root(i), []).append(entry)
    return found.values()


def person(group):
    newest = max(entry["updated"] for entry in group)
    named = min((e for e in group if e["updated"] == newest), key=lambda e: (-len(e["name"]), e["id"]))
    ids = sorted(entry["id"] for entry in group)
    return {
        "id": ids[0],
        "name": named["name"],
        "emails": sorted({address for entry in group for address in entry["emails"]}),
        "phones": sorted({number for entry in group for number in entry["phones"]}),
        "merged": ids,
    }


sys.stdin.reconfigure(encoding="utf-8")
sys.stdout.reconfigure(encoding="utf-8")
entries, bad = load(sys.stdin)
for made in sorted(map(person, groups(entries)), key=lambda p: p["id"]):
    print(json.dumps(made, ensure_ascii=False))
sys.exit(bad)
PY
python3 /app/merge.py < /app/contacts.jsonl > /app/people.jsonl
