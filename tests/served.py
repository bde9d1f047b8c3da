"""A vLLM server of a saved model in a process of its own, for the tests of the samplers that ask one."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel

from mini_rome.sampler import vllm_server
from mini_rome.sampler.vllm_server import server_command, server_environment


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def served(model: PreTrainedModel, folder: Path, adapters: int | None = None) -> Iterator[str]:
    """Its address, on a free port; its log is shown when it does not start. adapters: as for `server_command`."""
    model.save_pretrained(folder)
    port, log = free_port(), folder / "server.log"
    root = str(Path(vllm_server.__file__).parents[2])
    environment = os.environ | server_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [*server_command(str(folder), port, max_model_len=512, adapters=adapters),
               "--kv-cache-memory-bytes", str(2**28), "--enforce-eager"]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(300):
            if process.poll() is not None or healthy(port):
                break
            time.sleep(0.5)
        assert healthy(port), log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
