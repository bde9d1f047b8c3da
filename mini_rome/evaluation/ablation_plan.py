"""Which runs of an ablation are missing, and what is written of those that are done: CSV, JSON, PNG.

One process writes: the CSV whole, with the rows of every finished run, after each one that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluation.ablation import Ablation, Variant, lengths
from mini_rome.evaluation.ablation_job import SFT, Job
from mini_rome.evaluation.figures import redraw
from mini_rome.evaluation.rows import COLUMNS, RESULTS, Row, read_rows
from mini_rome.progress import Display
from mini_rome.runs import provenance, write_csv, write_json

FIRST_SEED = 100  # seeds below 10 are for pilots: settings and claims are chosen on those
FAST_SEEDS = 2


def choose_seeds(rows: Sequence[Row], wanted: int, steps: int, first: int) -> list[int]:
    """Seeds with runs of this length, finished or begun, then new ones from `first` on.

    Runs of another length keep their seeds: mixed with these they would make a curve of two experiments.

    >>> choose_seeds([Row("a", "100", "all", 60, "x", 0.0)], 2, 60, 100)
    [100, 101]
    >>> choose_seeds([Row("a", "100", "all", 60, "x", 0.0)], 2, 20, 100)
    [101, 102]
    """
    longest: dict[int, int] = {}
    for (_, seed), last in lengths(rows).items():
        longest[int(seed)] = max(longest.get(int(seed), 0), last)
    seeds = sorted(seed for seed, last in longest.items() if last == steps)
    new = first
    while len(seeds) < wanted:
        if new not in longest:
            seeds.append(new)
        new += 1
    return seeds[:wanted]


@dataclass
class Plan:
    """What is to be run, and where it goes."""

    ablation: Ablation
    variants: list[Variant]
    wanted: int
    steps: int
    backend: str
    csv: Path
    cache: Path
    first: int = FIRST_SEED

    @classmethod
    def of(
        cls, ablation: Ablation, *, seeds: int | None, steps: int | None, variants: Sequence[str],
        backend: str, first_seed: int, fast: bool, out: str | None, cache: str,
    ) -> Plan:  # fmt: skip
        """From the recipe's options. ConfigError: a variant that is not there."""
        if unknown := set(variants) - set(ablation.names):
            raise ConfigError(f"--variants {' '.join(unknown)}: {ablation.name} has {', '.join(ablation.names)}")
        name = ablation.name if backend == "sim" else f"{ablation.name}_{backend}"
        default = Path("runs/fast") / f"{name}.csv" if fast else RESULTS / f"{name}.csv"
        if fast:
            ablation = replace(ablation, base={**ablation.base, **ablation.quick})
        return cls(
            ablation,
            [variant for variant in ablation.variants if not variants or variant.name in variants],
            seeds or (FAST_SEEDS if fast else ablation.seeds),
            steps or (ablation.fast if fast else ablation.steps),
            backend, Path(out) if out else default, Path(cache), first_seed,
        )  # fmt: skip

    @property
    def scratch(self) -> Path:
        """Where the runs of this process keep what they need meanwhile."""
        return self.cache / f"tmp-{os.getpid()}"

    def __post_init__(self) -> None:
        self.display = Display()
        self.rows = read_rows(self.csv) if self.csv.exists() else []
        json_file = self.csv.with_suffix(".json")
        self.facts: dict[str, Any] = json.loads(json_file.read_text()) if self.rows and json_file.exists() else {}
        self.added = not self.facts  # rows of this process: without any, the table is of the command that made it
        self.seeds = choose_seeds(self.rows, self.wanted, self.steps, self.first)

    def missing(self) -> list[Job]:
        """Runs without rows, seed by seed, so that what is there when it is stopped can be compared."""
        done = {pair for pair, last in lengths(self.rows).items() if last >= self.steps}
        return [
            Job.of(self.ablation, variant, seed, self.steps, self.backend, str(self.cache), str(self.scratch))
            for seed in self.seeds
            for variant in self.variants
            if (variant.name, str(seed)) not in done
        ]

    def begin(self) -> list[Job]:
        """Runs that are to be made; those that finished for another figure or were not taken over are taken now."""
        todo = [job for job in self.missing() if not self.take(job)]
        there = len(self.seeds) * len(self.variants) - len(todo)
        self.display.line(f"{self.ablation.name}: {len(todo)} runs of {self.steps} steps, {there} are there")
        self.display.line(f"seeds {', '.join(map(str, self.seeds))}; rows go to {self.csv}")
        return todo

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Two processes that write one CSV would lose each other's rows. ConfigError: another one does."""
        self.cache.mkdir(parents=True, exist_ok=True)
        self.csv.parent.mkdir(parents=True, exist_ok=True)
        with open(self.cache / f"{self.csv.stem}.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"{self.csv}: another process is running this ablation; wait for it") from None
            yield

    def take(self, job: Job) -> bool:
        """Take over the rows of a run that has finished, in this figure or another."""
        if not job.result.exists():
            return False
        found = json.loads(job.result.read_text())
        self.added = True
        self.rows += [Row(job.variant.name, *row[1:]) for row in found["rows"]]
        runs = self.facts.setdefault("runs", {})
        run = {"seconds": found["seconds"], "commit": found["commit"], "sft": found.get("sft")}
        runs[f"{job.variant.name}/{job.seed}"] = run
        model = json.loads((job.model / SFT).read_text())
        rates = {name: success["rate"] for name, success in model["success"].items()}
        about = {**rates, "seconds": model["seconds"], "weights": model.get("weights")}
        models, seed = self.facts.setdefault("sft", {}), str(job.sft_seed)
        if models.setdefault(seed, about).get("weights") != about["weights"]:  # made anew, by other code
            models[f"{seed}, {about['weights']}"] = about
        self.write()
        return True

    def write(self) -> None:
        """CSV and JSON, in the same order whichever run was first."""
        order = {name: index for index, name in enumerate(self.ablation.names)}
        self.rows.sort(key=lambda row: (order[row.variant], int(row.seed), row.metric, row.step, row.task))
        write_csv(self.csv, [row._asdict() for row in self.rows], COLUMNS)
        seeds = sorted({int(row.seed) for row in self.rows})
        facts = provenance(self.backend, "transformers", seeds[0] if seeds else self.first)
        if not self.added:
            facts |= {name: self.facts[name] for name in facts if name in self.facts}
        facts |= {"figure": self.ablation.name, "title": self.ablation.title, "seeds": seeds, "steps": self.steps}
        facts |= {"device": "cpu, one thread a run", "base": dict(self.ablation.base)}
        facts["variants"] = {variant.name: vars(variant) for variant in self.ablation.variants}
        facts["n"] = {"start_success": self.ablation.repeats, "test_success": self.ablation.held_out}
        keep = {name: self.facts[name] for name in ("runs", "sft", "wall_seconds", "claims") if name in self.facts}
        seconds = sum(run["seconds"] for run in keep.get("runs", {}).values())
        write_json(self.csv.with_suffix(".json"), facts | keep | {"seconds": round(seconds, 1)})

    def took(self, seconds: float) -> None:
        """So much more time on the clock, by all figures that were run together."""
        if self.added:
            self.facts["wall_seconds"] = round(self.facts.get("wall_seconds", 0) + seconds, 1)
            self.write()

    def report(self) -> None:
        """Draw, and say of each claim whether it holds."""
        self.facts["claims"] = []
        for claim in self.ablation.claims:
            try:
                found = claim.test(self.rows)
            except MiniRomeError as error:
                self.display.line(f"not tested: {claim.text} ({error})")
                continue
            self.facts["claims"].append({"claim": claim.text, "verdict": found.verdict, "numbers": found.numbers})
            self.display.line(f"{found.verdict}: {claim.text}: {found.numbers}")
        self.write()
        paths = self.csv, self.csv.with_suffix(".json"), self.csv.with_suffix(".png")
        self.display.line(f"figure: {redraw(*paths)}")
