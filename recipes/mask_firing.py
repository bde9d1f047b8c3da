# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""When does the mask of eq. 8 fire? A sampler of another precision than the trainer, measured on a saved model.

What is measured:
  1. episodes by a sampler in float32 and in bfloat16; mu is what it recorded at every token;
  2. pi_old, the same weights scored by the float32 trainer;
  3. quantiles of pi_old / mu over tokens, chunks and sequences: the share above H is the share that eq. 8 masks.

Commands:
  one CPU, a minute   python recipes/mask_firing.py --model runs/latest --sandbox sim
  redraw              mini-rome figure mask_firing
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from dataclasses import dataclass, field  # noqa: E402

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from mini_rome.errors import ConfigError  # noqa: E402
from mini_rome.evaluation.assess import Loaded, open_pool  # noqa: E402
from mini_rome.evaluation.calibration import sampled_mismatch  # noqa: E402
from mini_rome.evaluation.figures import locate, redraw  # noqa: E402
from mini_rome.evaluation.rows import COLUMNS, Row  # noqa: E402
from mini_rome.loss import Level, mismatch_ratios  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.runs import claim_output, provenance, write_csv, write_json  # noqa: E402
from mini_rome.tasks.choice import TaskChoice  # noqa: E402

LEVELS: tuple[Level, ...] = ("token", "chunk", "sequence")
PRECISIONS = ("float32", "bfloat16")
THRESHOLD = 1.02  # the default H of IPAConfig


@dataclass
class FiringArguments:
    """What is measured. None of these values is in the paper."""

    model: str = field(default="runs/latest", metadata={"help": "A run's folder or a saved model."})
    sandbox: str = field(default="auto", metadata={"help": "docker, sim (simulated), or auto."})
    families: list[str] = field(default_factory=lambda: ["notes", "tickets"], metadata={"help": "Task families."})
    chunks: list[int] = field(default_factory=lambda: [4], metadata={"help": "Horizons K."})
    n: int = field(default=64, metadata={"help": "Held-out episodes per precision and seed."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One repetition each."})
    out: str = field(default="mask_firing", metadata={"help": "CSV, or a name in recipes/results."})

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ConfigError("--seeds []: at least one is needed")


def main() -> None:
    (options,) = OptionsParser(__doc__, (FiringArguments,), own=(FiringArguments,)).parse()
    tasks = TaskChoice(options.families, options.chunks, options.n).tasks()
    table, summary, png = locate(options.out)
    claim_output(table)
    per_mille = torch.arange(0, 1001, 5)
    rows: list[Row] = []
    found: dict[str, dict] = {precision: {} for precision in PRECISIONS}
    with open_pool(options.sandbox, 32, Console()) as pool:
        for precision in PRECISIONS:
            measured = []
            for seed in options.seeds:
                columns = sampled_mismatch(Loaded.open(options.model, pool, seed, precision), tasks)
                measured.append(columns)
                for level in LEVELS:
                    quantiles = mismatch_ratios(*columns, level).quantile(per_mille.double() / 1000)
                    for step, value in zip(per_mille.tolist(), quantiles.tolist(), strict=True):
                        rows.append(Row(precision, str(seed), "all", step, f"{level}_ratio", value))
            for level in LEVELS:
                ratios = torch.cat([mismatch_ratios(*columns, level) for columns in measured])
                share = (ratios > THRESHOLD).double().mean().item()
                found[precision][level] = {"count": len(ratios), "masked": share, "p99": ratios.quantile(0.99).item()}
                print(f"{precision:<9} {level:<9} n {len(ratios):>6}  p99 {found[precision][level]['p99']:.6f}  "
                      f"max {ratios.max():.6f}  masked at H = {THRESHOLD}: {share:.4%}")

    write_csv(table, [row._asdict() for row in rows], COLUMNS)
    write_json(summary, {"figure": "mask_firing", "mismatch_threshold": THRESHOLD, "episodes": len(tasks)}
               | {"families": options.families, "chunks": options.chunks, "split": "test"}
               | {"seeds": options.seeds, "found": found}
               | provenance(pool.backend, "transformers", options.seeds[0]))  # fmt: skip
    print(redraw(table, summary, png))


if __name__ == "__main__":
    guarded(main)
