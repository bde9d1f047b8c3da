"""`--dry-run`: would this configuration fit its GPUs? Answered on any machine, without weights and without a GPU.

The model is built on the meta device from a shipped config, the adapter is put on it for real, and what a GPU will
hold is summed up. The sum is an estimate, meant to refuse what cannot fit: activations assume gradient checkpointing
(the input of every layer is kept, one layer at a time is computed again) and a flash-attention kernel, and a tenth of
the memory is left to the CUDA context, communication and fragmentation. Nothing of it was measured on a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.errors import ConfigError

GB = 1e9
HALF, FULL = 2, 4  # bytes of a bfloat16 and of a float32
RESERVED = 0.1  # of each GPU


@dataclass
class NodeArguments:
    """The machine that a configuration is meant for: accelerate and the server set it up, --dry-run reads it."""

    dry_run: bool = field(default=False, metadata={"help": "Check options, model and memory, then end."})
    gpu_memory: float = field(default=80.0, metadata={"help": "GB (1e9 bytes) of each GPU, for --dry-run."})
    model_config: str | None = field(default=None, metadata={"help": "config.json of the model, for --dry-run."})
    trainer_gpus: int = field(default=8, metadata={"help": "GPUs that train, one process each."})
    sharded: bool = field(default=False, metadata={"help": "FSDP2: the trainer's weights are shared out over them."})
    sampler_gpus: int = field(default=0, metadata={"help": "GPUs of the vLLM server; 0: vLLM is in every trainer."})
    context_length: int = field(default=4096, metadata={"help": "Tokens of the longest episode, vLLM's limit."})
    concurrent: int = field(default=16, metadata={"help": "Episodes that one engine has open at once."})

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "trainer_gpus", "context_length", "concurrent"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be above 0")
        if self.sampler_gpus < 0:
            raise ConfigError(f"--sampler_gpus {self.sampler_gpus}: must be 0 or more")


@dataclass(frozen=True)
class Size:
    """Of a model: all weights, those of its largest layer, and those that are trained."""

    total: int
    layer: int
    trained: int


def read_config(path: str | None) -> PretrainedConfig:
    """A model's config.json. ConfigError: none given, not there, or not one."""
    if path is None or not Path(path).is_file():
        raise ConfigError(f"--model_config {path}: name the config.json of the model that --dry-run is to build")
    try:
        values = json.loads(Path(path).read_text())
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (json.JSONDecodeError, KeyError, ValueError) as error:
        raise ConfigError(f"--model_config {path}: no model can be made of it ({error})") from error


def measure(config: PretrainedConfig, lora: Any) -> Size:
    """Build the model on the meta device, with its adapter. ConfigError: a LoRA target that it has not."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    layer = max(sum(p.numel() for p in block.parameters()) for block in model.model.layers)
    if lora is None:
        return Size(total, layer, total)
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise ConfigError(f"LoRA on {config.model_type}: {str(error).splitlines()[0]}") from error
    missing = [name for name in [*(lora.target_modules or []), *(lora.target_parameters or [])]
               if not any(name in key.split(".lora_")[0] for key in _adapters(adapted))]  # fmt: skip
    if missing:
        raise ConfigError(f"--lora_target_modules: {config.model_type} has no {', '.join(missing)}")
    return Size(total, layer, sum(p.numel() for p in adapted.parameters() if p.requires_grad))


def _adapters(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if ".lora_A" in name]


def trainer_memory(config: PretrainedConfig, size: Size, node: NodeArguments, rows: int) -> dict[str, float]:
    """GB on each training GPU. rows: sequences of a micro-batch."""
    shards = node.trainer_gpus if node.sharded else 1
    tokens = rows * node.context_length
    hidden, chosen = config.hidden_size, getattr(config, "num_experts_per_tok", 1)
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_size(config)
    # One layer computed again, with its gradient: its inputs, projections, and gate, up and product of each expert.
    layer = 2 * HALF * tokens * (6 * hidden + 2 * heads + chosen * (2 * hidden + 3 * inner))
    parts = {
        "weights, float32": FULL * size.total / shards,  # as load_model reads them; computed with in bfloat16
        "layers gathered (two at a time)": 2 * HALF * size.layer if node.sharded else 0,
        "gradients and Adam of what is trained": 3 * FULL * size.trained / shards,
        "layer inputs": HALF * tokens * hidden * config.num_hidden_layers,
        "one layer's activations": layer,
        "logits and log-softmax": (HALF + 2 * FULL) * tokens * config.vocab_size,
    }
    return {name: value / GB for name, value in parts.items() if value}


def sampler_memory(config: PretrainedConfig, size: Size, node: NodeArguments) -> dict[str, float]:
    """GB on each GPU that vLLM uses: the server's by tensor parallelism, or every trainer's."""
    parts = max(1, node.sampler_gpus)
    per_token = 2 * HALF * config.num_hidden_layers * config.num_key_value_heads * head_size(config)
    return {
        "vLLM weights, bfloat16": HALF * size.total / parts / GB,
        f"KV cache of {node.concurrent} episodes": per_token * node.context_length * node.concurrent / parts / GB,
    }


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def batch_line(args: IPAConfig, node: NodeArguments, train_tasks: int) -> str:
    """Rollouts of a step, in words. ConfigError: they do not divide into groups, or do not fit the tasks."""
    rows, windows = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rollouts, group = rows * windows * node.trainer_gpus, args.num_generations or 1
    said = f"{rows} rows x {windows} micro-batches x {node.trainer_gpus} processes = {rollouts} rollouts a step"
    if rollouts % group or (rollouts % (train_tasks * group) and (train_tasks * group) % rollouts):
        raise ConfigError(f"{said}: not a whole number of groups of --num_generations {group} of {train_tasks} tasks")
    return f"{said} = {rollouts // group} tasks x {group} rollouts"


def sft_batch_line(arguments: RunArguments, node: NodeArguments) -> str:
    """Trajectories of a step of SFT, in words. ConfigError: the parts do not make up the batch."""
    rows, batch = arguments.sft_micro_batch, arguments.sft_batch_size
    if batch % rows:
        raise ConfigError(f"--sft_batch_size {batch}: not a multiple of --sft_micro_batch {rows}")
    step = batch * node.trainer_gpus
    passes = step * arguments.sft_steps / arguments.sft_tasks
    return (
        f"{rows} rows x {batch // rows} micro-batches x {node.trainer_gpus} processes = {step} trajectories a step; "
        f"{arguments.sft_steps} steps = {passes:.1f} passes over {arguments.sft_tasks}"
    )


def dry_run(args: IPAConfig, node: NodeArguments, train_tasks: int, lora: Any) -> None:
    """Print what each GPU will hold. ConfigError: it does not fit, or the configuration cannot be run at all."""
    line = batch_line(args, node, train_tasks)
    check_memory(node, lora, line, args.per_device_train_batch_size, "--per_device_train_batch_size")


def dry_run_sft(arguments: RunArguments, node: NodeArguments, lora: Any) -> None:
    """The same for SFT, which shares its GPUs with the sampler that measures success before and after."""
    check_memory(node, lora, sft_batch_line(arguments, node), arguments.sft_micro_batch, "--sft_micro_batch")


def check_memory(node: NodeArguments, lora: Any, line: str, rows: int, option: str) -> None:
    """rows: sequences of a micro-batch, which `option` sets. line: the batch, in words."""
    config = read_config(node.model_config)
    if node.context_length > config.max_position_embeddings:
        raise ConfigError(f"--context_length {node.context_length}: the model has {config.max_position_embeddings}")
    size = measure(config, lora)
    trainer = trainer_memory(config, size, node, rows)
    sampler = sampler_memory(config, size, node)
    groups = {"trainer + vLLM": trainer | sampler} if not node.sampler_gpus else {"trainer": trainer, "vLLM": sampler}
    console = Console()
    console.print(f"{config.model_type}: {size.total / 1e9:.2f} B weights, {size.trained / 1e6:.1f} M trained")
    console.print(f"batch: {line}; context {node.context_length} tokens")
    console.print(memory_table(groups, node))
    room = node.gpu_memory * (1 - RESERVED)
    for name, parts in groups.items():
        if sum(parts.values()) > room:
            raise ConfigError(
                f"--gpu_memory {node.gpu_memory:g}: {name} needs {sum(parts.values()):.1f} GB and {room:.1f} GB are "
                f"free. Lower {option}, --context_length or --concurrent, or use --sharded."
            )
    console.print("fits. Estimated from shapes; nothing was run on a GPU.")


def memory_table(groups: dict[str, dict[str, float]], node: NodeArguments) -> Table:
    table = Table(title=f"GB per GPU of {node.gpu_memory:g} GB")
    for column in ("GPU", "part", "GB"):
        table.add_column(column)
    for name, parts in groups.items():
        count = node.sampler_gpus if name == "vLLM" else node.trainer_gpus
        for part, value in parts.items():
            table.add_row(f"{name} (x{count})", part, f"{value:.2f}")
        table.add_row(f"{name} (x{count})", "sum", f"{sum(parts.values()):.2f}", end_section=True)
    return table
