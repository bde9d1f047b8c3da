"""Stand-ins for a Qwen3 checkpoint, which is not at hand offline: its template as TRL ships it, and a random model.

The tokenizer is a small byte-level BPE with Qwen3's control tokens; Qwen3's own vocabulary has 151,936 entries.
"""

from __future__ import annotations

import functools

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from trl.chat_template_utils import qwen2_5_chat_template, qwen3_instruct_2507_chat_template

from mini_rome.model import build_tokenizer

TEMPLATES = {"qwen3_instruct_2507": qwen3_instruct_2507_chat_template, "qwen2_5": qwen2_5_chat_template}


@functools.cache
def _base() -> PreTrainedTokenizerFast:
    return build_tokenizer(vocab_size=512)


def qwen_tokenizer(template: str = "qwen3_instruct_2507") -> PreTrainedTokenizerFast:
    """A tokenizer with this template, whose tool tags are added tokens but not special ones, as in Qwen3."""
    definition = _base().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=definition.__class__.from_str(definition.to_str()), pad_token="<|endoftext|>",
        eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"], chat_template=TEMPLATES[template],
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tags = ("<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


def qwen_moe(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of about 100 M random weights in float32: 8 layers of 32 experts, 4 of them active."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1024, moe_intermediate_size=256,
        num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32,
        num_experts_per_tok=4, norm_topk_prob=True, router_aux_loss_coef=0.0, max_position_embeddings=4096,
        tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    set_seed(seed)
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    model.set_experts_implementation("eager")  # of few tokens a forward takes half as long as with grouped_mm here
    return model
