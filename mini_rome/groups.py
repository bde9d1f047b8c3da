"""Groups of rollouts (of one task from one start): begin more than are kept, leave out groups that are all alike.

Neither is in the paper's equations, and both are off by default. Keeping the first to finish favours short episodes,
so that a long way to success is seen less often than the policy takes it. A group without variance carries no
gradient in GRPO; in IPA, which has no group mean, it does, and leaving it out is a choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mini_rome.experts import Start
from mini_rome.metrics import Outcome
from mini_rome.types import Trajectory

Group = tuple[str, int]  # (task, p): parallel starts of one task are groups of their own

SPARE = 1 << 26  # episode numbers of the rollouts beyond the plan, above those of any run again (ATTEMPT)
MAX_SPARES = 32  # with these, episode numbers stay below 2 ** 32


class Race:
    """`spares` more rollouts per group than there are rows for; the first that finish with a score are kept."""

    def __init__(self, starts: Sequence[Start], first_episode: int, spares: int) -> None:
        """starts: one per row of this rank, which a group's rows share; rows are numbered from first_episode."""
        self.episodes = list(enumerate(starts, start=first_episode))  # those of the plan, then the spares
        self._rows: dict[Group, list[int]] = defaultdict(list)
        for row, start in enumerate(starts):
            self._rows[start.task.name, start.p].append(row)
        for rows in self._rows.values():
            number, start = self.episodes[rows[0]]
            self.episodes += [(number + spare * SPARE, start) for spare in range(1, spares + 1)]
        self._group = {number: (start.task.name, start.p) for number, start in self.episodes}
        self._finished: dict[Group, list[Trajectory]] = {group: [] for group in self._rows}

    def finish(self, trajectory: Trajectory) -> None:
        """The next one that has ended, scored or spoiled."""
        self._finished[self._group[trajectory.episode]].append(trajectory)

    def over(self, number: int) -> bool:
        """Whether this episode's group has what it needs."""
        group = self._group[number]
        scored = sum(not trajectory.infra for trajectory in self._finished[group])
        return scored >= len(self._rows[group])

    @property
    def cancelled(self) -> int:
        """Episodes that never ended: cut, or not even begun."""
        return len(self.episodes) - sum(map(len, self._finished.values()))

    def kept(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """A trajectory per row, in the order of rows, and those that are spoiled and in no row.

        A spoiled rollout gets a row only where the group has too few others.
        """
        by_row: dict[int, Trajectory] = {}
        lost: list[Trajectory] = []
        for group, rows in self._rows.items():
            scored_first = sorted(self._finished[group], key=lambda trajectory: trajectory.infra)  # stable
            chosen, rest = scored_first[: len(rows)], scored_first[len(rows) :]
            by_row |= zip(rows, sorted(chosen, key=lambda trajectory: trajectory.episode), strict=True)
            lost += [trajectory for trajectory in rest if trajectory.infra]
        return [by_row[row] for row in sorted(by_row)], lost


def without_variance(outcomes: Iterable[Outcome]) -> set[Group]:
    """Groups of two or more scored rollouts that all have one reward.

    >>> alike = [Outcome("a", 0, 1.0, 2), Outcome("a", 0, 1.0, 3), Outcome("a", 0, None, 1)]
    >>> without_variance([*alike, Outcome("a", 1, 1.0, 1), Outcome("b", 0, 0.0, 1), Outcome("b", 0, 1.0, 1)])
    {('a', 0)}
    """
    rewards: dict[Group, Counter[tuple[float, bool | None]]] = defaultdict(Counter)
    for outcome in outcomes:
        if outcome.reward is not None:
            rewards[outcome.task, outcome.start][outcome.reward, outcome.success] += 1
    return {group for group, found in rewards.items() if len(found) == 1 and found.total() > 1}
