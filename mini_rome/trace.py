"""The one recorder of token ids: how text becomes ids, once, and how a response becomes tool calls.

Format (Qwen style, ChatML with a short tool call):

    <|im_start|>user\nINSTRUCTION<|im_end|>\n<|im_start|>assistant\n
    <tool_call>bash COMMAND</tool_call><|im_end|>
    \n<|im_start|>tool\nOUTPUT<|im_end|>\n<|im_start|>assistant\n

Where the task brings tools of its own, a call is a name and JSON: `<tool_call>cancel {"item":"plum"}</tool_call>`.
A response may hold several calls; `<tool_call>submit</tool_call>` ends the episode. Text from outside (instructions,
outputs) is encoded with special tokens split into plain text, so an output that spells `<|im_end|>` is never control.
Pieces are encoded one by one and joined as ids: nothing is decoded and encoded again, and more turns never change
earlier tokens.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from mini_rome.errors import ConfigError
from mini_rome.types import StepResult, Task, Trajectory

IM_START, IM_END, CALL, CALL_END = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(CALL) + r"(.*?)" + re.escape(CALL_END), re.DOTALL)

_FAILURES = {
    "timeout": "[timed out]",
    "oom": "[out of memory]",
    "output_limit": "[output limit]",
    "pids_limit": "[too many processes]",
}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{{- message['content'] or '' -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set call = call['function'] or call -%}"
    "{{- '<tool_call>' + call['name'] -}}"
    "{%- set given = call['arguments'] or {} -%}"
    "{%- if given -%}"
    "{{- ' ' + (given['command'] if 'command' in given else given | tojson(separators=(',', ':'))) -}}"
    "{%- endif -%}"
    "{{- '</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

# How transformers' `parse_response`, and so TRL's own tool loop, reads a response of this format.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w*) ?",
            "close": "</tool_call>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"command": "{content}"}}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}

# The same where a task's own tools are played: {"item":"plum"} becomes the argument `item`. Set it as the tokenizer's
# `response_template`; one tokenizer reads one kind.
_STRING = r'"(?:[^"\\]|\\.)*"'
TOOL_RESPONSE_TEMPLATE: dict[str, Any] = copy.deepcopy(RESPONSE_TEMPLATE)
TOOL_RESPONSE_TEMPLATE["fields"]["tool_calls"] |= {
    "content": "xml-inline",
    "content_args": {"tag_pattern": rf'"(?P<key>\w+)"\s*:\s*(?P<value>{_STRING})', "value_parser": {"name": "json"}},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


@dataclass(frozen=True)
class Call:
    """One tool call of a response: `bash` with a command, a task's own tool with JSON arguments, or `submit`."""

    tool: str
    command: str = ""  # what follows the name

    @property
    def text(self) -> str:
        """As `Turn.commands` keeps it: a bash command alone, another call with its name."""
        return self.command if self.tool == "bash" else f"{self.tool} {self.command}".rstrip()


@dataclass(frozen=True)
class Response:
    """A parsed response. `problem` says why it is malformed; then no call is run. `said`: the text beside calls."""

    calls: tuple[Call, ...] = ()
    problem: str = ""
    said: str = field(default="", compare=False)


def parse_response(text: str, task: Task | None = None, also: Collection[str] = ()) -> Response:
    """The tool calls of a response, stop token removed.

    Without a task, or with one that only has bash, a call of any other tool makes the response malformed, but for the
    names in `also`: the agent runtime's own tools. Where the task brings tools any name is a call: the environment
    answers what it does not know with an error.

    >>> parse_response("<tool_call>bash cat plum</tool_call>").calls
    (Call(tool='bash', command='cat plum'),)
    >>> parse_response("cat plum").problem
    'no tool call'
    """
    if "\0" in text:
        return Response(problem="a NUL character, which no shell can be given")
    said = _CALL.sub("", text)
    if CALL in said:
        return Response(problem="tool call not closed")
    bodies = (body.strip().partition(" ") for body in _CALL.findall(text))
    return respond([(tool, command) for tool, _, command in bodies], said, task, also)


def respond(
    bodies: Iterable[tuple[str, str]], said: str, task: Task | None = None, also: Collection[str] = ()
) -> Response:
    """The calls of a response, each a tool's name and what follows it, as `parse_response` takes them."""
    calls = []
    any_name = task is not None and bool(task.tools)
    for tool, command in bodies:
        if tool == "submit" and not command.strip():
            calls.append(Call("submit"))
        elif tool == "bash" or tool in also or (any_name and tool.isidentifier() and tool != "submit"):
            calls.append(Call(tool, command))
        else:
            return Response(problem=f"unknown tool {tool[:20]!r}")
    if not calls:
        return Response(problem="no tool call")
    return Response(tuple(calls), said=said)


def call_bodies(chunk: str, task: Task | None = None) -> list[str]:
    """What stands between the tags of each call of one chunk of an expert: one bash call, or the calls on its lines.

    >>> call_bodies("cat plum")
    ['bash cat plum']
    """
    return chunk.split("\n") if task is not None and task.tools else [f"bash {chunk}"]


@dataclass
class ChatFormat:
    """Turns text into ids for one tokenizer. All ids in a trajectory come from here or from the sampler."""

    tokenizer: PreTrainedTokenizerBase
    stop_id: int = field(init=False)

    def __post_init__(self) -> None:
        ids = {token: self.tokenizer.convert_tokens_to_ids(token) for token in (IM_START, IM_END, CALL, CALL_END)}
        missing = [token for token, index in ids.items() if index is None or index == self.tokenizer.unk_token_id]
        if missing:
            raise ConfigError(f"the tokenizer has no token {missing[0]!r}: it does not fit the tool-call format")
        self._plain = plain_tokenizer(self.tokenizer.backend_tokenizer.to_str())
        self._special = ids
        self.stop_id = ids[IM_END]
        self._newline = self.encode("\n")
        self._headers = {role: self._header(role) for role in ("user", "tool", "assistant")}
        self._assistant = self._headers["assistant"]

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest token: text of n characters has at least n / longest_token ids."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; the spelling of a special token stays plain text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Ids to text, special tokens kept."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _header(self, role: str) -> list[int]:
        return [self._special[IM_START], *self.encode(role), *self._newline]

    def prompt(self, instruction: str, task: Task | None = None) -> list[int]:
        """From the beginning up to where the first response starts. The model knows the task's tools by training."""
        return self.opening([self.message("user", instruction)])

    def observation(self, output: str, stopped: bool = True) -> list[int]:
        """What the environment writes after a response, up to where the next one starts. stopped: see `between`."""
        return self.between([self.message("tool", output.rstrip("\n"))], stopped)

    def message(self, role: str, text: str) -> list[int]:
        """One whole message of anybody but the model; `text` stays text whatever it spells."""
        header = self._headers.get(role) or self._header(role)
        return [*header, *self.encode(text), self.stop_id, *self._newline]

    def rebuilt(self, text: str, bodies: Iterable[str] = ()) -> list[int]:
        """The ids of a response from its text and its calls, stop token included: never what was sampled."""
        ids = self.encode(text)
        for body in bodies:
            ids += [self._special[CALL], *self.encode(body), self._special[CALL_END]]
        return [*ids, self.stop_id]

    def past(self, text: str, bodies: Iterable[str] = ()) -> list[int]:
        """An assistant's message that nobody sampled here. Context, never a chunk."""
        return [*self._assistant, *self.rebuilt(text, bodies), *self._newline]

    def opening(self, messages: Iterable[list[int]]) -> list[int]:
        """A context that begins with these messages, up to where the response starts."""
        return [*(token for ids in messages for token in ids), *self._assistant]

    def between(self, messages: Iterable[list[int]], stopped: bool = True) -> list[int]:
        """What stands between a response and the next one, when these messages do.

        stopped: the response ended with the sampled stop token. A response cut by the length limit did not; then the
        environment writes the stop token, which is thus no part of the chunk.
        """
        close = [] if stopped else [self.stop_id]
        return [*close, *self._newline, *self.opening(messages)]

    def response(self, chunk: str, submit: bool = False, task: Task | None = None) -> list[int]:
        """The ids of an expert's response, stop token included: one bash call, or the calls of a task's own tools."""
        return self.rebuilt("", [*call_bodies(chunk, task), *["submit"] * submit])

    def parse(
        self, ids: list[int], task: Task | None = None, also: Collection[str] = ()
    ) -> tuple[str, Response]:
        """Text and calls of a sampled response; one that was cut by the length limit is malformed."""
        if not ids or ids[-1] != self.stop_id:
            return self.decode(ids), Response(problem="cut by the length limit")
        text = self.decode(ids[:-1])
        return text, self.read(text, task, also)

    def read(self, text: str, task: Task | None = None, also: Collection[str] = ()) -> Response:
        """The calls of a whole response, stop token removed."""
        return parse_response(text, task, also)


def plain_tokenizer(definition: str) -> Tokenizer:
    """A tokenizer from its JSON, to which the spelling of a special token is plain text.

    The tokenizer's own call does the same in six times the time; a copy, as these settings are the tokenizer's.
    """
    plain = Tokenizer.from_str(definition)
    plain.encode_special_tokens = True
    plain.no_padding()
    plain.no_truncation()
    return plain


def shown(result: StepResult) -> str:
    """The observation text of a step: the output, then what a prompt would show of a failure."""
    lines = [result.output.rstrip("\n")] if result.output.strip("\n") else []
    if result.status in _FAILURES:
        lines.append(_FAILURES[result.status])
    elif result.exit_code:
        lines.append(f"[exit {result.exit_code}]")
    return "\n".join(lines)


def context_ids(trajectory: Trajectory) -> list[int]:
    """All ids up to where the next response starts: prompt, and for each turn its ids and its observation."""
    ids = list(trajectory.prompt_ids)
    for turn in trajectory.turns:
        ids += turn.ids
        ids += turn.observation_ids
    return ids

