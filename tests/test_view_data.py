"""What `mini-rome view` reads and refuses, and what a training run keeps for it. No browser is needed."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_trainer import several
from tiny import Recorded, mixed_batch
from view_pages import HOSTILE, episode, make_run

from mini_rome import cli
from mini_rome.config import IPAConfig
from mini_rome.credit import chunk_returns
from mini_rome.data import records
from mini_rome.episodes import EPISODES, EpisodeLog, Recorder, chunk_facts
from mini_rome.loss import ipa_loss
from mini_rome.view import page
from mini_rome.view.data import load


def run_with(folder: Path, lines: str) -> Path:
    run = make_run(folder / "run", [])
    (run / EPISODES).write_text(lines)
    return run


def line(**changes: Any) -> str:
    return json.dumps(episode(1, "ipa", 0) | changes) + "\n"


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert cli.main(["view", *map(str, words)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mini-rome: ") and len(told.splitlines()) <= 3
    return told


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch does not exist: name a run's folder" in refused(capsys, tmp_path / "nosuch")
    (tmp_path / "empty").mkdir()
    assert "--keep_episodes 0" in refused(capsys, tmp_path / "empty")
    older = refused(capsys, run_with(tmp_path / "a", line(schema=0)))
    assert "line 1: schema 0, this version shows schema 1" in older
    assert "line 2: not JSON" in refused(capsys, run_with(tmp_path / "b", line() + "{half\n" + line()))
    assert "holds no whole episode" in refused(capsys, run_with(tmp_path / "c", line()[:300]))
    assert "line 1: not a trajectory record (KeyError: 'malformed'" in refused(
        capsys, run_with(tmp_path / "d", line(turns=[{"ids": []}]))
    )
    (tmp_path / "x.parquet").write_bytes(b"PAR1 half of a file")
    assert "x.parquet is no file of trajectories" in refused(capsys, tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00\n")
    assert "x.jsonl is no file of trajectories" in refused(capsys, tmp_path / "x.jsonl")
    assert "--export" in refused(capsys, run_with(tmp_path / "e", line()), "--export", tmp_path / "no" / "page.html")


@pytest.mark.parametrize(
    "changes",
    [{"task": 5}, {"start": "x"}, {"turns": ["x"]}, {"reward": "1"}, {"policy": None}, {"kept": {"imitated": ""}}],
    ids=str,
)
def test_a_field_of_another_kind_is_named_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    told = refused(capsys, run_with(tmp_path, line() + line(**{"kept": [], **changes})))
    assert "line 2: not a trajectory record (" in told
    odd = episode(1, "ipa", 0)["turns"][0] | {"ids": ["__proto__"]}
    told = refused(capsys, run_with(tmp_path / "ids", line(turns=[odd])))
    assert "line 1: not a trajectory record (TypeError" in told


def test_what_an_older_run_left_beside_its_episodes_is_passed_over(tmp_path: Path) -> None:
    run = run_with(tmp_path, line())
    (run / "summary.json").write_text('{"success": {"sft": 0.5, "ipa": {"rate": 0.5}, "k": []}, "seed": 3}')
    (run / "state.json").write_text('{"options": null}')
    (run / "curve.csv").unlink()
    shown = load(run)
    assert shown["run"]["success"] == {} and shown["run"]["seed"] == 3 and shown["curve"] == []
    (run / "summary.json").write_text('{"success": []}')
    assert load(run)["run"]["success"] == {}


def test_where_the_page_cannot_be_written_export_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run = run_with(tmp_path, line())
    monkeypatch.setattr(Path, "write_text", read_only)
    told = refused(capsys, run)
    assert "view.html: Read-only" in told and "--export page.html" in told


def test_by_the_link_to_the_latest_run_the_page_has_the_runs_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "ipa 1 \u2713 %41#?", [episode(1, "ipa", 0)])
    (tmp_path / "latest").symlink_to(run.name)
    assert load(tmp_path / "latest")["run"]["name"] == run.name
    assert page.view(tmp_path / "latest", None, False) == 0 and (run / "view.html").exists()


def test_a_line_that_is_being_written_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path, line() + line()[:300])
    assert cli.main(["view", str(run)]) == 0
    told = capsys.readouterr().out
    assert "its last line is not finished" in told and "1 episode (simulated sandbox)" in told
    assert (run / "view.html").stat().st_size > 10_000


def test_without_a_browser_the_page_is_written_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page.webbrowser, "open", lambda url: False)
    told = refused(capsys, run_with(tmp_path, line()), "--open", "--export", tmp_path / "page.html")
    assert "no browser was found" in told and (tmp_path / "page.html").exists()


def test_of_two_lines_of_one_episode_the_later_counts(tmp_path: Path) -> None:
    first, second = episode(1, "ipa", 0), episode(1, "ipa", 0)
    second["reward"] = 1.0
    shown = load(make_run(tmp_path, [first, episode(2, "ipa", 0), second]))["episodes"]
    assert [each["reward"] for each in shown] == [1.0, 1.0] and len(shown) == 2


def test_a_file_of_trajectories_is_shown_with_g_by_eq_7(tmp_path: Path) -> None:
    trajectory = tiny.experts(1, 3)[0].trajectory
    for name in ("some.jsonl", "some.parquet"):
        records.write(tmp_path / name, [trajectory], tiny.chat())
        (shown,) = load(tmp_path / name)["episodes"]
        assert [chunk["G"] for chunk in shown["chunks"]] == [0.9025, 0.95, 1.0]
        assert shown["ending"] == "success" and not shown["trained"]


def test_nothing_in_the_data_can_end_its_element_or_name_an_address(tmp_path: Path) -> None:
    text = page.render(load(make_run(tmp_path, [episode(1, HOSTILE, 0)])))
    assert text.count("</script>") == 2 and HOSTILE[:40] not in text
    assert "example.org" not in text and text.count("://") == 1  # the name of SVG
    assert text == page.render(load(tmp_path))


@pytest.mark.parametrize("level", ["none", "token", "chunk", "sequence"])
@pytest.mark.parametrize("reward", [1.0, -1.0, math.nan])
def test_what_is_kept_of_a_chunk_is_what_the_loss_did(level: str, reward: float) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([[0, 0, -1, 1, 1, 1, -1, 2]])
    mu, old, new = (torch.randn(1, 8, generator=generator) * 0.2 - 2 for _ in range(3))
    rewards = torch.tensor([reward])
    returns = chunk_returns(ids, rewards, 0.9)
    args = IPAConfig(output_dir="unused", gamma=0.9, ratio_level=level, mask_level=level, mismatch_threshold=1.05)
    metrics = ipa_loss(new, old, mu, ids, returns, rewards, ratio_level=level, mask_level=level,
                       mismatch_threshold=1.05).metrics  # fmt: skip
    inside = ids[0] >= 0
    columns = [column[0][inside].tolist() for column in (ids, new, old, mu, returns)]
    facts = chunk_facts(*columns, reward, args)
    assert sum(facts["masked"]) == pytest.approx(metrics["masked_chunks"][0].item(), abs=1e-4)
    if level != "token":  # there the metric is a share of tokens, the mark says that there is one
        assert sum(facts["clipped"]) == metrics["clipped_negatives"][0].item()
    if math.isfinite(reward):
        assert facts["G"] == pytest.approx([0.81 * reward, 0.9 * reward, reward])
    else:
        assert facts["G"] == [None] * 3


def test_a_training_run_keeps_what_it_trained_on(tmp_path: Path) -> None:
    batch = mixed_batch()
    trainer = tiny.trainer(tmp_path / "ipa", Recorded(batch), il_when="fork_failed", gradient_accumulation_steps=1)
    log = EpisodeLog(tmp_path, sample=3)
    trainer.recorder = Recorder(log, tiny.chat(), "ipa", trainer.args)
    trainer.add_callback(trainer.recorder)
    trainer.train()
    rows = [json.loads(text) for text in (tmp_path / EPISODES).read_text().splitlines()]
    assert [row["kept"]["row"] for row in rows] == [0, 1, 2]
    for row, trajectory in zip(rows, batch, strict=False):
        kept = row["kept"]
        assert (kept["stage"], kept["step"], row["start"]) == ("ipa", 0, trajectory.start)
        lengths = [len(turn.ids) for turn in trajectory.policy_turns]
        assert [len(values) for values in kept["new"]] == [len(values) for values in kept["old"]] == lengths
        assert kept["rho"] == [1.0] * len(lengths)  # fresh: pi_old is pi_theta
        gaps = [sum(turn_old) / n - sum(turn.logprobs) / n for turn_old, turn, n in
                zip(kept["old"], trajectory.policy_turns, lengths, strict=True)]  # fmt: skip
        assert kept["mismatch"] == pytest.approx([math.exp(gap) for gap in gaps], rel=1e-3)
    assert rows[0]["kept"]["G"] == pytest.approx([0.95**2, 0.95, 1.0], abs=1e-4)
    assert rows[1]["kept"]["G"] == [-1.0] and rows[2]["kept"]["G"] == [None, None]
    assert [bool(row["kept"]["imitated"]) for row in rows] == [False, True, False]  # the lost one's fork alone
    shown = load(tmp_path)["episodes"]
    assert [each["trained"] for each in shown] == [True] * 3


def test_of_an_episode_of_several_contexts_the_first_is_kept_and_said_to_be_one_of_them(tmp_path: Path) -> None:
    batch = several()
    trainer = tiny.trainer(tmp_path / "ipa", Recorded(batch), gradient_accumulation_steps=1)
    trainer.recorder = Recorder(EpisodeLog(tmp_path, sample=4), tiny.chat(), "ipa", trainer.args)
    trainer.add_callback(trainer.recorder)
    trainer.train()
    shown = load(tmp_path)["episodes"]
    assert [each["contexts"] for each in shown] == [3, 2, 1, 1]
    assert [[chunk["G"] for chunk in each["chunks"] if "G" in chunk] for each in shown[:2]] == [
        pytest.approx([0.95**4, 0.95**3], abs=1e-4), pytest.approx([0.95**3, 1.0], abs=1e-4)
    ]  # fmt: skip
    assert [len(chunk["new"]) for chunk in shown[0]["chunks"]] == [2, 3]
    written = [json.loads(row)["kept"] for row in (tmp_path / EPISODES).read_text().splitlines()]
    lists = [values for row in written if row["row"] == 0 for values in row.values() if isinstance(values, list)]
    assert lists and {len(values) for values in lists} == {2}


def test_a_file_that_is_cut_goes_on_after_its_last_whole_line_and_stops_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = tiny.experts(1, 3)[0].trajectory
    (tmp_path / EPISODES).write_text(line() + line()[:100])
    log = EpisodeLog(tmp_path, sample=1)
    log.evaluation(tiny.chat(), "sft")([trajectory])
    lines = (tmp_path / EPISODES).read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["kept"]["stage"] == "sft"
    monkeypatch.setattr("mini_rome.episodes.MAX_BYTES", len("".join(lines)) + 100)
    log.evaluation(tiny.chat(), "ipa")([trajectory])
    assert len((tmp_path / EPISODES).read_text().splitlines()) == 2
    EpisodeLog(tmp_path / "none", sample=0).evaluation(tiny.chat(), "ipa")([trajectory])  # keeps, and makes, nothing
    assert not (tmp_path / "none").exists()
