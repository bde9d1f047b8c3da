"""The fit against exact rational arithmetic, on the visible table and on hidden ones."""

import json
import math
from fractions import Fraction

import pytest

KEYS = {"n", "intercept", "slope", "intercept_err", "slope_err", "covariance", "chi2", "dof"}
PLAIN = [line.split() for line in ("1 2.1 0.1", "2 3.9 0.3", "3.5 7.2 0.2", "5 9.7 0.5", "-4 -8.4 0.25")]
SMALL = [line.split() for line in ("1e-6 3.1e-9 2E-10", "2e-6 4.2e-9 1e-10", "5e-6 9.9e-9 3e-10", "7e-6 1e-8 2e-9")]
TIMES = [
    (str(1735689600 + 60 * i), f"{20.5 + 0.031 * i + 0.2 * (i % 3):.3f}", f"{0.1 + 0.05 * (i % 4):.2f}")
    for i in range(60)
]


def exact(points, at=None):
    """The fit in fractions: {key: float}."""
    table = [tuple(Fraction(field) for field in point) for point in points]
    weights = [1 / sigma**2 for _, _, sigma in table]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _, _) in zip(weights, table, strict=True)) / total
    y_mean = sum(w * y for w, (_, y, _) in zip(weights, table, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _, _) in zip(weights, table, strict=True))
    slope = sum(w * (x - x_mean) * y for w, (x, y, _) in zip(weights, table, strict=True)) / spread
    chi2 = sum(w * (y - y_mean - slope * (x - x_mean)) ** 2 for w, (x, y, _) in zip(weights, table, strict=True))
    found = {
        "n": len(table), "intercept": y_mean - slope * x_mean, "slope": slope,
        "intercept_err": math.sqrt(1 / total + x_mean**2 / spread), "slope_err": math.sqrt(1 / spread),
        "covariance": -x_mean / spread, "chi2": chi2, "dof": len(table) - 2,
    }  # fmt: skip
    if at is not None:
        found["at_y"] = y_mean + slope * (at - x_mean)
        found["at_err"] = math.sqrt(1 / total + (at - x_mean) ** 2 / spread)
    return {key: float(value) for key, value in found.items()}


def same(found, points, keys, at=None):
    wanted = exact(points, at)
    return all(math.isclose(found[key], wanted[key], rel_tol=1e-6) for key in keys)


@pytest.fixture
def fit(run, scratch):
    def fitter(points, *options, text=None):
        path = scratch / "table.txt"
        path.write_text(text if text is not None else "".join(" ".join(point) + "\n" for point in points))
        return run(["python3", "/app/fit.py", path, *options])

    return fitter


def test_parameters_of_a_plain_table(fit):
    assert same(json.loads(fit(PLAIN).out), PLAIN, ("intercept", "slope"))


def test_errors_follow_from_the_sigmas_alone(fit):
    assert same(json.loads(fit(PLAIN).out), PLAIN, ("intercept_err", "slope_err", "covariance"))


def test_chi2_and_degrees_of_freedom(fit):
    assert same(json.loads(fit(PLAIN).out), PLAIN, ("n", "chi2", "dof"))


def test_the_object_has_the_keys_asked_for_and_no_more(fit):
    done = fit(PLAIN)
    assert done.code == 0 and set(json.loads(done.out)) == KEYS


def test_small_numbers_in_exponent_notation(fit):
    assert same(json.loads(fit(SMALL).out), SMALL, ("n", "intercept", "slope", "chi2"))


def test_comments_empty_lines_and_points_without_error(fit):
    lines = [f"{x}\t{y}  {sigma} # point" for x, y, sigma in PLAIN]
    text = "\n".join(["# x y sigma", "", *lines[:2], "2.5 99 -", "   ", "  # 7 7 7", "9 9 - # unknown", *lines[2:]])
    assert same(json.loads(fit((), text=text).out), PLAIN, ("n", "intercept", "slope", "chi2"))


def test_slope_of_times_far_from_zero(fit):
    assert same(json.loads(fit(TIMES).out), TIMES, ("intercept", "slope", "chi2"))


def test_errors_of_times_far_from_zero(fit):
    assert same(json.loads(fit(TIMES).out), TIMES, ("intercept_err", "slope_err", "covariance"))


def test_the_value_of_the_line_at_a_point(fit):
    at = json.loads(fit(PLAIN, "--at", "12.5").out)["at"]
    wanted = exact(PLAIN, Fraction("12.5"))
    assert at["x"] == 12.5 and math.isclose(at["y"], wanted["at_y"], rel_tol=1e-6)


def test_the_error_of_the_line_at_a_point(fit):
    at = json.loads(fit(PLAIN, "--at", "-3").out)["at"]
    assert math.isclose(at["err"], exact(PLAIN, Fraction(-3))["at_err"], rel_tol=1e-6)


def test_too_few_usable_points_are_refused(fit):
    assert fit(PLAIN).code == 0
    done = fit((), text="1 2 0.1\n2 3 0.1\n3 4 -\n")
    assert (done.code, done.out.strip()) == (2, "") and done.err.strip()


def test_points_at_one_x_are_refused(fit):
    assert fit(PLAIN).code == 0
    done = fit((), text="0.1 2 0.1\n0.1 3 0.2\n0.10 4 0.7\n")
    assert (done.code, done.out.strip()) == (2, "") and done.err.strip()


def test_the_saved_fit_of_the_spring(read):
    lines = [line.partition("#")[0].split() for line in read("/app/spring.txt").splitlines()]
    points = [tuple(fields) for fields in lines if fields and fields[2] != "-"]
    saved = json.loads(read("/app/spring.json"))
    at = {"at_y": saved["at"]["y"], "at_err": saved["at"]["err"]}
    assert len(points) == 13 and saved["at"]["x"] == 20
    assert same({**saved, **at}, points, [*KEYS, "at_y", "at_err"], Fraction(20))
