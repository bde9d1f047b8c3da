"""The trainer's weights under the names and shapes of a Hugging Face checkpoint, as an inference engine loads them.

A LoRA adapter is added into a float32 copy each time and the trained model is never touched: merging in place and
taking the adapter out again leaves a rounding error that grows with every sync (1 % of a bfloat16 weight after 200).

Weights that FSDP2 has shared out are gathered one at a time; every rank must take part, to the last one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mini_rome.errors import ConfigError

EXPERTS = re.compile(r"(?P<prefix>.*?(?P<layer>\d*)\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)")


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model below the adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_shared_out(model: nn.Module) -> bool:
    """Whether FSDP2 has shared out the weights over ranks."""
    # By its modules: parameters that stay gathered after a forward do not look shared out.
    return any(isinstance(module, FSDPModule) for module in model.modules())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered where it is shared out."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def merged_weights(model: PreTrainedModel | PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight as transformers keeps it, adapters merged; detached, shared where not merged.

    ConfigError: a kind of adapter that is not LoRA, which would be left out without a word.
    """
    adapters = adapters_of(model) if isinstance(model, PeftModel) else {}
    for name, tensor in model.state_dict().items():  # and not named_parameters(), which leaves out tied weights
        if ".lora_" in name:
            continue
        plain = plain_name(name)
        weight = whole(tensor.detach())
        for module, adapter in adapters.pop(plain, ()):
            weight = weight.float() + delta(module, adapter)
        yield plain, weight
    if adapters:
        raise ConfigError(f"adapters of {', '.join(adapters)} belong to no weight of the model")


def host_weights(model: PreTrainedModel | PeftModel, kept: bool) -> dict[str, torch.Tensor]:
    """`merged_weights` in the host's memory; {} on a rank that does not keep them.

    kept: whether this rank does. Where the weights are shared out all ranks must call it.
    """
    if not kept and not is_shared_out(model):
        return {}
    found = {}
    for name, weight in merged_weights(model):
        if kept:
            found[name] = weight.cpu()
    return found


def adapter_weights(model: PeftModel, kept: bool) -> dict[str, torch.Tensor]:
    """The active LoRA adapter under the names of PEFT's files, in the host's memory; `kept` as in `host_weights`."""
    if not kept and not is_shared_out(model):
        return {}
    found = {}
    for name, tensor in get_peft_model_state_dict(model, adapter_name=model.active_adapter).items():
        weight = whole(tensor.detach())
        if kept:
            found[name] = weight.cpu().contiguous()
    return found


def checkpoint_names(config: PretrainedConfig) -> set[str]:
    """The names that a checkpoint of such a model holds, a tied output layer included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {part for name, weight in model.state_dict().items() for part, _ in split_experts(name, weight)}


def plain_name(name: str) -> str:
    """A weight's name without what PEFT wraps around it.

    >>> plain_name("base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj")
    'model.layers.0.mlp.experts.down_proj'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def split_experts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One expert tensor as the matrices of its experts; any other weight as it is.

    Transformers keeps the experts of a layer in one tensor, (E, 2I, H) and (E, H, I); checkpoints name each expert.

    >>> [(name, tuple(w.shape)) for name, w in split_experts("m.mlp.experts.gate_up_proj", torch.zeros(1, 6, 2))]
    [('m.mlp.experts.0.gate_proj.weight', (3, 2)), ('m.mlp.experts.0.up_proj.weight', (3, 2))]
    """
    found = EXPERTS.fullmatch(name)
    if found is None:
        yield name, weight
        return
    parts = ("down_proj",) if found["name"] == "down_proj" else ("gate_proj", "up_proj")
    for expert, matrix in enumerate(weight):
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{found['prefix']}.{expert}.{part}.weight", rows


def adapters_of(model: PeftModel) -> dict[str, list[tuple[LoraLayer, str]]]:
    """The active LoRA adapters of each weight, by its plain name: (module, name of the adapter)."""
    if any(config.peft_type != PeftType.LORA for config in model.peft_config.values()):
        raise ConfigError("the sampler can merge LoRA adapters only; sample with --sampler transformers")
    found: dict[str, list[tuple[LoraLayer, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or module.disable_adapters:
            continue
        weight = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                found[plain_name(f"{name}.{weight}")].append((module, adapter))
    return dict(found)


@torch.no_grad()
def delta(module: LoraLayer, adapter: str) -> torch.Tensor:
    """scaling * B @ A in float32, whatever the adapter's precision."""
    with _whole_factors(module, adapter):
        return module.get_delta_weight(adapter).float()


@contextmanager
def _whole_factors(module: LoraLayer, adapter: str) -> Iterator[None]:
    """A and B gathered where they are shared out, and as they were afterwards: the optimiser holds on to them."""
    layers = [module.lora_A[adapter], module.lora_B[adapter]]
    shares = [layer.weight for layer in layers]
    for layer, share in zip(layers, shares, strict=True):
        if isinstance(share, DTensor):
            layer.weight = nn.Parameter(whole(share.detach()), requires_grad=False)
    try:
        yield
    finally:
        for layer, share in zip(layers, shares, strict=True):
            layer.weight = share
