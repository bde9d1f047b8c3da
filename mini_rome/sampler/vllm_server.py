"""Sampling with a vLLM server in another process, over HTTP with token ids: for a node whose GPUs are divided.

Start one for a saved model (its endpoints take no key, so it listens on loopback or a private network only):

    python -m mini_rome.sampler.vllm_server runs/latest/sft --port 8000

A sync writes a checkpoint into a folder that both sides can read; the server pauses, reloads it, drops its prefix
cache, takes the version as its label and goes on. Every completion carries the label of the weights that sampled it.
A request can be sent twice without harm: its seed makes the second answer equal to the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mini_rome.errors import ConfigError, SamplerError
from mini_rome.sampler import parity
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.sampler.vllm import BLOCK, ENVIRONMENT, batched_tokens, check_request, installed_version, seed
from mini_rome.sampler.weights import base_model, host_weights, is_shared_out, split_experts

CONNECTIONS = 64  # requests under way at once, from one rank
TRIES = 3
TIMEOUT_S = 300.0
WORKER = "mini_rome.sampler.vllm_model.ReloadWorker"
ADAPTER_WORKER = "mini_rome.sampler.vllm_adapter_worker.AdapterWorker"
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")  # what a server of adapters takes them on


class VLLMServerSampler(Sampler):
    """Asks a server that holds its own copy of the weights, one HTTP request per response."""

    name = "vllm-server"

    def __init__(
        self,
        model: PreTrainedModel,
        stop_id: int,
        dtype: torch.dtype | None = None,
        *,
        url: str | None,
        max_model_len: int = 4096,
        folder: str | None = None,
    ) -> None:
        """url: the server's address. folder: where checkpoints for it are written, readable by both; or temporary.

        dtype: the precision that the server was started with, for the tolerance of the probe.
        """
        if not url:
            raise ConfigError(f"--sampler {self.name}: --sampler_url is needed, e.g. http://127.0.0.1:8000")
        self.url, self.stop_id, self.dtype = url.rstrip("/"), stop_id, dtype or model.dtype
        self.max_model_len, self.vocab_size = max_model_len, base_model(model).config.vocab_size
        self.stale = 0  # completions whose weights were not those of the last sync
        self._folder = Path(folder or tempfile.mkdtemp(prefix="mini-rome-weights-"))
        self._probe: list[Any] = [None]  # its ids, once they are drawn
        self._ranks = PartialState()
        self.sync(model, version=0)

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order. SamplerError: the server is gone or refuses."""
        for request in requests:
            check_request(request, params, self.max_model_len, self.vocab_size)
        if not requests:
            return []
        with ThreadPoolExecutor(max_workers=min(len(requests), CONNECTIONS)) as pool:
            completions = list(pool.map(lambda request: self._ask(request, params), requests))
        self.stale += sum(completion.version != self.version for completion in completions)
        return completions

    def _ask(self, request: Request, params: SamplingParams) -> Completion:
        # Everything is given: what is left out the server takes from the checkpoint's generation_config.json.
        sampling = {
            "max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
            "top_k": params.top_k, "min_p": 0.0, "repetition_penalty": 1.0, "seed": seed(request.key), "logprobs": 0,
            "stop_token_ids": [self.stop_id], "ignore_eos": True, "detokenize": False,
        }  # fmt: skip
        answer = self._generate(request.ids, sampling)
        choice = answer["choices"][0]
        scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Completion(choice["token_ids"], scores, self._version_of(answer))

    def _version_of(self, answer: dict[str, Any]) -> int:
        versions = {span["version"] for span in answer["choices"][0]["weight_versions"]}
        if len(versions) != 1 or not min(versions).isdigit():
            raise SamplerError(f"{self.url}: a response of the weights {sorted(versions)}: another run reloads them")
        return int(min(versions))

    def _generate(self, ids: list[int], sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self._post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling, **more})

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer. Tried again where no answer came: nothing that is asked here does harm when done twice."""
        data = json.dumps(body or {}).encode()
        for attempt in range(TRIES):
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    text, kind = answer.read(), answer.headers.get_content_type()
                return json.loads(text) if text and kind == "application/json" else None
            except urllib.error.HTTPError as error:
                detail = error.read().decode(errors="replace")[:300]
                raise SamplerError(f"{self.url}{path}: {error.code} {detail}") from error
            except (OSError, TimeoutError) as error:  # refused, reset, cut off
                problem = error
            time.sleep(0.5 * 2**attempt)
        raise SamplerError(
            f"{self.url}{path}: no answer in {TRIES} tries ({problem}). Start the server again (python -m {__name__} "
            f"FOLDER) and go on from the last checkpoint with --resume."
        ) from problem

    def sync(self, model: PreTrainedModel | PeftModel, version: int) -> None:
        """Write the weights, have them loaded, and compare; on all ranks. ParityError: they did not arrive."""
        weights = host_weights(model, self._ranks.is_main_process)
        if self._ranks.is_main_process:
            checkpoint = self._write(weights, version)
            self._post("/pause?mode=wait")
            self._post("/collective_rpc", {"method": "reload_folder", "args": [str(checkpoint)]})
            self._post("/reset_prefix_cache")
            self._post("/update_weight_version", {"new_version": str(version)})
            self._post("/resume")
            shutil.rmtree(checkpoint)
        self._ranks.wait_for_everyone()
        self.version = version
        self._check(model)

    def _write(self, weights: dict[str, torch.Tensor], version: int) -> Path:
        folder = self._folder / f"version-{version}"
        folder.mkdir(parents=True, exist_ok=True)
        matrices = {}
        while weights:  # each once: two copies of a large model need not fit
            for part, matrix in split_experts(*weights.popitem()):
                matrices[part] = matrix.clone(memory_format=torch.contiguous_format)
        save_file(matrices, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def _check(self, model: PreTrainedModel | PeftModel) -> None:
        """Compare, on the main rank, whose weights were sent; the others take part where a forward needs them.

        Before FSDP shares the weights out, the others may hold zeros: they are loaded by one rank and sent to all.
        """
        main, together = self._ranks.is_main_process, is_shared_out(model)
        if together:
            broadcast_object_list(self._probe)
        if not main and not together:
            return
        if self._probe[0] is None:
            self._probe = [parity.make_probe(model, self.vocab_size).ids]
        ids = self._probe[0]
        own = parity.score(model, ids)
        if main:
            sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
            scores = self._generate(ids, sampling)["prompt_logprobs"]
            scores = [entry[str(token)]["logprob"] for entry, token in zip(scores[1:], ids[1:], strict=True)]
            self.gap = parity.compare(scores, own)
            parity.check(self.gap, self.dtype, self.version)

    def forget(self, episodes: Collection[int] | None = None) -> None:
        """Nothing to do: the server's prefix cache evicts by itself."""


def server_command(
    folder: str, port: int, dtype: str = "float32", max_model_len: int = 4096, adapters: int | None = None
) -> list[str]:
    """The command that starts a server for a saved model. `vllm serve` is not there in the CPU build.

    adapters: the rank of the LoRA adapters that it is to take, for `vllm-adapters`; not both that and reloads.
    """
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", dtype, "--max-model-len", str(max_model_len), "--block-size", str(BLOCK),
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched_tokens(max_model_len)),
        "--tokens-only", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--worker-extension-cls", ADAPTER_WORKER if adapters else WORKER,
    ]  # fmt: skip
    if adapters:
        # Two: the responses of the version before may be under way.
        command += ["--enable-lora", "--max-lora-rank", str(adapters), "--max-loras", "2", "--max-cpu-loras", "2"]
        command += ["--lora-target-modules", *ADAPTED]
    return command


def main() -> None:
    text = "Start a vLLM server that --sampler vllm-server or vllm-adapters can use."
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("folder", help="a saved model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max_model_len", type=int, default=4096)
    parser.add_argument("--adapters", type=int, metavar="RANK", help="take LoRA adapters, for vllm-adapters")
    options, rest = parser.parse_known_args()  # the rest is vLLM's: --tensor-parallel-size 2
    installed_version()
    command = server_command(options.folder, options.port, options.dtype, options.max_model_len, options.adapters)
    os.execve(command[0], command + rest, os.environ | server_environment())


def server_environment() -> dict[str, str]:
    """What the server needs in its environment: the endpoints for updates are there in developer mode only."""
    return {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name} | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip


if __name__ == "__main__":
    main()
