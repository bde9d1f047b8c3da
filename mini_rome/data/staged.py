"""One stage of SFT on a dataset: from its options to a saved model, with success before and after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.data.demonstrations import make_tasks
from mini_rome.data.records import tokenizer_hash
from mini_rome.data.stages import (
    EMPHASIS,
    REFINE,
    SftRow,
    emphasised,
    mixed_rows,
    open_dataset,
    preferred,
    still_wrong,
)
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.evaluation.evaluate import evaluate
from mini_rome.masks import MaskPolicy, masked_share
from mini_rome.model import build_model, load_model, weights_hash
from mini_rome.packed import packed_attention
from mini_rome.progress import Display, train_sft
from mini_rome.report import percent
from mini_rome.rollout import Rollout
from mini_rome.run_options import check_horizons, shared_out
from mini_rome.runs import SUMMARY, checkpoint, provenance, run_folder, write_json, writing
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Pool, resolve
from mini_rome.sft import MaskedSFTConfig, micro_batches, rows_trainer, trained
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory


@dataclass
class StageArguments:
    """SFT on a dataset of trajectories; without --data the recipe makes its own, as `make ipa` does."""

    data: str | None = field(default=None, metadata={"help": "Dataset folder of recipes/data.py; default: none."})
    stage: int = field(default=1, metadata={"help": "1: all of the dataset; 2: the best of each instance."})
    attempts: int = field(default=2, metadata={"help": "Stage 2: tries of each instance; one failure selects it."})
    emphasis: int = field(
        default=EMPHASIS, metadata={"help": "Stage 2: how many times as often to show what --model gets wrong."}
    )
    pack_length: int = field(default=0, metadata={"help": "Pack rows into so many tokens; 0: pad batches instead."})
    mask_errors: bool = field(default=True, metadata={"help": "m_err of eq. 1: leave failed turns out of the loss."})
    mask_irrelevant: bool = field(default=True, metadata={"help": "m_task of eq. 2: leave irrelevant turns out."})
    mix: list[float] = field(
        default_factory=lambda: [1.0, 0.0, 0.0],
        metadata={"help": "Shares of tokens: agentic, reasoning, general. The paper: 0.70 0.15 0.15."},
    )

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ConfigError(f"--stage {self.stage}: 1 or 2")
        for name in ("attempts", "emphasis"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.pack_length < 0:
            raise ConfigError(f"--pack_length {self.pack_length}: must be 0 or more")
        if len(self.mix) != 3:
            raise ConfigError(f"--mix {' '.join(map(str, self.mix))}: three shares, agentic, reasoning, general")
        for each in fields(self) if self.data is None else ():
            value = getattr(self, each.name)
            if value != (each.default if each.default_factory is MISSING else each.default_factory()):
                raise ConfigError(f"--{each.name} {value}: only with --data, a dataset folder (make data)")

    @property
    def policy(self) -> MaskPolicy:
        return MaskPolicy(errors=self.mask_errors, irrelevant=self.mask_irrelevant)


def train_stage(arguments: RunArguments, stage: StageArguments, args: IPAConfig, peft_config: Any = None) -> Path:
    """Run the stage; returns its folder, with `sft/` (the model, an adapter merged) and summary.json."""
    if stage.stage == 2 and arguments.model is None:
        raise ConfigError("--stage 2: needs --model, the model of stage 1, to find what it still gets wrong")
    if arguments.resume is not None:
        raise ConfigError(f"--resume {arguments.resume}: a stage on --data is not resumed, but run again")
    check_horizons(arguments.families, chunks=arguments.chunks, sft_chunks=arguments.sft_chunks)
    if shared_out():
        raise ConfigError(f"--data {stage.data}: a stage samples with the weights that FSDP would share out")
    assert stage.data is not None
    chat, data = open_dataset(stage.data)
    model = start_model(arguments.model, chat, args.seed)
    display = Display()
    backend, why = resolve(arguments.sandbox)
    display.line(why)
    folder = run_folder(args.output_dir, "sft")
    display.line(f"run: {folder}")
    with Pool(backend, size=arguments.boxes_on(backend)) as pool:
        rollout = Rollout(chat, TransformersSampler(model, chat.stop_id), pool, seed=args.seed)
        success = {"before": measured(rollout, arguments, args.seed, display, "before")}
        chosen = selected(rollout, data, stage, args.max_new_tokens, display)
        rows = mixed_rows(chat, chosen, stage.policy, tuple(stage.mix), args.seed)  # type: ignore[arg-type]
        shares = masked_share(chosen, stage.policy)
        config = config_of(arguments, stage, args, folder)
        speed = fit(model, chat.tokenizer, rows, config, display, f"SFT, stage {stage.stage}", (), peft_config)
        rollout.sampler.sync(model, version=1)
        success["after"] = measured(rollout, arguments, args.seed, display, "after")
    save(model, chat.tokenizer, folder / "sft")
    facts = provenance(backend, "transformers", args.seed)
    facts |= {"stage": stage.stage, "trajectories": len(data), "chosen": len(chosen), "rows": len(rows)}
    facts |= {"masked": shares, "success": success, "tokens_per_s": speed, "options": asdict(stage)}
    write_json(folder / SUMMARY, {**facts, "weights": weights_hash(model), "seconds": display.seconds})
    display.line(f"model: {folder / 'sft'}")
    return folder


def start_model(path: str | None, chat: ChatFormat, seed: int, option: str = "--model") -> PreTrainedModel:
    """A new tiny model, or a saved one; ConfigError where that has another tokenizer than the data."""
    if path is None:
        return build_model(chat.tokenizer, seed)
    model, tokenizer = load_model(checkpoint(path, option))
    if tokenizer_hash(tokenizer) != tokenizer_hash(chat.tokenizer):
        raise ConfigError(f"{option} {path}: has another tokenizer than the dataset; take a model trained on it")
    return model


def selected(
    rollout: Rollout, data: list[Trajectory], stage: StageArguments, max_new_tokens: int, display: Display
) -> list[Trajectory]:
    """The trajectories this stage trains on. MiniRomeError where the model gets everything right already."""
    if stage.stage == 1:
        return data
    best = preferred(data)
    with display.stage("what is still wrong", len(best)) as update:
        wrong = still_wrong(rollout, best, stage.attempts, max_new_tokens, update)
    display.line(
        f"stage 2: the best trajectory of each of {len(best)} instances; {len(wrong)} are still wrong and are shown "
        f"{stage.emphasis} times as often"
    )
    if not wrong:
        raise MiniRomeError(f"the model solves all {len(best)} instances: stage 2 has nothing to train on")
    return emphasised(best, wrong, stage.emphasis)


def measured(rollout: Rollout, arguments: RunArguments, seed: int, display: Display, when: str) -> dict[str, Any]:
    """Held-out success with intervals on short horizons (those of SFT) and on long ones."""
    found = {}
    for name, chunks in (("short", arguments.sft_chunks), ("long", arguments.chunks)):
        tasks = make_tasks(arguments.families, chunks, arguments.eval_tasks, "test", seed)
        found[name] = {**evaluate(rollout, tasks).summary(), "chunks": chunks}
        display.line(f"success {when}, chunks {' '.join(map(str, chunks))}: {percent(found[name])}")
    return found


def config_of(arguments: RunArguments, stage: StageArguments, args: IPAConfig, folder: Path) -> MaskedSFTConfig:
    """The trainer's options; with packing one row of `pack_length` tokens a micro-batch."""
    packed = stage.pack_length > 0
    return MaskedSFTConfig(
        output_dir=str(folder / "sft-trainer"),
        max_steps=arguments.sft_steps,
        learning_rate=arguments.sft_learning_rate * (REFINE if stage.stage == 2 else 1.0),
        seed=args.seed,
        bf16=args.bf16,
        gradient_checkpointing=args.gradient_checkpointing,
        **({"per_device_train_batch_size": 1} if packed
           else micro_batches(arguments.sft_batch_size, arguments.sft_micro_batch)),
        packing=packed,
        max_length=stage.pack_length if packed else None,
    )


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[SftRow],
    config: MaskedSFTConfig,
    display: Display,
    name: str,
    callbacks: Sequence[TrainerCallback] = (),
    peft_config: Any = None,
) -> float:
    """Train `model` in place on the rows; returns tokens of the rows (padding apart) per second."""
    trainer = rows_trainer(model, tokenizer, rows, config, list(callbacks), peft_config)
    begun = time.monotonic()
    with packed_attention(model, config.packing):
        train_sft(trainer, display, name)
    seconds = time.monotonic() - begun
    trained(trainer)  # an adapter goes into the weights of `model`
    seen = trainer.state.log_history[-1].get("num_tokens") or next(
        (entry["num_tokens"] for entry in reversed(trainer.state.log_history) if "num_tokens" in entry), 0.0
    )
    return round(seen / seconds, 1)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Model and tokenizer in the Hugging Face format."""
    with writing(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
