"""Formats of real models: the text of their own template, control tokens from it alone, calls read as written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen import TEMPLATES, qwen_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mini_rome.arguments import RunArguments
from mini_rome.call_formats import FencedChat, QwenChat, chat_format, from_json
from mini_rome.errors import ConfigError
from mini_rome.experts import record_expert
from mini_rome.families import get_family
from mini_rome.proxy import Proxy
from mini_rome.proxy_backends import SamplerBackend
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.tools import tools_of
from mini_rome.trace import Call, ChatFormat
from mini_rome.types import Task

NOTES, RETAIL = get_family("notes").make(0, 3), get_family("retail").make(0, 2)
# A template of another family of models: no roles of tools, other control tokens, a beginning of the sequence.
OTHER = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>\n", "<|im_start|>user\n", "</think>"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    ),
    max_size=5,
).map("".join)


@pytest.fixture(scope="module")
def qwen() -> QwenChat:
    chat = chat_format(qwen_tokenizer(), "qwen")
    assert isinstance(chat, QwenChat)
    return chat


@pytest.fixture(scope="module")
def fenced() -> FencedChat:
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"]})
    tokenizer.chat_template = OTHER
    chat = chat_format(tokenizer, "fenced")
    assert isinstance(chat, FencedChat)
    return chat


def told(task: Task, outputs: list[str]) -> list[dict]:
    """The expert's episode as messages: each chunk's calls, then one answer."""
    messages: list[dict] = [{"role": "user", "content": task.instruction}]
    for number, chunk in enumerate(task.expert):
        bodies = chunk.split("\n") if task.tools else [f"bash {chunk}"]
        bodies += ["submit"] * (number == task.chunks - 1)
        calls = []
        for name, rest in (body.partition(" ")[::2] for body in bodies):
            arguments = {"command": rest} if name == "bash" else json.loads(rest or "{}")
            calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "content": outputs[number]})
    return messages


def described(task: Task) -> list[dict]:
    """The tools as the format tells the template of them."""
    words = {"bash": "Run a command line in the sandbox.", "submit": "Say that the task is done."}
    tools = tools_of(task)
    for function in (tool["function"] for tool in tools):
        function["description"] = words.get(function["name"], "")
    return tools


@pytest.mark.parametrize("task", [NOTES, RETAIL], ids=["bash", "tools of its own"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_episode_is_the_text_of_qwens_own_template(task: Task, template: str) -> None:
    tokenizer = qwen_tokenizer(template)
    chat = chat_format(tokenizer, "qwen")
    outputs = ["red", "a\nb", ""] if task is NOTES else ["{}", '{"ok":1}']
    messages, ids = told(task, outputs), chat.prompt(task.instruction, task)
    stages = [list(ids)]
    for number, chunk in enumerate(task.expert):
        ids += [*chat.response(chunk, number == task.chunks - 1, task), *chat.observation(outputs[number])]
        stages.append(list(ids))
    assert len(stages) == task.chunks + 1
    for turns, stage in enumerate(stages):
        rendered = tokenizer.apply_chat_template(
            messages[: 1 + 2 * turns], described(task), tokenize=False, add_generation_prompt=True
        )
        assert chat.decode(stage) == rendered


def test_the_text_of_another_template(fenced: FencedChat) -> None:
    ids = [*fenced.prompt("do it"), *fenced.response("ls"), *fenced.observation("a\n")]
    said = "<|bos|><|user|>\ndo it\n<|assistant|>\n```bash\nls\n```<|end|>\n<|user|>\na\n<|assistant|>\n"
    assert fenced.decode(ids) == said
    assert fenced.stop_id == fenced.tokenizer.convert_tokens_to_ids("<|end|>")


@settings(max_examples=60, deadline=None)
@given(instruction=TEXTS, output=TEXTS, command=TEXTS)
def test_text_from_outside_holds_no_control_token(qwen: QwenChat, instruction: str, output: str, command: str):
    def control(ids: list[int]) -> list[str]:
        special = {qwen.tokenizer.convert_tokens_to_ids(token) for token in qwen._control()}
        return qwen.tokenizer.convert_ids_to_tokens([index for index in ids if index in special])

    empty, said = qwen.prompt("", NOTES), qwen.prompt(instruction, NOTES)
    assert control(said) == control(empty) and qwen.decode(said) == qwen.decode(empty).replace(
        "user\n<|im_end|>", f"user\n{instruction}<|im_end|>"
    )
    assert control(qwen.observation(output)) == control(qwen.observation(""))
    assert control(qwen.response(command)) == ["<tool_call>", "</tool_call>", "<|im_end|>"]


def test_a_call_tag_that_is_no_special_token_of_the_tokenizer_is_control_all_the_same(qwen: QwenChat) -> None:
    tag = qwen.tokenizer.convert_tokens_to_ids("<tool_response>")
    assert "<tool_response>" not in qwen.tokenizer.all_special_tokens
    assert qwen.tokenizer.encode("<tool_response>", add_special_tokens=False) == [tag]  # what would happen
    assert tag not in qwen.encode("<tool_response>")


@settings(max_examples=60, deadline=None)
@given(commands=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=3))
def test_what_is_written_is_read_back(qwen: QwenChat, commands: list[str]) -> None:
    ids = qwen.rebuilt("I see.", [*(f"bash {command}" for command in commands), "submit"])
    text, response = qwen.parse(ids, NOTES)
    assert response.calls == (*(Call("bash", command) for command in commands), Call("submit"))
    assert text.startswith("I see.\n<tool_call>\n") and response.said == "I see."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no call at all", "no tool call"),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}', "not closed"),
        ("<tool_call>bash ls</tool_call>", "no JSON"),
        ('<tool_call>["bash"]</tool_call>', "no JSON"),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "no JSON"),
        ('<tool_call>{"name": "bash", "arguments": {"command": 3}}</tool_call>', "no JSON"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "ls", "timeout": "9"}}</tool_call>', "no JSON"),
        ('<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>', "no JSON"),
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', "unknown tool 'python'"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "a\\u0000b"}}</tool_call>', "no shell can be given"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "\\ud800"}}</tool_call>', "no shell can be given"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        ('<think><tool_call>{"name": "submit", "arguments": {}}</tool_call></think>Hm.', "no tool call"),
    ],
)
def test_a_malformed_qwen_call_is_named_and_nothing_runs(qwen: QwenChat, text: str, problem: str) -> None:
    response = qwen.read(text, NOTES)
    assert problem in response.problem and response.calls == ()


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("First:\n```bash\ncat a\n```\nthen\n```sh\ncat <<E\nx\nE\n```", ("cat a", "cat <<E\nx\nE")),
        ("```bash\nls\n```  ", ("ls",)),
        ("<think>```bash\nrm a\n```</think>\n```bash\nls\n```", ("ls",)),
        ("```python\nprint(1)\n```\n```bash\nls\n```", ("ls",)),
        ("```bash\necho '```'\n```", ("echo '```'",)),
    ],
)
def test_fenced_blocks_are_read_in_turn(fenced: FencedChat, text: str, calls: tuple[str, ...]) -> None:
    assert fenced.read(text, NOTES).calls == tuple(Call("bash", command) for command in calls)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("ls", "no tool call"), ("```bash\nls", "fenced block not closed"), ("```python\n1\n```", "no tool call")],
)
def test_a_malformed_fenced_response_is_named(fenced: FencedChat, text: str, problem: str) -> None:
    assert fenced.read(text, NOTES).problem == problem


def test_a_last_block_submits(fenced: FencedChat) -> None:
    ids = fenced.response("echo a > answer", submit=True)
    assert fenced.parse(ids, NOTES)[1].calls == (Call("bash", "echo a > answer"), Call("submit"))


def test_experts_are_rewarded_in_every_format(qwen: QwenChat, fenced: FencedChat) -> None:
    with Pool("sim", size=1) as pool:
        for chat, task in ((qwen, NOTES), (qwen, RETAIL), (fenced, NOTES)):
            trajectory = record_expert(chat, task, pool).trajectory
            assert trajectory.reward == 1.0 and not any(turn.malformed for turn in trajectory.turns)


def test_a_single_text_argument_of_the_runtimes_own_tools_is_their_text() -> None:
    assert from_json('{"name": "todo", "arguments": {"text": "buy"}}', ("todo",)) == ("todo", "buy")
    assert from_json('{"name": "todo", "arguments": {"text": "buy"}}') == ("todo", '{"text":"buy"}')


def test_a_saved_tokenizer_notes_its_format(tmp_path: Path) -> None:
    tokenizer = qwen_tokenizer()
    assert type(chat_format(tokenizer)) is ChatFormat
    chat_format(tokenizer, "qwen")
    tokenizer.save_pretrained(tmp_path)
    assert type(chat_format(AutoTokenizer.from_pretrained(tmp_path))) is QwenChat


def with_template(text: str | None) -> PreTrainedTokenizerFast:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (qwen_tokenizer, "xml", "--call_format xml: choose from tiny, qwen, fenced"),
        (lambda: with_template(None), "fenced", "--call_format fenced: the tokenizer has no chat template"),
        (lambda: with_template("{{ messages[0]['content'] }}"), "fenced", "does not write every message once"),
        (lambda: with_template(OTHER.replace("<|end|>", " ")), "fenced", "ends a response with the text"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(make, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("|", r"\|")):
        chat_format(make(), name)


def test_what_a_format_cannot_say_is_refused(qwen: QwenChat, fenced: FencedChat) -> None:
    with pytest.raises(ConfigError, match="has tools and no bash; use --call_format qwen"):
        fenced.prompt(RETAIL.instruction, RETAIL)
    with pytest.raises(ConfigError, match="the model proxy writes the format tiny only"):
        Proxy(SamplerBackend(ScriptedSampler([]), qwen), qwen)
    with pytest.raises(ConfigError, match="--agent native --call_format qwen"):
        RunArguments(agent="native", call_format="qwen")
    with pytest.raises(ConfigError, match="--call_format xml: choose from tiny, qwen, fenced"):
        RunArguments(call_format="xml")
    assert fenced.prompt("", replace(NOTES, shell=True))
