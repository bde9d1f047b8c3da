"""What every part of PID 1 uses: frames, readings of /proc and of the kernel's counters, becoming the agent.

Frame: 4 bytes length, 8 bytes nonce, 1 byte kind, payload; a reply carries its request's nonce. Payloads are lists of
byte strings, each with a 4-byte length. C modules and `os` only: see runner.py.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` imports enum: 10 ms a box
import fcntl
import os

CHUNK = 1 << 18


class Refused(Exception):
    """An operation that cannot be done; its text goes to the caller."""


def pack(*fields: bytes) -> bytes:
    """Byte strings -> one payload."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def unpack(payload: bytes | bytearray) -> list[bytes]:
    """One payload -> list of byte strings.

    >>> unpack(pack(b"a", b"", b"xyz"))
    [b'a', b'', b'xyz']
    """
    fields, at, view = [], 0, memoryview(payload)
    while at < len(payload):
        end = at + 4 + int.from_bytes(view[at : at + 4], "big")
        fields.append(bytes(view[at + 4 : end]))
        at = end
    return fields


def frame(nonce: bytes, kind: bytes, payload: bytes = b"") -> bytes:
    """One frame, as it goes over the wire."""
    return len(payload).to_bytes(4, "big") + nonce + kind + payload


def read_exactly(end: int, size: int) -> bytearray:
    """`size` bytes; the end of stdin is the end of the box."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = os.readv(end, [view])
        if got == 0:
            os._exit(0)
        view = view[got:]
    return data


def read_some(end: int, size: int = CHUNK) -> bytes | None:
    """Bytes, b"" at the end, None when nothing is there now."""
    try:
        return os.read(end, size)
    except BlockingIOError:
        return None


def write_all(end: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(end, view) :]


def widen(end: int) -> None:
    """A pipe of 1 MB: fewer turns for large transfers. The kernel may refuse; it then stays as it is."""
    try:
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 1 << 20)
    except OSError:
        pass


def kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def alone() -> bool:
    """No process but PID 1, not even a zombie: one call, so that nothing that forks slips through."""
    try:
        os.kill(-1, 0)
    except ProcessLookupError:
        return True
    return False


def exit_code(status: int) -> int:
    """A wait status as bash gives it: 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def processes() -> dict[int, int]:
    """{process id: its parent's}, without PID 1 and without zombies."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            state = read_text(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if state and state[0] not in (b"Z", b"X"):
                found[int(name)] = int(state[1])
    return found


def strays(spare: frozenset[int]) -> set[int]:
    """Processes that are neither in `spare` nor descend from one that is."""
    parents = processes()
    found = set()
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor not in spare:
            ancestor = parents[ancestor]
        if ancestor not in spare:
            found.add(pid)
    return found


def command_line(pid: int) -> bytes:
    """Arguments joined by spaces, at most 256 bytes; `bash` for the step's own shell and its forks."""
    text = read_text(f"/proc/{pid}/cmdline", 4096).rstrip(b"\0")
    if text.startswith(b"bash\0-c\0builtin echo 1000 >/proc/self/oom"):
        return b"bash"
    return text.replace(b"\0", b" ")[:256]


def read_text(path: str, size: int = 65536) -> bytes:
    """A small file of /proc or /sys; empty where there is none."""
    try:
        end = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(end, size)
    except OSError:
        return b""
    finally:
        os.close(end)


def drop(uid: int) -> None:
    """In a child: become the agent, for good; first in line when memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGCHLD, _signal.SIGALRM, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)


class Counters:
    """Kernel counters of this box, cgroup v1 or v2: OOM kills, refused forks, packets without a route, CPU time."""

    def __init__(self) -> None:
        cgroup = "/sys/fs/cgroup/"
        self.ip, self.ip6 = open_first("/proc/net/snmp"), open_first("/proc/net/snmp6")
        self.memory = open_first(cgroup + "memory/memory.oom_control", cgroup + "memory.events")
        self.pids = open_first(cgroup + "pids/pids.events", cgroup + "pids.events")
        self.cpu = open_first(cgroup + "cpuacct/cpuacct.usage", cgroup + "cpu.stat")
        names = read_again(self.ip).partition(b"\n")[0].split()
        self.no_route = names.index(b"OutNoRoutes") if b"OutNoRoutes" in names else -1
        self.last = self.read()

    def read(self) -> dict[str, int]:
        """All of them now."""
        ip = read_again(self.ip).split(b"\n", 2)[1].split() if self.no_route >= 0 else []
        cpu = read_again(self.cpu).strip()
        return {
            "oom": number_after(b"oom_kill", read_again(self.memory)),
            "pids": number_after(b"max", read_again(self.pids)),
            "no_route": int(ip[self.no_route] if ip else 0) + number_after(b"Ip6OutNoRoutes", read_again(self.ip6)),
            "cpu_ns": int(cpu) if cpu.isdigit() else 1000 * number_after(b"usage_usec", cpu),
        }

    def since(self) -> dict[str, int]:
        """By how much each grew since the last call."""
        before, self.last = self.last, self.read()
        return {name: self.last[name] - before[name] for name in before}


def open_first(*paths: str) -> int:
    """A descriptor of the first of these files that is there, else -1."""
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError:
            pass
    return -1


def read_again(end: int) -> bytes:
    """What a file of the kernel's says now."""
    try:
        return os.pread(end, 65536, 0)
    except OSError:
        return b""


def number_after(name: bytes, text: bytes) -> int:
    """The number beside `name`, at the start of a line; 0 where it is not there.

    >>> number_after(b"oom_kill", b"oom_kill_disable 0\\noom_kill 3\\n"), number_after(b"max", b"")
    (3, 0)
    """
    rest = (b"\n" + text).partition(b"\n" + name + b" ")[2].split(None, 1)
    return int(rest[0]) if rest else 0


def leftovers() -> int:
    """IPC objects that outlive their processes and no file operation removes."""
    return sum(max(0, len(read_text(f"/proc/sysvipc/{kind}").splitlines()) - 1) for kind in ("shm", "sem", "msg"))
