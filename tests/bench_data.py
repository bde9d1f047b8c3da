"""Speed of the data side, in one run: synthesis, filter and masks without the replay, packing against padding.

    python tests/bench_data.py            two minutes on two cores
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from tempfile import TemporaryDirectory

from mini_rome.data.demonstrations import make_tasks
from mini_rome.data.filters import RuleJudge, Thresholds, heuristics, replay
from mini_rome.data.staged import fit
from mini_rome.data.stages import SftRow, mixed_rows
from mini_rome.data.synthesis import mapped, scripted_teachers
from mini_rome.masks import MaskPolicy, annotate, masked_labels
from mini_rome.model import build_model, build_tokenizer
from mini_rome.progress import Display
from mini_rome.sandbox import Pool
from mini_rome.sft import MaskedSFTConfig
from mini_rome.trace import ChatFormat


def tokens_per_s(rows: list[SftRow], chat: ChatFormat, steps: int, **options) -> float:
    """Of a new model on these rows."""
    with TemporaryDirectory() as folder:
        config = MaskedSFTConfig(output_dir=folder, max_steps=steps, **options)
        return fit(build_model(chat.tokenizer), chat.tokenizer, rows, config, Display(False), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--pack_length", type=int, default=1024)
    options = parser.parse_args()
    chat, policy, judge, limits = ChatFormat(build_tokenizer()), MaskPolicy(), RuleJudge(), Thresholds()
    tasks = make_tasks(["notes", "tickets"], [1, 2, 3, 4, 8], options.tasks, "train")
    with Pool("sim") as pool:
        begun = time.monotonic()
        found = [
            each for teacher in scripted_teachers()
            for part in mapped(lambda task, by=teacher: by.write([task], chat, pool), tasks, pool) for each in part
        ]  # fmt: skip
        wrote = time.monotonic() - begun
        begun = time.monotonic()
        list(mapped(lambda each: replay(each, chat, pool), found, pool))
        replayed = time.monotonic() - begun
    print(f"trajectories written: {len(found) / wrote:.0f}/s, replayed: {len(found) / replayed:.0f}/s (sim)")
    begun = time.process_time()  # one thread without waiting: what a busy neighbour takes is left out
    for each in found:
        annotate(each, policy)
        heuristics(each, limits) or judge(each)
        masked_labels(each, policy)
    turns = sum(len(each.turns) for each in found)
    print(f"filter and masks: {turns / (time.process_time() - begun):.0f} turns/s of CPU time")
    rows = mixed_rows(chat, [each for each in found if each.reward == 1.0], policy)
    mean = sum(len(row["input_ids"]) for row in rows) / len(rows)
    same = round(options.pack_length / mean)  # rows of a padded batch that hold about as many tokens
    packing = {"packing": True, "max_length": options.pack_length, "per_device_train_batch_size": 1}
    pairs = [
        (tokens_per_s(rows, chat, options.steps, per_device_train_batch_size=same),
         tokens_per_s(rows, chat, options.steps, **packing))
        for _ in range(options.pairs)
    ]  # fmt: skip
    ratios = sorted(packed / padded for padded, packed in pairs)
    padded, packed = (median(column) for column in zip(*pairs, strict=True))
    print(f"SFT: padding {padded:.0f} tokens/s (batch {same}), packing {packed:.0f} ({options.pack_length}): "
          f"{median(ratios):.2f} times (median of {len(pairs)}, {ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
