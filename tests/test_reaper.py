"""The reaper and gc: what a dead owner left goes, whatever killed it; what others own stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from docker_proxy import DockerProxy

from mini_rome.errors import SandboxUnavailable
from mini_rome.sandbox import images, reaper

ROOT = Path(__file__).resolve().parents[1]
IMAGE = images.DEFAULT_IMAGE


def until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.1)
    return true()


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    found = docker.from_env()
    yield found
    found.close()


@pytest.fixture
def leave(client: docker.DockerClient) -> Iterator[Callable[..., object]]:
    """Makes containers that nobody else removes."""
    made = []

    def make(name: str | None = None, **labels: str) -> object:
        command = ["/usr/bin/sleep", "300"]
        container = client.containers.create(IMAGE, command, name=name, labels=labels, network_mode="none")
        made.append(container)
        return container

    yield make
    for container in made:
        try:
            container.remove(force=True)
        except docker.errors.NotFound:
            pass


def owner_labels(run: str, pid: int, **changes: str) -> dict[str, str]:
    return {**reaper.labels(run, "t", 60), reaper.PID: str(pid), **changes}


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


# -- pure ---------------------------------------------------------------------------------------------------------


def test_a_living_owner_is_not_stale_and_a_dead_one_is() -> None:
    assert not reaper.is_stale(reaper.labels("r", "t", 60))
    assert reaper.is_stale(owner_labels("r", dead_pid()))


def test_an_owner_elsewhere_or_unnamed_is_never_judged() -> None:
    pid = dead_pid()
    assert not reaper.is_stale(owner_labels("r", pid, **{reaper.HOST: "elsewhere/1"}))
    assert not reaper.is_stale({reaper.RUN: "r"})
    assert not reaper.is_stale(owner_labels("r", pid, **{reaper.PID: "x"}))
    assert not reaper.is_stale(owner_labels("r", pid, **{reaper.CREATED: "yesterday"}))


def test_a_pid_that_a_younger_process_has_taken_over_is_a_dead_owner() -> None:
    assert reaper.is_stale(owner_labels("r", os.getpid(), **{reaper.CREATED: "1000.0"}))


def test_a_zombie_owner_is_dead() -> None:
    child = subprocess.Popen(["true"])
    assert until(lambda: reaper.started_at(child.pid) is None, 5)
    child.wait()


@pytest.mark.docker  # where no engine answers, a reaper waits for one before it gives up
def test_one_reaper_serves_a_run_and_ends_when_its_pipe_is_closed() -> None:
    pid = reaper.ensure_reaper("no-such-run-1")
    assert reaper.ensure_reaper("no-such-run-1") == pid
    child = reaper._children.pop((os.getpid(), "no-such-run-1"))
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(30) == 0


@pytest.mark.docker  # where no engine answers, a reaper waits for one before it gives up
def test_a_forked_child_lets_go_of_the_parents_reaper() -> None:
    reaper.ensure_reaper("no-such-run-2")
    child = reaper._children[(os.getpid(), "no-such-run-2")]
    assert child.stdin is not None
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, b"%d" % len(reaper._children))
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 8) == b"0"
        reaper._children.pop((os.getpid(), "no-such-run-2"))
        child.stdin.close()
        assert child.wait(30) == 0  # although the forked child still lives
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_gc_without_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    with pytest.raises(SandboxUnavailable, match="DOCKER_HOST"):
        reaper.gc()


# -- with an engine -------------------------------------------------------------------------------------------------


@pytest.mark.docker
def test_gc_removes_by_label_and_dead_owner_only_and_a_dry_run_removes_nothing(
    client: docker.DockerClient, leave: Callable[..., object]
) -> None:
    stale = leave(**owner_labels("gc-a", dead_pid()))
    alive = leave(**owner_labels("gc-b", os.getpid()))
    named = leave(name=f"mini-rome-gc-{os.getpid()}-look-alike")
    elsewhere = leave(**owner_labels("gc-c", 1, **{reaper.HOST: "elsewhere/1"}))
    volume = client.volumes.create(labels=owner_labels("gc-a", dead_pid()))
    listed = reaper.gc(dry_run=True, client=client)
    assert f"container {stale.name}" in listed and f"volume {volume.name}" in listed  # type: ignore[attr-defined]
    assert stale.id in {found.id for found in client.containers.list(all=True, sparse=True)}  # type: ignore[attr-defined]
    assert set(reaper.gc(client=client)) >= {f"container {stale.name}", f"volume {volume.name}"}  # type: ignore[attr-defined]
    left = {found.id for found in client.containers.list(all=True, sparse=True)}
    assert stale.id not in left  # type: ignore[attr-defined]
    assert {found.id for found in (alive, named, elsewhere)} <= left  # type: ignore[attr-defined]
    assert volume.name not in {found.name for found in client.volumes.list()}


@pytest.mark.docker
def test_remove_run_takes_containers_networks_volumes_and_images_of_that_run(
    client: docker.DockerClient, leave: Callable[..., object]
) -> None:
    ours, theirs = {reaper.RUN: "rr-ours"}, {reaper.RUN: "rr-theirs"}
    kept = leave(**theirs)
    leave(**ours)
    client.volumes.create(labels=ours)
    client.networks.create("rr-ours-net", labels=ours, internal=True)
    base = leave(**ours)
    base.commit(repository="mini-rome-test/rr", changes=[f"LABEL {reaper.RUN}=rr-ours"])  # type: ignore[attr-defined]
    assert reaper.remove_run("rr-ours", lambda: client, give_up_s=30) == 5
    assert not list(reaper._labelled(client, f"{reaper.RUN}=rr-ours"))
    assert kept.id in {found.id for found in client.containers.list(all=True, sparse=True)}  # type: ignore[attr-defined]


@pytest.mark.docker
def test_an_engine_that_comes_back_is_cleaned_then(leave: Callable[..., object]) -> None:
    leave(**{reaper.RUN: "rr-back"})
    with DockerProxy() as proxy:
        link = docker.DockerClient(base_url=proxy.url, version="1.41", timeout=2)
        proxy.cut()
        assert reaper.remove_run("rr-back", lambda: link, give_up_s=3) == 0
        proxy.back()
        assert reaper.remove_run("rr-back", lambda: link, give_up_s=20) == 1
        link.close()


OWNER = """
import os, sys, time
sys.path.insert(0, {root!r})
from mini_rome.sandbox import Limits, make, run_id
boxes = [make("docker") for _ in range({boxes})]
print(run_id(), flush=True)
if {fork}:
    if os.fork() == 0:
        time.sleep(600)
{then}
"""


def owner(boxes: int, then: str = "time.sleep(600)", fork: bool = False) -> tuple[subprocess.Popen[str], str]:
    """A process that holds boxes, in a session of its own: (process, run id)."""
    code = OWNER.format(root=str(ROOT), boxes=boxes, then=then, fork=fork)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    run = process.stdout.readline().strip()
    assert run, f"the owner did not start its boxes: {process.stderr.read()}"
    return process, run


def left(client: docker.DockerClient, run: str) -> int:
    return len(client.api.containers(all=True, filters={"label": f"{reaper.RUN}={run}"}))


@pytest.mark.docker
@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked worker that lives on"])
def test_a_killed_owner_leaves_no_container_and_no_reaper(client: docker.DockerClient, fork: bool) -> None:
    process, run = owner(3, fork=fork)
    reapers = subprocess.run(["pgrep", "-f", f"watch.. {run}"], capture_output=True, text=True).stdout.split()
    try:
        assert left(client, run) == 3 and len(reapers) == 1
        process.kill()
        process.wait()
        assert until(lambda: left(client, run) == 0, 10)
        assert until(lambda: not Path(f"/proc/{reapers[0]}").exists(), 10)
    finally:
        if fork:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.docker
def test_the_reaper_alone_is_enough(client: docker.DockerClient, leave: Callable[..., object]) -> None:
    """Containers that would not end with their owner: only the watching child can remove these."""
    run = f"alone-{os.getpid()}"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom mini_rome.sandbox.reaper import ensure_reaper\n"
    code += f"import time; ensure_reaper({run!r}); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    for _ in range(3):
        leave(**{reaper.RUN: run}).start()  # type: ignore[attr-defined]
    process.kill()
    process.wait()
    assert until(lambda: left(client, run) == 0, 10)


@pytest.mark.docker
def test_a_normal_end_without_close_leaves_nothing(client: docker.DockerClient) -> None:
    process, run = owner(2, then="sys.exit(0)")
    assert process.wait(20) == 0
    assert until(lambda: left(client, run) == 0, 10)
