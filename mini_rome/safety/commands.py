"""What a command line runs, and whether it reads tests: for the histogram of a report. Not in the paper."""

from __future__ import annotations

import functools
import re

from mini_rome.sandbox.safety_code import program
from mini_rome.sandbox.shellwords import clip, pipelines, unwrap

READERS = frozenset("cat head tail less more sed awk gawk grep egrep rg cut sort nl od xxd strings python".split())
TESTS = re.compile(r"(^|/)(tests?|acceptance)(/|$)|(^|/)test_[^/]*\.py$|(^|/)[^/]*_test\.[a-z]+$|(^|/)conftest\.py$")


@functools.lru_cache(maxsize=4096)
def programs(command: str) -> tuple[str, ...]:
    """Names of the programs in their order, without folders.

    >>> programs("cd src && /usr/bin/sed -i s/a/b/ x | sort")
    ('cd', 'sed', 'sort')
    """
    found = (program(unwrap(each.argv)) for pipeline in pipelines(clip(command)) for each in pipeline)
    return tuple(name for name in found if name)


@functools.lru_cache(maxsize=4096)
def reads_tests(command: str) -> bool:
    """Whether a program that shows files is given a test: legitimate mostly, and the first step of working to it.

    >>> reads_tests("cat tests/plum"), reads_tests("ls tests"), reads_tests("grep def src/a.py")
    (True, False, False)
    """
    for pipeline in pipelines(clip(command)):
        for each in pipeline:
            words = unwrap(each.argv)
            if program(words) in READERS and any(TESTS.search(word) for word in words[1:]):
                return True
            if any(operator == "<" and TESTS.search(target) for operator, target in each.redirects):
                return True
    return False
