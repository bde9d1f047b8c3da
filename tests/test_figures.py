import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation import canvas, curve_figure, figures
from mini_rome.evaluation.curve_figure import learning_curve
from mini_rome.evaluation.rows import COLUMNS, RESULTS, Row
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
    write_csv(table, [row._asdict() for row in rows], COLUMNS)
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


@pytest.mark.parametrize("words", ["mean of three seeds, with intervals; ", "WILSON 95 %, COMMIT 0123456789AB; "])
@pytest.mark.parametrize("inches", [4, 9, 13])
def test_no_line_of_a_caption_leaves_the_picture(tmp_path: Path, inches: float, words: str) -> None:
    figure = Figure(figsize=(inches, 3))
    canvas.save(figure, f"{words * 9}\ncommit 0123456789ab", tmp_path / "x.png")
    [label] = [text for text in figure.texts if "commit" in text.get_text()]
    box = label.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width and label.get_text().endswith("\ncommit 0123456789ab")
    assert box.width > 0.7 * figure.bbox.width  # and none is broken without need


def test_the_caption_says_simulated_seeds_n_and_intervals() -> None:
    text = curve_figure.caption(make_rows(2), SUMMARY)
    for part in ("simulated", "(sim)", "seed 0, 1", "n = 200", "95 % Wilson", "transformers", "0123456789ab"):
        assert part in text
    docker = curve_figure.caption(make_rows(), SUMMARY | {"backend": "docker"})
    assert "docker" in docker and "simulated" not in docker


def test_bars_are_the_wilson_interval_around_the_rate() -> None:
    rows = [Row("ipa", "0", "all", 0, "test_success", 0.6), Row("ipa", "0", "all", 0, "test_n", 200)]
    (lower,), (upper,) = curve_figure.interval_bars(rows, curve_figure.series(rows, "test_success"))
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


def make_ratios() -> list[Row]:
    """Two seeds of a float32 sampler without mismatch, and of a bfloat16 sampler with ratios from 0.95 to 1.05."""
    return [
        Row(variant, seed, "all", step, f"{level}_ratio", 1 + spread * (step / 1000 - 0.5))
        for variant, spread in (("float32", 1e-6), ("bfloat16", 0.1))
        for seed in "01"
        for level in ("token", "chunk", "sequence")
        for step in range(0, 1001, 50)
    ]


FIRING = SUMMARY | {"figure": "mask_firing", "mismatch_threshold": 1.02, "episodes": 64}


def test_the_json_names_the_figure_that_is_drawn(tmp_path: Path) -> None:
    table, info, png = save(tmp_path, make_ratios(), FIRING)
    first = figures.redraw(table, info, png).read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n" and figures.mask_firing(table, info, png).read_bytes() == first
    write_json(info, FIRING | {"figure": "learning_curve"})
    with pytest.raises(MiniRomeError, match="no row with metric test_success"):
        figures.redraw(table, info, png)
    write_json(info, FIRING | {"figure": "pie"})
    with pytest.raises(MiniRomeError, match="no figure 'pie'; there are learning_curve, mask_firing"):
        figures.redraw(table, info, png)


def test_a_summary_that_names_no_figure_is_a_learning_curve(tmp_path: Path) -> None:
    paths = save(tmp_path, make_rows())
    assert figures.redraw(*paths).read_bytes() == learning_curve(*paths).read_bytes()


def test_the_firing_depends_on_the_ratios_and_is_not_drawn_without(tmp_path: Path) -> None:
    first = figures.mask_firing(*save(tmp_path, make_ratios(), FIRING)).read_bytes()
    changed = [row._replace(value=row.value + 0.01) if row.metric == "token_ratio" else row for row in make_ratios()]
    assert figures.mask_firing(*save(tmp_path, changed, FIRING)).read_bytes() != first
    with pytest.raises(MiniRomeError, match="no row with metric chunk_ratio"):
        figures.mask_firing(*save(tmp_path, make_rows(), FIRING))


def test_every_committed_table_redraws(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / RESULTS
    tables = [path for path in folder.glob("*.csv") if path.stem != "paper_tables"]
    assert folder / "mask_firing.csv" in tables
    for table in tables:
        assert figures.redraw(table, table.with_suffix(".json"), tmp_path / "x.png").stat().st_size > 10_000


def test_redrawing_loads_neither_torch_nor_pyplot() -> None:
    code = "import json, sys, mini_rome.evaluation.figures; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert "matplotlib.figure" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib.pyplot"}
