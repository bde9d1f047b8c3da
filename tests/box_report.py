"""What a run of the sandbox tests ends with: cases per kind and backend, and the hardening flags removed."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

KINDS = {
    "T": "deadlines", "O": "output", "I": "input", "B": "background", "R": "resources", "C": "engine faults",
    "L": "lifetime", "P": "parallel", "F": "files", "S": "secrets, privilege", "N": "network, events",
    "V": "verification", "D": "determinism", "X": "choice of backend",
}  # fmt: skip
BACKENDS = ("docker", "sim", "neither")


def backend_of(report: pytest.TestReport) -> str:
    """Where a case ran; `neither` is the host alone, as for a missing engine or a reward file."""
    if "docker" in report.keywords:
        return "docker"
    return "sim" if "sim" in report.nodeid else "neither"


def case_summary(reports: list[pytest.TestReport]) -> list[str]:
    """Per kind: how many case ids ran, and tests passed of those run on each backend."""
    ids: dict[str, set[str]] = defaultdict(set)
    on_sim: dict[str, set[str]] = defaultdict(set)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for report in reports:
        found = re.search(r"::test_case_([A-Z])(\d\d)?_", report.nodeid)
        if found:
            ids[found[1]] |= {found[2]} - {None}
            on_sim[found[1]] |= {found[2]} - {None} if backend_of(report) == "sim" else set()
            for kind in (found[1], "all"):
                counts[kind, backend_of(report)][0] += report.passed
                counts[kind, backend_of(report)][1] += 1
    if not ids:
        return []
    lines = ["", "sandbox cases: ids, and tests passed/run by backend"]
    lines.append(f"{'kind':<22}{'ids':>5}{'on sim':>8}" + _row(BACKENDS))
    for kind in [*(kind for kind in KINDS if kind in ids), "all"]:
        all_ids, sim_ids = (
            sum(len(found) for name, found in sets.items() if kind in (name, "all")) for sets in (ids, on_sim)
        )
        cells = ["{}/{}".format(*counts[kind, name]) if counts[kind, name][1] else "-" for name in BACKENDS]
        lines.append(f"{kind + ' ' + KINDS.get(kind, ''):<22}{all_ids:>5}{sim_ids:>8}" + _row(cells))
    return lines


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "".join(f"{cell:>10}" for cell in cells)


def flag_table(reports: list[pytest.TestReport]) -> list[str]:
    """What a probe printed with each hardening flag and without it, as test_sandbox_flags.py recorded it."""
    rows = [(value, report.outcome) for report in reports for name, value in report.user_properties if name == "flag"]
    if not rows:
        return []
    lines = ["", "hardening flags removed one at a time: what the probe printed"]
    for (flag, sound, weak, refused), outcome in [(("flag", "with it", "without it", "self-check"), "")] + rows:
        lines.append(f"{flag:<20} {sound[-28:]:<29}{weak[-28:]:<29}{refused:<9} {outcome}")
    return lines
