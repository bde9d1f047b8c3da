"""PID 1 of a docker box: both ways it starts a shell, and what the agent can see and do of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from boxes import pool, usable

from mini_rome.sandbox import Sandbox

pytestmark = pytest.mark.docker
pytest_plugins = ("box_fixtures",)

DESCRIPTORS = "ls /proc/$$/fd"
IDS = "grep -hE '^(Uid|Gid|Groups|CapPrm|CapEff)' /proc/self/status /proc/1/status; cat /proc/self/oom_score_adj"
# Looks at PID 1's ids for as long as it lives, thousands of times a second, in the shell alone.
SPY = (
    "(while :; do while read -r name real _; do"
    ' [ "$name" = Uid: ] && [ "$real" != 0 ] && : > /tmp/seen; : > /tmp/looked; done < /proc/1/status; done)'
    " > /dev/null 2>&1 &"
)


@pytest.fixture(params=["vfork", "fork"])
def either_way(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A box whose shells are started by vfork, and one where a kept background process makes PID 1 fork."""
    with pool("docker").box() as box:
        if request.param == "fork":
            box.background = "keep"
            box.exec("sleep 300 &")
            box.exec("true")  # the shell of this step was started beside the sleep, as are all from here on
        yield box


def test_a_shell_is_the_agent_in_every_id_and_pid_1_is_root_again(either_way: Sandbox) -> None:
    lines = either_way.exec(IDS).output.splitlines()
    assert lines[:3] == ["Uid:\t1000\t1000\t1000\t1000", "Gid:\t1000\t1000\t1000\t1000", "Groups:\t "]
    assert [int(line.split()[1], 16) for line in lines[3:5]] == [0, 0]
    assert lines[5:7] == ["Uid:\t0\t0\t0\t0", "Gid:\t0\t0\t0\t0"]
    assert lines[-1] == "1000"  # the agent's processes are the first to go when memory runs out


def test_a_shell_holds_no_descriptor_but_its_own(either_way: Sandbox) -> None:
    shown = set(either_way.exec(DESCRIPTORS).output.split())
    assert shown == {"0", "1", "198", "2"}


def test_pid_1_never_has_an_id_of_the_agents_while_one_of_its_processes_lives(docker_box: Sandbox) -> None:
    docker_box.background = "keep"
    docker_box.exec(SPY)
    for _ in range(30):
        docker_box.exec("true")
    assert docker_box.exec("ls /tmp").output == "looked\n"


def test_kept_processes_that_use_up_the_limit_do_not_end_the_box(docker_box: Sandbox) -> None:
    docker_box.background = "keep"
    docker_box.exec("(sleep 0.3; for i in $(seq 300); do sleep 300 & done) > /dev/null 2>&1 &")
    time.sleep(2)
    results = [docker_box.exec(f"echo {number}", timeout=5) for number in range(3)]
    assert [result.output.split("\n")[0] for result in results] == ["0", "1", "2"]
    assert "pids_limit" in {result.status for result in results}
    docker_box.background = "kill"
    docker_box.exec("true")
    assert usable(docker_box)


def test_state_that_a_step_forges_is_read_as_data(docker_box: Sandbox) -> None:
    docker_box.exec("printf '/tmp\\0declare -x A=\"$(touch /tmp/forged)\"\\0E' >&198; exec true")
    assert docker_box.exec("pwd; echo \"$A\"; ls /tmp").output == "/tmp\n$(touch /tmp/forged)\n"
    docker_box.exec(": > /proc/self/fd/198; head -c 3000000 /dev/zero >&198; cd /home/agent; export A=2")
    assert docker_box.exec("pwd; echo $A").output == "/home/agent\n2\n"
