#!/bin/bash
set -e
cat > /app/fit.py <<'PY'
import json
import math
import sys


def read(path):
    points = []
    with open(path) as stream:
        for line in stream:
            fields = line.partition("#")[0].split()
            if fields and fields[2] != "-":
                points.append(tuple(map(float, fields)))
    return points


def main(path, at=None):
    points = read(path)
    if len(points) < 3 or len({x for x, _, _ in points}) < 2:
        sys.exit("fit.py: needs three points, not all at the same x")
    weights = [sigma**-2 for _, _, sigma in points]
    total = math.fsum(weights)
    x_mean = math.fsum(w * x for w, (x, _, _) in zip(weights, points)) / total
    y_mean = math.fsum(w * y for w, (_, y, _) in zip(weights, points)) / total
    spread = math.fsum(w * (x - x_mean) ** 2 for w, (x, _, _) in zip(weights, points))
    slope = math.fsum(w * (x - x_mean) * (y - y_mean) for w, (x, y, _) in zip(weights, points)) / spread
    residuals = [y - y_mean - slope * (x - x_mean) for x, y, _ in points]
    found = {
        "n": len(points), "intercept": y_mean - slope * x_mean, "slope": slope,
        "intercept_err": math.sqrt(1 / total + x_mean**2 / spread), "slope_err": math.sqrt(1 / spread),
        "covariance": -x_mean / spread,
        "chi2": math.fsum(w * r * r for w, r in zip(weights, residuals)), "dof": len(points) - 2,
    }
    if at is not None:
        error = math.sqrt(1 / total + (at - x_mean) ** 2 / spread)
        found["at"] = {"x": at, "y": y_mean + slope * (at - x_mean), "err": error}
    print(json.dumps(found))


try:
    main(sys.argv[1], float(sys.argv[3]) if sys.argv[2:3] == ["--at"] else None)
except SystemExit as error:
    print(error, file=sys.stderr)
    sys.exit(2)
PY
python3 /app/fit.py /app/spring.txt --at 20 > /app/spring.json
