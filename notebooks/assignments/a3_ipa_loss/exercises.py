"""Assignment 3: the IPA loss (paper, section 3.2.4, eqs. 7-9), in PyTorch.

Three policies: mu sampled the tokens, pi_old are the trainer's weights of that time, pi_theta are the weights now.
Log-probs are (B, T) float64 tensors, chunk_ids (B, T) int64 with -1 outside chunks, rewards (B,). A row whose reward
is NaN cannot be scored: it is outside everywhere. PyTorch is there when you are graded; of mini_rome, only
mini_rome.types is.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mini_rome import credit, loss


def chunk_returns(chunk_ids: Tensor, rewards: Tensor, gamma: float) -> Tensor:
    """G_k = gamma^(K-k) R at every token of chunk k, 0 outside (eq. 7); (B, T), in the dtype of rewards.

    k = 1..K in the paper: the last chunk gets R itself. K is each row's own. A reward of NaN gives 0.
    """
    return credit.chunk_returns(chunk_ids, rewards, gamma)


def chunk_ratios(numerator: Tensor, denominator: Tensor, chunk_ids: Tensor) -> Tensor:
    """exp(mean over a chunk's tokens of (numerator - denominator)), one number a chunk, (n,): row by row, in order.

    With (log pi_theta, log pi_old) this is rho_c of eq. 8; with (log pi_old, log mu) it is what the mask looks at.
    """
    return loss.mismatch_ratios(numerator, denominator, chunk_ids, "chunk")


def chunk_mask(old_logps: Tensor, sampler_logps: Tensor, chunk_ids: Tensor, threshold: float) -> Tensor:
    """m_c of every chunk (eq. 8), (n,) bool, in the order of `chunk_ratios`: the ratio pi_old / mu is at most H.

    One-sided: a chunk that the sampler found likelier than the trainer did is kept.
    """
    return loss.mismatch_ratios(old_logps, sampler_logps, chunk_ids, "chunk") <= threshold


def ipa_loss(
    logps: Tensor,
    old_logps: Tensor,
    sampler_logps: Tensor,
    chunk_ids: Tensor,
    returns: Tensor,
    rewards: Tensor,
    threshold: float,
) -> Tensor:
    """The scalar whose gradient for logps is minus eq. 9, divided by N.

    R > 0:  sum over chunks of m_c G_c sum_t grad log pi_theta(t)
    R <= 0: sum over chunks of m_c sg[clip(rho_c, 0, 1)] G_c sum_t grad log pi_theta(t)

    returns (B, T) are the G of `chunk_returns`. sg: no gradient flows through the ratio. N is the number of tokens in
    chunks of rows with a finite reward, counted before the mask. Values outside chunks may be NaN or infinite and
    change neither the loss nor its gradient, which is 0 there.
    """
    inputs = (logps, old_logps, sampler_logps, chunk_ids, returns, rewards)
    return loss.ipa_loss(*inputs, mismatch_threshold=threshold).loss


def test_weights(implementation: Callable[..., list[float]]) -> None:
    """A test: it must pass for a right implementation and fail, by `assert`, for a wrong one.

    implementation(logps, old_logps, sampler_logps, chunk_ids, reward, threshold) takes lists of one row (at most 32
    tokens) and returns, for each token, the weight of grad log pi_theta(t) in eq. 9 with gamma = 1: plus, not minus,
    and not divided by N.

    Bugs that were found in the wild: mu(c) as a factor of the weight, and the mask on rho_c instead of pi_old / mu.
    Compare with a tolerance. Each call costs the grader some seconds, so let a row have a chunk for each question.
    """
    ids, log2 = [0, 0, -1, 1, 2, 3, 4], 0.6931471805599453  # chunks: moved up, moved down, as they were (three)
    old = [-2.0, -1.0, -9.0, -3.0, -1.5, -1.5, -1.5]
    moved = [log2, log2, 5.0, -log2, 0.0, 0.0, 0.0]
    gap = [0.0, 0.0, -5.0, 0.0, 0.0, 1.0, -1.0]  # log mu - log pi_old: the last chunk is masked
    for reward, wanted in ((1.0, [1, 1, 0, 1, 1, 1, 0]), (-1.0, [-1, -1, 0, -0.5, -1, -1, 0])):
        logps, sampler = ([a + b for a, b in zip(old, by, strict=True)] for by in (moved, gap))
        got = implementation(logps, old, sampler, ids, reward, 1.02)
        assert all(abs(a - b) < 1e-6 for a, b in zip(got, wanted, strict=True)), (got, wanted)
