"""The samplers against each other, syncs, rollouts ahead of training, and what a rollout costs beside both. One run.

    make bench-sampler            or: make bench-sampler ARGS="--episodes 1 16 --large 8 --repeats 1 --steps 3"

  1. tokens per second and seconds of a rollout, vLLM and transformers in turn: the tiny model, and a Qwen3-MoE of
     about 100 M random weights. Turns have a fixed length and are answered by the sampler alone: no sandbox.
  2. seconds until vLLM samples with new weights, of both models
  3. seconds of an optimiser step with --async_ratio 1 and 0: the tiny model after a short SFT, simulated sandbox,
     at a learning rate of 0, so that both draw the same rollouts
  4. the share of a rollout in which neither sampler nor sandbox is at work: the same model and tasks

Prints tables and writes recipes/results/bench_sampler.json. On a busy machine ratios count, seconds hardly.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

import torch  # noqa: E402
from qwen import qwen_moe, qwen_tokenizer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from mini_rome.arguments import RunArguments  # noqa: E402
from mini_rome.config import IPAConfig  # noqa: E402
from mini_rome.experts import Start  # noqa: E402
from mini_rome.model import build_model, build_tokenizer  # noqa: E402
from mini_rome.pipeline import Run  # noqa: E402
from mini_rome.progress import Display  # noqa: E402
from mini_rome.runs import provenance, write_json  # noqa: E402
from mini_rome.sampler.base import Request, Sampler, SamplingParams, uniforms  # noqa: E402
from mini_rome.sampler.transformers import TransformersSampler  # noqa: E402
from mini_rome.sampler.vllm import VLLMSampler  # noqa: E402
from mini_rome.sampler.weights import merged_weights  # noqa: E402
from mini_rome.timeline import STEP, Span, common, length, note, phase_shares, recording, union  # noqa: E402

OUT = Path(__file__).parents[1] / "recipes" / "results" / "bench_sampler.json"
LIMITS = {"sync_s_tiny": 0.2, "sync_s_100m": 2.0, "overhead_transformers": 0.15, "overhead_vllm": 0.15}
NEVER = 0  # the stop id: padding, which an untrained model draws once in 800 tokens
SAMPLERS = ("transformers", "vllm")
PROMPT, OBSERVATION = 120, 30  # tokens
LARGE = {"turns": 2, "tokens": 6}  # of a rollout of the 100 M model
SEED, EPISODES = 0, 64
RUN: dict[str, Any] = {
    "sandbox": "sim", "chunks": [6], "train_tasks": 16, "sft_tasks": 240, "sft_steps": 60, "eval_every": 0,
    "keep_episodes": 0,
}  # fmt: skip
IPA: dict[str, Any] = {
    "seed": SEED, "resampling": "parallel", "failure_reward": -1.0, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4, "save_strategy": "no",
    "learning_rate": 0.0,  # else the two ways train apart, and one policy soon writes longer episodes than the other
}  # fmt: skip


def rollout(sampler: Sampler, vocab: int, episodes: int, turns: int, tokens: int, run: int) -> tuple[int, float]:
    """Tokens sampled and seconds of `episodes` in step, each turn's context starting with the one before.

    run: another one has other prompts, of which a prefix cache holds nothing.
    """
    prompts = [uniforms((run, episode), PROMPT) for episode in range(episodes)]
    contexts = [[5 + int(u * (vocab - 5)) for u in prompt] for prompt in prompts]
    sampled, begun = 0, time.perf_counter()
    for turn in range(turns):
        requests = [Request(number, list(ids), (run, 0, number, turn)) for number, ids in enumerate(contexts)]
        completions = sampler.generate(requests, SamplingParams(max_new_tokens=tokens))
        for ids, completion in zip(contexts, completions, strict=True):
            ids += [*completion.ids, *range(10, 10 + OBSERVATION)]
            sampled += len(completion.ids)
    sampler.forget()
    return sampled, time.perf_counter() - begun


def median_and_fastest(action: Callable[[], Any], repeats: int = 9) -> tuple[float, float]:
    """Seconds. Whoever shares the machine can only add to them, so the fastest is what a call costs by itself."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return statistics.median(times), min(times)


def samplers(
    model: PreTrainedModel, episodes: Sequence[int], turns: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Medians over rollouts of both samplers in turn, so that a machine that gets busy slows both; and syncs."""
    begun = time.perf_counter()
    engine = VLLMSampler(model, NEVER)
    found: dict[str, Any] = {"start_s": time.perf_counter() - begun, "turns": turns, "tokens": tokens, "rollouts": []}
    rivals: dict[str, Sampler] = {"transformers": TransformersSampler(model, NEVER), "vllm": engine}
    for count in episodes:
        taken: dict[str, list[tuple[int, float]]] = {name: [] for name in rivals}
        for run in range(repeats + 1):
            for name, sampler in rivals.items():
                last = 1 if run == 0 else turns  # the first one warms up
                taken[name].append(rollout(sampler, engine.vocab_size, count, last, tokens, run))
        row: dict[str, Any] = {"episodes": count}
        for name, values in taken.items():
            seconds = statistics.median(seconds for _, seconds in values[1:])
            speed = statistics.median(sampled / seconds for sampled, seconds in values[1:])
            row[name] = {"tokens_per_s": speed, "rollout_s": seconds}
        row["ratio"] = row["vllm"]["tokens_per_s"] / row["transformers"]["tokens_per_s"]
        found["rollouts"].append(row)
    weights = dict(merged_weights(model))
    found["cached_share"] = engine.cached_tokens / engine.prompt_tokens
    for name, action in (
        ("sync", lambda: engine.sync(model, engine.version + 1)), ("probe", lambda: engine.probe(model, weights)),
    ):  # fmt: skip
        found[f"{name}_s"], found[f"{name}_fastest_s"] = median_and_fastest(action)
    engine.close()
    return found


@contextmanager
def quiet_run(folder: Path, model: str | None = None, sampler: str = "transformers", **options: Any) -> Iterator[Run]:
    """A run that prints nothing, its model built; options: of IPA."""
    run = Run(RunArguments(**RUN, model=model, sampler=sampler), IPAConfig(output_dir=str(folder), **IPA, **options))
    run.display = Display(enabled=False)
    with run:
        run.build_model()
        yield run


def short_sft(folder: Path) -> str:
    """A model whose episodes are of a real length: one without training is cut after three malformed responses."""
    with quiet_run(folder) as run:
        run.sft()
        run.save_model("sft")
        return str(run.folder / "sft")


def step_seconds(folder: Path, model: str, async_ratio: int, steps: int) -> tuple[list[float], float]:
    """Of each optimiser step of one training run; and processor seconds per step, over all threads."""
    with quiet_run(folder, model, async_ratio=async_ratio, max_steps=steps) as run:
        experts, begun = run.experts(), time.process_time()
        with recording() as spans:
            run.train_ipa("ipa", experts, None)
        processor = (time.process_time() - begun) / steps
    return [span.end - span.begin for span in spans if span.phase == STEP], processor


def rollouts_ahead(folder: Path, model: str, steps: int) -> dict[str, Any]:
    """Seconds of a step by async_ratio, two training runs of each.

    A run's first step draws its own rollouts in either way and with async_ratio 1 the last one draws none: medians
    are over the others.
    """
    runs: dict[int, list[tuple[list[float], float]]] = {0: [], 1: []}
    for number, ratio in enumerate((0, 1, 1, 0)):
        runs[ratio].append(step_seconds(folder / str(number), model, ratio, steps))
    found: dict[str, Any] = {}
    for ratio, taken in runs.items():
        found[str(ratio)] = {
            "median_s": statistics.median(seconds for steps, _ in taken for seconds in steps[1:-1]),
            "mean_s": statistics.mean(seconds for steps, _ in taken for seconds in steps),
            "processor_s": statistics.mean(processor for _, processor in taken),
        }
    found["ratio"] = {name: found["1"][name] / found["0"][name] for name in found["0"]}
    return found | {"steps_s": {ratio: [steps for steps, _ in taken] for ratio, taken in runs.items()}}


def unaccounted(spans: Sequence[Span]) -> float:
    """The share of the steps' time that lies in no phase; phases that go on at once count once.

    >>> unaccounted([Span("step", 0, 10), Span("generate", 0, 4), Span("environment", 3, 6), Span("reward", 8, 12)])
    0.2
    """
    whole = union(span for span in spans if span.phase == STEP)
    busy = union(span for span in spans if span.phase != STEP)
    return (length(whole) - length(common(busy, whole))) / length(whole)


def rollout_shares(folder: Path, model: str, sampler: str, repeats: int) -> dict[str, float]:
    """Whole rollouts of EPISODES episodes on the simulated sandbox: seconds, and the share of each part."""
    with quiet_run(folder, model, sampler) as run:
        tasks = [expert.trajectory.task for expert in run.experts()]
        starts = [Start(task) for task in tasks for _ in range(EPISODES // len(tasks))]
        params = SamplingParams(max_new_tokens=run.args.max_new_tokens)
        run.rollout.collect(starts, params)  # warm up
        with recording() as spans:
            for step in range(1, repeats + 1):
                begun = time.monotonic()
                run.rollout.collect(starts, params, step=step)
                note(STEP, begun)
        if isinstance(run.sampler, VLLMSampler):
            run.sampler.close()
    shares = phase_shares(spans)
    kept = {name: shares[name] for name in ("seconds", "generate", "environment", "reward")}
    return {**kept, "overhead": unaccounted(spans)}


def show(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    made = Table(box=None)
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*row)
    console.print(title, made, "", sep="\n")


def show_speeds(console: Console, name: str, found: dict[str, Any]) -> None:
    title = (
        f"{name}: {found['turns']} turns of {found['tokens']} tokens (vLLM starts in {found['start_s']:.0f} s; "
        f"{found['cached_share']:.0%} of its prompt tokens cached)"
    )
    columns = ("episodes", *(f"{each} {unit}" for unit in ("tokens/s", "rollout s") for each in SAMPLERS), "ratio")
    rows = [
        [str(row["episodes"]), *(f"{row[each]['tokens_per_s']:.0f}" for each in SAMPLERS),
         *(f"{row[each]['rollout_s']:.2f}" for each in SAMPLERS), f"{row['ratio']:.2f}"]
        for row in found["rollouts"]
    ]  # fmt: skip
    show(console, title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 16, 64, 128], help="of the tiny model")
    parser.add_argument("--turns", type=int, default=8, help="of the tiny model's episodes")
    parser.add_argument("--large", type=int, nargs="+", default=[8, 32], help="episodes of the 100 M model")
    parser.add_argument("--repeats", type=int, default=3, help="rollouts that a median is of")
    parser.add_argument("--steps", type=int, default=5, help="optimiser steps of each training run, at least 3")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    begun, load = time.monotonic(), os.getloadavg()[0]  # processes that wanted to run, of the last minute
    disable_progress_bar()
    console = Console(width=118, highlight=False)
    record = provenance("sim", "transformers, vllm", SEED) | {"threads": torch.get_num_threads(), "limits": LIMITS}

    tiny = samplers(build_model(build_tokenizer()).eval(), options.episodes, options.turns, 20, options.repeats)
    show_speeds(console, "tiny model", tiny)
    large = samplers(qwen_moe(qwen_tokenizer()).eval(), options.large, **LARGE, repeats=options.repeats)
    show_speeds(console, "Qwen3-MoE of 100 M weights", large)

    with tempfile.TemporaryDirectory() as folder:
        model = short_sft(Path(folder) / "sft")
        ahead = rollouts_ahead(Path(folder), model, options.steps)
        parts = {name: rollout_shares(Path(folder) / name, model, name, options.repeats) for name in SAMPLERS}
    columns = ("async_ratio", "median of inner steps", "mean of all steps", "processor, all threads")
    rows = [[name, *(f"{value:.2f}" for value in ahead[key].values())]
            for name, key in (("0", "0"), ("1", "1"), ("1 / 0", "ratio"))]  # fmt: skip
    show(console, "seconds of an optimiser step, 32 rollouts, K = 6, sim", columns, rows)
    shares = ("generate", "environment", "reward", "overhead")
    rows = [[name, f"{part['seconds']:.2f}", *(f"{part[each]:.1%}" for each in shares)]
            for name, part in parts.items()]  # fmt: skip
    title = f"a rollout of {EPISODES} episodes, K = 6, sim; overhead: neither sampler nor sandbox is at work"
    show(console, title, ("sampler", "seconds", *shares), rows)

    values = {
        "sync_s_tiny": tiny["sync_s"], "sync_s_100m": large["sync_s"],
        **{f"overhead_{name}": part["overhead"] for name, part in parts.items()},
    }  # fmt: skip
    met = {name: value <= LIMITS[name] for name, value in values.items()}
    rows = [[name, f"{value:.3f}", f"{LIMITS[name]:g}", "met" if met[name] else "MISSED"]
            for name, value in values.items()]  # fmt: skip
    show(console, "limits", ("", "measured", "limit", ""), rows)
    rows = [[name, *(f"{found[key]:.3f}" for key in ("sync_s", "sync_fastest_s", "probe_s"))]
            for name, found in (("tiny", tiny), ("100 M", large))]  # fmt: skip
    show(console, "seconds of a sync", ("", "median", "fastest", "of which the probe"), rows)
    minutes = (time.monotonic() - begun) / 60
    record |= {"load": {"at_start": load, "at_end": os.getloadavg()[0]}, "minutes": minutes}
    console.print(f"{minutes:.1f} minutes, load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    record |= {"tiny": tiny, "100m": large, "async_ratio": ahead, "rollout": parts, "values": values, "met": met}
    write_json(options.out, record)


if __name__ == "__main__":
    main()
