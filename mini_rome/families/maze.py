"""Rooms with coloured doors (games): the room's key fits one of its doors; behind it is the next room.

The observation `key red doors blue oak red plum lime fern` calls for `touch plum.lit && cat plum`, which lights the
lamp of the room behind the red door and reads that room's map: the name that follows the key's colour is looked up.

Trap: the other doors open too. Their rooms have maps of their own, so a wrong turn looks like progress, and its lamp
burns where it should not. Repair: `rm oak.lit`, then go on from the last right map.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import permutations

from mini_rome.families.base import COLOURS, NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task

DEAD_ENDS = 4  # rooms off the way
DOORS = tuple(permutations(COLOURS, 3))  # the colours of a room's doors; drawn from one list, for speed
PLACES = (0, 1, 2)


def _map(colours: tuple[str, ...], key: int, right: str, wrong: tuple[str, ...]) -> str:
    """A room's map: door number `key` has the key's colour and leads to the room `right`."""
    rooms = [*wrong[:key], right, *wrong[key:]]
    return f"key {colours[key]} doors {' '.join(map(' '.join, zip(colours, rooms, strict=True)))}"


class Maze(Family):
    """See the module docstring. The map of the room before the last says `last`."""

    name = "maze"
    domain = "games"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, chunks + DEAD_ENDS)
        way, dead_ends = names[:chunks], names[chunks:]
        rights = [*way, *rng.choices(way, k=DEAD_ENDS)]  # the rooms behind the doors that fit
        wrongs = rng.choices(tuple(permutations(dead_ends, 2)), k=len(rights))
        colours, keys = rng.choices(DOORS, k=len(rights)), rng.choices(PLACES, k=len(rights))
        maps = [_map(*drawn) for drawn in zip(colours, keys, rights, wrongs, strict=True)]
        maps[chunks - 1] += " last"
        shown = [*maps[1:chunks], "out", *maps[chunks:]]
        files = {room: f"{line}\n" for room, line in zip(names, shown, strict=True)}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Light each room on the way by room.lit; take the door that fits the key.\n{maps[0]}",
            files=files,
            expert=tuple(f"touch {room}.lit && cat {room}" for room in way),
            check=partial(expect_tree, {**files, **{f"{room}.lit": "" for room in way}}, closed="*.lit"),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A room that is not there, read before its lamp is lit."""
        room = missing_name(task, rng)
        return f"cat {room} && touch {room}.lit"
