"""The learning curve of a run: train success and start position from the logs, test success every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mini_rome.data.demonstrations import make_tasks
from mini_rome.evaluation.evaluate import evaluate
from mini_rome.trainer import IPATrainer

if TYPE_CHECKING:
    from mini_rome.pipeline import Run


class Curve(TrainerCallback):
    """Collects the curve's rows from the logs, and test success every few steps."""

    def __init__(self, run: Run, trainer: IPATrainer, variant: str) -> None:
        self.run, self.trainer, self.variant = run, trainer, variant
        a = run.arguments
        self.tasks = make_tasks(a.families, a.chunks, a.curve_tasks, "validation", run.args.seed)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._rows(state.global_step, logs or {})

    def _rows(self, step: int, logs: dict[str, float]) -> None:
        shown = {"success": "train_success", "start/mean": "start_position", "grad_norm": "grad_norm"}
        shown |= {"conduct/misconduct": "train_misconduct", "conduct/honest_success": "train_honest_success"}
        for name, metric in shown.items():
            if logs.get(name) is not None:
                self.run.point(self.variant, step, metric, float(logs[name]))

    def on_step_end(self, args, state, control, **kwargs):
        every = self.run.arguments.eval_every
        if every and (state.global_step % every == 0 or state.global_step == state.max_steps):
            self._test(state.global_step)

    def on_train_begin(self, args, state, control, **kwargs):
        for entry in state.log_history:  # of a resumed run: its rows, up to the checkpoint
            self._rows(entry["step"], entry)
        if self.run.arguments.eval_every and state.global_step == 0:
            self._test(0)

    def _test(self, step: int) -> None:
        run = self.run
        run.sampler.sync(self.trainer.accelerator.unwrap_model(self.trainer.model), version=step)
        keep = run.kept.evaluation(run.chat, self.variant, step)
        result = evaluate(
            run.rollout, self.tasks, rank=run.ranks.process_index, ranks=run.ranks.num_processes, keep=keep
        )
        if result.n:
            run.point(self.variant, step, "test_success", result.rate)
            run.point(self.variant, step, "test_n", result.n)
        run.save_state()
