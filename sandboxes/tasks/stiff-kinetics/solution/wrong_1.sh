#!/bin/bash
set -e
cat > /app/kinetics.py <<'PY'
"""Fourth-order Runge-Kutta with step doubling."""

import json
import sys

ORDER, RTOL, ATOL = 5, 1e-8, 1e-14


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


def rk4(network, y, h):
    k1 = network.slope(y)
    k2 = network.slope([a + h / 2 * k for a, k in zip(y, k1)])
    k3 = network.slope([a + h / 2 * k for a, k in zip(y, k2)])
    k4 = network.slope([a + h * k for a, k in zip(y, k3)])
    return [a + h / 6 * (p + 2 * q + 2 * r + s) for a, p, q, r, s in zip(y, k1, k2, k3, k4)]


def step(network, y, h):
    """(value after h, error in units of the tolerance): step doubling."""
    whole, half = rk4(network, y, h), rk4(network, rk4(network, y, h / 2), h / 2)
    best = [b + (b - a) / 15 for a, b in zip(whole, half)]
    return best, max(abs(a - b) / (ATOL + RTOL * abs(b)) for a, b in zip(whole, half))


def integrate(network, times):
    y, t, h, out, left = network.start, 0.0, 1e-10, [], 20000
    for target in times:
        while t < target and left:
            left -= 1
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
