"""A tiny Qwen3-MoE and its tokenizer, both built from a seed and saved in the Hugging Face format.

The tokenizer is a byte-level BPE trained on what the experts of the run's families write and read, so common words
are single tokens and any other text still has ids. The model has about 1.1 M parameters, a little more with a larger
vocabulary: 4 layers, hidden size 128, 8 experts of which 2 are active. Not in the paper, which trains Qwen3-MoE
30B-A3B.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)

from mini_rome.cpu import fit_process
from mini_rome.errors import ConfigError
from mini_rome.families import get_family
from mini_rome.tools import rehearse
from mini_rome.trace import CALL, CALL_END, CHAT_TEMPLATE, IM_END, IM_START, RESPONSE_TEMPLATE

PAD = "<|endoftext|>"
SPECIAL_TOKENS = (PAD, IM_START, IM_END, CALL, CALL_END)
# A word with its leading space, or an option such as ` -n`, is one unit.
UNITS = r" ?-?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s"
# Of families that bring tools also a JSON key with what stands around it: ` {"id":"`, `","to":"`, `{"found":["`.
TOOL_UNITS = r' ?(?:\{|",)"[\p{L}_]+":\[?"?| ?-?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|\s'



def corpus(families: Sequence[str], seed: int, per_family: int = 400) -> Iterable[str]:
    """Text of training instances only: instructions, files, expert commands, and the errors commands print."""
    for family in map(get_family, families):
        for index in range(per_family):
            rng = random.Random(f"{seed}/{index}")
            task = family.make(seed * per_family + index, rng.randint(1, family.max_chunks))
            mistake = family.mistake(task, rng.randrange(task.chunks), rng)
            yield task.instruction
            if task.tools:
                for call, result in rehearse(task, [mistake, *task.expert]):
                    yield from (call, result.output)
                continue
            yield from task.files.values()
            yield from (f" {command}" for command in task.expert)
            yield from (f" {command}" for command in (mistake, *family.shortcut(task)))
    yield from ["user\n", "assistant\n", "tool\n", "bash", "submit", "[timed out]", "[exit 1]", "[exit 2]"] * 50
    missing = "No such file or directory\n"
    yield from [f"cat: x: {missing}", f"head: cannot open 'x' for reading: {missing}"] * 50


def build_tokenizer(
    families: Sequence[str] = ("notes", "tickets"), seed: int = 0, vocab_size: int = 2048
) -> PreTrainedTokenizerFast:
    """Byte-level BPE for these families, in whatever order; deterministic in `seed`. ConfigError: an unknown family.

    vocab_size: tokens at most. Training stops below it where every unit has become one token: 782 tokens for the two
    default families, about 1,250 for all ten.
    """
    families = sorted(set(families))
    units = TOOL_UNITS if any(get_family(name).make(seed, 1).tools for name in families) else UNITS
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(units), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(families, seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=IM_END,
        extra_special_tokens=[IM_START, CALL, CALL_END],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=8192,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3MoeForCausalLM:
    """The tiny MoE with weights drawn from `seed`, in float32."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
        initializer_range=0.06,  # at hidden size 128 the usual 0.02 takes three times the SFT steps to learn to copy
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    set_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    fit_process(model)
    return model.to(torch.float32)


def load_model(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model and tokenizer of a checkpoint folder or hub name; a folder that is not one is an error that names it."""
    if Path(path).exists() and not (Path(path) / "config.json").exists():
        raise ConfigError(f"--model {path}: no config.json there, so it is not a saved model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    except OSError as error:
        raise ConfigError(f"--model {path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    fit_process(model)
    return model, tokenizer


def weights_hash(model: PreTrainedModel | Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights: equal exactly when two models are, bit for bit."""
    digest = hashlib.sha256()
    weights = model if isinstance(model, Mapping) else model.state_dict()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
