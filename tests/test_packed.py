"""Packed rows on a CPU attend each to itself: the same numbers as rows alone, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from small import chat
from tiny import assert_same
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

from mini_rome.data.staged import fit
from mini_rome.model import build_model
from mini_rome.packed import NAME, packed_attention
from mini_rome.progress import Display
from mini_rome.sft import MaskedSFTConfig

LENGTHS = (5, 1, 9)


class Seen(TrainerCallback):
    """Notes the attention of each step."""

    def __init__(self, model, seen: list[str]) -> None:
        self.model, self.seen = model, seen

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.seen.append(self.model.config._attn_implementation)


@pytest.fixture
def model():
    return build_model(chat().tokenizer)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 100, (1, length), generator=generator) for length in LENGTHS]


def test_rows_in_one_give_the_logits_and_gradients_of_rows_alone(model) -> None:
    alone = torch.cat([model(input_ids=row).logits for row in rows()], dim=1)
    alone.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with packed_attention(model, packed=True):
        packed = model(input_ids=torch.cat(rows(), dim=1), position_ids=positions).logits
        two = model(input_ids=torch.cat(rows(), dim=1).repeat(2, 1), position_ids=positions.repeat(2, 1)).logits
    packed.square().mean().backward()
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(two, alone.repeat(2, 1, 1))
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


def test_unpacked_rows_and_the_model_afterwards_are_as_before(model) -> None:
    ids = rows()[2]
    before = model(input_ids=ids).logits
    with packed_attention(model, packed=True):
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(model(input_ids=ids.repeat(2, 1)).logits, before.repeat(2, 1, 1))
    assert model.config._attn_implementation == "sdpa"
    with packed_attention(model, packed=False):
        assert model.config._attn_implementation == "sdpa"


def test_each_row_of_a_batch_has_its_own_rows_and_positions(model) -> None:
    ids = torch.cat(rows(), dim=1)
    first = torch.cat([torch.arange(length) for length in LENGTHS])
    other = torch.cat([torch.arange(length) for length in (2, 13)])
    batch, positions = torch.cat([ids, ids.flip(1)]), torch.stack([first, other])
    with packed_attention(model, packed=True):
        alone = [model(input_ids=batch[[at]], position_ids=positions[[at]]).logits for at in (0, 1)]
        torch.testing.assert_close(model(input_ids=batch, position_ids=positions).logits, torch.cat(alone))
        with pytest.raises(ValueError, match="begin at position 0"):
            model(input_ids=ids, position_ids=first[None] + 1)
        with pytest.raises(ValueError, match="no cache"):
            model.generate(rows()[0], max_new_tokens=2, do_sample=False)
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_given_back_after_an_error_and_other_attention_is_left_alone(model) -> None:
    with pytest.raises(KeyError), packed_attention(model, packed=True):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with packed_attention(model, packed=True):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("window", [{"use_sliding_window": True, "sliding_window": 3}, {}])
def test_a_sliding_window_stays_in_the_mask(window) -> None:
    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1, **window,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with packed_attention(model, packed=True):
        assert model.config._attn_implementation == ("sdpa" if window else NAME)


def test_training_on_packed_rows_is_training_on_the_same_rows_in_a_batch(tmp_path) -> None:
    seen: list[str] = []
    data = [{"input_ids": row[0].tolist(), "labels": row[0].tolist()} for row in rows()]
    losses = []
    for options in ({"packing": True, "max_length": 15, "per_device_train_batch_size": 1},
                    {"per_device_train_batch_size": 3}):  # fmt: skip
        trained = build_model(chat().tokenizer)
        config = MaskedSFTConfig(output_dir=str(tmp_path), max_steps=2, warmup_steps=0, **options)
        fit(trained, chat().tokenizer, data, config, Display(False), "", [Seen(trained, seen)])
        assert trained.config._attn_implementation == "sdpa"
        losses.append([parameter.detach() for parameter in trained.parameters()])
    assert seen == [NAME, NAME, "sdpa", "sdpa"]
    torch.testing.assert_close(*losses, rtol=0, atol=2e-4)  # a step changes a weight by 1e-3
