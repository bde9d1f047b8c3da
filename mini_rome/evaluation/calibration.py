"""`mini-rome calibrate`: how much a saved model's sampler and trainer differ, and the threshold H it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from mini_rome.chunking import OUTSIDE, chunk_ids, turn_tokens
from mini_rome.evaluation.assess import Loaded, open_pool
from mini_rome.experts import Start
from mini_rome.loss import Level, calibrate
from mini_rome.sampler.base import SamplingParams
from mini_rome.tasks.choice import TaskChoice
from mini_rome.types import Task, Trajectory


def run_calibrate(model: str, choice: TaskChoice, backend: str, precision: str, seed: int) -> int:
    """The verb `calibrate`: percentiles of pi_old / mu at each level, and the threshold H they propose (eq. 8)."""
    console, tasks = Console(), choice.tasks()
    with open_pool(backend, 32, console) as pool:
        columns = sampled_mismatch(Loaded.open(model, pool, seed, precision), tasks)
    keys = ("count", "p1", "p50", "p90", "p99", "max", "proposed")
    table = Table("level", *keys, box=None, pad_edge=False)
    for level in get_args(Level)[1:]:
        found = calibrate(*columns, level)
        table.add_row(level, f"{found['count']:.0f}", *(f"{found[key]:.6f}" for key in keys[1:]))
    console.print(f"pi_old / mu; trainer float32, sampler {precision}; {len(columns[0])} episodes", markup=False)
    console.print(table)
    return 0


def sampled_mismatch(loaded: Loaded, tasks: Sequence[Task]) -> tuple[Tensor, Tensor, Tensor]:
    """log pi_old, log mu and chunk ids of one episode per task, (B, T) each; episodes without a response left out."""
    trajectories = loaded.rollout.collect([Start(task) for task in tasks], SamplingParams())
    return padded([mismatch(loaded.model, trajectory) for trajectory in trajectories if trajectory.policy_turns])


@torch.inference_mode()
def mismatch(model: PreTrainedModel, trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """log pi_old, log mu and chunk ids of one trajectory's completion tokens, each (T,)."""
    tokens: list[int] = []
    sampled: list[float] = []
    for turn, ids, observed in turn_tokens(trajectory.turns):
        tokens += ids + observed
        sampled += turn.logprobs + [0.0] * len(observed)
    whole = torch.tensor([trajectory.prompt_ids + tokens], device=model.device)  # (1, P + T)
    logits = model(whole).logits[0, -len(tokens) - 1 : -1].double()  # (T, V): each predicts the next token
    scores = logits.log_softmax(-1).gather(1, whole[0, -len(tokens) :, None])[:, 0].cpu()
    return scores, torch.tensor(sampled, dtype=torch.float64), torch.tensor(chunk_ids(trajectory))


def padded(rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of different length as three (B, T) tensors; what was added is outside every chunk."""
    old, sampled, ids = zip(*rows, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(list(old), True), pad(list(sampled), True), pad(list(ids), True, OUTSIDE)
