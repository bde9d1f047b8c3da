"""Fixtures of the sandbox tests, and what a run of them ends with: cases per kind and backend, flags removed.

A module asks for them with `pytest_plugins = ("box_fixtures",)`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import docker
import pytest
from boxes import close_pools, pool

from mini_rome.sandbox import Sandbox
from mini_rome.sandbox.engine import engine

KINDS = {
    "T": "deadlines", "O": "output", "I": "input", "B": "background", "R": "resources", "C": "engine faults",
    "L": "lifetime", "P": "parallel", "F": "files", "S": "secrets, privilege", "N": "network, events",
    "V": "verification", "D": "determinism", "X": "choice of backend",
}  # fmt: skip
BACKENDS = ("docker", "sim", "neither")


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture
def box(backend: str) -> Iterator[Sandbox]:
    """A clean box of each backend."""
    with pool(backend).box() as taken:
        yield taken


@pytest.fixture
def docker_box() -> Iterator[Sandbox]:
    """A clean container of the default image."""
    with pool("docker").box() as taken:
        yield taken


@pytest.fixture
def tools_box() -> Iterator[Sandbox]:
    """A clean container of the image with python3, curl, ssh and their like."""
    with pool("docker", "mini-rome/tools:latest").box() as taken:
        yield taken


@pytest.fixture
def client() -> docker.DockerClient:
    """The client that the boxes share."""
    return engine().client


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    reports = [report for word in ("passed", "failed", "skipped") for report in stats.get(word, [])]
    for line in [*case_summary(reports), *flag_table(reports)]:
        terminalreporter.write_line(line)


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
