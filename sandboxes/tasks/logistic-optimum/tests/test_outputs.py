"""The fitted model against a Newton solution of the same convex problem; predictions from models given by hand."""

import csv
import io
import json
import math
import random

import pytest


def draw(seed, size, scales=(1.0, 1.0), truth=(0.3, 1.0, -0.7)):
    """(feature rows, labels) with features of the given scales."""
    rng = random.Random(seed)
    rows = [[rng.gauss(0.4, 1) * scale for scale in scales] for _ in range(size)]
    labels = []
    for row in rows:
        z = truth[0] + sum(b * x / scale for b, x, scale in zip(truth[1:], row, scales, strict=True))
        labels.append(int(rng.random() < 1 / (1 + math.exp(-z))))
    return rows, labels


def objective(rows, labels, penalty, beta):
    """Mean log loss plus half the penalty times the squared weights; beta[0] is the intercept."""
    total = 0.0
    for row, label in zip(rows, labels, strict=True):
        z = beta[0] + sum(b * x for b, x in zip(beta[1:], row, strict=True))
        z = z if label else -z
        total += math.log1p(math.exp(-z)) if z > -30 else -z
    return total / len(rows) + penalty / 2 * sum(b * b for b in beta[1:])


def solved(matrix, rhs):
    a = [row[:] + [value] for row, value in zip(matrix, rhs, strict=True)]
    for k in range(len(a)):
        pivot = max(range(k, len(a)), key=lambda i: abs(a[i][k]))
        a[k], a[pivot] = a[pivot], a[k]
        for i in range(len(a)):
            if i != k:
                factor = a[i][k] / a[k][k]
                a[i] = [x - factor * y for x, y in zip(a[i], a[k], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(a)]


def optimum(rows, labels, penalty):
    """Newton's method with step halving: [intercept, weight, ...]."""
    size = len(rows[0]) + 1
    beta = [0.0] * size
    for _ in range(60):
        gradient = [0.0] + [penalty * b for b in beta[1:]]
        hessian = [[penalty * (i == j and i > 0) for j in range(size)] for i in range(size)]
        for row, label in zip(rows, labels, strict=True):
            x = [1.0, *row]
            p = 1 / (1 + math.exp(-max(-700, min(700, sum(b * v for b, v in zip(beta, x, strict=True))))))
            for i in range(size):
                gradient[i] += (p - label) * x[i] / len(rows)
                for j in range(size):
                    hessian[i][j] += p * (1 - p) * x[i] * x[j] / len(rows)
        move, step = solved(hessian, gradient), 1.0
        while step > 1e-9:
            fresh = [b - step * m for b, m in zip(beta, move, strict=True)]
            if objective(rows, labels, penalty, fresh) <= objective(rows, labels, penalty, beta):
                beta = fresh
                break
            step /= 2
    return beta


def text(names, rows, labels):
    out, table = io.StringIO(), [[*row, label] for row, label in zip(rows, labels, strict=True)]
    csv.writer(out, lineterminator="\n").writerows([[*names, "label"], *table])
    return out.getvalue()


@pytest.fixture
def fit(run, read, scratch):
    """(rows, labels, penalty) -> (found [intercept, weights...], model)."""

    def fitter(rows, labels, penalty):
        names = [f"x{i}" for i in range(len(rows[0]))]
        (scratch / "train.csv").write_text(text(names, rows, labels))
        done = run(["python3", "/app/logreg.py", "fit", scratch / "train.csv", penalty, scratch / "model.json"])
        assert done.code == 0, done.err
        model = json.loads(read(scratch / "model.json"))
        return [model["intercept"], *(model["weights"][name] for name in names)], model

    return fitter


@pytest.fixture
def predict(run, scratch):
    def predictor(model, table):
        (scratch / "model.json").write_text(json.dumps(model))
        (scratch / "data.csv").write_text(table)
        done = run(["python3", "/app/logreg.py", "predict", scratch / "model.json", scratch / "data.csv"])
        assert done.code == 0, done.err
        return [float(line) for line in done.out.splitlines()]

    return predictor


def close(found, wanted):
    assert len(found) == len(wanted)
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9) for a, b in zip(found, wanted, strict=True))


def test_the_optimum_without_penalty(fit):
    rows, labels = draw(1, 120)
    assert close(fit(rows, labels, 0)[0], optimum(rows, labels, 0))


def test_the_optimum_with_penalty(fit):
    rows, labels = draw(2, 120)
    assert close(fit(rows, labels, 0.2)[0], optimum(rows, labels, 0.2))


def test_the_intercept_is_not_penalised(fit):
    rows, labels = draw(3, 120, truth=(3, 0.2, 0.1))
    found, _ = fit(rows, labels, 1000)
    share = sum(labels) / len(labels)
    assert share > 0.9 and math.isclose(found[0], math.log(share / (1 - share)), abs_tol=0.01)


def test_raw_features_of_very_different_scales(fit):
    rows, labels = draw(4, 120, scales=(2e4, 0.01))
    assert close(fit(rows, labels, 1e-6)[0], optimum(rows, labels, 1e-6))


def test_separable_classes_have_a_finite_optimum_with_penalty(fit):
    rows = [[x / 4] for x in range(-20, 20) if x not in (-1, 0, 1)]
    labels = [int(row[0] > 0) for row in rows]
    assert close(fit(rows, labels, 1e-4)[0], optimum(rows, labels, 1e-4))


def test_the_loss_is_that_of_the_model(fit):
    rows, labels = draw(5, 100)
    found, model = fit(rows, labels, 0.05)
    assert math.isclose(model["loss"], objective(rows, labels, 0.05, found), rel_tol=1e-6)


def test_equal_features_share_their_weight(fit):
    rows, labels = draw(6, 150)
    found, _ = fit([[*row, row[0]] for row in rows], labels, 0.01)
    assert math.isclose(found[1], found[3], rel_tol=1e-4)


def test_a_feature_without_spread_gets_no_weight(fit):
    rows, labels = draw(7, 150)
    found, _ = fit([[0, *row] for row in rows], labels, 0.05)
    assert abs(found[1]) < 1e-9 and abs(found[2]) > 0.01


def test_predictions_are_probabilities_in_the_order_of_the_rows(predict):
    model = {"intercept": -1.0, "weights": {"a": 2.0, "b": -0.5}, "loss": 0.1}
    wanted = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(3))]
    assert close(predict(model, "a,b\n0,0\n1,0\n0,4\n"), wanted)


def test_columns_are_found_by_name(predict):
    model = {"intercept": 0.0, "weights": {"a": 1.0, "b": -3.0}, "loss": 0.1}
    found = predict(model, "name,b,label,a\n\"Lee, K\",1,0,3\nBo,0,1,0.5\n")
    assert close(found, [0.5, 1 / (1 + math.exp(-0.5))])


def test_extreme_scores_do_not_overflow(predict):
    model = {"intercept": 5.0, "weights": {"a": 1e3}, "loss": 0.1}
    low, high = predict(model, "a\n-1000\n1000\n")
    assert 0 <= low < 1e-100 and high == 1


def test_the_saved_model_of_the_loans(read):
    names, *table = csv.reader(io.StringIO(read("/app/loans.csv")))
    rows, labels = [[float(field) for field in row[1:]] for row in table], [int(row[0]) for row in table]
    model = json.loads(read("/app/loans.json"))
    assert len(rows) == 240 and names[0] == "label" and set(model["weights"]) == set(names[1:])
    found = [model["intercept"], *(model["weights"][name] for name in names[1:])]
    assert close(found, optimum(rows, labels, 0.01))
