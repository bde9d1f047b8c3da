"""Bands, claims, drawings and the check of a rerun, on numbers worked by hand."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from mini_rome import cli
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluation import ablation_claims as claims
from mini_rome.evaluation import figures
from mini_rome.evaluation.ablation import Ablation, Cube, Panel, Variant, band, cube, interval, lengths
from mini_rome.evaluation.ablation_draw import caption, check, compare, curves, decorate, effect_rows
from mini_rome.evaluation.ablation_figures import ABLATIONS, get_ablation
from mini_rome.evaluation.rows import COLUMNS, RESULTS, Row, read_rows
from mini_rome.evaluation.stats import interquartile_mean, stratified_bootstrap
from mini_rome.runs import write_csv, write_json
from mini_rome.safety.conduct import METRICS

STEPS = (0, 20, 40)


def line(variant: str, seed: int, metric: str, values: list[float], task: str = "all") -> list[Row]:
    """One value at each of STEPS."""
    return [Row(variant, str(seed), task, step, metric, value) for step, value in zip(STEPS, values, strict=False)]


def solved(variant: str, ends: list[float], first: int = 100) -> list[Row]:
    """One seed per end: start_success 0, half of it, all of it."""
    rows: list[Row] = []
    for seed, end in enumerate(ends, start=first):
        rows += line(variant, seed, "start_success", [0, end / 2, end])
    return rows


# Numbers


def test_the_band_is_that_of_the_stratified_bootstrap_and_its_middle_the_interquartile_mean() -> None:
    table = np.random.default_rng(3).random((6, 2))
    found = band(table[None])
    middle, low, high = stratified_bootstrap(table)
    assert found.middle[0] == pytest.approx(interquartile_mean(table)) == pytest.approx(middle)
    assert (found.low[0], found.high[0]) == pytest.approx((low, high), abs=0.02)
    assert found.low[0] < middle < found.high[0]


def test_two_seeds_have_the_band_of_their_extremes() -> None:
    assert interval([0.2, 0.6]) == pytest.approx((0.4, 0.2, 0.6))


def test_a_shorter_run_enters_no_statistic() -> None:
    rows = solved("a", [1.0, 1.0]) + line("a", 102, "start_success", [0.0, 0.0])
    assert cube(rows, "a", "start_success").seeds == ["100", "101"]
    assert {row.seed for row in rows} == {"100", "101", "102"}


def test_the_lowest_is_taken_over_tasks_within_each_seed() -> None:
    rows = line("a", 1, "s", [0.9], "x") + line("a", 1, "s", [0.1], "y")
    rows += line("a", 2, "s", [0.2], "x") + line("a", 2, "s", [0.8], "y")
    found = cube(rows, "a", "s")
    assert found.values.shape == (1, 2, 2)
    assert found.lowest().last() == {"1": 0.1, "2": 0.2}  # not min over seeds of a task, which would be 0.2 and 0.1
    assert claims.lowest(found) == {"1": 0.1, "2": 0.2} and found.last() == {"1": 0.5, "2": 0.5}


def test_a_missing_value_is_named() -> None:
    rows = solved("a", [1.0, 1.0])
    with pytest.raises(MiniRomeError, match=r"no value of \(20, '101', 'all'\)"):
        cube([row for row in rows if (row.seed, row.step) != ("101", 20)], "a", "start_success")
    with pytest.raises(MiniRomeError, match="no row of variant 'b'"):
        cube(rows, "b", "start_success")


def test_the_peak_is_log10_of_the_largest_over_steps() -> None:
    found = Cube([0, 1], ["7"], np.array([[[10.0]], [[1000.0]]]))
    assert claims.peak(found) == {"7": pytest.approx(3.0)}


# Claims


def test_ten_of_ten_against_none_of_ten_solves_more_and_six_against_four_does_not() -> None:
    clear = claims.solves_more("a", "b")(solved("a", [1.0] * 10) + solved("b", [0.0] * 10))
    assert clear.holds and clear.numbers == "a 10/10 [0.72, 1.00], b 0/10 [0.00, 0.28]"
    close = solved("a", [1.0] * 6 + [0.0] * 4) + solved("b", [1.0] * 4 + [0.0] * 6)
    assert not claims.solves_more("a", "b")(close).holds


def test_half_of_the_evaluations_solve_a_seed_and_less_does_not() -> None:
    assert claims.share_solved(solved("a", [0.5, 0.49, 1.0]), "a") == (2, 3)


def test_naive_stays_below_its_limit_or_not() -> None:
    assert claims.stays_below("naive", 0.05)(solved("naive", [0.0, 0.0, 0.05, 0.0])).holds
    found = claims.stays_below("naive", 0.05)(solved("naive", [0.0, 0.0, 0.0, 1.0]))
    assert not found.holds and "0.000 [0.000, " in found.numbers  # its interval shows the seed that succeeds


def test_a_difference_is_paired_by_seed() -> None:
    """Seeds differ by more than the variants do: unpaired intervals would overlap."""
    base = [0.1, 0.4, 0.7]
    rows = solved("a", [value + 0.1 for value in base]) + solved("b", base)
    found = claims.exceeds("a", "b", "start_success")(rows)
    assert found.holds and found.numbers == "difference +0.100 [+0.100, +0.100], 3 seeds"
    assert not claims.exceeds("b", "a", "start_success")(rows).holds
    assert claims.exceeds("b", "a", "start_success", margin=0.2)(rows).holds
    assert claims.exceeds("a", "b", "start_success")(rows[: len(rows) // 2] + solved("b", base[:2])).holds is None


def test_a_difference_whose_interval_reaches_zero_does_not_hold_whatever_its_middle() -> None:
    base, gains = [0.5, 0.5, 0.5, 0.5, 0.5], [0.4, 0.3, 0.2, -0.3, -0.3]
    rows = solved("a", [value + gain for value, gain in zip(base, gains, strict=True)]) + solved("b", base)
    middle, low, _ = interval(gains)
    assert middle > 0.03 and low < -0.1  # the case is what it is named for
    assert claims.exceeds("a", "b", "start_success")(rows).holds is False


def test_equal_tokens_are_met_between_two_measurements() -> None:
    rows: list[Row] = []
    for seed in (1, 2, 3):
        rows += line("rl", seed, "s", [0.0, 0.4, 0.8]) + line("rl", seed, "tokens", [0, 100, 200])
        rows += line("sft", seed, "s", [0.0, 0.5, 1.0]) + line("sft", seed, "tokens", [0, 400, 800])
    found = claims.at_equal("rl", "sft", "s", "tokens")(rows)  # at 200 tokens: 0.8 against 0.25
    assert found.holds and "+0.550" in found.numbers


# Definitions


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_named_apart_and_its_panels_are_measured(name: str) -> None:
    ablation = get_ablation(name)
    assert len(set(ablation.names)) == len(ablation.names)
    measured = {"train_success", "start_position", "grad_norm"}
    measured |= {"start_success"} if ablation.repeats else set()
    measured |= {"test_success", *METRICS} if ablation.held_out else set()
    assert {panel.metric for panel in ablation.panels} <= measured
    assert ablation.every <= ablation.fast <= ablation.steps and ablation.steps % ablation.every == 0


def test_an_unknown_ablation_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose from fig12, fig13, fig10"):
        get_ablation("fig11")


# Pictures


def table_of(name: str, seeds: int = 3) -> list[Row]:
    """Made-up rows of every variant and metric; of the mini-set two tasks."""
    ablation, rows = ABLATIONS[name], list[Row]()
    for place, variant in enumerate(ablation.variants):
        for seed in range(100, 100 + seeds):
            gain = 0.4 / (1 + place) + 0.01 * (seed - 100)
            tasks = ("task0", "task1") if name in ("fig13", "control13") else ("task0",)
            for task in tasks:
                for metric in ("start_success", "test_success"):
                    rows += line(variant.name, seed, metric, [0.0, gain, 2 * gain], task)
            for metric in ("train_success", "grad_norm", "start_position", "tokens", "episodes", "seconds"):
                rows += line(variant.name, seed, metric, [0.1, 0.2 + gain, 0.3 + gain])
    return rows


def saved(folder: Path, name: str, rows: list[Row]) -> tuple[Path, Path, Path]:
    facts = {"figure": name, "backend": "sim", "sampler": "transformers", "commit": "0123456789ab"}
    facts["n"] = {"start_success": 16, "test_success": 0}
    folder.mkdir(exist_ok=True)
    write_csv(folder / f"{name}.csv", [row._asdict() for row in rows], COLUMNS)
    write_json(folder / f"{name}.json", facts)
    return figures.locate(folder / f"{name}.csv")


def test_steps_and_episodes_are_told_in_whole_numbers() -> None:
    axes = Figure().subplots()
    axes.plot([0, 2], [0, 1])
    decorate(axes, Panel("train_success", "train success"), "")
    assert [tick for tick in axes.get_xticks() if tick % 1] == [] and len(axes.get_xticks()) > 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("fig12", "fig13") else pytest.mark.long) for name in ABLATIONS]
)
def test_every_ablation_draws_and_redraws_byte_for_byte(tmp_path: Path, name: str) -> None:
    paths = saved(tmp_path, name, table_of(name))
    first = figures.redraw(*paths).read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n" and figures.redraw(*paths).read_bytes() == first
    changed = [row._replace(value=row.value / 2) for row in table_of(name)]
    assert figures.redraw(*saved(tmp_path, name, changed)).read_bytes() != first


def test_lines_are_one_per_seed_and_one_for_the_middle_of_each_variant() -> None:
    figure = curves(ABLATIONS["fig12"], table_of("fig12", seeds=4))
    success = figure.axes[2]
    assert len(success.lines) == 2 * (4 + 1) and len(success.collections) == 2
    middle = [line for line in success.lines if line.get_label() == "rollback"]
    assert middle[0].get_ydata()[-1] == pytest.approx(2 * (0.4 + 0.015))


def test_a_finished_part_is_drawn_without_the_rest(tmp_path: Path) -> None:
    rows = [row for row in table_of("fig10") if row.variant == ABLATIONS["fig10"].variants[0].name]
    assert figures.redraw(*saved(tmp_path, "fig10", rows)).exists()
    with pytest.raises(MiniRomeError, match="no run has finished"):
        figures.redraw(*saved(tmp_path, "fig10", []))


def test_effects_are_differences_to_the_first_of_their_condition() -> None:
    arms = [Variant("a"), Variant("b"), Variant("c", condition="x"), Variant("d", condition="x")]
    rows: list[Row] = []
    for name, end, norm in (("a", 0.5, 1.0), ("b", 0.25, 10.0), ("c", 0.0, 1.0), ("d", 1.0, 1.0)):
        rows += line(name, 1, "test_success", [0.0, end, end]) + line(name, 1, "grad_norm", [0.1, norm, 0.1])
    found = {variant.name: differences for variant, differences in effect_rows(arms, rows)}
    assert found == {"a": ([], []), "b": ([-0.25], [pytest.approx(1.0)]), "c": ([], []), "d": ([1.0], [0.0])}


def test_the_caption_says_backend_seeds_n_intervals_and_what_is_shared() -> None:
    facts = {"backend": "sim", "sampler": "transformers", "commit": "abc", "n": {"start_success": 16}}
    text = caption(ABLATIONS["fig12"], table_of("fig12", seeds=10), facts)
    for part in ("(sim)", "100-109 (10)", "n = 16", "95 %", "anew for each seed", "commit abc"):
        assert part in text
    shared = facts | {"backend": "docker", "runs": {"naive/0": {"sft": "ab"}, "naive/1": {"sft": "ab"}}}
    assert "one model after SFT for all seeds" in caption(ABLATIONS["fig13"], table_of("fig13"), shared)
    shared["runs"]["naive/1"] = {}  # before the weights were told
    assert "2 models after SFT, see the JSON" in caption(ABLATIONS["fig13"], table_of("fig13"), shared)


# A rerun


def test_a_rerun_that_agrees_and_one_that_does_not(tmp_path: Path, capsys, monkeypatch) -> None:
    good = solved("rollback", [0.9] * 9 + [1.0]) + solved("naive", [0.0] * 10)
    table, *_ = saved(tmp_path, "fig12", good)
    same, *_ = saved(tmp_path / "same", "fig12", good)
    other, *_ = saved(tmp_path / "other", "fig12", solved("rollback", [0.1] * 10) + solved("naive", [0.0] * 10))
    assert cli.main(["figure", str(table), "--check", str(same)]) == 0
    assert "DISAGREES" not in capsys.readouterr().out
    assert cli.main(["figure", str(table), "--check", str(other)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert sum(text.startswith("DISAGREES") for text in told) == 2  # the band of rollback, the claim on solved seeds


def test_a_claim_that_does_not_hold_in_either_agrees() -> None:
    """Identical rows agree whatever they show; a claim that only the rerun bears out does not."""
    bad = solved("rollback", [0.9] * 10) + solved("naive", [0.9] * 10)
    good = solved("rollback", [0.9] * 10) + solved("naive", [0.0] * 10)
    for committed, new, expected in ((bad, bad, True), (good, good, True), (bad, good, False), (good, bad, False)):
        found = compare(committed, new, ABLATIONS["fig12"])
        assert {agrees for text, agrees in found if text.startswith(("share of", "naive: "))} == {expected}


def test_a_shorter_rerun_is_compared_at_the_last_step_of_both() -> None:
    good = solved("rollback", [0.8] * 4) + solved("naive", [0.0] * 4)
    short = [row for row in good if row.step <= 20]
    lines = compare(good, short, dataclasses.replace(ABLATIONS["fig12"], claims=()))
    assert len(lines) == 2 and all(agrees and "step 20" in text for text, agrees in lines)


def test_a_rerun_of_another_figure_is_not_compared() -> None:
    fig12, fig13 = (Path(__file__).parents[1] / RESULTS / f"{name}.csv" for name in ("fig12", "fig13"))
    with pytest.raises(MiniRomeError, match="fig13.csv: is of fig13, not of fig12"):
        check("fig12", fig12, fig13)


def test_what_is_no_ablation_cannot_be_checked(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / RESULTS
    assert json.loads((folder / "mask_firing.json").read_text())["figure"] == "mask_firing"
    with pytest.raises(MiniRomeError, match="tests ablations alone"):
        cli.run_figure(cli.build_parser().parse_args(["figure", str(folder / "mask_firing.csv"), "--check", "x.csv"]))


COMMITTED = sorted(
    path for path in (Path(__file__).parents[1] / RESULTS).glob("*.json")
    if json.loads(path.read_text()).get("figure") in ABLATIONS
)  # fmt: skip


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_verdicts_follow_from_the_committed_rows_and_stand_in_the_readme(path: Path) -> None:
    facts, rows = json.loads(path.read_text()), read_rows(path.with_suffix(".csv"))
    readme = (path.parents[1] / "README.md").read_text()
    run = {variant for variant, _ in lengths(rows)}
    found = []
    ablation = ABLATIONS[facts["figure"]]
    for claim in ablation.claims:
        try:
            found.append((claim.text, claim.test(rows)))
        except MiniRomeError as error:  # an arm that was not run yet: no claim is told about it
            [missing] = re.findall("no row of variant '(.*)' has", str(error))
            assert missing not in run
    assert found or not ablation.claims
    assert facts["claims"] == [{"claim": t, "verdict": f.verdict, "numbers": f.numbers} for t, f in found]
    for text, finding in found:
        line = f"| {path.stem} | {text} | {finding.verdict} | {finding.numbers} |"
        assert line in readme, f"recipes/README.md lacks: {line}"
    for line in effect_lines(ablation, rows) if ablation.drawing == "effects" else ():
        assert line in readme, f"recipes/README.md lacks: {line}"


def effect_lines(ablation: Ablation, rows: list[Row]) -> list[str]:
    """Variant, its reference, differences of test success and of log10 of the largest norm, number of seeds."""
    references: dict[str, str] = {}
    lines = []
    for variant, differences in effect_rows(ablation.variants, rows):
        reference = references.setdefault(variant.condition, variant.name)
        if reference != variant.name:
            bands = [stratified_bootstrap(np.array(each)[:, None], interquartile_mean) for each in differences]
            said = " | ".join(f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]" for middle, low, high in bands)
            lines.append(f"| {variant.name} | {reference} | {said} | {len(differences[0])} |")
    assert lines
    return lines


def test_drawing_an_ablation_loads_no_torch() -> None:
    code = "import json, sys, mini_rome.evaluation.ablation_draw; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not set(json.loads(done.stdout)) & {"torch", "transformers", "matplotlib.pyplot"}


def test_panels_of_one_metric_over_steps_and_over_what_they_cost() -> None:
    over = [panel.over for panel in ABLATIONS["fig13"].panels if panel == dataclasses.replace(panel, lowest=True)]
    assert set(over) == {"step", "episodes", "seconds"}
    assert Panel("x", "y").over == "step"
