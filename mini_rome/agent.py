"""The agent loop: run, step, query, execute. One response of the model is one turn and one interaction chunk."""

from __future__ import annotations

from dataclasses import dataclass

from mini_rome.env import Env
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.trace import ChatFormat, context_ids
from mini_rome.types import Trajectory, Turn


@dataclass
class Agent:
    """Writes one trajectory by asking the sampler and running its answers in the environment.

    The environment must have been reset to the state the trajectory stands at.
    key: (seed, step), the part of the sampling key that all turns of the episode share.
    max_context: ids of prompt and response together; an episode that would exceed it is cut and still verified.
    """

    chat: ChatFormat
    env: Env
    trajectory: Trajectory
    params: SamplingParams
    key: tuple[int, int] = (0, 0)
    max_context: int = 4096
    done: bool = False

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

    def request(self) -> Request:
        """The next request: the whole context, and a key that no other turn of the run shares."""
        episode = self.trajectory.episode
        return Request(episode, context_ids(self.trajectory), (*self.key, episode, len(self.trajectory.turns)))

    def execute(self, completion: Completion) -> None:
        """Run a response in the environment and record the turn."""
        text, response = self.chat.parse(completion.ids, self.env.task)
        observation, reward, terminated, truncated, info = self.env.step(response)
        result = info["result"]
        turn = Turn(
            ids=completion.ids,
            logprobs=completion.logprobs,
            text=text,
            commands=[call.text for call in response.calls if call.tool != "submit"],
            observation=observation,
            observation_ids=self.chat.observation(observation, stopped=completion.ids[-1] == self.chat.stop_id),
            policy_version=completion.version,
            malformed=bool(response.problem),
            submitted=info["submitted"],
        )
        if result is not None:
            turn.exit_code, turn.status = result.exit_code, result.status
            turn.wall_s, turn.events = result.wall_s, result.events
        self.trajectory.turns.append(turn)
        if terminated or truncated:
            self._finish(info["verdict"].reward, info["verdict"].reason, info["verdict"].verifier)
        elif len(context_ids(self.trajectory)) + self.params.max_new_tokens > self.max_context:
            verdict = self.env.give_up()
            reason = verdict.reason if verdict.reward is None else f"context full; {verdict.reason}"
            self._finish(verdict.reward, reason, verdict.verifier)

    def _finish(self, reward: float | None, reason: str, verifier: str) -> None:
        self.done = True
        self.trajectory.reward = reward
        self.trajectory.reason = reason
        self.trajectory.verifier = verifier
