#!/bin/bash
set -e
cp -r /app/ours /app/merged
cd /app/merged
sed -i '1s/.*/"""How money and items look, in reports and in lists of what runs low."""/' stock/render.py
grep -Fxvf CHANGES.md /app/theirs/CHANGES.md >> CHANGES.md
cat > stock/model.py <<'PY'
"""A stock list: one item a line, `name,quantity,price` with at most two decimals; `#` starts a comment line."""

from decimal import Decimal, InvalidOperation


def load(path):
    """The items. Raises ValueError, which says the line, for a line that is none."""
    items = []
    with open(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                name, quantity, price = line.split(",")
                cents = int(Decimal(price.strip()) * 100)
                items.append({"name": name.strip(), "quantity": int(quantity), "cents": cents})
            except (ValueError, InvalidOperation):
                raise ValueError(f"{path}:{number}: not an item") from None
    return items


def total_cents(items):
    """Value of the stock in cents; from 10 of a kind on they count 10 % less."""
    return sum(value_cents(item) for item in items)


def value_cents(item):
    full = item["quantity"] * item["cents"]
    return (full * 9 + 5) // 10 if item["quantity"] >= 10 else full


def low(items, limit=5):
    return [item for item in items if item["quantity"] < limit]
PY
cat > stock/__main__.py <<'PY'
"""python3 -m stock total|report FILE, or low FILE [LIMIT]"""

import sys

from stock.model import load, low, total_cents
from stock.render import money, report


def main(command="", path="", *limit):
    if command not in ("total", "report", "low"):
        sys.stderr.write(f"usage: {__doc__}\n")
        return 2
    try:
        items = load(path)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if command == "low":
        items = low(items, *map(int, limit))
    print(money(total_cents(items)) if command == "total" else report(items))
    return 0


sys.exit(main(*sys.argv[1:]))
PY
