"""Runs of ablations in several processes at once, each with one thread.

They share nothing but models after SFT, of which each is made once, before the first run that needs it; and runs that
two figures have in common, which are made for one of them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing.queues import Queue
from pathlib import Path

from mini_rome.evaluation.ablation_job import SFT, Job
from mini_rome.evaluation.ablation_plan import Plan
from mini_rome.evaluation.ablation_run import make_sft, run_job
from mini_rome.progress import Display, Update

POLL_S = 1.0


def run_plans(plans: Sequence[Plan], at_once: int) -> None:
    """Run what is missing of these figures, in their order. However it ends, each CSV has every finished run."""
    display, began = Display(), time.monotonic()
    with ExitStack() as locks:
        for plan in plans:
            locks.enter_context(plan.alone())
            plan.scratch.mkdir(parents=True, exist_ok=True)
        todo = [(plan, job) for plan in plans for job in plan.begin()]
        try:
            if todo:
                with display.stage("runs", sum(units(todo))) as update:
                    Pool(todo, at_once, update).work()
        finally:
            for plan in plans:
                shutil.rmtree(plan.scratch, ignore_errors=True)
                plan.took(time.monotonic() - began)


def units(todo: Sequence[tuple[Plan, Job]]) -> tuple[int, int]:
    """Steps of runs, and of models that must be made first, each taken for as long as a run."""
    runs = {job.result: job.steps for _, job in todo}
    models = {job.model: job.steps for _, job in todo if not (job.model / SFT).exists()}
    return sum(runs.values()), sum(models.values())


class Pool:
    """The runs that are left, and those that are going on."""

    def __init__(self, todo: list[tuple[Plan, Job]], at_once: int, update: Update) -> None:
        self.todo, self.at_once, self.update = todo, at_once, update
        self.running: dict[Future, tuple[Path, int]] = {}  # what it makes; steps that count when it is there
        self.done, self.total = 0, sum(units(todo))

    def work(self) -> None:
        """Until nothing is left. An error or Ctrl-C ends the processes at once: what they were at is run again."""
        context = multiprocessing.get_context("spawn")
        notes: Queue[int] = context.Queue()
        with ProcessPoolExecutor(self.at_once, context, _begin, (notes,)) as pool, ExitStack() as undo:
            undo.callback(_kill)
            while self.todo or self.running:
                while len(self.running) < self.at_once and (chosen := self.next()) is not None:
                    job, made = chosen
                    sft = made == job.model
                    self.running[pool.submit(make_sft if sft else _run, job)] = made, job.steps if sft else 0
                self.done += _drain(notes)
                for future in [each for each in self.running if each.done()]:
                    future.result()
                    self.done += self.running.pop(future)[1]
                self.todo = [(plan, job) for plan, job in self.todo if not plan.take(job)]
                self.update(self.done, self.total, note=f"{len(self.todo)} to go")
            undo.pop_all()

    def next(self) -> tuple[Job, Path] | None:
        """(job, what is to be made) of the first that can begin now: its rows, or the model they start from."""
        making = {made for made, _ in self.running.values()}
        for _, job in self.todo:
            wanted = job.result if (job.model / SFT).exists() else job.model
            if wanted not in making:
                return job, wanted
        return None


_NOTES: Queue | None = None  # of a worker: where it tells its steps


def _begin(notes: Queue) -> None:
    """In each worker, once: one thread, quiet libraries."""
    global _NOTES
    _NOTES = notes
    import torch

    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # progress bars of libraries; errors come back as exceptions


def _tell(steps: int) -> None:
    assert _NOTES is not None
    _NOTES.put(steps)


def _run(job: Job) -> None:
    run_job(job, _tell)


def _drain(notes: Queue) -> int:
    """Steps told since the last call; waits a second for the first."""
    told = 0
    try:
        told += notes.get(timeout=POLL_S)
        while True:
            told += notes.get_nowait()
    except queue.Empty:
        return told


def _kill() -> None:
    for child in multiprocessing.active_children():
        child.terminate()
