"""A random Qwen3-MoE of about 100 M weights in Qwen's tool-call format: seconds and memory of each part of a step.

    make bench-sampler            (its second part)          or: python tests/bench_qwen.py

One forward, a rollout of two turns on the simulated sandbox, one step of IPA with LoRA on attention; float32.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from qwen import qwen_moe, qwen_tokenizer

from mini_rome.call_formats import chat_format
from mini_rome.config import IPAConfig
from mini_rome.data.demonstrations import make_tasks, record_experts
from mini_rome.experts import Start
from mini_rome.progress import quiet
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Pool
from mini_rome.trainer import IPATrainer
from mini_rome.types import Trajectory

T = TypeVar("T")
TOKENS = 6  # of a response
LORA = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


@dataclass
class Found:
    """parts: (name, seconds, peak memory of the process in GB so far)."""

    model: Any
    before: dict[str, torch.Tensor]  # what LoRA may not change
    trajectories: list[Trajectory]
    trainer: IPATrainer
    parts: list[tuple[str, float, float]]


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(folder: str | Path, say: Callable[[str], None] = lambda line: None) -> Found:
    """Build the model, then one forward, one rollout of four episodes and one optimiser step. say: told of each."""
    parts: list[tuple[str, float, float]] = []

    def timed(name: str, action: Callable[[], T]) -> T:
        begun = time.perf_counter()
        result = action()
        parts.append((name, time.perf_counter() - begun, peak_gb()))
        say(f"{name}: {parts[-1][1]:.2f} s, peak memory {parts[-1][2]:.2f} GB")
        return result

    tokenizer = qwen_tokenizer()
    chat = chat_format(tokenizer, "qwen")
    model = timed("build", lambda: qwen_moe(tokenizer))
    before = {name: value.clone() for name, value in model.state_dict().items() if "layers.0." in name}
    with torch.inference_mode():
        timed("forward, 1 x 64 tokens", lambda: model(input_ids=torch.arange(64)[None]))
    with Pool("sim", size=8) as pool:
        experts = record_experts(chat, pool, make_tasks(["notes"], [1], 2, "train"))
        rollout = Rollout(chat, TransformersSampler(model, chat.stop_id), pool, extra_turns=1)
        starts = [Start(expert.trajectory.task) for expert in experts for _ in range(2)]
        params = SamplingParams(max_new_tokens=TOKENS)
        trajectories = timed("rollout, 4 episodes of 2 turns", lambda: rollout.collect(starts, params))
        args = IPAConfig(
            output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=1,
            num_generations=2, max_new_tokens=TOKENS, save_strategy="no", failure_reward=-1.0, il_when="never",
        )  # fmt: skip
        trainer = IPATrainer(model, args, rollout, experts, tokenizer, peft_config=LORA)
        quiet(trainer)
        timed("one step of IPA with LoRA: rollout, backward, AdamW", trainer.train)
    return Found(model, before, trajectories, trainer, parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = measure(folder, lambda line: print(line, flush=True))
    weights = sum(parameter.numel() for name, parameter in found.model.named_parameters() if "lora" not in name)
    adapter = sum(parameter.numel() for parameter in found.model.parameters() if parameter.requires_grad)
    print(f"Qwen3-MoE, {weights / 1e6:.0f} M random weights, {adapter / 1e6:.2f} M trained, float32")


if __name__ == "__main__":
    main()
