"""Batched sampling with a transformers model: the default on a CPU.

The key-value cache lives across the turns of an episode, so a turn costs only its new tokens. Rows of different
length share one cache with holes: a slot that a row does not use is masked and never attended to.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams, uniforms


def filtered_log_probs(log_probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probs (B, V) after temperature, top-k and top-p, renormalised: what tokens are drawn from."""
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
    """What is kept of some episodes: a row's ids, the slots it uses, and per layer keys and values (B, H, S, D)."""

    def __init__(
        self, episodes: list[int], ids: list[list[int]], mask: torch.Tensor, layers: list[tuple[torch.Tensor, ...]]
    ) -> None:
        self.episodes = episodes
        self.ids = ids
        self.mask = mask  # (B, S) bool
        self.layers = layers

    def rows(self, index: Sequence[int]) -> _Context:
        """These rows only, and only the slots that one of them uses."""
        if list(index) == list(range(len(self.episodes))):
            return self
        at = torch.tensor(index, dtype=torch.long, device=self.mask.device)
        mask = self.mask[at]
        slots = mask.any(0).nonzero().squeeze(-1)
        layers = [tuple(tensor[at][:, :, slots] for tensor in layer) for layer in self.layers]
        return _Context([self.episodes[i] for i in index], [self.ids[i] for i in index], mask[:, slots], layers)

    @staticmethod
    def join(parts: list[_Context]) -> _Context:
        """The rows of all parts, padded on the left to one number of slots."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.mask.size(1) for part in parts)
        mask = torch.cat([pad(part.mask, (width - part.mask.size(1), 0)) for part in parts])
        layers = [
            tuple(
                torch.cat([pad(tensor, (0, 0, width - tensor.size(2), 0)) for tensor in column])
                for column in zip(*layer, strict=True)
            )
            for layer in zip(*(part.layers for part in parts), strict=True)
        ]
        episodes = [episode for part in parts for episode in part.episodes]
        return _Context(episodes, [ids for part in parts for ids in part.ids], mask, layers)


class TransformersSampler(Sampler):
    """Samples with the trainer's own model, or with a copy of it in another precision.

    dtype: None shares the given model (mu = pi_old up to rounding); a dtype keeps a copy in that precision, so that
    mu really differs from pi_old.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, stop_id: int, dtype: torch.dtype | None = None) -> None:
        self.stop_id = stop_id
        self.dtype = dtype
        self._kept: list[_Context] = []
        self._forgotten: set[int] = set()
        self.sync(model, version=0)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        self._model = model if self.dtype is None else _copy(model, self.dtype)
        # SFT leaves a Mixture of Experts asking for its router loss: of no use here and not made for a cache.
        self._extra = {"output_router_logits": False} if "output_router_logits" in model.config.to_dict() else {}
        self.version = version
        self.forget()

    def forget(self, episodes: Collection[int] | None = None) -> None:
        if episodes is None:
            self._kept, self._forgotten = [], set()
        else:
            self._forgotten |= set(episodes)

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
        context = self._recall(requests)
        # Requests are answered in the order of the context's rows and put back in theirs at the end.
        order = {episode: row for row, episode in enumerate(context.episodes)}
        requests_by_row = sorted(requests, key=lambda request: order[request.episode])
        fresh = [request.ids[len(ids) :] for request, ids in zip(requests_by_row, context.ids, strict=True)]
        uniform = np.stack([uniforms(request.key, params.max_new_tokens) for request in requests_by_row])
        tokens, scores, lengths = self._sample(context, fresh, torch.from_numpy(uniform), params)
        for ids, new, row, length in zip(context.ids, fresh, tokens, lengths, strict=True):
            # The last token was sampled but not fed: it belongs to the next request's new tokens.
            ids += [*new, *row[: length - 1]]
        self._kept.append(context)
        completions = [
            Completion(row[:length], score[:length], self.version)
            for row, score, length in zip(tokens, scores, lengths, strict=True)
        ]
        return [completions[order[request.episode]] for request in requests]

    def _sample(
        self, context: _Context, fresh: list[list[int]], uniform: torch.Tensor, params: SamplingParams
    ) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """Draw until every row has stopped: tokens and their log-probs (B, steps), and each row's length."""
        cache = DynamicCache(config=self._model.config)
        for index, (keys, values) in enumerate(context.layers):
            cache.update(keys, values, index)
        logits = self._feed(context, cache, fresh)
        uniform = uniform.to(logits.device)
        alive = torch.ones(len(fresh), dtype=torch.bool, device=logits.device)
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
            logits = self._forward(context, cache, token.unsqueeze(-1), alive.unsqueeze(-1))
        context.layers = [(layer.keys, layer.values) for layer in cache.layers]
        return torch.stack(tokens, 1).tolist(), torch.stack(scores, 1).tolist(), torch.stack(kept).sum(0).tolist()

    def _recall(self, requests: list[Request]) -> _Context:
        """The kept rows of these episodes whose past is unchanged, and empty rows for the others."""
        wanted = {request.episode: request.ids for request in requests}
        if len(wanted) != len(requests):
            raise ValueError("two requests of one episode in a batch")
        parts, kept = [], []
        for context in self._kept:
            mine, others = [], []
            for row, episode in enumerate(context.episodes):
                past = context.ids[row]
                if episode in wanted and len(past) < len(wanted[episode]) and wanted[episode][: len(past)] == past:
                    mine.append(row)
                elif episode not in wanted and episode not in self._forgotten:
                    others.append(row)
            if mine:
                parts.append(context.rows(mine))
            if others:
                kept.append(context.rows(others))
        self._kept = kept
        known = {episode for part in parts for episode in part.episodes}
        unknown = [episode for episode in wanted if episode not in known]
        if unknown:
            parts.append(self._empty(unknown))
        return _Context.join(parts)

    def _empty(self, episodes: list[int]) -> _Context:
        config, count, device = self._model.config, len(episodes), self._model.device
        shape = (count, config.num_key_value_heads, 0, config.head_dim)
        layers: list[tuple[torch.Tensor, ...]] = [
            (torch.zeros(shape, dtype=self._model.dtype, device=device),) * 2 for _ in range(config.num_hidden_layers)
        ]
        mask = torch.zeros((count, 0), dtype=torch.bool, device=device)
        return _Context(episodes, [[] for _ in episodes], mask, layers)

    def _feed(self, context: _Context, cache: DynamicCache, fresh: list[list[int]]) -> torch.Tensor:
        """Run the new ids of every row, padded on the left; returns the logits after the last one, (B, V)."""
        width = max(len(ids) for ids in fresh)
        device = context.mask.device
        block = torch.tensor([[0] * (width - len(ids)) + ids for ids in fresh], device=device)
        used = torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in fresh], device=device)
        return self._forward(context, cache, block, used)

    def _forward(
        self, context: _Context, cache: DynamicCache, block: torch.Tensor, used: torch.Tensor
    ) -> torch.Tensor:
        past = context.mask.sum(1, keepdim=True)
        position = (past + used.long().cumsum(1) - 1).clamp(min=0)
        context.mask = torch.cat([context.mask, used], dim=1)
        output = self._model(
            input_ids=block,
            attention_mask=context.mask.long(),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **self._extra,
        )
        return output.logits[:, -1]


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Another model of the same weights in this precision.

    A trainer hangs a `forward` of its own on each instance, tied to the weights of that instance: a copy that kept it
    would go on sampling with the original, in the original's precision.
    """
    copied = copy.deepcopy(model)
    for module in copied.modules():
        vars(module).pop("forward", None)
    return copied.to(dtype).eval()
