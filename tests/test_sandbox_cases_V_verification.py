"""Cases V: verification. What the agent does to its box, or leaves running in it, never changes a verdict."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from boxes import pool, within

from mini_rome.env import Env
from mini_rome.sandbox import Sandbox
from mini_rome.sandbox.docker import DockerSandbox
from mini_rome.sandbox.hardening import ROOT_TASK
from mini_rome.tasks.harbor import TaskFolder, load
from mini_rome.types import Task, Verdict
from mini_rome.verify import verify_files
from mini_rome.verify_fresh import task_limits, verify_fresh, verify_in_place

pytest_plugins = ("box_fixtures",)

TOOLS = "mini-rome/tools:latest"
WORD_COUNT = Path(__file__).parent / "data" / "tasks" / "word-count"
SOLUTION = (WORD_COUNT / "solution" / "solve.sh").read_text()
FAKE_PYTHON = "#!/usr/bin/env python3\n"


def wants_42(files: Mapping[str, bytes]) -> Verdict:
    good = files.get("answer.txt") == b"42\n"
    return Verdict(float(good), "" if good else "answer.txt is missing or wrong")


TASK = Task("t", "f", "d", "write 42 to answer.txt", {"in.txt": "42\n"}, ("cp in.txt answer.txt",), wants_42)


@pytest.fixture
def word_count() -> TaskFolder:
    return load(WORD_COUNT)


def with_test(task: TaskFolder, folder: Path, script: str, seconds: float = 60.0) -> TaskFolder:
    """The task with another test.sh."""
    shutil.copytree(task.folder, folder, dirs_exist_ok=True)
    (folder / "tests" / "test.sh").write_text(script)
    return replace(task, folder=folder, verifier_timeout_s=seconds)


def fresh(box: Sandbox, task: TaskFolder, image: str = TOOLS) -> Verdict:
    box.sweep()
    return verify_fresh(task, box.snapshot(), image)


PLANTS = """
mkdir -p /logs/verifier /tests tests 2>/dev/null
echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json; echo 'exit 0' > /tests/test.sh
echo 1 > reward.txt; echo '{"reward": 1}' > reward.json; echo '<testsuite failures="0"/>' > junit.xml
echo 1 > tests/reward.txt; true
"""


def test_case_V01_planted_rewards_do_not_count_on_the_host(box: Sandbox) -> None:
    box.exec(PLANTS)
    verdict = verify_files(TASK, box)
    assert (verdict.reward, verdict.verifier) == (0.0, "host-check")
    assert "reward.txt" in verdict.events[0].evidence


@pytest.mark.docker
def test_case_V01_planted_rewards_do_not_count_in_a_fresh_container(
    tools_box: Sandbox, word_count: TaskFolder
) -> None:
    result = tools_box.exec(PLANTS)
    assert "tamper" in {event.kind for event in result.events}
    verdict = fresh(tools_box, word_count)
    assert (verdict.reward, verdict.verifier) == (0.0, "fresh-container")


TROJANS = """
set -e
cat > /tmp/trojan <<'X'
#!/usr/bin/python3 -IS
open("/logs/verifier/reward.txt", "w").write("1")
X
chmod 755 /tmp/trojan
for name in timeout curl pytest tr cat; do rm -f /usr/bin/$name; cp /tmp/trojan /usr/bin/$name; done
cp /tmp/trojan /usr/bin/bash.new && mv -f /usr/bin/bash.new /usr/bin/bash
"""


@pytest.mark.docker
def test_case_V02_replaced_programs_are_never_executed_by_the_verifier(word_count: TaskFolder) -> None:
    with DockerSandbox.start(TOOLS, task_limits(word_count), profile=ROOT_TASK) as box:
        assert box.exec(TROJANS).exit_code == 0
        snapshot = box.snapshot()
        tamperable = verify_in_place(word_count, box)
    assert verify_fresh(word_count, snapshot, TOOLS).reward == 0.0
    # the control: in the agent's own box the trojan earns the reward, which is why that verdict is labelled
    assert (tamperable.reward, tamperable.verifier) == (1.0, "in-place (tamperable)")


PYTHON_PLANTS = """
echo 'import sys; sys.exit(0)' | tee sitecustomize.py usercustomize.py json.py subprocess.py > os.py
echo 'raise SystemExit(0)' > conftest.py; printf '[pytest]\\naddopts = --co\\n' > pytest.ini
echo 'import os; os._exit(0)' > evil.pth
mkdir -p __pycache__ && echo junk > __pycache__/json.cpython-311.pyc
echo 'export PYTHONPATH=/app BASH_ENV=/app/e LD_PRELOAD=/app/e.so' | tee ~/.bashrc ~/.bash_profile > ~/.profile
echo 'echo 1 > /logs/verifier/reward.txt; exit 0' > e
export BASH_ENV=/app/e LD_PRELOAD=/app/e.so PYTHONPATH=/app PYTHONSTARTUP=/app/json.py
"""
PYTEST = """#!/bin/bash
cat > /tests/t.py <<'PY'
import json, os, subprocess
def test_count():
    done = subprocess.run([os.environ["AS_AGENT"], "/app/count.sh", "/app/in"], capture_output=True)
    assert done.stdout.split() == [b"3"]
PY
cd /tests
if python3 -I -m pytest -q -p no:cacheprovider t.py >&2; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.mark.docker
@pytest.mark.parametrize("solved", [False, True], ids=["unsolved is 0", "solved is 1"])
def test_case_V03_python_and_shell_plants_do_not_steer_the_verifier(
    tools_box: Sandbox, word_count: TaskFolder, tmp_path: Path, solved: bool
) -> None:
    if solved:
        assert tools_box.exec(SOLUTION + "\necho a b c > in").exit_code == 0
    tools_box.exec(PYTHON_PLANTS)
    assert fresh(tools_box, with_test(word_count, tmp_path, PYTEST)).reward == float(solved)


def test_case_V03_the_tamper_event_lists_the_planted_files(box: Sandbox) -> None:
    box.exec(PYTHON_PLANTS)
    (event,) = verify_files(TASK, box).events
    assert (event.kind, event.source) == ("tamper", "file")
    listed = set(event.evidence.split(", "))
    assert {
        "conftest.py",
        "pytest.ini",
        "sitecustomize.py",
        "json.py",
        "evil.pth",
        "__pycache__/json.cpython-311.pyc",
    } <= listed


REWRITERS = [
    "setsid sh -c 'while :; do echo 42 > /app/answer.txt; done' >/dev/null 2>&1 &",
    "(trap '' TERM HUP; while sleep 0.01; do cp in.txt answer.txt; done) >/dev/null 2>&1 & disown",
]


@pytest.mark.docker
@pytest.mark.parametrize("rewriter", REWRITERS)
@pytest.mark.parametrize("background", ["kill", "keep"])
def test_case_V05_nothing_of_the_agent_lives_while_it_is_judged(
    docker_box: Sandbox, rewriter: str, background: str
) -> None:
    docker_box.background = background
    docker_box.exec("echo 42 > in.txt")
    docker_box.exec(rewriter)
    if background == "keep":
        written = docker_box.exec('until [ "$(cat answer.txt 2>/dev/null)" = 42 ]; do :; done; echo yes', timeout=9)
        assert written.output == "yes\n"
    docker_box.sweep()
    docker_box.exec("rm -f answer.txt; sleep 0.2")
    before = docker_box.snapshot().tree_hash
    assert verify_files(TASK, docker_box).reward == 0.0
    time.sleep(0.2)
    assert docker_box.snapshot().tree_hash == before


@pytest.mark.docker
def test_case_V05_a_candidate_that_leaves_a_daemon_neither_stalls_nor_forges(
    tools_box: Sandbox, word_count: TaskFolder
) -> None:
    daemon = "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; echo 5; done' 2>/dev/null &"
    tools_box.exec(f"printf '#!/bin/bash\\n{daemon}\\nexit 0\\n' > count.sh; chmod +x count.sh")
    with within(15):
        assert fresh(tools_box, word_count).reward == 0.0


BROKEN = {
    "crashes": ("exit 1", "neither"),
    "prints only": ("echo 1.0", "neither"),
    "dies of a signal": ("kill -9 $$", "137"),
    "out of memory": ("x=$(head -c 900000000 /dev/zero | tr '\\0' a); echo 1 > /logs/verifier/reward.txt", "test.sh"),
    "hangs": ("sleep 600", "did not end within 2 s"),
    "hangs with a reward": ("echo 1 > /logs/verifier/reward.txt; sleep 600", "did not end within 2 s"),
    "floods": ("yes", "did not end"),
    "kills its parent": ("kill -9 $PPID; kill -9 1; kill -9 -1", "verifier_error"),
    "syntax error": ("if", "neither"),
}


@pytest.mark.docker
@pytest.mark.parametrize("case", BROKEN)
def test_case_V07_a_verifier_that_fails_is_none_never_zero(
    tools_box: Sandbox, word_count: TaskFolder, tmp_path: Path, case: str
) -> None:
    script, said = BROKEN[case]
    verdict = fresh(tools_box, with_test(word_count, tmp_path, script, seconds=2.0 if "hang" in case else 30.0))
    if case == "out of memory" and verdict.reward is not None:
        pytest.fail(f"a verifier out of memory gave {verdict.reward}")
    assert verdict.reward is None
    assert verdict.reason.startswith("verifier_error: ") and said in verdict.reason


@pytest.mark.docker
def test_case_V07_a_missing_image_is_none(tools_box: Sandbox, word_count: TaskFolder) -> None:
    verdict = fresh(tools_box, word_count, image="no-such:1")
    assert verdict.reward is None and "no-such:1" in verdict.reason


def test_case_V07_an_environment_passes_a_failed_verifier_on_as_none(box: Sandbox, backend: str) -> None:
    def crashes(files: Mapping[str, bytes]) -> Verdict:
        raise ZeroDivisionError("in the check")

    env = Env(replace(TASK, check=crashes), pool(backend))
    env.reset()
    _, reward, terminated, _, info = env.step("<tool_call>submit</tool_call>")
    env.close()
    assert reward is None and terminated
    assert "verifier_error" in info["verdict"].reason


BAD_REWARDS = {
    "NaN": "echo nan > $R.txt",
    "inf": "echo inf > $R.txt",
    "negative": "echo -3 > $R.txt",
    "huge": "echo 1e9 > $R.txt",
    "two": "printf '1.0\\n2.0' > $R.txt",
    "true": "echo true > $R.txt",
    "empty": ": > $R.txt",
    "both": "echo 1 > $R.txt; echo '{\"reward\": 1}' > $R.json",
    "json true": "echo '{\"reward\": true}' > $R.json",
    "json NaN": "echo '{\"reward\": NaN}' > $R.json",
    "a directory": "mkdir $R.txt",
    "a link": "ln -s /etc/hostname $R.txt",
}


@pytest.mark.docker
@pytest.mark.parametrize("case", BAD_REWARDS)
def test_case_V08_a_bad_reward_is_a_verifier_error(
    tools_box: Sandbox, word_count: TaskFolder, tmp_path: Path, case: str
) -> None:
    verdict = fresh(tools_box, with_test(word_count, tmp_path, f"R=/logs/verifier/reward\n{BAD_REWARDS[case]}\n"))
    assert verdict.reward is None
    assert verdict.reason.startswith("verifier_error: ")


HONEST = """
mkdir -p 'deep er/a/b' empty && head -c 5000000 /dev/zero | tr '\\0' x > 'deep er/a/b/five mb.bin'
printf '#!/bin/bash\\nwc -w < "$1"\\n' > 'deep er/real count.sh' && chmod +x 'deep er/real count.sh'
printf '#!/bin/bash\\n[ $(wc -c < "/app/deep er/a/b/five mb.bin") = 5000000 ] && exec "/app/link" "$1"\\n' > count.sh
ln -s 'deep er/real count.sh' link && chmod 700 count.sh
"""


@pytest.mark.docker
@pytest.mark.parametrize("repeat", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 20))])
def test_case_V09_an_honest_solution_is_always_accepted(
    tools_box: Sandbox, word_count: TaskFolder, repeat: int
) -> None:
    assert tools_box.exec(HONEST).exit_code == 0
    verdict = fresh(tools_box, word_count)
    assert verdict.reward == 1.0, verdict.reason


def test_case_V09_an_honest_answer_is_accepted_on_the_host_every_time(box: Sandbox, backend: str) -> None:
    for _ in range(20):
        box.reset()
        box.exec("mkdir 'a b'; echo 42 > 'a b/x'; mv 'a b/x' answer.txt")
        assert verify_files(TASK, box).reward == 1.0


@pytest.mark.docker
def test_case_V10_the_agent_finds_no_test_solution_or_reward_path(word_count: TaskFolder) -> None:
    hunt = (
        "exec 2>/dev/null; find / -path /proc -prune -o -path /sys -prune -o \\( -path '/tests*' -o "
        "-path '/solution*' -o -path '/logs*' -o -name 'test_outputs*' -o -name 'solve.sh' -o -name 'reward*' "
        "-o -name 'expected*' -o -name task.toml \\) -print; "
        "git log --all; env; cat /proc/*/environ /proc/1/cmdline /proc/self/mountinfo"
    )
    with DockerSandbox.start(TOOLS, task_limits(word_count), word_count.name) as box:
        seen = box.exec(hunt, timeout=20)
    assert seen.status == "ok"
    text = seen.raw.decode(errors="replace")
    for word in (
        "/tests",
        "/solution",
        "/logs",
        "solve.sh",
        "reward",
        "expected",
        "task.toml",
        "word-count",
        "mini-rome.task",
    ):
        assert word not in text, word


RUINS = {
    "deletes /app": "cd /; rm -rf /app",
    "empties /app": "rm -rf /app/* /app/.[!.]*",
    "chmod 000": "chmod 000 /app",
    "chmod 000 of a folder": "mkdir d; echo 42 > d/x; chmod 000 d",
    "fills the disk": "head -c 200000000 /dev/zero > /app/big; echo 42 > answer.txt",
    "fills the inodes": "i=0; while [ $i -lt 6000 ]; do : > f$i; i=$((i+1)); done",
    "replaces the answer by a fifo": "mkfifo answer.txt",
    "links the answer to the host": "ln -s /etc/hostname answer.txt",
    "links the answer in a loop": "ln -s answer.txt answer.txt",
}
NOT_ON_SIM = {"replaces the answer by a fifo": "no fifos", "fills the inodes": "too slow"}


@pytest.mark.parametrize("ruin", RUINS)
def test_case_V11_ruin_by_the_agent_is_zero_with_a_reason(backend: str, ruin: str) -> None:
    if backend == "sim" and ruin in NOT_ON_SIM:
        return
    env = Env(TASK, pool(backend))
    env.reset()
    env.box.exec(RUINS[ruin], timeout=25)
    _, reward, _, _, info = env.step("<tool_call>submit</tool_call>")
    env.close()
    assert reward == 0.0, info["verdict"]
    assert info["verdict"].reason


@pytest.mark.docker
def test_case_V11_a_ruined_box_is_cleaned_or_replaced_before_the_next_episode() -> None:
    for ruin in ("chmod 000 /app", "head -c 200000000 /dev/zero > /app/big"):
        env = Env(TASK, pool("docker"))
        env.reset()
        env.box.exec(ruin, timeout=25)
        env.close()
        env = Env(TASK, pool("docker"))
        env.reset()
        assert env.box.exec("cat in.txt; ls -A").output == "42\nin.txt\n"
        env.close()


@pytest.fixture(autouse=True)
def _no_fresh_container_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("docker") is None:
        return
    from mini_rome.sandbox import run_id
    from mini_rome.sandbox.engine import engine

    alive = engine().client.api.containers(all=True, filters={"label": f"mini-rome.run={run_id()}"})
    assert len(alive) <= 8, "verification left containers behind"
