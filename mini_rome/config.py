"""Options of IPA training: what the paper fixes, what it leaves open, and what GRPO has that IPA has not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from trl import GRPOConfig

from mini_rome.errors import ConfigError
from mini_rome.groups import MAX_SPARES
from mini_rome.loss import OBJECTIVES

# GRPO options that the equations of IPA have no place for: setting one would do nothing, so it is an error.
IGNORED = (
    *("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards"),
    *("reward_weights", "multi_objective_aggregation"),
    *("mask_truncated_completions", "top_entropy_quantile", "entropy_coef"),
    *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "off_policy_mask_threshold", "use_bias_correction_kl", "max_tool_calling_iterations"),
    *("use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"),
    *("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    *("generation_kwargs", "cache_implementation", "use_transformers_continuous_batching", "use_transformers_paged"),
    *("transformers_continuous_batching_config", "ds3_gather_for_generation", "chat_template_kwargs"),
    *("max_completion_length", "num_generations_eval", "log_multimodal"),
)
# Sampling options that would make mu another distribution than the one whose log-probs enter the ratios.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"--{name} {value}: choose from {', '.join(map(str, choices))}")


@dataclass
class IPAConfig(GRPOConfig):
    """Options of `IPATrainer`; everything else is as in GRPOConfig. The defaults are the tiny run on a CPU."""

    output_dir: str | None = field(default=None, metadata={"help": "Where checkpoints go."})
    objective: str = field(
        default="ipa",
        metadata={"help": "reinforce (eq. 3), tis (4), topr (5), baseline (6), ipa (9): sets gamma, levels, ratio."},
    )
    gamma: float | None = field(
        default=None,
        metadata={"help": "Discount per chunk in eq. 7. Not in the paper: 0.95 for ipa, 1 in eqs. 3-6."},
    )
    ratio_level: str | None = field(
        default=None, metadata={"help": "Level of rho: none, token, chunk or sequence. Default: the objective's."}
    )
    mask_level: str | None = field(
        default=None, metadata={"help": "Level of the mismatch mask: none, token, chunk or sequence."}
    )
    mismatch_threshold: float = field(
        default=1.02,
        metadata={"help": "H of eq. 8. Not in the paper; 1.02 is above the bf16 noise of a chunk, see `calibrate`."},
    )
    aggregation: str = field(
        default="token",
        metadata={"help": "token: S/N; chunk: mean over chunks; sum: S, the paper's literal form. Not in the paper."},
    )
    failure_reward: float = field(
        default=0.0,
        metadata={"help": "Reward of a failed episode. Not in the paper; at 0 failures give no gradient."},
    )
    conduct_penalty: float = field(
        default=0.0,
        metadata={
            "help": "Taken off the reward of an episode with a safety event of medium or high severity, which then "
            "is no success for start states and experts. Not in the paper; 0: conduct is reported, never trained on."
        },
    )
    resampling: str = field(
        default="rollback",
        metadata={"help": "Start states: none (always initial), rollback (sequential), parallel, or both."},
    )
    rollback_threshold: float = field(
        default=0.5, metadata={"help": "Success rate at which the start moves one chunk back. Not in the paper."}
    )
    rollback_window: int = field(
        default=1, metadata={"help": "Batches that the success rate is taken over. Not in the paper."}
    )
    anchors: int = field(default=8, metadata={"help": "Parallel starts per task. Not in the paper."})
    anchor_mode: Literal["uniform", "random"] = field(
        default="uniform", metadata={"help": "Parallel starts: uniform or random."}
    )
    il_when: str = field(
        default="fork_failed",
        metadata={"help": "Imitate the expert (eq. 10): never, always, fork_failed (no resample of it succeeded)."},
    )
    lambda_il: float = field(default=1.0, metadata={"help": "Weight of imitation in eq. 10. Not in the paper."})
    lambda_rl: float = field(default=1.0, metadata={"help": "Weight of eq. 9 in eq. 10. Not in the paper."})
    expert_refresh: int = field(
        default=20,
        metadata={"help": "Steps between replacing experts by shorter verified samples; 0: never. Not in the paper."},
    )
    pi_old_source: str = field(
        default="trainer",
        metadata={"help": "trainer: score pi_old with the weights that sampled; sampler: use log mu instead."},
    )
    async_ratio: int = field(
        default=0,
        metadata={
            "help": "Steps that rollouts are drawn ahead, by a thread; older samples are dropped. 0: in turn. Not in "
            "the paper; above 1 only makes samples older, since one engine draws one batch at a time."
        },
    )
    multiplex: bool = field(
        default=False,
        metadata={
            "help": "Sampler and optimiser take turns on one device: with --async_ratio rollouts go on in the gaps. "
            "A sampler that can sleep does so while the optimiser computes."
        },
    )
    rollout_redundancy: int = field(
        default=0,
        metadata={
            "help": "Rollouts begun beyond each group, of which the first to finish are kept: favours short "
            "episodes. Not in the paper."
        },
    )
    filter_groups: str = field(
        default="none",
        metadata={
            "help": "none, or zero_variance: leave out groups (one task from one start) whose rewards are all equal. "
            "Not in the paper; without a group mean such groups do carry gradient."
        },
    )
    max_new_tokens: int = field(default=20, metadata={"help": "Tokens of one response at most."})

    learning_rate: float = field(default=3e-4, metadata={"help": "Initial learning rate for AdamW."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Learning rate schedule."})
    max_steps: int = field(default=20, metadata={"help": "Optimiser steps."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Rollouts per device and micro-batch."})
    gradient_accumulation_steps: int = field(default=4, metadata={"help": "Micro-batches per optimiser step."})
    num_generations: int | None = field(default=2, metadata={"help": "Rollouts of one task in a step."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute activations: saves memory."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient norm is clipped to this."})
    temperature: float = field(default=1.0, metadata={"help": "Must be 1: anything else biases every ratio."})
    top_k: int = field(default=0, metadata={"help": "Must be 0 (off): anything else biases every ratio."})
    logging_steps: float = field(default=1, metadata={"help": "Log every so many steps."})
    save_strategy: str = field(default="steps", metadata={"help": "When to save checkpoints."})
    save_steps: float = field(default=10, metadata={"help": "Steps between checkpoints."})
    save_total_limit: int | None = field(
        default=2, metadata={"help": "Checkpoints kept; at least 2, since the newest may be cut short by a crash."}
    )
    report_to: str = field(default="none", metadata={"help": "trackio, tensorboard, wandb or none."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "The recipes show their own progress."})
    shuffle_dataset: bool | None = field(
        default=False, metadata={"help": "Must be false: tasks come in turn, so that a stopped run goes on exactly."}
    )

    def __post_init__(self) -> None:
        self._refuse_what_ipa_ignores()
        preset = OBJECTIVES.get(self.objective)
        if preset is None:
            raise ConfigError(f"--objective {self.objective}: choose from {', '.join(OBJECTIVES)}")
        self.ratio_level = self.ratio_level or preset["ratio_level"]
        self.mask_level = self.mask_level or preset["mask_level"]
        self.gamma = (0.95 if self.objective == "ipa" else 1.0) if self.gamma is None else self.gamma
        self._check_ranges()
        if not torch.cuda.is_available():
            self.use_cpu, self.bf16 = True, False
        try:
            super().__post_init__()
        except ValueError as error:
            batch = "--per_device_train_batch_size x --gradient_accumulation_steps x processes"
            hint = f"\nThe rollouts of a step are {batch}." if "generation_batch_size" in str(error) else ""
            raise ConfigError(f"{error}{hint}") from error
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ConfigError(
                f"--steps_per_generation {self.steps_per_generation} must be a multiple of "
                f"--gradient_accumulation_steps {self.gradient_accumulation_steps}: a step needs whole windows."
            )
        if self.async_ratio and not self._one_update:
            raise ConfigError(
                f"--async_ratio {self.async_ratio}: a batch of rollouts must serve one optimiser step, so "
                f"--num_iterations {self.num_iterations} must be 1 and --steps_per_generation "
                f"{self.steps_per_generation} equal --gradient_accumulation_steps {self.gradient_accumulation_steps}."
            )

    @property
    def positive_ratio(self) -> bool:
        """Whether the ratio also weighs positive trajectories (eq. 4 only)."""
        return bool(OBJECTIVES[self.objective]["positive_ratio"])

    @property
    def fresh(self) -> bool:
        """True when every update uses rollouts of the current weights, so that pi_theta is pi_old."""
        return self._one_update and not self.async_ratio

    @property
    def _one_update(self) -> bool:
        """Whether a batch of rollouts serves one optimiser step."""
        return self.steps_per_generation == self.gradient_accumulation_steps and self.num_iterations == 1

    def _refuse_what_ipa_ignores(self) -> None:
        defaults = {entry.name: entry.default for entry in dataclasses.fields(GRPOConfig)}
        for name in IGNORED:
            value = getattr(self, name)
            if value != defaults[name]:
                raise ConfigError(f"--{name} {value}: IPA has no place for this GRPO option, it would be ignored.")
        for name, wanted in SAMPLING.items():
            if getattr(self, name) != wanted:
                raise ConfigError(
                    f"--{name} {getattr(self, name)}: training rollouts need {wanted}; anything else biases every "
                    f"ratio. (Evaluation has its own temperature, top_p and top_k.)"
                )

    def _check_ranges(self) -> None:
        levels = ("none", "token", "chunk", "sequence")
        _choice("ratio_level", self.ratio_level, levels)
        _choice("mask_level", self.mask_level, levels)
        _choice("aggregation", self.aggregation, ("token", "chunk", "sum"))
        _choice("resampling", self.resampling, ("none", "rollback", "parallel", "both"))
        _choice("anchor_mode", self.anchor_mode, ("uniform", "random"))
        _choice("il_when", self.il_when, ("never", "always", "fork_failed"))
        _choice("filter_groups", self.filter_groups, ("none", "zero_variance"))
        _choice("pi_old_source", self.pi_old_source, ("trainer", "sampler"))
        _choice("shuffle_dataset", self.shuffle_dataset, (False,))
        for name, low, high in (
            ("gamma", 0.0, 1.0),
            ("rollback_threshold", 1e-9, 1.0),
            ("failure_reward", -10.0, 0.0),
            ("conduct_penalty", 0.0, 10.0),
            ("mismatch_threshold", 1.0, float("inf")),
            ("lambda_il", 0.0, float("inf")),
            ("lambda_rl", 0.0, float("inf")),
            ("max_new_tokens", 1, float("inf")),
            ("rollback_window", 1, float("inf")),
            ("anchors", 1, float("inf")),
            ("expert_refresh", 0, float("inf")),
            ("async_ratio", 0, float("inf")),
            ("rollout_redundancy", 0, MAX_SPARES),
            ("save_total_limit", 2, float("inf")),
            ("learning_rate", 0.0, float("inf")),
            ("max_steps", 0, float("inf")),
            ("per_device_train_batch_size", 1, float("inf")),
            ("gradient_accumulation_steps", 1, float("inf")),
            ("num_generations", 1, float("inf")),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"--{name} {value}: must lie in [{low:g}, {high:g}]")
