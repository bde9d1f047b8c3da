"""One conformance suite over every family and backend, and what an environment does when its sandbox fails."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from small import tokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from mini_rome.env import Env, ToolEnv, combine, make
from mini_rome.errors import ConfigError, SandboxDead, SnapshotRefused
from mini_rome.families import FAMILIES, get_family
from mini_rome.model import build_model
from mini_rome.sandbox import Limits, Pool
from mini_rome.sandbox.base import RawStep
from mini_rome.sandbox.sim import SimSandbox
from mini_rome.trace import Call, Response
from mini_rome.types import Snapshot, StepResult, Task, Verdict

SUBMIT = "<tool_call>submit</tool_call>"
SHELL_FAMILIES = sorted(name for name in FAMILIES if get_family(name).make(3, 3).offers_bash)


def bash(*commands: str, submit: bool = False) -> str:
    return "".join(f"<tool_call>bash {command}</tool_call>" for command in commands) + SUBMIT * submit


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str], Pool]]:
    """One pool of one box for each backend that is asked for."""
    make_pool = functools.cache(lambda backend: closing.enter_context(Pool(backend, size=1)))
    with contextlib.ExitStack() as closing:
        yield make_pool


@pytest.fixture
def pool(backend: str, pools: Callable[[str], Pool]) -> Pool:
    return pools(backend)


@pytest.fixture(params=SHELL_FAMILIES)  # the others: test_tools.py, test_retail.py, test_shop.py
def task(request: pytest.FixtureRequest) -> Task:
    return get_family(request.param).make(3, 3)


@pytest.fixture
def env(task: Task, pool: Pool) -> Iterator[Env]:
    with Env(task, pool) as made:
        yield made


def solve(env: Env) -> list[tuple]:
    last = len(env.task.expert) - 1
    return [env.step(bash(command, submit=turn == last)) for turn, command in enumerate(env.task.expert)]


# -- every shell family, both backends ----------------------------------------------------------------------------


def test_reset_and_step_keep_the_five_tuple_promise(env: Env, backend: str) -> None:
    observation, info = env.reset(seed=7)
    assert observation == env.task.instruction
    assert info == {"task": env.task.name, "backend": backend, "seed": 7}
    for observation, reward, terminated, truncated, info in solve(env):
        assert isinstance(observation, str)
        assert isinstance(reward, float)
        assert (type(terminated), type(truncated)) == (bool, bool)
        assert {"result", "problem", "submitted"} <= set(info)


def test_the_reward_is_zero_until_the_end_and_one_for_the_expert(env: Env) -> None:
    env.reset()
    steps = solve(env)
    assert [(reward, terminated, truncated) for _, reward, terminated, truncated, _ in steps] == [
        (0.0, False, False),
        (0.0, False, False),
        (1.0, True, False),
    ]
    assert steps[-1][4]["verdict"].reward == 1.0
    assert [info["result"].exit_code for *_, info in steps] == [0, 0, 0]


def test_submitting_at_once_earns_nothing(env: Env) -> None:
    env.reset()
    observation, reward, terminated, truncated, info = env.step(SUBMIT)
    assert (observation, reward, terminated, truncated) == ("", 0.0, True, False)
    assert info["result"] is None


def test_reset_gives_the_same_episode_whatever_happened_before(env: Env) -> None:
    def play() -> tuple[str, list[str]]:
        env.reset()
        tree = env.box.snapshot().tree_hash
        return tree, [observation for observation, *_ in solve(env)]

    first = play()
    env.reset()
    env.step(bash("mkdir -p d && cd d && export A=1 && echo junk > f && rm -f ../*"))
    assert play() == first
    env.close()
    assert play() == first


def test_an_episode_that_uses_up_its_turns_is_truncated_and_still_verified(task: Task, pool: Pool) -> None:
    with Env(task, pool, max_turns=3) as env:
        env.reset()
        done = [env.step(bash(command)) for command in task.expert]
        assert [step[1:4] for step in done] == [(0.0, False, False), (0.0, False, False), (1.0, False, True)]
        env.reset()
        idle = [env.step(bash("true")) for _ in range(3)]
        assert [step[1:4] for step in idle] == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]


def test_a_submission_in_the_last_turn_is_terminated_not_truncated(task: Task, pool: Pool) -> None:
    with Env(task, pool, max_turns=3) as env:
        env.reset()
        assert solve(env)[-1][1:4] == (1.0, True, False)


def test_several_calls_in_one_response_are_one_step(task: Task, pool: Pool) -> None:
    with Env(task, pool, max_turns=2) as env:
        env.reset()
        observation, _, terminated, truncated, info = env.step(bash("echo a", "cat no-such-file", "echo b"))
        assert (terminated, truncated) == (False, False)
        assert observation.startswith("a\n")
        assert observation.endswith("b\n[exit 1]")
        assert info["result"].exit_code == 1
        assert env.step(bash(*task.expert, submit=True))[1:4] == (1.0, True, False)


def test_calls_after_submit_are_not_run(env: Env) -> None:
    env.reset()
    _, reward, terminated, _, _ = env.step(bash(*env.task.expert[:-1]) + SUBMIT + bash(env.task.expert[-1]))
    assert (reward, terminated) == (0.0, True)


def test_a_malformed_response_runs_nothing_and_says_why(env: Env) -> None:
    env.reset()
    before = env.box.snapshot().tree_hash
    observation, reward, terminated, truncated, info = env.step("<tool_call>bash rm -rf *</tool_call><tool_call>x")
    assert (observation, reward, terminated, truncated) == ("[tool call not closed]", 0.0, False, False)
    assert (info["result"], info["problem"]) == (None, "tool call not closed")
    assert env.box.snapshot().tree_hash == before


def test_three_malformed_responses_in_a_row_end_the_episode_and_others_reset_the_count(env: Env) -> None:
    env.reset()
    assert [env.step(action)[3] for action in ("?", "?", bash("true"), "?", "?", "?")] == [False] * 5 + [True]


def test_a_step_before_reset_after_the_end_or_after_close_is_an_error(env: Env) -> None:
    with pytest.raises(ConfigError, match=r"call reset\(\) first"):
        env.step(SUBMIT)
    env.reset()
    env.step(SUBMIT)
    with pytest.raises(ConfigError, match="after the episode ended"):
        env.step(SUBMIT)
    env.reset()
    env.close()
    with pytest.raises(ConfigError, match=r"call reset\(\) first"):
        env.step(SUBMIT)
    with pytest.raises(ConfigError, match="not running"):
        _ = env.box


def test_close_gives_the_box_back_once(task: Task, pool: Pool) -> None:
    for _ in range(3):
        env = Env(task, pool)
        env.reset()
        env.close()
        env.close()
    with pool.box() as box:  # it would wait for ever if the one box were still out
        assert box.exec("ls -A").output == ""
    assert pool.made == 1


def test_an_episode_can_start_in_the_middle(task: Task, pool: Pool) -> None:
    with Env(task, pool, max_turns=3) as env:
        env.reset()
        env.step(bash(task.expert[0]))
        middle = env.box.snapshot()
        env.reset()
        assert env.box.snapshot().tree_hash != middle.tree_hash or task.family == "notes"  # notes only reads at first
        env.reset(start=middle, turns=1)
        assert env.box.snapshot().tree_hash == middle.tree_hash
        rest = [env.step(bash(command)) for command in task.expert[1:]]
        assert [step[1:4] for step in rest] == [(0.0, False, False), (1.0, False, True)]


def test_a_timed_out_command_is_the_agents_doing_not_the_infrastructures(task: Task, backend: str) -> None:
    with Pool(backend, limits=Limits(step_s=0.3), size=1) as pool, Env(task, pool) as env:
        env.reset()
        observation, reward, _, truncated, info = env.step(bash("while true; do :; done"))
        assert (reward, truncated, info["result"].status) == (0.0, False, "timeout")
        assert "timed out" in observation
        assert solve(env)[-1][1] == 1.0


def test_make_owns_its_box(backend: str) -> None:
    with make("notes", chunks=2, seed=1, backend=backend) as env:
        env.reset()
        box = env.box
        assert solve(env)[-1][1] == 1.0
    assert not box.alive


# -- failures of the infrastructure --------------------------------------------------------------------------------


class DyingBox(SimSandbox):
    """Dies in the middle of its second step."""

    def _run(self, command: bytes, seconds: float, stdin: bytes) -> RawStep:
        if self.steps == 1:
            self._dead = "killed by the test"
            return RawStep(b"half an ou", None, status="sandbox_dead")
        return super()._run(command, seconds, stdin)


class RuinedBox(SimSandbox):
    """The agent left what no snapshot may hold."""

    def _snapshot(self) -> Snapshot:
        raise SnapshotRefused("a fifo")


class LostBox(SimSandbox):
    """Does not answer when it is to be judged."""

    def _snapshot(self) -> Snapshot:
        raise SandboxDead("gone")


def broken(kind: type[SimSandbox]) -> Pool:
    return Pool("sim", size=1, make_box=lambda: kind("none", "broken", Limits()))


def test_a_box_that_dies_in_a_step_gives_reward_none() -> None:
    task = get_family("notes").make(3, 3)
    with broken(DyingBox) as pool, Env(task, pool) as env:
        env.reset()
        env.step(bash(task.expert[0]))
        observation, reward, terminated, truncated, info = env.step(bash("echo never", "echo run", submit=True))
        assert (observation, reward, terminated, truncated) == ("", None, False, True)
        assert info["verdict"] == Verdict(None, "sandbox_dead")
        assert info["submitted"] is False
        with pytest.raises(ConfigError, match="after the episode ended"):
            env.step(SUBMIT)
        env.close()
        assert (pool.made, pool.replaced) == (1, 0)
        assert Env(task, pool).reset()[0]  # the dead box was not kept
        assert pool.made == 2


@pytest.mark.parametrize(
    ("kind", "reward", "cause"), [(RuinedBox, 0.0, "a fifo"), (LostBox, None, "infra_error: gone")]
)
def test_what_the_agent_ruined_is_zero_and_what_the_box_failed_at_is_none(
    kind: type[SimSandbox], reward: float | None, cause: str
) -> None:
    with broken(kind) as pool, Env(get_family("notes").make(3, 1), pool) as env:
        env.reset()
        _, found, terminated, _, info = env.step(SUBMIT)
        assert (found, terminated) == (reward, True)
        assert cause in info["verdict"].reason


@pytest.mark.parametrize("answer", [1 / 0.5, float("nan"), "yes", None])
def test_a_check_that_answers_nonsense_gives_none(answer: object) -> None:
    given = answer if answer == "yes" else Verdict(answer)
    task = Task("t", "notes", "data", "do", {}, ("true",), lambda files: given)
    with Pool("sim", size=1) as pool, Env(task, pool) as env:
        env.reset()
        assert env.step(SUBMIT)[1] is None


def test_a_check_that_crashes_gives_none_with_the_cause() -> None:
    task = Task("t", "notes", "data", "do", {}, ("true",), lambda files: Verdict(1 / 0))
    with Pool("sim", size=1) as pool, Env(task, pool) as env:
        env.reset()
        _, reward, _, _, info = env.step(SUBMIT)
        assert reward is None
        assert "ZeroDivisionError" in info["verdict"].reason


# -- pieces --------------------------------------------------------------------------------------------------------


def test_results_of_one_response_are_combined_by_the_first_failure() -> None:
    good, bad = StepResult("a\n", 0, wall_s=1.0), StepResult("b\n", 2, wall_s=2.0)
    late = StepResult("", 124, "timeout")
    assert combine([]) is None
    assert combine([bad]) is bad
    both = combine([good, bad, good, late])
    assert both is not None
    assert (both.output, both.exit_code, both.status, both.wall_s) == ("a\nb\na", 2, "ok", 4.0)
    assert combine([good, late]).status == "timeout"
    assert combine([good, good]).exit_code == 0
    assert combine([good, StepResult("x", 0, truncated=True, supported=False)]).truncated
    assert not combine([good, StepResult("x", 0, supported=False)]).supported


def test_max_turns_below_one_is_refused() -> None:
    with Pool("sim", size=1) as pool, pytest.raises(ConfigError, match="max_turns=0"):
        Env(get_family("notes").make(0, 1), pool, max_turns=0)


# -- TRL's environment_factory -------------------------------------------------------------------------------------


def test_the_tool_class_gives_the_reward_of_the_episode() -> None:
    task, env = get_family("tickets").make(4, 2), ToolEnv()
    assert env.reset(family="tickets", chunks=2, seed=4, backend="sim", prompt="ignored") == task.instruction
    assert env.bash(task.expert[0]) != ""
    assert env.submit(task.expert[1]) == ""
    assert env.get_reward() == 1.0
    assert env.reset(family="tickets", chunks=2, seed=4, backend="sim") == task.instruction
    assert env.bash("cat nothing").endswith("[exit 1]")
    assert env.submit() == ""
    assert env.get_reward() == 0.0
    env.reset(family="tickets", chunks=2, seed=4, backend="sim")
    assert env.get_reward() == 0.0  # never finished


def test_a_command_that_spells_the_end_of_a_call_reaches_the_shell_whole() -> None:
    env = ToolEnv()
    env.reset(family="notes", chunks=1, seed=0, backend="sim")
    assert env.bash("echo '</tool_call>' done") == "</tool_call> done"
    env.get_reward()


def test_a_tool_before_reset_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"before reset\(\)"):
        ToolEnv().bash("ls")


def test_the_tools_have_schemas() -> None:
    tools = [name for name, _ in inspect.getmembers(ToolEnv, inspect.isfunction) if not name.startswith("_")]
    assert sorted(set(tools) - {"reset", "get_reward"}) == ["bash", "submit"]
    schema = get_json_schema(ToolEnv().bash)["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("bash", ["command"])
    assert schema["parameters"]["properties"]["command"]["description"] == "The command line to run."
    assert get_json_schema(ToolEnv().submit)["function"]["parameters"].get("required", []) == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_trl_plays_the_tool_class_in_its_own_loop(tmp_path: Path) -> None:
    task = get_family("notes").make(0, 1)
    prompt = [{"role": "user", "content": ""}]
    rows = [{"prompt": prompt, "family": "notes", "chunks": 1, "seed": 0, "backend": "sim"}]
    trainer = GRPOTrainer(
        model=build_model(tokenizer()),
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=2, num_generations=2,
            max_completion_length=8, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        environment_factory=ToolEnv,
    )  # fmt: skip
    assert [tool.__name__ for tool in trainer.tools] == ["bash", "submit"]
    assert trainer.chat_template is None  # ours keeps prefixes: TRL need not replace it
    environment = ToolEnv()
    environment.reset(**rows[0])
    reply = f"<tool_call>bash {task.expert[0]}</tool_call>{SUBMIT}<|im_end|>"
    for called in tokenizer().parse_response(reply, prefix="<|im_start|>assistant\n")["tool_calls"]:
        function = called["function"]
        getattr(environment, function["name"])(**function["arguments"])
    assert environment.get_reward() == 1.0
    trainer.train()


def test_a_response_object_is_as_good_as_its_text(env: Env) -> None:
    env.reset()
    calls = tuple(Call("bash", command) for command in env.task.expert)
    assert env.step(Response((*calls, Call("submit"))))[1:4] == (1.0, True, False)
