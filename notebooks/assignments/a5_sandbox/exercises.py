"""Assignment 5: a safe `exec` and a verdict that cannot be tampered with.

An agent under training writes arbitrary commands. A step must be over when it is over, its output must not flood the
trainer, and its reward must come from nothing that the agent could have forged. The first exercise runs programs in
the box in which you are graded; in earnest such commands run in a container (mini_rome.sandbox), never on the host.
"""

from __future__ import annotations

from collections.abc import Callable

from mini_rome import verify
from mini_rome.course import process
from mini_rome.sandbox import output, tree


def run(command: str, seconds: float, cap: int) -> list:
    """Run one line of bash: [output, status, exit_code].

    output: bytes, stdout and stderr in the order they were written, the first `cap` of them. status: "ok", "timeout"
    (the command itself did not end in time: exit code 124) or "output_limit" (it wrote more than `cap`: 137). stdin
    is empty. When `run` returns, no process that the command started is alive, not even one in a session of its own
    (`setsid`) or in the background; what is left in the background is not waited for. A command that a signal ends
    has exit code 128 + its number. Return within a second of the end or the deadline.

    Hint: children inherit their environment, and /proc/PID/environ shows it.
    """
    return list(process.run_capped(command, seconds, cap)[:3])


def ends(data: bytes, cap: int) -> list[bytes]:
    """[head, tail] to keep of an output: all of it and b"" if it has at most `cap` bytes, else its two ends.

    The tail has cap // 2 bytes, the head the rest of the cap: b"abcdefg" with 5: [b"abc", b"fg"].
    """
    return list(output.keep_ends(data, cap))


def files_of(archive: bytes) -> dict[str, bytes]:
    """{path: contents} of the regular files in a tar of the work dir, read without extracting it.

    "./a/b" is "a/b". Hard links have the contents of the file they name; symbolic links are left out. Raises
    SnapshotRefused (mini_rome.errors) for a path that is absolute or has "..", for a device, fifo or socket, and for
    a hard link to what was not seen before.
    """
    return tree.files_of_tar(archive)


def reward_of(files: dict[str, bytes]) -> float:
    """The reward that a verifier wrote, {name: contents}: reward.txt (one number) or reward.json, not both.

    reward.json: the key "reward", or else its only number; a key that appears twice is malformed. Raises
    VerifierError (mini_rome.errors) for anything that is no number in [0, 1]: none, both, empty, true, NaN, "1_0",
    1.5, not UTF-8. A verifier that crashed must never become a reward of 0.
    """
    return verify.read_reward(files)


def test_task(implementation: Callable[[dict[str, str]], float]) -> None:
    """A test: it must pass for a right implementation and fail, by `assert`, for a wrong one.

    implementation(files) is the check of one task: {path: contents} of the work dir at the end -> reward. The task:
    "put the lines of names.txt into sorted.txt, in order". At the start there is only names.txt, with
    "pear\\nfig\\nlime\\n", and it must be unchanged at the end; solved, there is sorted.txt too, with
    "fig\\nlime\\npear\\n".

    A bug that was found in the wild: a task that an agent passes by doing nothing.
    """
    start, solved = {"names.txt": "pear\nfig\nlime\n"}, "fig\nlime\npear\n"
    assert implementation({**start, "sorted.txt": solved}) == 1
    wrong = [start, {}, {"sorted.txt": solved}, {"names.txt": solved, "sorted.txt": solved}]
    wrong += [{**start, "sorted.txt": text} for text in ("", start["names.txt"], "fig\n", "fig\nlime\npear\nplum\n")]
    assert all(implementation(files) == 0 for files in wrong)
