"""The flag-removal table: without any one of the hardening flags, some attack or property turns red.

Each row weakens one flag of `container_options`, starts a box with the self-check off, and runs a probe as the agent
in the sound box and in the weakened one. The run ends with the table (box_fixtures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from docker.types import Mount

from mini_rome.errors import LimitNotEnforced
from mini_rome.sandbox import Limits, hardening
from mini_rome.sandbox import container as backend
from mini_rome.sandbox.docker import DockerSandbox

pytestmark = pytest.mark.docker
pytest_plugins = ("box_fixtures",)

Options = dict[str, Any]
PYTHON = "python3 -c '{}'"
CONNECT = PYTHON.format('import socket; s = socket.socket(); s.settimeout(2); print(s.connect_ex(("172.17.0.1", 9)))')
USERNS = "unshare -U true 2>/dev/null && echo made || echo refused"
MKDIRS = PYTHON.format('import os; [os.mkdir(f"d{i}") for i in range(20500)]; print("all made")') + " 2>&1 | tail -1"
SPAWN = "i=0; while [ $i -lt 200 ]; do sleep 9 & i=$((i+1)); done 2>/dev/null; jobs -r | wc -l"


@dataclass(frozen=True)
class Row:
    """One flag: how to take it away, a probe, and what it prints with and without the flag."""

    flag: str
    weaken: Callable[[Options, Options], None]
    probe: str
    sound: str
    weak: str
    judged: bool = False  # the start-up self-check refuses the weakened box


def drop(key: str) -> Callable[[Options, Options], None]:
    def weaken(container: Options, host: Options) -> None:
        del host[key]

    return weaken


def put(key: str, value: Any) -> Callable[[Options, Options], None]:
    def weaken(container: Options, host: Options) -> None:
        host[key] = value

    return weaken


def tmpfs_without(word: str, path: str = "/app") -> Callable[[Options, Options], None]:
    def weaken(container: Options, host: Options) -> None:
        parts = [part for part in host["tmpfs"][path].split(",") if not part.startswith(word)]
        if word in ("nosuid", "nodev"):
            parts.append({"nosuid": "suid", "nodev": "dev"}[word])  # the engine's own defaults have both
        host["tmpfs"] = {**host["tmpfs"], path: ",".join(parts)}

    return weaken


def hostname(container: Options, host: Options) -> None:
    del container["hostname"]


def without_limits(container: Options, host: Options) -> None:
    del host["mem_limit"], host["memswap_limit"]


MOUNT = "grep -o ' /app tmpfs [^ ]*' /proc/mounts | grep -c {}"
BIG = "head -c 80000000 /dev/zero > f 2>/dev/null && echo written || echo refused"
ALLOCATE = PYTHON.format("x = bytearray(600 << 20); print(len(x) >> 20)")
STATUS = "grep {} /proc/self/status | tr -d ' \\t' | cut -d: -f2"
CPU = "/sys/fs/cgroup/cpu"
QUOTA = f"(cat {CPU}/cpu.cfs_quota_us || cut -d' ' -f1 {CPU}.max) 2>/dev/null | sed 's/max/-1/'"

ROWS = [
    Row("network_mode=none", put("network_mode", "bridge"), CONNECT, "101", "111", judged=True),
    Row("cap_drop=ALL", drop("cap_drop"), STATUS.format("CapBnd"), "00000000000000e0", "00000000a80425fb"),
    Row(
        "cap_add only three",
        put("cap_add", ["SYS_ADMIN", "SETUID", "SETGID", "KILL"]),
        STATUS.format("CapBnd"),
        "00000000000000e0",
        "00000000002000e0",
    ),
    Row("no-new-privileges", drop("security_opt"), STATUS.format("NoNewPrivs"), "1", "0", judged=True),
    Row(
        "default seccomp",
        put("security_opt", ["no-new-privileges:true", "seccomp=unconfined"]),
        USERNS,
        "refused",
        "made",
        judged=True,
    ),
    Row(
        "read_only",
        put("read_only", False),
        "(echo x > /var/tmp/x) 2>/dev/null && echo written || echo refused",
        "refused",
        "written",
        judged=True,
    ),
    Row("tmpfs size", tmpfs_without("size="), BIG, "refused", "written", judged=True),
    Row(
        "tmpfs nr_inodes",
        tmpfs_without("nr_inodes="),
        MKDIRS,
        "OSError: [Errno 28] No space left on device: 'd19999'",
        "all made",
        judged=True,
    ),
    Row("tmpfs nosuid", tmpfs_without("nosuid"), MOUNT.format("nosuid"), "1", "0"),
    Row("tmpfs nodev", tmpfs_without("nodev"), MOUNT.format("nodev"), "1", "0"),
    Row("pids_limit", drop("pids_limit"), SPAWN, "", "200"),
    Row("mem_limit", without_limits, ALLOCATE, "", "600"),
    Row("nano_cpus", drop("nano_cpus"), QUOTA, "100000", "-1"),
    Row("ulimits", drop("ulimits"), "[ $(ulimit -n) -le 1024 ] && echo low || echo high", "low", "high"),
    Row("shm_size", drop("shm_size"), "df -m /dev/shm | tail -1 | tr -s ' ' | cut -d' ' -f2", "16", "64"),
    Row("oom_score_adj", drop("oom_score_adj"), "cat /proc/1/oom_score_adj", "500", "0"),
    Row("dns", drop("dns"), "grep -c 127.0.0.1 /etc/resolv.conf", "1", "0"),
    Row(
        "no binds",
        put("mounts", [Mount("/mnt", "/usr/share", "bind", read_only=True)]),
        "grep -c ' /mnt ' /proc/self/mountinfo",
        "0",
        "1",
        judged=True,
    ),
    Row("hostname", hostname, "cat /etc/hostname | sed 's/[0-9a-f]\\{12\\}/an id/'", "box", "an id"),
]
# Flags whose effect the agent cannot see: asserted on the host by the tests below, or not there to confine it.
ELSEWHERE = set("privileged log_config auto_remove memswap_limit ipc_mode dns_search init runtime tmpfs".split())


@contextmanager
def box_with(
    weaken: Callable[[Options, Options], None], monkeypatch: pytest.MonkeyPatch, judge: bool
) -> Iterator[DockerSandbox]:
    """A box whose options were changed; without the self-check unless `judge`."""

    def weakened(*arguments: Any, **named: Any) -> tuple[Options, Options]:
        container, host = hardening.container_options(*arguments, **named)
        container["network_disabled"] = False  # what it takes away is not there to be weakened
        weaken(container, host)
        return container, host

    with monkeypatch.context() as patch:
        patch.setattr(backend, "container_options", weakened)
        if not judge:
            patch.setattr(hardening, "judge", lambda *_: None)
        with DockerSandbox.start(limits=Limits()) as box:
            yield box


def seen(box: DockerSandbox, row: Row) -> str:
    result = box.exec(row.probe, timeout=20)
    return result.output.strip() if result.status == "ok" else ""


@pytest.mark.parametrize("row", ROWS, ids=[row.flag for row in ROWS])
def test_flag_removal_turns_its_probe_red(
    row: Row, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    with box_with(lambda *_: None, monkeypatch, judge=True) as box:
        sound = seen(box, row)
    with box_with(row.weaken, monkeypatch, judge=False) as box:
        weak = seen(box, row)
    record_property("flag", (row.flag, sound or "(stopped)", weak or "(stopped)", "refuses" if row.judged else "-"))
    assert (sound, weak) == (row.sound, row.weak)


@pytest.mark.parametrize("row", [row for row in ROWS if row.judged], ids=[row.flag for row in ROWS if row.judged])
def test_self_check_refuses_a_box_without_the_flag(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitNotEnforced, match="self-check"), box_with(row.weaken, monkeypatch, judge=True):
        pass


def test_every_flag_is_in_the_table_or_accounted_for() -> None:
    container, host = hardening.container_options("i", "n", {}, Limits())
    in_table = set()
    for row in ROWS:
        changed_container, changed_host = hardening.container_options("i", "n", {}, Limits())
        row.weaken(changed_container, changed_host)
        in_table |= {key for key in host if changed_host.get(key) != host[key]}
        in_table |= {key for key in container if changed_container.get(key) != container[key]}
    assert set(host) - in_table <= ELSEWHERE, set(host) - in_table - ELSEWHERE
    assert len(ROWS) >= 18


def test_flags_that_only_the_host_sees_are_set_on_the_engine() -> None:
    with DockerSandbox.start() as box:
        found = box._engine.client.api.inspect_container(box.container)
    config = found["HostConfig"]
    assert config["LogConfig"]["Type"] == "none" and not found["LogPath"]
    assert config["AutoRemove"] is True and config["Privileged"] is False
    assert config["MemorySwap"] == config["Memory"]
    assert config["IpcMode"] == "private" and not config["Binds"] and not config["PortBindings"]
    assert found["Config"]["Healthcheck"] == {"Test": ["NONE"]}
    assert not [word for word in found["Config"]["Env"] if not word.startswith("PATH=")]
