import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mini_rome.chat import Player, Session
from mini_rome.env import Env
from mini_rome.errors import ConfigError
from mini_rome.model import build_model, build_tokenizer
from mini_rome.runs import MODEL
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.scripted import ScriptedSampler
from mini_rome.sandbox import Pool
from mini_rome.tasks.choice import find_task
from mini_rome.trace import ChatFormat, context_ids

TASK = find_task("notes-k3-test-1")


@pytest.fixture(scope="module")
def form() -> ChatFormat:
    return ChatFormat(build_tokenizer())


@pytest.fixture
def session(form: ChatFormat, backend: str) -> Iterator[Session]:
    """The expert as the model: its last command submits too."""
    last = len(TASK.expert) - 1
    script = [form.response(command, submit=index == last) for index, command in enumerate(TASK.expert)]
    with Pool(backend=backend, size=1) as pool, Env(TASK, pool) as env:
        yield Session.open(env, form, ScriptedSampler(script), SamplingParams(max_new_tokens=64))


def player(session: Session) -> tuple[Player, io.StringIO]:
    out = io.StringIO()
    return Player(session, Console(file=out, width=100)), out


def test_stepping_to_the_end_earns_the_reward(session: Session) -> None:
    for expected in TASK.expert:
        assert session.step().commands == [expected]
    assert session.agent.done and session.agent.trajectory.reward == 1.0


def test_undo_restores_files_context_and_the_right_to_go_on(session: Session) -> None:
    session.step()
    tree, context = session.agent.env.box.snapshot().tree_hash, context_ids(session.agent.trajectory)
    session.by_hand("rm -r * ; echo wrong > answer")
    assert session.agent.env.box.snapshot().tree_hash != tree
    undone = session.undo()
    assert undone is not None and undone.source == "expert"
    assert session.agent.env.box.snapshot().tree_hash == tree
    assert context_ids(session.agent.trajectory) == context
    while not session.agent.done:
        session.step()
    assert session.agent.trajectory.reward == 1.0


def test_undoing_the_end_reopens_the_episode(session: Session) -> None:
    turn = session.by_hand(None)
    assert turn.submitted and not turn.malformed and session.agent.trajectory.reward == 0.0
    with pytest.raises(ConfigError, match="episode is over"):
        session.step()
    session.undo()
    assert session.agent.trajectory.reward is None and session.undo() is None
    assert session.step().commands == [TASK.expert[0]]


def test_a_player_obeys_lines_and_survives_mistakes(session: Session) -> None:
    play, out = player(session)
    for line in ("", "! cat nosuch", "u", "!", "bogus", "r"):
        try:
            play.obey(line)
        except ConfigError as error:
            out.write(str(error))
    text = out.getvalue()
    for part in ("agent", "you", "nosuch", "undone:", "needs a command", "Enter", "reward 1"):
        assert part in text
    assert play.exit_code() == 0


def test_markup_and_controls_in_an_observation_are_text(session: Session) -> None:
    play, out = player(session)
    play.obey("! echo '[bold]x[/nosuch]'")
    assert "[bold]x[/nosuch]" in out.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with an untrained model."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    return folder


@pytest.mark.parametrize("command", ["chat", "shell"])
def test_piped_input_drives_the_real_command(saved: Path, command: str) -> None:
    model = ["--model", str(saved)] if command == "chat" else []
    lines = {"chat": "\n! echo by-hand\nu\nq\n", "shell": "export A=carried; cd /tmp\necho $A; pwd\ncat nosuch\n"}
    arguments = [sys.executable, "-m", "mini_rome.cli", command, TASK.name, *model, "--sandbox", "sim"]
    done = subprocess.run(arguments, input=lines[command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or "Traceback" not in done.stderr
    parts = {"chat": ("simulated", "agent", "by-hand", "undone:"), "shell": ("carried", "/tmp", "[exit 1]")}
    for part in parts[command]:
        assert part in done.stdout
