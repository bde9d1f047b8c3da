"""What an instance of a family costs: making it, and checking the files of a finished episode on the host.

    make bench-tasks                       # about ten seconds

Prints a row per family, with a verdict, and writes recipes/results/bench_tasks.json. Processor time, at the longest
horizon (K = 16); of each split the fastest of three rounds of 100 instances, so that a busy machine counts little.
make_ms is that of the slowest split among train, validation and test.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from mini_rome.families import FAMILIES, get_family
from mini_rome.runs import provenance, write_json
from mini_rome.types import Split

OUT = Path(__file__).resolve().parents[1] / "recipes" / "results" / "bench_tasks.json"
LIMITS = {"make_ms": 1.0, "check_ms": 2.0}
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
CHUNKS = 16


def milliseconds(call: Callable[[int], object], times: int) -> float:
    """Processor time of one call, the fastest of three rounds."""
    rounds = []
    for _ in range(3):
        begun = time.process_time()
        for number in range(times):
            call(number)
        rounds.append(1000 * (time.process_time() - begun) / times)
    return min(rounds)


def measured(name: str) -> dict[str, float]:
    family = get_family(name)
    task = family.make(0, CHUNKS)
    files = {path: text.encode() for path, text in task.files.items()}
    return {
        "make_ms": max(milliseconds(lambda seed, s=split: family.make(seed, CHUNKS, s), 100) for split in SPLITS),
        # One instance in 32 is held back, so finding one takes many draws. Only an evaluation makes them.
        "private_make_ms": milliseconds(lambda seed: family.make(seed, CHUNKS, "private"), 100),
        "check_ms": milliseconds(lambda _: task.check(files), 20),
    }


def cell(name: str, value: float) -> str:
    verdict = "" if name not in LIMITS else "ok" if value <= LIMITS[name] else "MISSED"
    return f"{name} {value:.3f} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found = {name: measured(name) for name in FAMILIES}
    for name, row in found.items():
        print(f"{name:<10}", *(f"{cell(key, value):<24}" for key, value in row.items()))
    write_json(options.out, provenance("none", "none", 0) | {"chunks": CHUNKS, "limits": LIMITS, "families": found})


if __name__ == "__main__":
    main()
