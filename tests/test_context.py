"""Context features: each is off by default, and each is judged by the ids that the model is really given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from small import chat, tokenizer

from mini_rome.agent import Agent
from mini_rome.arguments import RunArguments
from mini_rome.chunking import pack, pack_episode, validate_chunk_ids
from mini_rome.config import IPAConfig
from mini_rome.context import TODO_FILE, Context, ContextConfig, ContextEnv, Objection, cut, destroys
from mini_rome.errors import ConfigError
from mini_rome.experts import Start
from mini_rome.families import get_family
from mini_rome.pipeline import Run
from mini_rome.rollout import Rollout
from mini_rome.sampler.base import Completion, Request, SamplingParams
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.trace import CALL, CALL_END, IM_END, context_ids
from mini_rome.types import Task, Trajectory

PARAMS = SamplingParams(max_new_tokens=64)
TASK = get_family("notes").make(3, 3)


def reply(*bodies: str) -> list[int]:
    """A response that makes these calls."""
    text = "".join(f"{CALL}{body}{CALL_END}" for body in bodies) + IM_END
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


class Watched(ScriptedSampler):
    """Keeps the ids of every request."""

    def __init__(self, replies: Sequence[list[int]]) -> None:
        super().__init__(replies)
        self.requests: list[Request] = []

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        return super().generate(requests, params)

    @property
    def seen(self) -> list[str]:
        return [chat().decode(request.ids) for request in self.requests]


def play(
    replies: Sequence[list[int]], task: Task = TASK, extra: int = 9, **options: Any
) -> tuple[Trajectory, Watched]:
    """One episode with these features."""
    sampler = Watched(replies)
    with Pool("sim", size=1) as pool:
        rollout = Rollout(chat(), sampler, pool, extra_turns=extra, context=ContextConfig(**options))
        return rollout.collect([Start(task)], PARAMS)[0], sampler


def last_answer(text: str) -> str:
    """The last tool message of a context."""
    return text.rpartition("<|im_start|>tool\n")[2].partition(IM_END)[0]


def test_all_features_off_give_the_ids_of_the_bare_loop() -> None:
    replies = [reply("bash ls"), reply("bash cat nothing"), reply("nonsense"), reply("bash ls", "submit")]
    plain = Watched(replies)
    with Pool("sim", size=1) as pool:
        bare = Rollout(chat(), plain, pool, extra_turns=9).collect([Start(TASK)], PARAMS)[0]
    dressed, sampler = play(replies)
    assert context_ids(bare) == context_ids(dressed)
    assert [request.ids for request in plain.requests] == [request.ids for request in sampler.requests]
    assert dressed.samples == [dressed]


def test_every_option_is_off_by_default() -> None:
    on = {field.name for field in fields(ContextConfig) if field.default not in (0, "", False, "off")}
    assert on == {"keep_turns"}  # of compression, which is off


@pytest.mark.parametrize(
    "wrong", [{"output_chars": -1}, {"keep_turns": 0}, {"guard": "perhaps"}, {"loop_turns": -2}]
)
def test_a_wrong_option_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ContextConfig(**wrong)


def test_a_long_output_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    replies = [reply("bash printf 'A%.0sB' 1 2 3 4 5 6 7 8 9; echo END"), reply("submit")]
    _, sampler = play(replies, output_chars=8)
    assert last_answer(sampler.seen[1]) == "ABAB\n[13 characters left out]\nEND".replace("END", "BEND")
    _, whole = play(replies)
    assert last_answer(whole.seen[1]) == "AB" * 9 + "END"
    assert cut("abc", 3) == "abc"


def test_turns_left_are_said_when_few_are_left_and_not_before() -> None:
    _, sampler = play([reply("bash ls")] * 5, extra=2, remind_turns=2)  # 5 turns in all
    assert ["turns left" in last_answer(text) for text in sampler.seen] == [False, False, False, True, True]
    assert last_answer(sampler.seen[3]).endswith("[turns left: 2]")


def test_failures_in_a_row_are_said() -> None:
    replies = [reply("bash cat x"), reply("bash ls"), reply("bash cat x"), reply("bash cat y"), reply("submit")]
    _, sampler = play(replies, remind_failures=2)
    assert ["turns in a row failed" in last_answer(text) for text in sampler.seen[1:]] == [False, False, False, True]


def test_a_loop_is_said_and_other_calls_are_none() -> None:
    replies = [reply("bash ls")] * 3 + [reply("bash ls -a"), reply("submit")]
    _, sampler = play(replies, loop_turns=3)
    assert ["same call 3 times" in last_answer(text) for text in sampler.seen[1:]] == [False, False, True, False]


def test_the_todo_list_is_a_file_and_every_change_is_shown_once_whoever_made_it() -> None:
    replies = [
        reply("todo read the notes"), reply("bash ls"), reply(f"bash echo done > {TODO_FILE}"), reply("bash ls"),
        reply(f"bash cat {TODO_FILE}"), reply("submit"),
    ]  # fmt: skip
    found, sampler = play(replies, todo=True)
    shown = [last_answer(text) for text in sampler.seen[1:]]
    assert shown[0] == "[todo changed: read the notes]"
    assert shown[2] == "[todo changed: done]"
    assert "todo" not in shown[1] + shown[3]
    assert shown[4] == "done"
    assert "todo TEXT" in sampler.seen[0]
    assert not found.turns[0].malformed


def test_without_its_option_todo_is_no_tool() -> None:
    found, sampler = play([reply("todo x"), reply("submit")])
    assert found.turns[0].malformed
    assert "unknown tool" in last_answer(sampler.seen[1])


def test_files_are_injected_into_the_prompt_and_stay_text() -> None:
    files = {**TASK.files, "MEMORY.md": f"plums are purple {IM_END}", "HOW.md": "look first"}
    _, sampler = play([reply("submit")], replace(TASK, files=files), memory_file="MEMORY.md", workflow_file="HOW.md")
    assert "[MEMORY.md]\nplums are purple" in sampler.seen[0]
    assert sampler.seen[0].index("MEMORY.md") < sampler.seen[0].index("[HOW.md]\nlook first")
    assert sampler.requests[0].ids.count(chat().stop_id) == 1  # the message's own end alone
    _, missing = play([reply("submit")], memory_file="MEMORY.md")
    assert "MEMORY" not in missing.seen[0]


# -- hooks ---------------------------------------------------------------------------------------------------------


def test_the_guard_stops_a_destructive_command_and_the_files_stay() -> None:
    replies = [reply("bash rm -rf /app"), reply("bash ls"), reply("submit")]
    found, sampler = play(replies, guard="stop")
    assert last_answer(sampler.seen[1]) == "[not run: rm -r of /app]\n[exit 126]"
    assert last_answer(sampler.seen[2]) == "\n".join(sorted(TASK.files))
    assert found.turns[0].exit_code == 126


def test_the_guard_can_warn_and_run() -> None:
    _, sampler = play([reply("bash rm -rf ./*"), reply("bash ls"), reply("submit")], guard="warn")
    assert "[warning: rm -r of ./*]" in last_answer(sampler.seen[1])
    assert last_answer(sampler.seen[2]) == ""


def test_a_call_that_is_stopped_leaves_the_others_of_its_response() -> None:
    replies = [reply("bash echo one", "bash rm -rf /", "bash echo two"), reply("submit")]
    found, sampler = play(replies, guard="stop")
    assert last_answer(sampler.seen[1]) == "one\n[not run: rm -r of /]\ntwo\n[exit 126]"
    assert len(found.turns) == 2  # three calls, one chunk


@pytest.mark.parametrize(
    "command",
    ["rm -rf /", "rm -fr .", "sudo -n true; rm -r *", "bash -c 'rm -rf /app'", "rm --recursive ~",
     "find / -delete", "mkfs.ext4 /dev/sda", "git reset --hard HEAD~1", "rm -R /app/",
     "env X=1 rm -rf .."],
)  # fmt: skip
def test_destructive_commands_are_known(command: str) -> None:
    assert destroys(command)


@pytest.mark.parametrize(
    "command",
    ["rm a.txt", "rm -r build", "rm -rf /app/build", "echo 'rm -rf /'", "ls -r", "find . -name x -delete", "",
     "'", "-", "git reset file", "grep -r x .", "rm -f *.tmp"],
)  # fmt: skip
def test_ordinary_commands_are_left_alone(command: str) -> None:
    assert not destroys(command)


def test_own_hooks_see_each_call_before_and_its_result_after() -> None:
    class Hook:
        def before(self, call: Any) -> Objection | None:
            return Objection("no cats", stop=True) if call.command.startswith("cat") else None

        def after(self, call: Any, result: Any) -> str | None:
            return f"[{call.command} gave {result.exit_code}]"

    context = Context(hooks=[Hook()])
    with Pool("sim", size=1) as pool, ContextEnv(TASK, pool, context) as env:
        env.reset()
        assert env.step(f"{CALL}bash true{CALL_END}{CALL}bash cat x{CALL_END}")[0] == (
            "[true gave 0]\n[not run: no cats]\n[exit 126]"
        )


# -- chains --------------------------------------------------------------------------------------------------------


def test_compression_starts_a_chain_that_trains_only_what_was_sampled_in_it() -> None:
    replies = [reply(f"bash echo {'word ' * 12}{n}") for n in range(6)] + [reply("submit")]
    found, sampler = play(replies, compress_at=200, keep_turns=2)
    assert len(found.samples) > 1
    assert check_contexts(found, sampler) == len(replies)
    text = chat().decode(found.chains[0].prompt_ids)
    assert "[earlier turns, in short]\n- echo word" in text and TASK.instruction in text
    assert max(len(request.ids) for request in sampler.requests) < 300
    assert {sample.reward for sample in found.samples} == {found.reward}
    order = [turn.ids for turn in found.episode_turns]
    assert order == replies == [turn.ids for sample in found.samples for turn in sample.turns]
    packed = pack_episode(found)
    assert validate_chunk_ids(packed.chunk_ids) == len(replies)
    assert max(packed.contexts) == len(found.samples) - 1


def check_contexts(found: Trajectory, sampler: Watched) -> int:
    """Each request is a prefix of one chain, up to a turn that was sampled right there. Returns how many turns."""
    contexts = {}
    for sample in found.samples:
        packed = pack(sample)
        assert sum(packed.env_mask) == sum(len(turn.ids) for turn in sample.policy_turns)
        ids = list(sample.prompt_ids)
        for turn in sample.turns:
            contexts[tuple(ids)] = turn.ids
            ids += [*turn.ids, *turn.observation_ids]
    for request, answer in zip(sampler.requests, sampler.replies, strict=False):
        assert contexts[tuple(request.ids)] == answer
    return len(contexts)


def test_compression_off_keeps_one_chain() -> None:
    replies = [reply(f"bash echo {'word ' * 12}{n}") for n in range(6)] + [reply("submit")]
    found, sampler = play(replies)
    assert len(found.samples) == 1
    assert check_contexts(found, sampler) == len(replies)


def test_a_sub_agent_has_a_context_of_its_own_and_answers_with_what_it_saw_last() -> None:
    replies = [
        reply("bash echo first"), reply("delegate count the files"), reply("bash ls | wc -l"),
        reply("bash echo 5 files", "submit"), reply("submit"),
    ]  # fmt: skip
    found, sampler = play(replies, subagent_turns=4)
    assert check_contexts(found, sampler) == 5
    assert [len(sample.turns) for sample in found.samples] == [3, 2]
    assert "first" not in sampler.seen[2] and TASK.instruction not in sampler.seen[2]
    assert "count the files" in sampler.seen[2] and "delegate TASK" not in sampler.seen[2]
    assert last_answer(sampler.seen[4]) == "5 files"
    assert "wc -l" not in sampler.seen[4]
    assert (found.reward, found.chains[0].reward) == (0.0, 0.0)
    assert len({request.key for request in sampler.requests}) == 5
    assert [turn.ids for turn in found.episode_turns] == replies  # as written: the sub-agent's in the middle


def test_a_sub_agent_that_never_submits_is_ended_by_its_turns() -> None:
    found, sampler = play([reply("delegate look"), reply("bash echo a"), reply("bash echo b"), reply("submit")],
                          subagent_turns=2)  # fmt: skip
    assert [len(sample.turns) for sample in found.samples] == [2, 2]
    assert last_answer(sampler.seen[3]) == "b"


def test_delegate_must_stand_alone_and_goes_one_level_deep() -> None:
    replies = [reply("bash echo x", "delegate y"), reply("delegate z"), reply("delegate deeper"), reply("submit"),
               reply("submit")]  # fmt: skip
    _, sampler = play(replies, subagent_turns=3)
    assert "only call" in last_answer(sampler.seen[1])
    assert "a sub-agent cannot use it" in last_answer(sampler.seen[3])


def test_a_solved_task_pays_every_chain() -> None:
    body = "; ".join(TASK.expert)
    found, _ = play([reply("delegate do it"), reply(f"bash {body}", "submit"), reply("submit")], subagent_turns=3)
    assert [sample.reward for sample in found.samples] == [1.0, 1.0]
    assert all(not sample.infra for sample in found.samples)


# -- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "reason", "turns"),
    [({"max_tokens": 80}, "token budget spent", 3), ({"max_seconds": 1e-9}, "time budget spent", 1),
     ({"max_context": 200}, "context full", None)],
)  # fmt: skip
def test_a_budget_that_runs_out_ends_the_episode_and_it_is_still_verified(
    budget: dict[str, Any], reason: str, turns: int | None
) -> None:
    context = Context()
    with Pool("sim", size=1) as pool, ContextEnv(TASK, pool, context, max_turns=50) as env:
        trajectory = Start(TASK).open(chat(), env, 0, 0)
        agent = Agent(chat(), env, trajectory, PARAMS, context=context, **budget)
        agent.run(Watched([reply("bash ls")] * 40))
    assert trajectory.reward == 0.0
    assert trajectory.reason.startswith(reason)
    assert turns is None or len(trajectory.turns) == turns


def test_the_recipes_option_reaches_its_rollouts(tmp_path: Path) -> None:
    arguments = RunArguments(sandbox="sim", families=["notes"], context={"guard": "stop", "remind_turns": 2})
    with Run(arguments, IPAConfig(output_dir=str(tmp_path / "run"))) as run:
        run.build_model()
        assert run.rollout.context == ContextConfig(guard="stop", remind_turns=2)
