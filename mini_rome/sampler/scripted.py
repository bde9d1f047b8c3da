"""A model that answers from a list: for tests, demonstrations and anything where the agent's words must be known."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from mini_rome.errors import ConfigError
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams


class ScriptedSampler(Sampler):
    """Turn t of every episode gets replies[t]; with probability 1, so that every log-prob is 0."""

    name = "scripted"

    def __init__(self, replies: Sequence[Sequence[int]]) -> None:
        self.replies = [list(reply) for reply in replies]

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        return [self._reply(request.key[-1], params) for request in requests]

    def _reply(self, turn: int, params: SamplingParams) -> Completion:
        if turn >= len(self.replies):
            raise ConfigError(f"the script has {len(self.replies)} replies and was asked for turn {turn}")
        ids = self.replies[turn][: params.max_new_tokens]
        return Completion(ids, [0.0] * len(ids), self.version)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Only the version changes: there are no weights."""
        self.version = version

    def forget(self, episodes: Collection[int] | None = None) -> None:
        """Nothing is kept."""
