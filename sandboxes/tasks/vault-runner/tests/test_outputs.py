"""solve.py on maps for each rule and on large ones: every way is walked here and held against the shortest length."""

import random
from collections import deque

PROGRAM = "/app/solve.py"
STEP = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
SHOWS = dict(zip("^v<>", "UDLR", strict=True))
VAULT = """#####################
#@..1#b....#...A...c#
#.##.#.###.#.#.###.##
#.#a.#.#2#.#.#...#..#
#.####.#.#.###.#.##.#
#....v.#...B...#..#.#
####.#.#####.####.#.#
#1...#.....#.#2.#.#.#
#.####.###.#.##.#.#.#
#.#..<...#.#....#...#
#.#.####.#.####.###C#
#...#d...#....D...>.#
#.###.#######.#.###.#
#.....#.......#...#$#
#####################
"""


class Vault:
    """The rules once more: cells by (row, column), and one move."""

    def __init__(self, text):
        self.cells = {(r, c): cell for r, line in enumerate(text.splitlines()) for c, cell in enumerate(line)}
        self.start = next(place for place, cell in self.cells.items() if cell == "@")

    def twin(self, place):
        same = [other for other, cell in self.cells.items() if cell == self.cells[place]]
        return same[1 - same.index(place)] if self.cells[place].isdigit() else place

    def move(self, place, keys, letter):
        """(place, keys) after the move, None when it is not possible."""
        here = self.cells[place]
        if here in SHOWS and SHOWS[here] != letter:
            return None
        target = (place[0] + STEP[letter][0], place[1] + STEP[letter][1])
        cell = self.cells.get(target, "#")
        if cell == "#" or (cell in "ABCDEF" and cell.lower() not in keys):
            return None
        return self.twin(target), keys | {cell} if cell in "abcdef" else keys

    def shortest(self):
        seen, queue = {(self.start, frozenset())}, deque([(self.start, frozenset(), 0)])
        while queue:
            place, keys, length = queue.popleft()
            if self.cells[place] == "$":
                return length
            for letter in "UDLR":
                after = self.move(place, keys, letter)
                if after is not None and after not in seen:
                    seen.add(after)
                    queue.append((*after, length + 1))
        return None

    def assert_shortest(self, way, length):
        place, keys = self.start, frozenset()
        for number, letter in enumerate(way, 1):
            assert letter in STEP, f"move {number} is {letter!r}"
            assert self.cells[place] != "$", f"move {number} comes after the exit"
            after = self.move(place, keys, letter)
            assert after is not None, f"move {number}, {letter}, is not possible"
            place, keys = after
        assert self.cells[place] == "$", "the way does not end at the exit"
        assert len(way) == length


def answer(run, scratch, text):
    path = scratch / "x.map"
    path.write_text(text)
    path.chmod(0o644)
    done = run(["python3", PROGRAM, path])
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 1, done.out
    return lines[0]


def check(run, scratch, text, length):
    found = answer(run, scratch, text)
    if length is None:
        assert found == "impossible"
    else:
        Vault(text).assert_shortest(found, length)


def test_the_given_vault(read):
    vault = Vault(VAULT)
    vault.assert_shortest(read("/app/vault.path").strip(), vault.shortest())


def test_plain_floor_takes_the_shortest_way(run, scratch):
    check(run, scratch, "@...\n.##.\n....\n.#$.\n", 5)


def test_no_way_is_impossible(run, scratch):
    check(run, scratch, "@.#$\n..#.\n", None)
    check(run, scratch, "@.A$\n", None)


def test_nothing_lies_beyond_the_border(run, scratch):
    check(run, scratch, "@#$\n.#.\n.#.\n", None)


def test_a_key_on_the_way_opens_its_door(run, scratch):
    check(run, scratch, "#######\n@.b.B.$\n#######\n", 6)


def test_a_key_in_a_dead_end_is_fetched_and_the_way_walked_back(run, scratch):
    check(run, scratch, "#########\n#a..@..A$\n#########\n", 10)


def test_the_nearer_key_may_be_the_wrong_one(run, scratch):
    check(run, scratch, "########\nb@....A$\n##.#####\n##a#####\n", 10)


def test_a_door_behind_a_door(run, scratch):
    check(run, scratch, "##########\n#a.@Bb.A.$\n####.#####\n", None)
    check(run, scratch, "##########\n#a.@Ab.B.$\n##########\n", 10)


def test_conveyors_are_left_in_their_direction_only(run, scratch):
    check(run, scratch, "@.>..$\n.#.#..\n...^..\n", 5)
    check(run, scratch, "@<$\n...\n", 4)
    check(run, scratch, "@.<$\n", None)


def test_teleporters_are_part_of_the_move(run, scratch):
    check(run, scratch, "@1#####\n#######\n..1.$##\n", 3)


def test_a_teleporter_works_both_ways_and_again(run, scratch):
    check(run, scratch, "#######\n@1.A..$\n#######\n#1a####\n", 8)


def test_a_large_vault_with_six_keys_in_time(run, scratch):
    text = large(60, seed=4)
    check(run, scratch, text, Vault(text).shortest())


def test_many_small_vaults(run, scratch):
    for seed in range(8):
        text = large(11, seed)
        check(run, scratch, text, Vault(text).shortest())


def large(size, seed):
    """A random vault with six keys, their doors, conveyors and two pairs of teleporters."""
    draw = random.Random(seed)
    cells = [["#" if draw.random() < 0.28 else "." for _ in range(size)] for _ in range(size)]
    places = [(r, c) for r in range(size) for c in range(size)]
    draw.shuffle(places)
    for cell in "@$abcdefABCDEFABCDEF1122" + "^v<>" * (size // 8):
        row, column = places.pop()
        cells[row][column] = cell
    return "".join("".join(line) + "\n" for line in cells)
