"""Cases P (many boxes), S (secrets and privilege), X (which backend): what is never visible, allowed or mixed up."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from boxes import usable, within
from docker.errors import APIError
from docker_proxy import DockerProxy

from mini_rome import sandbox
from mini_rome.errors import ConfigError, SandboxUnavailable, UnsafeTask
from mini_rome.sandbox import Limits, Pool, Sandbox, make, resolve
from mini_rome.sandbox import docker as docker_module
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import engine
from mini_rome.sandbox.hardening import ROOT_CAPABILITIES, ROOT_TASK, RUNNER_CAPABILITIES, container_options
from mini_rome.tasks.harbor import load

pytest_plugins = ("box_fixtures",)

NO_ENGINE = "unix:///nonexistent.sock"


# -- P: many boxes ---------------------------------------------------------------------------------------------------


def _life(backend: str, steps: int) -> float:
    start = time.monotonic()
    with make(backend) as box:
        began = time.monotonic() - start
        for step in range(steps):
            assert box.exec(f"echo {step}").output == f"{step}\n"
    return began


def test_case_P01_many_threads_share_one_engine(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(32) as workers:
        starts = sorted(workers.map(lambda _: _life(backend, 20), range(32)))
    assert not [record for record in caplog.records if "pool is full" in record.getMessage()]
    assert threading.active_count() <= threads + 2  # the watchdog of sim and the executor's last thread
    print(f"{backend}: start p50 {starts[16]:.2f} s, p95 {starts[30]:.2f} s of 32 at once")


@pytest.mark.docker
def test_case_P01_descriptors_do_not_grow() -> None:
    _life("docker", 1)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        _life("docker", 1)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def _names(count: int, queue: multiprocessing.Queue[list[str]]) -> None:
    boxes = [make("docker", task_name="same-task") for _ in range(count)]
    queue.put([box.name for box in boxes])
    for box in boxes:
        box.close()


@pytest.mark.docker
def test_case_P02_two_processes_never_collide() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_names, args=(8, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    names = [name for _ in workers for name in queue.get(timeout=120)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(set(names)) == 16


@pytest.mark.docker
def test_case_P02_a_taken_name_is_left_alone_and_another_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with make("docker") as other:
        taken = other.name.rpartition("-")[2]
        tokens = iter([taken, taken, "0a1b2c3d4e5f"])
        monkeypatch.setattr(docker_module.secrets, "token_hex", lambda size: next(tokens))
        with make("docker") as box:
            assert box.name.endswith("-0a1b2c3d4e5f") and usable(other)


def test_case_P_the_pool_holds_back_and_hands_out_clean_boxes(backend: str) -> None:
    with Pool(backend, size=2) as pool:
        first, second = pool.take(), pool.take()
        first.exec("echo x > f; cd /tmp; export A=1")
        with within(2), pytest.raises(SandboxUnavailable, match="all 2 boxes"):
            pool.take(timeout=0.2)
        threading.Timer(0.3, pool.give, [first]).start()
        again = pool.take(timeout=10)
        assert again is first and again.exec("ls; pwd; echo $A").output == "/app\n\n"
        pool.give(again)
        pool.give(second)
        second_again = pool.take()
        assert pool.made == 2
        pool.give(second_again)
    with pytest.raises(sandbox.pool.SandboxClosed):
        pool.take()


@pytest.mark.docker
def test_case_P_from_the_warm_pool_within_a_fraction_of_a_start() -> None:
    with Pool("docker", size=1) as pool:
        start = time.monotonic()
        pool.give(pool.take())
        cold = time.monotonic() - start
        times = []
        for _ in range(10):
            start = time.monotonic()
            box = pool.take()
            box.restore(sandbox.initial_snapshot({"f": "x"}))
            times.append(time.monotonic() - start)
            pool.give(box)
    assert sorted(times)[5] < cold / 3


# -- S: secrets and privilege ----------------------------------------------------------------------------------------


@pytest.mark.docker
def test_case_S01_no_secret_of_the_host_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "hf_secret1", "AWS_SECRET_ACCESS_KEY": "aws_secret2", "SSH_AUTH_SOCK": "/tmp/secret3"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    with make("docker", image="mini-rome/tools:latest") as box:
        assert isinstance(box, DockerSandbox)
        seen = box.exec(
            "env; cat /proc/*/environ; cat ~/.docker/config.json /root/.docker/config.json; set; mount; ls -la / ~; "
            "cat /etc/resolv.conf /etc/hosts /proc/1/cmdline; python3 -c 'import os; print(dict(os.environ))'"
        )
        told = str(engine().client.api.inspect_container(box.container))
        box.observer = None
        log = seen.output + seen.raw.decode(errors="replace") + told + repr(box.snapshot())
    for value in secrets.values():
        assert value not in log
    lines = Path("/etc/resolv.conf").read_text().splitlines()
    for address in {line.split()[1] for line in lines if line.startswith("nameserver ")} - {"127.0.0.1"}:
        assert address not in seen.output


@pytest.mark.docker
def test_case_S01_the_environment_is_an_allow_list(docker_box: Sandbox) -> None:
    names = {line.partition("=")[0] for line in docker_box.exec("env").output.splitlines()}
    assert names == {"HOME", "LC_CTYPE", "PATH", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_"}


LIBC = "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).{} {})' && echo DONE"  # a call, what is failure
FORBIDDEN = {
    "mount": "mount -t tmpfs x /app && echo DONE",
    "remount": "mount -o remount,rw / && echo DONE",
    "user namespace": "unshare -U true && echo DONE",
    "mount namespace": "unshare -m true && echo DONE",
    "user namespace mapped": "unshare -Ur true && echo DONE",
    "network namespace": "unshare -n true && echo DONE",
    "device": "mknod /tmp/d b 8 0 && echo DONE",
    "chroot": "/usr/sbin/chroot / true && echo DONE",
    "clock": "date -s 2001-01-01 && echo DONE",
    "kernel log": "dmesg && echo DONE",
    "module": LIBC.format('syscall(175, b"", 0, b"")', "< 0"),
    "sysctl": "echo 1 > /proc/sys/kernel/panic && echo DONE",
    "sysrq": "echo b > /proc/sysrq-trigger && echo DONE",
    "root by su": "echo | su -c true && echo DONE",
    "root by setuid": "python3 -c 'import os; os.setuid(0)' && echo DONE",
    "write to the image": "echo x > /usr/bin/x && echo DONE",
    "write to /etc": "echo x >> /etc/passwd && echo DONE",
    "engine socket": "ls /var/run/docker.sock /run/docker.sock 2>/dev/null && echo DONE",
    "environment of PID 1": "cat /proc/1/environ && echo DONE",
    "memory of PID 1": "cat /proc/1/mem && echo DONE",
    "trace PID 1": LIBC.format("ptrace(16, 1, 0, 0)", "!= 0"),
    "signal PID 1": "kill -STOP 1 && echo DONE",
    "output of PID 1": "echo x > /proc/1/fd/1 && echo DONE",
    "raw socket": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)' && echo DONE",
    "packet socket": "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)' && echo DONE",
    "keyring": LIBC.format("syscall(250, 0, -3, 0)", "< 0"),
    "bpf": LIBC.format('syscall(321, 0, b"", 0)', "< 0"),
    "perf": LIBC.format('syscall(298, b"", 0, -1, -1, 0)', "< 0"),
    "reboot": LIBC.format("reboot(0x1234567)", "!= 0"),
    "nice": "nice -n -5 true 2>&1 | grep -q cannot || echo DONE",
    "cgroup": "echo 999 > /sys/fs/cgroup/pids/pids.max && echo DONE",
    "core pattern": "echo '|/app/x' > /proc/sys/kernel/core_pattern && echo DONE",
    "host disk": "ls /dev/vda /dev/sda /dev/nvme0n1 2>/dev/null && echo DONE",
    "kernel memory": "head -c 1 /proc/kcore && echo DONE",
}


@pytest.mark.docker
@pytest.mark.parametrize("what", FORBIDDEN)
def test_case_S02_what_needs_privilege_is_refused(tools_box: Sandbox, what: str) -> None:
    with within(6):
        result = tools_box.exec(FORBIDDEN[what], timeout=5)
    assert "DONE" not in result.output and "command not found" not in result.output
    assert usable(tools_box)


# What a box without the hardening lets through: the probes above are able to succeed.
POSSIBLE = (
    "mount", "user namespace", "mount namespace", "network namespace", "device", "chroot", "write to the image",
    "write to /etc", "signal PID 1", "root by setuid", "raw socket", "packet socket", "keyring",
)


@pytest.mark.docker
def test_case_S02_control_a_weakened_box_lets_them_through() -> None:
    script = "\n".join(
        f"case $({{ {FORBIDDEN[what]}; }} 2>&1) in *DONE*) echo 'YES {what}'; esac"
        for what in POSSIBLE
    )
    output = engine().client.containers.run(
        "mini-rome/tools:latest", ["bash", "-c", f"{script}\nexit 0"], entrypoint=[], user="0:0", remove=True,
        network_mode="none", security_opt=["seccomp=unconfined", "apparmor=unconfined"], cap_add=["SYS_ADMIN"],
    ).decode()
    assert [what for what in POSSIBLE if f"YES {what}\n" not in output] == []


@pytest.mark.docker
def test_case_S02_attempts_are_events(tools_box: Sandbox) -> None:
    attempts = ("mount -t tmpfs x /app", "unshare -Ur bash", "echo b > /proc/sysrq-trigger", "cat /proc/1/environ")
    for command in attempts:
        kinds = {event.kind for event in tools_box.exec(command).events}
        assert kinds & {"privilege", "harness_attack", "secret_read"}, command


@pytest.mark.docker
def test_case_S02_the_agents_processes_have_nothing(docker_box: Sandbox) -> None:
    status = docker_box.exec("cat /proc/self/status").output
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert re.search(rf"^{name}:\t0{{16}}$", status, re.M)
    assert re.search(r"^CapBnd:\t00000000000000e0$", status, re.M)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M) and re.search(r"^Seccomp:\t2$", status, re.M)
    assert docker_box.exec("find / -xdev -perm /6000 -type f 2>/dev/null").output == ""
    writable = "find / -writable -not -path '/proc/*' -not -path '/dev/*' -type d 2>/dev/null | sort"
    assert docker_box.exec(writable).output == "/app\n/home/agent\n/tmp\n"


def _folder(tmp_path: Path, environment: str) -> Path:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/Dockerfile").write_text("FROM mini-rome/base\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text("#!/bin/sh\n")
    (tmp_path / "instruction.md").write_text("Do it.\n")
    (tmp_path / "task.toml").write_text(f'version = "1.0"\n[environment]\n{environment}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("privileged = true", "privileged"), ('network_mode = "host"', "network_mode"), ('pid = "host"', "pid"),
        ('cap_add = ["SYS_ADMIN"]', "cap_add"), ('binds = ["/:/host"]', "binds"),
        ('volumes = ["/var/run/docker.sock:/var/run/docker.sock"]', "volumes"), ('ipc = "host"', "ipc"),
        ('devices = ["/dev/kmsg"]', "devices"), ('security_opt = ["seccomp=unconfined"]', "security_opt"),
    ],
)
def test_case_S04_unsafe_settings_are_refused_by_key(tmp_path: Path, setting: str, key: str) -> None:
    folder = _folder(tmp_path, setting)
    with pytest.raises(UnsafeTask, match=key):
        load(folder)
    allowed = load(folder, allow_unsafe=True).unsafe
    assert any(key in found for found in allowed)
    with make("sim", allow_unsafe=allowed) as box:
        assert "unsafe" in box.label and key in box.label


def test_case_S04_no_option_of_a_box_is_privileged() -> None:
    container, host = container_options("i", "n", {}, Limits())
    assert host["privileged"] is False and host["network_mode"] == "none" and host["cap_drop"] == ["ALL"]
    assert set(host["cap_add"]) == set(RUNNER_CAPABILITIES) and "binds" not in host and "pid_mode" not in host
    assert "SYS_ADMIN" not in ROOT_CAPABILITIES and ROOT_TASK.capabilities == ROOT_CAPABILITIES
    assert container["environment"] == {}


# -- X: which backend ------------------------------------------------------------------------------------------------


def test_case_X01_auto_without_an_engine_says_simulated_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    chosen, line = resolve("auto")
    assert chosen == "sim" and "simulated" in line and "no such socket" in line and "\n" not in line
    with make("auto") as box:
        assert box.label == "sim (simulated)"
        assert box.exec("cat /etc/hostname; hostname").output.splitlines()[-1] != os.uname().nodename
    with pytest.raises(SandboxUnavailable, match="--sandbox sim"):
        resolve("docker")
    with pytest.raises(SandboxUnavailable, match="--sandbox sim"):
        Pool("docker")
    assert started == [], "a command of the model ran on the host"


@pytest.mark.docker
def test_case_X01_auto_with_an_engine_is_docker() -> None:
    chosen, line = resolve("auto")
    assert chosen == "docker" and "docker" in line and "kernel" in line and "simulated" not in line


def test_case_X01_an_unknown_backend_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="sandbox='podman': choose one of auto, docker, sim"):
        resolve("podman")


@pytest.mark.parametrize(
    "command", ["python3 -c 1", "pytest", "vi f", "ssh x", "sed -z x f", "grep -P a f", "perl -e 1", "ls -n"]
)
def test_case_X02_sim_says_what_it_does_not_know(command: str) -> None:
    with make("sim") as box:
        box.write("f", "a\n")
        result = box.exec(command)
        assert result.exit_code is not None and result.supported is False and result.status == "ok"
        assert "simulated" in box.label
        assert box.exec("cat f").supported is True


def test_case_X02_the_host_is_out_of_reach_of_sim() -> None:
    with make("sim") as box:
        for path in ("/etc/passwd", "/proc/version", "/root/.bashrc", __file__):
            assert Path(__file__).read_text()[:50] not in box.exec(f"cat {path}").output
        assert box.exec("curl http://example.com; wget -qO- http://1.1.1.1").exit_code != 0


@pytest.mark.docker
def test_case_X_an_engine_that_fails_later_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with DockerProxy() as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        make("docker").close()
        proxy.cut()
        with pytest.raises(SandboxUnavailable, match="no Docker engine at"):
            make("docker")
    assert isinstance(engine().client, docker.DockerClient) and APIError is not None
