# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Run ablations: every variant on the same tasks and seeds, several runs at once; draw them and test their claims.

What happens:
  1. the model after SFT is trained once per seed and kept in --cache for all variants and figures;
  2. each (variant, seed) trains in a process with one thread; its rows are added to the CSV as soon as it is done;
  3. runs whose rows are there are skipped, so the same command goes on after it was stopped;
  4. CSV, JSON and PNG are written to recipes/results, and each claim is tested.

Commands:
  a figure            python recipes/ablate.py fig12
  several, together   python recipes/ablate.py fig12 fig13
  two seeds, shorter  python recipes/ablate.py fig12 --seeds 2 --steps 20
  real containers     python recipes/ablate.py fig12 --seeds 3 --sandbox docker
  a pilot             python recipes/ablate.py fig12 --seeds 2 --first_seed 0 --out runs/pilot/fig12.csv
  redraw              mini-rome figure fig12
  test a rerun        mini-rome figure fig12 --check runs/pilot/fig12.csv
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour
os.environ["OMP_NUM_THREADS"] = "1"  # of each run: two runs on two cores are faster than one on both

import sys  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from itertools import takewhile  # noqa: E402

from mini_rome.errors import ConfigError  # noqa: E402
from mini_rome.evaluation.ablation_figures import ABLATIONS, get_ablation  # noqa: E402
from mini_rome.evaluation.ablation_plan import FIRST_SEED, Plan  # noqa: E402
from mini_rome.evaluation.ablation_pool import run_plans  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.sandbox import resolve  # noqa: E402


@dataclass
class AblateArguments:
    """How much of an ablation is run, and where. None of these values is in the paper."""

    seeds: int | None = field(default=None, metadata={"help": "Seeds to have, of these steps. Default: the figure's"})
    steps: int | None = field(default=None, metadata={"help": "Optimiser steps of each run. Default: the figure's."})
    variants: list[str] = field(default_factory=list, metadata={"help": "Only these variants. Default: all."})
    jobs: int = field(default=2, metadata={"help": "Runs at once, each with one thread."})
    sandbox: str = field(default="sim", metadata={"help": "docker, sim (simulated), or auto."})
    first_seed: int = field(default=FIRST_SEED, metadata={"help": "First seed; those below 10 are for pilots."})
    fast: bool = field(default=False, metadata={"help": "Two seeds and fewer steps, written to runs/fast."})
    out: str | None = field(default=None, metadata={"help": "CSV. Default: FIG.csv in recipes/results."})
    cache: str = field(default="runs/ablate", metadata={"help": "Folder of models after SFT and of finished runs."})

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "jobs"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")


def main() -> None:
    words = sys.argv[1:]
    figures = list(takewhile(lambda word: not word.startswith("-"), words))
    (options,) = OptionsParser(__doc__, (AblateArguments,), own=(AblateArguments,)).parse(words[len(figures) :])
    if not figures:
        raise ConfigError(f"name a figure: {', '.join(ABLATIONS)}")
    if options.out is not None and len(figures) > 1:
        raise ConfigError(f"--out {options.out}: one figure goes there, not {' and '.join(figures)}")
    chosen = {name: value for name, value in vars(options).items() if name not in ("jobs", "sandbox")}
    backend, why = resolve(options.sandbox)
    print(why)
    plans = [Plan.of(get_ablation(name), backend=backend, **chosen) for name in figures]
    run_plans(plans, options.jobs)
    for plan in plans:
        plan.report()


if __name__ == "__main__":
    guarded(main)
