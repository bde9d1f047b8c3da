"""Rooms with three doors (games): a room's map names the room behind each door and says which way to go.

The observation `left oak ahead plum right fern go ahead` calls for `touch plum.lit && cat plum`, which lights the
lamp of the room ahead and reads that room's map: the name that follows the way to go is looked up.

Trap: the other doors open too. Their rooms have maps of their own, so a wrong turn looks like progress, and its lamp
burns where it should not. Repair: `rm oak.lit`, then go on from the last right map.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import permutations

from mini_rome.families.base import NAMES, Family, expect_tree, missing_name
from mini_rome.types import Task

DEAD_ENDS = 4  # rooms off the way
WAYS = ("left", "ahead", "right")


def _map(way: str, right: str, wrong: tuple[str, ...]) -> str:
    """A room's map, on which `way` leads to the room `right`.

    >>> _map("ahead", "plum", ("oak", "fern"))
    'left oak ahead plum right fern go ahead'
    """
    at = WAYS.index(way)
    rooms = (*wrong[:at], right, *wrong[at:])
    return f"{' '.join(map(' '.join, zip(WAYS, rooms, strict=True)))} go {way}"


class Maze(Family):
    """See the module docstring. The map of the room before the last says `last`."""

    name = "maze"
    domain = "games"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, chunks + DEAD_ENDS)
        way, dead_ends = names[:chunks], names[chunks:]
        rights = [*way, *rng.choices(way, k=DEAD_ENDS)]  # where the maps say to go
        wrongs = rng.choices(tuple(permutations(dead_ends, 2)), k=len(rights))
        ways = rng.choices(WAYS, k=len(rights))
        maps = [_map(*drawn) for drawn in zip(ways, rights, wrongs, strict=True)]
        maps[chunks - 1] += " last"
        shown = [*maps[1:chunks], "out", *maps[chunks:]]
        files = {room: f"{line}\n" for room, line in zip(names, shown, strict=True)}
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Light each room on the way by room.lit; go as the map says.\n{maps[0]}",
            files=files,
            expert=tuple(f"touch {room}.lit && cat {room}" for room in way),
            check=partial(expect_tree, {**files, **{f"{room}.lit": "" for room in way}}, closed="*.lit"),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A room that is not there, read before its lamp is lit."""
        room = missing_name(task, rng)
        return f"cat {room} && touch {room}.lit"
