"""One rank of two whose weights FSDP2 shares out; writes FOLDER/RANK.pt.

    python -m torch.distributed.run --nproc_per_node 2 sharded_worker.py FOLDER

Each rank gathers what a sampler is sent and what a checkpoint holds, before and after a training step, beside a whole
copy of the model that does the same step; rank 0 saves the model as a run does.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import small
import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mini_rome.pipeline import Run
from mini_rome.sampler import parity
from mini_rome.sampler.vllm_server import VLLMServerSampler
from mini_rome.sampler.weights import adapter_weights, base_model, host_weights, is_shared_out, merged_weights
from mini_rome.sft import trained

TARGETS = {
    "none": None,
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "experts": {"target_modules": ["v_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
}
IDS = list(range(2, 12)) * 3


def build(targets: dict[str, list[str]] | None) -> nn.Module:
    """The small model, with an adapter that is not zero."""
    model = small.small_model()
    if targets is None:
        return model
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, **targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.2)
    return model


def shared_out(model: nn.Module, ranks: int, reshard: bool) -> nn.Module:
    """A copy of it under FSDP2: each decoder layer, then the rest. reshard: give shares back after a forward."""
    model, mesh = copy.deepcopy(model), init_device_mesh("cpu", (ranks,))
    for layer in base_model(model).model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def step(model: nn.Module) -> None:
    """One optimiser step on the same batch on every rank, so that the mean over ranks is the gradient of one."""
    optimiser = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    ids = torch.tensor([IDS])
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


class Server(VLLMServerSampler):
    """Asks a server that holds `served`, and notes what it is told."""

    def __init__(self, folder: str, served: nn.Module) -> None:
        self.url, self.dtype, self.vocab_size = "http://nowhere", torch.float32, 12
        self._folder, self._ranks, self._probe = Path(folder), PartialState(), [None]
        self.told, self.gap, self.served = [], None, served

    def _post(self, path: str, body: dict | None = None) -> None:
        self.told.append(path)

    def _generate(self, ids: list[int], sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
        scores = parity.score(self.served, ids).tolist()
        entries = [{str(token): {"logprob": score}} for token, score in zip(ids[1:], scores, strict=True)]
        return {"prompt_logprobs": [None, *entries]}


def ended(model: nn.Module) -> Any:
    """A trainer that has trained it."""
    return SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped))


def save(model: nn.Module, folder: Path, state: PartialState) -> str | None:
    """As a run does at the end of a stage."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    run = SimpleNamespace(
        model=model, ranks=state, folder=folder / "run", tokenizer=small.tokenizer(), weights={},
        display=SimpleNamespace(line=lambda text: None), save_state=lambda: None,
    )  # fmt: skip
    Run.save_model(run, "model")  # type: ignore[arg-type]
    return run.weights.get("model")


def main(folder: str) -> None:
    state = PartialState(cpu=True)
    found: dict[str, dict[str, object]] = {}
    for name, targets in TARGETS.items():
        one = build(targets)
        model = shared_out(one, state.num_processes, reshard=name != "attention")
        shares = {key: parameter for key, parameter in model.named_parameters()}
        before, whole_before = copied(model), copied(one)
        kept = {key: parameter is shares[key] for key, parameter in model.named_parameters()}
        step(model), step(one)
        sampler = Server(f"{folder}/{name}", one)
        for version in (1, 2):  # the second after a forward, that of the probe
            sampler.sync(model, version)
        found[name] = {
            "shared": is_shared_out(model) and not is_shared_out(one),
            "same parameters": all(kept.values()),
            "before": equal(before, whole_before, 0.0),
            "after": equal(copied(model), copied(one), 1e-6),
            "moved": not equal(before, copied(model), 1e-4),
            "compared": (sampler.gap is not None) == state.is_main_process,
            "kept": set(host_weights(model, state.is_main_process)) == set(whole_before),
            "sent": targets is None or equal(adapter_weights(model, True), adapter_weights(one, True), 1e-6),
            "told": sampler.told,
            "trained": trained(ended(model)) is model and not isinstance(trained(ended(one)), PeftModel),
            "saved": save(model, Path(folder) / name, state),
        }
    torch.save(found, Path(folder) / f"{state.process_index}.pt")


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in merged_weights(model)}


def equal(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> bool:
    return first.keys() == second.keys() and all(
        torch.allclose(first[name], second[name], rtol=0, atol=tolerance) for name in first
    )


if __name__ == "__main__":
    main(sys.argv[1])
