"""Records: what is written is read again, and what does not fit is refused with its line; exchange formats too."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from tiny import chat

from mini_rome.chunking import pack
from mini_rome.data.demonstrations import expert_trajectories, make_tasks
from mini_rome.data.exchange import SWE_DONE, from_messages, from_swe, to_messages, to_swe
from mini_rome.data.records import FEATURES, Appender, check_ids, from_row, read, to_row, tokenizer_hash, write
from mini_rome.errors import RecordError, VerifierError
from mini_rome.families import get_family
from mini_rome.masks import MaskPolicy, annotate, masked_labels
from mini_rome.model import build_tokenizer
from mini_rome.sandbox import Pool
from mini_rome.trace import ChatFormat
from mini_rome.types import SafetyEvent, Trajectory, Turn

MARK = tokenizer_hash(chat().tokenizer)


@pytest.fixture(scope="module")
def recorded() -> list[Trajectory]:
    """Episodes with failures in them; the last ones are calls of a task's own tools, and one sampled by a policy."""
    with Pool("sim") as pool:
        found = expert_trajectories(chat(), pool, make_tasks(["notes", "tickets", "retail"], [3], 6, "train"), 0.5, 1)
    for each in found:
        annotate(each, MaskPolicy())
    assert any(turn.error for each in found for turn in each.turns)
    for turn in found[0].turns[1:]:
        turn.source, turn.logprobs, turn.policy_version = "policy", [-0.25] * len(turn.ids), 7
    found[0].start, found[0].turns[1].wall_s = 1, 0.125
    found[0].turns[1].events = (SafetyEvent("egress", "high", "command", "curl"),)
    found[0].policy = "scripted:plain"
    return found


def same(one: Trajectory, other: Trajectory) -> bool:
    """Equal but for the task's check, which is made again, and the log-probs of scripts, which have none."""
    names = [field.name for field in fields(Trajectory) if field.name not in ("task", "turns")]
    left, right = (
        [replace(turn, logprobs=turn.logprobs if turn.source == "policy" else []) for turn in each.turns]
        for each in (one, other)
    )
    facts = all(getattr(one, name) == getattr(other, name) for name in names)
    return facts and left == right and one.task.content_hash == other.task.content_hash


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_what_is_written_is_read_again(tmp_path: Path, recorded: list[Trajectory], name: str) -> None:
    assert write(tmp_path / name, recorded, chat()) == len(recorded)
    back = read(tmp_path / name, chat())
    assert len(back) == len(recorded) and all(map(same, recorded, back))
    assert back[0].task.check({}).reward == 0.0  # the instance's own check, made again


def test_datasets_reads_both_forms_with_the_same_types(tmp_path: Path, recorded: list[Trajectory]) -> None:
    for name, kind in (("a.jsonl", "json"), ("a.parquet", "parquet")):
        write(tmp_path / name, recorded, chat())
        table = load_dataset(
            kind, data_files=str(tmp_path / name), split="train", features=FEATURES, cache_dir=str(tmp_path / "cache")
        )
        assert table.features == FEATURES and len(table) == len(recorded)
        assert table[0]["turns"][1]["ids"] == recorded[0].turns[1].ids


def test_a_scripted_turn_has_no_log_probs_and_the_policy_s_chunks_count_from_0(recorded: list[Trajectory]) -> None:
    turns = to_row(recorded[0], MARK)["turns"]
    assert turns[0]["logprobs"] == [] and len(turns[1]["logprobs"]) == len(turns[1]["ids"])
    assert [turn["chunk"] for turn in turns] == [-1, *range(len(turns) - 1)]


def test_a_truncated_line_is_reported_with_its_number_and_dropped_by_going_on(
    tmp_path: Path, recorded: list[Trajectory]
) -> None:
    path = tmp_path / "data.jsonl"
    with Appender(path, chat()) as log:
        log.append(recorded[:1])
        log.append(recorded[1:3])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RecordError, match=r"data\.jsonl, line 3: truncated"):
        read(path, chat())
    with Appender(path, chat()) as log:
        assert log.dropped == 3
        assert [name for name, _, _ in sorted(log.done)] == sorted(each.task.name for each in recorded[:2])
        log.append(recorded[2:3])
    assert all(map(same, recorded[:3], read(path, chat())))


def test_a_broken_line_in_the_middle_is_reported_with_its_number(tmp_path: Path, recorded: list[Trajectory]) -> None:
    path = tmp_path / "data.jsonl"
    write(path, recorded[:2], chat())
    first, second = path.read_text().splitlines()
    path.write_text(f"{first[:-9]}\n{second}\n")
    with pytest.raises(RecordError, match="line 1: not JSON"):
        read(path)
    path.write_text(f"{first}\n7\n")
    with pytest.raises(RecordError, match="line 2: not a record, but int"):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "line 1: schema 2: this version reads schema 1"),
        ({"tokenizer": "0" * 16}, "line 1: ids of tokenizer 0000000000000000, yours is"),
        ({"task_hash": "0"}, "task notes-k3-train-0 is another instance"),
        ({"start": 2}, r"chunk ids \[-1, 0"),
        ({"turns": [{}]}, "not a trajectory record: KeyError 'ids'"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(
    tmp_path: Path, recorded: list[Trajectory], change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(to_row(recorded[0], MARK) | change) + "\n")
    with pytest.raises(RecordError, match=message):
        read(path, chat())


def test_a_dataset_of_another_tokenizer_is_refused_by_its_hash(tmp_path: Path, recorded: list[Trajectory]) -> None:
    write(tmp_path / "data.parquet", recorded, chat())
    other = ChatFormat(build_tokenizer(vocab_size=330))
    with pytest.raises(RecordError, match=r"row 1: ids of tokenizer \w{16}, yours is \w{16}"):
        read(tmp_path / "data.parquet", other)
    with pytest.raises(RecordError, match="another tokenizer"):
        write(tmp_path / "data.jsonl", recorded, chat())
        Appender(tmp_path / "data.jsonl", other)


def disagree(row: dict[str, Any], name: str, value: Any) -> None:
    target = row if name in row else row["turns"][1]
    target[name] = value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("text", "<tool_call>bash ls</tool_call>", "turn 1: the ids say '.*', the text"),
        ("observation", "something else", "turn 1: the ids of the observation do not say 'something else'"),
        ("logprobs", [-1.0], r"turn 1: \d+ ids and 1 log-probs"),
        ("prompt_ids", [5, 6], "the prompt's ids do not hold the instruction"),
    ],
)
def test_ids_and_text_that_disagree_are_refused(
    recorded: list[Trajectory], name: str, value: Any, message: str
) -> None:
    row = json.loads(json.dumps(to_row(recorded[0], MARK)))
    check_ids(from_row(row), chat())
    disagree(row, name, value)
    with pytest.raises(RecordError, match=message):
        check_ids(from_row(row), chat())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="none.jsonl does not exist: name a"):
        read(tmp_path / "none.jsonl")


# Exchange


def facts(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    return [
        (turn.text, turn.commands, turn.observation, turn.exit_code, turn.status, turn.malformed, turn.submitted)
        for turn in trajectory.turns
    ]


def odd(trajectory: Trajectory) -> Trajectory:
    """The same with a response that was no call, two calls in one, words around a call, and a timeout."""
    call = "<tool_call>bash {}</tool_call>".format
    turns = [
        Turn([9], [], text, commands, seen, [], code, status, malformed=not commands)  # type: ignore[arg-type]
        for text, commands, seen, code, status in (
            ("plain words", [], "[no tool call]", None, "ok"),
            (call("a") + call("b"), ["a", "b"], "x\ny", 3, "ok"),
            ("so " + call("c"), ["c"], "", 124, "timeout"),
        )
    ]
    return replace(trajectory, turns=[*turns, *trajectory.turns])


def test_messages_commands_and_exit_codes_survive_the_way_out_and_back(recorded: list[Trajectory]) -> None:
    for each in [*recorded, odd(recorded[1])]:
        row = json.loads(json.dumps(to_messages(each)))
        back = from_messages(row, chat(), each.task)
        assert facts(back) == facts(each)
        assert to_messages(back) == row
        check_ids(back, chat())


def test_mini_swe_agent_files_survive_the_way_out_and_back(recorded: list[Trajectory]) -> None:
    bash_only = [each for each in recorded if not each.task.tools]
    for each in [*bash_only, odd(recorded[1])]:
        data = json.loads(json.dumps(to_swe(each)))
        back = from_swe(data, chat(), each.task)
        assert facts(back) == facts(each)
        assert to_swe(back) == data
    with pytest.raises(RecordError, match="mini-swe-agent has bash alone"):
        to_swe(next(each for each in recorded if each.task.tools))


def test_a_file_as_mini_swe_agent_writes_it_is_read() -> None:
    def asked(*commands: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "extra": {"actions": [{"command": c} for c in commands]}}

    def printed(text: str, code: int, failure: str | None = None) -> dict[str, Any]:
        extra = {"raw_output": text, "returncode": code, "exception_info": failure}
        return {"role": "tool", "content": "<..>", "extra": extra}

    messages = [
        {"role": "system", "content": "harness"}, {"role": "user", "content": "list it"},
        asked("ls", "cat a"), printed("a", 0), printed("no", 1),
        {"role": "user", "content": "one call, please", "extra": {"interrupt_type": "FormatError"}},
        asked("sleep 99"), printed("", -1, "command timed out"),
        asked(SWE_DONE), {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
    ]  # fmt: skip
    data = {"info": {"exit_status": "Submitted"}, "messages": messages, "trajectory_format": "mini-swe-agent-1.1"}
    back = from_swe(data, chat())
    assert [turn.commands for turn in back.turns] == [["ls", "cat a"], [], ["sleep 99"], []]
    assert [turn.exit_code for turn in back.turns] == [1, None, -1, None]
    assert [turn.status for turn in back.turns] == ["ok", "ok", "timeout", "ok"]
    assert back.turns[0].observation == "a\nno" and back.turns[1].malformed and back.turns[-1].submitted
    with pytest.raises(RecordError, match="trajectory_format 'other'"):
        from_swe(data | {"trajectory_format": "other"}, chat())


def test_ids_built_from_text_are_marked_kept_from_policy_gradients_and_fit_for_imitation(
    tmp_path: Path, recorded: list[Trajectory]
) -> None:
    back = from_messages(to_messages(recorded[1]), chat(), recorded[1].task)
    assert back.retokenised
    write(tmp_path / "data.jsonl", [back], chat())
    again = read(tmp_path / "data.jsonl", chat())[0]
    with pytest.raises(VerifierError, match="retokenised.*use it for SFT, never for RL"):
        pack(again)
    assert masked_labels(again, MaskPolicy())[0]


def test_an_unknown_tool_is_refused_by_name_and_message(recorded: list[Trajectory]) -> None:
    row = to_messages(recorded[0])
    row["messages"][1]["tool_calls"] = [{"function": {"name": "python", "arguments": '{"command": "1"}'}}]
    with pytest.raises(RecordError, match="message 1: calls 'python'; task notes-k3-train-0 offers bash, submit"):
        from_messages(row, chat(), recorded[0].task)
    row["messages"][1]["tool_calls"] = [{"function": {"name": "bash", "arguments": "{"}}]
    with pytest.raises(RecordError, match="message 1: the arguments of bash are not JSON"):
        from_messages(row, chat(), recorded[0].task)


def test_messages_of_another_task_are_refused(recorded: list[Trajectory]) -> None:
    other = get_family("notes").make(77, 2)
    with pytest.raises(RecordError, match="not the instruction of task notes-k2-train-77"):
        from_messages(to_messages(recorded[0]), chat(), other)
    with pytest.raises(RecordError, match="must begin with the instruction"):
        from_messages({"messages": []}, chat())


def test_the_messages_rendered_by_the_chat_template_are_the_recorded_ids_text(recorded: list[Trajectory]) -> None:
    for each in recorded:
        messages = to_messages(each)["messages"]
        text = chat().tokenizer.apply_chat_template(messages[:-1], tokenize=False)
        ids = list(each.prompt_ids)
        for turn in each.turns[:-1]:
            ids += turn.ids + turn.observation_ids
        assert text == chat().decode(ids + each.turns[-1].ids) + "\n"
