"""The ablation of SFT's masks: its table, its picture, and what its variants train on."""

from __future__ import annotations

from pathlib import Path

from samples import trajectory, turn

from mini_rome.data.ablation_masks import METRICS, VARIANTS, by_variant, interval, read_table, rows_of, table_of
from mini_rome.evaluation.figures import redraw
from mini_rome.evaluation.rows import COLUMNS
from mini_rome.masks import IGNORE, masked_labels
from mini_rome.runs import write_csv, write_json


def test_the_variants_train_what_their_names_say() -> None:
    failed, said, again = turn("sl", "?", (1, 2), exit_code=127), turn("ls", "a", (3, 4)), turn("ls", "a", (5, 6))
    episode = trajectory([failed, said, again])
    trained = {
        name: {label for label in masked_labels(episode, variant.policy)[1] if label != IGNORE}
        for name, variant in VARIANTS.items()
    }
    assert trained["both masks"] == trained["stage 2"] == trained["longer"] == {3, 4}
    assert trained["no error mask"] == {1, 2, 3, 4}
    assert trained["no task mask"] == {3, 4, 5, 6}
    assert trained["no masks"] == {1, 2, 3, 4, 5, 6}


def test_rows_are_read_back_and_drawn_with_intervals(tmp_path: Path) -> None:
    rows = []
    for seed in range(3):
        for name in VARIANTS:
            rows += rows_of(name, seed, 10, {metric: 0.5 + seed / 10 for metric in METRICS})
    path = tmp_path / "sft_masks.csv"
    write_csv(path, rows, COLUMNS)
    back = read_table(path)
    assert back == rows and read_table(tmp_path / "none.csv") == []
    assert by_variant(back, "success_long")["stage 2"] == [0.5, 0.6, 0.7]
    middle, low, high = interval([0.5, 0.6, 0.7])
    assert low <= middle <= high and low < high
    assert table_of(back, "sim").row_count == len(VARIANTS)
    facts = {"figure": "sft_masks", "backend": "sim", "seeds": [0, 1, 2], "options": {"eval_tasks": 7}, "commit": "c"}
    write_json(path.with_suffix(".json"), facts)
    png = redraw(path, path.with_suffix(".json"), path.with_suffix(".png"))
    assert png.stat().st_size > 5000
