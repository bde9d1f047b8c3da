#!/bin/bash
set -e
cd /app
cat > timesheet/parse.py <<'PY'
"""Lines of a log -> entries."""

import re
from dataclasses import dataclass, field
from datetime import date

CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
LINE = re.compile(rf"([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}) ({CLOCK})-({CLOCK}) ([^:]*):(.*)")
DAY = 24 * 60


class BadLine(Exception):
    def __init__(self, number):
        super().__init__(f"line {number}: not an entry")
        self.number = number


@dataclass
class Entry:
    date: str
    minutes: int
    project: str
    tags: list = field(default_factory=list)


def parse(lines):
    entries = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            entries.append(entry_of(line.rstrip("\n"), number))
    return entries


def entry_of(line, number):
    match = LINE.fullmatch(line)
    if match is None or not is_date(match[1]) or not match[4].strip():
        raise BadLine(number)
    day, start, end, project, note = match.groups()
    minutes = rounded((clock(end) - clock(start)) % DAY)
    return Entry(day, minutes, project.strip().lower(), tags_of(note))


def is_date(text):
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is not None


def clock(text):
    hours, minutes = text.split(":")
    return int(hours) * 60 + int(minutes)


def rounded(minutes):
    """To the nearest ten, halves up; what is not nothing counts at least ten."""
    return max(round(minutes / 10) * 10, 10) if minutes else 0


def tags_of(note):
    tags = [word.rstrip(".,;:!?").lower() for word in note.split() if word.startswith("#")]
    return list(dict.fromkeys(tag for tag in tags if tag != "#"))
PY
cat > timesheet/report.py <<'PY'
"""Sums of entries, and how they look."""


def by_project(entries):
    totals = {}
    for entry in entries:
        totals[entry.project] = totals.get(entry.project, 0) + entry.minutes
    return totals


def by_tag(entries):
    totals = {}
    for entry in entries:
        for tag in entry.tags:
            totals[tag] = totals.get(tag, 0) + entry.minutes
    return totals


def hours(minutes):
    return f"{minutes // 60}:{minutes % 60:02}"


def ranked(totals):
    """Longest first, equal ones by name."""
    return sorted(totals.items(), key=lambda item: (item[1], item[0]), reverse=True)


def lines(totals):
    return [f"{name} {hours(minutes)}" for name, minutes in ranked(totals)]
PY
cat > timesheet/__main__.py <<'PY'
"""python3 -m timesheet report|tags FILE [--since DATE] [--until DATE] [--format text|json]"""

import argparse
import json
import sys

from timesheet import report
from timesheet.parse import BadLine, is_date, parse


def day(text):
    if not is_date(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no date")
    return text


def arguments():
    parser = argparse.ArgumentParser(prog="timesheet")
    parser.add_argument("command", choices=["report", "tags"])
    parser.add_argument("file")
    parser.add_argument("--since", type=day, default="0001-01-01")
    parser.add_argument("--until", type=day, default="9999-12-31")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    return parser.parse_args()


def main():
    options = arguments()
    with open(options.file) as stream:
        try:
            entries = parse(stream.read().split("\n"))
        except BadLine as error:
            print(f"{options.file}:{error.number}: not an entry", file=sys.stderr)
            return 1
    entries = [entry for entry in entries if options.since <= entry.date <= options.until]
    tags = options.command == "tags"
    totals = report.by_tag(entries) if tags else report.by_project(entries)
    total = sum(totals.values())
    if options.format == "json":
        print(json.dumps({"tags": totals} if tags else {"projects": totals, "total": total}))
        return 0
    for line in report.lines(totals) + ([] if tags else [f"total {report.hours(total)}"]):
        print(line)
    return 0


sys.exit(main())
PY
