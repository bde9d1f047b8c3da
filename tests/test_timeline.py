"""The timeline adds up by hand, costs nothing when off, and shows that on a shared device nobody computes at once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bench_sampler import unaccounted
from transformers import TrainerCallback

from mini_rome.device import Device
from mini_rome.env import Env
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluation.figures import redraw
from mini_rome.evaluation.timeline_figure import read_spans, said, shares_table
from mini_rome.model import weights_hash
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sampler.vllm import VLLMSampler
from mini_rome.sandbox import Pool
from mini_rome.timeline import STEP, Span, note, phase_shares, recorded, recording, span, way_of, write

FACTS = {"backend": "sim", "sampler": "transformers", "seed": 0, "commit": "abc"}
BY_HAND = [
    Span(STEP, 100, 110), Span(STEP, 112, 122), Span("generate", 100, 104), Span("environment", 103, 106),
    Span("environment", 104, 107), Span("reward", 107, 108), Span("train", 108, 111), Span("generate", 112, 116),
    Span("train", 114, 121), Span("sync", 121, 122),
]  # fmt: skip


def test_shares_by_hand() -> None:
    shares = phase_shares(BY_HAND)
    assert shares["seconds"] == 10
    assert shares["generate"] == pytest.approx(8 / 20)
    assert shares["environment"] == pytest.approx(4 / 20)  # two sandboxes at once count once
    assert shares["reward"] == pytest.approx(1 / 20)
    assert shares["train"] == pytest.approx((2 + 7) / 20)  # what lies between two steps counts for none
    assert shares["idle"] == pytest.approx(4 / 20)  # 104 to 108
    assert shares["generate and train"] == pytest.approx(2 / 20)
    assert phase_shares([Span("train", 0, 1)]) == {}
    assert unaccounted(BY_HAND) == 0
    some = [s for s in BY_HAND if s.phase in (STEP, "generate", "environment")]
    assert unaccounted(some) == pytest.approx(9 / 20)  # 107 to 110 and 116 to 122


def test_a_table_goes_to_disk_and_back_and_is_drawn(tmp_path: Path) -> None:
    table = tmp_path / "timeline.csv"
    write(table, {"sync": BY_HAND, "ahead": BY_HAND[:4]}, FACTS)
    found = read_spans(table)
    assert [s.begin for s in found["sync"] if s.phase == STEP] == [0, 12]  # from the first step on
    assert phase_shares(found["sync"]) == pytest.approx(phase_shares(BY_HAND))
    summary = json.loads((tmp_path / "timeline.json").read_text())
    assert summary["figure"] == "timeline" and summary["ways"]["sync"]["train"] == 0.45
    assert said(summary["ways"]["ahead"]).startswith("10.00 s a step; generate 20%, environment 15%, idle 80%")
    assert shares_table(summary["ways"]).row_count == 2
    first = redraw(table, tmp_path / "timeline.json", tmp_path / "a.png").read_bytes()
    write(table, {"sync": BY_HAND[:-1], "ahead": BY_HAND[:4]}, FACTS)
    assert redraw(table, tmp_path / "timeline.json", tmp_path / "b.png").read_bytes() != first


def test_every_call_to_a_box_is_the_environments() -> None:
    expert = tiny.experts()[0]
    with Pool("sim") as pool, recording() as spans:
        with Env(expert.trajectory.task, pool) as env:
            expert.start(1).open(tiny.chat(), env, seed=0, episode=0)
    assert [s.phase for s in spans] == ["environment"] * 3  # reset to the state, compare it, give the box back


@pytest.mark.parametrize(
    ("text", "words"),
    [("a,b\n1,2\n", "first line must be way,phase,begin,end"), ("way,phase,begin,end\n", "holds no step"),
     ("way,phase,begin,end\nsync,train,0,1\n", "holds no step"), ("way,phase,begin,end\nsync,step,0,x\n", "line 2")],
)  # fmt: skip
def test_a_table_that_is_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(MiniRomeError, match=words):
        read_spans(tmp_path / "t.csv")


def test_nothing_is_recorded_or_written_unless_asked_for(tmp_path: Path) -> None:
    assert span("train") is not None and type(span("train")).__name__ == "nullcontext"
    note("train", 0.0)
    with recorded(None, "sync", FACTS):
        assert type(span("train")).__name__ == "nullcontext"
    with recording() as spans:
        with span("train"):
            pass
        thread = threading.Thread(target=lambda: note("environment", time.monotonic()))
        thread.start()
        thread.join()
    assert [s.phase for s in spans] == ["train", "environment"] and all(s.end >= s.begin for s in spans)
    assert list(tmp_path.iterdir()) == []


class Tired(TransformersSampler):
    """Notes when it sleeps and wakes, and never computes asleep. slow: seconds that a call takes at least."""

    slow = 0.0

    def __init__(self, *args: Any) -> None:
        self.asleep, self.naps = False, 0
        super().__init__(*args)

    def generate(self, requests, params):
        assert not self.asleep
        time.sleep(self.slow)
        return super().generate(requests, params)

    def sync(self, model, version):
        assert not self.asleep
        super().sync(model, version)

    def sleep(self):
        self.naps += not self.asleep
        self.asleep = True

    def wake(self):
        self.asleep = False


class Slow(TrainerCallback):
    """Makes training last, between two micro-batches of a step, so that a thread beside it gets to run."""

    def on_substep_end(self, args, state, control, **kwargs):
        time.sleep(0.05)


def trained(folder: Path, **options: Any) -> tuple[list[Span], str, Tired]:
    network = tiny.model()
    sampler = Tired(network, tiny.chat().stop_id)
    sampler.slow = 0.02
    rollout = Rollout(tiny.chat(), sampler, Pool("sim"), extra_turns=1)
    steps = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = tiny.trainer(folder, rollout, network, callbacks=[Slow()], **{**steps, "count": 4, **options})
    slowed(trainer)
    with recording() as spans:
        trainer.train()
    assert threading.active_count() < 50 and rollout.turn is not trainer.device.sampling
    return spans, weights_hash(network), sampler


def slowed(trainer: Any) -> None:
    """Forward lasts at least 20 ms: the tiny model's takes less than a thread needs to begin."""
    forward = trainer._compute_loss

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.02)
        return forward(*args)

    trainer._compute_loss = slow


@pytest.mark.long
def test_on_a_shared_device_nobody_computes_at_once_and_the_result_is_the_same(tmp_path: Path) -> None:
    ahead, weights, _ = trained(tmp_path / "ahead", async_ratio=1)
    shared, same, sampler = trained(tmp_path / "shared", async_ratio=1, multiplex=True)
    assert phase_shares(ahead)["generate and train"] > 0.01  # else the next line would say nothing
    assert phase_shares(shared)["generate and train"] == 0
    assert same == weights
    assert sampler.naps > 3  # more than once a step: rollouts went on between micro-batches
    for spans in (ahead, shared):
        counts = {phase: sum(s.phase == phase for s in spans) for phase in (STEP, "sync", "reward", "train")}
        assert counts[STEP] == 3 and counts["reward"] == 3 * 8
        assert counts["train"] > 3 * (4 + 1)  # micro-batches and the optimiser; pi_old besides


@pytest.mark.long
def test_in_turn_the_sampler_sleeps_once_a_step_and_the_result_is_that_of_no_device(tmp_path: Path) -> None:
    _, weights, awake = trained(tmp_path / "sync")
    spans, same, sampler = trained(tmp_path / "turns", multiplex=True)
    assert same == weights and (awake.naps, sampler.naps) == (0, 3)
    assert phase_shares(spans)["generate and train"] == 0


def test_who_asks_first_is_next() -> None:
    sampler = Tired(tiny.model(), tiny.chat().stop_id)
    device, order = Device(sampler), []

    def sample(name: str) -> None:
        with device.sampling():
            order.append((name, sampler.asleep))

    device.take()
    assert sampler.asleep
    threads = []
    for name in ("first", "second"):
        threads.append(threading.Thread(target=sample, args=(name,)))
        threads[-1].start()
        while len(device._waiting) < 1 + len(threads):
            time.sleep(0.001)
    assert order == []
    device.give()
    for thread in threads:
        thread.join(5)
    assert order == [("first", False), ("second", False)]
    device.give()  # not taken: nothing


class Engine:
    """In place of vLLM's: what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def has_unfinished_requests(self) -> bool:
        return False

    def reset_prefix_cache(self) -> bool:
        self.asked.append("reset")
        return True

    def sleep(self, level: int) -> None:
        self.asked.append(("sleep", level))

    def wake_up(self) -> None:
        self.asked.append("wake")


@pytest.mark.parametrize(
    ("sleeps", "asked"), [(True, ["reset", ("sleep", 1), "wake"] * 2), (False, [])], ids=["on a GPU", "on a CPU"]
)
def test_vllm_sleeps_with_its_cache_dropped_and_twice_is_once(sleeps: bool, asked: list[Any]) -> None:
    sampler = object.__new__(VLLMSampler)
    sampler._engine, sampler._sleeps, sampler._asleep, sampler._count = Engine(), sleeps, False, 0
    sampler.wake()
    for _ in range(2):
        sampler.sleep()
        sampler.sleep()
        assert sampler.generate([], SamplingParams()) == []  # wakes it
        sampler.wake()
    assert sampler._engine.asked == asked


def test_an_external_agent_cannot_take_turns(tmp_path: Path) -> None:
    rollout = tiny.Recorded([])
    rollout.cancels = False
    with pytest.raises(ConfigError, match="--multiplex true: an external agent"):
        tiny.trainer(tmp_path, rollout, multiplex=True)


def test_ways_have_names() -> None:
    assert [way_of(0, False), way_of(1, False), way_of(1, True)] == ["sync", "ahead", "multiplexed"]
