"""Agent-native episodes: an agent that is not ours runs with only a base URL and a token, and is trained on.

The agent builds its context itself and calls the model through the proxy, which records it; what it does to the world
goes through the environment here, so that our sandbox, its limits and its verifier hold. Adapters: the openai Python
client, and mini-swe-agent on a small environment class. A trajectory that comes out is one like any other. An agent
that crashes is judged by what it left; a model that fails leaves the episode unscored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mini_rome.env import Env
from mini_rome.errors import ConfigError, SandboxError
from mini_rome.experts import Start
from mini_rome.proxy import MODEL, Proxy
from mini_rome.proxy_backends import SamplerBackend
from mini_rome.proxy_episode import Episode
from mini_rome.proxy_protocol import read_message, written
from mini_rome.rollout import Progress, Rollout
from mini_rome.sampler.base import SamplingParams
from mini_rome.tools import tools_of
from mini_rome.trace import Call, ChatFormat, Response
from mini_rome.types import StepResult, Task, Trajectory, Verdict

WORKERS = 16  # agents at once
Json = dict[str, Any]


@dataclass
class Access:
    """What an external agent gets: where the model is, the conversation so far, and the world to act on."""

    url: str
    token: str
    env: Env
    episode: Episode
    messages: list[Json]
    verdict: Verdict | None = None
    path: str | None = None  # the unix socket, where the URL is behind one
    results: list[StepResult] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.verdict is not None

    def act(self, response: Response | str) -> str:
        """Run a response's calls; the observation. The turn that the proxy recorded last gets what they did."""
        observation, _, terminated, truncated, info = self.env.step(response)
        if (turn := self.episode.last_turn) is not None:
            turn.malformed, turn.submitted = bool(info["problem"]), info["submitted"]
            if (result := info["result"]) is not None:
                turn.exit_code, turn.status = result.exit_code, result.status
                turn.wall_s, turn.events = result.wall_s, result.events
                self.results.append(result)
            turn.observation = observation
        if terminated or truncated:
            self.verdict = info["verdict"]
        return observation


ExternalAgent = Callable[[Access], None]


def conversation(chat: ChatFormat, trajectory: Trajectory) -> list[Json]:
    """A trajectory so far as the messages that an agent goes on from."""
    task = trajectory.task
    names = {tool["function"]["name"]: "" for tool in tools_of(task)} | {"bash": "command"}
    messages: list[Json] = [{"role": "user", "content": task.instruction}]
    for number, turn in enumerate(trajectory.turns):
        message = written(turn.text, chat.parse(turn.ids, task, names)[1], names, number)
        messages += [message, *answers(message, turn.observation)]
    return messages


def answers(message: Json, observation: str) -> list[Json]:
    """Tool messages to an assistant's message; its calls are one chunk with one observation, which comes first."""
    calls = message.get("tool_calls") or [{"id": "none"}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": "" if index else observation}
        for index, call in enumerate(calls)
    ]


def response_of(choice: Json) -> Response | str:
    """An assistant's choice as the environment takes it."""
    if choice["finish_reason"] == "length":
        return Response(problem="cut by the length limit")
    calls = []
    for call in choice["message"].get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name == "bash":
            calls.append(Call("bash", json.loads(arguments)["command"]))
        else:
            calls.append(Call(name, "" if arguments == "{}" else arguments))
    return Response(tuple(calls)) if calls else choice["message"].get("content") or ""


class OpenAIAgent:
    """A loop over the openai Python client: the plainest agent there is. One object serves many threads."""

    def __init__(self) -> None:
        try:
            import openai
        except ImportError:
            raise ConfigError("--agent native needs the openai client: pip install 'mini-rome[native]'") from None
        self._openai = openai
        self._http = openai.DefaultHttpxClient(verify=False)  # plain HTTP on this machine: no certificates to load

    def __call__(self, access: Access) -> None:
        client = self._openai.OpenAI(
            base_url=access.url, api_key=access.token, max_retries=0, http_client=self._http
        )  # fmt: skip
        messages: list[Any] = list(access.messages)
        tools: Any = tools_of(access.env.task)
        while not access.over:
            try:
                found = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            except self._openai.BadRequestError as error:
                if error.code == "context_length_exceeded":
                    return  # what is there is judged
                raise
            choice = found.choices[0].model_dump(exclude_none=True)
            observation = access.act(response_of(choice))
            messages += [choice["message"], *answers(choice["message"], observation)]


class SandboxEnvironment:
    """mini-swe-agent's environment on ours. Submission is that agent's own: a command that prints its marker."""

    MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    def __init__(self, access: Access) -> None:
        self.access, self.config = access, {"cwd": "/app"}

    def execute(self, action: Json, cwd: str = "") -> Json:
        """Run one command. Raises the agent's own LimitsExceeded and Submitted."""
        from minisweagent.exceptions import LimitsExceeded, Submitted

        observation = self.access.act(Response((Call("bash", action.get("command", "")),)))
        if self.access.over:
            raise LimitsExceeded({"role": "exit", "content": "LimitsExceeded", "extra": {}})
        result = self.access.results[-1]
        lines = result.output.lstrip().splitlines()
        if result.exit_code == 0 and lines and lines[0].strip() == self.MARKER:
            self.access.verdict = self.access.env.give_up()
            raise Submitted({"role": "exit", "content": "\n".join(lines[1:]), "extra": {"exit_status": "Submitted"}})
        return {"output": observation, "returncode": result.exit_code, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> Json:
        return {**self.config, **more}

    def serialize(self) -> Json:
        return {"info": {"config": {"environment": self.config}}}


@dataclass
class MiniSweAgent:
    """mini-swe-agent's DefaultAgent as it is, its model behind the proxy and its commands in our box."""

    system: str = "You solve tasks in a terminal. Finish with: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    observation: str = "{{output.output}}"

    def __call__(self, access: Access) -> None:
        # Neither may ask the network at import, nor write into the user's home.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.models.litellm_model import LitellmModel

        model = LitellmModel(
            model_name=f"openai/{MODEL}", cost_tracking="ignore_errors", observation_template=self.observation,
            model_kwargs={"api_base": access.url, "api_key": access.token, "num_retries": 0},
        )  # fmt: skip
        agent = DefaultAgent(
            model, SandboxEnvironment(access), system_template=self.system, instance_template="{{task}}",
            step_limit=access.env.turns_left,
        )  # fmt: skip
        agent.run(access.env.task.instruction)


def play_native(
    proxy: Proxy, agent: ExternalAgent, env: Env, start: Start, params: SamplingParams, *,
    key: tuple[int, int] = (0, 0), episode: int = 0, max_context: int = 4096,
) -> Trajectory:
    """One episode of an external agent. Raises SandboxError where the box fails; else the trajectory is scored, or
    has reward None where the model failed."""
    trajectory = start.open(proxy.chat, env, key[0], episode)
    messages = conversation(proxy.chat, trajectory)
    record = Episode(proxy.chat, trajectory, params, key, max_context, [read_message(m) for m in messages])
    ticket = proxy.open(record)
    access = Access(proxy.url, ticket.token, env, record, messages, path=str(proxy.path) if proxy.path else None)
    crash = ""
    try:
        agent(access)
    except SandboxError:
        raise
    except Exception as error:  # an agent that is not ours may raise anything: its doing, and judged as such
        crash = f"agent crashed ({type(error).__name__}); "
    finally:
        proxy.close_episode(ticket)
    verdict = Verdict(None, "sampler_down") if record.failed else access.verdict
    if verdict is None:
        verdict = env.give_up()
        crash = crash or "never submitted; "
    for sample in trajectory.samples:
        sample.reward, sample.verifier, sample.honest = verdict.reward, verdict.verifier, verdict.honest
        sample.reason = verdict.reason if verdict.reward is None else crash + verdict.reason
    trajectory.events = verdict.events
    return trajectory


class NativeRollout(Rollout):
    """Rollouts by an external agent through the proxy: the same surface, another way to the same trajectories.

    Episodes run side by side and share the sampler as they come, so that its batches, and with them the last bit of
    a log-prob, depend on time; which numbers are drawn does not.
    """

    cancels = False

    def __init__(self, *args: Any, agent: ExternalAgent | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.agent = agent or OpenAIAgent()

    def _run(
        self, episodes: list[tuple[int, Start]], params: SamplingParams, step: int, progress: Progress | None
    ) -> list[Trajectory]:
        results: dict[int, Trajectory] = {}
        workers = max(1, min(len(episodes), WORKERS, self.pool.size))
        with (
            Proxy(SamplerBackend(self.sampler, self.chat), self.chat) as proxy,
            ThreadPoolExecutor(workers, thread_name_prefix="agent") as executor,
        ):
            running: list[Future[Trajectory]] = [
                executor.submit(self._play, proxy, number, start, params, step) for number, start in episodes
            ]
            for future in as_completed(running):
                trajectory = future.result()
                results[trajectory.episode] = trajectory
                if progress is not None:
                    progress(len(results), len(episodes))
        self.sampler.forget()
        return [results[episode] for episode, _ in episodes]

    def _play(self, proxy: Proxy, number: int, start: Start, params: SamplingParams, step: int) -> Trajectory:
        try:
            with self._opened(proxy, start.task) as (served, env):
                return play_native(served, self.agent, env, start, params, key=(self.seed, step), episode=number,
                                   max_context=self.max_context)  # fmt: skip
        except SandboxError as error:
            prompt_ids = self.chat.prompt(start.task.instruction, start.task)
            return Trajectory(start.task, prompt_ids, [], backend=self.backend, seed=self.seed, episode=number,
                              reason=type(error).__name__)  # fmt: skip

    @contextmanager
    def _opened(self, proxy: Proxy, task: Task) -> Iterator[tuple[Proxy, Env]]:
        """Where the calls of one episode go, and the world that its agent acts on."""
        with Env(task, self.pool, max_turns=task.chunks + self.extra_turns) as env:
            yield proxy, env


@dataclass(frozen=True)
class Parity:
    """How far two records of the same episode agree, turn by turn; drift is counted, not hidden."""

    turns: int
    ids: int  # turns with the same context and the same sampled ids
    logprobs: int  # and the same log-probs to the last bit
    chains: int  # beyond the first
    retokenised: int

    @property
    def exact(self) -> bool:
        return self.turns == self.ids == self.logprobs and not self.chains and not self.retokenised


def parity(builtin: Trajectory, native: Trajectory, retokenised: int = 0) -> Parity:
    """Compare the built-in loop's trajectory with the one recorded through the proxy."""
    ids = logprobs = 0
    contexts = [list(builtin.prompt_ids), list(native.prompt_ids)]
    for ours, theirs in zip(builtin.turns, native.turns, strict=False):
        same = contexts[0] == contexts[1] and ours.ids == theirs.ids
        ids += same
        logprobs += same and ours.logprobs == theirs.logprobs
        for context, turn in zip(contexts, (ours, theirs), strict=True):
            context += [*turn.ids, *turn.observation_ids]
    turns = max(len(builtin.turns), len(native.turns))
    return Parity(turns, ids, logprobs, len(native.chains), retokenised)
