"""Accuracy and form of the predictions, on hidden draws from the distribution of the visible data and on others."""

import csv
import io
import math
import random

import pytest

CENTRES = {"ash": (30, 0.10), "oak": (36, 0.16), "elm": (42, 0.10)}


def leaves(seed, size, missing=0.0):
    """Rows (id, width_mm, gloss, altitude_m, label): the last feature says nothing and has the largest numbers."""
    rng = random.Random(seed)
    rows = []
    for number in range(size):
        label = rng.choice(sorted(CENTRES))
        width, gloss = CENTRES[label]
        fields = [f"{rng.gauss(width, 2):.1f}", f"{rng.gauss(gloss, 0.015):.3f}", f"{rng.uniform(0, 3000):.0f}"]
        if rng.random() < missing:
            fields[rng.randrange(3)] = ""
        rows.append([f"leaf-{number}", *fields, label])
    return ["id", "width_mm", "gloss", "altitude_m", "label"], rows


def rings(seed, size):
    """One class surrounds the other."""
    rng = random.Random(seed)
    rows = []
    for number in range(size):
        label, radius = rng.choice([("07", 0.5), ("7", 1.6)])
        radius, angle = rng.gauss(radius, 0.12), rng.uniform(0, 2 * math.pi)
        x, y = 0.001 * radius * math.cos(angle), 40 * radius * math.sin(angle)
        rows.append([f"{number}", f"{x:.7f}", f"{rng.uniform(0, 9000):.0f}", f"{y:.3f}", "1", label])
    return ["id", "x", "noise", "y", "constant", "label"], rows


def text(header, rows):
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


@pytest.fixture
def classify(run, read, scratch):
    """(training data, test data) -> ([[id, label]], share of right labels)."""

    def classifier(train, test, timeout=10):
        (scratch / "train.csv").write_text(text(*train))
        (scratch / "test.csv").write_text(text(test[0][:-1], [row[:-1] for row in test[1]]))
        files = [scratch / name for name in ("train.csv", "test.csv", "out.csv")]
        done = run(["python3", "/app/classify.py", *files], timeout=timeout)
        assert done.code == 0, done.err
        header, *found = csv.reader(io.StringIO(read(files[2])))
        assert header == ["id", "label"] and [row[0] for row in found] == [row[0] for row in test[1]]
        right = sum(a[1] == b[-1] for a, b in zip(found, test[1], strict=True))
        return found, right / len(found)

    return classifier


def test_the_saved_labels_of_the_visible_sample(read):
    header, *found = csv.reader(io.StringIO(read("/app/sample_labels.csv")))
    wanted = leaves(2, 80)[1]
    assert header == ["id", "label"] and [row[0] for row in found] == [row[0] for row in wanted]
    assert sum(a[1] == b[-1] for a, b in zip(found, wanted, strict=True)) >= 0.9 * 80


def test_accuracy_on_held_out_leaves(classify):
    assert classify(leaves(11, 300), leaves(12, 200))[1] >= 0.9


def test_every_class_is_recalled(classify):
    test = leaves(14, 200)
    found, _ = classify(leaves(13, 300), test)
    for name in CENTRES:
        answers = [row[1] for row, (*_, label) in zip(found, test[1], strict=True) if label == name]
        assert answers.count(name) >= 0.8 * len(answers)


def test_a_class_that_surrounds_another(classify):
    assert classify(rings(21, 400), rings(22, 200))[1] >= 0.9


def test_missing_features(classify):
    assert classify(leaves(31, 300, missing=0.2), leaves(32, 200, missing=0.2))[1] >= 0.85


def test_a_constant_feature_does_no_harm(classify):
    header, rows = leaves(41, 60)
    train = (["id", "same", *header[1:]], [[row[0], "5", *row[1:]] for row in rows])
    found, _ = classify(train, train)
    assert len(found) == 60


def test_a_single_row(classify):
    found, _ = classify(leaves(51, 50), leaves(52, 1))
    assert found[0][1] in CENTRES


def test_labels_stay_text(classify):
    found, _ = classify(rings(61, 60), rings(62, 30))
    assert {label for _, label in found} <= {"07", "7"} and len(found) == 30


def test_a_single_class(classify):
    header, rows = leaves(71, 60)
    only = [row for row in rows if row[-1] == "oak"]
    assert classify((header, only), (header, only[:5]))[1] == 1


def test_ids_with_commas_and_repeats_keep_their_order(classify):
    header, rows = leaves(81, 60)
    test = [["b, 1", *rows[0][1:]], ["a", *rows[1][1:]], ["b, 1", *rows[2][1:]]]
    assert len(classify((header, rows), (header, test))[0]) == 3


def test_a_thousand_training_rows_take_seconds(classify):
    assert len(classify(leaves(91, 1000), leaves(92, 200), timeout=10)[0]) == 200
