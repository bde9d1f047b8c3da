"""Cases T (timeouts), I (input), B (background): what one step may do, and what is left of it."""

from __future__ import annotations

import time

import pytest
from boxes import running, usable, within

from mini_rome.errors import CommandTooLong
from mini_rome.sandbox import Limits, Sandbox, make
from mini_rome.sandbox.base import check_timeout

pytest_plugins = ("box_fixtures",)


# -- T: timeouts -----------------------------------------------------------------------------------------------------


def test_case_T01_timeout_keeps_output_and_kills(box: Sandbox) -> None:
    with within(4):
        result = box.exec("echo a; sleep 60", timeout=2)
    assert (result.status, result.exit_code, result.raw) == ("timeout", 124, b"a\n")
    assert result.output.startswith("a\n[timed out after 2 s; ")
    assert usable(box)


@pytest.mark.docker
def test_case_T01_no_process_of_the_step_is_left(docker_box: Sandbox) -> None:
    result = docker_box.exec("sleep 61 & sleep 62 | sleep 63; sleep 64", timeout=0.5)
    assert result.killed >= 4
    assert running(docker_box) == ""


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "setsid sh -c 'sleep 300 >/dev/null 2>&1 </dev/null &'; sleep 60",
        "setsid setsid nohup sleep 301 >/dev/null 2>&1 & disown; sleep 60",
        "(trap '' HUP; (sleep 302 & ) & ) ; coproc sleep 303; sleep 60",
    ],
)
def test_case_T03_daemons_die_with_their_step(docker_box: Sandbox, command: str) -> None:
    with within(4):
        assert docker_box.exec(command, timeout=1).status == "timeout"
    assert running(docker_box) == ""


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM INT HUP; while :; do :; done",
        "kill -STOP $$",
        "trap 'sleep 50' EXIT; trap '' TERM; sleep 50",
        "bash -c 'kill -STOP $PPID; kill -STOP $$'",
    ],
)
def test_case_T04_what_ignores_signals_is_killed(docker_box: Sandbox, command: str) -> None:
    with within(4):
        assert docker_box.exec(command, timeout=1).status == "timeout"
    before = _cpu_ticks(docker_box)
    time.sleep(0.5)
    assert _cpu_ticks(docker_box) - before < 0.25e9, "something still burns CPU in the box"
    assert running(docker_box) == ""


def _cpu_ticks(box: Sandbox) -> int:
    return int(box.exec("cat /sys/fs/cgroup/cpuacct/cpuacct.usage 2>/dev/null || echo 0").output)


def test_case_T04_a_busy_loop_ends_at_its_timeout(box: Sandbox) -> None:
    with within(3):
        assert box.exec("while :; do :; done", timeout=1).status == "timeout"
    assert usable(box)


@pytest.mark.parametrize("value", [0, -1, float("nan"), "5", True, [1], -0.0, float("-inf")])
def test_case_T06_bad_timeouts_are_refused_before_anything_runs(box: Sandbox, value: object) -> None:
    with pytest.raises(ValueError, match="timeout"):
        box.exec("echo ran > ran", timeout=value)  # type: ignore[arg-type]
    assert box.exec("ls").output == ""


def test_case_T06_good_timeouts_are_honoured_and_clamped(backend: str) -> None:
    assert check_timeout(float("inf"), 30, 600) == check_timeout(1e9, 30, 600) == 600
    with make(backend, limits=Limits(step_s=30, episode_s=1.5)) as box:
        with within(2):
            assert box.exec("sleep 60", timeout=0.3).status == "timeout"
        with within(3.2):
            assert box.exec("sleep 60", timeout=1e9).status == "timeout"
        with within(1):
            spent = box.exec("echo ran > ran", timeout=None)
        assert spent.status == "timeout" and "episode's limit" in spent.output
        box.reset()
        assert box.exec("ls", timeout=None).output == ""


# -- I: input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "   ", "\n\n", "# only a comment", "\t\n # x\n", ":"])
def test_case_I01_nothing_to_do_is_a_no_op(box: Sandbox, command: str) -> None:
    box.exec("mkdir d; cd d; export A=1")
    with within(1):
        result = box.exec(command)
    assert (result.output, result.exit_code, result.status) == ("", 0, "ok")
    assert box.exec("pwd; echo $A").output == "/app/d\n1\n"


@pytest.mark.parametrize(
    "command", ['echo "unclosed', "{", "if true; then", "echo $(", "((", "case x in", "a(", ")", "|"]
)
def test_case_I02_broken_syntax_fails_at_once(box: Sandbox, command: str) -> None:
    with within(2):
        result = box.exec(command)
    assert result.exit_code not in (0, None) and "bash" in result.output
    assert usable(box)


@pytest.mark.docker
def test_case_I02_a_here_document_without_end_is_over_at_once(docker_box: Sandbox) -> None:
    with within(2):
        result = docker_box.exec("cat <<EOF\nhalf")
    assert "here-document" in result.output and usable(docker_box)


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("exec true", 0), ("set -e; false; echo no", 1), ("kill -9 $$", 137)]
)
def test_case_I03_what_ends_a_shell_ends_only_its_step(box: Sandbox, command: str, code: int) -> None:
    result = box.exec(command)
    assert (result.exit_code, result.output, result.status) == (code, "", "ok")
    assert usable(box)


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "exec >/dev/null 2>&1", "enable -n echo", "ulimit -n 3", "ulimit -u 1", "exec <&- >&- 2>&-", "set -n",
        "trap 'exit 9' DEBUG",
        "echo() { :; }; cd() { :; }; builtin() { :; }; eval() { :; }; export -f echo cd builtin eval",
        "export BASH_ENV=/app/x PATH= LD_PRELOAD=/x IFS=x POSIXLY_CORRECT=1 PS4='$(exit)'", "set -u -e -x -v -f",
        "shopt -s extdebug; alias echo=false", "readonly PATH HOME PWD", "exec -a x bash -c 'kill -9 $PPID'",
        "kill -TERM $$", "umask 777", "stty raw; reset", "unset PATH HOME PWD IFS", "BASH_XTRACEFD=198; set -x; :",
        "export A='() { :; }; exit 5'", "printf 'x' >&198; exec 198>&-",
        "PROMPT_COMMAND=exit; return 5", "logout", "suspend -f",
    ],
)
def test_case_I03_no_step_spoils_the_next(docker_box: Sandbox, command: str) -> None:
    with within(6):
        docker_box.exec(command, timeout=3)
    result = docker_box.exec("export PATH=/usr/bin; echo usable; cat /dev/null; echo $?")
    assert (result.output, result.exit_code, result.status) == ("usable\n0\n", 0, "ok")


@pytest.mark.docker
@pytest.mark.parametrize("size", [127_000, 200_000, 2_000_000])
def test_case_I05_long_commands_run(docker_box: Sandbox, size: int) -> None:
    result = docker_box.exec(f"A={'x' * size}; echo ${{#A}}")
    assert (result.output, result.exit_code) == (f"{size}\n", 0)


def test_case_I05_too_long_a_command_is_refused_by_name(box: Sandbox) -> None:
    with pytest.raises(CommandTooLong, match="4194304"):
        box.exec("#" * (4 << 20) + "x")
    with pytest.raises(ValueError, match="NUL"):
        box.exec("echo a\0b")
    assert usable(box)


@pytest.mark.parametrize("command", ["cat", "read x", "sort", "while read x; do echo no; done", "wc -c", "tail -n 1"])
def test_case_I07_stdin_is_at_its_end(box: Sandbox, command: str) -> None:
    with within(3):
        assert box.exec(command, timeout=5).status == "ok"
    assert usable(box)


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    ["python3 -c 'input()'", "less /etc/passwd", "vi f", "top", "ssh-keygen", "python3", "bash -i", "nc -l 9"],
)
def test_case_I07_interactive_programs_end(tools_box: Sandbox, command: str) -> None:
    with within(4.5):
        result = tools_box.exec(command, timeout=2)
    assert "\x1b" not in result.output
    assert usable(tools_box)


def test_case_I08_cwd_and_exports_carry_over(box: Sandbox) -> None:
    box.exec("mkdir -p 'a  b'; cd 'a  b'; export A='x y' B='$(echo no)' C='`no`'; D=local")
    assert box.exec('pwd; echo "$A|$B|$C|$D"').output == "/app/a  b\nx y|$(echo no)|`no`|\n"
    box.exec("rmdir '/app/a  b'")
    lost = box.exec("pwd")
    assert lost.raw == b"/app\n" and "working directory is gone" in lost.output
    assert box.exec("pwd").output == "/app\n"


@pytest.mark.docker
def test_case_I08_any_name_and_value_carries_over(docker_box: Sandbox) -> None:
    docker_box.exec("d=$'a\\nb\"\\' c\\n'; mkdir \"$d\"; cd \"$d\"")
    docker_box.exec("export A=$'\\e\\001\"\\\\$`\\'\\n' B=$'\\xff' E= É=1")
    result = docker_box.exec('pwd; printf "%s|%s|%s" "$A" "$B" "${E-unset}"')
    assert result.raw == b"/app/a\nb\"' c\n\n\x1b\x01\"\\$`'\n|\xff|"
    docker_box.exec("unset A; cd ..; export -n B; mkdir -p 'x'; chmod 0 x; cd x")
    assert docker_box.exec('pwd; echo "${A-unset}"').output == "/app\nunset\n"


@pytest.mark.docker
def test_case_I08_too_many_exports_are_dropped_aloud(docker_box: Sandbox) -> None:
    result = docker_box.exec("export BIG=$(head -c 100000 /dev/zero | tr '\\0' a)")
    assert "none is carried over" in result.output
    assert docker_box.exec("echo ${#BIG}").output == "0\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("OCI runtime exec failed: exec failed: container_linux.go:380", 126),
        ("Error response from daemon: No such container: x", 1),
        ("Error response from daemon: Container x is not running", 137),
        ("Cannot connect to the Docker daemon", 125),
    ],
)
def test_case_I10_words_of_a_dead_engine_are_plain_output(box: Sandbox, text: str, code: int) -> None:
    result = box.exec(f"echo '{text}'; exit {code}")
    assert (result.output, result.exit_code, result.status) == (f"{text}\n", code, "ok")
    assert usable(box)


# -- B: background ---------------------------------------------------------------------------------------------------


def test_case_B01_a_background_child_does_not_hold_the_step(box: Sandbox) -> None:
    with within(3):
        result = box.exec("sleep 300 & echo done")
    assert (result.output, result.exit_code) == ("done\n", 0)
    assert result.killed == 1


@pytest.mark.docker
def test_case_B01_background_is_killed_or_kept_exactly(docker_box: Sandbox) -> None:
    docker_box.exec("sleep 300 & setsid sleep 301 & echo done")
    assert running(docker_box) == ""
    docker_box.background = "keep"
    docker_box.exec("sleep 302 & (while :; do echo tick; sleep 0.05; done) & echo done")
    for _ in range(3):
        assert "sleep 302" in running(docker_box)
        assert docker_box.exec("sleep 60 & sleep 61", timeout=0.5).status == "timeout"
    left = running(docker_box)
    assert "sleep 302" in left and "sleep 6" not in left
    snapshot = docker_box.snapshot()
    assert not snapshot.resumable and any("sleep 302" in text for text in snapshot.processes)
    assert docker_box.sweep() >= 2, "the loop that forks children of its own was to be kept too"
    assert running(docker_box) == "" and docker_box.snapshot().resumable
