"""A small agent that runs inside a box: chat completions over plain HTTP, commands by bash, no package needed.

It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment and `task.json` (model, messages, tools) in the folder
that its one argument names. The model sees what the built-in loop shows: a fresh shell per call whose directory and
exports carry over, outputs shaped by the same code. Not the same: the words for a call that cannot be parsed and
for a timeout; a process that leaves its session outlives its step, though never the episode.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mini_rome.sandbox.output import canonical_bash, keep_ends, shape

Json = dict[str, Any]
STEP_S, RAW_BYTES, SHOWN_BYTES = 30.0, 1 << 20, 16 << 10  # as `Limits` has them
PRIVATE = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PYTHONPATH")  # not for the commands of the model
SHELL_OWN = ("OLDPWD", "SHLVL", "_")
# One line, so that bash's messages count the command's lines from 1.
STEP = """builtin trap '{ builtin pwd; builtin printf "\\0"; /usr/bin/env -0; } >&%d' EXIT; builtin eval "$1" """


class Shell:
    """Runs commands one by one; the working directory and exported variables carry over."""

    def __init__(self) -> None:
        self.cwd = os.getcwd()
        self.env = {name: value for name, value in os.environ.items() if name not in PRIVATE}

    def run(self, command: str) -> tuple[str, str]:
        """(output as the model sees it, what went wrong in brackets or "")."""
        state = os.memfd_create("state")
        process = subprocess.Popen(
            ["bash", "-c", STEP % state, "bash", command], executable="/bin/bash", cwd=self.cwd,
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=[state],
        )  # fmt: skip
        output = bytearray()
        reader = threading.Thread(target=_read, args=(process, output), daemon=True)
        reader.start()
        try:
            code, status = process.wait(STEP_S), ""
        except subprocess.TimeoutExpired:
            code, status = 124, "[timed out]"
        _kill(process)
        reader.join(0.5)  # a process that left the session may still hold the pipe
        if len(output) > RAW_BYTES:
            status = "[output limit]"
        elif not status and code:
            status = f"[exit {128 - code if code < 0 else code}]"
        self._carry(os.pread(state, 1 << 20, 0))
        os.close(state)
        data = canonical_bash(bytes(output))
        return shape(*keep_ends(data, RAW_BYTES), len(data), SHOWN_BYTES)[0], status

    def _carry(self, reported: bytes) -> None:
        """Take over directory and exports; where the shell said nothing, all stays as it was."""
        cwd, _, rest = reported.partition(b"\n\0")
        if cwd.startswith(b"/"):
            pairs = (pair.partition("=") for pair in os.fsdecode(rest).split("\0"))
            self.env = {name: value for name, _, value in pairs if name.isidentifier() and name not in SHELL_OWN}
            self.cwd = os.fsdecode(cwd)
        if not os.path.isdir(self.cwd):
            self.cwd = "/app"


def _read(process: subprocess.Popen[bytes], output: bytearray) -> None:
    """All that the step writes, up to the cap; what writes more is killed."""
    assert process.stdout is not None
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        output += chunk
        if len(output) > RAW_BYTES:
            _kill(process)
            return


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def ask(url: str, token: str, body: Json) -> Json | None:
    """The model's choice; None when the episode is over. Exits with a message where the proxy refuses otherwise."""
    parts = urlsplit(url)
    wire = http.client.HTTPConnection(parts.hostname or "", parts.port)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    wire.request("POST", f"{parts.path}/chat/completions", json.dumps(body), headers)
    response = wire.getresponse()
    found = json.loads(response.read())
    wire.close()
    if response.status == 200:
        return found["choices"][0]
    if response.status == 410 or found["error"]["code"] == "context_length_exceeded":
        return None
    sys.exit(f"{response.status}: {found['error']['message']}")


def act(shell: Shell, choice: Json) -> tuple[str, bool]:
    """Run the calls of one response in order: (the observation, whether it submits)."""
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] == "length":
        return "[cut by the length limit]", False
    if not calls:
        return "[no tool call]", False
    outputs: list[str] = []
    failure = ""
    for call in calls:
        if call["function"]["name"] == "submit":
            return "", True
        output, failed = shell.run(json.loads(call["function"]["arguments"])["command"])
        outputs.append(output.rstrip("\n"))
        failure = failure or failed
    text = "\n".join(output for output in outputs if output)
    return "\n".join(part for part in (text if text.strip("\n") else "", failure) if part), False


def main() -> None:
    task = json.loads((Path(sys.argv[1]) / "task.json").read_text())
    url, token = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    shell, messages = Shell(), task["messages"]
    while True:
        choice = ask(url, token, {"model": task["model"], "messages": messages, "tools": task["tools"]})
        if choice is None:
            return
        observation, submitted = act(shell, choice)
        if submitted:
            return
        messages.append({name: value for name, value in choice["message"].items() if value is not None})
        for index, call in enumerate(choice["message"].get("tool_calls") or [{"id": "none"}]):
            content = "" if index else observation  # the calls of a response are one chunk with one observation
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


if __name__ == "__main__":
    main()
