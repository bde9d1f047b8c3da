"""vLLM against transformers on the tiny model: tokens per second, whole rollouts and syncs. One run, ratios count.

    make bench-sampler            or: make bench-sampler ARGS="--episodes 1 16 --turns 4"

Every episode is a prompt of one notes task and some turns of fixed length, answered by the sampler alone: no sandbox.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from mini_rome.model import build_model, build_tokenizer  # noqa: E402
from mini_rome.runs import provenance, write_json  # noqa: E402
from mini_rome.sampler.base import Request, Sampler, SamplingParams  # noqa: E402
from mini_rome.sampler.transformers import TransformersSampler  # noqa: E402
from mini_rome.sampler.vllm import VLLMSampler  # noqa: E402

NEVER = 0  # the stop id: padding, which an untrained model draws once in 800 tokens
TOKENS, PROMPT, OBSERVATION = 20, 120, 30


def rollout(sampler: Sampler, episodes: int, turns: int, run: int) -> float:
    """Tokens per second of `episodes` in step, each turn's context starting with the one before."""
    contexts = [[5 + (7 * at + episode) % 700 for at in range(PROMPT)] for episode in range(episodes)]
    sampled, begun = 0, time.perf_counter()
    for turn in range(turns):
        requests = [Request(number, list(ids), (run, 0, number, turn)) for number, ids in enumerate(contexts)]
        completions = sampler.generate(requests, SamplingParams(max_new_tokens=TOKENS))
        for ids, completion in zip(contexts, completions, strict=True):
            ids += [*completion.ids, *range(10, 10 + OBSERVATION)]
            sampled += len(completion.ids)
    sampler.forget()
    return sampled / (time.perf_counter() - begun)


def seconds(action: Any, repeats: int = 5) -> float:
    """Median time of an action."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the samplers on the tiny model.")
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args()
    model = build_model(build_tokenizer()).eval()
    begun = time.perf_counter()
    engine = VLLMSampler(model, NEVER)
    start = time.perf_counter() - begun
    samplers: dict[str, Sampler] = {"transformers": TransformersSampler(model, NEVER), "vllm": engine}
    speeds: dict[str, dict[int, float]] = {name: {} for name in samplers}
    for count in options.episodes:
        for name, sampler in samplers.items():
            rollout(sampler, count, 1, 1)  # warm
            speeds[name][count] = rollout(sampler, count, options.turns, 2)
    sync = seconds(lambda: engine.sync(model, engine.version + 1))
    table = Table(title=f"tokens per second, tiny model, {options.turns} turns of {TOKENS} tokens")
    for column in ("episodes", *samplers, "vllm / transformers"):
        table.add_column(column, justify="right")
    for count in options.episodes:
        one, two = speeds["transformers"][count], speeds["vllm"][count]
        table.add_row(str(count), f"{one:.0f}", f"{two:.0f}", f"{two / one:.2f}")
    console = Console()
    console.print(table)
    cached = engine.cached_tokens / engine.prompt_tokens
    console.print(f"vllm: {start:.1f} s to start, sync with probe {sync:.3f} s, {cached:.0%} of prompt tokens cached")
    if options.out:
        numbers = {"tokens_per_s": speeds, "sync_s": sync, "start_s": start, "cached_share": cached}
        write_json(options.out, provenance("none", "vllm", 0) | numbers)


if __name__ == "__main__":
    main()
