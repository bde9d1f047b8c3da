"""Common wrong answers: FUNCTION__name, graded in place of FUNCTION. Each must lose points. Not released."""

from mini_rome import chunking

OUTSIDE = -1


def chunk_ids__observations_in_chunks(trajectory):
    """An observation belongs to the chunk before it."""
    ids = []
    for number, turn in enumerate(trajectory.turns):
        ids += [number] * (len(turn.ids) + len(turn.observation_ids))
    return ids


def chunk_ids__runs_of_the_mask(trajectory):
    """Chunks are runs of the policy's tokens."""
    ids, number, inside = [], -1, False
    for value in chunking.chunk_ids(trajectory):
        number += value != OUTSIDE and not inside
        inside = value != OUTSIDE
        ids.append(number if inside else OUTSIDE)
    return ids


def chunk_ids__last_observation_kept(trajectory):
    """The observation after the last response is numbered, too."""
    return chunking.chunk_ids(trajectory) + [OUTSIDE] * len(trajectory.turns[-1].observation_ids)


def chunk_ids__prefix_counted(trajectory):
    """The policy's first chunk has the number of its turn, not 0."""
    return [k if k == OUTSIDE else k + trajectory.start for k in chunking.chunk_ids(trajectory)]


def chunk_ids__from_one(trajectory):
    """Chunks are numbered from 1."""
    return [k if k == OUTSIDE else k + 1 for k in chunking.chunk_ids(trajectory)]


def expert_chunk_ids__all_turns(trajectory):
    """All turns are numbered, the policy's as well."""
    return chunking.chunk_ids(chunking.Trajectory(trajectory.task, [1], trajectory.turns))


def completion_ids__prompt_kept(trajectory):
    """The prompt is part of the completion."""
    return trajectory.prompt_ids + chunking.pack(trajectory, prefix="completion").completion_ids


def completion_ids__prefix_cut(trajectory):
    """The expert's turns are left out."""
    return chunking.pack(trajectory).completion_ids


def number_of_chunks__largest_id(ids):
    """K is the largest id."""
    return max(ids)


def number_of_chunks__not_checked(ids):
    """Gaps are not noticed."""
    return max(ids) + 1
