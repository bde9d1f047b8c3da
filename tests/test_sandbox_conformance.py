"""The conformance suite over both backends: the surface in one pass, and which cases of the list apply where.

Every case id has tests named after it in tests/test_sandbox_cases_*.py. A test that takes `box` or `backend` runs on
both backends, one that makes a sim box on that; NOT_ON_SIM lists the ids that have neither, each with the reason.
"""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

import pytest
from boxes import usable

from mini_rome.errors import SandboxClosed, SandboxError
from mini_rome.sandbox import Pool, Sandbox, files_of_tar, initial_snapshot, make
from mini_rome.sandbox.output import canonical_bash, canonical_sim, shape

pytest_plugins = ("box_fixtures",)

IDS = (
    "T01 T03 T04 T06 O01 O02 O04 O05 O06 I01 I02 I03 I05 I07 I08 I10 B01 R01 R02 R04 R06 C01 C02 C03 C04 C06 C08 C09 "
    "L01 L02 L04 L05 L06 L08 P01 P02 F01 F03 F04 F05 S01 S02 S04 N01 N02 N04 N06 V01 V02 V03 V05 V07 V08 V09 V10 V11 "
    "D01 D02 X01 X02"
).split()
NOT_ON_SIM = {
    "T03": "no daemons: nothing runs on after its step",
    "O02": "its printf writes characters, not bytes; the shaping itself is tested on bytes without a box",
    "O04": "a line of 50 MB costs it minutes of simulated CPU; it is cut at the cap like any flood (O01)",
    "R01": "no process limit: it schedules functions itself, in one thread",
    "R02": "it counts the bytes of a variable as output before they are too much memory",
    "R04": "dd and /dev/zero are bounded by its own limits, of which output comes first",
    "R06": "no PID 1, no log",
    "C01": "no engine", "C02": "no image", "C03": "no container to kill", "C04": "no container to pause",
    "C06": "no engine", "C08": "no stream", "C09": "no container to start",
    "L01": "no container", "L02": "no container", "L04": "no container", "L06": "no signals, no PID 1",
    "L08": "no image, volume or network",
    "P02": "boxes are objects of one process",
    "F03": "its read limit and disk are memory of this process; 50 MB are left to docker",
    "S01": "no process and no environment of the host: X02 shows that the host is out of reach",
    "S02": "no kernel",
    "N01": "no sockets", "N02": "no sockets", "N04": "no process table",
    "V02": "no binaries", "V05": "no background process", "V08": "no box: a reward file is judged on the host",
    "V10": "no test files: families are checked on the host", "X01": "about the choice of the backend",
}
TESTS = Path(__file__).parent


def _cases() -> dict[str, list[bool]]:
    """{case id: for each of its tests, whether it runs on sim}."""
    found: dict[str, list[bool]] = {}
    for path in sorted(TESTS.glob("test_sandbox_cases_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            match = re.match(r"test_case_([A-Z]\d\d)_", node.name) if isinstance(node, ast.FunctionDef) else None
            if match and isinstance(node, ast.FunctionDef):
                takes = {argument.arg for argument in node.args.args}
                source = ast.get_source_segment(text, node) or ""
                found.setdefault(match[1], []).append(bool(takes & {"box", "backend"}) or 'make("sim"' in source)
    return found


def test_every_case_has_tests_and_the_exceptions_are_exactly_listed() -> None:
    cases = _cases()
    assert len(IDS) == len(set(IDS)) == 60
    assert set(IDS) - set(cases) == set() and set(cases) - set(IDS) == set()
    docker_only = {case for case, on_sim in cases.items() if not any(on_sim)}
    assert docker_only == set(NOT_ON_SIM) and len(NOT_ON_SIM) == 31


def test_the_surface_in_one_pass(backend: str) -> None:
    with make(backend, task_name="pass") as box:
        assert box.alive and box.backend == backend and box.name and box.image
        box.restore(initial_snapshot({"in": "hello\n"}))
        result = box.exec("rev in > out; cat out; echo err >&2; cd /tmp; export K=v; false")
        assert (result.output, result.exit_code, result.status) == ("olleh\nerr\n", 1, "ok")
        assert result.wall_s > 0 and not result.truncated and result.supported and not result.infra
        assert (box.cwd, box.env, box.steps) == ("/tmp", {"K": "v"}, 1)
        snapshot = box.snapshot()
        assert files_of_tar(snapshot.tar) == {"in": b"hello\n", "out": b"olleh\n"}
        box.write("out", "changed")
        assert box.read("out") == b"changed" and box.sweep() == 0
        box.restore(snapshot)
        assert box.read("/app/out") == b"olleh\n" and box.exec("echo $K; pwd").output == "v\n/tmp\n"
        box.reset()
        assert (box.cwd, box.env, box.steps) == ("/app", {}, 0)
        assert files_of_tar(box.snapshot().tar) == {} and usable(box)
    assert not box.alive
    for call in (lambda: box.exec("echo"), box.snapshot, box.sweep, box.reset, lambda: box.read("x")):
        with pytest.raises(SandboxClosed):
            call()
    box.close()


def test_an_observer_sees_every_step_before_its_result(backend: str) -> None:
    with make(backend) as box:
        seen: list[tuple[str, str]] = []
        box.observer = lambda command, result, telemetry: seen.append((command, result.output)) or ()  # type: ignore
        box.exec("echo one")
        assert seen == [("echo one", "one\n")]


def test_many_boxes_run_at_once(backend: str) -> None:
    outputs: dict[int, str] = {}
    with Pool(backend, size=4) as pool:

        def episode(number: int) -> None:
            with pool.box() as box:
                box.restore(initial_snapshot({"n": f"{number}\n"}))
                outputs[number] = box.exec("cat n n | rev").output

        threads = [threading.Thread(target=episode, args=(number,)) for number in range(10, 26)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.made <= 4
    assert outputs == {number: f"{str(number)[::-1]}\n" * 2 for number in range(10, 26)}


def test_a_broken_box_never_goes_back_to_the_pool() -> None:
    with Pool("sim", size=1) as pool:
        box = pool.take()

        def broken() -> None:
            raise SandboxError("cannot be made clean")

        box._reset = broken  # type: ignore[method-assign]
        pool.give(box)
        assert not box.alive and pool.replaced == 1
        other: Sandbox = pool.take()
        assert other is not box and usable(other)


@pytest.mark.parametrize(
    ("said", "canonical"),
    [
        (b"cat: x: No such file or directory: /app/x\n", b"cat: x: No such file or directory\n"),
        (b"head: a b: No such file or directory: /app/a b\n", None),
        (b"foo: command not found\n", b"bash: line 1: foo: command not found\n"),
        (b"cd: x: No such file or directory\n", b"bash: line 1: cd: x: No such file or directory\n"),
        (b"a line: of a file\n", b"a line: of a file\n"),
        (b"\xff\xfe: \x00\n", b"\xff\xfe: \x00\n"),
    ],
)
def test_wording_of_errors_is_canonical(said: bytes, canonical: bytes | None) -> None:
    if canonical is not None:
        assert canonical_sim(said) == canonical
    assert canonical_sim(canonical_sim(said)) == canonical_sim(said)


def test_bash_wording_loses_only_how_it_was_called() -> None:
    assert canonical_bash(b"bash: eval: line 1: syntax error\n") == b"bash: line 1: syntax error\n"
    assert canonical_bash(b"x: bash: eval: line 1: y\n") == b"x: bash: eval: line 1: y\n"


@pytest.mark.parametrize("unit", ["a", "é", "日", "\x00", "\x1b", "\udcff", "a\n", "😀é"])
@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5000])
def test_shaped_output_fits_and_counts(unit: str, size: int) -> None:
    data = (unit * size).encode("utf-8", "surrogateescape")
    text, cut = shape(data, b"", len(data), 100)
    assert len(text.encode()) <= 100 + 60
    if cut:
        missing = int(re.search(r"\[\.\.\. (\d+) of (\d+) bytes not shown", text)[1])  # type: ignore[index]
        assert 0 < missing <= len(data)
    else:
        assert text.count("�") == (size if unit == "\udcff" else 0)


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ("mv s/x s", "mv: 's/x' and 's/x' are the same file"),
        ("cp s/x s/", "cp: 's/x' and 's/x' are the same file"),
        ("mv x .", "mv: 'x' and './x' are the same file"),
        ("cp ./x x", "cp: './x' and 'x' are the same file"),
        ("mv x s/../x", "mv: 'x' and 's/../x' are the same file"),
        ("mv s .", "mv: 's' and './s' are the same file"),
        ("mv s s", "mv: cannot move 's' to a subdirectory of itself, 's/s'"),
        ("mv s s/new", "mv: cannot move 's' to a subdirectory of itself, 's/new'"),
        ("mv s q/r", "mv: cannot move 's' to 'q/r': No such file or directory"),
        ("cp x q/r", "cp: cannot create regular file 'q/r': No such file or directory"),
    ],
)
def test_what_mv_and_cp_refuse_leaves_everything_in_place(box: Sandbox, command: str, refusal: str) -> None:
    before = initial_snapshot({"x": "1\n", "s/x": "2\n"})
    box.restore(before)
    result = box.exec(command)
    assert (result.exit_code, result.output) == (1, f"{refusal}\n")
    assert box.snapshot().tree_hash == before.tree_hash


def test_mv_of_a_folder_takes_a_new_name_with_or_without_its_slash(box: Sandbox) -> None:
    for command in ("mv s new", "mv s/ new/", "mkdir q && mv s q && mv q/s q/t && mv q/t new"):
        box.restore(initial_snapshot({"s/x": "2\n"}))
        result = box.exec(f"{command}; cat new/x")
        assert (result.exit_code, result.output) == (0, "2\n"), command
