"""Common wrong answers: FUNCTION__name, graded in place of FUNCTION. Each must lose points. Not released."""

import torch

from mini_rome import credit, loss


def chunk_returns__from_the_first(chunk_ids, rewards, gamma):
    """gamma^(k-1): the first chunk gets R."""
    return torch.where(chunk_ids >= 0, rewards.nan_to_num(0.0)[:, None] * gamma**chunk_ids, 0.0)


def chunk_returns__last_discounted(chunk_ids, rewards, gamma):
    """The last chunk is discounted, too."""
    return gamma * credit.chunk_returns(chunk_ids, rewards, gamma)


def chunk_returns__by_token(chunk_ids, rewards, gamma):
    """gamma for each token, not for each chunk."""
    inside = chunk_ids >= 0
    behind = inside.sum(1, keepdim=True) - inside.cumsum(1)
    return torch.where(inside, rewards.nan_to_num(0.0)[:, None] * gamma**behind, 0.0)


def chunk_returns__nan(chunk_ids, rewards, gamma):
    """A reward of NaN spoils its row."""
    gains = credit.chunk_returns(chunk_ids, rewards, gamma)
    return torch.where(rewards.isnan()[:, None], rewards[:, None], gains)


def chunk_ratios__product(numerator, denominator, chunk_ids):
    """The product over the chunk's tokens, not their geometric mean."""
    sizes = torch.cat([row[row >= 0].bincount() for row in chunk_ids])
    return loss.mismatch_ratios(numerator, denominator, chunk_ids, "chunk") ** sizes


def chunk_ratios__arithmetic(numerator, denominator, chunk_ids):
    """The mean of the ratios, not the exp of the mean log-ratio."""
    ratio = (numerator - denominator).exp()
    rows = zip(ratio, chunk_ids, strict=True)
    return torch.stack([row[ids == k].mean() for row, ids in rows for k in range(int(ids.max()) + 1)])


def chunk_ratios__inverse(numerator, denominator, chunk_ids):
    """Upside down."""
    return loss.mismatch_ratios(denominator, numerator, chunk_ids, "chunk")


def chunk_mask__two_sided(old_logps, sampler_logps, chunk_ids, threshold):
    """Chunks that the sampler found likelier are masked, too."""
    ratio = loss.mismatch_ratios(old_logps, sampler_logps, chunk_ids, "chunk")
    return (ratio <= threshold) & (ratio >= 1 / threshold)


def chunk_mask__upside_down(old_logps, sampler_logps, chunk_ids, threshold):
    """mu / pi_old is compared with H."""
    return loss.mismatch_ratios(sampler_logps, old_logps, chunk_ids, "chunk") <= threshold


def ipa_loss__ratio_on_positives(logps, old, sampler, ids, returns, rewards, threshold):
    """The ratio also where R > 0."""
    return loss.ipa_loss(
        logps, old, sampler, ids, returns, rewards, mismatch_threshold=threshold, positive_ratio=True
    ).loss


def ipa_loss__token_ratio(logps, old, sampler, ids, returns, rewards, threshold):
    """Each token has its own ratio."""
    return loss.ipa_loss(
        logps, old, sampler, ids, returns, rewards, mismatch_threshold=threshold, ratio_level="token"
    ).loss


def ipa_loss__no_mask(logps, old, sampler, ids, returns, rewards, threshold):
    """No chunk is masked."""
    return loss.ipa_loss(logps, old, sampler, ids, returns, rewards, mask_level="none").loss


def ipa_loss__mask_on_rho(logps, old, sampler, ids, returns, rewards, threshold):
    """The mask looks at pi_theta / pi_old."""
    return loss.ipa_loss(
        logps, old, 2 * old - logps.detach(), ids, returns, rewards, mismatch_threshold=threshold
    ).loss


def ipa_loss__sum(logps, old, sampler, ids, returns, rewards, threshold):
    """Not divided by N."""
    return loss.ipa_loss(
        logps, old, sampler, ids, returns, rewards, mismatch_threshold=threshold, aggregation="sum"
    ).loss


def ipa_loss__mu_for_old(logps, old, sampler, ids, returns, rewards, threshold):
    """mu stands in for pi_old, so nothing is masked."""
    return loss.ipa_loss(logps, sampler, sampler, ids, returns, rewards, mismatch_threshold=threshold).loss


def ipa_loss__gradient_through_the_ratio(logps, old, sampler, ids, returns, rewards, threshold):
    """The loss has the right value; the gradient flows through rho."""
    right = loss.ipa_loss(logps, old, sampler, ids, returns, rewards, mismatch_threshold=threshold).loss
    inside = ids >= 0
    step = torch.where(inside, logps, 0.0) - torch.where(inside, old, 0.0)
    failed = (rewards <= 0)[:, None] & inside
    extra = torch.where(failed, returns * step.exp().clamp(max=1), 0.0).sum()
    return right + (extra - extra.detach())
