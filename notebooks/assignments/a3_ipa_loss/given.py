"""What `test_weights` is tried on: a right implementation and the bugs described; more bugs when graded."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_rome.course.paper import Detection
from mini_rome.credit import chunk_returns
from mini_rome.loss import ipa_loss

Row = list[float]


def right(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """Minus the gradient of the loss in the paper's literal form, a sum."""
    theta, before, mu = (torch.tensor([row], dtype=torch.float64) for row in (logps, old, sampler))
    theta.requires_grad_()
    chunks, rewards = torch.tensor([ids]), torch.tensor([reward], dtype=torch.float64)
    gains = chunk_returns(chunks, rewards, 1.0)
    output = ipa_loss(
        theta, before, mu, chunks, gains, rewards, mismatch_threshold=threshold, aggregation="sum"
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(output.loss, theta)
    return (-gradient[0]).tolist()


def chunk_mean(values: Tensor, ids: Tensor) -> Tensor:
    """(T,) -> (T,): the mean over the token's chunk, 0 outside."""
    result = torch.zeros_like(values)
    for k in range(int(ids.max()) + 1):
        result[ids == k] = values[ids == k].mean()
    return result


def mu_as_a_factor(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """The measure that the trajectories are drawn from is taken for a factor of the sum."""
    factor = chunk_mean(torch.tensor(sampler, dtype=torch.float64), torch.tensor(ids)).exp()
    return (torch.tensor(right(logps, old, sampler, ids, reward, threshold)) * factor).tolist()


def mask_on_rho(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> Row:
    """The mask looks at how far the policy moved, and not at how far sampler and trainer differ."""
    moved = torch.tensor(logps, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
    keep = chunk_mean(moved, torch.tensor(ids)).exp() <= threshold
    return (torch.tensor(right(logps, old, old, ids, reward, threshold)) * keep).tolist()


def check(logps: Row, old: Row, sampler: Row, ids: list[int], reward: float, threshold: float) -> None:
    """The grader computes only with one short row of plain numbers."""
    rows = (logps, old, sampler, ids)
    if not all(isinstance(row, list) and 1 <= len(row) <= 32 and len(row) == len(ids) for row in rows):
        raise ValueError("logps, old_logps, sampler_logps and chunk_ids must be lists of one length, 1 to 32")
    numbers = [*logps, *old, *sampler, reward, threshold]
    if not all(type(x) in (int, float) and abs(x) < 1000 for x in numbers) or threshold <= 0:
        raise ValueError("log-probs, reward and threshold must be finite numbers, the threshold above 0")
    if not all(type(k) is int and -1 <= k < 32 for k in ids) or max(ids) < 0:
        raise ValueError("chunk_ids must be integers from -1 to 31, one of them in a chunk")


BUGS = {"mu as a factor": mu_as_a_factor, "the mask on rho": mask_on_rho}
DETECTIONS = [Detection("test_weights", 6, right, BUGS, check)]
