"""`mini-rome tasks new`: a task folder that has every file and proves nothing yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mini_rome.errors import ConfigError
from mini_rome.runs import writing
from mini_rome.tasks.choice import SHIPPED

CANARY = "mini-rome-canary 7f0a1b9e-mini-tasks-do-not-train"
TOML = """schema_version = "1.0"

[task]
name = "{name}"
description = ""
authors = []
keywords = []

[metadata]
difficulty = "easy" # easy, medium or hard
category = "data-processing" # one of the eight domains, see: mini-rome tasks stats
tags = []
language = "en"
inputs = ["input.txt"] # what a solution must leave as it is, from environment/fixtures
canary = "{canary}"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 120.0

[environment]
cpus = 1
memory_mb = 512
storage_mb = 1024
"""
TESTS = '''"""Eight checks or more of what is in /app; `read` and `run` (conftest.py) act as the agent."""


def test_the_answer_is_there(read):
    assert read("/app/answer.txt").strip()
'''
FILES: Mapping[str, str] = {
    "task.toml": TOML,
    "instruction.md": "What is to be done with /app/input.txt, naming every file that a check looks at.\n\n"
    "<!-- {canary} -->\n",
    "environment/Dockerfile": "ARG BASE=mini-rome/tools:latest\nFROM ${{BASE}}\nWORKDIR /app\nCOPY fixtures /app/\n",
    "environment/fixtures/input.txt": "one\ntwo\n",
    "solution/solve.sh": "#!/bin/bash\n# The reference solution: earns 1.\nset -e\n",
    "solution/wrong_1.sh": "#!/bin/bash\n# A plausible mistake: passes half of the checks and earns 0.\nset -e\n",
    "solution/wrong_2.sh": "#!/bin/bash\n# Another plausible mistake.\nset -e\n",
}


def new_task(name: str, into: str | Path) -> Path:
    """Make the folder `into/name`. Raises ConfigError: a bad name, a taken place, no checkout to copy from."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(f"task name {name!r}: small letters, digits and single hyphens, such as log-merge")
    folder, common = Path(into) / name, SHIPPED / "_common"
    if folder.exists():
        raise ConfigError(f"{folder} exists already: name another task, or delete it")
    if not common.is_dir():
        raise ConfigError(f"{common} is missing: a new task copies its verifier from a checkout of the project")
    with writing(folder):
        for path, text in FILES.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.format(name=name, canary=CANARY), "utf-8")
        (folder / "tests").mkdir()
        for path in ("test.sh", "conftest.py"):
            (folder / "tests" / path).write_bytes((common / path).read_bytes())
        (folder / "tests" / "test_outputs.py").write_text(TESTS, "utf-8")
    return folder
