"""Sampling with a vLLM server that keeps the base model and is sent the LoRA adapter alone: megabytes, not the model.

Start the server from the model that IPA starts from, with room for the adapter's rank (`--lora_r`):

    python -m mini_rome.sampler.vllm_server models/Qwen3-30B-A3B-Instruct-2507 --adapters 16

Each version is an adapter with a name of its own, which every request gives and every completion answers with: no
pause, and a prefix cache that cannot mix versions. Adapters on attention only: `vllm-server` is for the others.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mini_rome.errors import ConfigError, ParityError, SamplerError
from mini_rome.sampler.vllm_server import ADAPTED, VLLMServerSampler
from mini_rome.sampler.weights import adapter_weights, adapters_of


class VLLMAdapterSampler(VLLMServerSampler):
    """Asks for the adapter of the last sync by its name."""

    name = "vllm-adapters"

    def __init__(self, *args: Any, **options: Any) -> None:
        """As VLLMServerSampler. ParityError: the server holds another base model."""
        names = [uuid.uuid4().hex[:8]]
        broadcast_object_list(names)  # of this run, so that two runs do not take one adapter for the other's
        self._run, self._adapter, self._sent = names[0], "", 0
        super().__init__(*args, **options)

    def sync(self, model: PreTrainedModel | PeftModel, version: int) -> None:
        """Send the adapter, if there is one yet, and compare; on all ranks. ParityError: it did not arrive."""
        if isinstance(model, PeftModel):
            self._send(model, version)
        elif version:
            raise ConfigError(
                f"--sampler {self.name}: --use_peft is needed, the server's own weights stay as they are; "
                f"use vllm-server"
            )
        self.version = version
        try:
            self._check(model)
        except ParityError as error:
            if self._adapter:
                raise
            raise ParityError(f"{self.url} was not started from the model of this run\n{error}") from error

    def _send(self, model: PeftModel, version: int) -> None:
        targets = {name.removesuffix(".weight").rpartition(".")[2] for name in adapters_of(model)}
        if others := targets - set(ADAPTED):
            raise ConfigError(
                f"--sampler {self.name}: adapters on {', '.join(sorted(others))} are not sent, only those on "
                f"{', '.join(ADAPTED)}; use vllm-server"
            )
        self._sent += 1  # a version can be synced again, and a name holds one adapter for good
        name = f"{self._run}-{version}-{self._sent}"
        weights = adapter_weights(model, self._ranks.is_main_process)
        if self._ranks.is_main_process:
            self._load(name, self._written(model, weights, name))
        self._ranks.wait_for_everyone()
        self._adapter = name

    def _load(self, name: str, folder: Path) -> None:
        try:
            self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except SamplerError as error:
            if "already been loaded" not in str(error):  # the answer was lost and it was said again
                raise
        if self._adapter:
            shutil.rmtree(self._folder / self._adapter)  # the server may read the present one again

    def _written(self, model: PeftModel, weights: dict[str, torch.Tensor], name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        model.active_peft_config.save_pretrained(str(folder))
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder

    def _generate(self, ids: list[int], sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
        return super()._generate(ids, sampling, **({"model": self._adapter} if self._adapter else {}), **more)

    def _version_of(self, answer: dict[str, Any]) -> int:
        name = str(answer["model"])
        if name == self._adapter or not self._adapter:
            return self.version
        raise SamplerError(f"{self.url}: a response of {name}, asked for was {self._adapter}")
