import pytest

FREED = 8338


@pytest.mark.parametrize("folder", ["cache", "tmp"])
def test_a_folder_is_there_and_empty(run, folder):
    done = run(["ls", "-A", f"/app/var/{folder}"])
    assert (done.code, done.out) == (0, "")


@pytest.mark.parametrize("day", [1, 2, 3, 4])
def test_an_old_log_is_gone(run, day):
    assert run(["test", "-e", f"/app/var/log/app-{day:02d}.log"]).code == 1


@pytest.mark.parametrize("day", [5, 6])
def test_a_log_of_the_last_two_days_is_as_it_was(read, day):
    lines = read(f"/app/var/log/app-{day:02d}.log").splitlines()
    assert len(lines) == 24 and all(line.startswith(f"2024-05-{day:02d}") for line in lines)


def test_the_freed_bytes_are_told(read):
    assert read("/app/freed.txt").strip().isdigit()
