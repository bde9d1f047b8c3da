"""A random Qwen3-MoE of 100 M weights through rollout and one optimiser step, in Qwen's own format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_qwen import TOKENS, measure

from mini_rome.trace import context_ids

pytestmark = pytest.mark.slow


def test_a_qwen3_moe_of_100_m_weights_samples_two_turns_and_takes_a_lora_step(tmp_path: Path) -> None:
    found = measure(tmp_path)
    assert [len(trajectory.turns) for trajectory in found.trajectories] == [2, 2, 2, 2]
    chat, first = found.trainer.rollout.chat, found.trajectories[0]
    text = chat.decode(context_ids(first))
    assert "<tools>" in text and "<tool_response>\n[" in text  # a malformed response is told so
    assert all(0 < len(turn.ids) <= TOKENS for trajectory in found.trajectories for turn in trajectory.turns)
    named = dict(found.trainer.accelerator.unwrap_model(found.trainer.model).named_parameters())
    moved = [name for name, parameter in named.items() if "lora_B" in name and parameter.abs().sum() > 0]
    assert len(moved) == 8 * 4  # of every layer's four projections; they begin at zero
    for name, before in found.before.items():
        kept = [value for key, value in named.items() if key.replace(".base_layer", "").endswith(name)]
        assert len(kept) == 1 and torch.equal(kept[0], before), name
    assert [name.split(",")[0].split(":")[0] for name, _, _ in found.parts] == [
        "build", "forward", "rollout", "one step of IPA with LoRA",
    ]  # fmt: skip
