"""`mini-rome eval` and `mini-rome calibrate`: a saved model's success, and how its sampler and trainer differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from mini_rome import sandbox
from mini_rome.chunking import OUTSIDE, chunk_ids, turn_tokens
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluate import evaluate
from mini_rome.experts import Start
from mini_rome.families import get_family
from mini_rome.loss import Level, calibrate
from mini_rome.model import load_model
from mini_rome.rollout import Rollout
from mini_rome.runs import checkpoint, provenance, write_json
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.stats import success_rate
from mini_rome.trace import ChatFormat
from mini_rome.types import Split, Task, Trajectory

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TaskChoice:
    """Which instances: `n` in all, taken in turn from every family and horizon."""

    families: Sequence[str] = ("notes",)
    chunks: Sequence[int] = (4,)
    n: int = 200
    split: Split = "test"

    def tasks(self) -> list[Task]:
        """The instances; the first ones of a longer list are the list of a shorter one."""
        if self.n < 1:
            raise ConfigError(f"--n {self.n}: at least one episode is needed")
        kinds = [(get_family(name), chunks) for chunks in self.chunks for name in self.families]
        picked = [(*kinds[index % len(kinds)], index // len(kinds)) for index in range(self.n)]
        return [family.make(seed, chunks, self.split) for family, chunks, seed in picked]


@dataclass
class Loaded:
    """A model with all that is needed to run its episodes."""

    model: PreTrainedModel
    rollout: Rollout

    @classmethod
    def open(cls, path: str, pool: sandbox.Pool, seed: int, precision: str = "float32") -> Loaded:
        """precision: of the sampler's copy; float32 samples with the model itself."""
        model, tokenizer = load_model(checkpoint(path))
        form = ChatFormat(tokenizer)
        sampler = TransformersSampler(model.eval(), form.stop_id, PRECISIONS[precision])
        return cls(model, Rollout(form, sampler, pool, seed=seed))


def open_pool(backend: str, size: int, console: Console) -> sandbox.Pool:
    """Boxes of the backend asked for, after one line that says which and why."""
    chosen, line = sandbox.resolve(backend)
    console.print(line, markup=False)
    return sandbox.Pool(backend=chosen, size=size)


def run_eval(
    model: str, choice: TaskChoice, backend: str, params: SamplingParams, seed: int, out: str | None, repeats: int = 1
) -> int:
    """The verb `eval`: success from the initial state with Wilson intervals, per family and in all."""
    console, tasks = Console(), choice.tasks()
    with open_pool(backend, 32, console) as pool:
        rollout = Loaded.open(model, pool, seed).rollout
        results = [evaluate(rollout, tasks, params, repeat=repeat) for repeat in range(repeats)]
    counts: dict[str, list[int]] = {"all": [sum(r.successes for r in results), sum(r.n for r in results)]}
    for name in sorted({name for result in results for name in result.by_family}):
        pairs = [result.by_family[name] for result in results if name in result.by_family]
        counts[name] = [sum(column) for column in zip(*pairs, strict=True)]
    if not counts["all"][1]:
        raise MiniRomeError("no episode could be scored: the sandbox failed in all of them. Try mini-rome doctor.")
    rates = {name: success_rate(won, n) for name, (won, n) in counts.items()}
    table = Table("tasks", "success", "95 % interval", "n", box=None, pad_edge=False)
    for name, rate in rates.items():
        table.add_row(name, f"{rate['rate']:.3f}", f"{rate['low']:.3f} - {rate['high']:.3f}", str(rate["n"]))
    console.print(table)
    if out:
        record: dict[str, Any] = {"model": str(checkpoint(model))} | asdict(choice)
        record |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "success": rates}
        record |= {"unscored": sum(result.unscored for result in results)}
        write_json(out, record | provenance(pool.backend, rollout.sampler.name, seed))
    return 0


def run_calibrate(model: str, choice: TaskChoice, backend: str, precision: str, seed: int) -> int:
    """The verb `calibrate`: percentiles of pi_old / mu at each level, and the threshold H they propose (eq. 8)."""
    console, tasks = Console(), choice.tasks()
    with open_pool(backend, 32, console) as pool:
        loaded = Loaded.open(model, pool, seed, precision)
        trajectories = loaded.rollout.collect([Start(task) for task in tasks], SamplingParams())
    scored = [trajectory for trajectory in trajectories if trajectory.policy_turns]
    columns = padded([mismatch(loaded.model, trajectory) for trajectory in scored])
    keys = ("count", "p1", "p50", "p90", "p99", "max", "proposed")
    table = Table("level", *keys, box=None, pad_edge=False)
    for level in get_args(Level)[1:]:
        found = calibrate(*columns, level)
        table.add_row(level, f"{found['count']:.0f}", *(f"{found[key]:.6f}" for key in keys[1:]))
    console.print(f"pi_old / mu; trainer float32, sampler {precision}; {len(scored)} episodes", markup=False)
    console.print(table)
    return 0


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
