#!/bin/bash
set -e
cat > /app/timesheet.py <<'PY'
"""Working time of each worker from a file of shifts. The rules are in README.md."""

import re
import sys

DAY = 24 * 60


def minutes(text):
    """`08:55` -> 535"""
    match = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})", text)
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise ValueError(text)
    return int(match[1]) * 60 + int(match[2])


def shift_minutes(start, end, pause):
    lasted = end - start if end > start else end - start + DAY
    worked = lasted - pause
    if worked > 6 * 60:
        worked = min(worked, lasted - 30)
    return (worked + 7) // 15 * 15


def read_shift(line):
    name, start, end, *rest = line.split()
    if len(rest) > 1 or rest and not re.fullmatch("[0-9]+", rest[0]):
        raise ValueError(line)
    return name, shift_minutes(minutes(start), minutes(end), int(rest[0]) if rest else 0)


def show(total):
    return f"{total // 60}:{total % 60:02}"


def main(path):
    totals = {}
    for number, line in enumerate(open(path).read().splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        try:
            name, worked = read_shift(line)
        except ValueError:
            sys.exit(f"{path}:{number}: cannot read {line!r}")
        totals[name] = totals.get(name, 0) + worked
    for name in sorted(totals):
        print(name, show(totals[name]))
    print("total", show(sum(totals.values())))


if __name__ == "__main__":
    main(sys.argv[1])
PY
python3 /app/timesheet.py /app/week.txt > /app/week_report.txt
