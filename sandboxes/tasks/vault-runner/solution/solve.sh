#!/bin/bash
set -e
cat > /app/solve.py <<'PY'
import sys
from collections import deque

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
CONVEYORS = {"^": "U", "v": "D", "<": "L", ">": "R"}


def read_map(path):
    grid, twins, start = {}, {}, None
    with open(path) as stream:
        for row, line in enumerate(stream.read().splitlines()):
            for column, cell in enumerate(line):
                grid[row, column] = cell
                if cell == "@":
                    start = (row, column)
                if cell.isdigit():
                    twins.setdefault(cell, []).append((row, column))
    jump = {}
    for one, other in twins.values():
        jump[one], jump[other] = other, one
    return grid, jump, start


def solve(grid, jump, start):
    first = (start, 0)
    came, queue = {first: None}, deque([first])
    while queue:
        state = queue.popleft()
        place, keys = state
        if grid[place] == "$":
            return way(came, state)
        for letter, (down, right) in MOVES.items():
            if grid[place] in CONVEYORS and CONVEYORS[grid[place]] != letter:
                continue
            target = (place[0] + down, place[1] + right)
            cell = grid.get(target, "#")
            if cell == "#" or cell in "ABCDEF" and not keys >> "ABCDEF".index(cell) & 1:
                continue
            held = keys | 1 << "abcdef".index(cell) if cell in "abcdef" else keys
            reached = (jump.get(target, target), held)
            if reached not in came:
                came[reached] = (state, letter)
                queue.append(reached)
    return "impossible"


def way(came, state):
    letters = []
    while came[state] is not None:
        state, letter = came[state]
        letters.append(letter)
    return "".join(reversed(letters))


print(solve(*read_map(sys.argv[1])))
PY
python3 /app/solve.py /app/vault.map > /app/vault.path
