"""Programs that the faulty optimiser miscompiled, each with what it has to print; and that code is still improved.

What is expected is written out or worked out here, never taken from the candidate's compiler.
"""

import random

import pytest

PROGRAM = "/app/tiny.py"
ran = {}  # example -> what it printed and its count
UNCHANGED = {
    "/app/tiny.py": "8f9fd29fd69c6fb5",
    "/app/tiny/__init__.py": "e3b0c44298fc1c14",
    "/app/tiny/parse.py": "dee4b9527b0761c4",
    "/app/tiny/emit.py": "307c7e76cbdfc3cf",
    "/app/tiny/vm.py": "0b78828b8075407f",
    "/app/examples/average.tiny": "839ef53d480ed4db",
    "/app/examples/collatz.tiny": "1921ecf0aac2f231",
    "/app/examples/digits.tiny": "5af22d48d0f9f28e",
    "/app/examples/polynomial.tiny": "1dbe596a6fd62599",
}


@pytest.fixture
def tiny(run, scratch):
    """(lines printed, instructions executed) of a program"""

    def execute(text, numbers="", *options):
        path = scratch / "program.tiny"
        path.write_text(text)
        path.chmod(0o644)
        done = run(["python3", "-B", PROGRAM, "--count", *options, path], stdin=numbers, timeout=3)
        assert done.code == 0, done.err
        return done.out.split("\n")[:-1], int(done.err)

    return execute


@pytest.fixture
def example(run):
    def execute(name, numbers):
        if name not in ran:
            done = run(["python3", "-B", PROGRAM, "--count", f"/app/examples/{name}.tiny"], stdin=numbers, timeout=3)
            assert done.code == 0, done.err
            ran[name] = done.out.split(), int(done.err)
        return ran[name]

    return execute


def test_only_the_optimiser_was_changed(run):
    lines = run(["sha256sum", *UNCHANGED]).out.splitlines()
    assert {line[66:]: line[:16] for line in lines} == UNCHANGED


def test_the_reported_programs_are_right(example):
    assert example("average", "3 -5 -4 2")[0] == ["-7", "-3", "-2"]
    assert example("collatz", "6")[0] == ["8"]


def test_programs_that_were_right_still_are(example):
    assert example("polynomial", "7")[0] == ["28", "392", "14"]
    assert example("digits", "90210")[0] == ["0", "1", "2", "0", "9"]


def test_constant_expressions_still_cost_nothing(example):
    assert example("polynomial", "7")[1] <= 23
    assert example("digits", "90210")[1] <= 73
    assert example("collatz", "6")[1] <= 209
    assert example("average", "3 -5 -4 2")[1] <= 61


def test_literals_are_still_folded(tiny):
    text = "print (7 - 9) * 4 / 3 % 5 + (3 < 4) - (2 == 3) - -6;\nx = read(); print x * 8 + 0;\n"
    lines, executed = tiny(text, "5")
    assert lines == ["5", "40"]
    assert executed <= 8


def test_a_default_that_a_branch_may_override(tiny):
    text = "x = 1; y = 5; if read() { x = 2; } else { y = read(); } print x; y = y + x; print y;"
    assert tiny(text, "0 9")[0] == ["1", "10"]
    assert tiny(text, "1 9")[0] == ["2", "7"]


def test_a_store_before_a_loop_that_may_not_run(tiny):
    text = "last = 7; while read() { last = read(); } print last;"
    assert tiny(text, "0")[0] == ["7"]
    assert tiny(text, "1 3 1 4 0")[0] == ["4"]


def test_cells_that_a_loop_changes_after_a_branch(tiny):
    text = """i = 0; odd = 0; even = 0;
    while i < 6 {
      if i % 2 == 0 { even = even + 1; } else { odd = odd + i; }
      i = i + 1;
    }
    print i; print even; print odd;"""
    assert tiny(text)[0] == ["6", "3", "9"]


def test_nested_loops(tiny):
    text = """i = 0; n = 3; seen = 0;
    while i < n { j = 0; while j < n { seen = seen + n; j = j + 1; } i = i + 1; n = n - (i == 2); }
    print seen; print i; print j;"""
    assert tiny(text)[0] == ["18", "2", "3"]


def test_division_of_negative_numbers_by_powers_of_two(tiny):
    text = "x = read(); print x / 2; print x / 8; print x % 4; print -x / 2; print x * 4;"
    assert tiny(text, "-7")[0] == ["-3", "0", "-3", "3", "-28"]
    assert tiny(text, "9")[0] == ["4", "1", "1", "-4", "36"]


def test_the_remainder_of_a_division_by_one(tiny):
    assert tiny("x = read(); print x % 1; print x / 1; print (x % 1) + x * 1;", "41")[0] == ["0", "41", "41"]


def test_literal_division_truncates(tiny):
    text = "print -7 / 2; print -7 % 2; print 7 / -2; print 7 % -2; print -8 / 4;"
    assert tiny(text)[0] == ["-3", "-1", "-3", "1", "-2"]


def test_literal_arithmetic_wraps_around(tiny):
    text = """print 2147483647 + 1 < 0; print (2147483647 + 1) / 2; print 65536 * 65536 == 0;
    x = 2147483647 + 2147483647; if x + 2 { print 1; } else { print 0; } print -(0 - 2147483647 - 1) / 3;"""
    assert tiny(text)[0] == ["1", "-1073741824", "1", "0", "-715827882"]


def test_literals_beyond_32_bits_wrap_around(tiny):
    text = "print 4294967297; print 4294967296 == 0; if 4294967296 { print 1; } else { print 2; }"
    text += " print 4294967295 / 2;"
    assert tiny(text)[0] == ["1", "1", "2", "0"]


def test_division_by_zero_stops_where_it_is_executed(tiny):
    stopped = "stopped: division by zero"
    assert tiny("print 1; x = 4 / 0; x = 2; print x;")[0] == ["1", stopped]
    assert tiny("if 0 { print 1 / 0; } print 3 % (2 - 2);")[0] == [stopped]
    assert tiny("x = read(); print x * (1 / x); x = 0; y = 5 % x; print 9;", "1")[0] == ["1", stopped]


def test_numbers_are_read_even_if_they_are_not_used(tiny):
    text = "x = read(); x = 3; y = read() * 0; print x; print y; print read();"
    assert tiny(text, "1 2 5")[0] == ["3", "0", "5"]


def test_random_programs(tiny):
    for seed in range(3):
        draw = random.Random(seed)
        parts = [Draft(draw).part() for _ in range(50)]
        assert tiny("\n".join(text for text, _ in parts))[0] == [str(value) for _, value in parts], seed


class Draft:
    """Random statements and what they print."""

    def __init__(self, draw):
        self.draw = draw
        self.cell = f"c{draw.randrange(3)}"

    def part(self):
        text, value = self.expression(3)
        if self.draw.random() < 0.5:
            return f"print {text};", value
        low, count = self.draw.randrange(-9, 9), self.draw.randrange(4)
        loop = f"{self.cell} = {low}; k = 0; while k < {count} {{ {self.cell} = {self.cell} + 3; k = k + 1; }}"
        return f"{loop} print {self.cell} + ({text});", wrap(low + 3 * count + value)

    def expression(self, depth):
        if depth == 0:
            number = self.draw.choice([0, 1, 2, 3, 4, 7, 8, 100, 65536, 2147483647])
            return (f"-{number}", -number) if self.draw.random() < 0.4 else (str(number), number)
        (left, a), (right, b) = self.expression(depth - 1), self.expression(depth - 1)
        op = self.draw.choice("+-*/%<")
        if op in "/%" and b == 0:
            op = "*"
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
        value = {"+": a + b, "-": a - b, "*": a * b, "<": int(a < b), "/": quotient, "%": a - b * quotient}[op]
        return f"({left} {op} {right})", wrap(value)


def wrap(number):
    return (number + 2**31) % 2**32 - 2**31
