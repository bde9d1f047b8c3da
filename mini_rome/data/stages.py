"""The two stages of masked SFT on a dataset of trajectories, and the mix of what is trained.

Stage 1 takes all that the filter let through. Stage 2 takes the high-confidence part (verified, replayed, the best of
its instance), more often what the model of stage 1 still gets wrong, in smaller steps. The paper says that stage 2
revisits such a part and gives no numbers but the mix: 70 % agentic, 15 % reasoning, 15 % general.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from mini_rome.collator import to_sft_rows
from mini_rome.data import corpus, records
from mini_rome.errors import ConfigError
from mini_rome.experts import Start
from mini_rome.masks import IGNORE, MaskPolicy
from mini_rome.rollout import Progress, Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory

SELECTION_STEP = 1 << 29  # keeps these random numbers apart from those of training and evaluation
EMPHASIS = 4  # stage 2 shows so many times as often what is still wrong
REFINE = 0.25  # and takes this part of the learning rate; neither is in the paper, see recipes/results/LOG.md
SftRow = dict[str, list[int]]


def open_dataset(folder: str | Path) -> tuple[ChatFormat, list[Trajectory]]:
    """The tokenizer and the trajectories of a dataset folder as recipes/data.py leaves it."""
    root = Path(folder)
    if not (root / "tokenizer").is_dir():
        raise ConfigError(f"--data {folder}: no tokenizer there; name the dataset folder of a data run (make data)")
    chat = ChatFormat(AutoTokenizer.from_pretrained(str(root / "tokenizer")))
    found = records.read(root / "train.parquet", chat)
    for each in found:
        each.check_trainable()
    return chat, found


def preferred(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The best trajectory of every instance: fewest failures, then fewest turns; in the order of first appearance."""
    best: dict[str, Trajectory] = {}
    for each in trajectories:
        held = best.get(each.task.content_hash)
        if held is None or _rank(each) < _rank(held):
            best[each.task.content_hash] = each
    return list(best.values())


def _rank(trajectory: Trajectory) -> tuple[int, int]:
    return sum(turn.error or turn.irrelevant for turn in trajectory.turns), len(trajectory.turns)


def still_wrong(
    rollout: Rollout,
    trajectories: Sequence[Trajectory],
    attempts: int = 1,
    max_new_tokens: int = 20,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Those whose instance the current model fails at least once in `attempts`, the first of them greedy."""
    failed: set[int] = set()
    for attempt in range(attempts):
        params = SamplingParams(max_new_tokens, temperature=0.0 if attempt == 0 else 1.0)
        starts = [Start(each.task) for each in trajectories]
        tried = rollout.collect(starts, params, step=SELECTION_STEP + attempt, progress=progress)
        failed |= {index for index, each in enumerate(tried) if each.reward is not None and each.reward < 1.0}
    return [trajectories[index] for index in sorted(failed)]


def emphasised(best: Sequence[Trajectory], wrong: Sequence[Trajectory], times: int) -> list[Trajectory]:
    """All of `best`, each of those among it that are `wrong` so many times (not in the paper).

    The wrong ones alone would do where they are many. Where they are few, hundreds of passes over them teach them by
    heart and unteach the rest: 8 of 359 took a model from 99 % to 34 % (recipes/results/LOG.md).
    """
    return [*best, *(each for each in wrong for _ in range(times - 1))]


def question_rows(
    chat: ChatFormat, make: Callable[[random.Random], tuple[str, str]], tokens: int, seed: int
) -> list[SftRow]:
    """Rows of questions and answers, of about so many tokens in all; the answer and its stop token are trained."""
    rng, rows, total = random.Random(f"{make.__name__}/{seed}"), [], 0
    while total < tokens:
        row = question_row(chat, *make(rng))
        rows.append(row)
        total += len(row["input_ids"])
    return rows


def question_row(chat: ChatFormat, question: str, answer: str) -> SftRow:
    """One question with its answer."""
    prompt, said = chat.prompt(question), [*chat.encode(answer), chat.stop_id]
    return {"input_ids": prompt + said, "labels": [IGNORE] * len(prompt) + said}


def mixed_rows(
    chat: ChatFormat,
    trajectories: Sequence[Trajectory],
    policy: MaskPolicy,
    mix: tuple[float, float, float] = (1.0, 0.0, 0.0),
    seed: int = 0,
) -> list[SftRow]:
    """Agentic, reasoning and general rows with these shares of the tokens, shuffled; of the agentic ones all."""
    agentic, thinking, chatting = mix
    if min(mix) < 0 or abs(sum(mix) - 1) > 1e-6 or agentic == 0:
        raise ConfigError(f"--mix {' '.join(map(str, mix))}: agentic, reasoning, general; they must sum to 1")
    rows = to_sft_rows(trajectories, policy)
    if not rows:
        raise ConfigError(f"none of {len(trajectories)} trajectories has a turn to train: see masks and filter")
    total = sum(len(row["input_ids"]) for row in rows) / agentic
    rows += question_rows(chat, corpus.reasoning, round(total * thinking), seed)
    rows += question_rows(chat, corpus.general, round(total * chatting), seed)
    random.Random(seed).shuffle(rows)
    return rows
