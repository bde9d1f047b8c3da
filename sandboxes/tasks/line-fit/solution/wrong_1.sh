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
    sx = math.fsum(w * x for w, (x, _, _) in zip(weights, points))
    sy = math.fsum(w * y for w, (_, y, _) in zip(weights, points))
    sxx = math.fsum(w * x * x for w, (x, _, _) in zip(weights, points))
    sxy = math.fsum(w * x * y for w, (x, y, _) in zip(weights, points))
    delta = total * sxx - sx * sx
    intercept, slope = (sxx * sy - sx * sxy) / delta, (total * sxy - sx * sy) / delta
    residuals = [y - intercept - slope * x for x, y, _ in points]
    found = {
        "n": len(points), "intercept": intercept, "slope": slope,
        "intercept_err": math.sqrt(sxx / delta), "slope_err": math.sqrt(total / delta),
        "covariance": -sx / delta,
        "chi2": math.fsum(w * r * r for w, r in zip(weights, residuals)), "dof": len(points) - 2,
    }
    if at is not None:
        error = math.sqrt((sxx - 2 * at * sx + at * at * total) / delta)
        found["at"] = {"x": at, "y": intercept + slope * at, "err": error}
    print(json.dumps(found))


try:
    main(sys.argv[1], float(sys.argv[3]) if sys.argv[2:3] == ["--at"] else None)
except SystemExit as error:
    print(error, file=sys.stderr)
    sys.exit(2)
PY
python3 /app/fit.py /app/spring.txt --at 20 > /app/spring.json
