"""What IPA costs beside TRL's own GRPO, and its loss beside forward and backward: python tests/bench_train.py.

One model (the tiny MoE), one batch (64 recorded trajectories of K = 8 chunks from mixed starts), pairs of one
optimiser step each, interleaved so that both meet the same noise. Writes recipes/results/bench_train.json.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: a busy neighbour would slow it twenty times
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # about rollout_func, which both trainers use

import numpy as np  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from mini_rome.chunking import pack  # noqa: E402
from mini_rome.config import IPAConfig  # noqa: E402
from mini_rome.credit import chunk_returns  # noqa: E402
from mini_rome.data.demonstrations import make_tasks, record_experts  # noqa: E402
from mini_rome.experts import Expert  # noqa: E402
from mini_rome.loss import ipa_loss  # noqa: E402
from mini_rome.model import build_model, build_tokenizer  # noqa: E402
from mini_rome.runs import provenance, write_json  # noqa: E402
from mini_rome.sandbox import Pool  # noqa: E402
from mini_rome.trace import ChatFormat  # noqa: E402
from mini_rome.trainer import IPATrainer  # noqa: E402
from mini_rome.types import Trajectory  # noqa: E402

OUT = Path(__file__).parents[1] / "recipes" / "results" / "bench_train.json"
SIZES = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 8}
Clocks = tuple[float, float]  # seconds on the wall, and of processor time over all threads
LIMITS = {"step_ratio_high": 1.05, "loss_share": 0.02, "loss_ms_long": 5.0, "memory_ratio": 1.0}


@functools.cache
def parts() -> tuple[Any, list[Expert]]:
    """Tokenizer, and 8 experts of 8 chunks, two families in turn."""
    tokenizer = build_tokenizer()
    with Pool("sim") as pool:
        tasks = make_tasks(["notes", "tickets"], [8], 8, "train")
        return tokenizer, record_experts(ChatFormat(tokenizer), pool, tasks)


def batch() -> list[Trajectory]:
    """From each expert, the policy taking over at p = 0..7; every second one failed."""
    found = []
    for expert in parts()[1]:
        for p in range(8):
            turns = [copy.copy(turn) for turn in expert.trajectory.turns]
            for turn in turns:
                turn.logprobs = [-0.5] * len(turn.ids)
            task, prompt = expert.trajectory.task, expert.trajectory.prompt_ids
            found.append(Trajectory(task, prompt, turns, start=p, reward=float(p % 2)))
    return found


def ipa_trainer(folder: str, model: PreTrainedModel) -> IPATrainer:
    tokenizer, experts = parts()
    rollout: Any = tiny.Recorded(batch())
    rollout.chat = ChatFormat(tokenizer)
    # Without imitation, which trains rows that GRPO has not got.
    args = IPAConfig(output_dir=folder, failure_reward=-0.5, il_when="never", **SIZES)
    return IPATrainer(model, args, rollout, experts, tokenizer)


def grpo_trainer(folder: str, model: PreTrainedModel) -> GRPOTrainer:
    tokenizer, experts = parts()
    trajectories = batch()
    samples = [pack(trajectory) for trajectory in trajectories]
    rows = {
        "prompt_ids": [sample.prompt_ids for sample in samples],
        "completion_ids": [sample.completion_ids for sample in samples],
        "logprobs": [sample.logprobs for sample in samples],
        "env_mask": [sample.env_mask for sample in samples],
    }
    cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
    args = GRPOConfig(output_dir=folder, report_to="none", gradient_checkpointing=False, shuffle_dataset=False,
                      beta=0.0, **cpu, **SIZES)  # fmt: skip
    data = Dataset.from_list([{"prompt": expert.trajectory.task.name} for expert in experts])

    def rewards(**_: Any) -> list[float]:
        return [float(trajectory.reward or 0) for trajectory in trajectories]

    def recorded(*_: Any) -> dict[str, list]:
        return {name: list(values) for name, values in rows.items()}

    return GRPOTrainer(model, rewards, args, data, processing_class=tokenizer, rollout_func=recorded)


def optimiser_step(trainer: GRPOTrainer) -> Callable[[], None]:
    """One step on the recorded batch: rollouts taken in, scored, four micro-batches, the optimiser."""
    model, optimiser = trainer.model, torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    prompts = [{"prompt": row["prompt"]} for row in trainer.train_dataset for _ in range(SIZES["num_generations"])]
    trainer.current_gradient_accumulation_steps = SIZES["gradient_accumulation_steps"]

    def step() -> None:
        model.train()
        trainer._step, trainer._buffered_inputs = 0, None
        for _ in range(SIZES["gradient_accumulation_steps"]):
            trainer.training_step(model, [dict(row) for row in prompts], None)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        trainer._metrics["train"].clear()
        if isinstance(trainer, IPATrainer):
            trainer._loss_rows.clear()

    return step


def seconds(function: Callable[[], object]) -> Clocks:
    """On the wall, and of processor time: on a busy machine only the second means much."""
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def medians(function: Callable[[], object], repeats: int) -> Clocks:
    function()  # warm up
    wall, processor = zip(*(seconds(function) for _ in range(repeats)), strict=True)
    return statistics.median(wall), statistics.median(processor)


def fastest(function: Callable[[], object], repeats: int) -> Clocks:
    """What a call of milliseconds costs by itself: whoever shares the machine can only add to it."""
    function()
    wall, processor = zip(*(seconds(function) for _ in range(repeats)), strict=True)
    return min(wall), min(processor)


def step_times(pairs: int) -> np.ndarray:
    """Seconds of one optimiser step, interleaved: (pairs, IPA or GRPO, wall or processor)."""
    model = build_model(parts()[0])
    with tempfile.TemporaryDirectory() as folder:
        ipa = optimiser_step(ipa_trainer(folder, model))
        grpo = optimiser_step(grpo_trainer(folder, build_model(parts()[0])))
        ipa(), grpo()  # warm up
        times = []
        for pair in range(pairs):
            first, second = (ipa, grpo) if pair % 2 else (grpo, ipa)
            taken = [seconds(first), seconds(second)]
            times.append(taken if pair % 2 else taken[::-1])
    return np.array(times)


def ratio(times: np.ndarray) -> dict[str, float]:
    """Of times (pairs, 2): median of IPA / GRPO, and the ends of its 95 % bootstrap interval."""
    ratios = times[:, 0] / times[:, 1]
    drawn = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    ipa_s, grpo_s = np.median(times, axis=0)
    values = {"median": np.median(ratios), "low": low, "high": high, "ipa_s": ipa_s, "grpo_s": grpo_s}
    return {name: float(value) for name, value in values.items()}


def loss_seconds(
    rows: int, tokens: int, chunks: int, repeats: int = 100, of: Callable[..., Clocks] = medians
) -> tuple[Clocks, Clocks]:
    """chunk_returns and ipa_loss; the same with the backward to the log-probs: medians, or `of`, of the calls."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.arange(tokens) * chunks // tokens).repeat(rows, 1)
    ids[:, :: tokens // chunks] = -1
    logps = -torch.rand(rows, tokens, generator=generator)
    other, rewards = logps - 0.001, torch.ones(rows)
    rewards[::2] = -1.0
    logps.requires_grad_()

    def forward() -> torch.Tensor:
        return ipa_loss(logps, other, other, ids, chunk_returns(ids, rewards, 0.95), rewards).loss

    return of(forward, repeats), of(lambda: forward().backward(), repeats)


def forward_backward_seconds(rows: int, tokens: int, repeats: int = 3) -> Clocks:
    """Of the tiny model, in micro-batches of 16 rows."""
    model = build_model(parts()[0])
    ids = torch.randint(5, len(parts()[0]), (rows, tokens), generator=torch.Generator().manual_seed(0))

    def once() -> None:
        for part in ids.split(16):
            model(input_ids=part, labels=part).loss.backward()

    return medians(once, repeats)


def peak_mb(kind: str) -> float:
    """What one optimiser step adds to the process's peak memory; run in a process of its own."""
    make = {"ipa": ipa_trainer, "grpo": grpo_trainer}[kind]
    with tempfile.TemporaryDirectory() as folder:
        step = optimiser_step(make(folder, build_model(parts()[0])))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def peak_in_a_process(kind: str) -> float:
    done = subprocess.run([sys.executable, __file__, "--peak", kind], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs of optimiser steps")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--peak", choices=["ipa", "grpo"], help="only print one trainer's peak memory in MB")
    options = parser.parse_args()
    if options.peak:
        print(peak_mb(options.peak))
        return
    memory = {kind: peak_in_a_process(kind) for kind in ("ipa", "grpo")}
    times = step_times(options.pairs)
    (_, loss), model = loss_seconds(64, 512, 8), forward_backward_seconds(64, 512)
    long, long_backward = loss_seconds(64, 4096, 32)
    long_fastest, _ = loss_seconds(64, 4096, 32, of=fastest)
    record = provenance("sim", "recorded", 0) | {"threads": torch.get_num_threads(), "pairs": options.pairs}
    record |= {"limits": LIMITS, "peak_mb": memory}
    for index, clock in enumerate(("wall", "processor")):
        step = ratio(times[:, :, index])
        found = {
            "step_ratio_high": step["high"],
            "loss_share": loss[index] / model[index],
            "loss_ms_long": 1000 * long[index],
            "memory_ratio": memory["ipa"] / memory["grpo"],
        }
        record[clock] = found | {"step": step, "loss_ms": 1000 * loss[index], "model_ms": 1000 * model[index]}
        record[clock] |= {"loss_ms_long_fastest": 1000 * long_fastest[index]}
        record[clock] |= {"loss_and_backward_ms_long": 1000 * long_backward[index]}
        interval = f"{step['median']:.3f} [{step['low']:.3f}, {step['high']:.3f}]"
        print(f"{clock}: IPA step / GRPO step {interval} over {options.pairs} pairs")
        for name, value in found.items():
            verdict = "ok" if value <= LIMITS[name] else "MISSED"
            print(f"  {name:<16} {value:.4f}  (at most {LIMITS[name]})  {verdict}")
        print(f"  loss_ms_long is the median of 100 calls; the fastest: {1000 * long_fastest[index]:.4f}")
    write_json(options.out, record)


if __name__ == "__main__":
    main()
