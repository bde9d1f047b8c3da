"""Context engineering of the agent runtime: what the model sees beyond the instruction and what commands print.

The paper's CLI compresses, reminds, detects loops, runs hooks, keeps a todo list and a memory, and opens sub-agents;
here each is one option of `ContextConfig`, off by default, in small. Whatever it adds is text of the environment: it
goes through `trace.py` like any observation and is never trained on. Not here: MCP, and summaries that a model writes
(a compressed turn is one line: its calls and how they ended).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from mini_rome.env import Env
from mini_rome.errors import ConfigError, SandboxFileError
from mini_rome.sandbox import Pool
from mini_rome.sandbox.base import Sandbox
from mini_rome.sandbox.shellwords import pipelines, unwrap
from mini_rome.trace import CALL, CALL_END, Call, Response
from mini_rome.types import StepResult, Task, Turn

TODO_TOOL, DELEGATE_TOOL = "todo", "delegate"
TODO_FILE = "/tmp/todo.md"  # beside the work dir, so that no check of the final files meets it
INJECTED_CHARS = 8_000  # of a memory or workflow file
SUMMARY_CHARS = 60  # of one call in the summary of compressed turns


@dataclass(frozen=True)
class ContextConfig:
    """Which features are on; 0, "" and False are off. None of the numbers is in the paper."""

    output_chars: int = 0  # a longer observation keeps its head and its tail, with a marker between
    compress_at: int = 0  # ids of context above which old turns become one line each, in a new chain
    keep_turns: int = 4  # the last turns that compression leaves as they are
    remind_turns: int = 0  # say how many turns are left once there are this many or fewer
    remind_failures: int = 0  # say so when this many turns in a row failed
    loop_turns: int = 0  # say so when this many turns in a row made the same calls
    todo: bool = False  # offer the tool `todo` and say when its file changed
    guard: Literal["off", "warn", "stop"] = "off"  # destructive commands: said so, or not run
    memory_file: str = ""  # a file of the work dir that the prompt shows
    workflow_file: str = ""  # likewise: how to go about such tasks
    subagent_turns: int = 0  # offer the tool `delegate`: a sub-agent with this many turns and a context of its own

    def __post_init__(self) -> None:
        numbers = "output_chars compress_at remind_turns remind_failures loop_turns subagent_turns"
        for name in numbers.split():
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 0 (off) or more")
        if self.keep_turns < 1:
            raise ConfigError(f"keep_turns={self.keep_turns}: compression must leave at least one turn")
        if self.guard not in ("off", "warn", "stop"):
            raise ConfigError(f"guard={self.guard!r}: choose off, warn or stop")

    @classmethod
    def of(cls, asked: Mapping[str, Any] | str | None) -> ContextConfig | None:
        """From the option of a recipe: a mapping in YAML, JSON on the command line; None: the bare loop.

        >>> ContextConfig.of('{"guard": "stop"}') == ContextConfig(guard="stop"), ContextConfig.of(None)
        (True, None)
        """
        if asked is None:
            return None
        try:
            values = json.loads(asked) if isinstance(asked, str) else asked
        except json.JSONDecodeError as error:
            told = f"--context {asked}: not JSON ({error.msg}), which is such as {json.dumps({'guard': 'stop'})}"
            raise ConfigError(told) from None
        kinds = {each.name: type(each.default) for each in fields(cls)}
        if not isinstance(values, dict) or any(type(value) is not kinds.get(key) for key, value in values.items()):
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
            raise ConfigError(f"--context {asked}: takes {known}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"--context {error}") from None


@dataclass(frozen=True)
class Objection:
    """What a hook says before a call; `stop`: the call is not run."""

    text: str
    stop: bool = False


class Hook(Protocol):
    """Looks at each call of a response before and after it runs."""

    def before(self, call: Call) -> Objection | None: ...

    def after(self, call: Call, result: StepResult) -> str | None: ...


@dataclass(frozen=True)
class Guard:
    """Objects to commands that destroy what the task needs. Covered: see `destroys`; not a boundary, the box is."""

    stop: bool

    def before(self, call: Call) -> Objection | None:
        why = destroys(call.command) if call.tool == "bash" else ""
        return Objection(why, self.stop) if why else None

    def after(self, call: Call, result: StepResult) -> str | None:
        return None


def destroys(command: str) -> str:
    """Why a command is destructive, or "".

    >>> destroys("cd /tmp; rm -rf /app"), destroys("echo rm -rf /app"), destroys("rm -r build")
    ('rm -r of /app', '', '')
    """
    for simple in (simple for pipeline in pipelines(command) for simple in pipeline):
        words = unwrap(simple.argv)
        if not words:
            continue
        name, options = words[0].rsplit("/", 1)[-1], [word for word in words[1:] if word.startswith("-")]
        targets = [word.rstrip("/") or "/" for word in words[1:] if not word.startswith("-")]
        recursive = any(word == "--recursive" or (word[1:2] != "-" and "r" in word.lower()) for word in options)
        wide = next((target for target in targets if target in _WIDE), None)
        if name == "rm" and recursive and wide:
            return f"rm -r of {wide}"
        if name == "find" and "-delete" in words and wide and not {"-name", "-path", "-type"} & set(words):
            return f"find -delete in {wide}"
        if name.startswith("mkfs") or (name == "git" and targets[:1] == ["reset"] and "--hard" in options):
            return " ".join(words[:3])
    return ""


_WIDE = frozenset(("/", "/*", "/app", "/app/*", "*", ".", "./*", "..", "~", "/home", "/home/agent"))


@dataclass
class Context:
    """The features at work in one episode."""

    config: ContextConfig = field(default_factory=ContextConfig)
    hooks: Sequence[Hook] = ()
    _todo: str = ""

    def __post_init__(self) -> None:
        if self.config.guard != "off":
            self.hooks = (*self.hooks, Guard(self.config.guard == "stop"))

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the runtime's own tools."""
        return (TODO_TOOL,) * self.config.todo + (DELEGATE_TOOL,) * bool(self.config.subagent_turns)

    def instruction(self, text: str, box: Sandbox, sub: bool = False) -> str:
        """The first message: the instruction, the runtime's tools, the injected files."""
        parts = [text]
        if self.config.todo:
            parts.append(f"{CALL}todo TEXT{CALL_END} keeps a todo list in {TODO_FILE}")
        if self.config.subagent_turns and not sub:
            parts.append(f"{CALL}delegate TASK{CALL_END}, alone, lets a sub-agent do a part")
        for path in filter(None, (self.config.memory_file, self.config.workflow_file)):
            try:
                found = box.read(path).decode(errors="replace").strip()
            except SandboxFileError:
                continue  # a task without the file
            parts.append(f"[{path}]\n{cut(found, INJECTED_CHARS)}")
        return "\n\n".join(parts)

    def observation(self, text: str, turns: Sequence[Turn], env: Env) -> str:
        """The observation as the model sees it; `turns` end with the one that it answers."""
        lines = [cut(text, self.config.output_chars), *self._reminders(turns, env)]
        return "\n".join(line for line in lines if line)

    def _reminders(self, turns: Sequence[Turn], env: Env) -> list[str]:
        c, said = self.config, []
        if c.todo and (todo := self._changed_todo(env.box)) is not None:
            said.append(f"[todo changed: {todo or 'empty'}]")
        if c.loop_turns and len(turns) >= c.loop_turns:
            last = turns[-c.loop_turns :]
            if last[0].commands and all(turn.commands == last[0].commands for turn in last):
                said.append(f"[the same call {c.loop_turns} times in a row: try something else]")
        if c.remind_failures and len(turns) >= c.remind_failures:
            if all(turn.malformed or turn.exit_code for turn in turns[-c.remind_failures :]):
                said.append(f"[{c.remind_failures} turns in a row failed]")
        if 0 < env.turns_left <= c.remind_turns:
            said.append(f"[turns left: {env.turns_left}]")
        return said

    def _changed_todo(self, box: Sandbox) -> str | None:
        """The list where it is another one than the model saw last, whoever changed it."""
        try:
            now = box.read(TODO_FILE).decode(errors="replace").strip()
        except SandboxFileError:
            now = ""
        if now == self._todo:
            return None
        self._todo = now
        return cut(now, INJECTED_CHARS)

    def delegated(self, response: Response) -> str | None:
        """The task of a sub-agent, where this response is such a call and nothing else."""
        if not self.config.subagent_turns or len(response.calls) != 1 or response.calls[0].tool != DELEGATE_TOOL:
            return None
        return response.calls[0].command.strip() or None

    def compresses(self, ids: int, turns: int) -> bool:
        """Whether a context of so many ids and turns is to be compressed."""
        return bool(self.config.compress_at) and ids > self.config.compress_at and turns > self.config.keep_turns


class ContextEnv(Env):
    """An environment whose calls pass the hooks, and that knows the runtime's own tools."""

    def __init__(self, task: Task, pool: Pool, context: Context, max_turns: int | None = None) -> None:
        super().__init__(task, pool, max_turns)
        self.context = context

    def _execute(self, call: Call) -> StepResult:
        notes = []
        for hook in self.context.hooks:
            objection = hook.before(call)
            if objection is not None and objection.stop:
                return StepResult(f"[not run: {objection.text}]", 126)
            if objection is not None:
                notes.append(f"[warning: {objection.text}]")
        result = self._own(call) if call.tool in self.context.tools else super()._execute(call)
        notes += [note for hook in self.context.hooks if (note := hook.after(call, result)) is not None]
        if not notes or result.infra:
            return result
        return replace(result, output="\n".join(filter(None, [result.output.rstrip("\n"), *notes])))

    def _own(self, call: Call) -> StepResult:
        if call.tool == DELEGATE_TOOL:
            return StepResult("delegate wants a task and must be the only call; a sub-agent cannot use it", 2)
        self.box.write(TODO_FILE, call.command.strip() + "\n")
        return StepResult("", 0)


def cut(text: str, limit: int) -> str:
    """Head and tail of a text above `limit` characters (0: none), with a marker of what is missing.

    >>> cut("abcdefghij", 4)
    'ab\\n[6 characters left out]\\nij'
    """
    if not limit or len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"


def summary(turns: Sequence[Turn]) -> str:
    """What compression leaves of turns: one line each."""
    lines = []
    for turn in turns:
        calls = "; ".join(cut_line(command) for command in turn.commands) or "no tool call"
        failed = turn.malformed or turn.exit_code
        lines.append(f"- {calls}: {'failed' if failed else 'ok'}")
    return "\n".join(["[earlier turns, in short]", *lines])


def cut_line(text: str) -> str:
    """The first SUMMARY_CHARS characters, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= SUMMARY_CHARS else f"{line[:SUMMARY_CHARS]}..."
