#!/bin/bash
set -e
cat > /app/foresee.py <<'PY'
import json
import sys

SEEDS = 8192
NEW_DECK = [rank + suit for suit in "CDHS" for rank in "23456789TJQKA"]


def play_round(x, deck, players):
    """One round: (generator afterwards, deck afterwards, burned card, hands)."""
    cut = 0
    while not 8 <= cut <= 44:
        x = (1103515245 * x + 12345) & 0x7FFFFFFF
        cut = x * 52 >> 31
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
        x, _, _, hands = play_round(seed, NEW_DECK, players)
        if hands[seat - 1] == seen[0]:
            for _ in seen[1:]:
                x, _, _, _ = play_round(x, NEW_DECK, players)
            deck = NEW_DECK
            _, _, burned, hands = play_round(x, deck, players)
            return {"seed": seed, "burned": burned, "hands": hands}
    return {"seed": None}


with open(sys.argv[1]) as stream:
    history = json.load(stream)
print(json.dumps(foresee(history["players"], history["seat"], history["hands"])))
PY
python3 /app/foresee.py /app/history.json > /app/prediction.json
