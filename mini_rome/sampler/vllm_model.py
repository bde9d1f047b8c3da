"""What is done to vLLM's own model, inside the process that holds it. Imports nothing of vLLM.

A reload on a CPU leaves two things wrong without a word. Experts keep the layout they were sent in, while the kernel
reads a packed one; and an output layer that is tied to the embedding keeps a packed copy of the old weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def routed_experts(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """(layer number, module) of every layer that holds experts."""
    for name, module in model.named_modules():
        if "w13_weight" in module._parameters:
            yield int(name.partition("layers.")[2].partition(".")[0]), module


def unpack_experts(model: torch.nn.Module) -> None:
    """Before a reload on a CPU: a layer without its kernel packs the new weights again, with it they stay as sent."""
    for _, experts in routed_experts(model):
        if experts.w13_weight.device.type == "cpu":
            experts.quant_method.moe_kernel = None


def pack_output_layer(model: Any) -> None:
    """After a reload on a CPU: pack the output layer that is tied to the embedding."""
    if model.config.tie_word_embeddings and model.lm_head.weight.device.type == "cpu":
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def run_experts(model: torch.nn.Module, layer: int, fed: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Row n of `fed` (N, H) through expert experts[n] of a layer alone, as the engine's own kernel computes it."""
    module = dict(routed_experts(model))[layer]
    count, width = module.moe_config.num_experts, module.moe_config.experts_per_token
    ids = (experts[:, None] + torch.arange(width, device=experts.device)) % count  # the others with weight 0
    weights = torch.zeros(ids.shape, device=fed.device)
    weights[:, 0] = 1.0
    return module.forward_modular(fed, weights, ids.to(module.quant_method.topk_indices_dtype or torch.int32))


class ReloadWorker:
    """Mixed into the server's workers by --worker-extension-cls: a reload from a folder that packs everything."""

    model_runner: Any

    def reload_folder(self, folder: str) -> None:
        """Load the checkpoint in this folder. Generation must be paused."""
        model = self.model_runner.get_model()
        unpack_experts(model)
        self.model_runner.reload_weights(weights_path=folder)
        pack_output_layer(model)
