"""Who generates tokens: `base` is the contract, `make` chooses one that keeps it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from mini_rome.errors import ConfigError
from mini_rome.sampler.base import Sampler

SAMPLERS = ("transformers", "vllm", "vllm-server", "vllm-adapters")
REMOTE = ("vllm-server", "vllm-adapters")  # those that need the address of a server


def make(
    name: str,
    model: PreTrainedModel,
    stop_id: int,
    dtype: torch.dtype | None = None,
    *,
    url: str | None = None,
    running: Sampler | None = None,
    sleeps: bool = False,
    max_model_len: int = 4096,
) -> Sampler:
    """A sampler that holds the weights of this model. dtype: of its copy of them, None for the model's own.

    url: of a REMOTE one's server. running: the sampler so far, whose engine is used again if the model fits.
    sleeps: the sampler shares a GPU with the trainer and is put to sleep while that computes. max_model_len: of
    vLLM's, context and response, tokens.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"--sampler {name}: choose from {', '.join(SAMPLERS)}")
    if name == "transformers":
        from mini_rome.sampler.transformers import TransformersSampler

        return TransformersSampler(model, stop_id, dtype)
    if name == "vllm-server":
        from mini_rome.sampler.vllm_server import VLLMServerSampler

        return VLLMServerSampler(model, stop_id, dtype, url=url, max_model_len=max_model_len)
    if name == "vllm-adapters":
        from mini_rome.sampler.vllm_adapters import VLLMAdapterSampler

        return VLLMAdapterSampler(model, stop_id, dtype, url=url, max_model_len=max_model_len)
    from mini_rome.sampler.vllm import VLLMSampler

    if isinstance(running, VLLMSampler):
        if running.fits(model, stop_id):
            running.sync(model, version=0)
            return running
        running.close()
    return VLLMSampler(model, stop_id, dtype, sleeps=sleeps, max_model_len=max_model_len)
