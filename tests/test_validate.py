"""Proofs of tasks: a sound task proves, and each kind of unsound one fails the proof that is about it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mini_rome.errors import ConfigError
from mini_rome.families import FAMILIES
from mini_rome.families.notes import Notes
from mini_rome.sandbox import Pool, initial_snapshot
from mini_rome.tasks import prove
from mini_rome.tasks.choice import SHIPPED
from mini_rome.tasks.harbor import TaskFolder, load
from mini_rome.tasks.skeleton import CANARY, new_task
from mini_rome.tasks.validate import (
    TAMPERS,
    Proof,
    Proved,
    _agree,
    _inputs_stay,
    _wrong,
    names_what_it_checks,
    no_leak,
    prove_folder,
)
from mini_rome.tasks.validate_families import Played, Watched, differing, expert_responses, prove_family
from mini_rome.types import Snapshot, Task, Verdict

WORD_COUNT = Path(__file__).parent / "data" / "tasks" / "word-count"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(WORD_COUNT, tmp_path / "task")
    return tmp_path / "task"


def with_tests(folder: Path, text: str, instruction: str) -> TaskFolder:
    (folder / "tests" / "test_outputs.py").write_text(text)
    (folder / "instruction.md").write_text(instruction)
    return load(folder)


CHECKED = {
    "by its path": ('read("/app/out/a.csv")', "Write /app/out/a.csv.", True),
    "by its name": ('read("/app/out/a.csv")', "Write a.csv.", True),
    "by the folder above": ('read("/app/out/a.csv")', "Write into out/ as you like.", True),
    "not at all": ('read("/app/out/a.csv")', "Write a table.", False),
    "joined to a named root": ('APP = Path("/app")\nopen(APP / "b.txt")', "Write a table.", False),
    "in an f-string": ('read(f"/app/{name}"); read("/app/c.txt")', "Write c.txt.", True),
}


@pytest.mark.parametrize("case", CHECKED)
def test_the_instruction_must_name_what_a_check_spells(folder: Path, case: str) -> None:
    text, instruction, holds = CHECKED[case]
    (folder / "tests" / "test.sh").write_text("true")
    proof = names_what_it_checks(with_tests(folder, text, instruction), initial_snapshot({}), initial_snapshot({}))
    assert proof.holds is holds, proof


def test_a_file_that_the_solution_makes_and_a_check_names_without_its_folder_counts(folder: Path) -> None:
    (folder / "tests" / "test.sh").write_text("true")
    task = with_tests(folder, 'run(["python3", "tool.py"])', "Make it.")
    assert names_what_it_checks(task, initial_snapshot({}), initial_snapshot({"tool.py": "x"})).holds is False


LEAKS = {
    "a test": lambda task: {"notes.txt": task.tests["test.sh"]},
    "a solution": lambda task: {"a/b": b"x" + (task.folder / "solution" / "solve.sh").read_bytes()},
    "the answer": lambda task: {"old/backup.sh": b"#!/bin/bash\necho this is the answer\n"},
}


@pytest.mark.parametrize("leak", LEAKS)
def test_nothing_under_app_may_hold_an_answer(leak: str) -> None:
    task = load(WORD_COUNT)
    left = initial_snapshot({"count.sh": "#!/bin/bash\necho this is the answer\n"})
    clean = initial_snapshot({"data.txt": "one two three\n"})
    assert no_leak(task, clean, left, ["/app", "/app/data.txt", "/usr/lib/python3/tests/x"]).holds
    proof = no_leak(task, initial_snapshot(LEAKS[leak](task)), left, [])
    assert proof.holds is False and "holds a test, a solution or an answer" in proof.reason


@pytest.mark.parametrize(
    "path", ["/tests/test.sh", "/solution", "/logs/verifier", "/opt/test_outputs.py", "/a/solve.sh"]
)
def test_nothing_in_the_box_may_be_named_as_tests_and_solutions_are(path: str) -> None:
    empty = initial_snapshot({})
    assert no_leak(load(WORD_COUNT), empty, empty, [path]).holds is False


def inputs(left: dict[str, str]) -> Proof:
    task = replace(load(WORD_COUNT), metadata={"inputs": ["data", "a.txt"]})
    start = initial_snapshot({"data/x": "1", "a.txt": "2", "free": "3"})
    return _inputs_stay(task, start, initial_snapshot(left))


def test_an_input_that_is_changed_or_gone_is_found_and_other_files_are_free() -> None:
    assert inputs({"data/x": "1", "a.txt": "2", "out": "9", "free": "changed"}).holds
    assert "data/x" in inputs({"data/x": "9", "a.txt": "2"}).reason
    assert "a.txt" in inputs({"data/x": "1"}).reason
    unknown = replace(load(WORD_COUNT), metadata={"inputs": ["nosuch"]})
    assert _inputs_stay(unknown, initial_snapshot({}), initial_snapshot({})).holds is False
    assert _inputs_stay(load(WORD_COUNT), initial_snapshot({}), initial_snapshot({})).holds is None


@pytest.mark.parametrize(
    ("reward", "passed", "holds"),
    [(0.0, 4, True), (0.0, 7, True), (0.0, 3, False), (1.0, 8, False), (None, 8, False)],
)
def test_a_wrong_solution_passes_half_of_the_checks_and_earns_0(
    reward: float | None, passed: int, holds: bool
) -> None:
    verdict = Verdict(reward, numbers={"passed": passed, "checks": 8})
    assert _wrong("wrong_1.sh", verdict).holds is holds
    assert _wrong("wrong_1.sh", None).holds is None


def test_repeats_that_differ_in_reward_or_counts_do_not_agree() -> None:
    one, other = Verdict(1.0, numbers={"passed": 8}), Verdict(1.0, numbers={"passed": 7})
    assert _agree([one, one]).holds and not _agree([one, other]).holds
    assert not _agree([one, Verdict(0.0, numbers={"passed": 8})]).holds


# -- the whole, in containers


def cheap(path: Path) -> Path:
    """A skeleton made sound with one test file of eight checks."""
    folder = new_task("cheap", path)
    check = 'def test_{0}(read):\n    assert read("/app/answer.txt").split()[{0}] == "{0}"\n'
    checks = "\n".join(check.format(number) for number in range(8))
    (folder / "tests" / "test_outputs.py").write_text(checks)
    (folder / "instruction.md").write_text(f"Write 0 to 7 to /app/answer.txt.\n\n<!-- {CANARY} -->\n")
    scripts = {"solve": "0 1 2 3 4 5 6 7", "wrong_1": "0 1 2 3 4 5 6 8", "wrong_2": "0 1 2 3 0 0 0 0"}
    for script, numbers in scripts.items():
        (folder / "solution" / f"{script}.sh").write_text(f"echo {numbers} > /app/answer.txt\n")
    return folder


@pytest.mark.docker
def test_a_sound_folder_proves_and_its_tampered_box_earns_0(tmp_path: Path) -> None:
    found = prove_folder(load(cheap(tmp_path)), repeats=2)
    assert found.failures == [] and found.checks == 8
    assert all(proof.holds for proof in found.proofs)
    assert f"tampering earns 0 ({', '.join(TAMPERS)})" in [proof.name for proof in found.proofs]


@pytest.mark.docker
@pytest.mark.slow
def test_every_tamper_case_by_itself_earns_0_in_a_shipped_task() -> None:
    found = prove_folder(load(SHIPPED / "orders-rollup"), repeats=1, full=True)
    names = [proof.name for proof in found.proofs if proof.holds]
    assert [case for case in ("V01", "V02", "V03", "V05") if f"tampering earns 0 ({case})" in names] == [
        "V01", "V02", "V03", "V05"
    ]  # fmt: skip


@pytest.mark.docker
def test_a_skeleton_fails_with_a_list_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = load(new_task("log-merge", tmp_path))
    assert prove.run_proofs([task], ["log-merge"], "docker", 1, False, 1, False) == 1
    shown = capsys.readouterr().out
    for said in ("log-merge: reference earns 1: FAILS: reward 0.0, passed 0, checks 1", "8 checks or more: FAILS: 1",
                 "wrong_1.sh passes half of the checks", "what is checked: FAILS: not named: answer.txt",
                 "1 of 1 tasks are not proved"):  # fmt: skip
        assert said in shown, said


@pytest.mark.parametrize("name", ["", "Log", "a b", "-a", "a--b", "../a"])
def test_a_new_task_needs_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="task name"):
        new_task(name, tmp_path)


def test_a_new_task_never_writes_over_another(tmp_path: Path) -> None:
    new_task("one", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        new_task("one", tmp_path)
    assert load(tmp_path / "one").notes == ()


# -- families


@pytest.fixture(scope="module")
def sim() -> Pool:
    return Pool("sim", size=2)


def test_families_prove_on_the_simulated_sandbox(sim: Pool) -> None:
    for name in ("notes", "retail"):
        found = prove_family(name, {"sim": sim}, repeats=2, seeds=1)
        assert found.failures == [] and len(found.proofs) == 5


@pytest.mark.docker
def test_a_family_proves_on_both_backends_and_they_agree(sim: Pool) -> None:
    with Pool("docker", size=1) as docker:
        found = prove_family("tickets", {"sim": sim, "docker": docker}, repeats=1, seeds=1)
    assert found.failures == [] and "sim and docker agree" in [proof.name for proof in found.proofs]


class Unsound(Notes):
    """Notes with one thing wrong."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def make(self, seed: int, chunks: int, split: str = "train") -> Task:  # type: ignore[override]
        task = super().make(seed, chunks, split)  # type: ignore[arg-type]
        checks = {
            "expert earns 1": lambda files: Verdict(0.0),
            "doing nothing earns 0": lambda files: Verdict(1.0),
            "one chunk short earns 0": lambda files: Verdict(1.0),
            "what is checked is named or there": lambda files: Verdict(float(files.get("hidden.txt") is None)),
        }
        return replace(task, check=checks[self.wrong])


@pytest.mark.parametrize(
    "wrong",
    ["expert earns 1", "doing nothing earns 0", "one chunk short earns 0", "what is checked is named or there"],
)
def test_each_fault_of_a_family_fails_its_own_proof(sim: Pool, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "unsound", Unsound(wrong))
    found = prove_family("unsound", {"sim": sim}, repeats=1, seeds=1)
    assert wrong in [proof.name for proof in found.failures]
    assert "notes-k1-test-0" in found.failures[0].reason


def test_backends_that_differ_are_told_apart_by_the_first_turn() -> None:
    one = Played(("a", "b"), Verdict(1.0), "t", frozenset())
    other = replace(one, observations=("a", "c"))
    assert differing({"sim": one, "docker": other}) == "turn 1: 'b' | 'c'"
    assert differing({"sim": one, "docker": replace(one, verdict=Verdict(0.0))}) == "sim: 1.0, docker: 0.0"


def test_the_expert_submits_with_its_last_chunk_only() -> None:
    responses = expert_responses(FAMILIES["notes"].make(0, 3))
    assert ["submit" in text for text in responses] == [False, False, True]


def test_a_watched_tree_remembers_what_was_asked_for() -> None:
    files = Watched({"a": b"1", "b": b"2"})
    assert files["a"] == b"1" and files.get("c") is None and len(files) == 2
    assert files.asked == {"a", "c"}


def test_proofs_run_side_by_side_come_back_in_order_with_progress(monkeypatch: pytest.MonkeyPatch, sim: Pool) -> None:
    seen: list[tuple[str, int, int]] = []

    def keep(each: Proved, done: int, total: int) -> None:
        seen.append((each.task, done, total))

    found = prove.prove_all([], ["tickets", "notes"], {"sim": sim}, 1, False, 2, keep)
    assert [each.task for each in found] == ["tickets", "notes"]
    assert [done for _, done, _ in seen] == [1, 2] and {total for *_, total in seen} == {2}


def test_an_unknown_name_is_an_error_that_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="'nosuch' is unknown; choose from notes"):
        prove.run_proofs([], ["nosuch"], "sim", 1, False, 1, False)


def test_a_failed_proof_gives_exit_code_1_and_a_held_one_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proofs = {"notes": Proof("x", True), "tickets": Proof("x", False, "the reason")}
    monkeypatch.setattr(prove, "prove_family", lambda name, *_: Proved(name, "d", [proofs[name]]))
    assert prove.run_proofs([], ["notes"], "sim", 1, False, 1, False) == 0
    assert "all 1 tasks proved" in capsys.readouterr().out
    assert prove.run_proofs([], ["notes", "tickets"], "sim", 1, False, 1, False) == 1
    assert "tickets: x: FAILS: the reason" in capsys.readouterr().out
    assert isinstance(initial_snapshot({}), Snapshot)
