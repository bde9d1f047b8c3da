"""Exported variables of a box's shell, read as data: nothing that an agent wrote is ever evaluated."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

_EXPORT = re.compile(rb'^declare -[A-Za-z]*x[A-Za-z]* (\w+)=("(?:[^"\\]|\\.)*"|\$\'(?:[^\'\\]|\\.)*\')$', re.M | re.S)
_ANSI = re.compile(rb"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|(.))", re.S)
_LETTERS = dict(zip([b"a", b"b", b"e", b"E", b"f", b"n", b"r", b"t", b"v"],
                    [b"\a", b"\b", b"\x1b", b"\x1b", b"\f", b"\n", b"\r", b"\t", b"\v"], strict=True))


@functools.lru_cache(maxsize=64)  # most steps change none
def parse_exports(text: bytes) -> Mapping[str, str]:
    r"""The output of bash's `export -p`, read as data and never evaluated.

    >>> parse_exports(b'declare -x A="x \\"y\\" \\$z"\ndeclare -x B=$\'a\\nb\'\ndeclare -x C\n')
    {'A': 'x "y" $z', 'B': 'a\nb'}
    """
    found = {}
    for name, quoted in _EXPORT.findall(text):
        if quoted.startswith(b"$"):
            value = _ANSI.sub(_ansi, quoted[2:-1])
        else:
            value = re.sub(rb'\\([$`"\\\n])', rb"\1", quoted[1:-1])
        found[name.decode()] = value.decode("utf-8", "surrogateescape")
    return found


def _ansi(match: re.Match[bytes]) -> bytes:
    hexadecimal, octal, letter = match.groups()
    if hexadecimal or octal:
        return bytes([(int(hexadecimal, 16) if hexadecimal else int(octal, 8)) & 0xFF])
    return _LETTERS.get(letter, letter)
