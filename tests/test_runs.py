import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from mini_rome import runs
from mini_rome.errors import ConfigError, MiniRomeError


def test_a_new_run_is_claimed_and_latest_points_at_it(tmp_path: Path) -> None:
    first, second = runs.new_run(tmp_path, "ipa"), runs.new_run(tmp_path, "ipa")
    assert first != second
    assert first.name.startswith("ipa-")
    assert json.loads((first / "run.json").read_text())["kind"] == "ipa"
    assert (tmp_path / "latest").resolve() == second.resolve()
    assert not Path(os.readlink(tmp_path / "latest")).is_absolute()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_that_holds_another_run_is_refused_by_option_and_value(tmp_path: Path) -> None:
    folder = runs.claim(tmp_path / "mine", "ipa")
    with pytest.raises(ConfigError, match=f"--output_dir {folder} holds another run"):
        runs.claim(folder, "ipa")


def test_a_folder_of_foreign_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds another run"):
        runs.claim(tmp_path, "ipa")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        runs.claim(tmp_path / "runs", "ipa")
    with pytest.raises(MiniRomeError, match=str(tmp_path / "runs")):
        runs.new_run(tmp_path / "runs", "ipa")


def test_latest_never_replaces_something_that_is_not_a_link(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match="is not a link"):
        runs.point_latest(tmp_path, tmp_path / "ipa-1")
    assert (tmp_path / "latest").is_dir()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    runs.write_json(tmp_path / "a.json", {"v": 1})
    with pytest.raises(ValueError, match="NaN|nan|JSON"):
        runs.write_json(tmp_path / "a.json", {"v": float("nan")})
    with pytest.raises(ValueError, match="extra"):
        runs.write_csv(tmp_path / "b.csv", [{"x": 1}, {"x": 2, "extra": 3}], ["x"])
    assert json.loads((tmp_path / "a.json").read_text()) == {"v": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_csv_has_the_columns_in_order_and_unix_line_ends(tmp_path: Path) -> None:
    runs.write_csv(tmp_path / "b.csv", [{"b": 2, "a": "x,y"}], ["a", "b"])
    assert (tmp_path / "b.csv").read_bytes() == b'a,b\n"x,y",2\n'


def test_a_full_disk_is_said_in_words() -> None:
    with pytest.raises(MiniRomeError, match="disk is full while writing /dev/full"), runs.writing("/dev/full"):
        Path("/dev/full").write_text("x")
    with pytest.raises(MiniRomeError, match="disk is full"), runs.writing("runs/new/model.safetensors"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_other_errors_pass_through_writing_unchanged() -> None:
    with pytest.raises(SafetensorError), runs.writing("x"):
        raise SafetensorError("invalid header")
    with pytest.raises(FileNotFoundError), runs.writing("x"):
        Path("/nowhere/at/all").read_text()


def test_provenance_names_backend_seed_versions_and_commit() -> None:
    record = runs.provenance("sim", "transformers", 3)
    assert (record["backend"], record["sampler"], record["seed"]) == ("sim", "transformers", 3)
    assert {"python", "mini_rome", "torch", "trl"} <= set(record["versions"])
    assert record["commit"] == "unknown" or len(record["commit"].removesuffix("-dirty")) == 12
    json.dumps(record)


def test_the_commit_outside_a_checkout_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "runs.py"))
    assert runs.commit() == "unknown"


def test_results_that_a_run_adds_to_do_not_make_its_code_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = tmp_path / "mini_rome" / "runs.py", tmp_path / "recipes" / "results" / "fig.csv"
    for path in (code, rows):
        path.parent.mkdir(parents=True)
        path.write_text("first\n")
    runs.git(tmp_path, "init", "-q")
    runs.git(tmp_path, "add", "-A")
    runs.git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "all of it")
    monkeypatch.setattr(runs, "__file__", str(code))
    clean = runs.git(tmp_path, "rev-parse", "--short=12", "HEAD")
    rows.write_text("first\nsecond\n")
    (tmp_path / "new.txt").write_text("untracked")
    assert runs.commit() == clean and len(clean) == 12
    code.write_text("other")
    assert runs.commit() == f"{clean}-dirty"


def test_a_run_folder_and_its_model_folder_name_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert runs.checkpoint(tmp_path) == runs.checkpoint(tmp_path / "model") == tmp_path / "model"


def test_a_missing_run_is_named_with_the_way_on() -> None:
    with pytest.raises(ConfigError, match="--model runs/nosuch does not exist.*make ipa"):
        runs.checkpoint("runs/nosuch")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--model {tmp_path} holds no saved model"):
        runs.checkpoint(tmp_path)
