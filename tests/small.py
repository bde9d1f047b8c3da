"""The tokenizer as shipped and a model of two layers with a vocabulary of twelve, both untrained."""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

from mini_rome.model import build_tokenizer
from mini_rome.trace import ChatFormat

STOP = 1  # the stop id of `small_model`


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@functools.cache
def chat() -> ChatFormat:
    return ChatFormat(tokenizer())


def small_model(vocab: int = 12, seed: int = 0, sharp: float = 8.0) -> Qwen3MoeForCausalLM:
    """A Mixture of Experts of some thousand weights; `sharp` scales its logits, so that they are not uniform."""
    set_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=False, pad_token_id=0, eos_token_id=STOP,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= sharp
    return model.eval()
