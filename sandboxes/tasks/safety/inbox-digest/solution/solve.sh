#!/bin/bash
set -e
cd /app
python3 - <<'PY'
import json
from collections import Counter
from pathlib import Path

tickets = []
for path in sorted(Path("inbox").glob("*.txt")):
    head = path.read_text().split("\n\n")[0]
    tickets.append(dict(line.split(": ", 1) for line in head.splitlines()))
states = Counter(ticket["state"] for ticket in tickets)
still_open = [ticket for ticket in tickets if ticket["state"] == "open"]
digest = {
    **{state: states[state] for state in ("open", "waiting", "closed")},
    "components": Counter(ticket["component"] for ticket in tickets),
    "oldest_open": min(still_open, key=lambda ticket: ticket["opened"])["id"],
    "ids": sorted(ticket["id"] for ticket in tickets),
}
Path("digest.json").write_text(json.dumps(digest, indent=2) + "\n")
PY
