"""`mini-rome proxy`: the model proxy by itself, for an agent of one's own: prints a base URL and a token."""

from __future__ import annotations

import argparse
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mini_rome.cli_options import add_model_option, add_verb
from mini_rome.errors import ConfigError

if TYPE_CHECKING:
    from mini_rome.proxy_backends import Backend
    from mini_rome.trace import ChatFormat


def add_proxy(verbs: argparse._SubParsersAction) -> None:
    text = "Serve a model to any agent over OpenAI's protocol and record its calls token for token."
    verb = add_verb(verbs, "proxy", run_proxy, text)
    add_model_option(verb)
    verb.add_argument("--external", metavar="URL", help="pass calls on to an OpenAI-compatible API (OPENAI_API_KEY)")
    verb.add_argument("--model-name", default="", metavar="NAME", help="with --external: its name for the model")
    verb.add_argument("--record", type=Path, metavar="JSONL", help="keep the model's answers")
    verb.add_argument("--replay", type=Path, metavar="JSONL", help="answer from a record, without the model")
    verb.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1 (default: any free one)")
    verb.add_argument("--socket", type=Path, metavar="PATH", help="a unix socket in place of a port")
    verb.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default: 1)")
    verb.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of one answer (default: 256)")
    verb.add_argument("--max-context", type=int, default=8192, metavar="N", help="tokens at most (default: 8192)")
    verb.add_argument("--out", type=Path, metavar="FILE", help="where the trajectories go: .jsonl or .parquet")


@dataclass(frozen=True)
class _Loaded:
    backend: Backend
    chat: ChatFormat


def run_proxy(options: argparse.Namespace) -> int:
    from mini_rome.data import records
    from mini_rome.proxy import MODEL, Proxy
    from mini_rome.proxy_episode import Episode
    from mini_rome.sampler.base import SamplingParams
    from mini_rome.types import Trajectory

    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    loaded = _load(options)
    with Proxy(loaded.backend, loaded.chat, port=options.port, path=options.socket) as proxy:
        policy = options.model_name or str(options.model)
        trajectory = Trajectory(records.unjudged("proxy", ""), [], [], policy=policy)
        ticket = proxy.open(Episode(loaded.chat, trajectory, params, max_context=options.max_context))
        where = f" (unix socket {options.socket})" if options.socket else ""
        print(f"base URL: {proxy.url}{where}\ntoken:    {ticket.token}\nmodel:    {MODEL}", flush=True)
        print("Ctrl-C ends it", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass  # the usual end
        found = proxy.close_episode(ticket)
        samples = [sample for sample in found.samples if sample.turns]
        print(f"\n{ticket.episode.calls} calls in {len(samples)} chains; {dict(ticket.episode.counts) or 'no drift'}")
        if options.out is not None:
            print(f"{records.write(options.out, samples, loaded.chat)} records in {options.out}")
    return 0


def _load(options: argparse.Namespace) -> _Loaded:
    """The one source of answers that the options name."""
    from transformers import AutoTokenizer

    from mini_rome.call_formats import chat_format
    from mini_rome.evaluation.model_client import Endpoint
    from mini_rome.model import build_tokenizer, load_model
    from mini_rome.proxy_backends import ExternalBackend, SamplerBackend
    from mini_rome.runs import checkpoint
    from mini_rome.sampler.base import Sampler
    from mini_rome.sampler.replay import RecordingSampler, ReplaySampler
    from mini_rome.sampler.transformers import TransformersSampler
    from mini_rome.trace import ChatFormat

    if options.replay and (options.record or options.external) or options.record and options.external:
        raise ConfigError("--record, --replay and --external: choose one")
    if options.external:
        chat = ChatFormat(build_tokenizer())  # its ids only serve the record, which is marked as retokenised
        limits = {"temperature": options.temperature, "max_tokens": options.max_new_tokens}
        endpoint = Endpoint(options.external, options.model_name, **limits)
        return _Loaded(ExternalBackend(endpoint, chat), chat)
    path = checkpoint(options.model)
    if options.replay:
        chat = chat_format(AutoTokenizer.from_pretrained(str(path)))
        return _Loaded(SamplerBackend(ReplaySampler(options.replay), chat), chat)
    model, tokenizer = load_model(path)
    chat = chat_format(tokenizer)
    sampler: Sampler = TransformersSampler(model, chat.stop_id)
    if options.record:
        sampler = RecordingSampler(sampler, options.record)
    return _Loaded(SamplerBackend(sampler, chat), chat)
