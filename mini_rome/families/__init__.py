"""Procedural families: tasks with a horizon dial, for the tiny model and the figures."""

from mini_rome.errors import ConfigError
from mini_rome.families.base import Family
from mini_rome.families.notes import Notes
from mini_rome.families.tickets import Tickets

FAMILIES: dict[str, Family] = {family.name: family for family in (Notes(), Tickets())}


def get_family(name: str) -> Family:
    """The family of this name; an unknown name is an error that lists the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"family {name!r} is unknown; choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]
