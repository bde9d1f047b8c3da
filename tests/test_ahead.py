"""Rollouts ahead of training: which weights and starts they use, what pi_old is, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Gradients, Recorded, mixed_batch, trajectory
from transformers import TrainerCallback

from mini_rome.ahead import Ahead, Batch, Plan, check_versions, drop_stale
from mini_rome.config import IPAConfig
from mini_rome.errors import ConfigError, SandboxError
from mini_rome.metrics import Outcome
from mini_rome.model import weights_hash
from mini_rome.trainer import IPATrainer, last_checkpoint

SAVING = {"save_strategy": "steps", "save_steps": 1}


def rows_of(trainer: IPATrainer) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "ipa/ratio_p01" in row]


def trained(folder: Path, **options: Any) -> IPATrainer:
    trainer = tiny.trainer(folder, **{"max_steps": 4, "async_ratio": 1, **options})
    trainer.train()
    return trainer


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ahead")]


# The three policies


def faults(rows: list[dict[str, float]], ratio: int) -> list[str]:
    """What is wrong with the log of a run that samples `ratio` versions ahead."""
    found = []
    if [row["rollouts/behind_max"] for row in rows] != [min(step, ratio) for step in range(len(rows))]:
        found.append("age")
    if any(row["rollouts/stale_dropped"] for row in rows):
        return [*found, "dropped"]  # and a step without a row has no ratios to look at
    if not all(row["ipa/mismatch_max"] < 1e-3 for row in rows):
        found.append("pi_old is not of the weights that sampled")
    if not all(row["ipa/ratio_p99"] - row["ipa/ratio_p01"] > 1e-3 for row in rows[1:]):
        found.append("the ratio is constant")
    return found


class ScoredAfterTheStep(IPATrainer):
    """pi_old by weights that are one version too new."""

    def finish_ahead(self) -> None:
        pass

    def advance(self) -> None:
        super().finish_ahead()
        super().advance()


class ScoredWhenConsumed(IPATrainer):
    """pi_old by the weights of now: the ratio is 1."""

    def finish_ahead(self) -> None:
        for batch in self.ahead.finish():
            batch.old_logps = None


class NeverSynced(IPATrainer):
    """The sampler keeps the weights of version 0."""

    def _sync(self, version: int) -> None:
        if not version:
            super()._sync(version)


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_ratio_moves_and_pi_old_is_of_the_weights_that_sampled(tmp_path, ratio):
    trainer = trained(tmp_path, async_ratio=ratio)
    rows = rows_of(trainer)
    assert len(rows) == 4 and faults(rows, ratio) == []
    assert rows[0]["ipa/staleness_max"] < 1e-4
    assert all(row["ipa/staleness_max"] > 1e-2 for row in rows[1:])
    assert trainer.rollout.sampler._model is not trainer.model


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (ScoredAfterTheStep, "pi_old is not of the weights that sampled"),
        (ScoredWhenConsumed, "the ratio is constant"),
        (NeverSynced, "dropped"),
    ],
)
def test_wrong_weights_are_seen(tmp_path, kind, fault):
    assert fault in faults(rows_of(trained(tmp_path, kind=kind)), 1)


class Weights(TrainerCallback):
    """The hash of each version's weights."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights_hash(model))


@pytest.mark.parametrize(("ratio", "versions"), [(1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_rollouts_of_step_t_plus_a_are_drawn_in_a_thread_with_the_weights_of_version_t(tmp_path, ratio, versions):
    weights, drawn = Weights(), {}
    trainer = tiny.trainer(tmp_path, callbacks=[weights], max_steps=4, async_ratio=ratio)
    sampler, collect = trainer.rollout.sampler, trainer.rollout.collect

    def watched(*args, step: int, **options):
        drawn[step] = (sampler.version, weights_hash(sampler._model), threading.current_thread().name.split("_")[0])
        return collect(*args, step=step, **options)

    trainer.rollout.collect = watched
    trainer.train()
    names = ["MainThread", "ahead", "ahead", "ahead"]
    assert drawn == {step: (v, weights.seen[v], names[step]) for step, v in enumerate(versions)}
    assert len(set(weights.seen)) == 4


def test_the_thread_draws_while_the_model_trains(tmp_path):
    training = threading.Event()

    class Meeting(IPATrainer):
        def _compute_loss(self, model, inputs):
            training.set()
            return super()._compute_loss(model, inputs)

    trainer = tiny.trainer(tmp_path, kind=Meeting, max_steps=2, async_ratio=1)
    generate, met = trainer.rollout.sampler.generate, []

    def waiting(*args):
        if threading.current_thread().name.startswith("ahead"):
            met.append(training.wait(20))  # comes only if nobody waits for this thread before training
        return generate(*args)

    trainer.rollout.sampler.generate = waiting
    trainer.train()
    assert met and all(met)


def test_what_is_drawn_does_not_depend_on_how_long_it_takes(tmp_path):
    def run(folder: str, seconds: float) -> tuple[str, list[float]]:
        trainer = tiny.trainer(tmp_path / folder, max_steps=3, async_ratio=1)
        generate = trainer.rollout.sampler.generate

        def slow(*args):
            time.sleep(seconds)
            return generate(*args)

        trainer.rollout.sampler.generate = slow
        trainer.train()
        return weights_hash(trainer.model), [row["loss"] for row in rows_of(trainer)]

    assert run("fast", 0) == run("slow", 0.03)


def test_pi_old_from_the_sampler_needs_no_scoring(tmp_path):
    rows = rows_of(trained(tmp_path, max_steps=2, pi_old_source="sampler"))
    assert rows[1]["ipa/staleness_max"] > 1e-2 and rows[1]["ipa/mismatch_max"] == 0


# Starts, results and experts


class Winning(Recorded):
    """Succeeds from whatever start it is given, and notes the first one of each step."""

    def __init__(self) -> None:
        super().__init__([])
        self.starts: dict[int, int] = {}
        self.experts = {expert.trajectory.task.name: expert for expert in tiny.experts()}

    def collect(self, starts, params, *, step, first_episode, progress, redundancy=0):
        self.starts[step] = starts[0].p
        won = [trajectory(self.experts[s.task.name], s.p, (2,), 1.0, seed=i) for i, s in enumerate(starts)]
        self.trajectories = won
        return super().collect(starts, params, step=step, first_episode=0, progress=progress)


class AppliedWhenDrawn(IPATrainer):
    """Results move the start positions before they are trained on."""

    def _draw(self, plan: Plan, progress=None) -> Batch:
        batch = super()._draw(plan, progress)
        self.curriculum.resampler.update([Outcome.of(t).result for t in batch.trajectories])
        return batch


@pytest.mark.parametrize(
    ("kind", "ratio", "starts"),
    [
        (IPATrainer, 0, [2, 1, 0, 0, 0]),
        (IPATrainer, 1, [2, 2, 1, 1, 0]),  # batch 1 is begun before the results of batch 0 count; 3 before those of 2
        (IPATrainer, 2, [2, 2, 2, 1, 1]),
        (AppliedWhenDrawn, 1, [2, 1, 0, 0, 0]),
    ],
)
def test_starts_are_chosen_when_a_batch_is_begun_and_results_count_when_it_is_consumed(tmp_path, kind, ratio, starts):
    rollout = Winning()
    trained(tmp_path, rollout=rollout, kind=kind, max_steps=5, async_ratio=ratio, rollback_window=1)
    assert [rollout.starts[step] for step in range(5)] == starts


def test_a_batch_of_each_step_is_drawn_once_and_none_beyond_the_last(tmp_path):
    rollout = Winning()
    trainer = trained(tmp_path, rollout=rollout, async_ratio=3, max_steps=2)
    assert sorted(rollout.starts) == [0, 1]
    assert trainer.ahead.ready == {}


def test_a_start_from_an_expert_that_was_replaced_moves_no_position(tmp_path):
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()))
    expert = tiny.experts()[0].trajectory
    drawn = [trajectory(tiny.experts()[0], p, (2,), 0.0) for p in (0, 1, 2)]
    assert [trainer.curriculum.on_path(t) for t in drawn] == [True, True, True]
    form, commands = tiny.chat(), expert.task.expert
    short = [form.response(commands[0])[:-1] + form.response(commands[1]), form.response(commands[2], submit=True)]
    assert trainer.curriculum._replace(expert.task.name, short)
    assert [trainer.curriculum.on_path(t) for t in drawn] == [True, False, False]


def test_an_expert_is_of_one_context_so_an_episode_of_several_replaces_none(tmp_path):
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()))
    won = trajectory(tiny.experts()[0], 0, (2, 2), 1.0)
    split = dataclasses.replace(won, chains=[trajectory(tiny.experts()[0], 0, (2,), 1.0)])
    assert [name for name, _ in trainer.curriculum.shorter_samples([won, split])] == [won.task.name]


def test_a_chunk_of_another_version_in_any_context_of_an_episode_cannot_be_scored():
    batch = aged(3)
    batch[0].chains = aged(2)
    with pytest.raises(ConfigError, match=r"policy version \[2\] at version 3"):
        check_versions(Batch(3, 3, batch, Counter()))
    batch[0].chains = aged(3)
    check_versions(Batch(3, 3, batch, Counter()))


# Samples that are too old


def aged(*versions: int | None) -> list:
    """One sample per version of its first chunk; None: spoiled before it."""
    batch = [trajectory(tiny.experts()[0], 0, (2, 2) if v is not None else (), 1.0) for v in versions]
    for sample, version in zip(batch, versions, strict=True):
        for turn in sample.turns:
            turn.policy_version = version
    return batch


def test_samples_more_than_a_behind_are_unscored_and_counted():
    batch = Batch(step=5, version=4, trajectories=aged(5, 4, 3, 2, None), drops={})
    assert drop_stale(batch, 2) == ([0, 1, 2], 1)
    assert [t.reward for t in batch.trajectories] == [1.0, 1.0, 1.0, None, 1.0]
    assert batch.trajectories[3].reason == "stale"


def test_chunks_that_other_weights_sampled_have_no_pi_old():
    check_versions(Batch(step=5, version=4, trajectories=aged(4, 4, None), drops={}))
    with pytest.raises(ConfigError, match=r"version \[3\] at version 4.*pi_old_source"):
        check_versions(Batch(step=5, version=4, trajectories=aged(4, 3), drops={}))


def test_dropped_rows_have_no_gradient_and_are_not_taken_for_failures_of_the_infrastructure(tmp_path):
    stopped = StopAfter(2)
    trained(tmp_path, async_ratio=2, callbacks=[stopped], **SAVING)
    kept = Gradients()
    trainer = tiny.trainer(tmp_path, callbacks=[kept], max_steps=5, async_ratio=1)  # what was drawn is too old now
    trainer.train(resume_from_checkpoint=str(last_checkpoint(tmp_path)))
    rows = rows_of(trainer)[2:]
    assert [row["rollouts/stale_dropped"] for row in rows] == [4, 4, 0]
    assert [row["infra/unscored"] for row in rows] == [0, 0, 0]
    assert [any(g.any() for g in step.values()) for step in kept.steps] == [False, False, True]


# Endings


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


class Interrupted(IPATrainer):
    """Ctrl-C during the forward pass of the third step, while the thread draws."""

    def _compute_loss(self, model, inputs):
        if self.state.global_step == 2:
            assert threads()
            raise KeyboardInterrupt
        return super()._compute_loss(model, inputs)


def test_an_interrupted_run_ends_its_thread_gives_its_boxes_back_and_goes_on_as_if_nothing_had_been(tmp_path):
    whole = trained(tmp_path / "whole", **SAVING)
    stopped = tiny.trainer(tmp_path / "parts", kind=Interrupted, max_steps=4, async_ratio=1, **SAVING)
    turns = slowed(stopped, 0.3)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert threads() == [] and stopped.rollout.pool._out == set() and stopped.ahead.ready == {}
    assert turns["ahead"] <= 5  # two batches of two turns each, and one turn of the third
    resumed = tiny.trainer(tmp_path / "parts", max_steps=4, async_ratio=1)
    resumed.train(resume_from_checkpoint=str(last_checkpoint(tmp_path / "parts")))
    assert weights_hash(resumed.model) == weights_hash(whole.model)


def slowed(trainer: IPATrainer, seconds: float) -> dict[str, int]:
    """Make each turn that is drawn ahead last; counts them."""
    generate, turns = trainer.rollout.sampler.generate, {"ahead": 0}

    def slow(requests, params):
        if threading.current_thread().name.startswith("ahead") and requests:
            turns["ahead"] += 1
            time.sleep(seconds)
        return generate(requests, params)

    trainer.rollout.sampler.generate = slow
    return turns


def test_what_fails_in_the_thread_fails_the_run(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=4, async_ratio=1)
    collect = trainer.rollout.collect

    def failing(*args, step: int, **options):
        if step == 2:
            raise SandboxError("the engine is gone")
        return collect(*args, step=step, **options)

    trainer.rollout.collect = failing
    with pytest.raises(SandboxError, match="the engine is gone"):
        trainer.train()
    assert trainer.state.global_step == 1  # nothing was trained on, and no step was lost
    assert threads() == []


def test_no_thread_is_left_when_training_is_done(tmp_path):
    trained(tmp_path, max_steps=2)
    assert threads() == []


def test_finishing_or_closing_without_a_thread_does_nothing():
    ahead = Ahead(lambda plan: pytest.fail("nothing was begun"), threading.Event())
    assert ahead.finish() == [] and ahead.take(0) is None
    ahead.close()


# Options


@pytest.mark.parametrize(
    ("options", "told"),
    [({"num_iterations": 2}, "--num_iterations 2"), ({"steps_per_generation": 8}, "--steps_per_generation 8")],
)
def test_a_batch_for_several_updates_is_refused(tmp_path, options, told):
    with pytest.raises(ConfigError, match=f"--async_ratio 1: .*{told}"):
        IPAConfig(output_dir=str(tmp_path), async_ratio=1, **options)
    IPAConfig(output_dir=str(tmp_path), **options)


def test_deepspeed_is_refused_since_it_steps_inside_the_backward_pass(tmp_path):
    trainer = tiny.trainer(tmp_path, async_ratio=1)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="--async_ratio 1: DeepSpeed"):
        trainer.train()


def test_rollouts_ahead_are_not_fresh(tmp_path):
    assert IPAConfig(output_dir=str(tmp_path)).fresh
    assert not IPAConfig(output_dir=str(tmp_path), async_ratio=1).fresh


@pytest.mark.parametrize("which", ["none", "zero_variance"])
def test_a_group_without_variance_is_left_out_of_the_loss_only(tmp_path, which):
    first, second = tiny.experts()
    batch = [trajectory(first, 2, (3,), 1.0, seed=1), trajectory(first, 2, (4,), 1.0, seed=2),
             trajectory(second, 1, (2, 1), 1.0, seed=3), trajectory(second, 1, (5,), 0.0, seed=4)]  # fmt: skip
    masked = [dataclasses.replace(sample, reward=None) for sample in batch[:2]] + batch[2:]
    kept = Gradients()
    trainer = tiny.trainer(tmp_path, Recorded(batch), callbacks=[kept], filter_groups=which, rollback_window=1)
    trainer.train()
    other = tiny.gradients(tmp_path, masked if which == "zero_variance" else batch)
    assert all((kept.steps[0][name] - gradient).abs().max() < 1e-6 for name, gradient in other.items())
    row = rows_of(trainer)[0]
    assert row["success"] == 0.75 and row.get("rollouts/groups_left_out") == {"none": None, "zero_variance": 1}[which]
    assert trainer.curriculum.resampler.position[first.trajectory.task.name] == 1  # its successes still count
