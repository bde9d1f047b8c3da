"""Calls of a task's own tools: named functions over a small JSON database, run on the host.

The database is one file in the work dir, so snapshots, restores and the check of the final files hold for it as for
any other file, on both backends. A call reads the file through the sandbox, runs the tool's pure function, writes the
file back where it changed, and answers with one line of JSON. What goes wrong is the agent's to repair: exit code 127
for a tool that is not there, 2 for bad arguments, 1 for what the tool refuses. Not in the paper, which evaluates tool
use on tau2-bench.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mini_rome.errors import SandboxFileError, ToolRefused
from mini_rome.types import StepResult, Task, Tool

SHOWN = 20  # characters of a name the agent made up that an error repeats
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_quote = json.encoder.encode_basestring  # of one text; `call_body` is called a hundred times for one instance


class Files(Protocol):
    """The part of a sandbox that tools need."""

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes | str) -> None: ...


def dump(value: object) -> str:
    """JSON on one line without spaces, as databases, calls and observations are written.

    >>> dump({"id": "plum", "to": "红"})
    '{"id":"plum","to":"红"}'
    """
    return _ENCODER.encode(value)


def call_body(name: str, /, **arguments: str) -> str:
    """One call as a response holds it between its tags.

    >>> call_body("cancel", item="plum"), call_body("buy")
    ('cancel {"item":"plum"}', 'buy')
    """
    if not arguments:
        return name
    return f"{name} {{{','.join([f'{_quote(key)}:{_quote(value)}' for key, value in arguments.items()])}}}"


def run_tool(task: Task, files: Files, name: str, arguments: str) -> StepResult:
    """What one call of a task's own tool did; `arguments` is the JSON text after the name, "" for none.

    A file that is damaged is the agent's doing only where it has a shell; else the error is raised, as it is a fault
    of the tool or of the sandbox.
    """
    begun = time.monotonic()
    try:
        result = StepResult(_run(task, files, name, arguments), 0)
    except ToolRefused as refusal:
        result = StepResult(dump({"error": str(refusal)}), refusal.exit_code)
    except (SandboxFileError, LookupError, TypeError, AttributeError, ValueError, RecursionError):
        if not task.shell:
            raise
        result = StepResult(dump({"error": f"{task.database} is damaged"}), 1)
    return replace(result, output_bytes=len(result.output.encode()), wall_s=time.monotonic() - begun)


def _run(task: Task, files: Files, name: str, arguments: str) -> str:
    if name not in task.tools:
        raise ToolRefused(f"no tool '{name[:SHOWN]}'", 127)
    tool = task.tools[name]
    given = parse_arguments(tool, arguments)
    before = files.read(task.database)
    database = json.loads(before)
    answer = dump(tool(database, **given))
    after = dump(database).encode()
    if after != before:
        files.write(task.database, after)
    return answer


def rehearse(task: Task, chunks: Iterable[str]) -> Iterator[tuple[str, StepResult]]:
    """Each call of these chunks with what it does, without a sandbox: on the task's files in memory."""
    files = Memory({path: text.encode() for path, text in task.files.items()})
    for body in (body for chunk in chunks for body in chunk.split("\n")):
        name, _, arguments = body.partition(" ")
        yield body, run_tool(task, files, name, arguments)


def tools_of(task: Task) -> list[dict[str, Any]]:
    """The task's tools as an agent declares them in its requests."""
    parameters = {"bash": ["command"]} if task.offers_bash else {}
    for name, tool in task.tools.items():
        parameters[name] = list(inspect.signature(tool).parameters)[1:]
    parameters["submit"] = []
    return [
        {"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}}}
        for name, keys in parameters.items()
    ]  # fmt: skip


@dataclass
class Memory:
    """Files without a sandbox."""

    files: dict[str, bytes]

    def read(self, path: str) -> bytes:
        return self.files[path]

    def write(self, path: str, data: bytes | str) -> None:
        self.files[path] = data.encode() if isinstance(data, str) else data


def parse_arguments(tool: Tool, text: str) -> dict[str, str]:
    """The arguments of a call: a JSON object with exactly the tool's parameters, each one line of text.

    Raises ToolRefused (exit code 2) for anything else.
    """
    try:
        given = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise ToolRefused("bad JSON", 2) from None
    wanted = _parameters(tool)
    if not isinstance(given, dict) or set(given) != set(wanted):
        raise ToolRefused(f"wants {', '.join(wanted) or 'nothing'}", 2)
    for name, value in given.items():
        if not (isinstance(value, str) and value.isprintable()):
            raise ToolRefused(f"{name} is no text", 2)
    return given


@functools.lru_cache(maxsize=256)
def _parameters(tool: Tool) -> tuple[str, ...]:
    return tuple(inspect.signature(tool).parameters)[1:]  # the first one is the database
