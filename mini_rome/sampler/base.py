"""Who generates tokens: the contract every sampler keeps.

Token ids in, token ids and log-probs out; nothing is decoded between turns. The log-probs are log mu, the sampler's
own, at temperature 1 and before any top-p or top-k cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from mini_rome.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. Training needs the defaults: anything else would bias every ratio."""

    max_new_tokens: int = 48
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: must be in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: must be 0 (off) or more")


@dataclass(frozen=True)
class Request:
    """One response to generate.

    ids: the whole context, which must start with the context of the same episode's request before.
    key: what the randomness depends on: (seed, step, episode, turn). The same key and logits give the same tokens,
    whatever else is in the batch.
    """

    episode: int
    ids: list[int]
    key: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """What was sampled; ids and logprobs have the same length, the stop token included when it was reached."""

    ids: list[int]
    logprobs: list[float]
    version: int


def uniforms(key: tuple[int, ...], count: int) -> np.ndarray:
    """`count` numbers in [0, 1) that depend on the key alone. Shape (count,)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


class Sampler(ABC):
    """A generator of responses that carries the version of the weights it samples with."""

    name: str
    version: int = 0

    @abstractmethod
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order."""

    @abstractmethod
    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Sample with these weights from now on."""

    @abstractmethod
    def forget(self, episodes: Collection[int] | None = None) -> None:
        """Drop what is kept of these episodes' contexts, or of all: their next request starts from nothing."""

    def sleep(self) -> None:  # noqa: B027
        """Give up device memory until `wake`, `sync` or `generate`; twice is once. By default nothing: it stays."""

    def wake(self) -> None:  # noqa: B027
        """Be ready to generate, with the weights of the last sync; contexts kept may be gone. By default nothing."""
