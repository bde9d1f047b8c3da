"""From a trajectory to one packed sample: which token belongs to which interaction chunk (paper, section 3.2.4).

A chunk is the run of tokens the agent generated between two environment interactions: one assistant response, its
sampled stop token included, whatever the number of tool calls in it. Observations belong to the next state and are in
no chunk. Chunk ids are carried from the rollout as recorded and never inferred from a mask: one filtered token would
split a chunk in two, and two responses without a token in between would merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mini_rome.types import Trajectory, Turn

OUTSIDE = -1  # chunk id of every token that is in no chunk


@dataclass
class PackedSample:
    """One episode as one training row; the lists over the completion have one length.

    prompt_ids: tokens that get no log-prob.
    completion_ids, logprobs (log mu; 0.0 off the policy's tokens), env_mask (1 = written by the policy),
    chunk_ids (0..K-1, else -1), il_chunk_ids (0..p-1 on expert tokens that may be imitated, else -1).
    policy_versions: one per chunk, K in all.
    contexts: which linear context each completion token stands in, 0 being that of prompt_ids; empty where that is
    the only one. A later one's prompt is part of the completion, outside the policy's tokens.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    chunk_ids: list[int]
    il_chunk_ids: list[int]
    policy_versions: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)


def turn_tokens(turns: Sequence[Turn]) -> Iterator[tuple[Turn, list[int], list[int]]]:
    """Each turn with its generated ids and the environment's ids after it; nothing follows the last response.

    The trailing observation conditions no token, so it is dropped here, the same way for every consumer.
    """
    for index, turn in enumerate(turns):
        yield turn, turn.ids, turn.observation_ids if index < len(turns) - 1 else []


def chunk_ids(trajectory: Trajectory, *, expert: bool = False) -> list[int]:
    """Chunk id of every completion token: the policy's chunks, or with `expert` those of the expert prefix.

    Two turns of two tokens and one token, one token of observation between them:

    >>> from mini_rome.types import Task, Trajectory, Turn, Verdict
    >>> task = Task("t", "f", "d", "do it", {}, ("ls", "cat a"), lambda files: Verdict(1.0))
    >>> turns = [Turn([5, 2], [-0.1, -0.2], "ls", ["ls"], "a", [7]), Turn([6], [-0.3], "cat a", ["cat a"], "b", [8])]
    >>> chunk_ids(Trajectory(task, [1], turns))
    [0, 0, -1, 1]
    >>> resumed = Trajectory(task, [1], turns, start=1)
    >>> chunk_ids(resumed), chunk_ids(resumed, expert=True)
    ([-1, -1, -1, 0], [0, 0, -1, -1])
    """
    ids: list[int] = []
    for index, (_, generated, observed) in enumerate(turn_tokens(trajectory.turns)):
        number = index if expert else index - trajectory.start
        mine = (index < trajectory.start) == expert
        ids += [number if mine else OUTSIDE] * len(generated) + [OUTSIDE] * len(observed)
    return ids


def validate_chunk_ids(ids: Iterable[int]) -> int:
    """K, the number of chunks in one row. ValueError when the ids are not 0..K-1 in order without gaps, or below -1.

    >>> validate_chunk_ids([0, 0, -1, 1])
    2
    """
    last = OUTSIDE
    for position, value in enumerate(ids):
        if value == OUTSIDE:
            continue
        if value not in (last, last + 1):
            raise ValueError(f"chunk id {value} at token {position} follows {last}: ids must be 0..K-1 in order")
        last = value
    return last + 1


def pack(trajectory: Trajectory, prefix: Literal["prompt", "completion"] = "prompt") -> PackedSample:
    """One packed sample per trajectory, never one per chunk.

    prefix "prompt" puts the expert prefix (its observations too) into prompt_ids: cheapest, and never trained.
    prefix "completion" keeps it among the completion tokens, env_mask 0, numbered in il_chunk_ids for the imitation
    term. Without policy turns the completion has no chunk, and with prefix "prompt" it is empty.
    VerifierError: the ids were rebuilt from text, or the verdict may be forged. ValueError: a policy response without
    tokens, or whose ids and log-probs differ in length.

    >>> from mini_rome.types import Task, Trajectory, Turn, Verdict
    >>> task = Task("t", "f", "d", "do it", {}, ("ls", "cat a"), lambda files: Verdict(1.0))
    >>> turns = [Turn([5, 2], [], "ls", ["ls"], "a", [7], source="expert"), Turn([6], [-0.3], "cat a", ["cat a"])]
    >>> sample = pack(Trajectory(task, [1], turns, start=1))
    >>> sample.prompt_ids, sample.completion_ids, sample.logprobs, sample.chunk_ids
    ([1, 5, 2, 7], [6], [-0.3], [0])
    >>> sample = pack(Trajectory(task, [1], turns, start=1), prefix="completion")
    >>> sample.completion_ids, sample.env_mask, sample.chunk_ids, sample.il_chunk_ids
    ([5, 2, 7, 6], [0, 0, 0, 1], [-1, -1, -1, 0], [0, 0, -1, -1])
    """
    trajectory.check_sampled()
    tokens: list[int] = []
    logprobs: list[float] = []
    boundary = 0  # where the policy takes over, in completion tokens
    for index, (turn, generated, observed) in enumerate(turn_tokens(trajectory.turns)):
        by_policy = index >= trajectory.start
        if by_policy and not len(generated) == len(turn.logprobs) > 0:
            raise ValueError(f"turn {index} has {len(generated)} token ids and {len(turn.logprobs)} log-probs")
        tokens += generated + observed
        logprobs += (turn.logprobs if by_policy else [0.0] * len(generated)) + [0.0] * len(observed)
        boundary = boundary if by_policy else len(tokens)
    ids = chunk_ids(trajectory)
    validate_chunk_ids(ids)
    cut = boundary if prefix == "prompt" else 0
    return PackedSample(
        prompt_ids=trajectory.prompt_ids + tokens[:cut],
        completion_ids=tokens[cut:],
        logprobs=logprobs[cut:],
        env_mask=[int(value != OUTSIDE) for value in ids[cut:]],
        chunk_ids=ids[cut:],
        il_chunk_ids=chunk_ids(trajectory, expert=True)[cut:],
        policy_versions=[turn.policy_version for turn in trajectory.policy_turns],
    )


def pack_episode(trajectory: Trajectory) -> PackedSample:
    """One packed sample for all chains of an episode: it has one reward, one K and one ratio per trajectory (eq. 4).

    Chains stand one after the other, each for a forward of its own (`contexts`). Chunks are numbered over the episode
    in the order in which they were asked for, so that G_k (eq. 7) counts what was still to come in all chains: the
    ids of a row with a sub-agent are not in order. Not in the paper, whose trajectories have one context. Raises as
    `pack` does.

    The chunk of two tokens opened a chain, whose own chunk came before the last one:

    >>> from mini_rome.types import Task, Trajectory, Turn, Verdict
    >>> task = Task("t", "f", "d", "do it", {}, ("ls", "cat a"), lambda files: Verdict(1.0))
    >>> first = Turn([5, 2], [-0.1, -0.2], "ls", [], observation_ids=[7], place=0)
    >>> last, other = Turn([6], [-0.3], "", [], place=2), Turn([8], [-0.4], "", [], place=1)
    >>> chain = Trajectory(task, [3, 4], [other])
    >>> sample = pack_episode(Trajectory(task, [1], [first, last], chains=[chain]))
    >>> sample.completion_ids, sample.contexts
    ([5, 2, 7, 6, 3, 4, 8], [0, 0, 0, 0, 1, 1, 1])
    >>> sample.chunk_ids, sample.logprobs
    ([0, 0, -1, 2, -1, -1, 1], [-0.1, -0.2, 0.0, -0.3, 0.0, 0.0, -0.4])
    """
    chains = [chain for chain in trajectory.samples if chain.policy_turns]
    if len(chains) < 2:
        return pack(chains[0] if chains else trajectory)
    order = trajectory.episode_turns
    number = {id(turn): k for k, turn in enumerate(order)}
    whole = PackedSample(pack(chains[0]).prompt_ids, [], [], [], [], [], [turn.policy_version for turn in order])
    for context, chain in enumerate(chains):
        part, turns = pack(chain), chain.policy_turns
        opening = part.prompt_ids if context else []
        whole.completion_ids += opening + part.completion_ids
        whole.logprobs += [0.0] * len(opening) + part.logprobs
        whole.env_mask += [0] * len(opening) + part.env_mask
        numbers = [OUTSIDE if k == OUTSIDE else number[id(turns[k])] for k in part.chunk_ids]
        whole.chunk_ids += [OUTSIDE] * len(opening) + numbers
        whole.il_chunk_ids += [OUTSIDE] * len(opening) + part.il_chunk_ids
        whole.contexts += [context] * (len(opening) + len(part.completion_ids))
    return whole
