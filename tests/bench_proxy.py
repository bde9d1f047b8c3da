"""What the proxy adds to a call, against the bare sampler in the same run, and what 1,000 episodes leave behind.

The sampler is scripted, so that all the time is the proxy's and the client's. Clients run in a process of their own
and ask again as soon as they are answered: with 32 of them the server is saturated, and the latency is 32 times what
one call costs. Prints p50 and p95 in milliseconds of the middle one of five rounds, the p50 of each (others on the
machine can only add), the CPU time that a call costs the server's process, resident memory and descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from small import chat  # noqa: E402

from mini_rome.experts import script  # noqa: E402
from mini_rome.families import get_family  # noqa: E402
from mini_rome.proxy import Proxy  # noqa: E402
from mini_rome.proxy_backends import SamplerBackend  # noqa: E402
from mini_rome.proxy_episode import Episode  # noqa: E402
from mini_rome.sampler.base import Request, SamplingParams  # noqa: E402
from mini_rome.sampler.scripted import ScriptedSampler  # noqa: E402
from mini_rome.types import Trajectory  # noqa: E402

TASK = get_family("notes").make(3, 8)
REPLIES = script(chat(), TASK.expert)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"command": {}}}}}
    for name in ("bash", "submit")
]
LIMITS_MS = {1: 5.0, 32: 20.0}
ROUNDS = 5


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, messages: list) -> dict:
    """One request over a connection that stays open."""
    body = json.dumps({"model": "mini-rome", "messages": messages, "tools": TOOLS}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")  # fmt: skip
    writer.write(head.encode() + body)
    headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(headers.partition("content-length:")[2].split("\r\n", 1)[0])
    assert headers.startswith("http/1.1 200"), headers
    return json.loads(await reader.readexactly(length))


async def client(port: int, tokens: list[str]) -> list[float]:
    """One agent: an episode of K turns for each token. Seconds of each call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seconds = []
    for token in tokens:
        messages: list = [{"role": "user", "content": TASK.instruction}]
        for _ in REPLIES:
            begun = time.perf_counter()
            message = (await call(reader, writer, token, messages))["choices"][0]["message"]
            seconds.append(time.perf_counter() - begun)
            messages += [message, {"role": "tool", "tool_call_id": "x", "content": "plum pear"}]
    writer.close()
    return seconds


def agents(port: int, work: Connection) -> None:
    """The process of the clients: lists of tokens in, seconds out."""

    async def all_of(shares: list[list[str]]) -> list[list[float]]:
        return await asyncio.gather(*(client(port, share) for share in shares))

    while (shares := work.recv()) is not None:
        work.send([second for part in asyncio.run(all_of(shares)) for second in part])


def bare_ms() -> float:
    """p50 of the sampler alone."""
    sampler, seconds = ScriptedSampler(REPLIES), []
    for number in range(2000):
        begun = time.perf_counter()
        sampler.generate([Request(0, [1] * 100, (0, 0, 0, number % len(REPLIES)))], SamplingParams())
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


def measure(proxy: Proxy, work: Connection, clients: int, episodes: int) -> list[float]:
    """Milliseconds of each call."""
    tickets = [
        proxy.open(Episode(chat(), Trajectory(TASK, [], [], episode=number))) for number in range(clients * episodes)
    ]
    tokens = [ticket.token for ticket in tickets]
    work.send([tokens[first::clients] for first in range(clients)])
    seconds = work.recv()
    turns = {len(proxy.close_episode(ticket).turns) for ticket in tickets}
    assert turns == {len(REPLIES)}
    return [1e3 * second for second in seconds]


def footprint() -> tuple[float, int]:
    """(resident MB, open descriptors) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6, len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000, help="of the test for growth")
    episodes = parser.parse_args().episodes
    with Proxy(SamplerBackend(ScriptedSampler(REPLIES), chat()), chat()) as proxy:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=agents, args=(proxy.port, there), daemon=True)
        process.start()
        measure(proxy, here, 4, 20)
        bare = bare_ms()
        print(f"bare sampler: p50 {bare:.3f} ms")
        for clients, count in ((1, 40), (32, 6)):
            rounds = []
            for _ in range(ROUNDS):
                used = time.process_time()
                found = sorted(measure(proxy, here, clients, count))
                used = 1e3 * (time.process_time() - used) / len(found)
                rounds.append((found[len(found) // 2], found[int(0.95 * len(found))], used, len(found)))
            p50, p95, used, calls = sorted(rounds)[len(rounds) // 2]
            verdict = "ok" if p50 - bare < LIMITS_MS[clients] else "TOO SLOW"
            print(f"{clients:>2} clients: p50 {p50:.2f} ms, p95 {p95:.2f} ms over {calls} calls; "
                  f"CPU {used:.2f} ms a call; proxy adds {p50 - bare:.2f} ms "
                  f"(limit {LIMITS_MS[clients]:g}): {verdict}; "
                  f"p50 by round {', '.join(f'{each[0]:.2f}' for each in sorted(rounds))}")  # fmt: skip
        before = footprint()
        for _ in range(episodes // 100):  # a hundred open at a time: what stays is the proxy's
            measure(proxy, here, 10, 10)
        after = footprint()
        print(f"{100 * (episodes // 100)} episodes: memory {before[0]:.1f} -> {after[0]:.1f} MB, "
              f"descriptors {before[1]} -> {after[1]}")  # fmt: skip
        here.send(None)
        process.join(timeout=10)


if __name__ == "__main__":
    main()
