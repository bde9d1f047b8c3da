#!/bin/bash
set -e
cat > /app/logreg.py <<'PY'
import csv
import json
import math
import sys


def sigmoid(z):
    if z >= 0:
        return 1 / (1 + math.exp(-z))
    e = math.exp(z) if z > -745 else 0.0
    return e / (1 + e)


def log_loss(z):
    return math.log1p(math.exp(-z)) if z > -30 else -z


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def solve(matrix, rhs):
    """Gauss-Jordan with partial pivoting, after scaling rows and columns to a unit diagonal."""
    d = [1 / math.sqrt(row[i]) if row[i] > 0 else 1.0 for i, row in enumerate(matrix)]
    a = [[v * d[i] * d[j] for j, v in enumerate(row)] + [rhs[i] * d[i]] for i, row in enumerate(matrix)]
    for k in range(len(a)):
        p = max(range(k, len(a)), key=lambda i: abs(a[i][k]))
        a[k], a[p] = a[p], a[k]
        for i in range(len(a)):
            if i != k:
                f = a[i][k] / a[k][k]
                a[i] = [x - f * y for x, y in zip(a[i], a[k])]
    return [row[-1] / row[i] * d[i] for i, row in enumerate(a)]


def fit(rows, labels, penalties):
    """Newton with step halving; rows begin with 1. The penalty of each coefficient stands in `penalties`."""
    n, size = len(rows), len(rows[0])

    def loss(beta):
        data = math.fsum(log_loss(dot(beta, x) if y else -dot(beta, x)) for x, y in zip(rows, labels)) / n
        return data + sum(p * b * b for p, b in zip(penalties, beta)) / 2

    beta = [0.0] * size
    now = loss(beta)
    for _ in range(200):
        gradient = [p * b for p, b in zip(penalties, beta)]
        hessian = [[penalties[i] * (i == j) for j in range(size)] for i in range(size)]
        for x, y in zip(rows, labels):
            p = sigmoid(dot(beta, x))
            for i in range(size):
                gradient[i] += (p - y) * x[i] / n
                for j in range(size):
                    hessian[i][j] += p * (1 - p) * x[i] * x[j] / n
        move, step = solve(hessian, gradient), 1.0
        while step > 1e-6:
            fresh = [b - step * m for b, m in zip(beta, move)]
            if loss(fresh) <= now:
                break
            step /= 2
        else:
            break
        done = all(abs(step * m) <= 1e-13 * abs(b) for b, m in zip(fresh, move))
        beta, now = fresh, loss(fresh)
        if done:
            break
    return beta, now


def read(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def command_fit(train, penalty, model):
    table = read(train)
    names = [name for name in table[0] if name != "label"]
    rows = [[1.0, *(float(row[name]) for name in names)] for row in table]
    beta, loss = fit(rows, [int(row["label"]) for row in table], [0.0] + [float(penalty)] * len(names))
    with open(model, "w") as out:
        json.dump({"intercept": beta[0], "weights": dict(zip(names, beta[1:])), "loss": loss}, out, indent=1)


def command_predict(model, data):
    with open(model) as stream:
        found = json.load(stream)
    for row in read(data):
        print(sigmoid(found["intercept"] + sum(w * float(row[name]) for name, w in found["weights"].items())))


{"fit": command_fit, "predict": command_predict}[sys.argv[1]](*sys.argv[2:])
PY
python3 /app/logreg.py fit /app/loans.csv 0.01 /app/loans.json
