import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mini_rome import cli
from mini_rome.errors import ConfigError
from mini_rome.evaluation import calibration
from mini_rome.evaluation.model_client import EndpointError, Reply
from mini_rome.evaluation.results import Row, read_rows
from mini_rome.families import FAMILIES
from mini_rome.loss import calibrate
from mini_rome.model import build_model, build_tokenizer
from mini_rome.runs import MODEL
from mini_rome.tasks.choice import TaskChoice
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory, Turn

WORD_COUNT = Path(__file__).parent / "data" / "tasks" / "word-count"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with an untrained model."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    return folder


def test_instances_are_shared_out_evenly_and_a_longer_list_begins_with_the_shorter() -> None:
    count = 2 * len(FAMILIES)
    tasks = TaskChoice(families=list(FAMILIES), chunks=[2, 3], n=count).tasks()
    assert {(task.family, task.chunks) for task in tasks} == {(name, k) for name in FAMILIES for k in (2, 3)}
    assert {task.split for task in tasks} == {"test"} and len({task.content_hash for task in tasks}) == count
    longer = TaskChoice(families=list(FAMILIES), chunks=[2, 3], n=count + 7).tasks()
    assert [task.name for task in longer[:count]] == [task.name for task in tasks]


def test_no_episodes_is_an_error_by_option_and_value() -> None:
    with pytest.raises(ConfigError, match="--n 0"):
        TaskChoice(n=0).tasks()


def run(*options: str) -> int:
    return cli.main(["eval", "--sandbox", "sim", *options])


def rows_of(folder: Path) -> list[Row]:
    return read_rows(folder / "rows.csv")


def test_eval_of_a_checkpoint_prints_intervals_and_writes_what_a_result_must_name(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ("--families", "notes", "--n", "4", "--runs", "2", "--chunks", "1", "--out", str(out))
    assert run("--model", str(saved), *options) == 0
    shown = capsys.readouterr().out
    assert "simulated" in shown and "95 % interval" in shown and "avg@2" in shown and "not ours" in shown
    record = json.loads((out / "eval.json").read_text())
    assert record["backend"] == "sim" and record["seed"] == 0 and record["temperature"] == 0.7
    assert record["results"]["all"]["all"]["episodes"] == 8 and record["results"]["all"]["all"]["tasks"] == 4
    assert {"versions", "commit", "sampler"} <= set(record) and record["parameters"] > 1e5
    assert [row.key for row in rows_of(out)] == [(f"notes-k1-test-{n}", r) for r in range(2) for n in range(4)]
    assert all(row.completion_tokens > 0 for row in rows_of(out))


def test_the_oracle_earns_all_and_noop_none_in_every_family_and_language(tmp_path: Path) -> None:
    for agent, reward in (("oracle", 1.0), ("noop", 0.0)):
        out = tmp_path / agent
        assert run("--agent", agent, "--n", "24", "--chunks", "1", "3", "--runs", "1", "--out", str(out)) == 0
        rows = rows_of(out)
        assert len(rows) == 24 and {row.reward for row in rows} == {reward}
        assert {row.family for row in rows} == set(FAMILIES)
        assert {row.group for row in rows} == {"terminal", "tool-use", "general"}
        assert {row.cause for row in rows} == ({""} if agent == "oracle" else {"agent"})
    found = json.loads((tmp_path / "oracle" / "eval.json").read_text())["results"]
    assert set(found) >= {"all", "group", "family", "domain", "chunks", "language"}
    assert found["all"]["all"]["avg"] == 1.0 and found["all"]["all"]["pass"]["1"]["value"] == 1.0


def test_an_evaluation_that_was_stopped_goes_on_and_redoes_only_what_was_unscored(tmp_path: Path) -> None:
    options = ("--agent", "random", "--families", "notes", "--n", "3", "--out", str(tmp_path))
    assert run(*options, "--runs", "2") == 0
    whole = rows_of(tmp_path)
    lines = (tmp_path / "rows.csv").read_text().splitlines(keepends=True)
    infra = lines[2].replace(",0.0,agent,", ",,infra,")
    assert infra != lines[2]
    cut = [lines[0], lines[1], infra, lines[3], lines[4][:20]]  # a crash while the last row was written
    (tmp_path / "rows.csv").write_text("".join(cut))
    assert run(*options, "--runs", "2") == 0
    again = rows_of(tmp_path)
    assert [row.key for row in again[:2]] == [whole[0].key, whole[2].key]  # kept as they were
    assert again[0] == whole[0] and {row.key for row in again} == {row.key for row in whole} and len(again) == 6
    assert {row.key: row.reward for row in again} == {row.key: row.reward for row in whole}


def test_a_resumed_checkpoint_draws_what_it_would_have_drawn(saved: Path, tmp_path: Path) -> None:
    options = ("--model", str(saved), "--families", "notes", "--n", "4", "--runs", "2", "--out", str(tmp_path))
    assert run(*options) == 0
    texts = sorted((tmp_path / "responses.jsonl").read_text().splitlines())
    lines = (tmp_path / "rows.csv").read_text().splitlines(keepends=True)
    (tmp_path / "rows.csv").write_text("".join(lines[:4]))
    (tmp_path / "responses.jsonl").write_text("")
    assert run(*options) == 0
    assert len(rows_of(tmp_path)) == 8
    assert set((tmp_path / "responses.jsonl").read_text().splitlines()) <= set(texts)


def test_rows_of_another_evaluation_are_never_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--agent", "noop", "--families", "notes", "--n", "1", "--out", str(tmp_path))
    assert run(*options) == 0
    assert run(*options, "--seed", "1") == 2
    assert "seed 0, now 1" in capsys.readouterr().err
    assert run("--agent", "noop", "--out", "x.json") == 2
    assert "--out x.json: name a folder" in capsys.readouterr().err


def test_recorded_responses_replay_to_the_same_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    options = ("--families", "notes", "shop", "--n", "4", "--runs", "2")
    assert run("--agent", "random", *options, "--out", str(first)) == 0
    replay = ("--agent", "replay", "--replay", str(first / "responses.jsonl"))
    assert run(*replay, *options, "--out", str(second)) == 0
    one, other = ({r.key: (r.reward, r.turns) for r in rows_of(folder)} for folder in (first, second))
    assert one == other
    assert run(*replay, "--families", "tickets", "--n", "1") == 2
    assert "no recorded responses of tickets" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert run("--agent", "replay", "--replay", str(tmp_path / "bad.jsonl"), *options) == 2
    assert "bad.jsonl:1" in capsys.readouterr().err
    assert run("--agent", "replay", *options) == 2
    assert "--replay FILE" in capsys.readouterr().err


def test_the_held_back_split_leaves_neither_seeds_nor_transcripts(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of many bytes")
    out = tmp_path / "out"
    options = ("--agent", "oracle", "--families", "notes", "--n", "2", "--runs", "1", "--out", str(out))
    assert run(*options, "--secret-seed", str(secret)) == 0
    assert {row.task for row in rows_of(out)} == {"notes-k4-private-#0", "notes-k4-private-#1"}
    assert {row.reward for row in rows_of(out)} == {1.0}
    written = "".join(path.read_text() for path in out.iterdir())
    assert "a secret of many bytes" not in written and not (out / "responses.jsonl").exists()
    assert json.loads((out / "eval.json").read_text())["split"] == "private"


def test_a_server_that_fails_leaves_unscored_rows_never_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_rome.evaluation.model_client.Endpoint.ask", fails_for("notes"))
    options = ("--endpoint", "http://127.0.0.1:9/v1", "--model-name", "m", "--runs", "1", "--out", str(tmp_path))
    assert run(*options, "--families", "notes", "tickets", "--n", "4", "--jobs", "1") == 0
    rows = {row.family: row for row in rows_of(tmp_path)}
    assert (rows["notes"].reward, rows["notes"].cause) == (None, "infra")
    assert (rows["tickets"].reward, rows["tickets"].cause) == (0.0, "timeout")
    shown = capsys.readouterr().out
    assert "unscored: notes-k4-test-0" in shown
    found = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert found["family"]["notes"]["avg"] is None and found["family"]["tickets"]["avg"] == 0.0
    assert found["all"]["all"]["scored_tasks"] == 2 and found["all"]["all"]["tasks"] == 4


def fails_for(family: str) -> Callable[..., Reply]:
    def ask(self: object, messages: list[dict[str, str]], *_: object) -> Reply:
        if family in messages[1]["content"]:
            raise EndpointError("the server is down")
        return Reply("no call", (), {"role": "assistant", "content": "no call"})

    return ask


def test_where_nothing_could_be_scored_the_run_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_rome.evaluation.model_client.Endpoint.ask", fails_for(""))
    options = ("--endpoint", "http://127.0.0.1:9/v1", "--model-name", "m", "--families", "notes", "--n", "2")
    assert run(*options, "--runs", "1") == 2
    assert "no episode could be scored, 2 of 2" in (said := capsys.readouterr().err) and "the server is down" in said


@pytest.mark.docker
def test_folders_and_families_are_evaluated_together_on_docker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    for name in ("one", "two", "broken"):
        shutil.copytree(WORD_COUNT, tree / name)
        toml = tree / name / "task.toml"
        toml.write_text(toml.read_text().replace('name = "word-count"', f'name = "{name}"'))
    (tree / "broken" / "instruction.md").unlink()
    (tree / "two" / "tests" / "test.sh").write_text("apt-get install -y nothing\n")
    out = tmp_path / "out"
    options = ["--families", "notes", "--n", "1", "--runs", "1", "--folders", str(tree), "--out", str(out)]
    assert cli.main(["eval", "--sandbox", "docker", "--agent", "oracle", *options]) == 0
    found = {row.task: (row.kind, row.reward, row.cause, row.verifier) for row in rows_of(out)}
    assert found == {
        "notes-k4-test-0": ("family", 1.0, "", "host-check"),
        "one": ("folder", 1.0, "", "fresh-container"),
        "two": ("folder", None, "infra", "fresh-container"),
    }
    shown = capsys.readouterr().out
    assert "broken: " in shown and "1 of 2 tasks have tests that need the network" in shown
    assert "--verifier-network" in shown and "unscored: two" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--agent", "noop", "--endpoint", "http://h/v1", "--model-name", "m"), "one of --model, --agent and"),
        (("--agent", "noop", "--runs", "0"), "--runs 0"),
        (("--agent", "noop", "--families", "none"), "no task to run"),
        (("--agent", "noop", "--families", "nosuch"), "nosuch"),
        (("--agent", "noop", "--folders", str(Path(__file__).parent / "data" / "tasks")), "need Docker"),
        (("--endpoint", "http://h/v1"), "--model-name"),
    ],
)
def test_bad_options_of_an_evaluation_are_named(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == 2
    assert said in capsys.readouterr().err


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
    old, _, ids = calibration.mismatch(model, trajectory)
    assert len(old) == len(ids) == sum(len(turn.ids) for turn in turns) + len(turns[0].observation_ids)
    for chunk, turn in enumerate(turns):  # the second chunk's log-probs are half a nat lower at the sampler
        turn.logprobs = (old[ids == chunk] - 0.5 * chunk).tolist()
    columns = calibration.padded([calibration.mismatch(model, trajectory)])
    assert columns[0].dtype == torch.float64
    found = calibrate(*columns, "chunk")
    assert found["count"] == 2
    assert found["max"] == pytest.approx(math.exp(0.5)) and found["p1"] == pytest.approx(1.0, abs=0.01)
