"""The fork microscope: how likely success is from every state along one trajectory, and which chunks decide.

V(p) is the success rate of N rollouts from the state after p chunks (paper, section 3.2.4). Chunk f is crucial where
V(f-1) is significantly below V(f): `resample.crucial_chunks`, exact tests with Holm's correction. Beside it stand
gamma^(K-k), the weight that eq. 7 gives the chunks of a success, and the starts that training took on this task.
`tests/forks_proof.py` measures the intervals' coverage and the detector's power where V is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mini_rome.data.records import Row, from_row, rows_of, tokenizer_hash
from mini_rome.episodes import EPISODES
from mini_rome.errors import ConfigError, RecordError
from mini_rome.evaluation.assess import Loaded, open_pool
from mini_rome.evaluation.fork_figure import draw_forks
from mini_rome.evaluation.rows import COLUMNS
from mini_rome.evaluation.stats import wilson
from mini_rome.experts import Expert, play
from mini_rome.resample import crucial_chunks
from mini_rome.rollout import Rollout
from mini_rome.runs import provenance, write_csv, write_json, writing
from mini_rome.sampler.base import SamplingParams
from mini_rome.trace import ChatFormat

FORK_STEP = 1 << 29  # keeps the random numbers apart from those of training steps and evaluations
NAME = "forks"


@dataclass(frozen=True)
class Forks:
    """successes[p] of trials[p] scored rollouts from p = 0..K-1; crucial: chunk ids, each also its fork's p."""

    successes: list[int]
    trials: list[int]
    crucial: list[int]

    def points(self, level: float = 0.95) -> list[dict[str, Any]]:
        """One row per p: V(p), its Wilson interval, n, and whether the chunk that follows is crucial."""
        rows = []
        for p, (won, n) in enumerate(zip(self.successes, self.trials, strict=True)):
            low, high = wilson(won, n, level)
            rows.append({"p": p, "rate": won / n, "low": low, "high": high, "n": n, "crucial": p in self.crucial})
        return rows


def microscope(rollout: Rollout, expert: Expert, n: int, params: SamplingParams) -> Forks:
    """n rollouts from every prefix. RecordError: at some prefix not one of them could be scored."""
    starts = [expert.start(p) for p in range(expert.chunks) for _ in range(n)]
    trajectories = rollout.collect(starts, params, step=FORK_STEP)
    groups = [trajectories[p * n : (p + 1) * n] for p in range(expert.chunks)]
    scored = [[t.reward for t in group if t.reward is not None] for group in groups]
    if not all(scored):
        task = expert.trajectory.task.name
        raise RecordError(f"{task}, p = {scored.index([])}: the sandbox failed in all {n} rollouts")
    successes, trials = [sum(reward == 1.0 for reward in rewards) for rewards in scored], [len(r) for r in scored]
    return Forks(successes, trials, crucial_chunks(successes, trials))


def find_trajectory(path: str | Path, task: str | None, chat: ChatFormat) -> tuple[Row, list[Row]]:
    """The record to look at, and every record of its task: the longest success, of `task` if that is named.

    path: a file of trajectories, or a run's folder. RecordError: no success there, or ids of another tokenizer.
    """
    place = Path(path) / EPISODES if Path(path).is_dir() else Path(path)
    rows = [row for _, row in rows_of(place)]
    won = [row for row in rows if row.get("reward") == 1.0 and task in (None, row["task"])]
    if not won:
        about = "" if task is None else f" of task {task}"
        raise RecordError(
            f"--trajectory {path} holds no successful trajectory{about} among {len(rows)}: V(p) needs one to follow."
        )
    # Of a run: a training episode, where rollback stood on its task is then known too.
    best = max(won, key=lambda row: (row["split"] == "train" and bool(row.get("kept")), len(row["turns"])))
    if best["tokenizer"] != tokenizer_hash(chat.tokenizer):
        raise RecordError(f"--trajectory {path}: of another tokenizer than --model's. Name the model of that run.")
    return best, [row for row in rows if row["task"] == best["task"]]


def starts_by_step(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(step, p) of the kept training episodes of one task: where resampling stood."""
    kept = {(row["kept"]["step"], row["start"]) for row in rows if row["split"] == "train" and row.get("kept")}
    return sorted((step, p) for step, p in kept if step is not None)


def run_forks(
    path: str | Path, task: str | None, model: str, backend: str, n: int, seed: int, out: Path, gamma: float = 0.95
) -> Path:
    """The verb `figure forks --trajectory`: forks.json, forks.csv and forks.png in `out`; the picture's path."""
    if n < 1:
        raise ConfigError(f"--n {n}: rollouts from every prefix, at least 1 (32 or more to call a chunk crucial)")
    console = Console()
    with open_pool(backend, 32, console) as pool:
        loaded = Loaded.open(model, pool, seed)
        row, same_task = find_trajectory(path, task, loaded.rollout.chat)
        recorded = from_row(row)
        expert = play(loaded.rollout.chat, recorded.task, pool, [turn.ids for turn in recorded.turns])
        if expert.trajectory.reward != 1.0:
            raise RecordError(f"{recorded.task.name}: played again it is not rewarded ({expert.trajectory.reason})")
        forks = microscope(loaded.rollout, expert, n, SamplingParams())
        summary = {
            **provenance(pool.backend, "transformers", seed), "figure": NAME, "task": recorded.task.name,
            "trajectory": str(path), "model": model, "n": n, "gamma": gamma, "points": forks.points(),
            "commands": [turn.commands for turn in expert.trajectory.turns], "starts": starts_by_step(same_task),
        }  # fmt: skip
    return write_forks(out, summary)


def write_forks(out: Path, summary: dict[str, Any]) -> Path:
    """The numbers as JSON and as the long CSV of a figure, and the picture."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    rows = [
        dict(zip(COLUMNS, ("policy", summary["seed"], summary["task"], point["p"], metric, point[key]), strict=True))
        for point in summary["points"]
        for metric, key in (("success", "rate"), ("n", "n"))
    ]
    table, numbers, png = out / f"{NAME}.csv", out / f"{NAME}.json", out / f"{NAME}.png"
    write_csv(table, rows, COLUMNS)
    write_json(numbers, summary)
    return draw_forks(table, numbers, png)
