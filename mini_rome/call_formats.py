"""How models that were not made here write their tool calls, chosen by `--call_format`; `tiny` is trace.py's own.

qwen: `<tool_call>` with a JSON object of name and arguments, as Qwen's chat templates show it; the prompt lists the
task's tools. fenced: ```bash blocks in plain text, for any model that has a chat template; the prompt says how.

What frames the messages is the tokenizer's own chat template, asked with marks in place of the texts: no template is
kept here. Control tokens come from those frames and from the sampler alone. A template that writes earlier messages
otherwise once later ones are there (a thinking model's, which drops thoughts) is not followed in that: what was
sampled stays as it was sampled. The model proxy writes `tiny` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from mini_rome.errors import ConfigError
from mini_rome.tools import dump, tools_of
from mini_rome.trace import CALL, CALL_END, ChatFormat, Response, plain_tokenizer, respond
from mini_rome.types import Task

SETTING = "call_format"  # in tokenizer_config.json: a saved model says how it writes calls
THOUGHT_END = "</think>"
_MARKS = ("\ue000instruction\ue001", "\ue000response\ue001", "\ue000observation\ue001")  # in no template
_CALL = re.compile(re.escape(CALL) + r"(.*?)" + re.escape(CALL_END), re.DOTALL)
_BLOCK = re.compile(r"^```(?:bash|sh)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^```(?:bash|sh)\b", re.MULTILINE)
FENCED_CALLS = (
    "Answer with shell commands, each in a block like\n```bash\nCOMMAND\n```\nand wait for what they print. When the "
    "task is done, give a block that holds the word submit alone."
)
DESCRIPTIONS = {"bash": "Run a command line in the sandbox.", "submit": "Say that the task is done."}


@dataclass
class TemplateChat(ChatFormat):
    """A conversation framed by the tokenizer's chat template. Subclasses say how calls are written and read."""

    observer: ClassVar[str]  # role of what the environment says
    _openings: dict[str, tuple[list[int], list[int]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer.chat_template, str):
            raise ConfigError(f"--call_format {name_of(self)}: the tokenizer has no chat template")
        self._plain = plain_tokenizer(self._definition())
        told = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", self.observer), _MARKS,
                                                                     strict=True)]  # fmt: skip
        _, rest = self._split(self._rendered(told), _MARKS[1])
        before, after = self._split(rest, _MARKS[2])
        self._before, self._after = self._framed(before), self._framed(after)
        self.stop_id = self._before[0]
        if (stop := self.tokenizer.convert_ids_to_tokens(self.stop_id)) not in self._control():
            raise ConfigError(f"--call_format {name_of(self)}: the template ends a response with the text {stop!r}")

    def _control(self) -> set[str]:
        """Tokens that are no text: the special ones, and added ones that the template writes."""
        written = {token for token in self.tokenizer.get_added_vocab() if token in self.tokenizer.chat_template}
        return written | set(self.tokenizer.all_special_tokens)

    def _definition(self) -> str:
        """The tokenizer as JSON, its control tokens marked as special: so that outside text never holds one."""
        definition, control = json.loads(self.tokenizer.backend_tokenizer.to_str()), self._control()
        for token in definition["added_tokens"]:
            token["special"] = token["content"] in control
        return json.dumps(definition)

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return self.tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)

    def _split(self, text: str, mark: str) -> tuple[str, str]:
        before, found, after = text.partition(mark)
        if not found or mark in after:
            raise ConfigError(f"--call_format {name_of(self)}: the chat template does not write every message once")
        return before, after

    def _framed(self, text: str) -> list[int]:
        """A piece of the template, control tokens read as such."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _tools(self, task: Task | None) -> list[dict[str, Any]] | None:
        """What the template is told of tools."""
        return None

    def prompt(self, instruction: str, task: Task | None = None) -> list[int]:
        """From the beginning up to where the first response starts, the task's tools in the template's words."""
        tools = self._tools(task)
        key = dump(tools)
        if key not in self._openings:
            text = self._rendered([{"role": "user", "content": _MARKS[0]}], tools)
            before, after = self._split(text, _MARKS[0])
            self._openings[key] = self._framed(before), self._framed(after)
        before_ids, after_ids = self._openings[key]
        return [*before_ids, *self.encode(instruction), *after_ids]

    def observation(self, output: str, stopped: bool = True) -> list[int]:
        """What the environment writes after a response: one message, however many calls it answers."""
        return [*self._before[stopped:], *self.encode(output.rstrip("\n")), *self._after]

    def message(self, role: str, text: str) -> list[int]:
        """ConfigError: the messages of an external agent are not framed in this format."""
        raise ConfigError(f"--call_format {name_of(self)}: the model proxy writes the format tiny only")

    def past(self, text: str, bodies: Iterable[str] = ()) -> list[int]:
        """ConfigError, as `message`."""
        return self.message("assistant", text)


@dataclass
class QwenChat(TemplateChat):
    """Calls as JSON between the tags of Qwen's templates."""

    observer: ClassVar[str] = "tool"

    def __post_init__(self) -> None:
        super().__post_init__()
        vocabulary = self.tokenizer.get_vocab()
        if missing := [token for token in (CALL, CALL_END) if token not in vocabulary]:
            raise ConfigError(f"--call_format qwen: the tokenizer has no token {missing[0]!r}; fenced needs none")
        self._tags = vocabulary[CALL], vocabulary[CALL_END]

    def _tools(self, task: Task | None) -> list[dict[str, Any]] | None:
        if task is None:
            return None
        tools = tools_of(task)
        for function in (tool["function"] for tool in tools):
            function["description"] = DESCRIPTIONS.get(function["name"], "")
        return tools

    def rebuilt(self, text: str, bodies: Iterable[str] = ()) -> list[int]:
        """The ids of a response from its text and its calls, stop token included: never what was sampled."""
        ids = self.encode(text)
        for number, body in enumerate(bodies):
            lead = "\n" if text or number else ""
            ids += [*self.encode(lead), self._tags[0], *self.encode(f"\n{to_json(body)}\n"), self._tags[1]]
        return [*ids, self.stop_id]

    def read(self, text: str, task: Task | None = None, also: Collection[str] = ()) -> Response:
        """The calls of a whole response; those in a thought do not count.

        A body that is not an object of a name and arguments makes the response malformed; so does a bash call whose
        arguments are not a command alone.
        """
        spoken = text.rpartition(THOUGHT_END)[2]
        said = _CALL.sub("", spoken)
        if CALL in said:
            return Response(problem="tool call not closed")
        bodies = [from_json(body, also) for body in _CALL.findall(spoken)]
        if None in bodies:
            return Response(problem="tool call is no JSON of a name and its arguments")
        return _sound(respond([body for body in bodies if body is not None], said.strip(), task, also))


@dataclass
class FencedChat(TemplateChat):
    """Bash commands in fenced blocks. Not for tasks with tools of their own."""

    observer: ClassVar[str] = "user"

    def prompt(self, instruction: str, task: Task | None = None) -> list[int]:
        """The instruction and, where there is a task, how to call bash."""
        if task is None:
            return super().prompt(instruction)
        if not task.offers_bash:
            raise ConfigError(f"--call_format fenced: {task.name} has tools and no bash; use --call_format qwen")
        return super().prompt(f"{instruction}\n\n{FENCED_CALLS}")

    def rebuilt(self, text: str, bodies: Iterable[str] = ()) -> list[int]:
        """The ids of a response from its text and its calls, stop token included: never what was sampled."""
        blocks = [f"```bash\n{body.removeprefix('bash ')}\n```" for body in bodies]
        return [*self.encode("\n".join([*([text] if text else []), *blocks])), self.stop_id]

    def read(self, text: str, task: Task | None = None, also: Collection[str] = ()) -> Response:
        """The blocks of a whole response in turn; those in a thought do not count."""
        spoken = text.rpartition(THOUGHT_END)[2]
        said = _BLOCK.sub("", spoken)
        if _FENCE.search(said):
            return Response(problem="fenced block not closed")
        blocks = [block.removesuffix("\n") for block in _BLOCK.findall(spoken)]
        bodies = [("submit", "") if block.strip() == "submit" else ("bash", block) for block in blocks]
        return _sound(respond(bodies, said.strip(), task, also))


FORMATS: dict[str, type[ChatFormat]] = {"tiny": ChatFormat, "qwen": QwenChat, "fenced": FencedChat}


def chat_format(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> ChatFormat:
    """The format of this name, which is noted in the tokenizer; None: the one that is noted there, or tiny."""
    noted = tokenizer.init_kwargs.get(SETTING, "tiny")
    name = name or noted
    if name not in FORMATS:
        raise ConfigError(f"--call_format {name}: choose from {', '.join(FORMATS)}")
    if name != noted:
        tokenizer.init_kwargs[SETTING] = name  # saved with it
    return FORMATS[name](tokenizer)


def name_of(chat: ChatFormat) -> str:
    """The name of a format, as the option gives it."""
    return next(name for name, kind in FORMATS.items() if kind is type(chat))


def to_json(body: str) -> str:
    """A call as Qwen writes it, from a name and what follows it.

    >>> to_json("bash cat plum"), to_json('cancel {"item":"plum"}')
    ('{"name": "bash", "arguments": {"command": "cat plum"}}', '{"name": "cancel", "arguments": {"item": "plum"}}')
    """
    name, _, rest = body.partition(" ")
    arguments = {"command": rest} if name == "bash" else json.loads(rest or "{}")
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def from_json(body: str, also: Collection[str] = ()) -> tuple[str, str] | None:
    """The name of a call and what follows it, or None where it is not one. also: tools whose one argument is text.

    >>> from_json('{"name": "bash", "arguments": {"command": "cat plum"}}'), from_json('{"name": "submit"}')
    (('bash', 'cat plum'), ('submit', ''))
    >>> from_json('{"name": "bash", "arguments": "cat plum"}')
    """
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    if name == "bash" or name in also:
        values = list(arguments.values())
        alone = len(values) == 1 and isinstance(values[0], str) and (name != "bash" or "command" in arguments)
        return (name, values[0]) if alone else None
    return name, dump(arguments) if arguments else ""


def _sound(response: Response) -> Response:
    """The same, or malformed: JSON can spell characters that no shell and no file can be given."""
    for command in (call.command for call in response.calls):
        if "\0" in command or any("\ud800" <= character <= "\udfff" for character in command):
            return Response(problem="a character that no shell can be given")
    return response
