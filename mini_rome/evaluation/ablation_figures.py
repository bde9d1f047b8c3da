"""The ablations, as data: variants, panels and claims of each figure. To add one, add an entry. Without torch.

Options are those of RunArguments and IPAConfig. Settings were chosen on the pilot seeds 0 to 9; the claims are tested
on seeds from 100 on, which no setting was chosen on. None of the values is in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mini_rome.errors import ConfigError
from mini_rome.evaluation.ablation import Ablation, Claim, Panel, Variant
from mini_rome.evaluation.ablation_claims import at_equal, exceeds, lowest, peak, solves_more, stays_below
from mini_rome.safety.experiment import SAFETY

# SFT of two minutes on one core: masters K = 1 to 3, nearly never solves K = 10.
NOTES: dict[str, Any] = {
    "families": ["notes"], "sft_chunks": [1, 2, 3], "sft_tasks": 1000, "sft_steps": 500, "sft_batch_size": 8,
    "sft_learning_rate": 2e-3,
}  # fmt: skip
STEP: dict[str, Any] = {  # 16 rollouts a step
    "num_generations": 16, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "extra_turns": 2,
    "learning_rate": 5e-4, "expert_refresh": 0,
}  # fmt: skip
# Tickets: a notes task of this length is solved by chance within ten steps of naive sampling (two pilot seeds).
ONE_TASK: dict[str, Any] = {
    **NOTES, **STEP, "families": ["tickets"], "chunks": [10], "train_tasks": 1, "il_when": "fork_failed",
}  # fmt: skip
SIXTEEN: dict[str, Any] = {  # two rollouts of eight tasks in turn, of sixteen
    **NOTES, **STEP, "chunks": [8], "train_tasks": 16, "num_generations": 2, "il_when": "fork_failed",
    "resampling": "rollback", "expert_refresh": 20,
}  # fmt: skip
UNAIDED: dict[str, Any] = {  # so that all gradient is eq. 9 or 6
    **SIXTEEN, "il_when": "never", "expert_refresh": 0, "learning_rate": 2e-4,
}  # fmt: skip
# One task of each family, four rollouts of each in a step. Anchors are drawn: between fixed ones lie chunks that no
# rollout starts at, and eq. 10 never imitates them (a pilot seed stayed at 0 on one family for 50 steps).
MINI_SET: dict[str, Any] = {
    **NOTES, **STEP, "families": ["notes", "tickets", "branches", "decay", "checks", "logins"], "chunks": [8],
    "sft_tasks": 4000, "sft_steps": 2400, "train_tasks": 6, "num_generations": 4, "per_device_train_batch_size": 24,
    "il_when": "fork_failed", "anchors": 4, "anchor_mode": "random",
}  # fmt: skip

TRAIN = Panel("train_success", "train success, from the starts")
START = Panel("start_success", "test success, from the initial state")
TEST = Panel("test_success", "test success, other instances")
NORM = Panel("grad_norm", "gradient norm before clipping", log=True)

FIG12 = Ablation(
    name="fig12",
    title="One hard task: sequential rollback with eq. 10 against naive sampling (the paper's figure 12)",
    base=ONE_TASK,
    variants=(Variant("rollback", {"resampling": "rollback"}), Variant("naive", {"resampling": "none"})),
    panels=(TRAIN, Panel("start_position", "expert chunks used (p)"), START),
    claims=(
        Claim("share of seeds solved: rollback > naive, intervals apart", solves_more("rollback", "naive")),
        Claim("naive: test success <= 0.05 at the end", stays_below("naive", 0.05)),
    ),
    seeds=10, steps=25, every=5, repeats=16, hard=True,
)  # fmt: skip

FIG13 = Ablation(
    name="fig13",
    title="A mini-set of six families: with and without parallelised initialisation (the paper's figure 13)",
    base=MINI_SET,
    variants=(
        Variant("naive", {"resampling": "none"}),
        Variant("parallel", {"resampling": "parallel"}),
        Variant("rollback", {"resampling": "rollback"}),
        Variant("both", {"resampling": "both"}),
    ),
    panels=(
        Panel("train_success", "mean train success, from the starts"),
        Panel("start_success", "lowest train success, from the initial state", lowest=True),
        Panel("test_success", "mean test success, other instances"),
        Panel("start_success", "mean train success, from the initial state"),
        Panel("start_success", "lowest train success, from the initial state", lowest=True, over="episodes"),
        Panel("start_success", "lowest train success, from the initial state", lowest=True, over="seconds"),
    ),
    claims=(
        Claim(
            "lowest train success from the initial state at the end: parallel > naive",
            exceeds("parallel", "naive", "start_success", lowest),
        ),
        Claim(
            "mean train success from the initial state at the end: parallel > naive",
            exceeds("parallel", "naive", "start_success"),
        ),
        Claim(
            "mean test success at the end: parallel not below naive by more than 0.05",
            exceeds("parallel", "naive", "test_success", margin=0.05),
        ),
    ),
    seeds=5, steps=30, every=10, repeats=8, held_out=24, once=True, fast=20,
    quick={"families": ["notes", "tickets", "branches"], "train_tasks": 3, "sft_tasks": 1800, "sft_steps": 900,
           "num_generations": 8},
)  # fmt: skip


def _compared(condition: str, noise: float = 0.0, **options: Any) -> tuple[Variant, Variant]:
    """The two objectives of figure 10 under one condition."""
    return (
        Variant(f"eq. 9, {condition}", {"objective": "ipa", **options}, noise=noise, condition=condition),
        Variant(f"eq. 6, {condition}", {"objective": "baseline", **options}, noise=noise, condition=condition),
    )


# Each makes a part of the two objectives live: the mask, the ratio of failures; the first neither.
CONDITIONS: Mapping[str, tuple[Variant, Variant]] = {
    "fresh": _compared("fresh"),
    "bf16 sampler": _compared("bf16 sampler", sampler_dtype="bfloat16"),
    "noisy sampler": _compared("noisy sampler", noise=0.05),
    "failures -0.1, 4 updates": _compared("failures -0.1, 4 updates", failure_reward=-0.1, num_iterations=4),
    "failures -0.1, stale by 4": _compared("failures -0.1, stale by 4", failure_reward=-0.1, async_ratio=4),
}


def _steadier(condition: str, pair: tuple[Variant, Variant]) -> tuple[Claim, Claim]:
    chunk, baseline = (variant.name for variant in pair)
    return (
        Claim(f"{condition}: largest gradient norm: eq. 6 > eq. 9", exceeds(baseline, chunk, "grad_norm", peak)),
        Claim(
            f"{condition}: test success at the end: eq. 9 not below eq. 6 by more than 0.1",
            exceeds(chunk, baseline, "test_success", margin=0.1),
        ),
    )


FIG10 = Ablation(
    name="fig10",
    title="Chunk level (eq. 9) against the paper's baseline (eq. 6), a condition a row (the paper's figure 10)",
    base=UNAIDED,
    variants=tuple(variant for pair in CONDITIONS.values() for variant in pair),
    panels=(NORM, TRAIN, TEST),
    claims=tuple(claim for condition, pair in CONDITIONS.items() for claim in _steadier(condition, pair)),
    seeds=5, steps=30, every=10, held_out=48, once=True,
)  # fmt: skip


OFF = _compared("sampler off by 0.2", noise=0.2)
SWEPT = (
    *(_compared(f"failures -0.1, {times} updates", failure_reward=-0.1, num_iterations=times) for times in (1, 2, 8)),
    _compared("sampler off by 0.1", noise=0.1),
    OFF,
)
FIG10_SWEEP = Ablation(
    name="fig10_sweep",
    title="Where chunk level (eq. 9) and the baseline (eq. 6) come apart: more updates a batch, a noisier sampler",
    base=UNAIDED,
    variants=tuple(variant for pair in SWEPT for variant in pair),
    panels=(NORM, TRAIN, TEST),
    claims=(),
    seeds=3, steps=30, every=10, held_out=48, once=True,
)  # fmt: skip

# Where the sweep shows a difference, on seeds that the sweep did not have: --first_seed 110.
FIG10_NOISE = Ablation(
    name="fig10_noise",
    title="Chunk level (eq. 9) against the baseline (eq. 6), a sampler off by a fifth (the paper's figure 10)",
    base=UNAIDED,
    variants=OFF,
    panels=(NORM, TRAIN, TEST),
    claims=_steadier("sampler off by 0.2", OFF),
    seeds=5, steps=30, every=10, held_out=48, once=True,
)  # fmt: skip

IMITATE = Variant("SFT on the experts", imitate=1.0)
IMITATE_FIRST = Variant("SFT on the experts, then naive", {"resampling": "none"}, imitate=0.5)
ROLLBACK_ALONE = Variant("rollback, no imitation", {"resampling": "rollback", "il_when": "never"})
EQUAL = (START, Panel(START.metric, START.label, over="tokens"))

CONTROL12 = Ablation(
    name="control12",
    title="Figure 12 with its control: SFT on the same expert, at equal tokens",
    base=ONE_TASK,
    variants=(*FIG12.variants, IMITATE, IMITATE_FIRST, ROLLBACK_ALONE),
    panels=EQUAL,
    claims=(
        Claim(
            "test success at equal tokens: rollback > SFT on the expert",
            at_equal("rollback", IMITATE.name, "start_success", "tokens"),
        ),
        Claim(
            "test success at equal tokens: rollback > SFT on the expert, then naive",
            at_equal("rollback", IMITATE_FIRST.name, "start_success", "tokens"),
        ),
        Claim(
            "test success at the end: rollback > rollback without the imitation of eq. 10",
            exceeds("rollback", ROLLBACK_ALONE.name, "start_success"),
        ),
    ),
    seeds=5, steps=25, every=5, repeats=16, hard=True,
)  # fmt: skip

CONTROL13 = Ablation(
    name="control13",
    title="Figure 13 with its control: SFT on the same six experts, at equal tokens",
    base=MINI_SET,
    variants=(*FIG13.variants[:2], IMITATE, IMITATE_FIRST),
    panels=(
        Panel("start_success", "lowest train success, from the initial state", lowest=True, over="tokens"),
        Panel("test_success", "mean test success, other instances", over="tokens"),
    ),
    claims=(
        Claim(
            "mean test success at equal tokens: parallel > SFT on the experts",
            at_equal("parallel", IMITATE.name, "test_success", "tokens"),
        ),
        Claim(
            "mean test success at equal tokens: parallel > SFT on the experts, then naive",
            at_equal("parallel", IMITATE_FIRST.name, "test_success", "tokens"),
        ),
    ),
    seeds=5, steps=30, every=10, repeats=8, held_out=24, once=True, fast=20,
)  # fmt: skip

LIVE = {"failure_reward": -0.1, "num_iterations": 2}  # ratios are not 1, and failures count
CHOICES = Ablation(
    name="choices",
    title="What the paper leaves open, one choice at a time: K = 8, 16 tasks, effect on held-out tasks",
    base=SIXTEEN,
    variants=(
        Variant("the defaults"),
        Variant("gamma 0.8", {"gamma": 0.8}),
        Variant("gamma 1", {"gamma": 1.0}),
        Variant("aggregation chunk", {"aggregation": "chunk"}),
        Variant("aggregation sum", {"aggregation": "sum"}),
        Variant("imitation never", {"il_when": "never"}),
        Variant("imitation always", {"il_when": "always"}),
        Variant("rollback threshold 1", {"rollback_threshold": 1.0}),
        Variant("expert refresh 5", {"expert_refresh": 5}),
        Variant("failure reward -0.1", {"failure_reward": -0.1}),
        Variant("parallel, 8 anchors drawn", {"resampling": "parallel", "anchor_mode": "random"}),
        Variant("LoRA, learning rate 2e-3", {"use_peft": True, "lora_r": 16, "learning_rate": 2e-3}),
        Variant("4 rollouts a task: 4 anchors", {"resampling": "parallel", "anchors": 4, "num_generations": 4},
                condition="anchors"),
        Variant("2 anchors", {"resampling": "parallel", "anchors": 2, "num_generations": 4}, condition="anchors"),
        Variant("failures -0.1, 2 updates: chunk ratio", LIVE, condition="ratio"),
        Variant("no ratio", {**LIVE, "ratio_level": "none"}, condition="ratio"),
        Variant("token ratio", {**LIVE, "ratio_level": "token"}, condition="ratio"),
        Variant("sequence ratio", {**LIVE, "ratio_level": "sequence"}, condition="ratio"),
        Variant("noisy sampler: H 1.02", noise=0.05, condition="mask"),
        Variant("H 1.2", {"mismatch_threshold": 1.2}, noise=0.05, condition="mask"),
        Variant("no mask", {"mask_level": "none"}, noise=0.05, condition="mask"),
    ),
    panels=(TEST, NORM),
    claims=(),
    seeds=3, steps=40, every=20, held_out=48, drawing="effects",
)  # fmt: skip

ROLL = {"beta": 0.01, "num_iterations": 1, "weight_decay": 0.0}  # beside GiGPOConfig's own, see roll_gigpo.yaml
BASELINES = Ablation(
    name="baselines",
    title="What one would otherwise run, on the hard task of figure 12: same starts, episodes and seeds",
    base=ONE_TASK,
    variants=(
        Variant("IPA", {"resampling": "none"}, condition="initial states"),
        Variant("GRPO (TRL)", {"resampling": "none"}, trainer="grpo", condition="initial states"),
        Variant("REINFORCE", {"resampling": "none", "objective": "reinforce"}, condition="initial states"),
        Variant("GiGPO", {"resampling": "none", **ROLL}, trainer="gigpo", condition="initial states"),
        Variant("IPA, rollback", {"resampling": "rollback"}, condition="rollback"),
        Variant("GRPO (TRL), rollback", {"resampling": "rollback"}, trainer="grpo", condition="rollback"),
        Variant("REINFORCE, rollback", {"resampling": "rollback", "objective": "reinforce"}, condition="rollback"),
        Variant("GiGPO, rollback", {"resampling": "rollback", **ROLL}, trainer="gigpo", condition="rollback"),
    ),
    panels=(TRAIN, START, NORM),
    claims=(
        Claim(
            "test success at the end: IPA from rollback > GRPO from initial states",
            exceeds("IPA, rollback", "GRPO (TRL)", "start_success"),
        ),
        Claim(
            "test success at the end, both from rollback: IPA not below GRPO by more than 0.1",
            exceeds("IPA, rollback", "GRPO (TRL), rollback", "start_success", margin=0.1),
        ),
        Claim(
            "test success at the end, both from rollback: IPA not below GiGPO by more than 0.1",
            exceeds("IPA, rollback", "GiGPO, rollback", "start_success", margin=0.1),
        ),
    ),
    seeds=5, steps=25, every=5, repeats=16, hard=True,
)  # fmt: skip

ABLATIONS: Mapping[str, Ablation] = {
    each.name: each
    for each in (FIG12, FIG13, FIG10, FIG10_SWEEP, FIG10_NOISE, CONTROL12, CONTROL13, CHOICES, BASELINES, SAFETY)
}


def get_ablation(name: str) -> Ablation:
    """The ablation of this name; ConfigError: none."""
    if name not in ABLATIONS:
        raise ConfigError(f"no ablation {name!r}: choose from {', '.join(ABLATIONS)}")
    return ABLATIONS[name]
