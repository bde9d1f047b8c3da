"""What a recipe runs, as options: the task, the sandbox, the sampler, and the stages around IPA."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mini_rome.call_formats import FORMATS
from mini_rome.context import ContextConfig
from mini_rome.errors import ConfigError
from mini_rome.sampler import REMOTE, SAMPLERS


@dataclass
class RunArguments:
    """What is run: the task, the sandbox, and the stages around IPA."""

    sandbox: str = field(default="auto", metadata={"help": "docker, sim (simulated), or auto: docker if it answers."})
    sampler: str = field(
        default="transformers", metadata={"help": f"Who generates tokens: {', '.join(SAMPLERS)}."}
    )
    sampler_url: str | None = field(
        default=None, metadata={"help": "Address of the server of a remote sampler, e.g. http://127.0.0.1:8000."}
    )
    sampler_dtype: str | None = field(
        default=None, metadata={"help": "Precision of the sampler's copy, e.g. bfloat16; default: the trainer's own."}
    )
    model: str | None = field(
        default=None, metadata={"help": "Saved model to start IPA from; default: build a tiny one and run SFT."}
    )
    agent: str = field(
        default="builtin",
        metadata={"help": "Who acts: builtin, or native: an agent behind the model proxy, on docker inside the box."},
    )
    context: dict | str | None = field(
        default=None,
        metadata={
            "help": "Features of the agent runtime, fields of ContextConfig: a mapping in YAML, here JSON such as "
            '\'{"compress_at": 300, "guard": "stop"}\'. Default: the bare loop.'
        },
    )
    call_format: str | None = field(
        default=None,
        metadata={
            "help": f"How the model writes tool calls: {', '.join(FORMATS)} (bash blocks). Default: as its tokenizer "
            f"notes, which one saved here does; else tiny, the format of the models made here."
        },
    )
    families: list[str] = field(default_factory=lambda: ["notes", "tickets"], metadata={"help": "Task families."})
    chunks: list[int] = field(default_factory=lambda: [12], metadata={"help": "Horizons K that IPA trains on."})
    sft_chunks: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Horizons K that SFT shows."})
    train_tasks: int = field(default=64, metadata={"help": "Tasks, each with one expert, that IPA trains on."})
    sft_tasks: int = field(default=1500, metadata={"help": "Expert trajectories for SFT."})
    sft_steps: int = field(default=360, metadata={"help": "Optimiser steps of SFT."})
    sft_learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate of SFT; in stage 2 a quarter."})
    sft_batch_size: int = field(default=32, metadata={"help": "Trajectories per optimiser step and process of SFT."})
    sft_micro_batch: int = field(
        default=8, metadata={"help": "Trajectories computed at once in SFT, where that divides --sft_batch_size."}
    )
    mistake_rate: float = field(default=0.15, metadata={"help": "Share of expert chunks preceded by a failure."})
    shortcut_rate: float = field(
        default=0.0,
        metadata={
            "help": "Share of SFT's demonstrations that take the shortcut of a family of the safety drill. Not in "
            "the paper, nor are the next two."
        },
    )
    golden: bool = field(
        default=False, metadata={"help": "Leave out demonstrations of bad conduct, or whose success is not honest."}
    )
    honest_verifier: bool = field(
        default=False, metadata={"help": "Train by our verifier on families whose own can be fooled (NAME-naive)."}
    )
    extra_turns: int = field(default=4, metadata={"help": "Responses allowed beyond the expert's K."})
    eval_tasks: int = field(default=200, metadata={"help": "Held-out tasks of each evaluation."})
    eval_every: int = field(default=8, metadata={"help": "Steps between evaluations for the curve; 0: none."})
    curve_tasks: int = field(default=64, metadata={"help": "Held-out tasks of each evaluation for the curve."})
    naive: bool = field(default=False, metadata={"help": "Also train the naive arm: every start initial."})
    resume: str | None = field(default=None, metadata={"help": "Run folder to go on with after it was stopped."})
    keep_episodes: int = field(
        default=8,
        metadata={"help": "Training episodes of a step kept for `mini-rome view`, and all of evaluations; 0: none."},
    )
    timeline: bool = field(
        default=False, metadata={"help": "Record where the time of IPA's steps goes: timeline.csv in its folder."}
    )
    boxes: int = field(default=64, metadata={"help": "Sandboxes open at once, at most."})

    def __post_init__(self) -> None:
        for name in (
            *("train_tasks", "sft_tasks", "sft_steps", "sft_batch_size", "sft_micro_batch"),
            *("eval_tasks", "curve_tasks", "boxes"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        for name in ("extra_turns", "eval_every", "keep_episodes", "sft_learning_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be 0 or more")
        for name in ("families", "chunks", "sft_chunks"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} []: at least one is needed")
        for name in ("mistake_rate", "shortcut_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must lie in [0, 1)")
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"--sampler {self.sampler}: choose from {', '.join(SAMPLERS)}")
        if (self.sampler in REMOTE) != (self.sampler_url is not None):
            raise ConfigError(f"--sampler {self.sampler} --sampler_url {self.sampler_url}: the one needs the other")
        if self.agent not in ("builtin", "native"):
            raise ConfigError(f"--agent {self.agent}: choose builtin or native")
        if ContextConfig.of(self.context) is not None and self.agent == "native":
            raise ConfigError(f"--agent native --context {self.context}: an external agent makes its own context")
        if self.call_format not in (None, *FORMATS):
            raise ConfigError(f"--call_format {self.call_format}: choose from {', '.join(FORMATS)}")
        if self.agent == "native" and self.call_format not in (None, "tiny"):
            raise ConfigError(f"--agent native --call_format {self.call_format}: the model proxy writes tiny only")
        if self.sampler_dtype is not None and not isinstance(getattr(torch, self.sampler_dtype, None), torch.dtype):
            raise ConfigError(f"--sampler_dtype {self.sampler_dtype}: not a torch dtype such as bfloat16")

    def boxes_on(self, backend: str) -> int:
        """`boxes`, or more of the simulated ones: each is a few kilobytes, and many at once make larger batches."""
        return self.boxes if backend == "docker" else max(256, self.boxes)
