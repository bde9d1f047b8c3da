"""The trainer's weights under the names and shapes of a Hugging Face checkpoint, as an inference engine loads them.

A LoRA adapter is added into a float32 copy each time and the trained model is never touched: merging in place and
taking the adapter out again leaves a rounding error that grows with every sync (1 % of a bfloat16 weight after 200).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from peft import PeftModel, PeftType
from peft.tuners.lora import LoraLayer, ParamWrapper
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mini_rome.errors import ConfigError

EXPERTS = re.compile(r"(?P<prefix>.*?(?P<layer>\d*)\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)")


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model below the adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def merged_weights(model: PreTrainedModel | PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight as transformers keeps it, adapters merged; detached, shared where not merged.

    ConfigError: a kind of adapter that is not LoRA, which would be left out without a word.
    """
    deltas = adapter_deltas(model) if isinstance(model, PeftModel) else {}
    for name, tensor in model.state_dict().items():  # and not named_parameters(), which leaves out tied weights
        if ".lora_" in name:
            continue
        plain = plain_name(name)
        weight = tensor.detach()
        if plain in deltas:
            weight = weight.float() + deltas.pop(plain)
        yield plain, weight
    if deltas:
        raise ConfigError(f"adapters of {', '.join(deltas)} belong to no weight of the model")


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


def adapter_deltas(model: PeftModel) -> dict[str, torch.Tensor]:
    """What the active LoRA adapters add to each weight, by plain name, in float32."""
    if any(config.peft_type != PeftType.LORA for config in model.peft_config.values()):
        raise ConfigError("the sampler can merge LoRA adapters only; sample with --sampler transformers")
    deltas: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or module.disable_adapters:
            continue
        weight = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                key = plain_name(f"{name}.{weight}")
                deltas[key] = deltas.get(key, 0) + delta(module, adapter)
    return deltas


@torch.no_grad()
def delta(module: LoraLayer, adapter: str) -> torch.Tensor:
    """scaling * B @ A in float32, whatever the adapter's precision."""
    return module.get_delta_weight(adapter).float()
