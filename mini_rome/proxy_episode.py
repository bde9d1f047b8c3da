"""What the proxy records of one episode: every call token for token, as chains that can be trained on.

A request's messages are looked up among the prefixes that were recorded: the longest known one gives its exact ids,
the rest is the environment's and is encoded once. So past responses are the sampled ids whatever text the agent sends
back, and a history that the agent edited is another prefix: a branch, kept as a chain of its own, in whose prompt the
shared part stands untrained. An assistant's message that was never sampled here is encoded from its text, as context
only, and counted.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from mini_rome.proxy_protocol import Asked, Message, Refused
from mini_rome.sampler.base import Request, SamplingParams
from mini_rome.trace import ChatFormat, Response
from mini_rome.types import SafetyEvent, Trajectory, Turn

Key = bytes


@dataclass(frozen=True)
class Rules:
    """What an environment enforces turn by turn, for an agent that acts out of its sight.

    max_turns: responses, those on their way included. max_malformed: in a row. watch: is given each command before
    the agent is; the safety events it returns become the turn's.
    """

    max_turns: int
    max_malformed: int
    watch: Callable[[str], tuple[SafetyEvent, ...]]


@dataclass(frozen=True)
class _Node:
    """A recorded prefix: it ends with turn `turns - 1` of a chain."""

    chain: Trajectory
    turns: int

    @property
    def ids(self) -> list[int]:
        """Up to and with the last response."""
        ids = list(self.chain.prompt_ids)
        for turn in self.chain.turns[: self.turns - 1]:
            ids += [*turn.ids, *turn.observation_ids]
        return ids + self.chain.turns[self.turns - 1].ids


@dataclass(frozen=True)
class Pending:
    """A call on its way: its request, and where its answer will be recorded."""

    request: Request
    params: SamplingParams
    key: Key  # of its messages
    base: _Node | None
    between: list[int]  # ids after the base's response
    text: str  # what the environment said since
    number: int


@dataclass(frozen=True)
class Answer:
    """What a backend answered: ids with log-probs of a sampler, or ids rebuilt from an external model's text."""

    ids: list[int]
    logprobs: list[float]
    version: int
    text: str
    response: Response
    stopped: bool = True
    retokenised: bool = False


def key_of(messages: Iterable[Message], after: Key = b"") -> Key:
    """Identity of a conversation, one message at a time: roles, texts and calls."""
    for message in messages:
        said = repr((message.role, message.text, message.calls)).encode()
        after = hashlib.blake2b(after + said, digest_size=16).digest()
    return after


@dataclass
class Episode:
    """One episode behind a token. `trajectory` comes empty, or with an expert's turns that the agent goes on from.

    prefix: the messages that these turns are to the agent. key: (seed, step) of the sampling. counts: what was not
    plain (branches, retokenised messages, unused options, answers nobody received). rules: None where the environment
    sees every turn itself.
    """

    chat: ChatFormat
    trajectory: Trajectory
    params: SamplingParams = field(default_factory=SamplingParams)
    key: tuple[int, int] = (0, 0)
    max_context: int = 4096
    prefix: Sequence[Message] = ()
    closed: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failed: bool = False  # a call got no answer because the model is down: the episode cannot be scored
    rules: Rules | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[Key, _Node] = {}
        self._answers: list[tuple[Key, _Node]] = []
        self._path: list[tuple[Message, Key]] = []  # of the last request: an object that comes again has its key
        self._first = self._begun = len(self.trajectory.turns)
        self._malformed, self._submitted = 0, False  # in a row; by the agent
        after, turns = b"", 0
        for message in self.prefix:
            after = key_of([message], after)
            if message.role == "assistant":
                turns += 1
                self._nodes[after] = _Node(self.trajectory, turns)

    @property
    def ended(self) -> bool:
        """Whether the rules let no further response follow: submitted, out of turns, too often malformed."""
        if self.rules is None:
            return False
        spent = self._begun - self._first >= self.rules.max_turns
        return self._submitted or spent or self._malformed >= self.rules.max_malformed

    @property
    def calls(self) -> int:
        """Calls that were answered and recorded."""
        return len(self._answers)

    @property
    def last_turn(self) -> Turn | None:
        """The turn that was recorded last."""
        if not self._answers:
            return None
        node = self._answers[-1][1]
        return node.chain.turns[node.turns - 1]

    def begin(self, asked: Asked) -> Pending:
        """Find what is known of the messages, encode the rest. Refused (400): the context would not fit."""
        with self._lock:
            self._check_open()
            if self.ended:
                raise _over()
            self.counts.update(f"unused: {name}" for name in asked.unused)
            base, rest, path = self._find(asked.messages)
            self._check_size(rest)
            rest = _joined(rest)
            pieces = [self._encode(message) for message in rest]
            if base is None:
                between = self.chat.opening(pieces)
                ids = between
            else:
                between = self.chat.between(pieces, base.chain.turns[base.turns - 1].ids[-1] == self.chat.stop_id)
                ids = base.ids + between
            limit = min(self.params.max_new_tokens, asked.max_tokens or self.params.max_new_tokens)
            if len(ids) + limit > self.max_context:
                raise _too_long(f"{len(ids)} tokens and {limit} to sample", self.max_context)
            self._path = path  # only what fits is kept
            key = path[-1][1] if path else b""
            number = self._begun
            self._begun += 1
            request = Request(self.trajectory.episode, ids, (*self.key, self.trajectory.episode, number))
            text = "\n".join(message.text for message in rest if message.role != "assistant")
            return Pending(request, replace(self.params, max_new_tokens=limit), key, base, between, text, number)

    def _find(self, messages: Sequence[Message]) -> tuple[_Node | None, Sequence[Message], list[tuple[Message, Key]]]:
        """(longest recorded prefix, the messages after it, each message with the key of all up to it)."""
        same = takewhile(lambda pair: pair[0][0] is pair[1], zip(self._path, messages, strict=False))
        path = [before for before, _ in same]
        for message in messages[len(path) :]:
            path.append((message, key_of([message], path[-1][1] if path else b"")))
        for known in range(len(path), 0, -1):
            message, key = path[known - 1]
            if message.role == "assistant" and key in self._nodes:
                return self._nodes[key], messages[known:], path
        return None, messages, path

    def _check_size(self, rest: Sequence[Message]) -> None:
        """Before megabytes are encoded: no token is longer than the vocabulary's longest, no message without one."""
        if len(rest) > self.max_context:
            raise _too_long(f"{len(rest)} messages", self.max_context)
        characters = sum(len(message.text) + sum(map(len, message.bodies)) for message in rest)
        if characters > self.max_context * self.chat.longest_token:
            raise _too_long(f"{characters} characters", self.max_context)

    def _encode(self, message: Message) -> list[int]:
        if message.role == "assistant":
            self.counts["retokenised"] += 1
            return self.chat.past(message.text, message.bodies)
        return self.chat.message(message.role, message.text)

    def commit(self, pending: Pending, answer: Answer, said: Message) -> Turn:
        """Record an answer; `said` is the message that the agent is sent. Refused (410): the episode is over."""
        with self._lock:
            self._check_open()
            turn = Turn(
                ids=answer.ids, logprobs=answer.logprobs, text=answer.text,
                commands=[call.text for call in answer.response.calls if call.tool != "submit"],
                policy_version=answer.version, malformed=bool(answer.response.problem),
                submitted=any(call.tool == "submit" for call in answer.response.calls), place=pending.number,
            )  # fmt: skip
            self._malformed = self._malformed + 1 if turn.malformed else 0
            self._submitted |= turn.submitted
            if self.rules is not None:
                turn.events = tuple(event for command in turn.commands for event in self.rules.watch(command))
            chain = self._chain(pending)
            chain.retokenised |= answer.retokenised
            chain.turns.append(turn)
            node = _Node(chain, len(chain.turns))
            self._nodes[key_of([said], pending.key)] = node
            self._answers.append((pending.key, node))
            return turn

    def _chain(self, pending: Pending) -> Trajectory:
        """The chain that this answer extends: the base's where it is still its tip, else a new one."""
        base, root = pending.base, self.trajectory
        if base is None and not root.turns:
            root.prompt_ids = pending.request.ids
            return root
        if base is not None and len(base.chain.turns) == base.turns:
            last = base.chain.turns[-1]
            if not last.observation_ids or last.observation_ids == pending.between:
                last.observation, last.observation_ids = pending.text, pending.between
                return base.chain
        self.counts["branches"] += 1
        chain = Trajectory(root.task, pending.request.ids, [], backend=root.backend, seed=root.seed,
                           episode=root.episode, policy=root.policy)  # fmt: skip
        root.chains.append(chain)
        return chain

    def close(self) -> Trajectory:
        """No call is recorded from now on. Chains without a response of the policy are dropped."""
        with self._lock:
            self.closed = True
            self._drop_superseded()
            root = self.trajectory
            root.chains = [chain for chain in root.chains if chain.turns]
            self._nodes.clear()
            self._path = []
            return root

    def _drop_superseded(self) -> None:
        """Answers that led nowhere because the agent asked the same again: a retry, a stream it hung up on."""
        asked = Counter(key for key, _ in self._answers)
        for key, node in self._answers[:-1]:
            if asked[key] > 1 and len(node.chain.turns) == node.turns and not node.chain.turns[-1].observation_ids:
                node.chain.turns.pop()
                asked[key] -= 1
                self.counts["superseded"] += 1

    def lost(self) -> None:
        """An answer that nobody waited for: not recorded."""
        self.counts["undelivered"] += 1

    def _check_open(self) -> None:
        if self.closed:
            raise _over()


def _joined(messages: Iterable[Message]) -> list[Message]:
    """The answers to several calls of one response are one observation without a last newline, as in our own loop."""
    joined: list[Message] = []
    for message in messages:
        if message.role != "tool":
            joined.append(message)
            continue
        text = message.text.rstrip("\n")
        if joined and joined[-1].role == "tool":
            text = "\n".join(part for part in (joined[-1].text, text) if part)
            joined.pop()
        joined.append(replace(message, text=text))
    return joined


def _over() -> Refused:
    return Refused(410, "the episode is over: no call is answered or recorded any more", "episode_over")


def _too_long(found: str, limit: int) -> Refused:
    return Refused(400, f"{found} are more than the maximum context length of {limit} tokens; shorten the messages",
                   "context_length_exceeded", "messages")  # fmt: skip
