"""Text for continual pre-training, its schedule, packing and the two stages of SFT."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import chat, experts, model

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.data import corpus, records
from mini_rome.data.cpt import CPTArguments, LinearDecay, code_rows, decay_at, heldout_loss, take, trajectory_rows
from mini_rome.data.staged import StageArguments, config_of, fit, selected, start_model, train_stage
from mini_rome.data.stages import emphasised, mixed_rows, open_dataset, preferred, question_row
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.masks import IGNORE, MaskPolicy, annotate
from mini_rome.progress import Display
from mini_rome.rollout import Rollout
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.sft import MaskedSFTConfig, rows_trainer
from mini_rome.types import Trajectory


def trajectories() -> list[Trajectory]:
    found = [expert.trajectory for expert in experts()]
    for each in found:
        annotate(each, MaskPolicy())
    return found


def test_every_bug_shows_at_the_call_that_is_asked_for() -> None:
    rng = random.Random(0)
    for _ in range(200):
        bug = corpus.make_bug(rng)
        right, wrong = (corpus.run_function(bug.name, lines) for lines in (bug.right, bug.wrong))
        arguments = eval(bug.call.removeprefix(bug.name), {})  # noqa: S307
        arguments = arguments if isinstance(arguments, tuple) else (arguments,)
        assert right(*arguments) == bug.value != wrong(*arguments)
        changed = [number for number, (a, b) in enumerate(zip(bug.right, bug.wrong, strict=True), 1) if a != b]
        assert changed == [bug.line]


def test_the_kinds_of_code_tasks_are_all_there_and_a_seed_gives_the_same_ones() -> None:
    asked = [corpus.code_task(random.Random(seed)) for seed in range(60)]
    for words in ("Which line is wrong?", "Write it right.", "Write a test that fails"):
        assert any(words in question for question, _ in asked)
    assert asked == [corpus.code_task(random.Random(seed)) for seed in range(60)]


def test_documents_train_every_token_and_questions_their_answer_alone() -> None:
    rows = code_rows(chat(), ["notes"], 2000, 400, seed=0)
    assert all(row["labels"] == row["input_ids"] and len(row["labels"]) <= 400 for row in rows)
    assert 2000 <= sum(len(row["input_ids"]) for row in rows) < 2400
    row = question_row(chat(), "what", "that")
    answer = [label for label in row["labels"] if label != IGNORE]
    assert chat().decode(answer) == "that<|im_end|>" and row["input_ids"][-len(answer) :] == answer


def test_episodes_are_cut_into_rows_without_losing_a_token() -> None:
    whole = [token for row in trajectory_rows(trajectories(), 10**6) for token in row["input_ids"]]
    rows = trajectory_rows(trajectories(), 16)
    assert [token for row in rows for token in row["input_ids"]] == whole
    assert max(len(row["input_ids"]) for row in rows) == 16


def test_the_paper_s_weight_decay_falls_linearly_and_spares_what_has_none() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups)
    falling = LinearDecay(0.1, 0.01)

    class State:
        global_step, max_steps = 0, 10

    for State.global_step in range(10):
        falling.on_step_begin(None, State, None, optimizer=optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.01)
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert falling.used == [decay_at(step, 10, 0.1, 0.01) for step in range(10)]


def test_the_batch_is_counted_in_tokens() -> None:
    arguments = CPTArguments(stage1_tokens=40_960, batch_tokens=4096, length=512)
    config = arguments.config("none", arguments.stage1_tokens, 0.1)
    assert (config.max_steps, config.gradient_accumulation_steps, config.lr_scheduler_type) == (10, 8, "constant")
    for wrong in ({"batch_tokens": 10}, {"decay_to": 0.5}, {"stage1_tokens": 0}):
        with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
            CPTArguments(**wrong)
    with pytest.raises(ConfigError, match="--heldout_rows 5: there are only 2 rows"):
        take([{}, {}], 5)


def test_training_lowers_the_held_out_loss(tmp_path: Path) -> None:
    rows, heldout = take(code_rows(chat(), ["notes"], 8000, 256, seed=0), 8)
    network = model()
    before = heldout_loss(network, heldout)
    arguments = CPTArguments(stage1_tokens=8_000, batch_tokens=512, length=256, cpt_learning_rate=1e-2)
    fit(network, chat().tokenizer, rows, arguments.config(str(tmp_path), 8_000, 0.1), Display(False), "cpt")
    assert heldout_loss(network, heldout) < before - 0.5


def loss_of(rows: list[dict[str, list[int]]], folder: Path, **options) -> float:
    """The training loss of the first step, learning rate 0."""
    once = {"max_steps": 1, "learning_rate": 0.0, "logging_steps": 1, "warmup_steps": 0}
    args = MaskedSFTConfig(output_dir=str(folder), **once, **options)
    trainer = rows_trainer(model(), chat().tokenizer, rows, args)
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def test_packed_rows_do_not_see_each_other(tmp_path: Path) -> None:
    rows = mixed_rows(chat(), trajectories(), MaskPolicy())
    padded = loss_of(rows, tmp_path, per_device_train_batch_size=len(rows))
    packed = loss_of(rows, tmp_path, per_device_train_batch_size=1, packing=True, max_length=1024)
    assert packed == pytest.approx(padded, rel=1e-4)


def test_a_row_that_would_be_cut_is_refused(tmp_path: Path) -> None:
    rows = mixed_rows(chat(), trajectories(), MaskPolicy())
    with pytest.raises(ConfigError, match="--max_length 8: a row has .* tokens, and rows are never cut"):
        loss_of(rows, tmp_path, max_length=8)
    with pytest.raises(ConfigError, match="--packing true: needs --max_length"):
        loss_of(rows, tmp_path, packing=True)


def test_the_mix_is_a_share_of_the_tokens() -> None:
    plain = mixed_rows(chat(), trajectories() * 20, MaskPolicy())
    agentic = sum(len(row["input_ids"]) for row in plain)
    mixed = mixed_rows(chat(), trajectories() * 20, MaskPolicy(), (0.7, 0.15, 0.15))
    assert agentic / sum(len(row["input_ids"]) for row in mixed) == pytest.approx(0.7, abs=0.02)
    with pytest.raises(ConfigError, match="--mix 0.5 0.1 0.1: agentic, reasoning, general; they must sum to 1"):
        mixed_rows(chat(), trajectories(), MaskPolicy(), (0.5, 0.1, 0.1))
    failed = replace(trajectories()[0], turns=[replace(turn, exit_code=1) for turn in trajectories()[0].turns])
    with pytest.raises(ConfigError, match="none of 1 trajectories has a turn to train"):
        mixed_rows(chat(), [failed], MaskPolicy())


def test_the_preferred_trajectory_has_the_fewest_failures_then_turns() -> None:
    clean, other = trajectories()
    failed = replace(clean, turns=[replace(clean.turns[0], error=True), *clean.turns])
    longer = replace(clean, turns=[*clean.turns, clean.turns[-1]])
    assert preferred([failed, longer, other, clean]) == [clean, other]


def test_what_is_still_wrong_is_shown_more_often_and_the_rest_is_not_dropped() -> None:
    easy, hard = trajectories()
    assert emphasised([easy, hard], [hard], 4) == [easy, hard, hard, hard, hard]
    assert emphasised([easy, hard], [hard], 1) == [easy, hard]


def test_stage_two_shows_more_often_what_the_model_gets_wrong_and_says_when_nothing_is_left() -> None:
    first, _ = experts()
    answers = ScriptedSampler([turn.ids for turn in first.trajectory.turns] + [[chat().stop_id]] * 20)
    with Pool("sim") as pool:
        rollout = Rollout(chat(), answers, pool)
        stage = StageArguments(data="d", stage=2, attempts=1)
        right, wrong = trajectories()
        assert selected(rollout, [right, wrong], stage, 64, Display(False)) == [right, *[wrong] * 4]
        with pytest.raises(MiniRomeError, match="the model solves all 1 instances: stage 2 has nothing to train on"):
            selected(rollout, [first.trajectory], stage, 64, Display(False))


def test_the_stages_train_one_after_the_other_and_the_second_in_steps_of_a_quarter(tmp_path: Path) -> None:
    chat().tokenizer.save_pretrained(tmp_path / "tokenizer")
    records.write(tmp_path / "train.parquet", trajectories(), chat())
    run = RunArguments(
        sandbox="sim", families=["notes"], chunks=[2], sft_chunks=[1], eval_tasks=2, sft_steps=3, sft_batch_size=2
    )
    hashes, rates = [], []
    for number in (1, 2):
        stage = StageArguments(data=str(tmp_path), stage=number, attempts=1)
        args = IPAConfig(output_dir=str(tmp_path / f"stage{number}"))
        rates.append(config_of(run, stage, args, tmp_path).learning_rate)
        folder = train_stage(run, stage, args)
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        assert found["stage"] == number and found["success"]["after"]["long"]["n"] == 2
        hashes.append(found["weights"])
        run = replace(run, model=str(folder / "sft"))
    assert found["chosen"] == 8 and found["trajectories"] == 2  # it knows nothing yet: both are wrong, 4 times each
    assert hashes[0] != hashes[1]
    assert rates == [2e-3, 5e-4]


def test_a_dataset_folder_is_opened_with_its_own_tokenizer(tmp_path: Path) -> None:
    chat().tokenizer.save_pretrained(tmp_path / "tokenizer")
    records.write(tmp_path / "train.parquet", trajectories(), chat())
    found, data = open_dataset(tmp_path)
    assert records.tokenizer_hash(found.tokenizer) == records.tokenizer_hash(chat().tokenizer)
    assert [each.task.name for each in data] == [each.task.name for each in trajectories()]
    assert start_model(None, found, 0).config.vocab_size == len(chat().tokenizer)
    with pytest.raises(ConfigError, match="no tokenizer there; name the dataset folder"):
        open_dataset(tmp_path / "none")


def test_wrong_stage_options_are_named() -> None:
    for wrong in ({"stage": 3}, {"attempts": 0}, {"emphasis": 0}, {"pack_length": -1}, {"mix": [1.0]}):
        with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
            StageArguments(**wrong, data="d")
    for idle in ({"stage": 2}, {"mix": [0.7, 0.15, 0.15]}, {"emphasis": 2}):
        with pytest.raises(ConfigError, match=f"--{next(iter(idle))} .*: only with --data"):
            StageArguments(**idle)
    run = RunArguments(families=["notes"], chunks=[17])
    with pytest.raises(ConfigError, match="--chunks 17: family 'notes' has horizons 1 to 16"):
        train_stage(run, StageArguments(data="d"), IPAConfig(output_dir="nowhere"))
