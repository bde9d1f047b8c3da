"""Signposts: each sign is a weather word that means a direction; the last one says what to write down.

The observation `rain` calls for `cd west && cat sign`, `sun` for `cd east && cat sign`; `write gold` for
`echo gold > found`. The words are few and nothing has to be copied letter by letter, so the tiny model learns this in
a minute where the families of `make ipa` take several. For the walkthroughs, which register it themselves: it is none
of FAMILIES.

Trap: none; there is one path through the folders. A wrong direction is an error, and the agent stays where it was.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import Family, expect_tree
from mini_rome.types import Task

MEANING = {
    "sun": "east", "rain": "west", "snow": "north", "wind": "south",
    "dawn": "east", "dusk": "west", "frost": "north", "heat": "south",
}  # fmt: skip
FINDS = ("gold", "silver", "copper", "iron", "tin", "zinc")


class Signs(Family):
    """See the module docstring. K - 1 folders deep; the answer is written in the innermost one."""

    name = "signs"
    domain = "games"

    def build(self, rng: random.Random, chunks: int) -> Task:
        signs, find = rng.choices(tuple(MEANING), k=chunks - 1), rng.choice(FINDS)
        told = [*signs, f"write {find}"]  # what the agent reads before each chunk
        folders = [MEANING[sign] for sign in signs]
        paths = ["/".join(folders[: depth + 1]) for depth in range(chunks - 1)]
        files = {f"{path}/sign": f"{line}\n" for path, line in zip(paths, told[1:], strict=True)}
        found = f"{paths[-1]}/found" if paths else "found"
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Follow the signs to where found belongs.\n{told[0]}",
            files=files,
            expert=(*(f"cd {folder} && cat sign" for folder in folders), f"echo {find} > found"),
            check=partial(expect_tree, {**files, found: f"{find}\n"}),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A folder that is not there."""
        right = task.expert[chunk].split()[1]
        return f"cd {rng.choice([way for way in sorted(set(MEANING.values())) if way != right])} && cat sign"
