"""Task folders at work: their images, the state their agent finds, and episodes in them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_rome.errors import ImageMissing, SandboxError
from mini_rome.evaluation.policies import Scripted
from mini_rome.sandbox import files_of_tar
from mini_rome.tasks.folders import FolderEnv, base_images, image_of, image_tag, initial_state
from mini_rome.tasks.harbor import load
from mini_rome.types import IN_PLACE, Trajectory

WORD_COUNT = Path(__file__).parent / "data" / "tasks" / "word-count"
DOCKERFILE = "ARG BASE=mini-rome/base:latest\nFROM ${BASE}\nWORKDIR /app\nENV COLOUR=blue\nCOPY fixtures /app/\n"
SUBMIT = "<tool_call>submit</tool_call>"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The fixture task, built from its Dockerfile with a file of its own; its image is removed at the end."""
    root = tmp_path / "task"
    shutil.copytree(WORD_COUNT, root)
    text = (root / "task.toml").read_text().replace('docker_image = "mini-rome/tools:latest"', "")
    (root / "task.toml").write_text(text.replace('name = "word-count"', 'name = "test-of-folders"'))
    (root / "environment" / "fixtures" / "deep").mkdir(parents=True)
    (root / "environment" / "fixtures" / "deep" / "in.txt").write_text("a b c\n")
    tool = root / "environment" / "fixtures" / "tool.sh"
    tool.write_text("#!/bin/bash\necho tool $COLOUR\n")
    tool.chmod(0o755)
    (root / "environment" / "Dockerfile").write_text(DOCKERFILE)
    yield root


@pytest.fixture
def cleaned() -> Iterator[None]:
    from mini_rome.sandbox.engine import engine

    yield
    client = engine().client
    for image in client.images.list(filters={"reference": "mini-rome/task-test-of-folders"}):
        for tag in image.tags:
            client.images.remove(tag)


def test_the_bases_of_a_dockerfile_are_found_without_its_own_stages() -> None:
    text = "# syntax\nARG A=x/y:1\nARG B\nFROM --platform=linux/amd64 $A AS one\nFROM one\nFROM z:${B} as two\n"
    text += "FROM scratch\n"
    assert base_images(text) == ["x/y:1", "z:"]


def test_the_tag_follows_content_modes_and_bases(folder: Path) -> None:
    context = folder / "environment"
    first = image_tag("A b/C", ["id"], context)
    assert first.startswith("mini-rome/task-a-b-c:") and first == image_tag("A b/C", ["id"], context)
    assert image_tag("A b/C", ["other"], context) != first
    (context / "fixtures" / "deep" / "in.txt").chmod(0o755)
    second = image_tag("A b/C", ["id"], context)
    (context / "fixtures" / "deep" / "in.txt").write_text("a b d\n")
    assert len({first, second, image_tag("A b/C", ["id"], context)}) == 3


@pytest.mark.docker
def test_the_agent_finds_the_fixtures_and_variables_of_its_image(folder: Path, cleaned: None) -> None:
    task = load(folder)
    image = image_of(task)
    assert image_of(task) == image
    start = initial_state(task, image)
    assert files_of_tar(start.tar) == {"deep/in.txt": b"a b c\n", "tool.sh": b"#!/bin/bash\necho tool $COLOUR\n"}
    with FolderEnv(task) as env:
        instruction, _ = env.reset()
        assert "count.sh" in instruction
        seen = env.step("<tool_call>bash ./tool.sh; cat deep/in.txt; echo x > deep/in.txt; ls /tests</tool_call>")[0]
        assert "tool blue\na b c" in seen and "[exit 2]" in seen
        observation, reward, terminated, _, info = env.step(SUBMIT)
    assert (reward, terminated, info["verdict"].verifier) == (0.0, True, "fresh-container")


@pytest.mark.docker
def test_the_oracle_earns_1_and_noop_0(folder: Path, cleaned: None) -> None:
    task = load(folder)
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE.replace("base:", "tools:"))
    for agent, reward, cause in (("oracle", 1.0, ""), ("noop", 0.0, "agent")):
        with FolderEnv(task) as env:
            episode = Scripted(agent).play(env, 0)
        assert (episode.verdict.reward, episode.cause) == (reward, cause), episode.verdict


@pytest.mark.docker
def test_a_build_that_fails_shows_the_last_20_lines_of_its_log_and_the_way_on(folder: Path, cleaned: None) -> None:
    steps = "RUN for i in $(seq 1 40); do echo line-$i; done; echo the end; exit 3\n"
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE + steps)
    with pytest.raises(SandboxError) as caught:
        image_of(load(folder))
    said = str(caught.value)
    assert "Dockerfile: the build failed" in said and "the end" in said and "docker build -t mini-rome/task-" in said
    assert "line-40" in said and "line-10\n" not in said
    assert len(said.splitlines()) <= 22


@pytest.mark.docker
def test_a_base_that_is_not_there_is_named_and_never_pulled(folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text("FROM no-such-base:9\n")
    with pytest.raises(ImageMissing, match="docker pull no-such-base:9"):
        image_of(load(folder))


@pytest.mark.docker
def test_an_agent_that_is_root_is_judged_in_place_and_never_trained_on() -> None:
    with FolderEnv(load(WORD_COUNT), in_place=True) as env:
        env.reset()
        assert env.step("<tool_call>bash id -u</tool_call>")[0] == "0"
        verdict = env.step(SUBMIT)[4]["verdict"]
        trajectory = Trajectory(env.task, [1], [], reward=verdict.reward, verifier=verdict.verifier)
    assert (verdict.reward, verdict.verifier) == (0.0, IN_PLACE)
    with pytest.raises(SandboxError, match="never for training"):
        trajectory.check_trainable()


@pytest.mark.docker
def test_the_verifier_alone_gets_a_network_where_asked_and_the_verdict_says_so(tmp_path: Path) -> None:
    shutil.copytree(WORD_COUNT, tmp_path / "task")
    script = "[ $(wc -l < /proc/net/route) -gt 1 ] && touch /usr/x && echo 1 > /logs/verifier/reward.txt"
    (tmp_path / "task" / "tests" / "test.sh").write_text(f"{script} || echo 0 > /logs/verifier/reward.txt\n")
    task = load(tmp_path / "task")
    found = {}
    for network in (False, True):
        with FolderEnv(task, network=network) as env:
            env.reset()
            assert env.step("<tool_call>bash wc -l < /proc/net/route</tool_call>")[0] == "1"
            verdict = env.step(SUBMIT)[4]["verdict"]
            found[network] = (verdict.reward, verdict.verifier)
    assert found == {False: (0.0, "fresh-container"), True: (1.0, "fresh-container (network)")}
