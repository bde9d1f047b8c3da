#!/bin/bash
set -e
cat > /app/referee.py <<'PY'
import sys

WIDTH, HEIGHT = 7, 6
LINES = ((0, 1), (1, 0), (1, 1), (1, -1))


def length(board, row, column, step):
    """Pieces like the one at (row, column) in both directions of a line."""
    side, count = board[row][column], 1
    for sign in (1, -1):
        r, c = row + sign * step[0], column + sign * step[1]
        while 0 <= r < HEIGHT and 0 <= c < WIDTH and board[r][c] == side:
            count, r, c = count + 1, r + sign * step[0], c + sign * step[1]
    return count


def judge(tokens):
    board = [["."] * WIDTH for _ in range(HEIGHT)]  # row 0 is the bottom
    verdict = ""
    for number, token in enumerate(tokens, 1):
        if verdict:
            return board, f"illegal move {number}: game is over"
        if token not in list("1234567"):
            return board, f"illegal move {number}: no such column"
        column = int(token) - 1
        free = [row for row in range(HEIGHT) if board[row][column] == "."]
        if not free:
            return board, f"illegal move {number}: column is full"
        side = "XO"[(number - 1) % 2]
        board[free[0]][column] = side
        if any(length(board, free[0], column, step) >= 4 for step in LINES):
            verdict = f"{side} wins at move {number}"
        elif number == WIDTH * HEIGHT:
            verdict = "draw"
    return board, verdict or f"open, {'XO'[len(tokens) % 2]} to move"


board, verdict = judge(sys.stdin.read().split())
print(verdict)
for row in reversed(board):
    print("".join(row))
sys.exit(2 if verdict.startswith("illegal") else 0)
PY
mkdir -p /app/verdicts
for name in corner ladder hasty; do
  python3 /app/referee.py < /app/games/$name.game > /app/verdicts/$name.txt || [ $? = 2 ]
done
