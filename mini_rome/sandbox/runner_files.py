"""The lower half of PID 1: framing, readings of /proc and /sys, and the file work done in children as the agent.

Frame: 4 bytes length, 8 bytes nonce, 1 byte kind, payload; a reply carries its request's nonce. Payloads are lists of
byte strings, each with a 4-byte length. C modules and `os` only: see runner.py.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence

CHUNK = 1 << 18
# All that the agent can write to, with the modes of a new box.
TOPS = (
    (b"/app", 0o755), (b"/home/agent", 0o755), (b"/tmp", 0o1777), (b"/dev/shm", 0o1777), (b"/dev/mqueue", 0o1777),
)


class Refused(Exception):
    """An operation that cannot be done; its text goes to the caller."""


def pack(*fields: bytes) -> bytes:
    """Byte strings -> one payload."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def unpack(payload: bytes) -> list[bytes]:
    """One payload -> list of byte strings.

    >>> unpack(pack(b"a", b"", b"xyz"))
    [b'a', b'', b'xyz']
    """
    fields, at = [], 0
    while at < len(payload):
        end = at + 4 + int.from_bytes(payload[at : at + 4], "big")
        fields.append(payload[at + 4 : end])
        at = end
    return fields


def frame(nonce: bytes, kind: bytes, payload: bytes = b"") -> bytes:
    """One frame, as it goes over the wire."""
    return len(payload).to_bytes(4, "big") + nonce + kind + payload


def read_exactly(end: int, size: int) -> bytes:
    """`size` bytes; the end of stdin is the end of the box."""
    data = bytearray()
    while len(data) < size:
        part = os.read(end, min(CHUNK, size - len(data)))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


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
    if text.startswith(b"bash\0-c\0builtin read -r -u 200 __mr_cwd"):
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


def number_after(name: bytes, *paths: str) -> int:
    """The number beside `name` in the first of these files that has it."""
    for path in paths:
        for line in read_text(path).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return int(words[1])
    return 0


def counters() -> dict[str, int]:
    """Kernel counters of this box, cgroup v1 or v2: OOM kills, refused forks, packets without a route, CPU time."""
    cgroup = "/sys/fs/cgroup/"
    lines = [line.split() for line in read_text("/proc/net/snmp").splitlines() if line.startswith(b"Ip:")]
    ip = dict(zip(lines[0], lines[1], strict=True)) if len(lines) == 2 else {}
    usage = read_text(cgroup + "cpuacct/cpuacct.usage").strip()
    return {
        "oom": number_after(b"oom_kill", cgroup + "memory/memory.oom_control", cgroup + "memory.events"),
        "pids": number_after(b"max", cgroup + "pids/pids.events", cgroup + "pids.events"),
        "no_route": int(ip.get(b"OutNoRoutes", 0)) + number_after(b"Ip6OutNoRoutes", "/proc/net/snmp6"),
        "cpu_ns": int(usage or 1000 * number_after(b"usage_usec", cgroup + "cpu.stat")),
    }


# -- file work: in children, as the agent ----------------------------------------------------------------------------


def self_check() -> bytes:
    """Facts for the host to judge, one `name value` a line."""
    wanted = ("CapEff", "CapPrm", "CapInh", "NoNewPrivs", "Seccomp", "Uid", "Groups")
    status = read_text("/proc/self/status").decode().splitlines()
    facts = [line.replace(":", "", 1) for line in status if line.partition(":")[0] in wanted]
    routes = [line.split()[0] for line in read_text("/proc/net/route").decode().splitlines()[1:]]
    routes += [line.split()[-1] for line in read_text("/proc/net/ipv6_route").decode().splitlines()]
    disk = os.statvfs("/app")
    return "\n".join(
        [
            *facts,
            f"ReadOnly {int(bool(os.statvfs('/').f_flag & os.ST_RDONLY))}",
            f"Routes {sum(route != 'lo' for route in routes)}",
            f"Disk {disk.f_blocks * disk.f_frsize}",
            f"Inodes {disk.f_files}",
        ]
    ).encode()


def read_file(path: bytes, limit: int, write: Callable[[bytes], None]) -> None:
    """One regular file; anything else is refused before it is opened, and again after."""
    check_regular(os.stat(path).st_mode)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    check_regular(os.fstat(end).st_mode)
    total = 0
    while chunk := os.read(end, CHUNK):
        total += len(chunk)
        if total > limit:
            raise Refused(f"more than {limit} bytes, the limit of a read")
        write(chunk)


def check_regular(mode: int) -> None:
    kind = mode & 0o170000
    if kind != 0o100000:
        names = {0o040000: "a directory", 0o010000: "a fifo", 0o140000: "a socket"}
        raise Refused(f"is {names.get(kind, 'a device')}, not a regular file")


def write_file(path: bytes, mode: int, roots: Sequence[bytes], data: bytes) -> None:
    """One file below `roots`, its parents made where missing; half a file is never left behind."""
    real = os.path.realpath(path)
    if path.endswith(b"/") or os.path.isdir(real):
        raise Refused("is a directory, not a regular file")
    if not any(real.startswith(root + b"/") for root in roots):
        raise Refused(f"leads to {real.decode('utf-8', 'replace')}, outside {b', '.join(roots).decode()}")
    os.makedirs(os.path.dirname(real), exist_ok=True)
    end = os.open(real, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    check_regular(os.fstat(end).st_mode)
    try:
        os.ftruncate(end, 0)
        write_all(end, data)
        os.fchmod(end, mode)
    except OSError:
        os.unlink(real)
        raise


def walk(top: bytes, max_bytes: int, max_files: int, write: Callable[[bytes], None]) -> None:
    """Every node below `top` as a packed record: path, kind, mode, mtime, link target, contents."""
    first: dict[tuple[int, int], bytes] = {}
    count = total = 0
    pending = [b"."]
    while pending:
        relative = pending.pop()
        path = top if relative == b"." else top + b"/" + relative
        info = os.lstat(path)
        kind = {0o100000: b"f", 0o040000: b"d", 0o120000: b"l"}.get(info.st_mode & 0o170000)
        count += 1
        if kind is None:
            raise Refused(f"{relative.decode('utf-8', 'replace')!r} is neither file, directory nor link")
        if count > max_files:
            raise Refused(f"the work dir holds more than {max_files} files and directories")
        data, target = b"", os.readlink(path) if kind == b"l" else b""
        if kind == b"f" and info.st_nlink > 1 and first.setdefault((info.st_dev, info.st_ino), relative) != relative:
            kind, target = b"h", first[info.st_dev, info.st_ino]
        if kind == b"f":
            data = contents(path, info.st_mode, info.st_size, max_bytes - total)
            total += len(data)
        if kind == b"d":
            pending += [name if relative == b"." else relative + b"/" + name for name in names(path, info.st_mode)]
        numbers = (b"%d" % (info.st_mode & 0o7777), b"%d" % max(0, int(info.st_mtime)))
        write(pack(pack(relative, kind, *numbers, target, data)))


def contents(path: bytes, mode: int, size: int, room: int) -> bytes:
    """A file of the agent's, whatever its mode, up to the room left."""
    if size > room:
        raise Refused("the work dir holds more bytes than the limit of a snapshot")
    if not mode & 0o400:
        os.chmod(path, mode & 0o7777 | 0o400)
    end = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not mode & 0o400:
        os.fchmod(end, mode & 0o7777)
    data = bytearray()
    while len(data) <= room and (chunk := os.read(end, CHUNK)):
        data += chunk
    os.close(end)
    return bytes(data)


def names(path: bytes, mode: int) -> list[bytes]:
    """Entries of a directory, sorted backwards as a stack wants them."""
    if mode & 0o500 != 0o500:
        raise Refused(f"{path.decode('utf-8', 'replace')!r} has mode {mode & 0o7777:o}: its owner cannot look inside")
    return sorted(os.listdir(path), reverse=True)


def wipe(top: bytes) -> None:
    """Empty a directory. Nested ones are moved up and emptied there: no path gets long, no recursion deep."""
    if os.stat(top).st_uid == os.getuid():
        os.chmod(top, 0o700)
    while found := [os.path.join(top, name) for name in os.listdir(top)]:
        for path in found:
            if not is_directory(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in [os.path.join(path, name) for name in os.listdir(path)]:
                if is_directory(inner):
                    os.chmod(inner, 0o700)
                    os.rename(inner, os.path.join(top, b".wipe-" + os.urandom(8).hex().encode()))
                else:
                    os.unlink(inner)
            os.rmdir(path)


def is_directory(path: bytes) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def rebuild(entries: Sequence[bytes]) -> None:
    """All that the agent can write to emptied; then the entries, their modes and times last."""
    for top, mode in TOPS:
        if os.path.isdir(top):
            wipe(top)
            if os.stat(top).st_uid == os.getuid():
                os.chmod(top, mode)
    os.chdir(b"/app")
    late = []
    for entry in entries:
        path, kind, permissions, changed, target, data = unpack(entry)
        place(path, kind, target, data)
        late.append((path, kind, int(permissions), int(changed)))
    for path, kind, mode, mtime in reversed(late):
        if kind in (b"f", b"d"):
            os.chmod(path, mode)
        if kind != b"h":
            os.utime(path, (mtime, mtime), follow_symlinks=False)


def place(path: bytes, kind: bytes, target: bytes, data: bytes) -> None:
    """One entry into the empty work dir, readable by none but the agent until all are there."""
    if kind == b"d":
        if path != b".":
            os.mkdir(path, 0o700)
    elif kind == b"f":
        end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        write_all(end, data)
        os.close(end)
    elif kind == b"l":
        os.symlink(target, path)
    else:
        os.link(target, path, follow_symlinks=False)


def leftovers() -> int:
    """IPC objects that outlive their processes and no file operation removes."""
    return sum(max(0, len(read_text(f"/proc/sysvipc/{kind}").splitlines()) - 1) for kind in ("shm", "sem", "msg"))
