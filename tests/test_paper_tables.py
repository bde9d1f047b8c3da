"""The paper's tables: every cell that is known, none that is not, and never mistaken for ours."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mini_rome.errors import MiniRomeError
from mini_rome.evaluation.paper import (
    BASE,
    COLUMNS,
    OURS,
    SIZES,
    Ours,
    average,
    our_point,
    paper_lines,
    paper_scores,
    performance_against_parameters,
)


def test_the_number_of_cells_by_group_and_for_rome_is_the_papers() -> None:
    scores = paper_scores()
    assert Counter(score.group for score in scores) == {"terminal": 22, "tool-use": 18, "general": 18}
    assert len({(s.group, s.benchmark, s.model) for s in scores}) == len(scores) == 58
    assert Counter(s.group for s in scores if s.model == OURS) == {"terminal": 7, "tool-use": 7, "general": 5}
    assert {score.source for score in scores} == {"arXiv:2512.24873"}


@pytest.mark.parametrize(
    ("benchmark", "model", "score"),
    [
        ("Terminal-Bench 1.0", OURS, 41.50),
        ("Terminal-Bench 1.0", BASE, 28.50),
        ("Terminal-Bench 2.0", OURS, 24.72),
        ("SWE-bench Verified", BASE, 46.33),
        ("Terminal-Bench-Pro private", "Claude-Haiku-4.5", 35.33),
        ("TAU2 Telecom", OURS, 30.92),
        ("MTU-Bench Single-Turn", "Qwen3-Coder-480B-A35B-Instruct", 63.87),
        ("BrowseComp-ZH", OURS, 14.19),
        ("ShopAgent Multi-Turn", OURS, 29.61),
    ],
)
def test_cells_spot_checked_against_the_notes(benchmark: str, model: str, score: float) -> None:
    assert [s.score for s in paper_scores() if (s.benchmark, s.model) == (benchmark, model)] == [score]


def test_romes_averages_are_the_means_of_its_cells_to_the_hundredth() -> None:
    scores = paper_scores()
    for group in ("terminal", "tool-use", "general"):
        cells = [s.score for s in scores if s.group == group and s.model == OURS and s.benchmark != "average"]
        # the general group's mean of the four known cells is 25.64, terminal's of six 37.60, tool use's of six 49.46
        assert average(scores, group, OURS) == pytest.approx(sum(cells) / len(cells), abs=0.011)


def test_the_gains_that_the_paper_reports_follow_from_the_cells() -> None:
    cells = {(s.benchmark, s.model): s.score for s in paper_scores()}
    gains = {"Terminal-Bench 1.0": 13.00, "Terminal-Bench 2.0": 11.24, "SWE-bench Verified": 11.07}
    for benchmark, gain in gains.items():
        assert cells[benchmark, OURS] - cells[benchmark, BASE] == pytest.approx(gain)


def test_a_cell_that_the_paper_does_not_give_is_absent() -> None:
    scores = paper_scores()
    assert average(scores, "terminal", "GPT-OSS-120B") is None
    assert not [s for s in scores if s.benchmark == "SWE-bench Multilingual" and s.model != OURS]


def test_the_papers_numbers_are_marked_as_the_papers() -> None:
    text = paper_lines({"all": {}, "group": {"terminal": {}, "general": {}}})
    assert "not ours" in text and "37.60" in text and "25.64" in text and "49.46" not in text


def test_a_damaged_table_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",".join(COLUMNS) + "\nterminal,x,ROME,many,arXiv\n")
    with pytest.raises(MiniRomeError, match=r"t\.csv:2.*many"):
        paper_scores(path)
    with pytest.raises(MiniRomeError, match="does not exist"):
        paper_scores(tmp_path / "none.csv")


def test_the_figure_shows_models_of_known_size_and_ours_apart(tmp_path: Path) -> None:
    record = {"results": {"all": {"all": {"avg": 0.5}}}, "parameters": 1_000_000, "backend": "sim"}
    (tmp_path / "eval.json").write_text(json.dumps(record))
    assert our_point(tmp_path) == Ours(0.001, {"terminal": 50.0}, "mini-rome, 1.0 M (sim)")
    bare = performance_against_parameters(tmp_path / "a.png").read_bytes()
    with_ours = performance_against_parameters(tmp_path / "b.png", ours=our_point(tmp_path)).read_bytes()
    assert min(len(bare), len(with_ours)) > 5000 and bare != with_ours
    assert {size for size, _ in SIZES.values()} == {30.0, 480.0, 120.0}
    with pytest.raises(MiniRomeError, match="mini-rome eval --out"):
        our_point(tmp_path / "nowhere")
