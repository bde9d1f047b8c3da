"""An environment on a sandbox: make, reset, step, close; Gymnasium's five-tuple promise (as in ROCK's GEM API).

The action is a whole response of the agent; the observation is the text it gets back. The reward is 0.0 until the
end, then the verifier's number in [0, 1], or None when the infrastructure failed. An episode that runs out of turns
is truncated and still verified.
"""

from __future__ import annotations

from typing import Any

from mini_rome.errors import ConfigError, SandboxError
from mini_rome.families import get_family
from mini_rome.sandbox import Pool, Sandbox
from mini_rome.sandbox.safety import Recorder
from mini_rome.sandbox.tree import initial_snapshot
from mini_rome.timeline import span
from mini_rome.tools import run_tool
from mini_rome.trace import Call, Response, parse_response, shown
from mini_rome.types import Snapshot, StepResult, Task, Verdict
from mini_rome.verify import verify_files

Info = dict[str, Any]


def combine(results: list[StepResult]) -> StepResult | None:
    """The calls of one response as one result: outputs in order, the first failure's exit code and status."""
    if len(results) <= 1:
        return results[0] if results else None
    failed = next((result for result in results if result.exit_code != 0 or result.status != "ok"), results[-1])
    return StepResult(
        output="\n".join(result.output.rstrip("\n") for result in results if result.output),
        exit_code=failed.exit_code,
        status=failed.status,
        truncated=any(result.truncated for result in results),
        wall_s=sum(result.wall_s for result in results),
        events=tuple(event for result in results for event in result.events),
        supported=all(result.supported for result in results),
    )


class Env:
    """One task in one box. `reset` may start in the middle of an expert's trajectory by a snapshot."""

    def __init__(self, task: Task, pool: Pool, max_turns: int | None = None, max_malformed: int = 3) -> None:
        """max_turns: responses until truncation; default K + 4, so that a few mistakes can be repaired.
        max_malformed: malformed responses in a row until truncation. Neither is in the paper."""
        self.task = task
        self.max_turns = task.chunks + 4 if max_turns is None else max_turns
        if self.max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}: must be at least 1")
        self.max_malformed = max_malformed
        self._pool = pool
        self._box: Sandbox | None = None
        self._turns = 0
        self._malformed = 0  # in a row
        self._over = True

    @property
    def box(self) -> Sandbox:
        """The sandbox of the running episode."""
        if self._box is None:
            raise ConfigError("the environment is not running: call reset() first")
        return self._box

    @property
    def turns_left(self) -> int:
        """Responses until truncation."""
        return self.max_turns - self._turns

    def reset(self, seed: int | None = None, start: Snapshot | None = None, turns: int = 0) -> tuple[str, Info]:
        """A clean box in the task's initial state, or in the state `start` after `turns` responses.

        seed is accepted for the Gymnasium promise; an instance has no randomness left once it is made.
        """
        with span("environment"):
            if self._box is None:
                self._box = self._pool.take()
            else:
                self._box.reset()
            self._box.restore(initial_snapshot(self.task.files) if start is None else start)
        self._turns, self._malformed, self._over = turns, 0, False
        return self.task.instruction, {"task": self.task.name, "backend": self._box.backend, "seed": seed}

    def step(self, action: str | Response) -> tuple[str, float | None, bool, bool, Info]:
        """Run the calls of one response. Returns observation, reward, terminated, truncated, info.

        info: result (StepResult or None), problem (why the response was malformed), submitted; at the end verdict.
        """
        if self._over:
            raise ConfigError("step() after the episode ended: call reset() first")
        response = parse_response(action, self.task) if isinstance(action, str) else action
        self._turns += 1
        self._malformed = self._malformed + 1 if response.problem else 0
        results, submitted = [], False
        for call in response.calls:
            if call.tool == "submit":
                submitted = True
                break
            with span("environment"):
                results.append(self._execute(call))
            if results[-1].infra:
                break
        result = combine(results)
        info: Info = {"result": result, "problem": response.problem, "submitted": submitted}
        if result is not None and result.infra:
            self._over = True
            info["verdict"] = Verdict(None, result.status)
            return "", None, False, True, info
        used_up = self._turns >= self.max_turns or self._malformed >= self.max_malformed
        truncated = used_up and not submitted
        observation = f"[{response.problem}]" if response.problem else shown(result) if result else ""
        if not (submitted or truncated):
            return observation, 0.0, False, False, info
        self._over = True
        info["verdict"] = self._verify()
        return observation, info["verdict"].reward, submitted, truncated, info

    def _execute(self, call: Call) -> StepResult:
        if call.tool == "bash" and self.task.offers_bash:
            return self.box.exec(call.command)
        return run_tool(self.task, self.box, call.tool, call.command)

    def give_up(self) -> Verdict:
        """End the episode from outside (a budget ran out) and judge what is there."""
        self._over = True
        return self._verify()

    def _verify(self) -> Verdict:
        try:
            with span("reward"):
                verdict = verify_files(self.task, self.box)
        except SandboxError as error:
            return Verdict(None, f"verifier_error: {error}")
        if isinstance(self.box.observer, Recorder):
            self.box.observer.keep(verdict.events)
        return verdict

    def close(self) -> None:
        """Give the box back; calling it again does nothing."""
        box, self._box, self._over = self._box, None, True
        if box is not None:
            with span("environment"):  # the pool resets it
                self._pool.give(box)

    def __enter__(self) -> Env:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OwnedEnv(Env):
    """An environment that also owns its pool of one box: what `make` returns."""

    def close(self) -> None:
        super().close()
        self._pool.close()


def make(family: str, chunks: int = 2, seed: int = 0, backend: str = "auto", max_turns: int | None = None) -> Env:
    """An environment for one instance of a family, with a box of its own.

    with make("notes", chunks=3) as env:
        instruction, info = env.reset()
        observation, reward, terminated, truncated, info = env.step("<tool_call>bash ls</tool_call>")
    """
    return OwnedEnv(get_family(family).make(seed, chunks), Pool(backend=backend, size=1), max_turns)


class TRLEnv:
    """The same environment in the shape of TRL's `environment_factory`: public methods are the model's tools.

    Subclasses give the tools. TRL makes one object per rollout; the dataset's columns `family`, `chunks` and `seed`
    reach `reset`. Use it with TRL's own tool loop; IPA uses `rollout.py`, which records token ids.
    """

    _calls_per_turn = 1  # TRL hands over each call of a response alone, so each is a turn here

    def __init__(self) -> None:
        self._env: Env | None = None
        self._reward: float | None = 0.0

    def reset(self, family: str, chunks: int, seed: int, backend: str = "auto", **_: object) -> str:
        """Start the instance that the row names; returns its instruction."""
        if self._env is not None:
            self._env.close()
        self._env, self._reward = make(family, chunks, seed, backend, (chunks + 4) * self._calls_per_turn), 0.0
        return self._env.reset()[0]

    def get_reward(self) -> float | None:
        """The verifier's reward; 0.0 when the episode was never finished, None when the infrastructure failed."""
        if self._env is not None:
            self._env.close()
            self._env = None
        return self._reward

    def _step(self, *calls: Call) -> str:
        if self._env is None:
            raise ConfigError("a tool was called before reset()")
        observation, self._reward, _, _, _ = self._env.step(Response(calls))
        return observation


class ToolEnv(TRLEnv):
    """The shell families: bash and submit."""

    def bash(self, command: str) -> str:
        """Run a shell command in the sandbox.

        Args:
            command: The command line to run.

        Returns:
            What it printed.
        """
        return self._step(Call("bash", command))

    def submit(self, command: str = "") -> str:
        """Say that the task is complete.

        Args:
            command: A last command line to run before; empty for none.

        Returns:
            What the last command printed.
        """
        return self._step(*([Call("bash", command)] if command else []), Call("submit"))
