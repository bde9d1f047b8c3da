"""Speed of the docker backend against docker-py's exec_run and the `docker exec` command, in one run, as ratios.

    make bench-sandbox                     # about five minutes on 2 cores
    make bench-sandbox ARGS="--quick"      # a few samples of each, to see that it runs

Prints a table of claims (an inequality each, held or missed) and writes recipes/results/bench_sandbox.json. The
rivals run in a box of the same image with the same flags; their turns alternate with ours, so that a busy machine
slows both.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mini_rome.runs import provenance, write_json
from mini_rome.sandbox import Limits, Pool, Sandbox, images, initial_snapshot, make, reaper
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.engine import Engine, engine
from mini_rome.sandbox.hardening import AGENT, container_options

RESULTS = Path(__file__).resolve().parents[1] / "recipes" / "results" / "bench_sandbox.json"
COMMAND = "echo x"
TURNS = 4  # of each way, alternating, so that a machine that gets busy slows all of them
RUN = f"bench-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Claim:
    """One measured figure and the bound that the project claims for it."""

    name: str
    value: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def verdict(self) -> str:
        return "holds" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "missed"


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def p50(values: list[float]) -> float:
    return statistics.median(values)


def create(host: Engine) -> str:
    """A container with the flags of a box, made by the SDK alone; its id."""
    labels = reaper.labels(RUN, "bench", 600)
    options, config = flags(host, labels)
    api = host.client.api
    return api.create_container(**options, host_config=api.create_host_config(**config))["Id"]


def flags(host: Engine, labels: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flags of a box."""
    image, name = images.DEFAULT_IMAGE, f"{RUN}-{secrets.token_hex(4)}"
    return container_options(image, name, labels, Limits(), AGENT, host.runtime, host.own_hosts(image))


@contextmanager
def rival(host: Engine) -> Iterator[Any]:
    """A running container with the flags of a box, for exec by the SDK and the command line."""
    api = host.client.api
    options, config = flags(host, reaper.labels(RUN, "bench", 600))
    options |= {"entrypoint": ["/usr/bin/sleep", "600"]}
    made = api.create_container(**options, host_config=api.create_host_config(**config))["Id"]
    try:
        api.start(made)
        yield host.client.containers.get(made)
    finally:
        host.remove(made)


def by_sdk(container: Any) -> Callable[[], object]:
    return lambda: container.exec_run(["/bin/bash", "-c", COMMAND], user="1000:1000", workdir="/app")


def by_command_line(container: Any) -> Callable[[], object]:
    words = ["docker", "exec", "-u", "1000:1000", "-w", "/app", container.id, "/bin/bash", "-c", COMMAND]
    return lambda: subprocess.run(words, capture_output=True, check=True)


def one_box(host: Engine, samples: int) -> tuple[list[Claim], dict[str, float]]:
    """p50 of one command, the three ways in turn."""
    times: dict[str, list[float]] = {"box": [], "docker-py": [], "docker exec": []}
    with make("docker") as box, rival(host) as container:
        ways = {
            "box": lambda: box.exec(COMMAND),
            "docker-py": by_sdk(container),
            "docker exec": by_command_line(container),
        }
        for _ in range(samples):
            for name, call in ways.items():
                times[name].append(seconds(call))
    medians = {name: p50(values) * 1000 for name, values in times.items()}
    claims = [
        Claim(f"one command, p50 against {name}", medians["box"] / medians[name], 0.1, "x")
        for name in ("docker-py", "docker exec")
    ]
    return claims, {f"one command p50 ms, {name}": value for name, value in medians.items()}


def throughput(calls: list[Callable[[], object]], duration: float) -> float:
    """Calls a second of as many threads as there are calls."""
    counts, stop = [0] * len(calls), threading.Event()

    def work(index: int) -> None:
        while not stop.is_set():
            calls[index]()
            counts[index] += 1

    start = time.perf_counter()
    with ThreadPoolExecutor(len(calls)) as workers:
        done = [workers.submit(work, index) for index in range(len(calls))]
        time.sleep(duration)
        stop.set()
        for future in done:
            future.result()
    return sum(counts) / (time.perf_counter() - start)


def many_boxes(host: Engine, boxes: int, duration: float) -> tuple[list[Claim], dict[str, float]]:
    """Commands a second at many boxes, each in a thread; the three ways in turn, each median over its turns."""
    with ExitStack() as stack:
        ours = [stack.enter_context(make("docker")) for _ in range(boxes)]
        theirs = [stack.enter_context(rival(host)) for _ in range(boxes)]
        ways: dict[str, list[Callable[[], object]]] = {
            "box": [functools.partial(box.exec, COMMAND) for box in ours],
            "docker-py": [by_sdk(container) for container in theirs],
            "docker exec": [by_command_line(container) for container in theirs],
        }
        turns: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS):
            for name, calls in ways.items():
                turns[name].append(throughput(calls, duration / TURNS))
    rates = {name: p50(values) for name, values in turns.items()}
    claims = [
        Claim(f"{boxes} boxes, commands a second against {name}", rates["box"] / rates[name], 10, "x", at_least=True)
        for name in ("docker-py", "docker exec")
    ]
    return claims, {f"{boxes} boxes commands/s, {name}": rate for name, rate in rates.items()}


def starts(host: Engine, samples: int) -> tuple[list[Claim], dict[str, float]]:
    """Start of a box, self-check included, against a bare create + start with the same flags."""
    bare, ours = [], []
    for _ in range(samples):
        made: list[str] = []

        def plain(made: list[str] = made) -> None:
            made.append(create(host))
            host.client.api.start(made[0])

        bare.append(seconds(plain))
        host.remove(made[0])
        opened: list[Sandbox] = []
        ours.append(seconds(lambda opened=opened: opened.append(make("docker"))))  # type: ignore[misc]
        opened[0].close()
    claims = [Claim("start against create + start", p50(ours) / p50(bare), 1.2, "x")]
    return claims, {"start p50 ms, box": p50(ours) * 1000, "start p50 ms, create + start": p50(bare) * 1000}


def warm(samples: int) -> tuple[list[Claim], dict[str, float]]:
    """Take from a warm pool and seed; snapshot and restore 5 MB; restore after 20 chunks against after one."""
    start = initial_snapshot({"notes/a.txt": "alpha\n", "notes/b.txt": "beta\n"})
    with Pool("docker", size=2) as pool:
        pool.give(pool.take())
        taken = []
        for _ in range(samples):
            began = time.perf_counter()
            box = pool.take()
            box.restore(start)
            taken.append(time.perf_counter() - began)
            pool.give(box)
        with pool.box() as box:
            box.restore(start)
            states = []
            for step in range(20):
                box.exec(f"rev notes/a.txt >> log.txt; echo {step} > step{step}.txt")
                states.append(box.snapshot())
            pairs = [
                (seconds(lambda: box.restore(states[0])), seconds(lambda: box.restore(states[-1])))
                for _ in range(samples)
            ]
            box.reset()
            box.exec("mkdir d; for i in 1 2 3 4 5; do head -c 1000000 /dev/urandom > d/$i; done")
            moved = [seconds(lambda: box.restore(box.snapshot())) for _ in range(samples)]
    first, last = p50([pair[0] for pair in pairs]), p50([pair[1] for pair in pairs])
    claims = [
        Claim("take from a warm pool and seed, p50", p50(taken) * 1000, 80, "ms"),
        Claim("snapshot + restore of 5 MB, p50", p50(moved) * 1000, 250, "ms"),
        Claim("restore after 20 chunks against after 1", last / first, 1.5, "x"),
    ]
    return claims, {"restore after 1 chunk p50 ms": first * 1000, "restore after 20 chunks p50 ms": last * 1000}


def memory_mb(host: Engine, box: DockerSandbox) -> float:
    """Proportional memory of PID 1 and of its shim on the host."""
    pid = host.client.api.inspect_container(box.container)["State"]["Pid"]
    shim = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return sum(_pss(name) for name in (pid, shim)) / 1024


def _pss(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def all_at_once(start: Callable[[], Any], count: int) -> tuple[float, list[Any]]:
    """(seconds until the last of `count` starts in as many threads is through, what they gave)."""
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as workers:
        given = list(workers.map(lambda _: start(), range(count)))
    return time.perf_counter() - began, given


def bare_start(host: Engine) -> str:
    made = create(host)
    host.client.api.start(made)
    return made


def crowd(host: Engine, boxes: int) -> tuple[list[Claim], dict[str, float]]:
    """Many boxes started at once, each ready for its first command; host memory of each.

    As many bare containers with the same flags are started the same way before and after: the engine's own share.
    """
    bare = []
    for turn in range(3):
        if turn == 1:
            took, opened = all_at_once(lambda: make("docker"), boxes)
            used = [memory_mb(host, box) for box in opened if isinstance(box, DockerSandbox)]
            with ThreadPoolExecutor(8) as workers:
                list(workers.map(lambda box: box.close(), opened))
        else:
            seconds_taken, made = all_at_once(lambda: bare_start(host), boxes)
            bare.append(seconds_taken)
            with ThreadPoolExecutor(8) as workers:
                list(workers.map(host.remove, made))
    return [
        Claim(f"{boxes} boxes started and checked", took, 5, "s"),
        Claim("host memory of a box, mean", statistics.mean(used), 25, "MB"),
    ], {f"{boxes} bare create + start at once, s": statistics.mean(bare)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few samples of each; the JSON file is left alone")
    parser.add_argument("--boxes", type=int, default=16, help="for the throughput (default: 16)")
    options = parser.parse_args()
    host = engine()
    samples, duration = (5, 1.0) if options.quick else (60, 8.0)
    began, load = time.perf_counter(), os.getloadavg()[0]
    parts = [
        one_box(host, samples), many_boxes(host, options.boxes, duration), starts(host, max(5, samples // 4)),
        warm(max(5, samples // 2)), crowd(host, 2 * options.boxes),
    ]  # fmt: skip
    claims = list(itertools.chain.from_iterable(part[0] for part in parts))
    figures = {name: value for part in parts for name, value in part[1].items()}
    show(claims, figures)
    print(f"{host.line}; {os.cpu_count()} processors; load {load:.1f} at first, {os.getloadavg()[0]:.1f} at last")
    if not options.quick:
        record = provenance("docker", "none", 0) | {"engine": host.line, "processor": processor()}
        record |= {"load_at_start": load, "load_at_end": os.getloadavg()[0], "seconds": time.perf_counter() - began}
        rows = [asdict(claim) | {"verdict": claim.verdict} for claim in claims]
        write_json(RESULTS, record | {"claims": rows, "figures": figures})
    return 0 if all(claim.verdict == "holds" for claim in claims) else 1


def processor() -> str:
    """The model of the processor, as the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def show(claims: list[Claim], figures: dict[str, float]) -> None:
    """Print both tables."""
    console = Console()
    table = Table("claim", "measured", "limit", "verdict", title="docker backend", box=None)
    for claim in claims:
        sign = ">=" if claim.at_least else "<="
        bound = f"{sign} {claim.bound:g} {claim.unit}"
        table.add_row(claim.name, f"{claim.value:.3g} {claim.unit}", bound, claim.verdict)
    console.print(table)
    plain = Table("figure", "value", box=None)
    for name, value in figures.items():
        plain.add_row(name, f"{value:.3g}")
    console.print(plain)


if __name__ == "__main__":
    sys.exit(main())
