"""Verification by a task's own tests/test.sh, which writes /logs/verifier/reward.txt or .json (Harbor contract).

Tier B (`verify_fresh`): a new container of the pristine image. The work dir is transplanted first; the tests come in
only then, as root, mode 0700, beside an empty /logs/verifier of the same kind; nothing the agent could write is
executed but the candidate, which test.sh runs by "$AS_AGENT" as uid 1000. Defends against: replaced programs, planted
rewards and tests, processes that live on. Does not defend against: a test.sh that runs the candidate as root.
Tier C (`verify_in_place`): the agent's own box, for stock tasks that change /etc, packages or services. An agent that
was root there can forge it: evaluation only, labelled, never for training (`Trajectory.check_trainable`).
A stock test.sh that installs its tools gets a network only where asked for (`network=True`), in this container alone,
and the verdict says so. Not in the paper.
"""

from __future__ import annotations

import io
import select
import tarfile
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import docker.errors
import requests

from mini_rome.errors import SandboxError, SnapshotRefused, VerifierError
from mini_rome.sandbox.base import DEFAULT_ENV, Limits
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.hardening import AGENT, ROOT_CAPABILITIES
from mini_rome.sandbox.tree import files_of_tar
from mini_rome.tasks.harbor import TaskFolder
from mini_rome.types import IN_PLACE, Snapshot, Verdict
from mini_rome.verify import FRESH, FRESH_NETWORK, read_numbers, read_reward

TESTS, LOGS = "/tests", "/logs/verifier"
VERIFIER = replace(AGENT, name="verifier", private=(TESTS, LOGS))
# What apt and pip need; the agent's box is closed by then and its processes are gone with it.
NETWORK_VERIFIER = replace(VERIFIER, network="bridge", read_only=False, capabilities=ROOT_CAPABILITIES)
OUTPUT_CAP = 1 << 20  # bytes of test.sh's output that are read; more is a verifier error
FILE_S = 20.0  # to bring the tests in and the reward out
AS_AGENT = b"""#!/usr/bin/python3 -IS
# Run the candidate as the agent, with a clean environment and no descriptor of the verifier. When it ends, or when a
# timeout ends this, every process of the agent is dead: none is left to hold a pipe open or to wait for its moment.
import os, signal, sys

def drop():
    os.setgroups([])
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)

def clear(*_):
    pid = os.fork()
    if pid == 0:
        drop()
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

def stop(number, _):
    clear()
    os._exit(128 + number)

signal.signal(signal.SIGTERM, stop)
pid = os.fork()
if pid == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.closerange(3, 1024)
    drop()
    try:
        os.chdir("/app")
        os.execvpe(sys.argv[1], sys.argv[1:], %r)
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(127)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
clear()
sys.exit(status if status >= 0 else 128 - status)
""" % dict(DEFAULT_ENV)


def verify_fresh(
    task: TaskFolder, snapshot: Snapshot, image: str, limits: Limits | None = None, network: bool = False
) -> Verdict:
    """Judge a snapshot in a fresh container of `image`, the one the agent's box was made from (an id is safest).

    network: the container can reach the internet, for a stock test.sh that installs its tools.
    Never raises for what the agent or the verifier does; an image that is missing is a verifier error too.
    """
    limits = limits or task_limits(task)
    profile, label = (NETWORK_VERIFIER, FRESH_NETWORK) if network else (VERIFIER, FRESH)
    try:
        with DockerSandbox.start(image, limits, task.name, profile=profile) as box:
            box.restore(snapshot)
            return judge(box, task, label)
    except SnapshotRefused as error:
        return Verdict(0.0, f"the work dir cannot be judged: {error}", label)
    except SandboxError as error:
        return Verdict(None, f"verifier_error: {error}", label)


def verify_in_place(task: TaskFolder, box: DockerSandbox) -> Verdict:
    """Judge the agent's own box, as root, after a sweep. For evaluation only; the verdict says it is tamperable."""
    try:
        box.sweep()
        return judge(box, task, IN_PLACE)
    except SandboxError as error:
        return Verdict(None, f"verifier_error: {error}", IN_PLACE)


def task_limits(task: TaskFolder) -> Limits:
    """The task's own limits, for the agent's box and the verifier's."""
    return Limits(
        memory_mb=task.memory_mb, cpus=task.cpus, disk_mb=task.tmpfs_mb, episode_s=task.agent_timeout_s
    )


def judge(box: DockerSandbox, task: TaskFolder, label: str) -> Verdict:
    """Run the tests in a box that holds the candidate. Raises VerifierError with what test.sh said last."""
    written, code, said = run_tests(box, task)
    try:
        return Verdict(read_reward(written), verifier=label, numbers=read_numbers(written))
    except VerifierError as error:
        raise VerifierError(f"{error}; test.sh ended with status {code}: {_last(said)}") from None


def run_tests(box: DockerSandbox, task: TaskFolder) -> tuple[dict[str, bytes], int, bytes]:
    """Bring the tests in and run test.sh: (the files of /logs/verifier, exit code, output). Raises VerifierError."""
    _root_exec(box, ["rm", "-rf", f"{LOGS}/reward.txt", f"{LOGS}/reward.json"], FILE_S)
    unpack = ["tar", "-x", "-f", "-", "-C", "/", "--no-same-owner"]
    code, said = _root_exec(box, unpack, FILE_S, tests_tar(task.tests))
    if code != 0:
        raise VerifierError(f"the tests could not be brought in: {_last(said)}")
    own = {"HOME": "/root", "USER": "root", "AS_AGENT": f"{TESTS}/as-agent"}
    environment = {**DEFAULT_ENV, **task.verifier_env, **own}
    code, said = _root_exec(box, ["/bin/bash", f"{TESTS}/test.sh"], task.verifier_timeout_s, env=environment)
    status, archive = _root_exec(box, ["tar", "-c", "-f", "-", "-C", LOGS, "."], FILE_S)
    if status != 0:
        raise VerifierError(f"{LOGS} could not be read: {_last(archive)}")
    try:
        return files_of_tar(archive, OUTPUT_CAP, 1000), code, said
    except (SnapshotRefused, tarfile.TarError) as error:
        raise VerifierError(f"{error}; test.sh ended with status {code}: {_last(said)}") from None


def tests_tar(tests: Mapping[str, bytes]) -> bytes:
    """/tests and an empty /logs/verifier, owned by root, mode 0700."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder in ("tests", "logs/verifier"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(info)
        for name, data in sorted({**tests, "as-agent": AS_AGENT}.items()):
            info = tarfile.TarInfo(f"tests/{name}")
            info.size, info.mode = len(data), 0o700
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _last(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-300:] or "(no output)"


def _root_exec(
    box: DockerSandbox, command: list[str], seconds: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Run a program as root in a box by the engine's exec: (exit code, output). The box is closed when it overruns.

    Raises VerifierError: no end within `seconds`, more than OUTPUT_CAP of output, an engine or a box that failed.
    """
    api = box._engine.client.api
    try:
        options = {"user": "0:0", "stdin": True, "workdir": "/", "environment": dict(env or {})}
        made = api.exec_create(box.container, command, **options)
        stream = api.exec_start(made["Id"], socket=True)
        output = _talk(stream, stdin, time.monotonic() + seconds)
        if output is None:
            box.close()
            raise VerifierError(f"{command[0]} {command[-1]} did not end within {seconds:g} s and {OUTPUT_CAP} bytes")
        state = api.exec_inspect(made["Id"])
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise VerifierError(f"{box.name}: {error}") from error
    if state["Running"] or state["ExitCode"] is None:
        raise VerifierError(f"{box.name}: the connection was cut before {command[-1]} ended")
    return state["ExitCode"], output


def _talk(stream: Any, stdin: bytes, deadline: float) -> bytes | None:
    """Write `stdin`, half-close, read to the end; None at the deadline or the cap. Never blocks past the deadline."""
    channel = getattr(stream, "_sock", stream)
    channel.setblocking(False)
    raw, rest = bytearray(), memoryview(stdin)
    poller = select.poll()
    poller.register(channel, select.POLLIN | select.POLLOUT)
    try:
        while (left := deadline - time.monotonic()) > 0 and len(raw) <= OUTPUT_CAP:
            for _, event in poller.poll(left * 1000):
                if event & select.POLLOUT:
                    rest = rest[channel.send(rest[: 1 << 16]) :] if rest else rest
                    if not rest:
                        channel.shutdown(1)
                        poller.modify(channel, select.POLLIN)
                if event & (select.POLLIN | select.POLLHUP):
                    data = channel.recv(1 << 16)
                    if not data:
                        return _unframed(bytes(raw))
                    raw += data
        return None
    finally:
        stream.close()
        channel.close()


def _unframed(raw: bytes) -> bytes:
    """The engine's stream without its 8-byte headers."""
    output, at = bytearray(), 0
    while at + 8 <= len(raw):
        size = int.from_bytes(raw[at + 4 : at + 8], "big")
        output += raw[at + 8 : at + 8 + size]
        at += 8 + size
    return bytes(output)
