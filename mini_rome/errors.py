"""Errors a user can act on: each message names the thing, its value and the way on."""


from __future__ import annotations

import errno

OF_FILES = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENOSPC, errno.EDQUOT),
}


def about_file(error: OSError) -> str | None:
    """A line on a file that could not be read or written; None where the error is of another kind.

    >>> about_file(PermissionError(13, "Permission denied", "/sys/x.csv"))
    '/sys/x.csv: Permission denied'
    >>> about_file(TimeoutError(110, "Connection timed out"))
    """
    known = error.errno in OF_FILES and error.filename is not None
    return f"{error.filename}: {error.strerror}" if known else None


class MiniRomeError(Exception):
    """Base of all errors raised on purpose; the command line prints its text without a traceback."""


class ConfigError(MiniRomeError):
    """An option is unknown, out of range, or cannot go with another one."""


class SandboxError(MiniRomeError):
    """The sandbox failed, not the agent. Never scored as a reward."""


class SandboxUnavailable(SandboxError):
    """No sandbox engine answered. Says what was tried, why it failed and the ways on."""


class ImageMissing(SandboxError):
    """The image is not on this engine. Says the exact command that builds it."""


class SandboxDead(SandboxError):
    """The container went away. Says which, the cause and the step."""


class SandboxClosed(SandboxError):
    """The sandbox was closed by its owner, perhaps from another thread during a step."""


class SandboxFileError(SandboxError):
    """A read or write inside the box was refused. Says the path and why."""


class SnapshotRefused(SandboxFileError):
    """The work dir is beyond the caps or holds what no snapshot may: the agent's doing, not the sandbox's."""


class CommandTooLong(SandboxError):
    """The command exceeds the transport's limit. Says the limit."""


class LimitNotEnforced(SandboxError):
    """A limit that the engine cannot enforce was asked for. Says which."""


class UnsafeTask(SandboxError):
    """A task asks for a setting that breaks the isolation. Says the key."""


class VerifierError(SandboxError):
    """The verifier crashed, hung or wrote no valid reward. The reward is None, never 0."""


class StartMismatch(SandboxError):
    """A restored start state differs from the recorded one; the start is skipped, never trained on."""


class ToolRefused(MiniRomeError):
    """A task's own tool refused a call: the agent's doing. Becomes an observation with this exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RecordError(MiniRomeError):
    """A trajectory record cannot be read or used. Says the file, the line or row, and what is wrong with it."""


class SamplerError(MiniRomeError):
    """The engine that generates tokens failed. Says which, what happened and how to go on."""


class ParityError(SamplerError):
    """After a sync the sampler's weights are not the trainer's. Says what differs and what to look at."""
