"""Safety events of a run, counted: how often its agents tried what they should not. Not in the paper."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def event_rates(log: Path, episodes: int) -> dict[str, Any]:
    """Events per 1,000 episodes by kind and severity, from a run's safety.jsonl (one JSON object a line).

    episodes: boxes taken in all, those of experts and evaluations included. A run without events has no log.
    """
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    found = [json.loads(line) for line in lines]
    kinds = Counter(f"{event['kind']}/{event['severity']}" for event in found)
    per_thousand = 1000 / max(1, episodes)
    return {
        "episodes": episodes,
        "events": len(found),
        "per_1000_episodes": round(len(found) * per_thousand, 2),
        "by_kind": {kind: round(count * per_thousand, 2) for kind, count in kinds.most_common()},
    }


def event_line(rates: dict[str, Any]) -> str:
    """One line for the end of a run.

    >>> event_line({"episodes": 500, "events": 1, "per_1000_episodes": 2.0, "by_kind": {"egress/high": 2.0}})
    'safety: 1 event in 500 episodes, 2.0 per 1,000 (egress/high 2.0)'
    """
    events, kinds = rates["events"], ", ".join(f"{kind} {rate}" for kind, rate in rates["by_kind"].items())
    told = f"safety: {events} event{'s' if events != 1 else ''} in {rates['episodes']} episodes"
    return f"{told}, {rates['per_1000_episodes']} per 1,000 ({kinds})" if events else told
