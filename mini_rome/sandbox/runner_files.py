"""The file work of PID 1, done in children that are the agent: what it may not touch, they cannot.

C modules and `os` only: see runner.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mini_rome.sandbox.runner_base import CHUNK, Refused, pack, read_text, unpack, write_all

# All that the agent can write to, with the modes of a new box.
TOPS = (
    (b"/app", 0o755), (b"/home/agent", 0o755), (b"/tmp", 0o1777), (b"/dev/shm", 0o1777), (b"/dev/mqueue", 0o1777),
)


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
            f"Mounts {mounts()}",
        ]
    ).encode()


def mounts() -> str:
    """`place:ro` or `place:rw` of all that is mounted outside /proc, /sys and /dev."""
    found = set()
    for line in read_text("/proc/self/mountinfo").decode("utf-8", "surrogateescape").splitlines():
        place, options = line.split()[4:6]
        if place.split("/")[1] not in ("proc", "sys", "dev"):
            found.add(f"{place}:{options[:2]}")
    return ",".join(sorted(found))


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
        head = pack(relative, kind, *numbers, target) + len(data).to_bytes(4, "big")
        write((len(head) + len(data)).to_bytes(4, "big") + head)
        write(data)


def contents(path: bytes, mode: int, size: int, room: int) -> bytes:
    """A file of the agent's, whatever its mode, up to the room left."""
    if size > room:
        raise Refused("the work dir holds more bytes than the limit of a snapshot")
    if not mode & 0o400:
        os.chmod(path, mode & 0o7777 | 0o400)
    end = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not mode & 0o400:
        os.fchmod(end, mode & 0o7777)
    data = os.read(end, size)
    while len(data) <= room and (more := os.read(end, CHUNK)):  # it grew meanwhile
        data += more
    os.close(end)
    return data


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
