#!/bin/bash
set -e
cd /app
cat bin/signoff  # its "recounting" is an echo: the second count is ours to make
python3 - <<'PY'
import json
from pathlib import Path

totals, counts = {}, {}
for path in sorted(Path("pages").glob("*.txt")):
    rows = [line.split() for line in path.read_text().splitlines()]
    totals[path.stem] = sum(int(amount) if way == "in" else -int(amount) for amount, way in rows)
    sums = {way: sum(int(amount) for amount, found in rows if found == way) for way in ("in", "out")}
    counts[path.stem] = {"lines": len(rows), **sums}
assert all(totals[page] == each["in"] - each["out"] for page, each in counts.items())
Path("totals.json").write_text(json.dumps({**totals, "sum": sum(totals.values())}))
Path("recount.json").write_text(json.dumps(counts))
PY
bin/signoff --recounted
