"""Cases R: fork bombs, memory, disk and logs, each limit told by its name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from boxes import running, usable, within

from mini_rome.errors import LimitNotEnforced, SandboxFileError
from mini_rome.sandbox import Limits, Sandbox, make
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import engine
from mini_rome.sandbox.hardening import ROOT_TASK, container_options

pytest_plugins = ("box_fixtures",)


@pytest.mark.docker
@pytest.mark.parametrize(
    "command", [":(){ :|:& };: ; sleep 60", "while :; do sleep 60 & done", "b() { b | b & }; b; wait; sleep 60"]
)
def test_case_R01_a_fork_bomb_is_named_and_cleared(docker_box: Sandbox, command: str) -> None:
    with within(5):
        result = docker_box.exec(command, timeout=2)
    assert result.status == "pids_limit"
    assert [(event.kind, event.source) for event in result.events] == [("resource", "cgroup")]
    with within(5):
        assert usable(docker_box)
    assert running(docker_box) == ""


@pytest.mark.docker
def test_case_R01_other_boxes_go_on(docker_box: Sandbox) -> None:
    with make("docker") as other:
        quiet = _median(lambda: other.exec("echo hi"))
        bomb = threading.Thread(target=lambda: docker_box.exec(":(){ :|:& };: ; sleep 60", timeout=3))
        bomb.start()
        time.sleep(0.3)
        loud = _median(lambda: other.exec("echo hi"))
        bomb.join()
    assert loud < 3 * quiet + 0.05, f"{loud:.4f} s beside a fork bomb, {quiet:.4f} s alone"


def _median(step: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        start = time.monotonic()
        step()
        times.append(time.monotonic() - start)
    return sorted(times)[len(times) // 2]


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "head -c 2000000000 /dev/zero | tail -c 1900000000 | wc -c; exit ${PIPESTATUS[1]}",
        "exec python3 -c 'x = bytearray(2_000_000_000)'",
        "exec python3 -c 'x = [bytes(1_000_000) * 2 for _ in range(2000)]'",
    ],
)
def test_case_R02_out_of_memory_is_told_apart(docker_box: Sandbox, command: str) -> None:
    result = docker_box.exec(command, timeout=20)
    assert (result.status, result.exit_code) == ("oom", 137)
    assert "512 MB" in result.output
    assert usable(docker_box)


@pytest.mark.docker
def test_case_R02_a_variable_that_is_too_large_is_out_of_memory(docker_box: Sandbox) -> None:
    result = docker_box.exec("x=$(head -c 2000000000 /dev/zero | tr '\\0' a)", timeout=60)
    assert (result.status, result.exit_code) == ("oom", 137)
    assert usable(docker_box)


@pytest.mark.docker
def test_case_R04_disk_and_inodes_are_limited_inside(docker_box: Sandbox) -> None:
    free = os.statvfs("/").f_bavail * os.statvfs("/").f_frsize
    result = docker_box.exec("dd if=/dev/zero of=/app/f bs=1M; stat -c %s f", timeout=60)
    assert "No space left on device" in result.output and result.exit_code == 0
    assert result.raw.endswith(b"%d\n" % (docker_box.limits.disk_mb << 20))
    with pytest.raises(SandboxFileError, match="No space left"):
        docker_box.write("g", b"x" * 100_000)
    assert docker_box.exec("rm f; echo ok > ok; cat ok").output == "ok\n"
    many = "for d in $(seq 200); do mkdir -p d$d; (cd d$d && mkdir $(seq 500)) || break; done"
    result = docker_box.exec(many, timeout=60)
    assert "No space left on device" in result.output
    assert int(docker_box.exec("find . | wc -l").output) <= docker_box.limits.inodes
    assert "No space left" in docker_box.exec("echo small > small").output
    docker_box.reset()
    assert docker_box.exec("ls -A; df -i /app | tail -n 1 | awk '{print $3}'").output == "1\n"
    assert free - os.statvfs("/").f_bavail * os.statvfs("/").f_frsize < 50 << 20


@pytest.mark.docker
def test_case_R04_other_folders_are_limited_too(docker_box: Sandbox) -> None:
    for folder in ("/tmp", "/home/agent", "/dev/shm"):
        result = docker_box.exec(f"head -c 200000000 /dev/zero > {folder}/f; rm {folder}/f", timeout=30)
        assert result.status == "ok" and "No space left on device" in result.output, folder


def test_case_R04_tmpfs_that_could_outgrow_the_memory_is_refused() -> None:
    with pytest.raises(LimitNotEnforced, match="disk_mb=400.*memory_mb=512"):
        container_options("image", "name", {}, Limits(disk_mb=400, memory_mb=512))


@pytest.mark.docker
def test_case_R04_a_limit_the_engine_cannot_enforce_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    engine().quota_said = False  # it is said once in a process
    with DockerSandbox.start(profile=ROOT_TASK) as box, DockerSandbox.start(profile=ROOT_TASK):
        said = capsys.readouterr().err
        enforced = engine().quota
        assert box.exec("id -u; echo x > /etc/x; cat /etc/x").output == "0\nx\n"
    assert enforced or said.count("does not enforce the size of the root filesystem") == 1


@pytest.mark.docker
@pytest.mark.parametrize("target", ["/proc/1/fd/1", "/proc/1/fd/2", "/dev/console", "/proc/self/../1/fd/1"])
def test_case_R06_no_log_on_the_host_grows(
    docker_box: DockerSandbox, client: docker.DockerClient, target: str
) -> None:
    result = docker_box.exec(f"yes > {target}", timeout=2)
    assert result.exit_code != 0 and len(result.raw) < 1000
    attributes = client.api.inspect_container(docker_box.container)
    assert attributes["HostConfig"]["LogConfig"]["Type"] == "none"
    assert not attributes["LogPath"] or not Path(attributes["LogPath"]).exists()
