"""From a finished episode to a verdict: sweep, snapshot, then judge what no process of the agent can touch.

Tier A (`verify_files`, training): a pure Python check of the work dir's tar on the host; no agent code runs. Tier B:
`verify_fresh.verify_fresh`: a fresh container of the pristine image. Tier C is `verify_fresh.verify_in_place`:
tamperable, evaluation only. A reward is a number in [0, 1]; what the infrastructure or the verifier failed to do is
None with the cause, never 0; what the agent ruined is 0 with the reason. Not in the paper.
"""

from __future__ import annotations

import json
import math
import tarfile
import threading
from collections.abc import Callable, Mapping

from mini_rome.errors import SandboxError, SnapshotRefused, VerifierError
from mini_rome.sandbox.base import Sandbox
from mini_rome.sandbox.safety import scan_files
from mini_rome.sandbox.tree import files_of_tar
from mini_rome.types import Snapshot, Task, Verdict

CHECK_S = 60.0  # a check on the host that takes longer is a verifier error
MAX_REWARD_FILE = 64 << 10  # bytes
FRESH, FRESH_NETWORK = "fresh-container", "fresh-container (network)"


def verify_files(task: Task, state: Sandbox | Snapshot, check_s: float = CHECK_S) -> Verdict:
    """Judge a box or a snapshot by the task's check on the host. Never raises for what the agent or a check does.

    The agent's processes are killed before the snapshot is taken; symbolic links are not followed, they are left out.
    """
    try:
        snapshot = take_snapshot(state)
        files = files_of_tar(snapshot.tar)
    except SnapshotRefused as error:
        return Verdict(0.0, f"the work dir cannot be judged: {error}")
    except (SandboxError, tarfile.TarError) as error:
        return Verdict(None, f"infra_error: {error}")
    verdict = run_check(lambda: task.check(files), check_s)
    honest, sound = None, task.honest
    if sound is not None:
        honest = run_check(lambda: sound(files), check_s).reward
    events = tuple(scan_files(files, known=task.files))
    return Verdict(verdict.reward, verdict.reason, verdict.verifier, events, honest=honest)


def take_snapshot(state: Sandbox | Snapshot) -> Snapshot:
    """The state to be judged: of a box, after every process of the agent is dead.

    Raises SnapshotRefused where the agent left nothing that can be judged, SandboxError where the box failed.
    """
    if isinstance(state, Snapshot):
        return state
    state.sweep()
    return state.snapshot()


def run_check(check: Callable[[], Verdict], seconds: float) -> Verdict:
    """The check's verdict; None with the cause when it raises, answers nonsense or takes too long.

    A check that hangs keeps its thread until the process ends: Python cannot kill it.
    """
    answers: list[object] = []
    thread = threading.Thread(target=_answer, args=(check, answers), daemon=True, name="mini-rome-check")
    thread.start()
    thread.join(seconds)
    if not answers:
        return Verdict(None, f"verifier_error: the check did not end within {seconds:g} s")
    answer = answers[0]
    if isinstance(answer, Exception):
        return Verdict(None, f"verifier_error: the check raised {type(answer).__name__}: {answer}")
    if not isinstance(answer, Verdict):
        return Verdict(None, f"verifier_error: the check answered {answer!r}, no Verdict")
    if answer.reward is None:
        return answer
    try:
        return Verdict(valid_reward(answer.reward), answer.reason, answer.verifier)
    except VerifierError as error:
        return Verdict(None, f"verifier_error: {error}")


def _answer(check: Callable[[], Verdict], answers: list[object]) -> None:
    try:
        answers.append(check())
    except Exception as error:  # whatever a check raises is a verifier error: it must not become a reward of 0
        answers.append(error)


def valid_reward(value: object) -> float:
    """`value` as a float in [0, 1]. Raises VerifierError: bool, text, NaN, infinite, out of range.

    >>> valid_reward(1), valid_reward(0.25)
    (1.0, 0.25)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VerifierError(f"reward {value!r} is no number")
    if math.isnan(value) or not 0 <= value <= 1:
        raise VerifierError(f"reward {value!r} is not in [0, 1]")
    return float(value)


def read_reward(files: Mapping[str, bytes]) -> float:
    """The reward in {name: contents} of /logs/verifier: reward.txt (one number) or reward.json (key `reward`, or else
    its only number). Raises VerifierError for anything else, both files at once included.

    >>> read_reward({"reward.txt": b"1.0\\n"}), read_reward({"reward.json": b'{"reward": 0.5, "speed": 3}'})
    (1.0, 0.5)
    """
    present = [name for name in ("reward.txt", "reward.json") if name in files]
    if len(present) != 1:
        both = "both reward.txt and reward.json" if present else "neither reward.txt nor reward.json"
        raise VerifierError(f"the verifier wrote {both}")
    name = present[0]
    if len(files[name]) > MAX_REWARD_FILE:
        raise VerifierError(f"{name} has {len(files[name])} bytes, more than {MAX_REWARD_FILE}")
    try:
        text = files[name].decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique) if name == "reward.json" else _number(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise VerifierError(f"{name} is malformed: {error}") from None
    return valid_reward(_of_mapping(value) if name == "reward.json" else value)


def read_numbers(files: Mapping[str, bytes]) -> dict[str, float]:
    """What reward.json holds besides the reward: finite numbers such as `passed` and `checks`. Never raises.

    >>> read_numbers({"reward.json": b'{"reward": 0, "passed": 7, "checks": 8, "note": "x"}'})
    {'passed': 7.0, 'checks': 8.0}
    """
    try:
        found = json.loads(files.get("reward.json", b"{}")[:MAX_REWARD_FILE])
    except (ValueError, RecursionError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {
        key: float(value)
        for key, value in pairs
        if key != "reward" and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
    }


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _number(text: str) -> float:
    """One number on one line. Spellings of Python's own (`1_0`, `inf`) are refused."""
    stripped = text.strip()
    if not stripped or not set(stripped) <= set("0123456789.eE+-"):
        raise ValueError(f"{text[:80]!r} is not one number")
    return float(stripped)


def _of_mapping(value: object) -> object:
    if not isinstance(value, dict):
        raise VerifierError(f"reward.json holds {str(value)[:80]}, no object")
    if "reward" in value:
        return value["reward"]
    numbers = [key for key, item in value.items() if isinstance(item, int | float) and not isinstance(item, bool)]
    if len(numbers) != 1:
        raise VerifierError(f"reward.json has no key `reward` and {len(numbers)} numbers; its keys: {sorted(value)}")
    return value[numbers[0]]
