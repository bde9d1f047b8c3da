import json
import math
from pathlib import Path

import pytest
import torch

from mini_rome import assess, cli
from mini_rome.assess import TaskChoice
from mini_rome.errors import ConfigError
from mini_rome.families import FAMILIES
from mini_rome.loss import calibrate
from mini_rome.model import build_model, build_tokenizer
from mini_rome.runs import MODEL
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory, Turn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with an untrained model."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    return folder


def test_instances_are_shared_out_evenly_and_a_longer_list_begins_with_the_shorter() -> None:
    choice = TaskChoice(families=list(FAMILIES), chunks=[2, 3], n=8)
    tasks = choice.tasks()
    assert {(task.family, task.chunks) for task in tasks} == {(name, k) for name in FAMILIES for k in (2, 3)}
    assert {task.split for task in tasks} == {"test"} and len({task.content_hash for task in tasks}) == 8
    longer = TaskChoice(families=list(FAMILIES), chunks=[2, 3], n=20).tasks()
    assert [task.name for task in longer[:8]] == [task.name for task in tasks]


def test_no_episodes_is_an_error_by_option_and_value() -> None:
    with pytest.raises(ConfigError, match="--n 0"):
        TaskChoice(n=0).tasks()


def test_eval_prints_intervals_and_writes_what_a_result_must_name(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval.json"
    options = ["--model", str(saved), "--sandbox", "sim", "--n", "4", "--runs", "2", "--chunks", "1"]
    assert cli.main(["eval", *options, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "simulated" in shown and "95 % interval" in shown and "notes" in shown
    record = json.loads(out.read_text())
    assert record["backend"] == "sim" and record["seed"] == 0 and record["temperature"] == 0.7
    assert record["success"]["all"]["n"] == 8 and record["unscored"] == 0
    assert {"versions", "commit", "sampler"} <= set(record)


def test_a_bad_sampling_option_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--model", str(saved), "--top-p", "1.5"]) == 2
    assert "top_p=1.5" in capsys.readouterr().err


def test_one_engine_in_one_precision_has_no_mismatch_and_another_has(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = {}
    for precision in ("float32", "bfloat16"):
        options = ["--model", str(saved), "--sandbox", "sim", "--n", "4", "--precision", precision]
        assert cli.main(["calibrate", *options]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        rows = {line[0]: list(map(float, line[1:])) for line in lines if line and line[0] in ("token", "chunk")}
        assert set(rows) == {"token", "chunk"}
        spread[precision] = rows["token"][5] - 1  # max
    assert abs(spread["float32"]) < 1e-4 < spread["bfloat16"]


def test_mismatch_of_a_known_gap_is_found_at_its_chunk() -> None:
    tokenizer = build_tokenizer()
    model, form = build_model(tokenizer).eval(), ChatFormat(tokenizer)
    (task,) = TaskChoice(n=1).tasks()
    turns = [Turn(form.response(c), [0.0] * len(form.response(c)), "", [c], "", form.observation("x")) for c in "ab"]
    trajectory = Trajectory(task, form.prompt(task.instruction), turns)
    old, _, ids = assess.mismatch(model, trajectory)
    assert len(old) == len(ids) == sum(len(turn.ids) for turn in turns) + len(turns[0].observation_ids)
    for chunk, turn in enumerate(turns):  # the second chunk's log-probs are half a nat lower at the sampler
        turn.logprobs = (old[ids == chunk] - 0.5 * chunk).tolist()
    columns = assess.padded([assess.mismatch(model, trajectory)])
    assert columns[0].dtype == torch.float64
    found = calibrate(*columns, "chunk")
    assert found["count"] == 2
    assert found["max"] == pytest.approx(math.exp(0.5)) and found["p1"] == pytest.approx(1.0, abs=0.01)
