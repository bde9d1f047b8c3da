"""The fork microscope: known V(p) in the sandbox, coverage and power, its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from forks_proof import POLICIES, Scripted, measure, true_values

from mini_rome import cli
from mini_rome.data import records
from mini_rome.errors import RecordError
from mini_rome.evaluation.figures import redraw
from mini_rome.evaluation.forks import find_trajectory, microscope, starts_by_step, write_forks
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.sandbox import Pool

Q = (1.0, 0.2, 1.0, 1.0)


def test_v_of_a_scripted_policy_in_the_sandbox_is_found_and_its_crucial_chunk_alone() -> None:
    (expert,) = tiny.experts(1, len(Q))
    with Pool("sim") as pool:
        rollout = Rollout(tiny.chat(), Scripted(tiny.chat(), expert, Q), pool, extra_turns=0)
        forks = microscope(rollout, expert, 32, SamplingParams())
    assert forks.trials == [32] * len(Q) and forks.crucial == [1]
    for point, value in zip(forks.points(level=0.999), true_values(Q), strict=True):
        assert point["low"] <= value <= point["high"], point
    assert [point["rate"] for point in forks.points()][2:] == [1.0, 1.0]
    assert [point["crucial"] for point in forks.points()] == [False, True, False, False]


@pytest.mark.parametrize("name", POLICIES)
def test_intervals_cover_and_false_alarms_stay_below_alpha(name: str) -> None:
    found = measure(POLICIES[name], 32, 400)
    assert found["coverage"] > 0.93
    assert found["false"] <= 0.05 + 0.03  # three standard errors of 400 repetitions


def test_power_grows_with_the_rollouts() -> None:
    weak = POLICIES["a weaker one (V .6 | .95)"]
    few, many = (measure(weak, n, 300)["power"] for n in (16, 128))
    assert measure(POLICIES["one crucial chunk (V .3 | 1)"], 32, 300)["power"] > 0.99
    assert few < 0.5 < 0.95 < many


def test_files_name_the_backend_and_redraw_byte_for_byte(tmp_path: Path) -> None:
    rates = enumerate((0.1, 0.2, 1))
    points = [{"p": p, "rate": r, "low": r / 2, "high": 1.0, "n": 32, "crucial": p == 1} for p, r in rates]
    summary = {
        "backend": "sim", "seed": 3, "commit": "abc", "figure": "forks", "task": "notes-k3-train-0", "n": 32,
        "gamma": 0.95, "points": points, "starts": [(0, 2), (1, 1)],
    }  # fmt: skip
    png = write_forks(tmp_path / "out", summary)
    first = png.read_bytes()
    assert first.startswith(b"\x89PNG")
    kept = json.loads(png.with_suffix(".json").read_text())
    assert kept["backend"] == "sim" and kept["points"][1]["crucial"] is True
    lines = png.with_suffix(".csv").read_text().splitlines()
    assert len(lines) == 7 and lines[3] == "policy,3,notes-k3-train-0,1,success,0.2"
    assert redraw(png.with_suffix(".csv"), png.with_suffix(".json"), png).read_bytes() == first


def test_the_longest_success_is_followed_and_what_is_none_is_refused(tmp_path: Path) -> None:
    short, long = tiny.experts(1, 2)[0].trajectory, tiny.experts(1, 3)[0].trajectory
    path = tmp_path / "some.jsonl"
    records.write(path, [short, long], tiny.chat())
    row, same = find_trajectory(path, None, tiny.chat())
    assert row["task"] == long.task.name and same == [row] and starts_by_step(same) == []
    assert find_trajectory(path, short.task.name, tiny.chat())[0]["task"] == short.task.name
    with pytest.raises(RecordError, match="no successful trajectory of task nosuch"):
        find_trajectory(path, "nosuch", tiny.chat())
    with pytest.raises(RecordError, match="does not exist"):
        find_trajectory(tmp_path / "nosuch.jsonl", None, tiny.chat())


def test_other_figures_take_no_trajectory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["figure", "fig12", "--trajectory", "runs/latest"]) == 2
    assert "only forks takes a trajectory" in capsys.readouterr().err
