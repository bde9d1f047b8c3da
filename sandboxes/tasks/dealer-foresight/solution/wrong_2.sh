#!/bin/bash
set -e
cat > /app/foresee.py <<'PY'
import json
import sys

SEEDS = 8192
NEW_DECK = [rank + suit for suit in "CDHS" for rank in "23456789TJQKA"]


def play_round(x, deck, players):
    """One round: (generator afterwards, deck afterwards, burned card, hands)."""
    x = (1103515245 * x + 12345) & 0x7FFFFFFF
    cut = min(max(x * 52 >> 31, 8), 44)
    deck = deck[cut:] + deck[:cut]
    for last in range(51, 0, -1):
        x = (1103515245 * x + 12345) & 0x7FFFFFFF
        other = x * (last + 1) >> 31
        deck[last], deck[other] = deck[other], deck[last]
    burned, end = deck[0], 1 + 5 * players
    hands = [deck[1 + seat : end : players] for seat in range(players)]
    after = deck[end:]
    for hand in reversed(hands):
        after += hand
    return x, [*after, burned], burned, hands


def foresee(players, seat, seen):
    for seed in range(SEEDS):
        x, deck = seed, NEW_DECK
        for mine in seen:
            x, deck, _, hands = play_round(x, deck, players)
            if hands[seat - 1] != mine:
                break
        else:
            _, _, burned, hands = play_round(x, deck, players)
            return {"seed": seed, "burned": burned, "hands": hands}
    return {"seed": None}


with open(sys.argv[1]) as stream:
    history = json.load(stream)
print(json.dumps(foresee(history["players"], history["seat"], history["hands"])))
PY
python3 /app/foresee.py /app/history.json > /app/prediction.json
