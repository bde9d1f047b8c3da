"""What a run prints at the end: success by stage and by family, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Successes = Mapping[str, dict[str, Any]]  # stage -> `Success.summary()` and its `chunks`


def success_table(success: Successes, backend: str, seed: int, minutes: float) -> Table:
    """One row a stage; the title says where and how long."""
    simulated = " (simulated)" if backend == "sim" else ""
    table = Table(title=f"held-out success, backend {backend}{simulated}, seed {seed}, {minutes:.1f} min")
    for column in ("stage", "chunks", "success", "95 % interval", "n"):
        table.add_column(column)
    for stage, summary in success.items():
        rate = "-" if summary["rate"] is None else f"{summary['rate']:.1%}"
        interval = f"{summary['low']:.1%} to {summary['high']:.1%}"
        table.add_row(stage, " ".join(map(str, summary["chunks"])), rate, interval, str(summary["n"]))
    return table


def family_table(success: Successes, families: Sequence[str]) -> Table:
    """Success of each family at each stage, and whether IPA moved it beyond chance (intervals apart)."""
    stages = [stage for stage, summary in success.items() if summary["by_family"]]
    table = Table(title="held-out success by family, 95 % interval")
    for column in ("family", *stages, "IPA against SFT"):
        table.add_column(column)
    for family in families:
        rates = {stage: success[stage]["by_family"].get(family) for stage in stages}
        cells = [f"{r['rate']:.0%} [{r['low']:.0%}, {r['high']:.0%}]" if r else "-" for r in rates.values()]
        table.add_row(family, *cells, movement(rates.get("sft"), rates.get("ipa")))
    return table


def movement(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> str:
    """What two rates say about each other.

    >>> movement({"low": 0.0, "high": 0.1}, {"low": 0.4, "high": 0.6})
    'better'
    >>> movement({"low": 0.0, "high": 0.5}, {"low": 0.4, "high": 0.6})
    'not told apart'
    """
    if before is None or after is None:
        return "-"
    if after["low"] > before["high"]:
        return "better"
    return "worse" if after["high"] < before["low"] else "not told apart"


def percent(summary: dict[str, Any]) -> str:
    """Rate and interval in per cent."""
    if summary["rate"] is None:
        return "no episode could be scored"
    return f"{summary['rate']:.1%} [{summary['low']:.1%}, {summary['high']:.1%}], n {summary['n']}"
