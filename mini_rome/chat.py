"""`mini-rome chat` and `mini-rome shell`: a trained agent watched or stepped by hand, and a box looked into.

A chat is the same agent loop as in training. Before every chunk the box's state is kept, so that a chunk can be
undone and another one tried from the same state: the move that rollback makes, by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from mini_rome.agent import Agent
from mini_rome.call_formats import chat_format
from mini_rome.env import Env
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.experts import Start
from mini_rome.model import load_model
from mini_rome.runs import checkpoint
from mini_rome.sampler.base import Completion, Sampler, SamplingParams
from mini_rome.sampler.transformers import TransformersSampler
from mini_rome.sandbox import Pool
from mini_rome.tasks.choice import find_task
from mini_rome.trace import ChatFormat, shown
from mini_rome.types import Snapshot, Turn

HELP = """\
Enter       let the agent write its next chunk
! COMMAND   write the next chunk yourself, with this command
s           submit yourself
u           undo the last chunk
r           let the agent run to the end
t           show the task
q           quit"""


@dataclass
class Session:
    """One episode under a person's hands. `before[t]` is the box's state before chunk t."""

    agent: Agent
    sampler: Sampler
    before: list[Snapshot] = field(default_factory=list)

    @classmethod
    def open(cls, env: Env, form: ChatFormat, sampler: Sampler, params: SamplingParams, seed: int = 0) -> Session:
        """A session at the initial state of the environment's task. The caller closes env."""
        trajectory = Start(env.task).open(form, env, seed, episode=0)
        return cls(Agent(form, env, trajectory, params, key=(seed, 0)), sampler)

    @property
    def turns(self) -> list[Turn]:
        return self.agent.trajectory.turns

    def step(self) -> Turn:
        """Let the agent write the next chunk."""
        self._keep()
        self.agent.step(self.sampler)
        return self.turns[-1]

    def by_hand(self, command: str | None) -> Turn:
        """Write the next chunk: one command, or `submit` for None."""
        self._keep()
        form = self.agent.chat
        ids = submission(form) if command is None else form.response(command, task=self.agent.trajectory.task)
        self.agent.execute(Completion(ids, [0.0] * len(ids), self.sampler.version))
        self.turns[-1].source = "expert"
        return self.turns[-1]

    def undo(self) -> Turn | None:
        """Bring box and context back to the state before the last chunk; None when there is none."""
        if not self.turns:
            return None
        turn, trajectory = self.turns.pop(), self.agent.trajectory
        self.agent.env.reset(trajectory.seed, start=self.before.pop(), turns=len(self.turns))
        self.agent.done, trajectory.reward, trajectory.reason = False, None, ""
        self.sampler.forget([trajectory.episode])
        return turn

    def _keep(self) -> None:
        if self.agent.done:
            raise ConfigError("the episode is over: u undoes the last chunk, q quits")
        self.before.append(self.agent.env.box.snapshot())


def submission(form: ChatFormat) -> list[int]:
    """The ids of a response that only submits, stop token included."""
    return form.rebuilt("", ["submit"])


def chat(task_name: str, model: str, backend: str, temperature: float, seed: int, watch: bool) -> int:
    """The verb `chat`: 0 when the episode ended with reward 1 or the person quit, 1 when it failed."""
    task = find_task(task_name)
    weights, tokenizer = load_model(checkpoint(model))
    form = chat_format(tokenizer)
    sampler = TransformersSampler(weights, form.stop_id)
    with Pool(backend=backend, size=1) as pool, Env(task, pool) as env:
        session = Session.open(env, form, sampler, SamplingParams(temperature=temperature), seed)
        return Player(session, Console()).play(watch)


class Player:
    """Reads what the person wants and shows what happened."""

    def __init__(self, session: Session, console: Console) -> None:
        self.session = session
        self.console = console

    def play(self, watch: bool = False) -> int:
        """Until the person quits, input ends, or (watching) the episode is over."""
        self.show_task()
        if watch:
            self.run()
            return self.exit_code()
        self.console.print(HELP, style="dim", markup=False)
        for line in lines(self.console, "> "):
            if line.strip() in ("q", "quit"):
                break
            try:
                self.obey(line)
            except MiniRomeError as error:
                self.console.print(str(error), style="yellow", markup=False)
        return self.exit_code()

    def exit_code(self) -> int:
        agent = self.session.agent
        return 1 if agent.done and agent.trajectory.reward != 1.0 else 0

    def obey(self, line: str) -> None:
        """One line of input."""
        word = line.strip()
        if not word:
            self.show(self.session.step())
        elif word.startswith("!"):
            self.by_hand(word[1:].strip())
        elif word in ("s", "submit"):
            self.show(self.session.by_hand(None))
        elif word in ("u", "undo"):
            turn = self.session.undo()
            said = "nothing to undo" if turn is None else f"undone: {turn.text}"
            self.console.print(said, style="yellow", markup=False)
        elif word in ("r", "run"):
            self.run()
        elif word in ("t", "task"):
            self.show_task()
        else:
            self.console.print(HELP, style="dim", markup=False)

    def by_hand(self, command: str) -> None:
        if not command:
            raise ConfigError("! needs a command, for example: ! ls")
        self.show(self.session.by_hand(command))

    def run(self) -> None:
        while not self.session.agent.done:
            self.show(self.session.step())

    def show_task(self) -> None:
        agent = self.session.agent
        task, backend = agent.trajectory.task, agent.trajectory.backend
        where = "the simulated sandbox" if backend == "sim" else f"a {backend} sandbox"
        head = f"{task.name} in {where}; the expert needs {task.chunks} chunks"
        self.console.print(head, style="bold", markup=False)
        self.console.print(task.instruction, style="cyan", markup=False)

    def show(self, turn: Turn) -> None:
        """One chunk and its answer; at the end the verdict."""
        who = "agent" if turn.source == "policy" else "you"
        self.console.print(Text.assemble((f"{len(self.session.turns):>3} {who:<5} ", "bold"), turn.text))
        if turn.observation:
            self.console.print(Text(turn.observation), style="dim")
        agent = self.session.agent
        if agent.done:
            reward = agent.trajectory.reward
            style = "bold green" if reward == 1.0 else "bold red"
            said = "not scored, the sandbox failed" if reward is None else f"reward {reward:g}"
            self.console.print(f"{said}: {agent.trajectory.reason}", style=style, markup=False)


def shell(task_name: str, backend: str) -> int:
    """The verb `shell`: each line is a command of its own, as the agent's are; cwd and exports carry over."""
    task = find_task(task_name)
    console = Console()
    with Pool(backend=backend, size=1) as pool, Env(task, pool) as env:
        env.reset()
        console.print(task.instruction, style="cyan", markup=False)
        for line in lines(console, "$ "):
            if line.strip() in ("exit", "quit"):
                break
            if line.strip():
                console.print(Text(shown(env.box.exec(line))))
    return 0


def lines(console: Console, prompt: str) -> Iterator[str]:
    """Lines of standard input until it ends; a prompt only where a person sits."""
    while True:
        if sys.stdin.isatty():
            console.print(prompt, end="", markup=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")
