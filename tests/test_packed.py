"""Packed rows on a CPU attend each to itself: the same numbers as rows alone, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from small import chat

from mini_rome.data.staged import fit
from mini_rome.model import build_model
from mini_rome.packed import NAME, packed_attention
from mini_rome.progress import Display
from mini_rome.sft import MaskedSFTConfig

LENGTHS = (5, 1, 9)


@pytest.fixture
def model():
    return build_model(chat().tokenizer)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 100, (1, length), generator=generator) for length in LENGTHS]


def test_rows_in_one_give_the_logits_and_gradients_of_rows_alone(model) -> None:
    alone = torch.cat([model(input_ids=row).logits for row in rows()], dim=1)
    alone.square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with packed_attention(model, packed=True):
        packed = model(input_ids=torch.cat(rows(), dim=1), position_ids=positions).logits
        two = model(input_ids=torch.cat(rows(), dim=1).repeat(2, 1), position_ids=positions.repeat(2, 1)).logits
    packed.square().mean().backward()
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(two, alone.repeat(2, 1, 1))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-3, atol=1e-4)


def test_unpacked_rows_and_the_model_afterwards_are_as_before(model) -> None:
    ids = rows()[2]
    before = model(input_ids=ids).logits
    with packed_attention(model, packed=True):
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(model(input_ids=ids.repeat(2, 1)).logits, before.repeat(2, 1, 1))
    assert model.config._attn_implementation == "sdpa"
    with packed_attention(model, packed=False):
        assert model.config._attn_implementation == "sdpa"


def test_training_on_packed_rows_is_training_on_the_same_rows_in_a_batch(tmp_path) -> None:
    data = [{"input_ids": row[0].tolist(), "labels": row[0].tolist()} for row in rows()]
    losses = []
    for options in ({"packing": True, "max_length": 15, "per_device_train_batch_size": 1},
                    {"per_device_train_batch_size": 3}):  # fmt: skip
        trained = build_model(chat().tokenizer)
        config = MaskedSFTConfig(output_dir=str(tmp_path), max_steps=2, warmup_steps=0, **options)
        fit(trained, chat().tokenizer, data, config, Display(False), "")
        assert trained.config._attn_implementation == "sdpa"
        losses.append([parameter.detach() for parameter in trained.parameters()])
    torch.testing.assert_close(*losses, rtol=0, atol=2e-4)  # a step changes a weight by 1e-3
