"""The ablations, as data: variants, panels and claims of each figure. To add one, add an entry. Without torch.

Options are those of RunArguments and IPAConfig. Thresholds and settings were chosen on the pilot seeds 0 to 9; the
claims are tested on seeds from 100 on, which no setting was chosen on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mini_rome.errors import ConfigError
from mini_rome.evaluation.ablation import Ablation, Claim, Panel, Variant
from mini_rome.evaluation.ablation_claims import solves_more, stays_below

# SFT of two minutes on one core: masters K = 1 to 3, nearly never solves K = 12. None of this is in the paper.
NOTES: dict[str, Any] = {
    "families": ["notes"], "sft_chunks": [1, 2, 3], "sft_tasks": 1000, "sft_steps": 500, "sft_batch_size": 8,
    "sft_learning_rate": 3e-3,
}  # fmt: skip
ONE_TASK: dict[str, Any] = {
    **NOTES, "chunks": [12], "train_tasks": 1, "num_generations": 16, "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1, "learning_rate": 5e-4, "il_when": "never", "expert_refresh": 0,
}  # fmt: skip

FIG12 = Ablation(
    name="fig12",
    title="One hard task: sequential rollback against naive sampling (the paper's figure 12)",
    base=ONE_TASK,
    variants=(
        Variant("rollback", {"resampling": "rollback"}),
        Variant("rollback + imitation", {"resampling": "rollback", "il_when": "fork_failed"}),
        Variant("naive", {"resampling": "none"}),
    ),
    panels=(
        Panel("train_success", "train success, from the starts"),
        Panel("start_position", "expert chunks used (p)"),
        Panel("start_success", "test success, from the initial state"),
    ),
    claims=(
        Claim("share of seeds solved: rollback > naive, intervals apart", solves_more("rollback", "naive")),
        Claim("naive: test success <= 0.05 at the end", stays_below("naive", 0.05)),
    ),
    seeds=10,
    steps=60,
    every=10,
    repeats=16,
    hard=True,
)

ABLATIONS: Mapping[str, Ablation] = {each.name: each for each in (FIG12,)}


def get_ablation(name: str) -> Ablation:
    """The ablation of this name; ConfigError: none."""
    if name not in ABLATIONS:
        raise ConfigError(f"no ablation {name!r}: choose from {', '.join(ABLATIONS)}")
    return ABLATIONS[name]
