"""Threads and memory of a process that runs a small model; each in a process of its own, since both are for good."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from mini_rome.cpu import keep_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.ones(1 << 20).mul(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
before = faults()
kept = keep_memory()
faults()
print(kept, before, faults())
"""
THREADS = """
import torch
from mini_rome.cpu import fit_process
torch.set_num_threads(3)
fit_process(torch.nn.Linear({width}, 1000))
print(torch.get_num_threads())
"""


def output(code: str, **env: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_kept_memory_is_not_faulted_in_again():
    # The threshold that glibc starts with, fixed: left alone it moves with what was freed before.
    kept, before, after = output(FAULTS, MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "True"
    assert int(before) > 50_000 and int(after) < int(before) / 100


@pytest.mark.parametrize(
    ("width", "env", "threads"), [(10, {}, "1"), (20_000, {}, "3"), (10, {"OMP_NUM_THREADS": "2"}, "3")]
)
def test_only_a_small_model_gets_one_thread_and_only_where_nothing_else_is_asked_for(width, env, threads):
    assert output(THREADS.format(width=width), CUDA_VISIBLE_DEVICES="", **env) == [threads]
