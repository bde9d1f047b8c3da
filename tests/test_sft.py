"""Masked SFT: a step computed in parts is the step on the whole batch, with less padding."""

import pytest
import torch
from peft import LoraConfig

from mini_rome.data.demonstrations import expert_trajectories, make_tasks
from mini_rome.masks import MaskPolicy
from mini_rome.model import build_model, build_tokenizer
from mini_rome.sandbox import Pool
from mini_rome.sft import MaskedSFTConfig, masked_sft_trainer, micro_batches, trained
from mini_rome.trace import ChatFormat


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(build_tokenizer())


@pytest.fixture(scope="module")
def trajectories(chat):
    with Pool("sim", size=8) as pool:
        return expert_trajectories(chat, pool, make_tasks(["notes", "tickets"], [1, 2, 3], 32, "train", 0), 0.2, 0)


def step(chat, trajectories, folder, **options):
    """The change of the weights by one step of plain descent, and the rows' lengths by micro-batch."""
    model, widths = build_model(chat.tokenizer, 0), []
    model.register_forward_pre_hook(lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape), with_kwargs=True)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    config = MaskedSFTConfig(
        output_dir=str(folder), max_steps=1, learning_rate=1.0, optim="sgd", warmup_steps=0, max_grad_norm=0,
        router_aux_loss_coef=0.0, **options,
    )  # fmt: skip
    masked_sft_trainer(model, chat.tokenizer, trajectories, config, MaskPolicy()).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before, widths


def test_a_step_in_micro_batches_is_the_step_on_the_whole_batch_with_less_padding(chat, trajectories, tmp_path):
    whole, one = step(chat, trajectories, tmp_path / "whole", per_device_train_batch_size=32)
    parts, several = step(chat, trajectories, tmp_path / "parts", **micro_batches(32))
    assert len(one) == 1 and sum(rows for rows, _ in several) == 32
    assert (parts - whole).norm() < 1e-4 * whole.norm()
    assert sum(rows * width for rows, width in several) < 0.8 * one[0][0] * one[0][1]


def test_a_batch_that_parts_do_not_divide_is_computed_whole():
    assert micro_batches(12)["per_device_train_batch_size"] == 12
    assert micro_batches(32)["gradient_accumulation_steps"] == 4


def test_every_row_is_drawn_once_an_epoch_even_where_the_batch_does_not_divide_them(chat, trajectories, tmp_path):
    _, drawn = step(chat, trajectories[:12], tmp_path, **micro_batches(32))
    assert sum(rows for rows, _ in drawn) == 12


def test_an_adapter_is_merged_into_its_targets_and_changes_nothing_else(chat, trajectories, tmp_path):
    model = build_model(chat.tokenizer, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = MaskedSFTConfig(output_dir=str(tmp_path), max_steps=2, warmup_steps=0, **micro_batches(8))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = masked_sft_trainer(model, chat.tokenizer, trajectories[:8], config, MaskPolicy(), None, lora)
    trainer.train()
    after = trained(trainer).state_dict()
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(("q_proj.weight", "v_proj.weight"))}
