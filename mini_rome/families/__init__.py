"""Procedural families: tasks with a horizon dial, for the tiny model and the figures."""

from mini_rome.errors import ConfigError
from mini_rome.families.base import Family
from mini_rome.families.branches import Branches
from mini_rome.families.checks import Checks
from mini_rome.families.decay import Decay
from mini_rome.families.logins import Logins
from mini_rome.families.maze import Maze
from mini_rome.families.notes import Notes
from mini_rome.families.retail import Retail
from mini_rome.families.shop import Shop
from mini_rome.families.sweep import Sweep
from mini_rome.families.tickets import Tickets

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (Notes(), Tickets(), Maze(), Checks(), Decay(), Branches(), Sweep(), Logins(), Retail(), Shop())
}


def get_family(name: str) -> Family:
    """The family of this name; an unknown name is an error that lists the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"family {name!r} is unknown; choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]
