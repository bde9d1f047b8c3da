"""The agent loop: run, step, query, execute. One response of the model is one turn and one interaction chunk.

An episode is one linear context, unless a feature of `context.py` opens another: compression and a sub-agent start a
new chain, a trajectory of its own with its own prompt, so that each response is trained in the context in which it
was sampled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mini_rome.context import Context, summary
from mini_rome.env import Env
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.trace import ChatFormat, Response, context_ids
from mini_rome.types import Trajectory, Turn, Verdict


class Ending(Exception):
    """The episode is over. `spent` names the budget that ran out."""

    spent = ""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{self.spent}; {verdict.reason}" if self.spent and verdict.reward is not None
                         else verdict.reason)  # fmt: skip
        self.verdict = verdict


class Judged(Ending):
    """The environment ended it: submitted, out of turns, too often malformed, or its box failed."""


class ContextFull(Ending):
    spent = "context full"


class TokensSpent(Ending):
    spent = "token budget spent"


class TimeSpent(Ending):
    spent = "time budget spent"


@dataclass
class _Level:
    """A linear context that is being written: the episode's own, or a sub-agent's."""

    chain: Trajectory
    instruction: str
    history: list[Turn] = field(default_factory=list)  # all turns since the instruction, compressed ones too
    turns: int = 0


@dataclass
class Agent:
    """Writes one trajectory by asking the sampler and running its answers in the environment.

    The environment must have been reset to the state the trajectory stands at; where `context` has features on, it
    must be a ContextEnv of the same context, and `inject` be called before the first request.
    key: (seed, step), the part of the sampling key that all turns of the episode share.
    max_context: ids of prompt and response together; max_tokens: sampled ids of the episode; max_seconds: of the
    whole episode (0: no limit). An episode that would exceed one is cut and still verified.
    """

    chat: ChatFormat
    env: Env
    trajectory: Trajectory
    params: SamplingParams
    key: tuple[int, int] = (0, 0)
    max_context: int = 4096
    done: bool = False
    context: Context = field(default_factory=Context)
    max_tokens: int = 0
    max_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._levels = [_Level(self.trajectory, self.env.task.instruction, list(self.trajectory.turns))]
        self._sampled = 0
        self._deadline = time.monotonic() + self.max_seconds if self.max_seconds else float("inf")

    def run(self, sampler: Sampler) -> Trajectory:
        """Step until the episode ends."""
        while not self.done:
            self.step(sampler)
        return self.trajectory

    def step(self, sampler: Sampler) -> None:
        """One turn: ask, then act."""
        self.execute(self.query(sampler))

    def query(self, sampler: Sampler) -> Completion:
        """Ask the model for the next response."""
        return sampler.generate([self.request()], self.params)[0]

    @property
    def chain(self) -> Trajectory:
        """The linear context that the next response belongs to."""
        return self._levels[-1].chain

    def inject(self) -> None:
        """Put tools and files of the context's features into the prompt."""
        level = self._levels[-1]
        level.instruction = self.context.instruction(level.instruction, self.env.box, sub=len(self._levels) > 1)
        level.chain.prompt_ids = self.chat.prompt(level.instruction, self.env.task)

    def request(self) -> Request:
        """The next request: the whole context, and a key that no other turn of the run shares."""
        episode = self.trajectory.episode
        return Request(episode, context_ids(self.chain), (*self.key, episode, self._written))

    @property
    def _written(self) -> int:
        """Turns of all chains so far."""
        return sum(len(chain.turns) for chain in self.trajectory.samples)

    def execute(self, completion: Completion) -> None:
        """Run a response in the environment and record the turn."""
        try:
            self._act(completion)
            self._check_budgets(completion)
        except Ending as end:
            self._finish(end)

    def _act(self, completion: Completion) -> None:
        text, response = self.chat.parse(completion.ids, self.env.task, self.context.tools)
        sub, reports = len(self._levels) > 1, False
        delegated = None if sub else self.context.delegated(response)
        played = response
        if sub:  # submit ends the sub-agent, not the episode
            played = Response(tuple(call for call in response.calls if call.tool != "submit"), response.problem)
            reports = played.calls != response.calls
        elif delegated is not None:
            played = Response()
        observation, _, terminated, truncated, info = self.env.step(played)
        turn = Turn(
            ids=completion.ids,
            logprobs=completion.logprobs,
            text=text,
            commands=[call.text for call in response.calls if call.tool != "submit"],
            policy_version=completion.version,
            malformed=bool(response.problem),
            submitted=info["submitted"],
            place=self._written,
        )
        result = info["result"]
        if result is not None:
            turn.exit_code, turn.status = result.exit_code, result.status
            turn.wall_s, turn.events = result.wall_s, result.events
        level = self._levels[-1]
        level.chain.turns.append(turn)
        level.history.append(turn)
        level.turns += 1
        over = terminated or truncated
        self._answer(turn, observation if over else self.context.observation(observation, level.history, self.env))
        if over:
            raise Judged(info["verdict"])
        if sub and (reports or level.turns >= self.context.config.subagent_turns):
            self._report()
        elif delegated is not None:
            self._delegate(delegated)
        if self.context.compresses(len(context_ids(self.chain)), len(self._levels[-1].history)):
            self._compress()

    def _answer(self, turn: Turn, observation: str) -> None:
        stopped = turn.ids[-1] == self.chat.stop_id
        turn.observation, turn.observation_ids = observation, self.chat.observation(observation, stopped)

    def _open(self, prompt_ids: list[int]) -> Trajectory:
        """A new chain of this episode; nothing in its prompt is trained."""
        root = self.trajectory
        chain = Trajectory(root.task, prompt_ids, [], backend=root.backend, seed=root.seed, episode=root.episode)
        root.chains.append(chain)
        return chain

    def _delegate(self, task: str) -> None:
        self._levels.append(_Level(self._open([]), task))
        self.inject()

    def _report(self) -> None:
        """A sub-agent is done: what it saw last answers the call that opened it."""
        report = self._levels.pop().history[-1].observation
        level = self._levels[-1]
        asked = level.history[-1]
        self._answer(asked, self.context.observation(report or "[done]", level.history, self.env))

    def _compress(self) -> None:
        """Go on in a new chain, if it is shorter: old turns as one line each, the last ones as they are."""
        level, keep = self._levels[-1], self.context.config.keep_turns
        ids = self.chat.prompt(f"{level.instruction}\n\n{summary(level.history[:-keep])}", self.env.task)
        for turn in level.history[-keep:]:
            ids += [*turn.ids, *turn.observation_ids]
        if len(ids) < len(context_ids(level.chain)):
            level.chain = self._open(ids)

    def _check_budgets(self, completion: Completion) -> None:
        self._sampled += len(completion.ids)
        if len(context_ids(self.chain)) + self.params.max_new_tokens > self.max_context:
            raise ContextFull(self.env.give_up())
        if self.max_tokens and self._sampled + self.params.max_new_tokens > self.max_tokens:
            raise TokensSpent(self.env.give_up())
        if time.monotonic() > self._deadline:
            raise TimeSpent(self.env.give_up())

    def _finish(self, end: Ending) -> None:
        self.done = True
        root = self.trajectory
        root.chains = [chain for chain in root.chains if chain.turns]
        for chain in root.samples:
            chain.reward, chain.reason, chain.verifier = end.verdict.reward, str(end), end.verdict.verifier
            chain.honest = end.verdict.honest
        root.events = end.verdict.events
