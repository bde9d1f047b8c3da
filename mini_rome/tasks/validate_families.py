"""Proofs of the procedural families, on every backend at hand: see validate.py for what a proof is.

Besides what holds for every task: stopping one chunk early earns 0, what is checked was in the work dir or named in
what the agent read, and the simulated sandbox gives the observations and rewards of the real one. Not in the paper.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mini_rome.env import Env
from mini_rome.errors import MiniRomeError
from mini_rome.families import get_family
from mini_rome.sandbox import Pool, files_of_tar
from mini_rome.tasks.validate import Proof, Proved, said
from mini_rome.trace import CALL, CALL_END, call_bodies
from mini_rome.types import Task, Verdict

HORIZONS = (1, 4, 16)


class Watched(dict[str, bytes]):
    """A file tree that remembers which paths a check asked for by name."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self.asked: set[str] = set()

    def __getitem__(self, path: str) -> bytes:
        self.asked.add(path)
        return super().__getitem__(path)

    def get(self, path: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        self.asked.add(path)
        return super().get(path, default)


def expert_responses(task: Task) -> list[str]:
    """The expert's responses as text, the last one followed by `submit`.

    >>> from mini_rome.tasks.choice import find_task
    >>> expert_responses(find_task("notes-k1-test-0"))[0].endswith("<tool_call>submit</tool_call>")
    True
    """
    calls = [[f"{CALL}{body}{CALL_END}" for body in call_bodies(chunk, task)] for chunk in task.expert]
    calls[-1].append(f"{CALL}submit{CALL_END}")
    return ["".join(chunk) for chunk in calls]


@dataclass(frozen=True)
class Played:
    """One scripted episode: observations, the verdict, the tree left behind, and what the check asked for."""

    observations: tuple[str, ...]
    verdict: Verdict
    tree: str
    asked: frozenset[str]


def play_text(task: Task, pool: Pool, responses: Sequence[str]) -> Played:
    """Run responses in a box, then judge."""
    with Env(task, pool, max_turns=len(responses) + 1) as env:
        env.reset()
        seen = [env.step(response)[0] for response in responses if "submit" not in response]
        for response in responses:
            if "submit" in response:
                seen.append(env.step(response.replace(f"{CALL}submit{CALL_END}", ""))[0])
        verdict = env.give_up()
        snapshot = env.box.snapshot()
    watched = Watched(files_of_tar(snapshot.tar))
    task.check(watched)
    return Played(tuple(seen), verdict, snapshot.tree_hash, frozenset(watched.asked))


def prove_family(name: str, pools: Mapping[str, Pool], repeats: int = 3, seeds: int = 2) -> Proved:
    """All proofs of one family, over horizons and seeds, on every backend of `pools`."""
    begun, family = time.monotonic(), get_family(name)
    found = Proved(name, family.domain, difficulty=f"K 1-{family.max_chunks}")
    tallies: dict[str, list[str]] = {}
    try:
        for chunks in HORIZONS:
            for seed in range(seeds):
                task = family.make(seed, min(chunks, family.max_chunks), "test")
                for proof in _instance_proofs(task, pools, repeats):
                    tallies.setdefault(proof.name, [])
                    if proof.holds is False:
                        tallies[proof.name].append(f"{task.name}: {proof.reason}")
        found.proofs = [Proof(proof, not wrong, "; ".join(wrong[:2])) for proof, wrong in tallies.items()]
    except MiniRomeError as error:
        found.proofs.append(Proof("runs", False, str(error)))
    found.seconds = time.monotonic() - begun
    return found


def _instance_proofs(task: Task, pools: Mapping[str, Pool], repeats: int) -> Iterator[Proof]:
    responses = expert_responses(task)
    played = {backend: play_text(task, pool, responses) for backend, pool in pools.items()}
    first, pool = next(iter(played.items()))[1], next(iter(pools.values()))
    yield Proof("expert earns 1", first.verdict.reward == 1.0, said(first.verdict))
    again = [play_text(task, pool, responses) for _ in range(repeats - 1)]
    yield Proof("repeats agree", all(each == first for each in again), "another observation, tree or reward")
    noop = play_text(task, pool, [])
    yield Proof("doing nothing earns 0", noop.verdict.reward == 0.0, said(noop.verdict))
    short = play_text(task, pool, responses[:-1])
    yield Proof("one chunk short earns 0", short.verdict.reward == 0.0, said(short.verdict))
    told = "\n".join([task.instruction, *first.observations, *task.files])
    parts = {path: re.split("[/.]", path) for path in first.asked if path not in task.files}
    unnamed = sorted(path for path, words in parts.items() if any(word not in told for word in words))
    yield Proof("what is checked is named or there", not unnamed, f"not named: {', '.join(unnamed)}")
    if len(played) > 1:
        alike = len({(each.observations, each.verdict.reward) for each in played.values()}) == 1
        yield Proof("sim and docker agree", alike, differing(played))


def differing(played: Mapping[str, Played]) -> str:
    """The first observation that differs between backends, or their rewards."""
    columns = zip(*(each.observations for each in played.values()), strict=False)
    for turn, seen in enumerate(columns):
        if len(set(seen)) > 1:
            return f"turn {turn}: " + " | ".join(repr(text[:60]) for text in seen)
    return ", ".join(f"{backend}: {each.verdict.reward}" for backend, each in played.items())
