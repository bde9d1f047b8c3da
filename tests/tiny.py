"""A model of two layers, its tokenizer, experts on the simulated sandbox, and trainers on recorded rollouts."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback, set_seed

from mini_rome.config import IPAConfig
from mini_rome.data.demonstrations import make_tasks, record_experts
from mini_rome.experts import Expert, Start
from mini_rome.model import build_tokenizer
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Pool
from mini_rome.trace import ChatFormat
from mini_rome.trainer import IPATrainer
from mini_rome.types import Trajectory, Turn

OPTIONS: dict[str, Any] = {
    "max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2,
    "max_new_tokens": 6, "save_strategy": "no", "failure_reward": -1.0, "learning_rate": 1e-2,
    "il_when": "never", "rollback_threshold": 0.7, "rollback_window": 2,
}  # fmt: skip


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(vocab_size=320)


@functools.cache
def chat() -> ChatFormat:
    return ChatFormat(tokenizer())


@functools.cache
def experts(count: int = 2, chunks: int = 3) -> list[Expert]:
    """Verified experts of K chunks; the tasks are the same ones every time."""
    with Pool("sim") as pool:
        return record_experts(chat(), pool, make_tasks(["notes"], [chunks], count, "train"))


def model(seed: int = 0, scale: float = 1.0, **changes: Any) -> Qwen3MoeForCausalLM:
    """Two layers, hidden size 32, four experts of which two are active. scale: of the weights."""
    config = Qwen3MoeConfig(
        **{
            "vocab_size": len(tokenizer()), "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "tie_word_embeddings": False,
            "pad_token_id": tokenizer().pad_token_id, "eos_token_id": tokenizer().eos_token_id, **changes,
        }
    )  # fmt: skip
    set_seed(seed)
    built = Qwen3MoeForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(scale)
    return built


class Recorded:
    """In place of a Rollout: gives back the trajectories it was made with, whatever the starts."""

    def __init__(self, trajectories: Sequence[Trajectory], drops: Counter[str] | None = None) -> None:
        self.trajectories, self.drops = list(trajectories), drops or Counter()
        self.chat, self.pool, self.sampler = chat(), Pool("sim"), _Frozen()
        self.infra: Counter[str] = Counter()
        self.episodes = self.cancelled = 0
        self.stop = threading.Event()

    def collect(
        self, starts: Sequence[Start], params: SamplingParams, *, step: int, first_episode: int, progress: Any,
        redundancy: int = 0,
    ) -> list[Trajectory]:  # fmt: skip
        self.infra += self.drops
        mine = copy.deepcopy(self.trajectories[first_episode : first_episode + len(starts)])
        for turn in (turn for trajectory in mine for turn in trajectory.policy_turns):
            turn.policy_version = turn.policy_version if turn.policy_version < 0 else self.sampler.version
        return mine


class _Frozen:
    """A sampler that never runs."""

    version = 0

    def sync(self, model: Any, version: int) -> None:
        """Only the version changes."""
        self.version = version


def trajectory(expert: Expert, start: int, lengths: Sequence[int], reward: float | None, seed: int = 0) -> Trajectory:
    """From the expert's state p = start: responses of these lengths, random ids, log mu drawn from [-3, -1]."""
    generator = torch.Generator().manual_seed(seed)
    turns = list(expert.trajectory.turns[:start])
    for length in lengths:
        ids = torch.randint(5, len(tokenizer()), (length,), generator=generator).tolist()
        scores = (-1 - 2 * torch.rand(length, generator=generator)).tolist()
        turns.append(Turn(ids, scores, "", [], observation_ids=[6, 7, 8]))
    return Trajectory(expert.trajectory.task, expert.trajectory.prompt_ids, turns, start=start, reward=reward)


def mixed_batch() -> list[Trajectory]:
    """Four trajectories of two tasks: other lengths, starts and rewards; won, lost, unscorable, won."""
    first, second = experts()
    return [
        trajectory(first, 0, (3, 5, 2), 1.0, seed=1),
        trajectory(first, 2, (7,), 0.0, seed=2),
        trajectory(second, 1, (1, 4), None, seed=3),
        trajectory(second, 1, (6, 3), 1.0, seed=4),
    ]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Gradients agree to eight float32 steps of the largest one.

    A bound that does not grow with them fails on some processors: sums are rounded in another order there.
    """
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * largest)


class Gradients(TrainerCallback):
    """Keeps the gradients of each optimiser step; `trainer` sets a clipping norm that they never reach."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        self.steps.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})


def trainer(
    folder: Path | str,
    rollout: Any = None,
    network: Any = None,
    *,
    peft_config: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    kind: type[IPATrainer] = IPATrainer,
    count: int = 2,
    **options: Any,
) -> IPATrainer:
    """A trainer of `count` tasks; without a rollout the tiny model samples on the simulated sandbox."""
    network = model() if network is None else network
    if rollout is None:
        sampler = TransformersSampler(network, chat().stop_id, options.pop("sampler_dtype", None))
        rollout = Rollout(chat(), sampler, Pool("sim"), extra_turns=1)
    args = IPAConfig(output_dir=str(folder), **{**OPTIONS, "max_grad_norm": 1e9, **options})
    return kind(network, args, rollout, experts(count), tokenizer(), list(callbacks), peft_config)


def gradients(folder: Path | str, batch: Sequence[Trajectory], **options: Any) -> dict[str, torch.Tensor]:
    """Of one optimiser step on this batch from the same weights every time."""
    kept = Gradients()
    trainer(folder, Recorded(batch), callbacks=[kept], **options).train()
    return kept.steps[0]
