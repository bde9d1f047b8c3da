"""Batched sampling with a transformers model: the default on a CPU.

The key-value cache lives across the turns of an episode, so a turn costs only its new tokens. Rows of different
length share one cache with holes: a slot that a row does not use is masked and never attended to.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams, uniforms


def filtered_log_probs(log_probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probs (B, V) after temperature, top-k and top-p, renormalised: the distribution that tokens are drawn from."""
    if params.temperature == 0:
        best = log_probs.argmax(-1, keepdim=True)
        return torch.full_like(log_probs, -torch.inf).scatter(-1, best, 0.0)
    scaled = torch.log_softmax(log_probs / params.temperature, dim=-1)
    if params.top_k:
        kth = scaled.topk(min(params.top_k, scaled.size(-1)), dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if params.top_p < 1:
        ordered, index = torch.log_softmax(scaled, -1).sort(dim=-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        cut = (mass_before >= params.top_p).scatter(-1, index, mass_before >= params.top_p)
        scaled = scaled.masked_fill(cut, -torch.inf)
    return torch.log_softmax(scaled, dim=-1)


def draw(log_probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw, one token a row: log_probs (B, V), uniform (B,) in [0, 1) -> ids (B,)."""
    cumulative = log_probs.double().exp().cumsum(-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=log_probs.size(-1) - 1)


class _Context:
    """The cache of some episodes: for each row its ids, and which of the shared slots it uses."""

    def __init__(self, episodes: list[int], cache: DynamicCache, mask: torch.Tensor, ids: list[list[int]]) -> None:
        self.episodes = episodes
        self.cache = cache
        self.mask = mask  # (B, S) bool
        self.ids = ids

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, and only the slots one of them uses."""
        index = torch.tensor(rows, dtype=torch.long, device=self.mask.device)
        self.mask = self.mask[index]
        slots = self.mask.any(0).nonzero().squeeze(-1)
        for layer in self.cache.layers:
            layer.keys = layer.keys[index][:, :, slots]
            layer.values = layer.values[index][:, :, slots]
        self.mask = self.mask[:, slots]
        self.episodes = [self.episodes[row] for row in rows]
        self.ids = [self.ids[row] for row in rows]


class TransformersSampler(Sampler):
    """Samples with the trainer's own model, or with a copy of it in another precision.

    dtype: None shares the given model (mu = pi_old up to rounding); a dtype keeps a copy in that precision, so that mu
    really differs from pi_old.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, stop_id: int, dtype: torch.dtype | None = None) -> None:
        self.stop_id = stop_id
        self.dtype = dtype
        self._context: _Context | None = None
        self.sync(model, version=0)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        self._model = model if self.dtype is None else copy.deepcopy(model).to(self.dtype).eval()
        self.version = version
        self.forget()

    def forget(self) -> None:
        self._context = None

    @torch.inference_mode()
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        if not requests:
            return []
        was_training = self._model.training
        self._model.eval()
        try:
            return self._generate(requests, params)
        finally:
            self._model.train(was_training)

    def _generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        context = self._resume(requests)
        uniform = np.stack([uniforms(request.key, params.max_new_tokens) for request in requests])
        uniform = torch.from_numpy(uniform).to(self._model.device)
        fresh = [request.ids[len(ids) :] for request, ids in zip(requests, context.ids, strict=True)]
        logits = self._feed(context, fresh)
        alive = torch.ones(len(requests), dtype=torch.bool, device=logits.device)
        tokens, scores, kept = [], [], []
        for position in range(params.max_new_tokens):
            log_probs = torch.log_softmax(logits.float(), dim=-1)
            token = draw(filtered_log_probs(log_probs, params), uniform[:, position])
            tokens.append(token)
            scores.append(log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1))
            kept.append(alive)
            alive = alive & (token != self.stop_id)
            if position + 1 == params.max_new_tokens or not alive.any():
                break
            logits = self._feed_one(context, token, alive)
        lengths = torch.stack(kept).sum(0).tolist()
        token_rows, score_rows = torch.stack(tokens, 1).tolist(), torch.stack(scores, 1).tolist()
        for ids, new, row, length in zip(context.ids, fresh, token_rows, lengths, strict=True):
            # The last token was sampled but not fed: it belongs to the next request's new tokens.
            ids += [*new, *row[: length - 1]]
        return [
            Completion(row[:length], score[:length], self.version)
            for row, score, length in zip(token_rows, score_rows, lengths, strict=True)
        ]

    def _resume(self, requests: list[Request]) -> _Context:
        """The kept cache when it covers exactly a subset of its episodes with unchanged pasts, else an empty one."""
        context, episodes = self._context, [request.episode for request in requests]
        rows = {episode: row for row, episode in enumerate(context.episodes)} if context else {}
        usable = context is not None and all(
            request.episode in rows and request.ids[: len(context.ids[rows[request.episode]])]
            == context.ids[rows[request.episode]] != request.ids
            for request in requests
        )
        if context is not None and usable:
            if episodes != context.episodes:
                context.select([rows[episode] for episode in episodes])
            return context
        mask = torch.zeros((len(requests), 0), dtype=torch.bool, device=self._model.device)
        self._context = _Context(episodes, DynamicCache(config=self._model.config), mask, [[] for _ in requests])
        return self._context

    def _feed(self, context: _Context, fresh: list[list[int]]) -> torch.Tensor:
        """Run the new ids of every row, padded on the left; returns the logits after the last one, (B, V)."""
        width = max(len(ids) for ids in fresh)
        device = context.mask.device
        block = torch.tensor([[0] * (width - len(ids)) + ids for ids in fresh], device=device)
        used = torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in fresh], device=device)
        return self._forward(context, block, used)

    def _feed_one(self, context: _Context, token: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        return self._forward(context, token.unsqueeze(-1), alive.unsqueeze(-1))

    def _forward(self, context: _Context, block: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        past = context.mask.sum(1, keepdim=True)
        position = (past + used.long().cumsum(1) - 1).clamp(min=0)
        context.mask = torch.cat([context.mask, used], dim=1)
        output = self._model(
            input_ids=block,
            attention_mask=context.mask.long(),
            position_ids=position,
            past_key_values=context.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
