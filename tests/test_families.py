"""Procedural families: splits, experts, mistakes, and what earns a reward."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_rome.errors import ConfigError
from mini_rome.families import FAMILIES, get_family
from mini_rome.families.base import COLOURS, NAMES, Family, split_of
from mini_rome.sandbox import Pool, Sandbox, initial_snapshot
from mini_rome.sandbox.tree import files_of_tar
from mini_rome.types import Task
from mini_rome.verify import verify_files

SPLITS = ("train", "validation", "test")
ROOT = Path(__file__).parent.parent
SHELL = {name: family for name, family in FAMILIES.items() if family.make(0, 1).offers_bash}
EDITING = sorted(set(SHELL) - {"notes"})  # every chunk of these changes a file that the check looks at
NEW = ("maze", "checks", "decay", "branches", "sweep", "logins")


@pytest.fixture(params=FAMILIES.values(), ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(params=SHELL.values(), ids=lambda family: family.name)
def shell_family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str], Pool]]:
    """One pool of one box for each backend that is asked for."""
    make = functools.cache(lambda backend: closing.enter_context(Pool(backend, size=1)))
    with contextlib.ExitStack() as closing:
        yield make


@pytest.fixture
def box(backend: str, pools: Callable[[str], Pool]) -> Iterator[Sandbox]:
    with pools(backend).box() as taken:
        yield taken


@pytest.fixture
def sim(pools: Callable[[str], Pool]) -> Iterator[Sandbox]:
    with pools("sim").box() as taken:
        yield taken


def enter(box: Sandbox, task: Task) -> None:
    box.reset()
    box.restore(initial_snapshot(task.files))


def hashes(family: Family, split: str, count: int) -> set[str]:
    return {family.make(seed, seed % 16 + 1, split).content_hash for seed in range(count)}


def test_splits_share_no_instance_by_content_hash(family: Family) -> None:
    found = {split: hashes(family, split, 1000) for split in SPLITS}
    assert sum(map(len, found.values())) > 2700  # K = 1 has few instances, all other draws are new ones
    for split, mine in found.items():
        assert {split_of(content) for content in mine} == {split}
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    assert not found["validation"] & found["test"]


def test_without_the_redraw_the_splits_would_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_rome.families.base.split_of", lambda content: mock.ANY)
    assert hashes(get_family("notes"), "train", 300) & hashes(get_family("notes"), "test", 300)


def test_a_fifth_of_all_instances_is_for_the_test_and_a_few_are_held_back(family: Family) -> None:
    drawn = [split_of(family.build(random.Random(seed), 8).content_hash) for seed in range(1000)]
    assert 0.17 < drawn.count("test") / 1000 < 0.27
    assert 0.01 < drawn.count("private") / 1000 < 0.06
    assert 0.45 < drawn.count("train") / 1000 < 0.55


@pytest.mark.parametrize("chunks", range(1, 17))
def test_the_expert_has_one_command_per_chunk(family: Family, chunks: int) -> None:
    task = family.make(5, chunks)
    assert (len(task.expert), task.chunks) == (chunks, chunks)
    assert bool(task.tools) or all("\n" not in command for command in task.expert)


def test_an_instance_is_determined_by_seed_horizon_and_split(family: Family) -> None:
    def shown(task: Task) -> tuple[object, ...]:
        return task.name, task.instruction, dict(task.files), task.expert, task.seed, task.split

    assert shown(family.make(3, 6, "test")) == shown(family.make(3, 6, "test"))
    others = [family.make(4, 6, "test"), family.make(3, 7, "test"), family.make(3, 6, "train")]
    assert len({task.content_hash for task in [family.make(3, 6, "test"), *others]}) == 4


def test_instances_do_not_depend_on_the_process_hash_seed(family: Family) -> None:
    code = (
        f"from mini_rome.families import get_family; family = get_family({family.name!r})\n"
        "print([family.make(seed, 9, 'test').content_hash for seed in range(20)])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1] != ""


@pytest.mark.parametrize("chunks", [-1, 0, 17])
def test_a_horizon_out_of_range_names_value_family_and_range(family: Family, chunks: int) -> None:
    with pytest.raises(ConfigError, match=rf"chunks={chunks}: family '{family.name}' .* 1 to 16"):
        family.make(0, chunks)


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'nope' is unknown; choose from notes, tickets"):
        get_family("nope")


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 16])
def test_only_the_whole_expert_is_rewarded(shell_family: Family, chunks: int, box: Sandbox) -> None:
    task = shell_family.make(chunks, chunks, "test")
    enter(box, task)
    rewards = [verify_files(task, box).reward]
    for command in task.expert:
        assert box.exec(command).exit_code == 0
        rewards.append(verify_files(task, box).reward)
    assert rewards == [0.0] * chunks + [1.0]


def target(command: str) -> str:
    """The name that a command is about: the last one in its first part."""
    return [word for word in re.findall(r"\w+", command.split(" && ")[0]) if word in NAMES][-1]


@pytest.mark.parametrize("seed", range(5))
def test_what_a_chunk_is_about_is_shown_by_the_chunk_before_and_by_nothing_earlier(
    shell_family: Family, sim: Sandbox, seed: int
) -> None:
    task = shell_family.make(seed, 12)
    enter(sim, task)
    shown = [task.instruction, *(sim.exec(command).output for command in task.expert)]
    for chunk, command in enumerate(task.expert):
        assert target(command) in shown[chunk].split(), (shown[chunk], command)
        assert target(command) not in " ".join(shown[:chunk]).split(), (shown[:chunk], command)
    assert all(len(output.split()) < 25 for output in shown[1:])


def test_a_mistake_fails_and_changes_nothing(shell_family: Family, box: Sandbox) -> None:
    task, rng = shell_family.make(2, 8), random.Random(0)
    enter(box, task)
    for chunk, command in enumerate(task.expert):
        before = box.snapshot().tree_hash
        wrong = shell_family.mistake(task, chunk, rng)
        result = box.exec(wrong)
        assert result.exit_code not in (0, None), wrong
        assert result.output, wrong
        assert box.snapshot().tree_hash == before
        box.exec(command)
    assert verify_files(task, box).reward == 1.0


@pytest.mark.parametrize("dropped", range(6))
def test_a_ticket_left_out_is_not_rewarded_though_the_end_is_reached(sim: Sandbox, dropped: int) -> None:
    task = get_family("tickets").make(1, 6)
    enter(sim, task)
    for chunk, command in enumerate(task.expert):
        sim.exec(command.partition(" && ")[2] if chunk == dropped else command)
    assert verify_files(task, sim).reward == 0.0


def test_reading_a_note_plainly_does_not_show_what_its_own_tool_shows(sim: Sandbox) -> None:
    compared = 0
    for seed in range(10):
        task = get_family("notes").make(seed, 8)
        enter(sim, task)
        for command in task.expert[:-1]:
            if not command.startswith("cat"):
                plain = sim.exec(f"cat {command.split()[-1]}").output
                assert plain != sim.exec(command).output
                compared += 1
    assert compared > 30


WORDS = (*NAMES[:12], *COLOURS[:4], "answer")


def files_after(box: Sandbox, task: Task, commands: Iterable[str]) -> dict[str, bytes]:
    enter(box, task)
    for command in commands:
        box.exec(command)
    return dict(files_of_tar(box.snapshot().tar))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(SHELL)), seed=st.integers(0, 50), chunks=st.integers(1, 5))
def test_a_chain_is_rewarded_exactly_when_it_leaves_the_experts_files(
    sim: Sandbox, data: st.DataObject, name: str, seed: int, chunks: int
) -> None:
    task = get_family(name).make(seed, chunks)
    chain = data.draw(st.permutations(task.expert).map(lambda order: order[: data.draw(st.integers(0, chunks))]))
    if data.draw(st.booleans()):
        wrong = f"echo {data.draw(st.sampled_from(WORDS))} > {data.draw(st.sampled_from(WORDS))}"
        chain.insert(data.draw(st.integers(0, len(chain))), wrong)
    wanted = files_after(sim, task, task.expert)
    left = files_after(sim, task, chain)
    free = set(left) - set(wanted) - set(task.files)  # a file of the agent's own
    assert verify_files(task, sim).reward == float({path: left[path] for path in set(left) - free} == wanted)


@pytest.mark.parametrize("name", EDITING)
def test_no_step_can_be_left_out(sim: Sandbox, name: str) -> None:
    for chunks in (2, 6):
        task = get_family(name).make(chunks, chunks)
        for dropped in range(chunks):
            enter(sim, task)
            for command in (*task.expert[:dropped], *task.expert[dropped + 1 :]):
                sim.exec(command)
            assert verify_files(task, sim).reward == 0.0, dropped


def test_the_log_of_a_decay_must_be_in_order(sim: Sandbox) -> None:
    task = get_family("decay").make(3, 5)
    enter(sim, task)
    for command in (*task.expert[:2], task.expert[3], task.expert[2], task.expert[4]):
        sim.exec(command)
    assert verify_files(task, sim).reward == 0.0


def trapped(task: Task, chunk: int) -> tuple[str, str]:
    """(a wrong command that succeeds in place of an expert's chunk, what takes it back)."""
    right, command = target(task.expert[chunk]), task.expert[chunk]
    about = {target(expert) for expert in task.expert}
    other = next((name for name in task.files if name in NAMES and name not in about), "")
    old, new = (re.findall(r"s/(\w+)/(\w+)/", command) or [("", "")])[0]
    row = re.search(r"\d", command)
    return {
        "maze": (f"touch {other}.lit && cat {other}", f"rm {other}.lit"),
        "checks": (f"sed -i s/{new}/{old}/ {right} && cat {right}", "true"),
        "decay": (f"sed -n {int(row[0]) % 8 + 1 if row else 0}p {right} | tee -a log", "sed -i '$d' log"),
        "branches": (f"echo base answer >> {right} && grep next {right}", f"sed -i '$d' {right}"),
        "sweep": (f"cp {other} kept && tail -n 1 {other}", f"rm kept/{other}"),
        "logins": (f"cat {other} && mv {other} jail", f"mv jail/{other} ."),
    }[task.family]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_trap_looks_like_success_costs_the_reward_and_can_be_repaired(box: Sandbox, name: str, chunk: int) -> None:
    task = get_family(name).make(4, 4)
    wrong, repair = trapped(task, chunk)
    before, rest = task.expert[:chunk], task.expert[chunk + 1 :]
    enter(box, task)
    for command in before:
        box.exec(command)
    fallen = box.exec(wrong)
    assert (fallen.exit_code, bool(fallen.output)) == (0, True)
    for command in rest:
        box.exec(command)
    assert verify_files(task, box).reward == 0.0
    enter(box, task)
    for command in (*before, wrong, repair, task.expert[chunk], *rest):
        assert box.exec(command).exit_code == 0
    assert verify_files(task, box).reward == 1.0


def test_a_trap_left_as_it_is_costs_the_reward_though_all_right_steps_follow(sim: Sandbox) -> None:
    for name in sorted(set(NEW) - {"checks"}):  # there the right step is the repair
        task = get_family(name).make(4, 4)
        files_after(sim, task, (trapped(task, 0)[0], *task.expert))
        assert verify_files(task, sim).reward == 0.0, name


@pytest.mark.parametrize("name", NEW)
def test_even_one_chunk_has_hundreds_of_instances_for_the_test(name: str) -> None:
    assert len({get_family(name).make(seed, 1, "test").content_hash for seed in range(800)}) > 500


def test_no_two_families_share_their_commands_and_every_domain_has_one() -> None:
    used: dict[frozenset[str], str] = {}
    for name, family in SHELL.items():
        experts = " && ".join(command for seed in range(20) for command in family.make(seed, 6).expert)
        programs = frozenset(part.split()[0] for part in re.split(r"&&|\|", experts))
        assert programs not in used, (name, used[programs])
        used[programs] = name
    assert len({family.domain for family in SHELL.values()}) == len(SHELL) == 8


@pytest.mark.docker
def test_experts_and_mistakes_give_the_same_on_both_backends(
    shell_family: Family, pools: Callable[[str], Pool]
) -> None:
    task, rng = shell_family.make(7, 6), random.Random(0)
    mistakes = [shell_family.mistake(task, chunk, rng) for chunk in range(6)]
    commands = [command for pair in zip(mistakes, task.expert, strict=True) for command in pair]
    if task.family in NEW:
        commands[2:2] = trapped(task, 1)
    with pools("sim").box() as sim, pools("docker").box() as real:
        for box in (sim, real):
            enter(box, task)
        for command in commands:
            one, two = sim.exec(command), real.exec(command)
            assert (one.exit_code, one.output) == (two.exit_code, two.output), command
        assert sim.snapshot().tree_hash == real.snapshot().tree_hash
        assert verify_files(task, sim).reward == verify_files(task, real).reward == 1.0


def test_the_maps_and_losses_say_what_the_expert_does() -> None:
    """An own reading of the rules: the name after the way to go; of two runs the one with the lower loss."""
    for seed in range(50):
        for chunks in (1, 4):
            task = get_family("maze").make(seed, chunks)
            shown = task.instruction.split("\n")[1]
            for n, call in enumerate(task.expert, 1):
                words, room = shown.split(), call.split()[-1]
                way = words[words.index("go") + 1]
                assert words[words.index(way) + 1] == room and ("last" in words) == (n == chunks)
                shown = task.files[room]
            task = get_family("sweep").make(seed, chunks)
            shown = task.instruction.split("\n")[1]
            for call in task.expert:
                first, loss, second, other = shown.split()[:4]
                assert call.split()[-1] == (first if int(loss) < int(other) else second)
                shown = task.files[call.split()[-1]].partition("\n")[2]
