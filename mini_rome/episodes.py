"""Episodes of a run, kept for a look: `episodes.jsonl` in its folder, which `mini-rome view` shows.

A line is a record of `data/records.py` with one more field, `kept`: the stage ("sft", "ipa", ...), the optimiser
step, the row of the batch, and of training episodes what the loss made of each chunk. All evaluation episodes are
kept, and an even sample of each training batch. Of an episode with several contexts the first is kept. A file that
reaches MAX_BYTES takes no more. Not in the paper.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from mini_rome.config import IPAConfig
from mini_rome.data.records import drop_truncated, to_row, tokenizer_hash
from mini_rome.evaluation.evaluate import ending
from mini_rome.runs import writing
from mini_rome.safety.conduct import conduct_facts
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory

EPISODES = "episodes.jsonl"
MAX_BYTES = 64 << 20  # a default run leaves about 6 MB
DIGITS = 5  # of log-probs and ratios: enough to see, half the size


class EpisodeLog:
    """Appends to one file; each rank has its own. A line that an earlier session did not finish is cut off."""

    def __init__(self, folder: str | Path, sample: int, rank: int = 0) -> None:
        """sample: training episodes of each batch and rank; 0 keeps no episode at all, evaluations neither."""
        self.path = Path(folder) / (EPISODES if rank == 0 else f"episodes-{rank}.jsonl")
        self.sample, self.full = sample, False
        self._marks: dict[int, str] = {}
        if sample and self.path.exists():
            drop_truncated(self.path)

    def append(self, chat: ChatFormat, trajectories: Sequence[Trajectory], kept: Sequence[dict[str, Any]]) -> None:
        """Write each trajectory with what is to be kept beside it, by one call of the system."""
        if not self.sample or self.full or not trajectories:
            return
        key = id(chat.tokenizer)
        self._marks[key] = mark = self._marks.get(key) or tokenizer_hash(chat.tokenizer)
        rows = [
            to_row(t, mark) | {"kept": {"ending": ending(t), "contexts": len(t.samples), **conduct_facts(t), **facts}}
            for t, facts in zip(trajectories, kept, strict=True)
        ]
        data = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
        with writing(self.path), open(self.path, "ab", buffering=0) as file:
            self.full = os.fstat(file.fileno()).st_size + len(data) > MAX_BYTES
            while data and not self.full:
                data = data[file.write(data) :]

    def evaluation(self, chat: ChatFormat, stage: str, step: int | None = None) -> Callable[..., None]:
        """What an evaluation hands its trajectories to."""

        def keep(trajectories: Sequence[Trajectory]) -> None:
            kept = [{"stage": stage, "step": step, "row": row} for row in range(len(trajectories))]
            self.append(chat, trajectories, kept)

        return keep


class Recorder(TrainerCallback):
    """Keeps a sample of each training batch, and what the loss made of it at the last update on it."""

    def __init__(self, log: EpisodeLog, chat: ChatFormat, stage: str, args: IPAConfig) -> None:
        self.log, self.chat, self.stage, self.args = log, chat, stage, args
        self.batch: dict[int, Trajectory] = {}  # by row
        self.facts: dict[int, dict[str, Any]] = {}
        self.changed = False

    def begin(self, step: int, trajectories: Sequence[Trajectory], imitated: Sequence[str | None]) -> None:
        """A new batch. imitated: of each row, the expert's next response where its fork is imitated (eq. 10)."""
        self.write()
        self.batch = {row: trajectories[row] for row in even_sample(len(trajectories), self.log.sample)}
        self.facts = {
            row: {"stage": self.stage, "step": step, "row": row, "imitated": imitated[row]} for row in self.batch
        }
        self.changed = True

    def score(self, inputs: dict[str, Tensor], logps: Tensor) -> None:
        """Of a micro-batch: inputs as the loss has them, with `row` (B,); logps are log pi_theta, (B, T)."""
        if "row" not in inputs:  # the rest of a batch whose trajectories an earlier session drew
            return
        old = inputs.get("old_per_token_logps", logps)
        for at, row in enumerate(inputs["row"].tolist()):
            if row not in self.batch:
                continue
            inside = inputs["chunk_ids"][at] >= 0
            mu, weights = inputs["sampling_per_token_logps"], inputs["advantages"]
            columns = (inputs["chunk_ids"], logps.detach(), old, mu, weights)
            ids, new, before, sampled, returns = (column[at][inside].tolist() for column in columns)
            reward = float(inputs["rewards"][at])
            found = chunk_facts(ids, new, before, sampled, returns, reward, self.args)
            first = len(self.batch[row].policy_turns)  # a record is of one context, the episode's first
            self.facts[row] |= {name: values[:first] for name, values in found.items()}
            self.changed = True

    def write(self) -> None:
        """Once more after each change: of two lines with the same stage, step and row the later one counts."""
        if self.changed and self.batch:
            rows = list(self.batch)
            self.log.append(self.chat, [self.batch[row] for row in rows], [self.facts[row] for row in rows])
        self.changed = False

    def on_save(self, args, state, control, **kwargs):
        self.write()

    def on_train_end(self, args, state, control, **kwargs):
        self.write()


def even_sample(count: int, wanted: int) -> list[int]:
    """Places of an even sample.

    >>> even_sample(8, 3), even_sample(2, 5)
    ([0, 2, 5], [0, 1])
    """
    return sorted({index * count // wanted for index in range(wanted)}) if wanted < count else list(range(count))


def chunk_facts(
    ids: list[int], new: list[float], old: list[float], sampled: list[float], returns: list[float], reward: float,
    args: IPAConfig,
) -> dict[str, Any]:  # fmt: skip
    """Of one row's chunk tokens: by chunk G_k, rho_c, mismatch, masked, clipped; log pi_theta and pi_old by token.

    rho_c and mismatch are the geometric means of pi_theta / pi_old and pi_old / mu over the chunk (eq. 8). masked is
    the share of its tokens that the mask takes out, clipped says that a failed row's ratio exceeded 1: each at the
    level that the run has. A row that is not scored has neither and its G are None.

    >>> new, old, sampled = [-1.0, -1.0, -2.0], [-1.0, -1.0, -2.5], [-1.0, -1.1, -2.5]
    >>> facts = chunk_facts([0, 0, 1], new, old, sampled, [0.5, 0.5, 1.0], 1.0, IPAConfig(output_dir="x"))
    >>> facts["G"], facts["rho"], facts["mismatch"], facts["masked"], facts["clipped"]
    ([0.5, 1.0], [1.0, 1.64872], [1.05127, 1.0], [1.0, 0.0], [False, False])
    """
    spans = [[at for at, _ in group] for _, group in groupby(enumerate(ids), key=lambda pair: pair[1])]
    ratio = [theta - before for theta, before in zip(new, old, strict=True)]
    gap = [before - mu for before, mu in zip(old, sampled, strict=True)]
    scored = math.isfinite(reward)
    limit = math.inf if args.mask_level == "none" else math.log(args.mismatch_threshold)
    gone = [scored and value > limit for value in at_level(gap, spans, str(args.mask_level))]
    above = [value > 0 for value in at_level(ratio, spans, str(args.ratio_level))]
    return {
        "G": [_rounded(returns[span[0]]) if scored else None for span in spans],
        "rho": [_rounded(math.exp(min(_mean(ratio, span), 80.0))) for span in spans],
        "mismatch": [_rounded(math.exp(min(_mean(gap, span), 80.0))) for span in spans],
        "masked": [_rounded(_mean(gone, span)) for span in spans],
        "clipped": [scored and reward <= 0 and any(above[at] for at in span) for span in spans],
        "new": [[_rounded(new[at]) for at in span] for span in spans],
        "old": [[_rounded(old[at]) for at in span] for span in spans],
    }


def at_level(values: list[float], spans: list[list[int]], level: str) -> list[float]:
    """Each token's value, averaged over the unit of this level; 0 everywhere for "none"."""
    if level == "token":
        return values
    if level == "none":
        return [0.0] * len(values)
    units = [list(range(len(values)))] if level == "sequence" else spans
    return [mean for span in units for mean in [_mean(values, span)] * len(span)]


def _mean(values: Sequence[float], span: list[int]) -> float:
    return sum(values[at] for at in span) / len(span)


def _rounded(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None
