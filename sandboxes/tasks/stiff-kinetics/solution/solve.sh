#!/bin/bash
set -e
cat > /app/kinetics.py <<'PY'
"""Extrapolated linearly implicit Euler: stages of 1..ORDER substeps, error from the last two diagonal entries."""

import json
import sys

ORDER, RTOL, ATOL = 7, 1e-7, 1e-17


def solver_of(matrix):
    """LU with partial pivoting: right-hand side -> solution."""
    n = len(matrix)
    a, order = [row[:] for row in matrix], list(range(n))
    for k in range(n):
        p = max(range(k, n), key=lambda i: abs(a[i][k]))
        a[k], a[p], order[k], order[p] = a[p], a[k], order[p], order[k]
        for i in range(k + 1, n):
            if a[i][k]:
                a[i][k] /= a[k][k]
                for j in range(k + 1, n):
                    a[i][j] -= a[i][k] * a[k][j]

    def solve(b):
        x = [b[i] for i in order]
        for i in range(n):
            x[i] -= sum(a[i][j] * x[j] for j in range(i))
        for i in reversed(range(n)):
            x[i] = (x[i] - sum(a[i][j] * x[j] for j in range(i + 1, n))) / a[i][i]
        return x

    return solve


class Network:
    def __init__(self, table):
        sides = [side for r in table["reactions"] for side in (r["in"], r["out"])]
        self.names = list(dict.fromkeys(name for side in [table["start"], *sides] for name in side))
        self.start = [float(table["start"].get(name, 0)) for name in self.names]
        self.reactions = []
        for r in table["reactions"]:
            powers = [(self.names.index(name), count) for name, count in r["in"].items()]
            change = [(i, r["out"].get(name, 0) - r["in"].get(name, 0)) for i, name in enumerate(self.names)]
            self.reactions.append((r["rate"], powers, [(i, c) for i, c in change if c]))

    def slope(self, y):
        out = [0.0] * len(y)
        for rate, powers, change in self.reactions:
            for i, power in powers:
                rate *= y[i] ** power
            for i, c in change:
                out[i] += c * rate
        return out

    def jacobian(self, y):
        out = [[0.0] * len(y) for _ in y]
        for rate, powers, change in self.reactions:
            for at, (i, power) in enumerate(powers):
                partial = rate * power * y[i] ** (power - 1)
                for other, (j, order) in enumerate(powers):
                    if other != at:
                        partial *= y[j] ** order
                for j, c in change:
                    out[j][i] += c * partial
        return out


def step(network, y, h):
    """(value after h, error in units of the tolerance)."""
    jacobian, row = network.jacobian(y), []
    for m in range(1, ORDER + 1):
        part = h / m
        solve = solver_of([[(i == j) - part * v for j, v in enumerate(line)] for i, line in enumerate(jacobian)])
        x = y
        for _ in range(m):
            x = [a + b for a, b in zip(x, solve([part * f for f in network.slope(x)]))]
        fresh = [x]
        for k, old in enumerate(row, 1):
            factor = m / (m - k) - 1
            fresh.append([a + (a - b) / factor for a, b in zip(fresh[-1], old)])
        row = fresh
    scale = [ATOL + RTOL * max(abs(a), abs(b)) for a, b in zip(y, row[-1])]
    return row[-1], max(abs(a - b) / s for a, b, s in zip(row[-1], row[-2], scale))


def integrate(network, times):
    y, t, h, out = network.start, 0.0, 1e-10, []
    for target in times:
        while t < target:
            last = h >= target - t
            size = target - t if last else h
            try:
                fresh, error = step(network, y, size)
            except (OverflowError, ZeroDivisionError):
                fresh, error = y, 1e9
            if error <= 1:
                y, t = fresh, target if last else t + size
                h = max(h, size * min(5, 0.8 * (error + 1e-12) ** (-1 / ORDER)))
                if error > 0.1 and not last:
                    h = size * 0.8 * error ** (-1 / ORDER)
            else:
                h = size * max(0.1, 0.8 * error ** (-1 / ORDER))
        out.append(y)
    return out


with open(sys.argv[1]) as stream:
    table = json.load(stream)
network = Network(table)
values = integrate(network, table["times"])
print(json.dumps({name: [row[i] for row in values] for i, name in enumerate(network.names)}))
PY
python3 /app/kinetics.py /app/networks/robertson.json > /app/robertson.json
