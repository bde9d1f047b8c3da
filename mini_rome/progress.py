"""What a person sees while a run is going: one live line per stage in a terminal, plain lines elsewhere.

Also what makes a run stoppable: Ctrl-C ends it after the step at hand, with a checkpoint; a second one at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, Trainer, TrainerCallback

Update = Callable[..., None]  # update(done, total, note="")


class Display:
    """Prints stages; silent on all ranks but the first."""

    def __init__(self, enabled: bool = True) -> None:
        self.console = Console(quiet=not enabled, highlight=False)
        self.seconds: dict[str, float] = {}  # of each finished stage

    def line(self, text: str) -> None:
        """One plain line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Update]:
        """A stage of the run. Yields update(done, total, note): how far it is, and a word on how well."""
        begun = time.monotonic()
        if self.console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(name, total=total, note="")
                yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
        else:
            yield _Lines(self, name, begun)
        self.seconds[name] = round(time.monotonic() - begun, 1)
        self.line(f"{name}: done in {self.seconds[name]:.0f} s")

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )


class _Lines:
    """Progress without a terminal: a line at most every ten seconds, with the time left."""

    def __init__(self, display: Display, name: str, begun: float) -> None:
        self.display, self.name, self.begun, self.last = display, name, begun, begun

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self.last < 10 or not done:
            return
        self.last = now
        left = (now - self.begun) / done * (total - done)
        self.display.line(f"{self.name}: {done}/{total} {note} ({left:.0f} s left)".replace("  ", " "))


class TrainingProgress(TrainerCallback):
    """Shows the optimiser's steps in a stage, with a note made from the latest log."""

    def __init__(self, update: Update, note: Callable[[dict[str, float]], str]) -> None:
        self.update, self.note, self.text = update, note, ""

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.text = self.note(logs or {}) or self.text
        self.update(state.global_step, state.max_steps, note=self.text)


class StopAfterStep(TrainerCallback):
    """Ctrl-C: end the training after the step at hand, with a checkpoint where the trainer saves any."""

    def __init__(self, display: Display, saves: bool) -> None:
        self.display, self.saves, self.asked = display, saves, False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Listen for Ctrl-C inside the block; raise KeyboardInterrupt at its end if it came."""
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        kept = ", with a checkpoint" if self.saves else ""
        self.display.line(f"stopping after this step{kept}; Ctrl-C again to stop at once")

    def on_step_end(self, args, state, control, **kwargs):
        if self.asked:
            control.should_save = self.saves
            control.should_training_stop = True


def quiet(trainer: Trainer) -> None:
    """Take away the callback that prints each log as a dict: the display shows what matters."""
    trainer.remove_callback(PrinterCallback)


def train_sft(trainer: Trainer, display: Display, name: str) -> None:
    """Train as one stage of the run, with the loss beside the bar; Ctrl-C ends it after the step at hand."""
    quiet(trainer)
    stop = StopAfterStep(display, trainer.args.save_strategy != "no")
    trainer.add_callback(stop)
    with display.stage(name, trainer.args.max_steps) as update, stop.armed():
        trainer.add_callback(TrainingProgress(update, loss_note))
        trainer.train()


def loss_note(logs: dict[str, float]) -> str:
    """Of SFT, beside the bar."""
    return f"loss {logs['loss']:.3f}" if "loss" in logs else ""


def success_note(logs: dict[str, float]) -> str:
    """Of IPA, beside the bar."""
    if logs.get("success") is None:
        return ""
    return f"train success {logs['success']:.0%} from p {logs['start/mean']:.1f}"
