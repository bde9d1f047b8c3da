# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Make training data: instances, trajectories of several teachers, and the four-stage filter.

What differs from collecting demonstrations:
  1. an instance is proved in a sandbox before anybody works on it: the reference passes, doing nothing fails;
  2. teachers differ in skill, so that failures and the recoveries after them are in the data;
  3. a trajectory is kept when heuristics, a judge, a replay in a fresh box and a person's sample let it through.

Commands:
  one CPU, a minute     python recipes/data.py            (or: make data)
  real containers       python recipes/data.py --sandbox docker
  5,000 trajectories    python recipes/data.py --config recipes/configs/data_families.yaml
  after an interruption python recipes/data.py --resume runs/data-...
  read your marks back  python recipes/data.py --resume runs/data-... (after marking sample.csv there)
  a model as teacher    python recipes/data.py --teacher_url http://127.0.0.1:8000/v1 --teacher_model NAME
  the policy as teacher python recipes/data.py --policy runs/latest/sft
  then                  python recipes/sft.py --stage 1 --data runs/data-.../dataset
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

import json  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import asdict, dataclass, field, replace  # noqa: E402
from pathlib import Path  # noqa: E402

from rich.table import Table  # noqa: E402

from mini_rome.data import records  # noqa: E402
from mini_rome.data.filters import Dropped, EndpointJudge, RuleJudge, read_marks, run_filter, sample_to_mark  # noqa: E402
from mini_rome.data.funnel import ours, save_funnel, tables  # noqa: E402
from mini_rome.data.staged import start_model  # noqa: E402
from mini_rome.data.synthesis import (  # noqa: E402
    EndpointTeacher,
    PolicyTeacher,
    Teacher,
    Yield,
    explore,
    instances,
    scripted_teachers,
    teach,
)
from mini_rome.errors import ConfigError  # noqa: E402
from mini_rome.evaluation.canvas import sandbox_words  # noqa: E402
from mini_rome.evaluation.model_client import Endpoint  # noqa: E402
from mini_rome.model import build_tokenizer  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.progress import Display  # noqa: E402
from mini_rome.rollout import Rollout  # noqa: E402
from mini_rome.run_options import check_horizons  # noqa: E402
from mini_rome.runs import new_run, provenance, write_csv, write_json  # noqa: E402
from mini_rome.sampler.transformers import TransformersSampler  # noqa: E402
from mini_rome.sandbox import Pool, resolve  # noqa: E402
from mini_rome.trace import ChatFormat  # noqa: E402

STARTED = "options.json"
OF_INSTANCES = ("families", "chunks", "count", "seed")  # a run that went on with others would be neither of the two


@dataclass
class DataArguments:
    """What is made. The defaults take about a minute on two cores."""

    sandbox: str = field(default="auto", metadata={"help": "docker, sim (simulated), or auto: docker if it answers."})
    families: list[str] = field(default_factory=lambda: ["notes", "tickets"], metadata={"help": "Task families."})
    chunks: list[int] = field(default_factory=lambda: [1, 2, 3, 4], metadata={"help": "Horizons K of the instances."})
    count: int = field(default=300, metadata={"help": "Instances to propose, before variations."})
    teacher_url: str | None = field(default=None, metadata={"help": "OpenAI-compatible endpoint: one more teacher."})
    teacher_model: str = field(default="", metadata={"help": "Its model."})
    policy: str | None = field(default=None, metadata={"help": "Saved model: one more teacher, of your own."})
    judge_url: str | None = field(default=None, metadata={"help": "Endpoint of the judge; default: the rule judge."})
    judge_model: str = field(default="", metadata={"help": "Its model."})
    sample: int = field(default=40, metadata={"help": "Trajectories in the sample to mark."})
    boxes: int = field(default=32, metadata={"help": "Sandboxes open at once, at most."})
    seed: int = field(default=0, metadata={"help": "Seed of instances."})
    resume: str | None = field(default=None, metadata={"help": "Folder of a run to go on with."})

    def __post_init__(self) -> None:
        for name in ("count", "sample", "boxes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        for role in ("teacher", "judge"):
            url = getattr(self, f"{role}_url")
            if url and not getattr(self, f"{role}_model"):
                raise ConfigError(f"--{role}_url {url}: needs --{role}_model, its model's name")
        check_horizons(self.families, chunks=self.chunks)


def main() -> None:
    (a,) = OptionsParser(__doc__, (DataArguments,), own=(DataArguments,)).parse()
    display = Display()
    backend, why = resolve(a.sandbox)
    display.line(why)
    if a.resume is not None:
        a = as_started(a, Path(a.resume))
    tokenizer = build_tokenizer(a.families)
    chat = ChatFormat(tokenizer)
    policy = None if a.policy is None else start_model(a.policy, chat, a.seed, "--policy")
    folder = Path(a.resume) if a.resume is not None else new_run(kind="data")
    display.line(f"run: {folder}")
    write_json(folder / STARTED, {name: getattr(a, name) for name in OF_INSTANCES})
    tokenizer.save_pretrained(folder / "tokenizer")

    with going_on(display, folder), Pool(backend, size=a.boxes) as pool:
        # Explore, build, review: instances that prove themselves.
        proposed, explored = explore(a.families, a.chunks, a.count, a.seed)
        with display.stage("instances", len(proposed)) as update:
            tasks, checked = instances(proposed, chat, pool, folder / "instances.jsonl", update)

        # Trajectories: every teacher on every instance.
        teachers: list[Teacher] = [*scripted_teachers()]
        if a.teacher_url:
            teachers.append(EndpointTeacher(Endpoint(a.teacher_url, a.teacher_model)))
        if policy is not None:
            sampler = TransformersSampler(policy, chat.stop_id)
            teachers.append(PolicyTeacher(Rollout(chat, sampler, pool, seed=a.seed)))
        with records.Appender(folder / "raw.jsonl", chat) as log:
            if log.dropped is not None:
                display.line(f"raw.jsonl, line {log.dropped}: was truncated, and is made again")
            with display.stage("trajectories", len(teachers) * len(tasks)) as update:
                taught = teach(teachers, tasks, chat, pool, log, update)
        display.console.print(yields([explored, *checked, *taught]))

        # The four-stage filter. A replay in a fresh box is one of the stages.
        raw = records.read(folder / "raw.jsonl", chat)
        judge = EndpointJudge(Endpoint(a.judge_url, a.judge_model)) if a.judge_url else RuleJudge()
        sample = folder / "sample.csv"
        marks = read_marks(sample) if sample.exists() else {}
        with display.stage("filter", len(raw)) as update:
            filtered = run_filter(raw, chat, pool, judge=judge, marks=marks, progress=update)
    if not marks:
        display.line(f"to inspect: mark {sample_to_mark(sample, filtered.kept, a.sample)} trajectories in {sample}")

    # The dataset, and the numbers.
    tokens = sum(len(turn.ids) + len(turn.observation_ids) for each in filtered.kept for turn in each.turns)
    counts = ours(filtered.stages, tokens, len({each.task.content_hash for each in filtered.kept}))
    facts = {**provenance(backend, "scripted", a.seed), "options": asdict(a), "judge": judge.name}
    save_funnel(folder, filtered.stages, counts, {**facts, "seconds": display.seconds})
    save_dropped(folder / "dropped.csv", [each for stage in filtered.stages for each in stage.dropped])
    (folder / "dataset").mkdir(exist_ok=True)
    tokenizer.save_pretrained(folder / "dataset" / "tokenizer")
    kept = records.write(folder / "dataset" / "train.parquet", filtered.kept, chat)
    for table in tables(filtered.stages, counts, f"four-stage filter, {sandbox_words(backend)}, seed {a.seed}"):
        display.console.print(table)
    display.line(f"dataset: {kept} trajectories, {tokens:,} tokens in {folder / 'dataset'}")


def as_started(a: DataArguments, folder: Path) -> DataArguments:
    """The options, with those that make the instances as the run was started. ConfigError: others were given."""
    note = folder / STARTED
    if not note.exists():
        raise ConfigError(f"--resume {folder}: no {STARTED} there, so no run of data.py to go on with")
    began, plain = json.loads(note.read_text(encoding="utf-8")), DataArguments()
    for name, was in began.items():
        if getattr(a, name) not in (was, getattr(plain, name)):
            raise ConfigError(f"--{name} {getattr(a, name)}: the run in {folder} was started with {was}")
    return replace(a, **began)


@contextmanager
def going_on(display: Display, folder: Path) -> Iterator[None]:
    """Say how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        display.line(f"stopped; go on with: python recipes/data.py --resume {folder}")
        raise


def yields(found: list[Yield]) -> Table:
    """What each role was given, handed on, and why not."""
    table = Table(title="synthesis")
    for column in ("role", "given", "out", "lost because"):
        table.add_column(column)
    for each in found:
        why = ", ".join(f"{reason} {count}" for reason, count in each.why.items() if count) or "-"
        table.add_row(each.role, str(each.given), str(each.out), why)
    return table


def save_dropped(path: Path, dropped: list[Dropped]) -> None:
    """Every trajectory that was kept out, with the diff where a replay came out otherwise."""
    rows = [
        {"task": each.trajectory.task.name, "policy": each.trajectory.policy, "stage": each.stage,
         "reason": each.reason, "detail": each.detail} for each in dropped
    ]  # fmt: skip
    write_csv(path, rows, ("task", "policy", "stage", "reason", "detail"))


if __name__ == "__main__":
    guarded(main)
