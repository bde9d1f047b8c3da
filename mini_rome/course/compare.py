"""Whether an output is the expected one, with tolerances relative to the values, and the first place where not."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

LARGEST = sys.float_info.max  # an integer beyond it has no difference from a float: that overflows
ZERO = 1e-9  # of the largest expected number: how far from an expected 0 a number may be


def difference(got: Any, want: Any, rtol: float) -> str:
    """Empty when equal; else where and how they differ. Both are plain data: lists, dicts, numbers, text, None.

    A number may differ by rtol of its own expected value; nothing is compared to a fixed tolerance, so outputs that
    are all zero or all small are as wrong as large ones. True is no 1; where an integer is asked for, 1.0 is no 1.

    >>> difference([1.0, 2e-9], [1.0, 1e-9], 1e-6)
    'at [1]: 2e-09 instead of 1e-09'
    >>> difference([1, 2], [1, 2], 1e-6)
    ''
    """
    scale = max((abs(number) for number in numbers(want) if math.isfinite(number)), default=0.0)
    return next(differences(got, want, rtol, ZERO * scale, ""), "")


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested data."""
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def differences(got: Any, want: Any, rtol: float, near_zero: float, path: str) -> Iterator[str]:
    place = f"at {path}: " if path else ""
    if isinstance(want, list):
        if not isinstance(got, list):
            yield f"{place}{show(got)} instead of a list of {len(want)}"
        elif len(got) != len(want):
            yield f"{place}{len(got)} items instead of {len(want)}"
        else:
            for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
                yield from differences(mine, theirs, rtol, near_zero, f"{path}[{index}]")
    elif isinstance(want, dict):
        if not isinstance(got, dict) or got.keys() != want.keys():
            yield f"{place}{show(sorted(got) if isinstance(got, dict) else got)} instead of keys {show(sorted(want))}"
        else:
            for key in want:
                yield from differences(got[key], want[key], rtol, near_zero, f"{path}[{key!r}]")
    elif not same(got, want, rtol, near_zero):
        yield f"{place}{show(got)} instead of {show(want)}"


def same(got: Any, want: Any, rtol: float, near_zero: float) -> bool:
    """Two leaves."""
    if isinstance(want, float) and isinstance(got, int | float) and not isinstance(got, bool):
        if not math.isfinite(want):
            return got == want or (want != want and got != got)
        return abs(got) <= LARGEST and abs(got - want) <= (rtol * abs(want) or near_zero)
    return type(got) is type(want) and got == want


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
