"""What must hold of assignment 5: 22 points here, 4 for the test in given.py and bugs.py."""

import io
import random
import tarfile
from typing import Any

from mini_rome.course.paper import Property

HOURS = 4
ALLOWED = ("types", "errors")


def ordinary(rng: random.Random) -> list[tuple[Any, ...]]:
    n, code = rng.randrange(10_000), rng.randrange(1, 100)
    return [
        (f"echo out {n}; echo err {n} >&2; echo end", 5, 1000), (f"echo {n}; exit {code}", 5, 1000),
        ("cat; echo no input", 5, 1000), (f"printf '%s' {n}; kill -9 $$", 5, 1000), ("printf '\\377\\000x'", 5, 1000),
    ]  # fmt: skip


def timeouts(rng: random.Random) -> list[tuple[Any, ...]]:
    n = rng.randrange(10_000)
    return [
        (f"echo {n}; (sleep 31 &) ; setsid sleep 32 & sleep 33", 0.6, 1000),
        (f"trap '' TERM; echo {n}; sleep 34", 0.5, 99),
    ]


def background(rng: random.Random) -> list[tuple[Any, ...]]:
    n = rng.randrange(10_000)
    return [(f"sleep 35 & setsid sleep 36 & echo {n}; exit 4", 3, 1000)]


def floods(rng: random.Random) -> list[tuple[Any, ...]]:
    n = rng.randrange(100, 1000)
    return [(f"yes {n}", 3, 5000 + n), (f"yes {n} | head -c {2000 + n}", 3, 2000 + n), (f"seq {n} 999999", 3, 777)]


def outputs(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(rng.randbytes(size), cap) for size, cap in ((0, 4), (7, 7), (8, 7), (100, 6), (50, 1), (9, 0), (40, 39))]


def member(
    archive: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    archive.addfile(info, io.BytesIO(data))


def archive_of(members: list[tuple[Any, ...]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for each in members:
            member(archive, *each)
    return stream.getvalue()


def honest_archives(rng: random.Random) -> list[tuple[Any, ...]]:
    data = [rng.randbytes(rng.randint(0, 40)) for _ in range(4)]
    plain = [("./", b"", tarfile.DIRTYPE), ("./a", data[0]), ("d/b", data[1]), ("./d//c", data[2])]
    links = [*plain, ("h", b"", tarfile.LNKTYPE, "./a"), ("s", b"", tarfile.SYMTYPE, "/etc/passwd"), ("a", data[3])]
    return [(archive_of(plain),), (archive_of(links),), (archive_of([]),)]


def hostile_archives(rng: random.Random) -> list[tuple[Any, ...]]:
    good = ("a", rng.randbytes(5))
    bad: list[tuple[Any, ...]] = [
        ("/app/a", b"x"), ("d/../../a", b"x"), ("f", b"", tarfile.FIFOTYPE), ("n", b"", tarfile.CHRTYPE),
        ("h", b"", tarfile.LNKTYPE, "later"), ("h", b"", tarfile.LNKTYPE, "../a"),
    ]  # fmt: skip
    return [(archive_of([good, each]),) for each in bad] + [(archive_of([good]),)]


def rewards(rng: random.Random) -> list[tuple[Any, ...]]:
    x = round(rng.random(), 3)
    return [
        ({"reward.txt": f" {x}\n".encode()},), ({"reward.json": f'{{"reward": {x}, "speed": 3}}'.encode()},),
        ({"reward.json": f'{{"accuracy": {x}, "note": "ok", "done": true}}'.encode(), "log": b"..."},),
        ({"reward.txt": b"1"},), ({"reward.txt": b"1e-1\n"},),
    ]  # fmt: skip


def forged(rng: random.Random) -> list[tuple[Any, ...]]:
    texts = [b"", b"true", b"nan", b"inf", b"1_0", b"1.5", b"-0.1", b"0.5 0.5", b"\xff1"]
    objects = [
        b"",
        b"[1]",
        b'{"reward": true}',
        b'{"reward": NaN}',
        b'{"reward": 1, "reward": 1}',
        b'{"a": 1, "b": 1}',
    ]
    made = [({"reward.txt": text},) for text in texts] + [({"reward.json": text},) for text in objects]
    made += [({},), ({"reward.txt": b"1", "reward.json": b'{"reward": 1}'},), ({"reward.txt": b"0.25"},)]
    return rng.sample(made, len(made))


ALIVE = "nothing that the command started is alive when run returns"
PROPERTIES = [
    Property("ordinary commands", 3, "run", ordinary, "output, status and exit code of a command that ends"),
    Property("timeout", 5, "run", timeouts, f"{ALIVE}: the deadline", alone=True, seconds=6),
    Property("background", 2, "run", background, f"{ALIVE}: what is left in the background", alone=True, seconds=3),
    Property("output cap", 3, "run", floods, "a flood is stopped at the cap, at once", alone=True, seconds=3),
    Property("two ends", 2, "ends", outputs, "what is kept has at most cap bytes, its head and its tail"),
    Property("honest archives", 2, "files_of", honest_archives, "regular files and hard links, by their clean paths"),
    Property("hostile archives", 2, "files_of", hostile_archives, "what could lead out of the work dir is refused"),
    Property("rewards", 1, "reward_of", rewards, "a number in [0, 1], from one file"),
    Property("forged rewards", 2, "reward_of", forged, "anything else is a VerifierError, never 0"),
]
