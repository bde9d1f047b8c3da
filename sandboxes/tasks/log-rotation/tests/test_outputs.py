"""rotate.sh on folders that the agent's own account makes, and the folder that was to be rotated."""

import json

import pytest

PROGRAM = "/app/rotate.sh"
LIST = """
import gzip, json, os, sys
found = {}
for name in sorted(os.listdir(".")):
    if os.path.isfile(name):
        data = open(name, "rb").read()
        found[name] = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
json.dump(found, sys.stdout)
"""


@pytest.fixture
def rotated(run, scratch):
    """{name: contents, unpacked} after SETUP and then COMMANDS in an empty folder; rotate.sh has to be silent."""

    def files(setup, commands=f"{PROGRAM} . 3"):
        script = f"mkdir box; cd box; {setup}\n{{ {commands}; }} 2>&1 && python3 -c '{LIST}'"
        done = run(["bash", "-c", script], cwd=scratch)
        assert done.code == 0, done
        return json.loads(done.out)

    return files


def test_the_given_folder_was_rotated(run):
    done = run(["python3", "-c", LIST], cwd="/app/logs")
    assert json.loads(done.out) == {
        "idle.log": "", "mail queue.log": "", "mail queue.log.1": "started\n", "notes.txt": "not a log\n",
        "web.log": "", "web.log.1": "one\ntwo\n", "web.log.2.gz": "zero\n",
    }  # fmt: skip


def test_a_first_rotation(rotated):
    assert rotated("echo a > x.log; echo b > y.log") == {"x.log": "", "x.log.1": "a\n", "y.log": "", "y.log.1": "b\n"}


def test_old_logs_move_on_and_are_compressed(rotated):
    assert rotated("echo 3 > x.log; echo 2 > x.log.1; echo 1 | gzip > x.log.2.gz", f"{PROGRAM} . 5") == {
        "x.log": "", "x.log.1": "3\n", "x.log.2.gz": "2\n", "x.log.3.gz": "1\n",
    }  # fmt: skip


def test_many_rotations_keep_the_newest(rotated):
    found = rotated(":", f"for i in 1 2 3 4 5 6; do echo $i >> x.log; {PROGRAM} . 4; done")
    assert found == {"x.log": "", "x.log.1": "6\n", "x.log.2.gz": "5\n", "x.log.3.gz": "4\n", "x.log.4.gz": "3\n"}


def test_more_than_nine_old_logs(rotated):
    found = rotated(":", f"for i in $(seq 13); do echo $i >> x.log; {PROGRAM} . 11; done")
    assert len(found) == 12 and found["x.log.11.gz"] == "3\n" and found["x.log.2.gz"] == "12\n"


def test_a_keep_of_one(rotated):
    found = rotated("echo 2 > x.log; echo 1 > x.log.1; echo 0 | gzip > x.log.2.gz", f"{PROGRAM} . 1")
    assert found == {"x.log": "", "x.log.1": "2\n"}


def test_a_smaller_keep_removes_all_that_is_above(rotated):
    setup = "echo n > x.log; echo 1 > x.log.1; for i in 2 3 7 12; do echo $i | gzip > x.log.$i.gz; done"
    found = rotated(setup, f"{PROGRAM} . 3")
    assert found == {"x.log": "", "x.log.1": "n\n", "x.log.2.gz": "1\n", "x.log.3.gz": "2\n"}


def test_a_gap_is_no_error(rotated):
    found = rotated("echo n > x.log; echo 2 | gzip > x.log.2.gz")
    assert found == {"x.log": "", "x.log.1": "n\n", "x.log.3.gz": "2\n"}


def test_small_files_and_their_old_logs_are_left_alone(rotated):
    setup = "echo 1234 > big.log; echo 123 > small.log; echo o > small.log.1; echo p | gzip > small.log.9.gz"
    assert rotated(setup, f"{PROGRAM} . 2 5") == {
        "big.log": "", "big.log.1": "1234\n", "small.log": "123\n", "small.log.1": "o\n", "small.log.9.gz": "p\n",
    }  # fmt: skip


def test_only_regular_logs_directly_in_the_folder(rotated):
    setup = "mkdir sub d.log; echo s > sub/s.log; echo t > a.txt; echo b > a.log.bak; ln -s a.txt l.log; touch e.log"
    found = rotated(setup, f"{PROGRAM} . 3; cat sub/s.log > copy")
    assert found == {"a.txt": "t\n", "a.log.bak": "b\n", "l.log": "t\n", "e.log": "", "copy": "s\n"}


def test_the_file_stays_the_same_and_both_have_its_mode(rotated):
    setup = "echo a > x.log; chmod 640 x.log"
    look = "stat -c '%i %a' x.log"
    found = rotated(setup, f"{look} > was; {PROGRAM} . 3; {look} > is; stat -c %a x.log.1 > old")
    assert found["was"] == found["is"] and found["old"] == "640\n"


def test_a_writer_that_keeps_the_file_open_goes_on(rotated):
    found = rotated(":", f"exec 5>>x.log; echo a >&5; {PROGRAM} . 3; echo b >&5; {PROGRAM} . 3; echo c >&5")
    assert found == {"x.log": "c\n", "x.log.1": "b\n", "x.log.2.gz": "a\n"}


def test_spaces_and_dashes_in_names(rotated):
    found = rotated("mkdir -- '-in a'; echo a > '-in a/x  y.log'; echo b > '-in a/-v.log'; echo c > '-in a/-v.log.1'",
                    f"{PROGRAM} '-in a' 3; cd ./'-in a'")  # fmt: skip
    assert found == {"x  y.log": "", "x  y.log.1": "a\n", "-v.log": "", "-v.log.1": "b\n", "-v.log.2.gz": "c\n"}


def test_wrong_arguments_change_nothing(run, scratch):
    for arguments in ("", "box", "box 0", "box x", "box -1", "box 1.5", "none 3", "box 3 0", "box 3 k", "box 3 1 1"):
        script = f"mkdir -p box; echo a > box/x.log; {PROGRAM} {arguments}; echo $?; ls box"
        done = run(["bash", "-c", script], cwd=scratch)
        assert done.out == "2\nx.log\n", arguments
        assert done.err.startswith("usage:"), arguments
