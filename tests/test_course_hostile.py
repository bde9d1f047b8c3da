"""What a submission may send, be packed in or be called: read on the host, carried out never, and never its end."""

from __future__ import annotations

import csv
import json
import os
import random
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mini_rome.course import attacks, session, wire
from mini_rome.course.detect import RIGHTS, reply
from mini_rome.course.grade import grade_source, wrong_case
from mini_rome.course.paper import ASSIGNMENTS, Paper, assignment_folders, make_paper
from mini_rome.course.process import Ended
from mini_rome.course.release import skeleton
from mini_rome.course.runners import Local, Runner
from mini_rome.course.submissions import grade_all, printable, sources
from mini_rome.errors import ConfigError

A1 = ASSIGNMENTS / "a1_chunking"
STAFF = (A1 / "exercises.py").read_text()
HUGE = 10**400


@pytest.fixture(scope="module")
def paper() -> Paper:
    return make_paper(A1, "7")


class Forger(Runner):
    """A box that sends these bytes and nothing else, whatever it is asked."""

    def __init__(self, output: bytes = b""):
        self.output = output

    def run(self, files: Any, request: Any, seconds: float) -> Ended:
        return Ended(self.output, "ok", 0)

    def close(self) -> None:
        pass


def said(paper: Paper, output: bytes) -> list[str]:
    return [result.said for result in grade_source(paper, b"", Forger(b'{"import":""}\n' + output), "7")]


# What it sends


@pytest.mark.parametrize("value", ["1" + "0" * 4000, "-1" + "0" * 400, "1e999", "NaN", "[" * 900 + "]" * 900,
                                   '{"~dict":[[{"a":1},2]]}', '{"~pickle":"gASV"}', '{"~dict":5}'])  # fmt: skip
@pytest.mark.parametrize("want", [1.5, float("nan"), [1.0], {"a": 1}])
def test_any_value_is_compared_or_refused(value: str, want: Any) -> None:
    message = json.loads(f'{{"value":{value}}}')
    expected = {"value": wire.encode(want)}
    assert wrong_case(message, expected, 1e-6) != "" or (value == "NaN" and want != want)


def test_a_key_inside_a_key_is_refused_before_it_doubles_a_hundred_times() -> None:
    data: Any = 1
    for _ in range(100):
        data = {"~dict": [[data, 1]]}
    with pytest.raises(ValueError, match="key"):
        wire.plain(data)


@pytest.mark.parametrize(
    "line",
    [
        {"id": 0, "left": [[0]]}, {"id": 0, "left": HUGE}, {"id": 0, "left": "x" * 9999}, {"id": True, "left": 0},
        {"id": [], "case": 0, "value": 1}, {"id": 0, "case": "0", "value": 1}, {"id": 0, "case": {}, "value": 1},
        {"id": 0, "case": 0, "error": ["x"]}, {"id": 0, "case": 0, "error": "x" * 9999}, {"import": {}},
        {"id": 0, "case": 0, "raises": None}, {"id": 0, "verdict": ["holds"]}, {"id": 0, "end": 1},
    ],
)  # fmt: skip
def test_a_message_of_another_form_than_the_harness_gives_is_none(line: dict[str, Any]) -> None:
    assert list(session.messages(b"\n" + json.dumps(line).encode() + b"\n")) == []


def test_lines_that_are_no_messages_are_passed_over() -> None:
    lines = [b"{", b'{"id":' + b"9" * 5000 + b"}", b"{}" * 9, b'{"a":' + b"[" * 10**5, b"\xff{}", b'{"id":0}']
    assert list(session.messages(b"\n".join(lines))) == [{"id": 0}]


def test_no_sentence_of_the_feedback_is_long_whatever_is_sent(paper: Paper) -> None:
    text = "x" * session.SAID
    for fields in ({"value": "x" * 10**5}, {"error": text, "raises": text}, {"verdict": "fails", "error": text}):
        lines = [{"id": n, "case": case, **fields} for n in range(9) for case in range(9)]
        lines += [{"id": n, **last} for n in range(9) for last in ({"end": "ok"}, {"left": 0})]
        sentences = said(paper, "\n".join(map(json.dumps, lines)).encode())
        assert all(0 < len(sentence) < 1000 for sentence in sentences)


def test_a_question_that_cannot_be_read_is_a_broken_test(paper: Paper) -> None:
    deep, large = "[" * 900 + "]" * 900, '["' + "x" * 10**5 + '"]'
    for question in (deep, large, '{"~dict":[[{},1]]}', "5", "null", f"[{HUGE}]"):
        output = f'{{"id":0,"case":0,"ask":{question}}}\n{{"id":0,"end":"ok"}}\n{{"id":0,"left":0}}'.encode()
        assert all("finds no bug" in sentence for sentence in said(paper, output)[-4:])


@pytest.mark.parametrize("folder", assignment_folders(), ids=lambda folder: folder.name[:2])
def test_no_arguments_of_a_student_break_an_implementation_on_the_host(folder: Path) -> None:
    rng, asked = random.Random(0), make_paper(folder, "7").detections[0]
    refused = 0
    for _ in range(150):
        arguments = [scribble(rng) for _ in range(rng.choice((1, 2, 6)))]
        for implementation in (asked.right, *asked.wrong.values()):
            refused += "raises" in reply(implementation, asked, arguments)
    assert refused > 300
    assert "raises" in reply(asked.right, asked, HUGE) and "raises" in reply(asked.right, asked, None)


def scribble(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [scribble(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    if kind == 6:
        return {rng.choice(("names.txt", "\ud800")): scribble(rng, depth + 1)}
    return (rng.randrange(-2, 9), rng.uniform(-3, 3), rng.choice((HUGE, float("nan"), True)), "fig\n", None)[kind]


# What its code does, in a process of this machine


@pytest.mark.parametrize(
    "attack",
    ["returns objects that are equal to everything", "floods the channel with what is hard to read",
     "closes its channel"],
)
def test_an_attack_on_the_channel_has_no_points(paper: Paper, attack: str) -> None:
    source = attacks.with_body(skeleton(STAFF, paper.allowed), attacks.BODIES[attack])
    results = grade_source(paper, source.encode(), Local(), "7")
    assert sum(result.earned for result in results) == 0 and all(len(result.said) < 1000 for result in results)


def test_answers_that_come_before_the_questions_are_none(paper: Paper) -> None:
    source = f"{skeleton(STAFF, paper.allowed)}\n\n{attacks.AT_IMPORT['answers before it is asked']}"
    assert sum(result.earned for result in grade_source(paper, source.encode(), Local(), "7")) == 0


VOTE = """
import collections, json, sys
from mini_rome.course import wire
mine = arguments[0]([[[5, 2], [7]], [[6], []], [[8, 9], [4]]])
arguments[0]([[[1], []]])
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
votes = collections.Counter(json.dumps(job["answers"][0][1]) for job in frame.f_locals["request"]["jobs"])
assert json.dumps({"value": wire.encode(mine)}) == votes.most_common(1)[0][0]
"""


def test_a_test_that_votes_among_the_implementations_finds_no_bug(paper: Paper) -> None:
    source = attacks.with_body(STAFF, VOTE, ["test_rows"]).encode()
    results = grade_source(paper.only("test_rows"), source, Local(), "7", True)
    assert [result.earned for result in results] == [0] * 4
    assert all("does not notice" in result.said for result in results)


def test_a_run_of_a_test_is_told_the_answers_of_one_implementation(paper: Paper) -> None:
    sent: list[list[dict[str, Any]]] = []

    class Spy(Local):
        def run(self, files: Any, request: Any, seconds: float) -> Ended:
            sent.append(request["jobs"])
            return super().run(files, request, seconds)

    results = grade_source(paper.only("test_rows"), STAFF.encode(), Spy(), "7", True)
    assert sum(result.earned for result in results) == 4
    assert all(len(jobs) == 1 for jobs in sent)
    assert len(sent) == 1 + RIGHTS + 4  # one that asks, one that judges for each implementation


# What it comes in


def write(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_damaged_zip_is_a_reason_and_no_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.zip", {"ä/a1_chunking/exercises.py": b"x = 1\n" * 50}).read_bytes()
    reasons = 0
    for seed in range(300):
        rng, data = random.Random(seed), bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "b.zip").write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        reasons += isinstance(sources(tmp_path / "b.zip", ["a1_chunking"])["a1_chunking"], str)
    assert reasons > 100


@pytest.mark.parametrize(
    ("name", "size", "kind", "word"),
    [("a1_chunking/exercises.py", 50 << 20, zipfile.ZIP_DEFLATED, "larger than 256 KB"),
     ("a1_chunking/exercises.py", 17 << 20, zipfile.ZIP_STORED, "larger than 16 MB"),
     ("a1_chunking/exercises.py", 10, zipfile.ZIP_LZMA, "store or deflate it"),
     ("a1_chunking/exercises.py/", 0, zipfile.ZIP_STORED, "0 files"),
     ("exercises.py", 9, zipfile.ZIP_STORED, "0 files"),
     ("__MACOSX/a1_chunking/._exercises.py", 9, zipfile.ZIP_STORED, "0 files")],
)  # fmt: skip
def test_what_is_no_submission_is_told_so(tmp_path: Path, name: str, size: int, kind: int, word: str) -> None:
    path = write(tmp_path / "a.zip", {name: bytes(size)}, kind)
    assert word in str(sources(path, ["a1_chunking"])["a1_chunking"])


def test_paths_out_of_the_folder_links_and_backslashes_write_and_follow_nothing(tmp_path: Path) -> None:
    slip = write(tmp_path / "a.zip", {"../../a1_chunking/exercises.py": b"x", "..\\up\\a2_masks\\exercises.py": b"y"})
    before = sorted(tmp_path.iterdir())
    assert sources(slip, ["a1_chunking", "a2_masks"]) == {"a1_chunking": b"x", "a2_masks": b"y"}
    link = zipfile.ZipInfo("a1_chunking/exercises.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert sources(tmp_path / "b.zip", ["a1_chunking"]) == {"a1_chunking": b"/etc/passwd"}
    os.mkfifo(tmp_path / "c.zip")
    assert sources(tmp_path / "c.zip", ["a1_chunking"]) == {"a1_chunking": "the zip is no file"}
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "b.zip", tmp_path / "c.zip"])


# What it is called, and a class of them


def test_names_are_carried_out_by_no_terminal_and_no_spreadsheet(
    tmp_path: Path, paper: Paper, capsys: pytest.CaptureFixture
) -> None:
    names = ["=1+1", "@SUM(A1)", "-2", "Zoë", "a,b\n\"c", "\x1b[2J", os.fsdecode(b"\xff\xfe"), "+1"]
    paths = [write(tmp_path / f"{name}.zip", {}) for name in names]
    grade_all(paths, [paper], Forger, "s", tmp_path / "out" / "grades.csv", 2)
    told = capsys.readouterr().out
    assert "\x1b" not in told and told.isascii() is False and "[8/8]" in told
    rows = list(csv.reader((tmp_path / "out" / "grades.csv").open(encoding="utf-8")))
    shown = [row[0] for row in rows[1:]]
    assert shown == ["'=1+1", "'@SUM(A1)", "'-2", "Zoë", 'a,b\\n"c', "\\x1b[2J", "\\udcff\\udcfe", "'+1"]
    assert len(list((tmp_path / "out" / "feedback").iterdir())) == len(names)
    assert printable("ann") == "ann"


def test_a_failure_of_the_grader_is_one_students_and_no_judgement(
    tmp_path: Path, paper: Paper, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{name}.zip", {"a1_chunking/exercises.py": name.encode()}) for name in ("ann", "bob")]

    def broken(paper: Paper, source: bytes, runner: Runner, seed: str) -> list[Any]:
        if source == b"ann":
            raise KeyError("a bug of ours")
        return grade_source(paper, source, runner, seed)

    monkeypatch.setattr("mini_rome.course.submissions.grade_source", broken)
    ann, bob = grade_all(paths, [paper], Forger, "s", tmp_path / "grades.csv", 1)
    told = capsys.readouterr()
    assert ann.infra and not bob.infra and "grade it again" in told.out and "KeyError" in told.err
    rows = list(csv.DictReader((tmp_path / "grades.csv").open()))
    assert [(row["student"], row["grade_again"]) for row in rows] == [("ann", "yes"), ("bob", "")]


def test_the_table_has_what_was_graded_when_the_teacher_stops(
    tmp_path: Path, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{n}.zip", {"a1_chunking/exercises.py": b""}) for n in range(9)]
    done: list[bytes] = []
    asked = threading.Event()

    def stop(paper: Paper, source: bytes, runner: Runner, seed: str) -> list[Any]:
        if done:  # the first is in the table before the second is graded, however busy the machine
            assert asked.wait(60)
            time.sleep(0.2)
        done.append(source)
        return grade_source(paper, source, runner, seed)

    def stopped(*_: Any) -> str:
        asked.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("mini_rome.course.submissions.grade_source", stop)
    monkeypatch.setattr("mini_rome.course.submissions.summary", stopped)
    with pytest.raises(KeyboardInterrupt):
        grade_all(paths, [paper], Forger, "s", tmp_path / "grades.csv", 1)
    assert len(done) < 9 and (tmp_path / "grades.csv").read_text().count("\n") == 2


def test_no_table_is_overwritten_and_no_name_stands_for_two(tmp_path: Path, paper: Paper) -> None:
    table = tmp_path / "grades.csv"
    with pytest.raises(ConfigError, match="two submissions are called"):
        grade_all([tmp_path / "x" / "ann.zip", tmp_path / "y" / "Ann.zip"], [paper], Forger, "s", table, 1)
    table.write_text("the points of a class")
    with pytest.raises(ConfigError, match="name another file"):
        grade_all([tmp_path / "ann.zip"], [paper], Forger, "s", table, 1)
    with pytest.raises(ConfigError, match="none.zip does not exist"):
        grade_all([tmp_path / "none.zip"], [paper], Forger, "s", tmp_path / "new.csv", 1)
    assert table.read_text() == "the points of a class"
