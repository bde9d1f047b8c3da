"""Masks for supervised fine-tuning: which whole turns are trained (paper, section 3.2.2, eqs. 1-2).

L = - sum_k m_k log pi(c_k | s_k) / (sum_k m_k |c_k| + eps), m_k = m_err * m_task. m_err = 0 where the call or its
execution failed, m_task = 0 where the turn is irrelevant to the sub-task. A masked turn stays in the context. The
paper gives pattern heuristics for relevance and no thresholds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from mini_rome.chunking import turn_tokens
from mini_rome.types import Trajectory, Turn

IGNORE = -100  # label of a token that is not trained


@dataclass(frozen=True)
class MaskPolicy:
    """Which causes mask a turn, and where the line is drawn. Every threshold is not in the paper."""

    errors: bool = True  # m_err: mask turns whose call or execution failed
    irrelevant: bool = True  # m_task: mask turns off the sub-task
    benign_exit_codes: tuple[int, ...] = (0,)  # not in the paper; add 1 where `grep` without a match is no mistake
    similarity: float = 0.95  # not in the paper; near-duplicate: character ratio of two commands with equal output
    lookback: int = 4  # not in the paper; near-duplicates are looked for among so many turns before
    loop_period: int = 4  # not in the paper; longest cycle of turns that counts as a loop
    loop_repeats: int = 3  # not in the paper; passes through a cycle that make a loop; the first pass is kept
    recorded: tuple[str, ...] = ("pruned", "compressed")  # reasons left on a turn by whoever edited the history


def error_causes(turn: Turn, policy: MaskPolicy) -> list[str]:
    """Err(k) from what was recorded: malformed call, status other than ok, exit code that is not benign.

    >>> failed = Turn([1], [0.0], "cat a", ["cat a"], exit_code=1)
    >>> error_causes(failed, MaskPolicy()), error_causes(failed, MaskPolicy(benign_exit_codes=(0, 1)))
    (['exit_code'], [])
    """
    causes = ["malformed"] if turn.malformed else []
    if turn.status != "ok":
        causes.append(turn.status)
    elif turn.exit_code is not None and turn.exit_code not in policy.benign_exit_codes:
        causes.append("exit_code")
    return causes


def relevance_causes(turns: Sequence[Turn], policy: MaskPolicy) -> list[list[str]]:
    """Why each turn is off the sub-task, [] where it is not; a turn can have several causes.

    redundant: the commands of an earlier turn again, with the output they had the last time; near_duplicate: nearly
    the same commands with equal, non-empty output; loop: a later pass through a cycle of turns; and `recorded` ones.

    >>> turns = [Turn([1], [0.0], c, [c], observation="a b") for c in ("ls", "pwd", "ls")]
    >>> relevance_causes(turns, MaskPolicy())
    [[], [], ['redundant']]
    """
    causes = [[reason for reason in turn.reasons if reason in policy.recorded] for turn in turns]
    loops = _loop_turns(turns, policy)
    last_output: dict[tuple[str, ...], str] = {}
    for index, turn in enumerate(turns):
        commands = _commands(turn)
        if commands and last_output.get(commands) == turn.observation:
            causes[index].append("redundant")
        elif any(_near_duplicate(turn, other, policy) for other in turns[max(0, index - policy.lookback) : index]):
            causes[index].append("near_duplicate")
        if index in loops:
            causes[index].append("loop")
        last_output[commands] = turn.observation
    return causes


def _commands(turn: Turn) -> tuple[str, ...]:  # white space apart
    return tuple(" ".join(command.split()) for command in turn.commands)


def _near_duplicate(turn: Turn, other: Turn, policy: MaskPolicy) -> bool:
    """Equal output is asked for: a chain of `cat a`, `cat b` is progress; and some output: so are silent changes.

    The very same command is no near-duplicate: `redundant` judges it by the output it had the last time.
    """
    old, new = ("\n".join(_commands(each)) for each in (other, turn))
    if not (old and new and old != new and turn.observation.strip() and turn.observation == other.observation):
        return False
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return matcher.quick_ratio() >= policy.similarity and matcher.ratio() >= policy.similarity


def _loop_turns(turns: Sequence[Turn], policy: MaskPolicy) -> set[int]:
    """Turns that repeat, text and output, what was done one period before, `loop_repeats` passes or more in a row."""
    signatures = [(turn.text.strip(), turn.observation) for turn in turns]
    found: set[int] = set()
    for period in range(1, policy.loop_period + 1):
        run = 0
        for index in range(period, len(turns)):
            run = run + 1 if signatures[index] == signatures[index - period] else 0
            if run >= period * (policy.loop_repeats - 1):
                found.update(range(index - run + 1, index + 1))
    return found


def error_mask(turns: Sequence[Turn], policy: MaskPolicy) -> list[int]:
    """m_err per turn (eq. 1): 0 where the call or its execution failed."""
    return [int(not (policy.errors and error_causes(turn, policy))) for turn in turns]


def relevance_mask(turns: Sequence[Turn], policy: MaskPolicy) -> list[int]:
    """m_task per turn (eq. 2): 0 where the turn is irrelevant."""
    return [int(not (policy.irrelevant and causes)) for causes in relevance_causes(turns, policy)]


def annotate(trajectory: Trajectory, policy: MaskPolicy) -> None:
    """Write error, irrelevant and reasons on every turn; again with another policy gives that policy's answer."""
    off_task = relevance_causes(trajectory.turns, policy)
    for turn, irrelevant in zip(trajectory.turns, off_task, strict=True):
        failed = error_causes(turn, policy)
        turn.error, turn.irrelevant, turn.reasons = bool(failed), bool(irrelevant), failed + irrelevant


def masked_labels(trajectory: Trajectory, policy: MaskPolicy) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of one trajectory; labels are IGNORE off the kept turns and are not shifted.

    All the agent wrote in a kept turn is trained, its sampled stop token too; the prompt and what the environment
    wrote after it (the template's newline first) are not. The observation after the last turn is dropped.

    A failed turn [4, 9], its answer [7], and the correction [5, 9]:

    >>> from mini_rome.types import Task, Trajectory, Turn, Verdict
    >>> task = Task("t", "f", "d", "do it", {}, ("ls",), lambda files: Verdict(1.0))
    >>> turns = [Turn([4, 9], [], "sl", ["sl"], "?", [7], exit_code=127), Turn([5, 9], [], "ls", ["ls"], "a", [8])]
    >>> masked_labels(Trajectory(task, [1, 2], turns), MaskPolicy())
    ([1, 2, 4, 9, 7, 5, 9], [-100, -100, -100, -100, -100, 5, 9])
    """
    trajectory.check_trainable()
    return turn_labels(trajectory.prompt_ids, trajectory.turns, policy)


def turn_labels(prompt_ids: list[int], turns: Sequence[Turn], policy: MaskPolicy) -> tuple[list[int], list[int]]:
    """`masked_labels` of what a trajectory is made of: all that both ways of building rows share."""
    kept = [a * b for a, b in zip(error_mask(turns, policy), relevance_mask(turns, policy), strict=True)]
    input_ids = list(prompt_ids)
    labels = [IGNORE] * len(input_ids)
    for keep, (_, generated, observed) in zip(kept, turn_tokens(turns), strict=True):
        input_ids += generated + observed
        labels += (generated if keep else [IGNORE] * len(generated)) + [IGNORE] * len(observed)
    return input_ids, labels


def masked_share(trajectories: Iterable[Trajectory], policy: MaskPolicy) -> dict[str, float]:
    """Share of the agent's tokens masked, by cause, and in "all"; a turn counts for the first cause it has."""
    tokens, masked = 0, Counter[str]()
    for trajectory in trajectories:
        off_task = relevance_causes(trajectory.turns, policy)
        for turn, irrelevant in zip(trajectory.turns, off_task, strict=True):
            tokens += len(turn.ids)
            causes = (error_causes(turn, policy) if policy.errors else []) + (irrelevant if policy.irrelevant else [])
            if causes:
                masked[causes[0]] += len(turn.ids)
    return {cause: count / tokens for cause, count in {**masked, "all": masked.total()}.items()} if tokens else {}
