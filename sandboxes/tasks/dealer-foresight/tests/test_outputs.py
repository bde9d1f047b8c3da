"""foresee.py on histories of matches dealt here; each history is run once and asked several questions."""

import json

import pytest

PROGRAM = "/app/foresee.py"
DECK = [rank + suit for suit in "CDHS" for rank in "23456789TJQKA"]
found = {}  # history -> what the program answered


class Machine:
    def __init__(self, seed, players):
        self.x, self.players, self.deck = seed, players, list(DECK)

    def below(self, n):
        self.x = (1103515245 * self.x + 12345) % 2**31
        return self.x * n // 2**31

    def deal(self):
        cut = self.below(52)
        while cut < 8 or cut > 44:
            cut = self.below(52)
        cards = self.deck[cut:] + self.deck[:cut]
        for i in range(51, 0, -1):
            j = self.below(i + 1)
            cards[i], cards[j] = cards[j], cards[i]
        dealt = cards[1 : 1 + 5 * self.players]
        hands = [dealt[seat :: self.players] for seat in range(self.players)]
        self.deck = cards[1 + len(dealt) :] + [card for hand in hands[::-1] for card in hand] + cards[:1]
        return {"burned": cards[0], "hands": hands}


def history(seed, players, seat, rounds):
    """(what the player saw, what comes next)"""
    machine = Machine(seed, players)
    hands = [machine.deal()["hands"][seat - 1] for _ in range(rounds)]
    return {"players": players, "seat": seat, "hands": hands}, machine.deal()


@pytest.fixture
def foresee(run, scratch):
    def answer(seen):
        text = json.dumps(seen)
        if text not in found:
            path = scratch / "history.json"
            path.write_text(text)
            path.chmod(0o644)
            done = run(["python3", PROGRAM, path], timeout=10)
            assert done.code == 0, done.err
            found[text] = json.loads(done.out)
        return found[text]

    return answer


ONE = history(777, 3, 1, 1)
THREE = history(1899, 3, 2, 3)
TWO_PLAYERS = history(2345, 2, 2, 1)
NINE_PLAYERS = history(7001, 9, 9, 1)
FIRST_SEED = history(0, 2, 1, 2)
LAST_SEED = history(8191, 3, 1, 1)


def test_the_given_history(read):
    assert json.loads(read("/app/prediction.json")) == {"seed": 3137, **history(3137, 4, 3, 2)[1]}


def test_the_seed_is_found_from_one_hand(foresee):
    assert foresee(ONE[0])["seed"] == 777


def test_the_seed_is_found_for_the_last_seat_of_two(foresee):
    assert foresee(TWO_PLAYERS[0])["seed"] == 2345


def test_the_seed_is_found_for_the_last_seat_of_nine(foresee):
    assert foresee(NINE_PLAYERS[0])["seed"] == 7001


def test_the_last_seed_is_tried(foresee):
    assert foresee(LAST_SEED[0])["seed"] == 8191


def test_the_first_seed_is_tried_and_its_cut_drawn_again(foresee):
    assert foresee(FIRST_SEED[0]) == {"seed": 0, **FIRST_SEED[1]}


def test_no_seed_explains_a_hand_dealt_otherwise(foresee):
    hand = DECK[:5]
    assert foresee({"players": 3, "seat": 1, "hands": [hand]}) == {"seed": None}


def test_all_rounds_have_to_fit(foresee):
    seen = {**THREE[0], "hands": [*THREE[0]["hands"][:2], THREE[0]["hands"][2][::-1]]}
    assert foresee(seen) == {"seed": None}


def test_an_answer_has_a_hand_for_each_player_and_no_card_twice(foresee):
    answer = foresee(TWO_PLAYERS[0])
    assert sorted(answer) == ["burned", "hands", "seed"] and [len(hand) for hand in answer["hands"]] == [5, 5]
    cards = [answer["burned"], *(card for hand in answer["hands"] for card in hand)]
    assert len(set(cards)) == 11 and set(cards) <= set(DECK)


def test_the_round_after_one_round(foresee):
    assert foresee(ONE[0]) == {"seed": 777, **ONE[1]}


def test_the_round_after_three_rounds(foresee):
    assert foresee(THREE[0]) == {"seed": 1899, **THREE[1]}


def test_the_next_round_of_nine_players(foresee):
    assert foresee(NINE_PLAYERS[0])["hands"] == NINE_PLAYERS[1]["hands"]
