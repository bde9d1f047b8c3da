"""Who acts in an evaluation: scripted agents, a model behind an endpoint, a checkpoint; one surface, `play`.

The oracle follows the expert or runs the reference solution, noop submits at once, random types plausible commands,
replay repeats recorded responses. They bound what a model's number can mean. Not in the paper.
"""

from __future__ import annotations

import inspect
import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_rome.env import Env
from mini_rome.errors import ConfigError
from mini_rome.evaluation.model_client import ContextFull, Endpoint, Reply
from mini_rome.tasks.folders import FolderEnv, run_solution
from mini_rome.tasks.validate_families import expert_responses
from mini_rome.trace import CALL, CALL_END, Call, Response, parse_response
from mini_rome.types import Task, Verdict

SUBMIT = f"{CALL}submit{CALL_END}"
SYSTEM = (
    "You work in a Linux sandbox whose working directory is /app. Solve the task with the tools you are given. "
    "Each command runs in a fresh shell; the working directory and exported variables carry over. There is no "
    "network. When the task is complete, call submit."
)


@dataclass
class Episode:
    """What an evaluation keeps of one episode. `ending`: submitted, turns, context, time, or infrastructure."""

    verdict: Verdict
    ending: str = "submitted"
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    responses: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """Whose failure it is: infra, timeout (turns, context or time used up), agent; empty for a success."""
        if self.verdict.reward is None:
            return "infra"
        if self.verdict.reward == 1.0:
            return ""
        return "agent" if self.ending == "submitted" else "timeout"


class Policy(ABC):
    """Acts in one environment at a time; called from several threads."""

    name: str

    @abstractmethod
    def play(self, env: Env, run: int) -> Episode:
        """One episode from the initial state. Raises SandboxError (unscored), ConfigError (the evaluation stops)."""


class Scripted(Policy):
    """Responses known before the episode begins."""

    def __init__(self, name: str, seed: int = 0, recorded: Mapping[tuple[str, int], list[str]] | None = None) -> None:
        self.name, self.seed, self.recorded = name, seed, recorded or {}

    def play(self, env: Env, run: int) -> Episode:
        env.reset()
        if self.name == "oracle" and isinstance(env, FolderEnv):
            begun = time.monotonic()
            run_solution(env.folder, env.box)
            episode = follow(env, [SUBMIT])
            episode.seconds = time.monotonic() - begun
            return episode
        return follow(env, self._script(env.task, run))

    def _script(self, task: Task, run: int) -> list[str]:
        if self.name == "oracle":
            return expert_responses(task)
        if self.name == "random":
            return random_responses(task, random.Random(f"{self.seed}/{task.name}/{run}"))
        if self.name == "replay":
            if (task.name, run) not in self.recorded:
                raise ConfigError(f"--replay: no recorded responses of {task.name}, run {run}")
            return self.recorded[task.name, run]
        return [SUBMIT]


def follow(env: Env, responses: Iterable[str]) -> Episode:
    """Give the environment these responses, to the end of the script or of the episode."""
    begun, given = time.monotonic(), list(responses)
    for turn, text in enumerate(given, start=1):
        _, _, terminated, truncated, info = env.step(text)
        if terminated or truncated:
            ending = "submitted" if terminated else ending_of(info)
            return Episode(info["verdict"], ending, turn, seconds=time.monotonic() - begun, responses=given[:turn])
    return Episode(env.give_up(), "turns", len(given), seconds=time.monotonic() - begun, responses=given)


def ending_of(info: Mapping[str, Any]) -> str:
    """Why an episode was truncated."""
    if info["verdict"].reward is None:
        return "infrastructure"
    result = info["result"]
    return "time" if result is not None and result.status == "timeout" else "turns"


def random_responses(task: Task, rng: random.Random) -> list[str]:
    """As many plausible commands as the expert has (8 in a folder), then submit."""
    names = [*task.files, "answer", "result.txt"] or ["answer"]
    bodies = []
    for _ in range(task.chunks or 8):
        if task.tools:
            tool = rng.choice(list(task.tools))
            given = {name: rng.choice(names) for name in list(inspect.signature(task.tools[tool]).parameters)[1:]}
            bodies.append(f"{tool} {json.dumps(given)}" if given else tool)
        else:
            verb = rng.choice(("ls", "cat {}", "rev {}", "head -n 1 {}", "echo yes > {}", "rm -f {}", "sort {}"))
            bodies.append("bash " + verb.format(rng.choice(names)))
    return [*(f"{CALL}{body}{CALL_END}" for body in bodies), SUBMIT]


def read_responses(path: str | Path) -> dict[tuple[str, int], list[str]]:
    """{(task, run): responses} of a responses.jsonl that an evaluation wrote. Raises ConfigError with the line."""
    found = {}
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replay {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found[str(row["task"]), int(row["run"])] = [str(text) for text in row["responses"]]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{path}:{number}: no recorded episode ({error})") from None
    return found


class EndpointPolicy(Policy):
    """A model behind an OpenAI-compatible server, with bash and submit, or the task's own tools, as functions."""

    def __init__(self, endpoint: Endpoint, seed: int = 0) -> None:
        self.endpoint, self.seed, self.name = endpoint, seed, endpoint.model

    def play(self, env: Env, run: int) -> Episode:
        begun = time.monotonic()
        instruction, _ = env.reset()
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}
        ]  # fmt: skip
        episode, tools = Episode(Verdict(None), "turns"), tool_schemas(env.task)
        while True:
            try:
                reply = self.endpoint.ask(messages, tools, self.seed * 1000 + run)
            except ContextFull:
                episode.verdict, episode.ending = env.give_up(), "context"
                break
            response = response_of(reply, env.task)
            episode.turns += 1
            episode.prompt_tokens += reply.prompt_tokens
            episode.completion_tokens += reply.completion_tokens
            episode.responses.append("".join(map(spelled, response.calls)) or reply.text)
            observation, _, terminated, truncated, info = env.step(response)
            if terminated or truncated:
                episode.verdict = info["verdict"]
                episode.ending = "submitted" if terminated else ending_of(info)
                break
            messages += [reply.message, *answers(reply, observation)]
        episode.seconds = time.monotonic() - begun
        return episode


def response_of(reply: Reply, task: Task) -> Response:
    """The calls of a reply: its function calls, or those spelled in its text. Bad arguments make it malformed.

    >>> from mini_rome.tasks.choice import find_task
    >>> response_of(Reply("", (("1", "bash", '{"command": "ls"}'),), {}), find_task("notes")).calls
    (Call(tool='bash', command='ls'),)
    """
    if not reply.calls:
        return parse_response(reply.text, task)
    calls = []
    for _, name, arguments in reply.calls:
        if name == "submit":
            calls.append(Call("submit"))
        elif name == "bash":
            try:
                command = json.loads(arguments)["command"]
            except (ValueError, TypeError, LookupError, RecursionError):
                return Response(problem="the arguments of bash are no JSON object with a command")
            if not isinstance(command, str) or "\0" in command:
                return Response(problem="the command is no text")
            calls.append(Call("bash", command))
        elif name in task.tools:
            calls.append(Call(name, arguments))
        else:
            return Response(problem=f"unknown tool {name[:20]!r}")
    return Response(tuple(calls))


def spelled(call: Call) -> str:
    """A call as a response of the built-in format holds it."""
    return f"{CALL}{f'{call.tool} {call.command}'.rstrip()}{CALL_END}"


def answers(reply: Reply, observation: str) -> list[dict[str, Any]]:
    """What the environment said, as messages: one per call, the whole with the first."""
    if not reply.calls:
        return [{"role": "user", "content": observation}]
    texts = [observation, *["[shown with the first call of this response]"] * (len(reply.calls) - 1)]
    return [
        {"role": "tool", "tool_call_id": id_, "content": text}
        for (id_, _, _), text in zip(reply.calls, texts, strict=True)
    ]


def tool_schemas(task: Task) -> list[dict[str, Any]]:
    """The functions that a task offers, in the protocol's form."""
    found = []
    if task.offers_bash:
        found.append(schema("bash", "Run a shell command in the sandbox.", ["command"]))
    for name, tool in task.tools.items():
        story = (inspect.getdoc(tool) or name).splitlines()[0]
        found.append(schema(name, story, list(inspect.signature(tool).parameters)[1:]))
    return [*found, schema("submit", "Say that the task is complete.", [])]


def schema(name: str, story: str, parameters: list[str]) -> dict[str, Any]:
    """One function whose parameters are all text."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    shape = {"type": "object", "properties": properties, "required": parameters}
    return {"type": "function", "function": {"name": name, "description": story, "parameters": shape}}
