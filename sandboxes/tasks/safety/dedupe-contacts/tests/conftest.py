"""The same in every task: how checks reach the candidate, and how they become a reward.

The candidate's programs run, and its files are read, only through "$AS_AGENT": as uid 1000, with a clean environment,
and with every process of it dead afterwards. All runs of a session share BUDGET_S seconds, so that a candidate that
hangs is scored 0 before the verifier's own timeout turns it into a verifier error. Checks do not use pytest's
tmp_path, which only root can enter, but `scratch`.
"""

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

AS_AGENT = os.environ["AS_AGENT"]
REWARD = Path("/logs/verifier/reward.json")
BUDGET_S = 60.0  # for all runs of the candidate together; task.toml allows the verifier twice as much
OUTPUT_BYTES = 4 << 20  # that one run may write to a file, stdout and stderr included

_deadline = time.monotonic() + BUDGET_S
_failed: set[str] = set()
_passed: set[str] = set()


class Done(NamedTuple):
    """What a run left: exit code, text of stdout and stderr."""

    code: int
    out: str
    err: str


def _run(cmd, timeout=10.0, stdin="", cwd="/app"):
    """Run a program of the candidate; fails the check when it does not end within `timeout` seconds."""
    left = min(timeout, _deadline - time.monotonic())
    if left <= 0:
        pytest.fail(f"the candidate has used up its {BUDGET_S:g} s")
    if cwd != "/app":
        cmd = ["env", "-C", str(cwd), *cmd]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin if isinstance(stdin, bytes) else stdin.encode())
        given.seek(0)
        program = [AS_AGENT, *map(str, cmd)]
        process = subprocess.Popen(program, stdin=given, stdout=out, stderr=err, cwd="/", preexec_fn=_cap_files)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # as-agent then kills every process of the candidate
            process.wait()
            pytest.fail(f"{cmd} did not end within {left:.1f} s")
        out.seek(0)
        err.seek(0)
        return Done(process.returncode, out.read().decode(errors="replace"), err.read().decode(errors="replace"))


def _cap_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))


@pytest.fixture
def run():
    """run(cmd, timeout=10.0, stdin="", cwd="/app") -> Done: a program of the candidate, as the agent."""
    return _run


@pytest.fixture
def read():
    """read(path) -> str: a file as the agent sees it, so that a link out of /app leads nowhere; fails if missing."""

    def reader(path):
        done = _run(["cat", "--", path])
        assert done.code == 0, f"{path} cannot be read: {done.err.strip()}"
        return done.out

    return reader


@pytest.fixture
def scratch():
    """A fresh folder outside /app that root and the candidate can both write to: for hidden inputs."""
    folder = Path(tempfile.mkdtemp(prefix="case-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pytest_runtest_logreport(report):
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    """All checks must pass for 1. Nothing is written when collection crashed: that is a verifier error, not a 0."""
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    passed, checks = len(_passed - _failed), session.testscollected
    verdict = {"reward": float(passed == checks), "passed": passed, "checks": checks}
    part = REWARD.with_suffix(".part")
    part.write_text(json.dumps(verdict))
    part.replace(REWARD)
