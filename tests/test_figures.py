import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mini_rome import figures
from mini_rome.errors import MiniRomeError
from mini_rome.figures import Row, learning_curve
from mini_rome.runs import write_csv, write_json

SUMMARY = {"backend": "sim", "sampler": "transformers", "commit": "0123456789ab"}


def make_rows(seeds: int = 1) -> list[Row]:
    """Two variants, steps 0, 10, 20; the IPA variant rises, its start position falls."""
    rows = []
    for variant, gain in (("ipa", 0.3), ("naive", 0.0)):
        for seed in map(str, range(seeds)):
            for index, step in enumerate((0, 10, 20)):
                values = {"train_success": 0.5, "test_success": gain * index, "test_n": 200}
                values["start_position"] = 11 - index
                rows += [Row(variant, seed, "all", step, metric, value) for metric, value in values.items()]
    return rows


def save(folder: Path, rows: list[Row], summary: dict[str, str] = SUMMARY) -> tuple[Path, Path, Path]:
    table, info, png = folder / "curve.csv", folder / "summary.json", folder / "curve.png"
    write_csv(table, [row._asdict() for row in rows], figures.COLUMNS)
    write_json(info, summary)
    return table, info, png


@pytest.mark.parametrize("seeds", [1, 5])
def test_the_picture_is_a_png_and_redraws_byte_for_byte(tmp_path: Path, seeds: int) -> None:
    paths = save(tmp_path, make_rows(seeds))
    png = learning_curve(*paths)
    first = png.read_bytes()
    width, height = struct.unpack(">II", first[16:24])
    assert first[:8] == b"\x89PNG\r\n\x1a\n" and width > 600 and height > 400
    assert learning_curve(*paths).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.csv", "curve.png", "summary.json"]


def test_the_picture_depends_on_the_numbers(tmp_path: Path) -> None:
    first = learning_curve(*save(tmp_path, make_rows())).read_bytes()
    changed = [row._replace(value=row.value / 2) if row.metric == "test_success" else row for row in make_rows()]
    assert learning_curve(*save(tmp_path, changed)).read_bytes() != first


def test_the_caption_says_simulated_seeds_n_and_intervals() -> None:
    text = figures.caption(make_rows(2), SUMMARY)
    for part in ("simulated", "(sim)", "seed 0, 1", "n = 200", "95 % Wilson", "transformers", "0123456789ab"):
        assert part in text
    docker = figures.caption(make_rows(), SUMMARY | {"backend": "docker"})
    assert "docker" in docker and "simulated" not in docker


def test_bars_are_the_wilson_interval_around_the_rate() -> None:
    rows = [Row("ipa", "0", "all", 0, "test_success", 0.6), Row("ipa", "0", "all", 0, "test_n", 200)]
    (lower,), (upper,) = figures.interval_bars(rows, figures.series(rows, "test_success"))
    assert (0.6 - lower, 0.6 + upper) == pytest.approx((0.5308, 0.6653), abs=1e-4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("metric", "metrik"), "first line must be"),
        (lambda text: text.replace("ipa,0,all,10,test_success,0.3", "ipa,0,all,ten,test_success,0.3"), "line 7"),
        (lambda text: text.replace("test_success", "success"), "no row with metric test_success"),
        (lambda text: text.replace("test_n", "n"), "no test_n row"),
    ],
)
def test_a_damaged_table_is_named_and_no_picture_is_left(tmp_path: Path, damage, message: str) -> None:
    table, info, png = save(tmp_path, make_rows())
    before = table.read_text()
    table.write_text(damage(before))
    assert table.read_text() != before
    with pytest.raises(MiniRomeError, match=message):
        learning_curve(table, info, png)
    assert not png.exists()


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("{}", "backend"), (None, "does not exist")])
def test_a_summary_without_a_backend_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    table, info, png = save(tmp_path, make_rows())
    info.unlink()
    if content is not None:
        info.write_text(content)
    with pytest.raises(MiniRomeError, match=message):
        learning_curve(table, info, png)


def test_a_run_folder_and_a_csv_locate_their_three_files(tmp_path: Path) -> None:
    assert [path.name for path in figures.locate(tmp_path)] == ["curve.csv", "summary.json", "curve.png"]
    assert [path.name for path in figures.locate(tmp_path / "x.csv")] == ["x.csv", "x.json", "x.png"]


def test_redrawing_loads_neither_torch_nor_pyplot() -> None:
    code = "import json, sys, mini_rome.figures; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert "matplotlib.figure" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib.pyplot"}
