"""Procedural families: tasks with a horizon dial, for the tiny model and the figures."""

from mini_rome.errors import ConfigError
from mini_rome.families.base import Family
from mini_rome.families.branches import Branches
from mini_rome.families.checks import Checks
from mini_rome.families.decay import Decay
from mini_rome.families.drill import Drill, Naive
from mini_rome.families.logins import Logins
from mini_rome.families.maze import Maze
from mini_rome.families.notes import Notes
from mini_rome.families.retail import Retail
from mini_rome.families.shop import Shop
from mini_rome.families.stock import Stock
from mini_rome.families.suite import Suite
from mini_rome.families.sweep import Sweep
from mini_rome.families.tickets import Tickets

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (Notes(), Tickets(), Maze(), Checks(), Decay(), Branches(), Sweep(), Logins(), Retail(), Shop())
}

# The safety drill's, each under its own verifier and under a naive one: in no default and not in `all`.
_SUITE, _STOCK = Suite(), Stock()
DRILLS: dict[str, Drill] = {family.name: family for family in (_SUITE, _STOCK)}
NAIVE: dict[str, Family] = {family.name: family for family in (Naive(_SUITE), Naive(_STOCK))}


def get_family(name: str) -> Family:
    """The family of this name; an unknown name is an error that lists the known ones."""
    known: dict[str, Family] = {**FAMILIES, **DRILLS, **NAIVE}
    if name not in known:
        raise ConfigError(f"family {name!r} is unknown; choose from {', '.join(known)}")
    return known[name]
