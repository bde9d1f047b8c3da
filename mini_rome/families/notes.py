"""Note-following chain (data-processing): each note names the next note and the tool that reads it.

The observation `next rev plum` calls for `rev plum`; the last note says `write pear`. Every note but the plainly read
ones holds decoys that only the named tool leaves out, so guessing `cat` does not do. A wrong command prints something
misleading or an error and changes nothing: reading again with the right tool recovers.
"""

from __future__ import annotations

import random
from functools import partial

from mini_rome.families.base import NAMES, Family, expect_tree
from mini_rome.types import Task

COMMANDS = {
    "cat": "cat {name}",
    "rev": "rev {name}",
    "head": "head -n 1 {name}",
    "tail": "tail -n 1 {name}",
    "sort": "sort {name}",
}


def _note(tool: str, line: str, decoys: list[str]) -> str:
    """The contents of a note such that `tool` shows `line` alone (sort: as two lines, put in order)."""
    if tool == "rev":
        return line[::-1] + "\n"
    if tool == "head":
        return "\n".join([line, *decoys]) + "\n"
    if tool == "tail":
        return "\n".join([*decoys, line]) + "\n"
    if tool == "sort":
        first, second = line.split(" ", 1)
        return f"b {second}\na {first}\n"
    return line + "\n"


class Notes(Family):
    """See the module docstring. The answer is the last note's word, written to /app/answer."""

    name = "notes"
    domain = "data-processing"

    def build(self, rng: random.Random, chunks: int) -> Task:
        names = rng.sample(NAMES, chunks + 2)
        answer, spare, notes = names[0], names[1], names[2:][: chunks - 1]
        tools = [rng.choice(tuple(COMMANDS)) for _ in notes]
        lines = [f"next {tool} {note}" for tool, note in zip(tools, notes, strict=True)] + [f"write {answer}"]
        files = {}
        for position, (tool, note) in enumerate(zip(tools, notes, strict=True)):
            decoys = [f"next {rng.choice(tuple(COMMANDS))} {rng.choice([spare, *notes])}" for _ in range(1)]
            files[note] = _note(tool, lines[position + 1], decoys)
        expert = [COMMANDS[tool].format(name=note) for tool, note in zip(tools, notes, strict=True)]
        return Task(
            name=self.name,
            family=self.name,
            domain=self.domain,
            instruction=f"Follow the notes and write the last word to answer.\n{lines[0]}",
            files=files,
            expert=(*expert, f"echo {answer} > answer"),
            check=partial(expect_tree, {**files, "answer": f"{answer}\n"}),
        )

    def mistake(self, task: Task, chunk: int, rng: random.Random) -> str:
        """A tool on a note that is not there."""
        missing = rng.choice([name for name in NAMES if name not in task.files])
        return COMMANDS[rng.choice(tuple(COMMANDS))].format(name=missing)
