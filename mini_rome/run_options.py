"""A run's options taken together: whether they fit, what they make live, what a resumed run must repeat."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import parse_flag_from_env

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.errors import ConfigError
from mini_rome.families import get_family
from mini_rome.runs import checkpoint


def check_fit(arguments: RunArguments, args: IPAConfig) -> None:
    """All that can be known to be wrong is said before anything is written."""
    tasks, rollouts = arguments.train_tasks, args.num_generations or 1
    planned, batch = tasks * rollouts, args.generation_batch_size
    if batch % planned and planned % batch:
        raise ConfigError(
            f"--train_tasks {tasks} times --num_generations {rollouts} does not fit the "
            f"{batch} rollouts of a step (batch size x accumulation x processes)."
        )
    check_horizons(arguments.families, chunks=arguments.chunks, sft_chunks=arguments.sft_chunks)
    if args.resume_from_checkpoint is not None:
        raise ConfigError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint}: a run goes on as a whole, "
            f"with --resume and its folder."
        )
    if arguments.model is not None:
        checkpoint(arguments.model)
    if shared_out() and arguments.sampler == "transformers":
        raise ConfigError(
            "--sampler transformers: FSDP shares out the weights that it would sample with; use vllm-adapters"
        )
    spared = parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")
    if shared_out() and spared and arguments.sampler == "vllm":
        raise ConfigError(
            "--sampler vllm: with fsdp_cpu_ram_efficient_loading one rank alone has the weights that the "
            "engine of each would start from; use vllm-adapters"
        )


def check_horizons(families: Sequence[str], **options: Sequence[int]) -> None:
    """ConfigError, which names the option: a family that there is not, or one that has not all of its horizons."""
    for (option, horizons), family in itertools.product(options.items(), families):
        last = get_family(family).max_chunks
        for horizon in horizons:
            if not 1 <= horizon <= last:
                raise ConfigError(f"--{option} {horizon}: family {family!r} has horizons 1 to {last}")


def shared_out() -> bool:
    """Whether accelerate will share out the weights (FSDP2). ConfigError: by FSDP1, whose shares are not gathered."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return False
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("FSDP of version 1: set fsdp_version: 2 in accelerate's configuration")
    return True


def options_of(arguments: RunArguments, args: IPAConfig) -> dict[str, Any]:
    """The run's options as JSON takes them: infinity is a word."""
    options = {
        **dataclasses.asdict(arguments),
        **{name: getattr(args, name) for name in (*IPAConfig.__annotations__, "seed")},
    }
    return {name: "inf" if value == float("inf") else value for name, value in options.items()}


def check_same_options(arguments: RunArguments, args: IPAConfig, recorded: Mapping[str, Any]) -> None:
    """A run that went on with other options would be neither of the two.

    One that is older than an option was started with its default, which leaves things as they were.
    """
    defaults = {
        entry.name: entry.default for kind in (RunArguments, IPAConfig) for entry in dataclasses.fields(kind)
    }
    for name, value in options_of(arguments, args).items():
        was = recorded.get(name, defaults[name])
        if name not in ("resume", "boxes", "output_dir") and was != value:
            raise ConfigError(
                f"--{name} {value}: the run in {arguments.resume} was started with {was}. "
                f"Go on with the options in its run.json, or start a new run."
            )


def live_lines(arguments: RunArguments, args: IPAConfig) -> list[str]:
    """What of the sampler and the loss is live with these options, a line each."""
    lines = []
    negatives = "on" if args.failure_reward < 0 else "off (failure_reward 0: failures give no gradient)"
    fresh = args.fresh and args.pi_old_source == "trainer"
    ratio = "1 by construction (fresh rollouts)" if fresh else f"live, level {args.ratio_level}"
    if args.async_ratio:
        lines.append(f"rollouts: drawn ahead of training by a thread, async_ratio {args.async_ratio}")
    if args.rollout_redundancy:
        lines.append(
            f"rollouts: {args.rollout_redundancy} more per group than are kept; the first to finish are, which "
            f"favours short episodes"
        )
    mask = (
        f"live, level {args.mask_level}, H {args.mismatch_threshold}"
        if arguments.sampler_dtype
        else f"level {args.mask_level}, H {args.mismatch_threshold}; sampler and trainer agree: it will not fire"
    )
    own = "its own copy" if args.async_ratio else "the trainer itself"
    if arguments.sampler != "transformers":
        own = "its own copy, compared at every sync"
    weights = arguments.sampler_dtype or own
    lines.append(f"sampler: {arguments.sampler} ({weights})")
    lines.append(
        f"loss: {args.objective}; gamma {args.gamma}; negatives {negatives}; ratio {ratio}; mask {mask}; "
        f"pi_old from the {args.pi_old_source}; imitation {args.il_when}; starts {args.resampling}"
    )
    return lines
