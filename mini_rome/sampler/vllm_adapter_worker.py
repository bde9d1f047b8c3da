"""Mixed into the workers of a server of adapters, which import it before they load the model.

With adapters switched on vLLM computes every expert by a Triton kernel that can add one to it: a CPU has none, and a
GPU loses its better ones. Our servers take adapters on attention alone: experts keep the kernels they have without.
"""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from mini_rome.sampler.vllm_model import ReloadWorker

FusedMoEConfig.is_lora_enabled = property(lambda self: False, lambda self, value: None)


class AdapterWorker(ReloadWorker):
    """Named on the command line, for the sake of this import."""
