"""Do the sampler and the trainer hold the same weights? Asked after every sync, since a faulty one says nothing.

Both score one fixed prompt of random tokens. In float32 that shows any wrong weight; in bfloat16 the noise of the
precision hides all but gross faults, so each expert is also fed by itself: a routed token reaches 2 experts of 8, a
corrupted one may hide among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mini_rome.errors import ParityError
from mini_rome.sampler.base import uniforms
from mini_rome.sampler.weights import EXPERTS

PROBE_TOKENS = 256
DRAWS = 32  # prompts to try until one reaches every expert
FLOAT32_MAX = 1e-4  # greatest |difference| of log-probs; not in the paper. Seen: 1e-6
BFLOAT16_MEAN = 0.02  # mean |difference|; not in the paper. Seen: 0.004
EXPERT_FLOAT32, EXPERT_BFLOAT16 = 1e-4, 8e-3  # relative difference of one expert's output

# (layer, expert inputs (N, H), expert of each row (N,)) -> outputs (N, H): how an engine runs single experts
RunExperts = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Gap:
    """|log mu - log pi| over the probe prompt, and the expert that differs most (layer, expert, relative)."""

    maximum: float
    mean: float
    expert: tuple[int, int, float] | None = None


@dataclass(frozen=True)
class Probe:
    """A fixed prompt; `unreached` counts the experts (over all layers) that its tokens were not routed to."""

    ids: list[int]
    unreached: int


@torch.no_grad()
def make_probe(model: PreTrainedModel, vocab_size: int, seed: int = 0) -> Probe:
    """The first of `DRAWS` random prompts that reaches every expert, or the one that reaches most."""
    best = Probe([], 1 << 30)
    for draw in range(DRAWS):
        ids = [int(u * vocab_size) for u in uniforms((seed, draw), PROBE_TOKENS)]
        unreached = _unreached(model, ids)
        if unreached < best.unreached:
            best = Probe(ids, unreached)
        if not unreached:
            break
    return best


def _unreached(model: PreTrainedModel, ids: list[int]) -> int:
    chosen = model.config.to_dict().get("num_experts_per_tok")
    if chosen is None:
        return 0  # a dense model: every weight is used
    output = model(input_ids=torch.tensor([ids], device=model.device), output_router_logits=True, use_cache=False)
    routed = [logits.topk(chosen, dim=-1).indices.unique() for logits in output.router_logits]  # (tokens, E) each
    return sum(logits.size(-1) - len(experts) for logits, experts in zip(output.router_logits, routed, strict=True))


@torch.no_grad()
def score(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """log pi of every token but the first, by one plain forward pass: (len(ids) - 1,) float32 on the CPU."""
    was_training = model.training
    model.eval()
    try:
        row = torch.tensor([ids], device=model.device)
        log_probs = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0, :-1].float(), dim=-1)
        return log_probs.gather(-1, row[0, 1:, None]).squeeze(-1).cpu()
    finally:
        model.train(was_training)


def compare(sampler: Sequence[float], trainer: torch.Tensor) -> Gap:
    """The difference of two scorings of one prompt. A NaN anywhere is an infinite difference."""
    gap = (torch.tensor(sampler) - trainer).abs().nan_to_num(nan=torch.inf)
    return Gap(gap.max().item(), gap.mean().item())


def compare_experts(
    weights: Mapping[str, torch.Tensor], run: RunExperts, dtype: torch.dtype
) -> tuple[int, int, float] | None:
    """Feed every expert a random vector of its layer; (layer, expert, relative difference) of the worst.

    weights: as `merged_weights` gives them. None: there are no experts.
    """
    worst: tuple[int, int, float] | None = None
    for name, gate_up in weights.items():
        found = EXPERTS.fullmatch(name)
        if found is None or found["name"] != "gate_up_proj":
            continue
        layer, down = int(found["layer"]), weights[f"{found['prefix']}.down_proj"]
        fed = torch.randn(gate_up.shape[::2], generator=torch.Generator().manual_seed(layer))  # (E, H)
        fed = fed.to(dtype).to(gate_up.device)
        wanted = experts_forward(fed.float(), gate_up.to(dtype).float(), down.to(dtype).float())
        given = run(layer, fed, torch.arange(len(fed), device=fed.device)).float()
        relative = ((given - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).nan_to_num(nan=torch.inf)
        expert = int(relative.argmax())
        if worst is None or relative[expert] > worst[2]:
            worst = (layer, expert, relative[expert].item())
    return worst


def experts_forward(fed: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Row e through expert e alone: fed (E, H), gate_up (E, 2I, H), down (E, H, I) -> (E, H)."""
    gate, up = torch.einsum("eh,eih->ei", fed, gate_up).chunk(2, dim=-1)
    return torch.einsum("ei,ehi->eh", torch.nn.functional.silu(gate) * up, down)


def check(gap: Gap, dtype: torch.dtype, version: int) -> None:
    """Raises ParityError, which says what to look at, where the sampler does not hold the trainer's weights."""
    exact = dtype == torch.float32
    limit, found, what = (
        (FLOAT32_MAX, gap.maximum, "max |dlogp|") if exact else (BFLOAT16_MEAN, gap.mean, "mean |dlogp|")
    )
    expert_limit = EXPERT_FLOAT32 if exact else EXPERT_BFLOAT16
    if gap.expert is not None and gap.expert[2] > expert_limit:
        layer, expert, relative = gap.expert
        raise ParityError(
            f"after the sync of version {version} expert {expert} of layer {layer} is not the trainer's in vLLM "
            f"(output off by {relative:.2g}, limit {expert_limit:g}; {what} {found:.2g}).\n"
            f"Look at how expert weights are packed again on a reload (VLLMSampler.sync), and at the vLLM version."
        )
    if found > limit:
        alone = "" if gap.expert is None else "; the experts agree one by one"
        raise ParityError(
            f"after the sync of version {version} sampler and trainer disagree on the probe prompt: {what} "
            f"{found:.2g}, limit {limit:g}{alone}.\n"
            f"Look at weights outside the experts: adapters not merged, a tied lm_head, the router, the prefix cache."
        )
