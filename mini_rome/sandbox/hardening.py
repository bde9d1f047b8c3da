"""What a box is allowed: the flags it is created with, and the check inside.

`container_options` is pure, so that a test can remove one flag at a time and see an attack case turn red.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docker.types import LogConfig, Mount, Ulimit

from mini_rome.errors import ConfigError, LimitNotEnforced
from mini_rome.sandbox.base import HOME, WORKDIR, Limits

HOSTNAME = "box"
HEADROOM_MB = 96  # memory for processes beside full tmpfs mounts, below which a box only dies of its own disk
TMP_MB, HOME_MB, SHM_MB = 64, 16, 16
SOCKET_FOLDER = "/run/model"  # where a native box sees the folder with its model proxy's socket
ENGINE_FILES = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/.containerenv"}  # engines mount these
RUNNER_CAPABILITIES = ("SETUID", "SETGID", "KILL")
# What apt, chown and services need, for evaluation of stock tasks only: an agent with these can tamper with its box.
ROOT_CAPABILITIES = (*RUNNER_CAPABILITIES, "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP", "SYS_CHROOT")
BOOT = (
    "import os\n"
    "def take(n):\n"
    "    data = b''\n"
    "    while len(data) < n:\n"
    "        part = os.read(0, n - len(data))\n"
    "        part or os._exit(0)\n"
    "        data += part\n"
    "    return data\n"
    "exec(take(int.from_bytes(take(4), 'big')))\n"
)


@dataclass(frozen=True)
class Profile:
    """Who the agent is inside. `root_task` is for stock tasks that change /etc, packages or services."""

    name: str = "agent"
    uid: int = 1000
    capabilities: tuple[str, ...] = RUNNER_CAPABILITIES
    read_only: bool = True
    private: tuple[str, ...] = ()  # empty folders that only root can enter: for a verifier's tests and reward
    network: str = "none"  # "bridge" for the verifier of a stock task alone, where --verifier-network asks for it
    socket_folder: str = ""  # on the host: the one exception to no binds, see `native`


AGENT = Profile()
ROOT_TASK = Profile("root_task", 0, ROOT_CAPABILITIES, read_only=False)
GRADER = replace(AGENT, name="grader")  # a student's submission: as hardened as an agent, in another image
GRADER_LIMITS = Limits(memory_mb=2048, raw_bytes=4 << 20, episode_s=3600.0, ttl_s=7200.0)


def native(folder: Path) -> Profile:
    """The profile of one native episode: AGENT, and the folder that holds only the socket of its model proxy,
    bound read-only. Only `native_box.py` makes boxes of this profile; no task and no option can ask for it."""
    return replace(AGENT, name="native", socket_folder=str(folder))


def container_options(
    image: str, name: str, labels: Mapping[str, str], limits: Limits, profile: Profile = AGENT,
    runtime: str | None = None, own_hosts: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of create_container, arguments of create_host_config) with every default of the hardening.

    With `own_hosts` the image brings /etc/hosts. The engine then makes no network at all, not even an empty one that
    holds that file: the box has the loopback that the runtime gives it, and starts in less than half the time.
    Raises LimitNotEnforced when the tmpfs mounts could outgrow the memory limit, ConfigError for a profile that has a
    bind and is not exactly `native`.
    """
    if (profile.socket_folder or profile.name == "native") and not (
        profile.socket_folder and profile == native(Path(profile.socket_folder))
    ):
        raise ConfigError(f"profile {profile.name!r}: a bind is for native episodes alone, with nothing else changed")
    tmpfs_mb = limits.disk_mb + TMP_MB + HOME_MB + SHM_MB
    if tmpfs_mb + HEADROOM_MB > limits.memory_mb:
        raise LimitNotEnforced(
            f"disk_mb={limits.disk_mb} with {tmpfs_mb - limits.disk_mb} MB for /tmp, home and shared memory and "
            f"{HEADROOM_MB} MB for processes is more than memory_mb={limits.memory_mb}: tmpfs counts as memory"
        )
    owner = f"uid={profile.uid},gid={profile.uid}"
    container = dict(
        image=image, name=name, labels=dict(labels), entrypoint=["/usr/bin/python3", "-I", "-S", "-c", BOOT],
        command=[], user="0:0", working_dir="/", hostname=HOSTNAME, environment={}, stdin_open=True, tty=False,
        detach=False, healthcheck={"test": ["NONE"]}, stop_signal="SIGKILL",
        network_disabled=own_hosts and profile.network == "none",
    )
    host = dict(
        network_mode=profile.network, cap_drop=["ALL"], cap_add=list(profile.capabilities),
        security_opt=["no-new-privileges:true"], read_only=profile.read_only, privileged=False, ipc_mode="private",
        tmpfs={
            WORKDIR: f"rw,exec,nosuid,nodev,size={limits.disk_mb}m,nr_inodes={limits.inodes},mode=0755,{owner}",
            HOME: f"rw,exec,nosuid,nodev,size={HOME_MB}m,nr_inodes=4096,mode=0755,{owner}",
            "/tmp": f"rw,exec,nosuid,nodev,size={TMP_MB}m,nr_inodes=8192,mode=1777",
            **{path: "rw,exec,nosuid,nodev,size=16m,nr_inodes=4096,mode=0700" for path in profile.private},
        },
        shm_size=f"{SHM_MB}m", pids_limit=limits.pids, mem_limit=f"{limits.memory_mb}m",
        memswap_limit=f"{limits.memory_mb}m", nano_cpus=int(limits.cpus * 1e9), oom_score_adj=500,
        ulimits=[Ulimit(name="nofile", soft=1024, hard=1024), Ulimit(name="core", soft=0, hard=0),
                 Ulimit(name="memlock", soft=65536, hard=65536)],
        log_config=LogConfig(type="none"), auto_remove=True, init=False, runtime=runtime,
        **({"dns": ["127.0.0.1"], "dns_search": ["."]} if profile.network == "none" else {}),
        **({"mounts": [Mount(SOCKET_FOLDER, profile.socket_folder, "bind", read_only=True)]}
           if profile.socket_folder else {}),
    )  # fmt: skip
    return container, host


def mounts_of(profile: Profile) -> str:
    """What is mounted in a box outside /proc, /sys and /dev, as `self_check` tells it.

    >>> mounts_of(AGENT)
    '/:ro,/app:rw,/home/agent:rw,/tmp:rw'
    """
    mounts = dict.fromkeys((WORKDIR, HOME, "/tmp", *profile.private), "rw")
    mounts["/"] = "ro" if profile.read_only else "rw"
    if profile.socket_folder:
        mounts[SOCKET_FOLDER] = "ro"
    return ",".join(f"{place}:{mounts[place]}" for place in sorted(mounts))


def judge(facts: str, limits: Limits, profile: Profile, runtime: str | None) -> None:
    """Compare what a process of the agent saw with what was asked for. Raises LimitNotEnforced naming a gap."""
    seen = dict(line.split(None, 1) for line in facts.splitlines() if len(line.split(None, 1)) == 2)
    wanted = {"NoNewPrivs": "1", "ReadOnly": str(int(profile.read_only))}
    if profile.network == "none":
        wanted["Routes"] = "0"
    if runtime is None:
        wanted["Seccomp"] = "2"
        wanted["Mounts"] = mounts_of(profile)
        seen["Mounts"] = ",".join(
            mount for mount in seen.get("Mounts", "").split(",") if mount.partition(":")[0] not in ENGINE_FILES
        )
    if profile.uid != 0:
        wanted |= {name: "0" * 16 for name in ("CapEff", "CapPrm", "CapInh")}
        wanted["Uid"] = "\t".join([str(profile.uid)] * 4)
    for name, value in wanted.items():
        if seen.get(name) != value:
            raise LimitNotEnforced(f"self-check inside the box: {name} is {seen.get(name)!r}, must be {value!r}")
    if abs(int(seen.get("Disk", 0)) - (limits.disk_mb << 20)) > 1 << 20 or int(seen.get("Inodes", 0)) > limits.inodes:
        raise LimitNotEnforced(
            f"self-check inside the box: /app has {seen.get('Disk')} bytes and {seen.get('Inodes')} inodes, must be "
            f"{limits.disk_mb << 20} and {limits.inodes}"
        )
