# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Ablation of masked SFT: with and without error mask, task mask and stage 2, several seeds, whatever it shows.

What each run is:
  1. teachers that make many mistakes, say steps twice and repeat failing commands write the data of all variants;
  2. a variant trains the same tiny model on it, with its masks; `stage 2` goes on with half as many steps on the best
     trajectory of each instance, four times as often where it is still wrong, `longer` with as many on the same data;
  3. success and the share of failing turns are measured on held-out tasks, from the initial state.

Commands:
  all, resumable         python recipes/sft_masks.py
  two seeds, quick       python recipes/sft_masks.py --seeds 0 1 --steps 60 --count 200 --eval_tasks 100
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

import json  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import asdict, dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402

from mini_rome.data.ablation_masks import VARIANTS, draw_masks, read_table, rows_of, table_of  # noqa: E402
from mini_rome.data.demonstrations import make_tasks  # noqa: E402
from mini_rome.data.staged import fit  # noqa: E402
from mini_rome.data.stages import EMPHASIS, REFINE, emphasised, mixed_rows, preferred, still_wrong  # noqa: E402
from mini_rome.data.synthesis import Scripted  # noqa: E402
from mini_rome.errors import ConfigError  # noqa: E402
from mini_rome.evaluation.evaluate import EVALUATION_STEP, PAPER_SAMPLING  # noqa: E402
from mini_rome.evaluation.rows import COLUMNS  # noqa: E402
from mini_rome.experts import Start  # noqa: E402
from mini_rome.masks import MaskPolicy, annotate  # noqa: E402
from mini_rome.model import build_model, build_tokenizer  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.progress import Display  # noqa: E402
from mini_rome.rollout import Rollout  # noqa: E402
from mini_rome.run_options import check_horizons  # noqa: E402
from mini_rome.runs import provenance, write_csv, write_json  # noqa: E402
from mini_rome.sampler.transformers import TransformersSampler  # noqa: E402
from mini_rome.sandbox import Pool, resolve  # noqa: E402
from mini_rome.sft import MaskedSFTConfig, micro_batches  # noqa: E402
from mini_rome.trace import ChatFormat  # noqa: E402
from mini_rome.types import Task, Trajectory  # noqa: E402

TEACHERS = (
    Scripted("clumsy", mistakes=0.4, repeats=0.15),
    Scripted("stubborn", mistakes=0.2, stubborn=2, repeats=0.05),
)


@dataclass
class AblationArguments:
    """What is compared. None of these values is in the paper."""

    out: str = field(default="recipes/results/sft_masks.csv", metadata={"help": "CSV; JSON and PNG go beside it."})
    sandbox: str = field(default="sim", metadata={"help": "docker, sim (simulated), or auto."})
    families: list[str] = field(default_factory=lambda: ["notes", "tickets"], metadata={"help": "Task families."})
    chunks: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Horizons K of SFT."})
    long_chunks: list[int] = field(default_factory=lambda: [6], metadata={"help": "Horizons K of the longer tasks."})
    count: int = field(default=500, metadata={"help": "Instances; each teacher writes one trajectory on each."})
    steps: int = field(default=240, metadata={"help": "Optimiser steps of the base run."})
    batch: int = field(default=32, metadata={"help": "Trajectories per step."})
    sft_rate: float = field(default=2e-3, metadata={"help": "Learning rate; a quarter of it in stage 2."})
    eval_tasks: int = field(default=200, metadata={"help": "Held-out tasks of each measurement."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "Seeds."})

    def __post_init__(self) -> None:
        for name in ("count", "steps", "batch", "eval_tasks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        check_horizons(self.families, chunks=self.chunks, long_chunks=self.long_chunks)


def main() -> None:
    (a,) = OptionsParser(__doc__, (AblationArguments,), own=(AblationArguments,)).parse()
    display, out = Display(), Path(a.out)
    backend, why = resolve(a.sandbox)
    display.line(why)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = read_table(out)
    done = {(row["variant"], row["seed"]) for row in rows}
    with Pool(backend, size=256 if backend == "sim" else 32) as pool:
        for seed in a.seeds:
            missing = [name for name in VARIANTS if (name, seed) not in done]
            chat = ChatFormat(build_tokenizer(a.families))
            data = written(a, chat, pool, seed) if missing else []
            for name in missing:
                values = run(a, name, chat, pool, data, seed, display)
                rows += rows_of(name, seed, a.steps, values)
                write_csv(out, rows, COLUMNS)
                display.line(f"seed {seed}, {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in values.items()))
    beside = out.with_suffix(".json")
    seconds = json.loads(beside.read_text())["seconds"] if beside.exists() else {}  # of the runs that were there
    facts = provenance(backend, "transformers", a.seeds[0])
    facts |= {"figure": "sft_masks", "seeds": a.seeds, "options": asdict(a), "seconds": seconds | display.seconds}
    write_json(beside, facts)
    display.console.print(table_of(rows, backend))
    display.line(f"figure: {draw_masks(out, beside, out.with_suffix('.png'))}")


def written(a: AblationArguments, chat: ChatFormat, pool: Pool, seed: int) -> list[Trajectory]:
    """The rewarded trajectories of all teachers, annotated; nothing else is filtered, so that the masks have work."""
    tasks = make_tasks(a.families, a.chunks, a.count, "train", seed)
    found = [each for teacher in TEACHERS for each in teacher.write(tasks, chat, pool) if each.reward == 1.0]
    for each in found:
        annotate(each, VARIANTS["both masks"].policy)
    return found


def run(
    a: AblationArguments, name: str, chat: ChatFormat, pool: Pool, data: list[Trajectory], seed: int, display: Display
) -> dict[str, float]:
    """Train one variant and measure it."""
    variant, model = VARIANTS[name], build_model(chat.tokenizer, seed)

    def train(trajectories: list[Trajectory], steps: float, rate: float) -> None:
        rows = mixed_rows(chat, trajectories, variant.policy, seed=seed)
        with TemporaryDirectory() as folder:
            config = MaskedSFTConfig(
                output_dir=folder, max_steps=round(steps), learning_rate=rate, seed=seed, **micro_batches(a.batch)
            )  # fmt: skip
            fit(model, chat.tokenizer, rows, config, display, f"{name}, seed {seed}")

    train(data, a.steps * variant.steps, a.sft_rate)
    rollout = Rollout(chat, TransformersSampler(model, chat.stop_id), pool, seed=seed)
    if variant.second:
        best = preferred(data)
        wrong = still_wrong(rollout, best, attempts=2)
        display.line(f"stage 2: {len(wrong)} of {len(best)} instances are still wrong")
        if wrong:
            train(emphasised(best, wrong, EMPHASIS), a.steps / 2, a.sft_rate * REFINE)
            rollout.sampler.sync(model, version=1)
    short, failed = outcomes(rollout, make_tasks(a.families, a.chunks, a.eval_tasks, "test", seed))
    long, _ = outcomes(rollout, make_tasks(a.families, a.long_chunks, a.eval_tasks, "test", seed))
    return {"success_short": short, "success_long": long, "failed_turns": failed}


def outcomes(rollout: Rollout, tasks: Sequence[Task]) -> tuple[float, float]:
    """(success, share of the agent's turns whose call failed) on held-out tasks, from the initial state."""
    played = rollout.collect([Start(task) for task in tasks], PAPER_SAMPLING, step=EVALUATION_STEP)
    scored = [each for each in played if each.reward is not None]
    for each in scored:
        annotate(each, MaskPolicy())
    turns = [turn for each in scored for turn in each.turns]
    success = sum(each.reward == 1.0 for each in scored) / max(1, len(scored))
    return success, sum(turn.error for turn in turns) / max(1, len(turns))


if __name__ == "__main__":
    guarded(main)
