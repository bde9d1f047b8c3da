"""What a run of an ablation is, as plain data, and where what it makes lies.

What is shared by all runs with the same options is made once and kept in a folder (`cache`): the models after SFT,
and the rows of finished runs, so that two figures with an arm in common train it once. The names in there are hashes
of the options, not of the code: delete the folder when the code has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trl import ModelConfig

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.errors import ConfigError
from mini_rome.evaluation.ablation import Ablation, Variant
from mini_rome.options import lora_config

SFT = "sft.json"  # beside a model: what it can do
SFT_OPTIONS = (
    *("families", "sft_chunks", "sft_tasks", "sft_steps", "sft_learning_rate", "sft_batch_size", "mistake_rate"),
)
DRILL_OPTIONS = ("shortcut_rate", "golden")  # named where they are given: other models keep the names they have
SHARED_SEED = 0  # of SFT, where one model serves all seeds


@dataclass(frozen=True)
class Job:
    """One variant on one seed; plain data, since it is sent to another process."""

    ablation: str
    variant: Variant
    seed: int
    steps: int
    backend: str
    cache: str
    scratch: str
    base: Mapping[str, Any]
    every: int
    repeats: int
    held_out: int
    hard: bool
    once: bool

    @classmethod
    def of(
        cls, ablation: Ablation, variant: Variant, seed: int, steps: int, backend: str, cache: str, scratch: str
    ) -> Job:
        shared = {name: getattr(ablation, name) for name in ("base", "every", "repeats", "held_out", "hard", "once")}
        return cls(ablation.name, variant, seed, steps, backend, cache, scratch, **shared)

    @cached_property
    def options(self) -> dict[str, Any]:
        return {**self.base, **self.variant.options}

    @property
    def sft_seed(self) -> int:
        return SHARED_SEED if self.once else self.seed

    @property
    def model(self) -> Path:
        """Where the model after SFT lies, or will."""
        return Path(self.cache) / f"sft-{digest([sft_options(self.options), self.sft_seed])}"

    @property
    def result(self) -> Path:
        """Where the rows lie, or will: the same for all figures that have this run."""
        what = [self.options, self.variant.trainer, self.variant.imitate, self.variant.noise, self.steps, self.every]
        what += [self.repeats, self.held_out, self.hard, self.once, self.seed, self.backend]
        return Path(self.cache) / f"run-{digest(what)}.json"


def digest(value: Any) -> str:
    """A short name for plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def sft_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the model after SFT depends on."""
    defaults = {entry.name: entry for entry in dataclasses.fields(RunArguments)}

    def default(name: str) -> Any:
        entry = defaults[name]
        return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()

    drill = {name: options[name] for name in DRILL_OPTIONS if name in options}
    return {name: options.get(name, default(name)) for name in SFT_OPTIONS} | drill


def build(options: Mapping[str, Any], kind: type[IPAConfig], **extra: Any) -> tuple[RunArguments, IPAConfig, Any]:
    """(RunArguments, the trainer's configuration, LoRA or None) from flat options. ConfigError: an unknown one."""
    kinds: list[type] = [RunArguments, kind, ModelConfig]
    shares: list[dict[str, Any]] = [{}, {}, {}]
    for name, value in {**options, **extra}.items():
        for share, owner in zip(shares, kinds, strict=True):
            if name in {entry.name for entry in dataclasses.fields(owner)}:
                share[name] = value
                break
        else:
            raise ConfigError(f"{name} {value}: no option of {', '.join(owner.__name__ for owner in kinds)}")
    model = ModelConfig(**shares[2])
    return RunArguments(**shares[0]), kind(**shares[1]), lora_config(model)
