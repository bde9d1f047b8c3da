"""Many episodes at once: the sampler answers whatever episodes are ready, the sandboxes run meanwhile.

There is no barrier per turn on a real sandbox: a slow command holds up its own episode only. On the simulated one
commands take no time, so all episodes go in step and a run is reproducible bit for bit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mini_rome.agent import Agent
from mini_rome.context import Context, ContextConfig, ContextEnv
from mini_rome.env import Env
from mini_rome.errors import ConfigError, SandboxError
from mini_rome.experts import Start
from mini_rome.groups import Race
from mini_rome.resample import refill
from mini_rome.sampler.base import Sampler, SamplingParams
from mini_rome.sandbox import Pool
from mini_rome.timeline import span
from mini_rome.trace import ChatFormat
from mini_rome.types import Trajectory

Progress = Callable[[int, int], None]

ATTEMPT = 1 << 20  # episode numbers of a resampled rollout: the same start and seed, other random numbers
GATHER_S = 0.05  # how long the sampler waits for more episodes once one is ready (docker only)


class Stopped(Exception):
    """The rollouts were told to end before they were done."""


class Rollout:
    """Runs episodes from given starts with one sampler and one pool of boxes.

    stop: where another thread sets it, `collect` closes its episodes at their next turn and raises Stopped.
    """

    cancels = True  # whether an episode can be cut at a turn

    def __init__(
        self,
        chat: ChatFormat,
        sampler: Sampler,
        pool: Pool,
        *,
        seed: int = 0,
        extra_turns: int = 4,
        max_context: int = 4096,
        resample_cap: int = 2,
        max_infra_share: float = 0.05,
        context: ContextConfig | None = None,
    ) -> None:
        """extra_turns: responses allowed beyond the expert's K. resample_cap: tries for a rollout that the
        infrastructure spoiled. max_infra_share: above it (of 40 episodes or more) the run stops with a message.
        context: features of the agent runtime; None: the bare loop. Further chains: see `Trajectory.samples`."""
        self.chat, self.sampler, self.pool, self.seed = chat, sampler, pool, seed
        self.extra_turns, self.max_context = extra_turns, max_context
        self.resample_cap, self.max_infra_share = resample_cap, max_infra_share
        self.context = context
        self.episodes = 0
        self.infra: Counter[str] = Counter()
        self.cancelled = 0  # by redundancy
        self.stop = threading.Event()
        self.turn: Callable[[], AbstractContextManager[None]] = nullcontext  # on a shared device, see device.py

    @property
    def backend(self) -> str:
        return self.pool.backend

    def collect(
        self,
        starts: Sequence[Start],
        params: SamplingParams,
        *,
        step: int = 0,
        first_episode: int = 0,
        progress: Progress | None = None,
        redundancy: int = 0,
    ) -> list[Trajectory]:
        """One trajectory per start, in order; its randomness depends on (seed, step, episode, turn) alone.

        first_episode: number of the first episode in the whole step's plan, so that ranks draw what one rank would.
        redundancy: rollouts begun beyond those asked for, per group of equal starts; the first to finish are kept.
        Rollouts that the infrastructure spoiled are run again, then left with reward None.
        """
        if redundancy and not self.cancels:
            raise ConfigError(f"--rollout_redundancy {redundancy}: episodes of an external agent cannot be cut short")
        race = Race(starts, first_episode, redundancy)
        if redundancy:
            trajectories = self._race(race, params, step, progress)
        else:
            trajectories = self._run(race.episodes, params, step, progress)
        attempt = 0

        def again(indices: list[int]) -> list[Trajectory]:
            nonlocal attempt
            attempt += 1
            episodes = [(first_episode + index + attempt * ATTEMPT, starts[index]) for index in indices]
            return self._run(episodes, params, step, None)

        trajectories, causes = refill(trajectories, again, cap=self.resample_cap)
        self.episodes += len(starts)
        self._count_infra(causes)
        self._check_infra()
        return trajectories

    def _count_infra(self, causes: Counter[str]) -> None:
        for reason, count in causes.items():
            self.infra[reason.partition(":")[0]] += count  # what follows the colon differs from box to box

    def _check_infra(self) -> None:
        spoiled = sum(self.infra.values())
        if self.episodes >= 40 and spoiled > self.max_infra_share * self.episodes:
            causes = ", ".join(f"{cause}: {count}" for cause, count in self.infra.most_common())
            raise SandboxError(
                f"{spoiled} of {self.episodes} episodes were spoiled by the infrastructure, more than "
                f"{self.max_infra_share:.0%} ({causes}). Nothing was trained on them; see `mini-rome doctor`."
            )

    def _run(
        self, episodes: list[tuple[int, Start]], params: SamplingParams, step: int, progress: Progress | None
    ) -> list[Trajectory]:
        results = {t.episode: t for t in self._finishing(episodes, params, step, progress)}
        return [results[episode] for episode, _ in episodes]

    def _race(self, race: Race, params: SamplingParams, step: int, progress: Progress | None) -> list[Trajectory]:
        """More episodes than rows: cut those whose group is full."""
        for trajectory in self._finishing(race.episodes, params, step, progress, race.over):
            race.finish(trajectory)
        kept, lost = race.kept()
        self.cancelled += race.cancelled
        self._count_infra(Counter(trajectory.reason or "unknown" for trajectory in lost))
        return kept

    def _finishing(
        self, episodes: list[tuple[int, Start]], params: SamplingParams, step: int, progress: Progress | None,
        over: Callable[[int], bool] = lambda number: False,
    ) -> Iterator[Trajectory]:  # fmt: skip
        """Trajectories as they end. over: says of an episode's number that it is not wanted any more."""
        done = 0
        with self._workers(len(episodes)) as submit:
            size = max(1, self.pool.size)
            for begin in range(0, len(episodes), size):  # no more episodes at once than there are boxes
                part = [episode for episode in episodes[begin : begin + size] if not over(episode[0])]
                for trajectory in self._drive(part, params, step, submit, over):
                    done += 1
                    if progress is not None:
                        progress(done, len(episodes))
                    yield trajectory
        self.sampler.forget()

    @contextmanager
    def _workers(self, count: int) -> Iterator[Callable[..., Future]]:
        """A function that runs a call in a thread, or at once where the sandbox is simulated."""
        if self.pool.backend == "sim":
            yield _run_now
            return
        with ThreadPoolExecutor(max_workers=min(count, 32), thread_name_prefix="episode") as executor:
            yield executor.submit

    def _drive(
        self, episodes: list[tuple[int, Start]], params: SamplingParams, step: int, submit: Callable[..., Future],
        over: Callable[[int], bool],
    ) -> Iterator[Trajectory]:  # fmt: skip
        """Alternate between asking the sampler for the ready episodes and waiting for sandboxes."""
        running = {
            submit(_Runner.begin, self, number, start, params, step): number for number, start in episodes
        }
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            if len(done) < len(running):  # let those that are about to finish join the batch
                done, _ = wait(running, timeout=GATHER_S)
            # In the order of the plan, whatever thread was first: the same batch gives the same rounding.
            runners = sorted((future.result() for future in done), key=lambda runner: runner.number)
            for future in done:
                del running[future]
            if self.stop.is_set():
                for runner in [*runners, *(future.result() for future in running)]:
                    runner.env.close()
                raise Stopped
            yield from (runner.trajectory for runner in runners if runner.done)
            ready = []
            for runner in runners:
                if runner.done or over(runner.number):
                    runner.env.close()
                    self.sampler.forget([runner.number])
                else:
                    ready.append(runner)
            requests = [runner.agent.request() for runner in ready]
            with self.turn(), span("generate"):
                completions = self.sampler.generate(requests, params)
            for runner, completion in zip(ready, completions, strict=True):
                running[submit(runner.act, completion)] = runner.number


class _Runner:
    """One episode: its environment and agent, and the trajectory whatever happens to them."""

    def __init__(self, number: int, env: Env, trajectory: Trajectory) -> None:
        self.number, self.env, self.trajectory = number, env, trajectory
        self.agent: Agent
        self.done = False

    @classmethod
    def begin(cls, rollout: Rollout, number: int, start: Start, params: SamplingParams, step: int) -> _Runner:
        turns = start.task.chunks + rollout.extra_turns
        if rollout.context is None:
            context, env = Context(), Env(start.task, rollout.pool, max_turns=turns)
        else:
            context = Context(rollout.context)
            env = ContextEnv(start.task, rollout.pool, context, max_turns=turns)
        prompt_ids = rollout.chat.prompt(start.task.instruction, start.task)
        empty = Trajectory(task=start.task, prompt_ids=prompt_ids, turns=[], backend=rollout.backend,
                           seed=rollout.seed, episode=number)  # fmt: skip
        runner = cls(number, env, empty)
        with runner.guard():
            runner.trajectory = start.open(rollout.chat, env, rollout.seed, number)
            runner.agent = Agent(rollout.chat, env, runner.trajectory, params, (rollout.seed, step),
                                 rollout.max_context, context=context)
            if rollout.context is not None:
                runner.agent.inject()
        return runner

    def act(self, completion) -> _Runner:
        with self.guard():
            self.agent.execute(completion)
            self.done = self.agent.done
        if self.done:
            self.env.close()
        return self

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A sandbox that fails ends the episode unscored (reward None); it never becomes a reward of 0."""
        try:
            yield
        except SandboxError as error:
            for chain in self.trajectory.samples:
                chain.reward, chain.reason = None, type(error).__name__
            self.done = True
            self.env.close()


def _run_now(function: Callable, *args: object) -> Future:
    future: Future = Future()
    future.set_result(function(*args))
    return future
