"""Cases C: the engine and its faults, what is told apart and what is never a number."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from boxes import crowding, usable, within
from docker_proxy import DockerProxy

from mini_rome import sandbox
from mini_rome.errors import (
    ImageMissing,
    SandboxDead,
    SandboxError,
    SandboxUnavailable,
)
from mini_rome.sandbox import Limits, Pool, initial_snapshot, make
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.reaper import RUN
from mini_rome.types import INFRA_STATUSES, StepResult

pytest_plugins = ("box_fixtures",)


def containers_of(client: docker.DockerClient, run: str) -> list[str]:
    return [found.name for found in client.containers.list(all=True, filters={"label": f"{RUN}={run}"})]


@pytest.fixture
def denied_socket(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "listening.sock"
    path.touch()  # a file that no one listens on: connect is refused
    yield f"unix://{path}"


def test_case_C01_no_engine_is_three_ways_on(monkeypatch: pytest.MonkeyPatch, denied_socket: str) -> None:
    for host in ("unix:///nonexistent.sock", denied_socket, "tcp://127.0.0.1:9"):
        monkeypatch.setenv("DOCKER_HOST", host)
        with within(3.5), pytest.raises(SandboxUnavailable) as caught:
            make("docker")
        text = str(caught.value)
        assert host in text and all(f" {number}. " in text for number in (1, 2, 3)) and "--sandbox sim" in text
        assert len(text.splitlines()) <= 3
        assert "Traceback" not in text and "Error while fetching" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_case_C01_no_permission_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    code = (
        "import os, docker, mini_rome.sandbox.docker; from mini_rome.sandbox import make\n"
        "os.setgroups([]); os.setuid(65534)\n"
        "try: make('docker')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    if not Path("/var/run/docker.sock").exists():
        pytest.skip("no engine's socket here")
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "DOCKER_HOST": "unix:///var/run/docker.sock"},
    )
    assert "SandboxUnavailable" in said.stdout and "permission denied" in said.stdout, said.stderr


@pytest.mark.docker
def test_case_C01_a_silent_engine_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with DockerProxy() as proxy:
        proxy.stall()
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        with within(4), pytest.raises(SandboxUnavailable, match="no answer within 3 s"):
            make("docker")


@pytest.mark.docker
@pytest.mark.parametrize(
    ("image", "way"),
    [("no-such:1", "docker pull no-such:1"), ("mini-rome/tools:0", "mini-rome image build tools")],
)
def test_case_C02_a_missing_image_names_its_command(image: str, way: str) -> None:
    with within(3), pytest.raises(ImageMissing) as caught:
        make("docker", image=image)
    text = str(caught.value)
    assert image in text and way in text and len(text.splitlines()) <= 3


@pytest.mark.docker
@pytest.mark.parametrize("how", ["kill", "rm", "restart", "stop"])
def test_case_C03_a_dead_box_is_noticed(client: docker.DockerClient, how: str) -> None:
    box = make("docker")
    assert isinstance(box, DockerSandbox)
    container = client.containers.get(box.container)
    actions: dict[str, Callable[[], object]] = {
        "kill": container.kill, "rm": lambda: container.remove(force=True),
        "restart": lambda: container.restart(timeout=0), "stop": lambda: container.stop(timeout=0),
    }
    died: list[float] = []
    timer = threading.Timer(0.7, lambda: (died.append(time.monotonic()), _quietly(actions[how])))
    timer.start()
    result = box.exec("echo start; sleep 30")
    assert time.monotonic() - died[0] < 2 * crowding()
    assert result.status in INFRA_STATUSES and result.exit_code is None and result.infra
    assert result.raw == b"start\n" and "not scored 0" in result.output
    if how in ("kill", "rm"):
        assert result.status == "sandbox_dead"
    calls = (lambda: box.exec("echo"), box.snapshot, box.reset, lambda: box.read("f"), lambda: box.write("f", b""))
    for call in calls:
        with pytest.raises(SandboxDead, match=box.name):
            call()
    timer.join()
    box.close()
    assert box.name not in containers_of(client, sandbox.run_id())


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except docker.errors.APIError:
        pass  # it removes itself when it ends


@pytest.mark.docker
def test_case_C03_a_dead_box_is_replaced_by_the_pool(client: docker.DockerClient) -> None:
    with Pool("docker", size=1) as pool:
        box = pool.take()
        client.containers.get(box.container).kill()  # type: ignore[attr-defined]
        assert box.exec("echo").infra
        pool.give(box)
        other = pool.take()
        assert other is not box and usable(other)
        pool.give(other)


@pytest.mark.docker
@pytest.mark.parametrize("again", [True, False])
def test_case_C04_a_paused_box_times_out_and_never_bleeds(client: docker.DockerClient, again: bool) -> None:
    box = make("docker")
    container = client.containers.get(box.container)  # type: ignore[attr-defined]
    pause = threading.Timer(0.3, container.pause)
    pause.start()
    with within(3.5):
        result = box.exec("for i in $(seq 40); do echo old; sleep 0.1; done", timeout=1)
    assert result.status == "timeout"
    pause.join()
    if again:
        container.unpause()
        for _ in range(3):
            assert box.exec("echo new").output == "new\n"
    else:
        with within(3), pytest.raises(SandboxDead, match="paused"):
            box.exec("echo new")
    with within(5):
        box.close()
    assert containers_of(client, sandbox.run_id()).count(box.name) == 0


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerProxy]:
    with DockerProxy() as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        yield proxy


@pytest.mark.docker
def test_case_C06_an_engine_that_dies_and_comes_back(proxied: DockerProxy, client: docker.DockerClient) -> None:
    with Pool("docker", size=2) as pool:
        box = pool.take()
        threading.Timer(0.5, proxied.cut).start()
        with within(8):
            result = box.exec("echo start; sleep 30", timeout=3)
        assert result.status == "infra_error" and result.exit_code is None and result.raw == b"start\n"
        with pytest.raises(SandboxError):
            pool.take(timeout=1)
        pool.give(box)
        proxied.back()
        fresh = pool.take()
        assert usable(fresh)
        deadline = time.monotonic() + 10
        while box.name in containers_of(client, sandbox.run_id()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert box.name not in containers_of(client, sandbox.run_id())
        pool.give(fresh)


@pytest.mark.docker
@pytest.mark.parametrize("command", ["sleep 2; echo late", "yes", "echo early; sleep 60"])
def test_case_C08_our_own_deadline_bounds_a_stalled_stream(proxied: DockerProxy, command: str) -> None:
    box = make("docker")
    threading.Timer(0.2, proxied.stall).start()
    time.sleep(0.25)
    with within(3):
        result = box.exec(command, timeout=1)
    assert result.status == "infra_error" and result.exit_code is None
    with within(4), pytest.raises(SandboxError):
        box.read("f")
    proxied.back()
    with within(5):
        box.close()


@pytest.mark.docker
def test_case_C08_a_stall_during_transfers_is_bounded(proxied: DockerProxy) -> None:
    box = make("docker", limits=Limits(step_s=1))
    proxied.stall()
    with within(3.2):
        assert box.exec("wc -c", timeout=1, stdin=b"x" * 20_000_000).infra
    proxied.back()
    box.close()


@pytest.mark.docker
@pytest.mark.parametrize("request_line", ["/start", "/attach", "/containers/create"])
def test_case_C09_a_failed_start_leaves_nothing(
    proxied: DockerProxy, client: docker.DockerClient, request_line: str
) -> None:
    before = containers_of(client, sandbox.run_id())
    make("docker").close()
    proxied.fail(request_line)
    with pytest.raises(SandboxError, match="injected by the proxy"):
        make("docker")
    assert containers_of(client, sandbox.run_id()) == before


@pytest.mark.docker
def test_case_C09_a_bad_image_leaves_nothing(client: docker.DockerClient) -> None:
    before = containers_of(client, sandbox.run_id())
    blank = client.images.build(fileobj=_dockerfile(), tag="mini-rome-test/blank:1", rm=True)[0]
    try:
        with pytest.raises(SandboxError, match="could not start|did not answer"):
            make("docker", image="mini-rome-test/blank:1")
    finally:
        client.images.remove(blank.id, force=True)
    assert containers_of(client, sandbox.run_id()) == before


def _dockerfile() -> object:
    import io

    return io.BytesIO(b"FROM scratch\nLABEL test=blank\n")


def test_infra_results_carry_no_number() -> None:
    for status in INFRA_STATUSES:
        assert StepResult("", None, status).infra  # type: ignore[arg-type]
    assert initial_snapshot({}).tree_hash == initial_snapshot({}).tree_hash
