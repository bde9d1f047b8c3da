"""Continual pre-training: next-token training in two stages, with the paper's schedule at any size.

Stage 1: code-centric tasks and tool text. Stage 2: trajectories of teachers, every token of them, what the
environment wrote too. Constant learning rate; weight decay constant in stage 1, falling linearly in stage 2; the
global batch is counted in tokens. The paper: 500 B and 300 B tokens, 32 M tokens a batch, learning rate 3e-5, weight
decay 0.1 to 0.01.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, TrainerCallback

from mini_rome.data import corpus
from mini_rome.data.stages import SftRow
from mini_rome.errors import ConfigError
from mini_rome.run_options import check_horizons
from mini_rome.sft import MaskedSFTConfig
from mini_rome.trace import ChatFormat, context_ids
from mini_rome.types import Trajectory

CHUNKS = [1, 2, 3, 4]  # horizons of the trajectories that stage 2 makes


@dataclass
class CPTArguments:
    """The schedule. The defaults are a tiny run within two minutes on two cores; configs/cpt.yaml has the paper's."""

    data: str | None = field(default=None, metadata={"help": "Dataset folder for stage 2; default: made here."})
    model: str | None = field(default=None, metadata={"help": "Model to start from; default: a new tiny one."})
    families: list[str] = field(default_factory=lambda: ["notes", "tickets"], metadata={"help": "Families of text."})
    stage1_tokens: float = field(default=250_000, metadata={"help": "Tokens of stage 1. The paper: 500e9."})
    stage2_tokens: float = field(default=150_000, metadata={"help": "Tokens of stage 2. The paper: 300e9."})
    batch_tokens: float = field(default=4096, metadata={"help": "Tokens of a global batch. The paper: 32e6."})
    length: int = field(default=1024, metadata={"help": "Tokens of one packed row. Not in the paper."})
    cpt_learning_rate: float = field(default=1e-3, metadata={"help": "Constant. The paper: 3e-5."})
    decay_from: float = field(default=0.1, metadata={"help": "Weight decay of stage 1 and at the start of stage 2."})
    decay_to: float = field(default=0.01, metadata={"help": "Weight decay at the end of stage 2."})
    heldout_rows: int = field(default=64, metadata={"help": "Rows that the loss is measured on and none trained."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and text."})
    sandbox: str = field(default="sim", metadata={"help": "Where trajectories are made without --data."})

    def __post_init__(self) -> None:
        for name in ("stage1_tokens", "stage2_tokens", "batch_tokens", "length", "heldout_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        check_horizons(self.families, chunks=CHUNKS)
        if self.batch_tokens < self.length:
            raise ConfigError(f"--batch_tokens {self.batch_tokens:g}: less than one row of --length {self.length}")
        if not 0 <= self.decay_to <= self.decay_from:
            raise ConfigError(f"--decay_to {self.decay_to}: must lie between 0 and --decay_from {self.decay_from}")

    def steps(self, tokens: float) -> int:
        """Optimiser steps for so many tokens.

        >>> CPTArguments(batch_tokens=4096).steps(250_000)
        61
        """
        return max(1, round(tokens / self.batch_tokens))

    def config(self, folder: str, tokens: float, decay: float) -> MaskedSFTConfig:
        """The trainer's options of one stage: rows packed to `length`, accumulated to a batch of tokens."""
        return MaskedSFTConfig(
            output_dir=folder, max_steps=self.steps(tokens), learning_rate=self.cpt_learning_rate,
            lr_scheduler_type="constant", warmup_steps=0, weight_decay=decay, packing=True, max_length=self.length,
            per_device_train_batch_size=1, gradient_accumulation_steps=round(self.batch_tokens / self.length),
            seed=self.seed,
        )  # fmt: skip


def decay_at(step: int, steps: int, start: float, end: float) -> float:
    """Weight decay that falls linearly from `start` at step 0 to `end` at the last one.

    >>> [round(decay_at(step, 4, 0.1, 0.01), 3) for step in range(4)]
    [0.1, 0.07, 0.04, 0.01]
    """
    return start + (end - start) * step / max(1, steps - 1)


class LinearDecay(TrainerCallback):
    """Sets the weight decay before every optimiser step; groups without decay (norms, biases) stay without."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self.used: list[float] = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        decay = decay_at(state.global_step, state.max_steps, self.start, self.end)
        self.used.append(decay)
        for group in optimizer.param_groups:
            if group["weight_decay"] > 0:
                group["weight_decay"] = decay


def text_row(chat: ChatFormat, question: str, answer: str) -> SftRow:
    """A document of stage 1: question and answer, every token trained."""
    ids = [*chat.prompt(question), *chat.encode(answer), chat.stop_id]
    return {"input_ids": ids, "labels": list(ids)}


def code_rows(chat: ChatFormat, families: list[str], tokens: float, length: int, seed: int) -> list[SftRow]:
    """Documents of stage 1 with so many tokens in all; those longer than a row are left out."""
    rows, total = [], 0
    for question, answer in corpus.stage_one(families, seed):
        row = text_row(chat, question, answer)
        if len(row["input_ids"]) <= length:
            rows.append(row)
            total += len(row["input_ids"])
        if total >= tokens:
            break
    return rows


def trajectory_rows(trajectories: Iterable[Trajectory], length: int) -> list[SftRow]:
    """Documents of stage 2: whole episodes, cut into rows of at most `length` tokens."""
    rows = []
    for each in trajectories:
        each.check_trainable()
        ids = context_ids(each)
        for begin in range(0, len(ids), length):
            part = ids[begin : begin + length]
            rows.append({"input_ids": part, "labels": list(part)})
    return rows


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, rows: Sequence[SftRow]) -> float:
    """Mean next-token loss in nats over all tokens of the rows."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]], device=model.device)  # (1, T)
        scores = model(ids).logits[0, :-1].float().log_softmax(-1)  # (T - 1, V)
        total -= scores.gather(1, ids[0, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    model.train(training)
    return total / max(1, count)


def take(rows: Sequence[SftRow], count: int) -> tuple[list[SftRow], list[SftRow]]:
    """(rows to train on, rows held out); ConfigError when nothing would be left to train on."""
    if len(rows) <= count:
        raise ConfigError(f"--heldout_rows {count}: there are only {len(rows)} rows in all")
    return list(itertools.islice(rows, count, None)), list(rows[:count])
