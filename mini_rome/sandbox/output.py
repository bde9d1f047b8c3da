"""From the bytes a command wrote to the text the model sees: decoded, escaped, cut to head and tail, error wording.

Pure functions, the same for both backends. Bad UTF-8 becomes U+FFFD, control characters but newline and tab become
visible escapes, and the cut says how much of how much, in bytes as written.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\u202a-\u202e\u2066-\u2069]")


def escape(data: bytes) -> str:
    r"""Bytes -> printable text.

    >>> escape(b"a\tb\n\x1b[2J\xff\x00")
    'a\tb\n\\x1b[2J�\\x00'
    """
    return _CONTROL.sub(_visible, data.decode("utf-8", "replace"))


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code == 0x0D:
        return "\\r"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shape(head: bytes, tail: bytes, total: int, shown: int) -> tuple[str, bool]:
    """(text for the model, whether something is missing from it).

    `head` and `tail` are what was kept of `total` bytes: all of it in `head` when nothing was dropped. The text of
    either half takes at most `shown` / 2 bytes of UTF-8, escapes included.

    >>> shape(b"abcdefgh", b"", 8, 8)
    ('abcdefgh', False)
    >>> shape(b"abcdefghi", b"", 9, 8)
    ('abcd\\n[... 1 of 9 bytes not shown ...]\\nfghi', True)
    """
    if total == len(head) and not tail:
        text = escape(head) if len(head) <= shown else ""
        if len(head) <= shown and len(text.encode()) <= shown:
            return text, False
        tail = head
    first, used_head = _fit(head, shown // 2, from_end=False)
    last, used_tail = _fit(tail or head, shown // 2, from_end=True)
    marker = f"[... {total - used_head - used_tail} of {total} bytes not shown ...]"
    return f"{first.rstrip(chr(10))}\n{marker}\n{last}", True


def keep_ends(data: bytes, cap: int) -> tuple[bytes, bytes]:
    """(head, tail): all of it and nothing, or its two ends of half the cap each."""
    return (data, b"") if len(data) <= cap else (data[: cap - cap // 2], data[len(data) - cap // 2 :])


def _fit(data: bytes, budget: int, from_end: bool) -> tuple[str, int]:
    """Longest prefix (or suffix) of `data` whose text fits the budget: (text, bytes of data used)."""
    low, high = 0, min(len(data), budget)
    best = ("", 0)
    while low <= high:
        size = (low + high) // 2
        used = _boundary(data, size, from_end)
        text = escape(data[len(data) - used :] if from_end else data[:used])
        if len(text.encode()) <= budget:
            best = max(best, (text, used), key=lambda pair: pair[1])
            low = size + 1
        else:
            high = size - 1
    return best


def _boundary(data: bytes, size: int, from_end: bool) -> int:
    """`size`, less up to three bytes so as not to cut a UTF-8 sequence."""
    for less in range(min(3, size) + 1):
        used = size - less
        edge = len(data) - used if from_end else used
        if edge >= len(data) or data[edge] & 0xC0 != 0x80:
            return used
    return size


# What shellsim says -> what bash and GNU say. (pattern over one line, replacement), applied to the simulated shell.
_MISSING = "No such file or directory"
_REASON = rf"({_MISSING}|Is a directory|Not a directory)"
_SIM_WORDING: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.M), text)
    for pattern, text in (
        (rf"^(head|tail): (.*?): {_MISSING}(?:: \S*)?$", rf"\1: cannot open '\2' for reading: {_MISSING}"),
        (r"^(head|tail): (.*?): Is a directory(?:: \S*)?$", r"\1: error reading '\2': Is a directory"),
        (rf"^sort: (?!cannot)(.*?): {_MISSING}(?:: \S*)?$", rf"sort: cannot read: \1: {_MISSING}"),
        (r"^sort: (.*?): Is a directory: \S*$", r"sort: read failed: \1: Is a directory"),
        (rf"^rev: (?!cannot)(.*?): {_MISSING}(?:: \S*)?$", rf"rev: cannot open \1: {_MISSING}"),
        (r"^rev: (.*?): Is a directory: \S*$", r"rev: \1: 0: Is a directory"),
        (rf"^sed: can't read (?:can't read )?(.*?): {_MISSING}(?:: \S*)?$", rf"sed: can't read \1: {_MISSING}"),
        (rf"^sed: (?!can't|couldn't)(.*?): {_MISSING}(?:: \S*)?$", rf"sed: can't read \1: {_MISSING}"),
        (r"^sed: (.*?): Is a directory: \S*$", r"sed: read error on \1: Is a directory"),
        (rf"^(cp|mv): cannot (?:copy|move) '(.*)': {_MISSING}: \S*$", rf"\1: cannot stat '\2': {_MISSING}"),
        (r"^cp: cannot copy '(.*)': Is a directory: \S*$", r"cp: -r not specified; omitting directory '\1'"),
        (r"^mkdir: cannot create directory '(.*)': (.*?)(?:: /\S*)?$", r"mkdir: cannot create directory ‘\1’: \2"),
        (rf"^find: '(.*)': {_MISSING}$", rf"find: ‘\1’: {_MISSING}"),
        (rf"^chmod: {_MISSING}: (\S*)$", rf"chmod: cannot access '\1': {_MISSING}"),
        (rf"^touch: {_MISSING}: (\S*)$", rf"touch: cannot touch '\1': {_MISSING}"),
        (rf"^(\w+: .*): {_REASON}: \S*$", r"\1: \2"),
        (rf"^shellsim: redirection: (.*?): {_MISSING}(?:: \S*)?$", rf"bash: line 1: \1: {_MISSING}"),
        (r"^shellsim: redirection: (.*?): Is a directory(?:: \S*)?$", r"bash: line 1: \1: Is a directory"),
        (r"^cd: (.*): (No such file or directory|Not a directory)$", r"bash: line 1: cd: \1: \2"),
        (r"^(?!bash: )(\S*/\S*): command not found$", rf"bash: line 1: \1: {_MISSING}"),
        (r"^(?!bash: )(\S+): command not found$", r"bash: line 1: \1: command not found"),
        (r"^(\S*/\S*): /\S*: permission denied$", r"bash: line 1: \1: Permission denied"),
        (r"^shellsim: syntax error: unclosed (.) quote$",
         r"bash: line 1: unexpected EOF while looking for matching `\1'"),
        (r"^shellsim: syntax error: unexpected end of file.*$", "bash: line 1: syntax error: unexpected end of file"),
        (r"^shellsim: ", "bash: line 1: "),
    )
)
_NAMELESS = re.compile(r"^(\w+): WrongAccess$", re.M)  # what shellsim says of a directory read as a file
_BASH_WORDING = ((re.compile(rb"^bash: (?:eval|-c): line ", re.M), b"bash: line "),)


def canonical_sim(output: bytes, command: str = "", cwd: str = "") -> bytes:
    """The simulated shell's error lines in the wording of bash and GNU tools; other lines stay as they are.

    `command` and `cwd` tell which relative name stands behind an absolute one, and which name was left out.
    """
    if b": " not in output:
        return output
    text = _NAMELESS.sub(lambda match: _named(match[1], command), output.decode("utf-8", "surrogateescape"))
    for pattern, replacement in _SIM_WORDING:
        text = pattern.sub(replacement, text)
    if cwd and f"{cwd.rstrip('/')}/" not in command:
        here = re.escape(cwd.rstrip("/") + "/")
        named = rf"^((?:bash: line 1|chmod|touch): (?:\w+ \w+ ')?){here}(.*: {_REASON})$"
        text = re.sub(named, r"\1\2", text, flags=re.M)
    return text.encode("utf-8", "surrogateescape")


def _named(tool: str, command: str) -> str:
    """`cat: WrongAccess` -> `cat: d: Is a directory`, with the tool's only argument where there is one."""
    found = re.search(rf"\b{tool}((?:\s+-\S+|\s+\d+)*)\s+([^\s;|&<>-][^\s;|&<>]*)\s*(?:$|[;|&<>])", command)
    return f"{tool}: {found[2] if found else '-'}: Is a directory"


def canonical_bash(output: bytes) -> bytes:
    """Bash's error lines without the trace of how the command was handed to it."""
    if b"bash: " not in output:
        return output
    for pattern, replacement in _BASH_WORDING:
        output = pattern.sub(replacement, output)
    return output
