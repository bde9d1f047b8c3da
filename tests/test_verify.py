"""Verdicts: what the agent ruined is 0, what the infrastructure or the verifier failed to do is None."""

import io
import math
import tarfile
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_rome.errors import SandboxDead, SnapshotRefused, VerifierError
from mini_rome.sandbox.tree import initial_snapshot
from mini_rome.types import Snapshot, Task, Verdict
from mini_rome.verify import read_reward, valid_reward, verify_files


def answer_is_42(files: object) -> Verdict:
    good = files.get("answer.txt") == b"42\n"  # type: ignore[attr-defined]
    return Verdict(float(good), "" if good else "answer.txt is missing or wrong")


TASK = Task("t", "f", "d", "write 42 to answer.txt", {"in.txt": "x"}, ("true",), answer_is_42)


class Box:
    """A double of a sandbox that records the order of calls."""

    def __init__(self, snapshot: Snapshot | Exception) -> None:
        self.calls: list[str] = []
        self.outcome = snapshot

    def sweep(self) -> int:
        self.calls.append("sweep")
        return 0

    def snapshot(self) -> Snapshot:
        self.calls.append("snapshot")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def judged(check: object, **options: float) -> Verdict:
    return verify_files(replace(TASK, check=check), initial_snapshot({"answer.txt": "42\n"}), **options)  # type: ignore[arg-type]


def test_processes_are_killed_before_the_snapshot_is_taken() -> None:
    box = Box(initial_snapshot({"answer.txt": "42\n"}))
    assert verify_files(TASK, box).reward == 1.0  # type: ignore[arg-type]
    assert box.calls == ["sweep", "snapshot"]


def test_ruin_by_the_agent_is_zero_with_a_reason() -> None:
    verdict = verify_files(TASK, Box(SnapshotRefused("the work dir holds more than 5000 files")))  # type: ignore[arg-type]
    assert verdict.reward == 0.0
    assert "5000" in verdict.reason


def test_a_dead_box_is_none_never_zero() -> None:
    verdict = verify_files(TASK, Box(SandboxDead("box-1: removed")))  # type: ignore[arg-type]
    assert verdict.reward is None
    assert "box-1" in verdict.reason


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError("deep"), UnicodeDecodeError("utf-8", b"", 0, 1, "bad")]
)
def test_a_check_that_raises_is_none_with_the_cause(error: Exception) -> None:
    def check(files: object) -> Verdict:
        raise error

    verdict = judged(check)
    assert verdict.reward is None
    assert type(error).__name__ in verdict.reason


def test_a_check_that_hangs_is_none_in_time() -> None:
    start = time.monotonic()
    verdict = judged(lambda files: time.sleep(3), check_s=0.1)
    assert time.monotonic() - start < 1
    assert verdict.reward is None
    assert "0.1 s" in verdict.reason


@pytest.mark.parametrize("reward", [math.nan, math.inf, -0.1, 1.01, True, "1", 1 + 0j])
def test_a_check_with_a_bad_reward_is_none(reward: object) -> None:
    assert judged(lambda files: Verdict(reward)).reward is None  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [None, 1.0, {"reward": 1}])
def test_a_check_that_answers_no_verdict_is_none(answer: object) -> None:
    assert judged(lambda files: answer).reward is None


def archive_with(kind: bytes, name: str, target: str = "") -> Snapshot:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        tar.addfile(info)
    return Snapshot(out.getvalue(), "")


@pytest.mark.parametrize(
    ("kind", "name", "target"),
    [
        (tarfile.REGTYPE, "../answer.txt", ""),
        (tarfile.REGTYPE, "/etc/passwd", ""),
        (tarfile.CHRTYPE, "zero", ""),
        (tarfile.FIFOTYPE, "answer.txt", ""),
        (tarfile.LNKTYPE, "answer.txt", "/etc/passwd"),
    ],
)
def test_members_that_no_work_dir_holds_are_the_agents_ruin(kind: bytes, name: str, target: str) -> None:
    assert verify_files(TASK, archive_with(kind, name, target)).reward == 0.0


def test_a_symbolic_link_is_never_followed_on_the_host(tmp_path: object) -> None:
    (tmp_path / "secret").write_text("42\n")  # type: ignore[operator]
    assert verify_files(TASK, archive_with(tarfile.SYMTYPE, "answer.txt", f"{tmp_path}/secret")).reward == 0.0


def test_a_cut_archive_is_an_infrastructure_failure() -> None:
    whole = initial_snapshot({"answer.txt": "42\n" * 10_000}).tar
    assert verify_files(TASK, Snapshot(whole[: len(whole) // 2], "")).reward is None


def test_planted_files_are_listed_as_one_tamper_event() -> None:
    planted = {"answer.txt": "42\n", "conftest.py": "x", "reward.txt": "1", "in.txt": "x"}
    verdict = verify_files(TASK, initial_snapshot(planted))
    assert verdict.reward == 1.0
    assert [(event.kind, event.source) for event in verdict.events] == [("tamper", "file")]
    assert verdict.events[0].evidence == "conftest.py, reward.txt"


GOOD = [
    ({"reward.txt": b"1"}, 1.0),
    ({"reward.txt": b" 0.5\n"}, 0.5),
    ({"reward.txt": b"1e-1"}, 0.1),
    ({"reward.txt": b"0"}, 0.0),
    ({"reward.json": b'{"reward": 1, "other": 7}'}, 1.0),
    ({"reward.json": b'{"score": 0.25, "note": "x"}'}, 0.25),
]
BAD: list[dict[str, bytes]] = [
    {},
    {"other.txt": b"1"},
    {"reward.txt": b""},
    {"reward.txt": b"\n"},
    {"reward.txt": b"NaN"},
    {"reward.txt": b"inf"},
    {"reward.txt": b"-3"},
    {"reward.txt": b"1e9"},
    {"reward.txt": b"1.0\n2.0"},
    {"reward.txt": b"true"},
    {"reward.txt": b"1_0"},
    {"reward.txt": b"0x1"},
    {"reward.txt": b"1\0"},
    {"reward.txt": b"\xff1"},
    {"reward.txt": b"\xd9\xa1"},
    {"reward.txt": b"1", "reward.json": b'{"reward": 1}'},
    {"reward.txt": b"1", "reward.json": b""},
    {"reward.json": b""},
    {"reward.json": b"1"},
    {"reward.json": b"[1]"},
    {"reward.json": b"{}"},
    {"reward.json": b'{"reward": true}'},
    {"reward.json": b'{"reward": "1"}'},
    {"reward.json": b'{"reward": NaN}'},
    {"reward.json": b'{"reward": Infinity}'},
    {"reward.json": b'{"reward": null, "x": 1}'},
    {"reward.json": b'{"a": 1, "b": 0}'},
    {"reward.json": b'{"reward": 0, "reward": 1}'},
    {"reward.json": b'{"reward": 1'},
    {"reward.json": b"[" * 50_000},
    {"reward.txt": b"1" + b" " * (1 << 17)},
]


@pytest.mark.parametrize(("files", "reward"), GOOD)
def test_a_well_formed_reward_is_read(files: dict[str, bytes], reward: float) -> None:
    assert read_reward(files) == reward


@pytest.mark.parametrize("files", BAD, ids=[repr(files)[:40] for files in BAD])
def test_a_malformed_reward_is_an_error_never_a_number(files: dict[str, bytes]) -> None:
    with pytest.raises(VerifierError):
        read_reward(files)


@given(st.binary(max_size=40), st.sampled_from(["reward.txt", "reward.json"]))
def test_any_bytes_give_a_reward_in_range_or_an_error(data: bytes, name: str) -> None:
    try:
        assert 0 <= read_reward({name: data}) <= 1
    except VerifierError:
        pass


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_only_numbers_in_the_unit_interval_are_rewards(value: float) -> None:
    if 0 <= value <= 1:
        assert valid_reward(value) == value
    else:
        with pytest.raises(VerifierError):
            valid_reward(value)
