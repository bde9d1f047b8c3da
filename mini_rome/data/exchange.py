"""Trajectories to and from what other tools read: messages with tool calls, and mini-swe-agent trajectory files.

Messages, commands, exit codes and statuses survive the way out and back. Token ids do not: they are built again from
text and marked `retokenised`, which is enough to imitate and never for a policy gradient. Not in the paper.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mini_rome.data.records import unjudged
from mini_rome.env import combine
from mini_rome.errors import RecordError
from mini_rome.trace import CALL, CALL_END, ChatFormat, parse_response
from mini_rome.types import StepResult, Task, Trajectory, Turn

Message = dict[str, Any]
OWN = ("reward", "reason", "backend", "verifier", "seed", "episode", "policy", "start")
SWE_FORMAT = "mini-swe-agent-1.1"
SWE_DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # the command that ends an episode there
SWE_SYSTEM = "You are an agent with a shell."


def to_messages(trajectory: Trajectory) -> dict[str, Any]:
    """A row with `messages` in TRL's conversational form, and what else is known of the episode.

    The arguments of every call are {"command": what follows the name}, so that rows of a dataset have one type. A
    tool message has the exit code, status and duration of its turn; one answers all calls of a turn.
    """
    messages: list[Message] = [{"role": "user", "content": trajectory.task.instruction}]
    for turn in trajectory.turns:
        content, calls = _said(turn, trajectory.task)
        messages.append({"role": "assistant", "content": content, "tool_calls": [_function(*call) for call in calls]})
        answer = {"role": "tool", "content": turn.observation, "exit_code": turn.exit_code, "status": turn.status}
        messages.append({**answer, "wall_s": turn.wall_s})
    return {"task": trajectory.task.name, "messages": messages, **{name: getattr(trajectory, name) for name in OWN}}


def _said(turn: Turn, task: Task) -> tuple[str, list[tuple[str, str]]]:
    """What a response says besides its calls, and the calls; a malformed one has none."""
    response = parse_response(turn.text, task)
    if turn.malformed or response.problem:
        return turn.text, []
    calls = [(call.tool, call.command) for call in response.calls]
    content = turn.text
    for tool, command in calls:
        for body in (f"{tool} {command}", tool):
            content = content.replace(f"{CALL}{body}{CALL_END}", "", 1)
    return content, calls


def _function(tool: str, command: str) -> Message:
    arguments = {"command": command} if command else {}
    return {"type": "function", "function": {"name": tool, "arguments": arguments}}


def from_messages(row: Mapping[str, Any], chat: ChatFormat, task: Task | None = None) -> Trajectory:
    """The trajectory of a row with `messages`; retokenised. task: the instance, where it is more than a name.

    RecordError names the message whose role has no place there, or that calls a tool the task does not offer.
    """
    messages = [message for message in row["messages"] if message["role"] != "system"]
    if not messages or messages[0]["role"] != "user":
        raise RecordError("messages must begin with the instruction, from the user")
    prompt = str(messages[0]["content"])
    task = _checked(task, prompt, str(row.get("task") or "imported"))
    turns: list[Turn] = []
    for index, message in enumerate(messages[1:], 1):
        if message["role"] == "assistant":
            turns.append(_turn(message, index, chat, task))
        elif message["role"] in ("tool", "user") and turns:
            _answered(turns[-1], message)
        else:
            raise RecordError(f"message {index}: role {message['role']!r} has no place there")
    for turn in turns:
        turn.observation_ids = chat.observation(turn.observation)
    own = {name: row[name] for name in OWN if row.get(name) is not None}
    return Trajectory(task, chat.prompt(prompt), turns, retokenised=True, **own)


def _checked(task: Task | None, prompt: str, name: str) -> Task:
    if task is None:
        return unjudged(name, prompt)
    if task.instruction not in prompt:
        raise RecordError(f"the first message is not the instruction of task {task.name}")
    return task


def _turn(message: Mapping[str, Any], index: int, chat: ChatFormat, task: Task) -> Turn:
    """The response of an assistant's message; its ids are those the tokenizer gives for its text."""
    bodies = [_body(call, index, task) for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    text = content + "".join(f"{CALL}{body}{CALL_END}" for body in bodies)
    response = parse_response(text, task)
    return Turn(
        ids=response_ids(chat, text),
        logprobs=[],
        text=text,
        commands=[call.text for call in response.calls if call.tool != "submit"],
        malformed=bool(response.problem),
        submitted=any(call.tool == "submit" for call in response.calls),
    )


def response_ids(chat: ChatFormat, text: str) -> list[int]:
    """The ids that a tokenizer gives for a response: the tags of calls as special tokens, the rest as plain text."""
    ids: list[int] = []
    for part in re.split(f"({re.escape(CALL)}|{re.escape(CALL_END)})", text):
        ids += [chat.tokenizer.convert_tokens_to_ids(part)] if part in (CALL, CALL_END) else chat.encode(part)
    return [*ids, chat.stop_id]


def _body(call: Mapping[str, Any], index: int, task: Task) -> str:
    function = call.get("function") or call
    name, given = function["name"], function.get("arguments") or {}
    offered = {"submit", *task.tools, *(["bash"] if task.offers_bash else [])}
    if name not in offered:
        raise RecordError(f"message {index}: calls {name!r}; task {task.name} offers {', '.join(sorted(offered))}")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RecordError(f"message {index}: the arguments of {name} are not JSON ({error})") from None
    if "command" in given:
        return f"{name} {given['command']}"
    rest = {key: value for key, value in given.items() if value is not None}
    return f"{name} {json.dumps(rest, ensure_ascii=False, separators=(',', ':'))}" if rest else name


def _answered(turn: Turn, message: Mapping[str, Any]) -> None:
    turn.observation = str(message.get("content") or "")
    turn.exit_code = message.get("exit_code")
    turn.status = message.get("status") or "ok"
    turn.wall_s = message.get("wall_s") or 0.0


# mini-swe-agent


def to_swe(trajectory: Trajectory) -> dict[str, Any]:
    """The contents of a mini-swe-agent trajectory file (its format 1.1). RecordError: it knows bash only."""
    messages: list[Message] = [
        {"role": "system", "content": SWE_SYSTEM},
        {"role": "user", "content": trajectory.task.instruction},
    ]
    for index, turn in enumerate(trajectory.turns):
        messages += _swe_turn(index, turn, trajectory.task)
    status = "Submitted" if trajectory.turns and trajectory.turns[-1].submitted else "LimitsExceeded"
    messages.append({"role": "exit", "content": status, "extra": {"exit_status": status, "submission": ""}})
    own = {"task": trajectory.task.name, **{name: getattr(trajectory, name) for name in OWN}}
    info = {"exit_status": status, "submission": "", "mini_rome": own}
    return {"info": info, "messages": messages, "trajectory_format": SWE_FORMAT}


def _swe_turn(index: int, turn: Turn, task: Task) -> list[Message]:
    content, calls = _said(turn, task)
    if any(tool not in ("bash", "submit") for tool, _ in calls):
        raise RecordError(f"turn {index} of {task.name} calls {calls[0][0]!r}: mini-swe-agent has bash alone")
    commands = [SWE_DONE if tool == "submit" else command for tool, command in calls]
    names = [f"call_{index}_{number}" for number in range(len(commands))]
    actions = [{"command": c, "tool_call_id": name} for c, name in zip(commands, names, strict=True)]
    asked = [
        {"id": name, "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
        for command, name in zip(commands, names, strict=True)
    ]
    said: Message = {"role": "assistant", "content": content, "tool_calls": asked, "extra": {"actions": actions}}
    if not calls:
        error = {"role": "user", "content": turn.observation, "extra": {"interrupt_type": "FormatError"}}
        return [said, error]
    run = [name for name, command in zip(names, commands, strict=True) if command != SWE_DONE]
    return [said, *(_swe_answer(name, turn, name == run[-1]) for name in run)]


def _swe_answer(name: str, turn: Turn, last: bool) -> Message:
    """The record has one result a turn: it stands at the turn's last command, the others' codes are unknown."""
    extra: Message = {"raw_output": turn.observation if last else "", "returncode": turn.exit_code if last else None}
    if last:
        extra |= {"status": turn.status, "wall_s": turn.wall_s, "exception_info": None}
    content = f"<returncode>{extra['returncode']}</returncode>\n<output>\n{extra['raw_output']}\n</output>"
    return {"role": "tool", "content": content, "tool_call_id": name, "extra": extra}


def from_swe(data: Mapping[str, Any], chat: ChatFormat, task: Task | None = None) -> Trajectory:
    """The trajectory of a mini-swe-agent file: what its commands printed, and their exit codes; retokenised.

    Its system message is that agent's own and is left out. A response it dropped because of its form is a turn
    without text. RecordError: another format, a tool that is not there.
    """
    if not str(data.get("trajectory_format", "")).startswith("mini-swe-agent-1"):
        raise RecordError(f"trajectory_format {data.get('trajectory_format')!r}: mini-swe-agent-1.x is read")
    messages: list[Message] = []
    for message in data["messages"]:
        messages += _from_swe_message(message, messages)
    own = {name: value for name, value in data["info"].get("mini_rome", {}).items() if name in (*OWN, "task")}
    return from_messages({**own, "messages": _merged(messages)}, chat, task)


def _from_swe_message(message: Mapping[str, Any], before: Sequence[Message]) -> list[Message]:
    role, extra = message["role"], message.get("extra") or {}
    if role == "exit":
        return []
    if role == "assistant":
        calls = [_from_swe_call(action["command"]) for action in extra.get("actions", [])]
        return [{"role": role, "content": message.get("content") or "", "tool_calls": calls}]
    if role == "user" and extra.get("interrupt_type"):
        kept = before[-1]["role"] == "assistant" and not before[-1]["tool_calls"]
        dropped: list[Message] = [] if kept else [{"role": "assistant", "content": "", "tool_calls": []}]
        return [*dropped, {"role": "tool", "content": message["content"]}]
    if role == "tool":
        return [_from_swe_answer(message, extra)]
    return [dict(message)]


def _from_swe_answer(message: Mapping[str, Any], extra: Mapping[str, Any]) -> Message:
    failure = str(extra.get("exception_info") or "")
    status = extra.get("status") or ("timeout" if "timed out" in failure else "infra_error" if failure else "ok")
    answer = {"role": "tool", "exit_code": extra.get("returncode"), "status": status}
    return {**answer, "content": extra.get("raw_output", message["content"]), "wall_s": extra.get("wall_s")}


def _from_swe_call(command: str) -> Message:
    return _function("submit", "") if command.strip() == SWE_DONE else _function("bash", command)


def _merged(messages: Sequence[Message]) -> list[Message]:
    """One answer for each turn: outputs in order, the first failure's exit code, as the environment combines them."""
    merged: list[Message] = []
    for message in messages:
        if not (message["role"] == "tool" and merged and merged[-1]["role"] == "tool"):
            merged.append(message)
            continue
        known = [m for m in (merged[-1], message) if m.get("exit_code") is not None]
        results = [StepResult(m["content"], m["exit_code"], m["status"]) for m in known]
        joined = combine(results)
        merged[-1] = message
        if joined is not None:
            merged[-1] |= {"content": joined.output, "exit_code": joined.exit_code, "status": joined.status}
    return merged
