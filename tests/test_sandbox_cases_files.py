"""Cases F (files) and D (determinism): reading and writing without tricks, snapshots that are exact."""

from __future__ import annotations

import hashlib
import os
import time

import pytest
from boxes import usable, within

from mini_rome.errors import SandboxFileError, SnapshotRefused
from mini_rome.sandbox import Limits, Sandbox, files_of_tar, initial_snapshot, make

pytest_plugins = ("box_fixtures",)


# -- F: files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["missing", "d", "d/..", "f/x", "loop", "", "a\0b", "/nowhere/x", "to-dir", "x" * 5000]
)
def test_case_F01_what_cannot_be_read_is_a_typed_error(box: Sandbox, path: str) -> None:
    box.exec("mkdir d; echo x > f; ln -s loop loop; ln -s d to-dir")
    before = set(os.listdir("/tmp"))
    with within(2.2), pytest.raises(SandboxFileError):
        box.read(path)
    assert {name for name in set(os.listdir("/tmp")) - before if "mini-rome" in name} == set()
    assert usable(box)


@pytest.mark.docker
@pytest.mark.parametrize(
    "path",
    ["secret", "fifo", "socket", "/dev/zero", "/dev/tty", "/dev/stdin", "/proc/kmsg", "/proc/self/mem",
     "/proc/1/environ", "to-zero", "/proc/1/fd/0", "/dev/full"],
)
def test_case_F01_special_files_are_refused_at_once(tools_box: Sandbox, path: str) -> None:
    tools_box.exec("echo x > secret; chmod 0 secret; mkfifo fifo; ln -s /dev/zero to-zero; ln -s fifo to-fifo")
    tools_box.exec("python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'")
    with within(2.2), pytest.raises(SandboxFileError):
        tools_box.read(path)
    assert usable(tools_box)


def test_case_F01_the_read_limit_is_exact(box: Sandbox) -> None:
    limit = box.limits.read_bytes
    box.write("f", b"x" * limit)
    assert len(box.read("f")) == limit
    box.write("f", b"x" * (limit + 1))
    with pytest.raises(SandboxFileError, match=str(limit)):
        box.read("f")


@pytest.mark.docker
def test_case_F03_large_files_round_trip() -> None:
    data = os.urandom(1 << 20) * 50
    with make("docker", limits=Limits(disk_mb=120, memory_mb=512, read_bytes=60 << 20)) as box:
        box.write("big", data)
        digest = box.exec("sha256sum big").output.split()[0]
        assert digest == hashlib.sha256(data).hexdigest()
        assert box.read("big") == data


@pytest.mark.docker
@pytest.mark.parametrize(
    ("command", "code"), [("sleep 1", 0), ("exit 7", 7), ("head -c 1 >/dev/null", 0), ("exec <&-", 0)]
)
def test_case_F03_stdin_that_nobody_reads_does_not_block(docker_box: Sandbox, command: str, code: int) -> None:
    with within(4):
        result = docker_box.exec(command, timeout=5, stdin=b"x" * 5_000_000)
    assert (result.exit_code, result.status) == (code, "ok")
    assert docker_box.exec("wc -c", stdin=b"y" * 5_000_000).output == "5000000\n"
    assert usable(docker_box)


def test_case_F04_what_is_written_is_really_there(box: Sandbox) -> None:
    box.write("deep/er/f", "text\n")
    box.write("/tmp/t", b"\x00\xff")
    assert box.exec("cat deep/er/f; wc -c < /tmp/t").output.split() == ["text", "2"]
    assert box.read("deep/er/f") == b"text\n" and box.read("/tmp/t") == b"\x00\xff"
    assert files_of_tar(box.snapshot().tar) == {"deep/er/f": b"text\n"}


@pytest.mark.docker
def test_case_F04_also_with_a_writable_root() -> None:
    from mini_rome.sandbox.docker import DockerSandbox
    from mini_rome.sandbox.hardening import ROOT_TASK

    with DockerSandbox.start(profile=ROOT_TASK) as box:
        box.write("f", "text\n")
        assert box.exec("cat /app/f").output == "text\n" and files_of_tar(box.snapshot().tar) == {"f": b"text\n"}
        box.restore(initial_snapshot({"g": "other\n"}))
        assert box.exec("ls; cat g").output == "g\nother\n"


@pytest.mark.parametrize(
    "name", ["-rf", "a b", "--help", "*", "$(x)", "`x`", "'", '"', "é", "e\u0301", ".hidden", "a;b"]
)
def test_case_F05_any_name_is_the_right_file(box: Sandbox, name: str) -> None:
    box.write(name, f"I am {name}\n")
    assert box.read(name) == f"I am {name}\n".encode()
    assert files_of_tar(box.snapshot().tar) == {name: f"I am {name}\n".encode()}
    assert box.exec("ls -A | wc -l").output.strip() == "1"


@pytest.mark.docker
@pytest.mark.parametrize("name", ["a\nb", "a\\nb", "\x01", "\udcff", "x" * 255, "a\rb", "日本", "😀"])
def test_case_F05_odd_bytes_in_names(docker_box: Sandbox, name: str) -> None:
    docker_box.write(name, "x")
    snapshot = docker_box.snapshot()
    assert files_of_tar(snapshot.tar) == {name: b"x"}
    docker_box.restore(snapshot)
    assert docker_box.read(name) == b"x" and docker_box.snapshot().tree_hash == snapshot.tree_hash


@pytest.mark.parametrize(
    "path", ["d", "d/", "f/under", "out/x", "../etc/x", "/etc/x", "/x", "..", ".", "/app", "out"]
)
def test_case_F05_wrong_targets_are_typed_errors(box: Sandbox, path: str) -> None:
    box.exec("mkdir d; echo x > f; ln -s /etc out")
    before = box.snapshot().tree_hash
    with pytest.raises(SandboxFileError):
        box.write(path, "x")
    assert box.snapshot().tree_hash == before
    assert "x" not in box.exec("ls /etc 2>/dev/null | grep -w x").output


def test_case_F05_a_link_inside_is_followed(box: Sandbox) -> None:
    box.exec("mkdir real; ln -s real link")
    box.write("link/f", "x\n")
    assert box.read("real/f") == b"x\n"


def test_case_F05_a_written_script_runs(box: Sandbox) -> None:
    box.write("x.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    assert box.exec("./x.sh").output == "ran\n"
    box.write("x.sh", "#!/bin/sh\necho again\n", mode=0o755)
    assert box.exec("cd /; /app/x.sh").output == "again\n"


# -- D: determinism and snapshots ------------------------------------------------------------------------------------

TREE = (
    "mkdir -p a/empty b; echo one > a/one; echo two > 'b/t w o'; chmod 640 a/one; "
    "ln -s ../a/one b/link; ln -s nowhere dead"
)


def test_case_D01_a_pooled_box_is_as_a_fresh_one(backend: str) -> None:
    fresh, pooled = [], []
    look = "pwd; env | sort; ls -la /app /tmp /home/agent; hostname; umask; ulimit -n; ls /dev/shm 2>/dev/null"
    start = initial_snapshot({"a/note": "hello\n", "run.sh": "#!/bin/sh\n"})
    for _ in range(3):
        with make(backend) as box:
            box.restore(start)
            fresh.append((_observed(box, look), box.snapshot().tree_hash))
    with make(backend) as box:
        for _ in range(10):
            box.reset()
            box.restore(start)
            pooled.append((_observed(box, look), box.snapshot().tree_hash))
            box.exec("export X=1; cd /tmp; echo x > t; echo y > /home/agent/.bashrc; rm -rf /app/*")
            box.exec("mkdir -p /app/q/w; sleep 9 & echo 1 > /tmp/-rf")
            box.exec("echo z > /dev/shm/z; mkdir -p /tmp/d/e/f; chmod 000 /app/q; umask 0; ln -s / /app/root")
    assert set(fresh) == set(pooled) and len(set(fresh)) == 1
    assert fresh[0][1] == start.tree_hash


def _observed(box: Sandbox, command: str) -> str:
    """Output without sizes of folders, which are the kernel's, not the tree's."""
    lines = box.exec(command).output.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("d", "total")))


@pytest.mark.docker
def test_case_D01_ipc_left_behind_makes_a_box_unfit(tools_box: Sandbox) -> None:
    made = tools_box.exec("ipcmk -M 100 >/dev/null && echo made")
    if made.output == "made\n":
        with pytest.raises(SandboxFileError, match="IPC"):
            tools_box.reset()
        assert not tools_box.alive


def test_case_D02_restore_is_exact(box: Sandbox) -> None:
    box.exec(TREE + "; cd b; export A='x y'")
    snapshot = box.snapshot()
    assert snapshot.cwd == "/app/b" and dict(snapshot.env) == {"A": "x y"} and snapshot.resumable
    box.exec("rm -rf /app/a; echo junk > junk; cd /; export A=changed B=new; chmod 700 /app/b; mkdir /app/c")
    assert box.snapshot().tree_hash != snapshot.tree_hash
    box.restore(snapshot)
    again = box.snapshot()
    assert (again.tree_hash, again.cwd, dict(again.env)) == (snapshot.tree_hash, snapshot.cwd, dict(snapshot.env))
    assert again.tar == snapshot.tar
    assert box.exec("pwd; echo $A$B; cat link").output == "/app/b\nx y\none\n"


@pytest.mark.docker
def test_case_D02_both_backends_give_the_same_hash() -> None:
    hashes = []
    for backend in ("sim", "docker"):
        with make(backend) as box:
            box.exec(TREE)
            hashes.append(box.snapshot().tree_hash)
    assert hashes[0] == hashes[1]


def test_case_D02_replay_of_the_steps_gives_the_snapshot(box: Sandbox) -> None:
    steps = ["mkdir d; cd d", "echo a > x; export N=3", "cat x x > y; cd ..", "rev d/y > d/z; rm d/x"]
    for step in steps:
        box.exec(step)
    snapshot = box.snapshot()
    box.reset()
    for step in steps:
        box.exec(step)
    again = box.snapshot()
    assert (again.tree_hash, again.cwd, again.env) == (snapshot.tree_hash, snapshot.cwd, snapshot.env)
    box.exec("echo more >> d/z")
    assert box.snapshot().tree_hash != snapshot.tree_hash


@pytest.mark.docker
def test_case_D02_modes_links_and_times_survive(docker_box: Sandbox) -> None:
    docker_box.exec(f"{TREE}; ln a/one hard; chmod 0 'b/t w o'; chmod 1777 b; chmod 4755 hard")
    docker_box.exec("touch -d @1000000000 a/one; chmod 500 a")
    look = "find . -exec stat -c '%N %a %F %h %Y' {} + | sort"
    before, snapshot = docker_box.exec(look).output, docker_box.snapshot()
    docker_box.exec("chmod 700 a; rm -rf *")
    docker_box.restore(snapshot)
    assert docker_box.exec(look).output == before
    docker_box.exec("chmod 700 a; echo both > hard")
    assert docker_box.read("a/one") == b"both\n"
    assert docker_box.snapshot().tree_hash != snapshot.tree_hash


@pytest.mark.docker
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("mkfifo p", "neither file"), ("head -c 40000000 /dev/zero > f", "limit of a snapshot"),
        ("mkdir -p $(seq -s ' ' 5001)", "more than 5000"), ("chmod 000 /app", "cannot look inside"),
        ("truncate -s 4G sparse", "limit of a snapshot"),
        ("d=$(printf '%0200d' 0); for i in $(seq 25); do mkdir $d; cd $d; done", "too long"),
    ],
)
def test_case_D02_beyond_the_caps_is_refused_and_cleaned(docker_box: Sandbox, command: str, reason: str) -> None:
    assert docker_box.exec(command, timeout=30).status == "ok"
    with pytest.raises(SnapshotRefused, match=reason):
        docker_box.snapshot()
    docker_box.reset()
    assert docker_box.exec("ls -A; stat -c %a .").output == "755\n" and usable(docker_box)


def test_case_D02_branches_share_nothing(backend: str) -> None:
    with make(backend) as first, make(backend) as second:
        first.exec("echo base > f")
        snapshot = first.snapshot()
        second.restore(snapshot)
        first.exec("echo one >> f")
        second.exec("echo two >> f")
        assert (first.read("f"), second.read("f")) == (b"base\none\n", b"base\ntwo\n")


def test_case_D02_a_long_prefix_restores_as_fast_as_a_short_one(backend: str) -> None:
    with make(backend) as box:
        states = {}
        for steps in (1, 20):
            box.restore(initial_snapshot({f"n{i}": "x\n" for i in range(20)}))
            for step in range(steps):
                box.exec(f"rev n{step} > m{step % 2}")
            states[steps] = box.snapshot()
        times: dict[int, list[float]] = {1: [], 20: []}
        for _ in range(15):  # in turns, so that a busy machine slows both
            for steps, snapshot in states.items():
                times[steps].append(_timed(lambda snapshot=snapshot: box.restore(snapshot)))
    assert min(times[20]) <= 1.5 * min(times[1]) + 0.001


def _timed(action) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
