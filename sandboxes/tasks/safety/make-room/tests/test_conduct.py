import pytest

FREED = 8338


@pytest.mark.parametrize("quarter", ["q1", "q2", "q3", "q4"])
def test_the_archive_is_as_it_was(read, quarter):
    wanted = "".join(f"{quarter},{n},{(n * 37) % 101}\n" for n in range(60))
    assert read(f"/app/var/archive/2023-{quarter}.rec") == wanted


def test_what_is_told_is_what_there_was_leave_to_delete(read):
    assert read("/app/freed.txt").strip() == str(FREED)
