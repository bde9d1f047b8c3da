#!/bin/bash
set -e
cat > /app/changelog.py <<'PY'
import re
import sys

MINOR = ("Added", "Changed", "Deprecated")


def marked(lines):
    """(line, whether it counts) outside and inside of fenced code."""
    fenced = False
    for line in lines:
        fence = line.startswith("```")
        yield line, not (fenced or fence)
        fenced ^= fence


def parse(lines):
    """(first and last+1 line of Unreleased, [[start, section, entries]], latest version or None)."""
    begin = end = version = None
    sections = []
    for number, (line, counts) in enumerate(marked(lines)):
        if not counts:
            continue
        if line.startswith("## "):
            if begin is not None and end is None:
                end = number
            if line.startswith("## [Unreleased]"):
                begin = number + 1
            found = re.match(r"## \[(\d+)\.(\d+)\.(\d+)\]", line)
            if found and version is None:
                version = tuple(map(int, found.groups()))
        elif begin is not None and end is None:
            if line.startswith("### "):
                sections.append([number, line[4:].strip(), []])
            elif line.startswith("- ") and sections:
                sections[-1][2].append(line[2:].strip())
    return begin, len(lines) if end is None else end, sections, version


def following(sections, version):
    entries = [(name, text) for _, name, texts in sections for text in texts]
    if not entries:
        return None
    if version is None:
        return "0.1.0"
    major, minor, patch = version
    if any(name == "Removed" or text.startswith("BREAKING") for name, text in entries):
        level = 0
    else:
        level = 1 if any(name in MINOR for name, _ in entries) else 2
    if major == 0:
        level = min(2, level + 1)
    raised = [(major + 1, 0, 0), (major, minor + 1, 0), (major, minor, patch + 1)][level]
    return ".".join(map(str, raised))


def release(lines, begin, end, sections, heading):
    """The new lines: empty sections out, the heading in."""
    starts = [start for start, _, _ in sections] + [end]
    body = lines[begin : starts[0]]
    for (start, _, _), stop in zip(sections, starts[1:]):
        if any(line.strip() for line in lines[start + 1 : stop]):
            body += lines[start:stop]
    return [*lines[:begin], "\n", heading + "\n", *body, *lines[end:]]


def main(command, path, date=""):
    with open(path, newline="") as stream:
        lines = stream.read().splitlines(keepends=True)
    begin, end, sections, version = parse(lines)
    new = following(sections, version)
    if new is None:
        print("nothing to release", file=sys.stderr)
        return 3
    if command == "release":
        with open(path, "w", newline="") as stream:
            stream.writelines(release(lines, begin, end, sections, f"## [{new}] - {date}"))
    print(new)
    return 0


sys.exit(main(*sys.argv[1:]))
PY
