"""Common wrong answers: FUNCTION__name, graded in place of FUNCTION. Each must lose points. Not released."""

import io
import json
import subprocess
import tarfile

from mini_rome.course import process


def run__only_the_shell_killed(command, seconds, cap):
    """subprocess.run with a timeout: kills bash and waits for what holds the pipe."""
    try:
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        return [(error.stdout or b"")[:cap], "timeout", 124]
    return [(done.stdout + done.stderr)[:cap], "ok", done.returncode]


def run__only_the_group_killed(command, seconds, cap):
    """The process group is killed; a session of its own survives."""
    words = ["setsid", "bash", "-c", command]
    with open("/tmp/out", "w+b") as out:
        child = subprocess.Popen(["timeout", "-s", "KILL", str(seconds), *words], stdout=out, stderr=out,
                                 stdin=subprocess.DEVNULL)  # fmt: skip
        code = child.wait()
        out.seek(0)
        data = out.read()
    if code == 137:
        return [data[:cap], "timeout", 124]
    return [data[:cap], "output_limit" if len(data) > cap else "ok", 137 if len(data) > cap else code]


def run__no_cap(command, seconds, cap):
    """The output is cut only after all of it was read."""
    output, status, code = process.run_capped(command, seconds, 1 << 24)[:3]
    return [output[:cap], status, code]


def run__stderr_lost(command, seconds, cap):
    """stderr goes nowhere."""
    return list(process.run_capped(f"exec 2>/dev/null; {command}", seconds, cap)[:3])


def run__always_ok(command, seconds, cap):
    """The status is not told."""
    output, _, code = process.run_capped(command, seconds, cap)[:3]
    return [output, "ok", code]


def ends__no_tail(data, cap):
    """Only the head is kept."""
    return [data[:cap], b""]


def ends__overlap(data, cap):
    """Two halves, whatever the length: short outputs come twice, odd caps lose a byte."""
    return [data[: cap // 2], data[len(data) - cap // 2 :]]


def files_of__extracted_names(archive):
    """All members' names are believed."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        return {info.name.removeprefix("./"): found.extractfile(info).read() for info in found if info.isreg()}


def files_of__links_followed(archive):
    """tarfile resolves links, and raises its own errors."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        for info in found:
            stream = found.extractfile(info)
            if stream is not None:
                files[info.name.removeprefix("./")] = stream.read()
    return files


def reward_of__float(files):
    """float() of what is there: nan, inf, 1_0 and 1.5 pass."""
    if "reward.txt" in files:
        return float(files["reward.txt"])
    found = json.loads(files["reward.json"])
    return float(found.get("reward", next(iter(found.values()))))


def reward_of__zero_for_a_crash(files):
    """What cannot be read is a reward of 0."""
    try:
        value = float(files["reward.txt"] if "reward.txt" in files else json.loads(files["reward.json"])["reward"])
    except (KeyError, ValueError, TypeError):
        return 0.0
    return min(1.0, max(0.0, value))
