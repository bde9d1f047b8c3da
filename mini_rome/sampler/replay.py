"""Samplers that keep what another one answered, and that answer from such a record: a replay needs no model.

A record is one JSON object a line: a hash of the context's ids, the sampled ids, log-probs and version. The n-th
request with the same context gets the n-th answer that was recorded for it. Not in the paper.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Collection
from pathlib import Path

from transformers import PreTrainedModel

from mini_rome.errors import RecordError
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams


def context_hash(ids: list[int]) -> str:
    """Identity of a context."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


class RecordingSampler(Sampler):
    """Answers with another sampler and appends each answer to a file."""

    def __init__(self, sampler: Sampler, path: str | Path) -> None:
        self.sampler, self.name, self.version = sampler, sampler.name, sampler.version
        self._file = open(path, "a", encoding="utf-8")
        self._lock = threading.Lock()

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        completions = self.sampler.generate(requests, params)
        with self._lock:
            for request, completion in zip(requests, completions, strict=True):
                row = {"context": context_hash(request.ids), "ids": completion.ids,
                       "logprobs": completion.logprobs, "version": completion.version}  # fmt: skip
                self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self._file.flush()
        return completions

    def sync(self, model: PreTrainedModel, version: int) -> None:
        self.sampler.sync(model, version)
        self.version = version

    def forget(self, episodes: Collection[int] | None = None) -> None:
        self.sampler.forget(episodes)

    def close(self) -> None:
        self._file.close()


class ReplaySampler(Sampler):
    """Answers from a record; a context that is not there is an error that says so."""

    name = "replay"

    def __init__(self, path: str | Path) -> None:
        """RecordError: the file is missing or a line is no answer."""
        self.path = Path(path)
        self._answers: dict[str, deque[Completion]] = defaultdict(deque)
        if not self.path.is_file():
            raise RecordError(f"{path} does not exist: record one with `mini-rome proxy --record {path}`")
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                answer = Completion(list(row["ids"]), list(row["logprobs"]), int(row["version"]))
                self._answers[row["context"]].append(answer)
            except (ValueError, TypeError, LookupError) as error:
                raise RecordError(f"{path}, line {number}: no recorded answer ({error})") from None

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        left = self._answers.get(context_hash(request.ids))
        if not left:
            raise RecordError(
                f"{self.path} has no answer left for this context of {len(request.ids)} tokens: the agent, its task "
                f"or the tokenizer is another one than when it was recorded"
            )
        return left.popleft()

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Only the version changes: there are no weights."""
        self.version = version

    def forget(self, episodes: Collection[int] | None = None) -> None:
        """Nothing is kept of contexts."""
