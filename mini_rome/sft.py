"""Masked supervised fine-tuning (paper, eqs. 1-2) with TRL's SFTTrainer: rows of ids and labels, no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from mini_rome.collator import to_sft_rows
from mini_rome.errors import ConfigError
from mini_rome.masks import MaskPolicy
from mini_rome.sampler.weights import is_shared_out
from mini_rome.types import Trajectory

MICRO_BATCH = 8


@dataclass
class MaskedSFTConfig(SFTConfig):
    """SFTConfig with the defaults of the tiny run on a CPU."""

    output_dir: str | None = field(default=None, metadata={"help": "Where checkpoints go."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Initial learning rate for AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second-moment decay of AdamW, short as the run is."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=20, metadata={"help": "Steps of linear warm-up."})
    max_steps: int = field(default=500, metadata={"help": "Optimiser steps."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Trajectories per micro-batch."})
    max_length: int | None = field(default=None, metadata={"help": "Cut rows to this; off, since it cuts episodes."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute activations: saves memory."})
    save_strategy: str = field(default="no", metadata={"help": "When to save checkpoints."})
    report_to: str = field(default="none", metadata={"help": "trackio, tensorboard, wandb or none."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "The recipes show their own progress."})

    def __post_init__(self) -> None:
        if not torch.cuda.is_available():
            self.use_cpu, self.bf16 = True, False
        super().__post_init__()


def micro_batches(trajectories: int, part: int = MICRO_BATCH) -> dict[str, Any]:
    """Options for optimiser steps on so many trajectories, computed in parts of so many where that divides them.

    The step is the same up to rounding. Rows of like length stand together in a part, which saves a third of the
    time: half of a batch of 32 drawn at random is padding.
    """
    part = part if trajectories % part == 0 else trajectories
    return {
        "per_device_train_batch_size": part,
        "gradient_accumulation_steps": trajectories // part,
        "train_sampling_strategy": "batch_rebalance",
    }


def masked_sft_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trajectories: Sequence[Trajectory],
    args: MaskedSFTConfig,
    policy: MaskPolicy,
    callbacks: list[TrainerCallback] | None = None,
    peft_config: Any = None,
) -> SFTTrainer:
    """A trainer on the kept turns: those whose call failed or that were irrelevant stay in context, untrained."""
    return rows_trainer(model, tokenizer, to_sft_rows(trajectories, policy), args, callbacks, peft_config)


def rows_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, list[int]]],
    args: MaskedSFTConfig,
    callbacks: list[TrainerCallback] | None = None,
    peft_config: Any = None,
) -> SFTTrainer:
    """A trainer on rows of input_ids and labels; with `packing` several rows stand in one of max_length tokens.

    Packed rows do not see each other: TRL numbers their positions anew, from which the attention mask is made.
    ConfigError: a row longer than max_length, which TRL would cut without a word.
    """
    longest = max((len(row["input_ids"]) for row in rows), default=0)
    if args.max_length is not None and longest > args.max_length:
        raise ConfigError(f"--max_length {args.max_length}: a row has {longest} tokens, and rows are never cut")
    if args.packing and args.max_length is None:
        raise ConfigError(f"--packing true: needs --max_length, {longest} or more")
    if peft_config is not None:
        set_seed(args.seed)  # the adapter is drawn by the base class, before it sets the seed itself
    return SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
        peft_config=peft_config,
    )


def trained(trainer: SFTTrainer) -> PreTrainedModel:
    """The model after training; an adapter is merged into its weights, which are float32, so nothing drifts.

    Where FSDP shares out the weights the adapter stays, and is merged when they are gathered: for a sampler, to save.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.merge_and_unload() if isinstance(model, PeftModel) and not is_shared_out(model) else model
