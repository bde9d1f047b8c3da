"""Cases L: lifetime. However a run ends, nothing of it is left, and nothing of anybody else's is touched."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from boxes import usable, within

from mini_rome.errors import SandboxClosed, SandboxDead
from mini_rome.sandbox import Sandbox, images, make, reaper, run_id
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.hardening import ROOT_TASK

pytest_plugins = ("box_fixtures",)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    found = docker.from_env()
    yield found
    found.close()


def until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return true()


def left(client: docker.DockerClient, run: str) -> list[str]:
    found = client.api.containers(all=True, filters={"label": f"{reaper.RUN}={run}"})
    return [container["Names"][0] for container in found]


PHASES = {
    "make": "for _ in range(60): boxes.append(make('docker'))",
    "step": "boxes.append(make('docker')); say(); boxes[0].exec('sleep 60', timeout=60)",
    "verify": """
from mini_rome.tasks.harbor import load
from mini_rome.sandbox import initial_snapshot
from mini_rome.verify_fresh import verify_fresh
task = load(ROOT + '/tests/data/tasks/word-count')
slow = initial_snapshot({'count.sh': '#!/bin/bash\\nsleep 9'})
boxes.append(make('docker')); say()
for _ in range(9): verify_fresh(task, slow, task.docker_image)
""",
    "close": """
boxes += [make('docker') for _ in range(6)]; say()
for box in boxes: box.close()
time.sleep(60)
""",
}
PROGRAM = """
import sys, time
ROOT = {root!r}
sys.path.insert(0, ROOT)
from mini_rome.sandbox import make, run_id
boxes = []
say = lambda: print(run_id(), flush=True)
results = open({results!r}, 'w')
results.write('partial\\n')
try:
    {early}
    exec({phase!r})
except KeyboardInterrupt:
    sys.exit(130)
finally:
    results.close()
    for box in boxes: box.close()
"""


@pytest.mark.docker
@pytest.mark.parametrize("interrupts", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_case_L01_ctrl_c_leaves_no_container_and_flushes(
    client: docker.DockerClient, tmp_path: Path, phase: str, interrupts: int
) -> None:
    results = tmp_path / "results.txt"
    early = "say()" if phase == "make" else "pass"
    code = PROGRAM.format(root=str(ROOT), results=str(results), phase=PHASES[phase], early=early)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        run = process.stdout.readline().strip()
        assert run, process.stderr.read()
        time.sleep(0.7 if phase in ("make", "verify") else 0.2)
        for _ in range(interrupts):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.2)
        code_seen = process.wait(15)
    finally:
        process.kill()  # one that Ctrl-C did not end must not go on making boxes
        process.communicate()
    assert until(lambda: left(client, run) == [], 5), left(client, run)
    assert results.read_text() == "partial\n"
    if interrupts == 1:
        assert code_seen == 130
    else:
        assert code_seen in (130, 1, -signal.SIGINT)  # a second Ctrl-C may cut the clean-up itself short


@pytest.mark.docker
def test_case_L02_kill_9_of_the_trainer_with_8_busy_boxes(client: docker.DockerClient) -> None:
    code = (
        f"import sys, threading; sys.path.insert(0, {str(ROOT)!r})\n"
        "from mini_rome.sandbox import make, run_id\n"
        "boxes = [make('docker') for _ in range(8)]\n"
        "busy = [threading.Thread(target=box.exec, args=('while :; do :; done', 60)) for box in boxes]\n"
        "[thread.start() for thread in busy]\n"
        "print(run_id(), flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    run = process.stdout.readline().strip()
    assert len(left(client, run)) == 8
    process.kill()
    process.wait()
    process.stdout.close()
    assert until(lambda: left(client, run) == [], 10), left(client, run)


@pytest.mark.docker
def test_case_L04_only_the_dead_runs_containers_go(client: docker.DockerClient) -> None:
    mine = make("docker")
    look_alike = client.containers.create(
        images.DEFAULT_IMAGE, ["/usr/bin/sleep", "60"], name=f"mini-rome-{run_id()}-foreign", network_mode="none"
    )
    code = f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\nfrom mini_rome.sandbox import make, run_id\n"
    code += "box = make('docker'); print(run_id(), flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        run = other.stdout.readline().strip()
        other.kill()
        other.wait()
        assert until(lambda: left(client, run) == [], 10)
        reaper.gc(client=client)
        assert usable(mine)
        assert client.containers.get(look_alike.id).id == look_alike.id
    finally:
        mine.close()
        look_alike.remove(force=True)
        if other.stdout is not None:
            other.stdout.close()


def test_case_L05_close_is_idempotent_and_use_after_it_says_so(backend: str) -> None:
    box = make(backend)
    box.close()
    box.close()
    for use in (
        lambda: box.exec("echo"),
        box.snapshot,
        box.reset,
        box.sweep,
        lambda: box.read("f"),
        lambda: box.write("f", b""),
    ):
        with pytest.raises(SandboxClosed, match=box.name):
            use()


@pytest.mark.docker
def test_case_L05_close_from_another_thread_ends_a_step() -> None:
    box = make("docker")
    timer = threading.Timer(0.5, box.close)
    timer.start()
    with within(3), pytest.raises(SandboxClosed):
        box.exec("sleep 60", timeout=60)
    timer.join()


@pytest.mark.docker
def test_case_L05_a_box_that_is_dropped_is_removed(client: docker.DockerClient) -> None:
    box = make("docker")
    name = f"/{box.name}"
    assert name in left(client, run_id())
    del box
    gc.collect()
    assert until(lambda: name not in left(client, run_id()), 5)


@pytest.mark.docker
def test_case_L05_a_forked_child_that_ends_or_closes_leaves_the_parents_box_alone() -> None:
    with make("docker") as box:
        for end in ("close", "exit"):
            pid = os.fork()
            if pid == 0:
                if end == "close":
                    box.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert usable(box)


ATTACKS = [
    "kill -9 -1",
    "pkill sleep",
    "pkill -9 python3",
    "kill -9 1",
    "kill -STOP 1",
    "kill -TERM 1",
    "for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done",
    "exec kill -9 -1",
    "(trap '' KILL; kill -9 -1) & wait",
    "echo x > /proc/1/fd/0",
    "echo x > /proc/1/fd/1",
    "kill -SEGV 1; kill -HUP 1; kill -PIPE 1; kill -ALRM 1",
    "echo 1000 > /proc/1/oom_score_adj",
    "python3 -c 'import os; os.kill(1, 9)'",
]


@pytest.mark.docker
@pytest.mark.parametrize("attack", ATTACKS)
def test_case_L06_attacks_on_pid_1_leave_the_box_usable_and_are_events(tools_box: Sandbox, attack: str) -> None:
    with within(7):
        result = tools_box.exec(attack, timeout=4)
    assert result.status == "ok"
    assert usable(tools_box)
    assert attack == "pkill sleep" or "harness_attack" in {event.kind for event in result.events}


@pytest.mark.docker
def test_case_L06_control_a_root_task_that_kills_its_box_gives_one_clear_error() -> None:
    """As root the agent reaches PID 1's processes; the box survives or says once that it is dead."""
    with DockerSandbox.start("mini-rome/tools:latest", profile=ROOT_TASK) as box:
        with within(7):
            box.exec("kill -9 -1; kill -9 1; kill -STOP 1", timeout=4)
        try:
            assert usable(box)
        except SandboxDead as error:
            assert box.name in str(error)


@pytest.mark.docker
def test_case_L08_snapshots_and_restores_leave_no_image_volume_or_network(client: docker.DockerClient) -> None:
    def kept() -> tuple[int, int, int]:
        return len(client.images.list(all=True)), len(client.volumes.list()), len(client.networks.list())

    before = kept()
    with make("docker") as box:
        box.exec("mkdir d; echo x > d/f")
        for _ in range(100):
            box.restore(box.snapshot())
        assert box.exec("cat d/f").output == "x\n"
    assert kept() == before
    assert until(lambda: f"/{box.name}" not in left(client, run_id()), 2)
