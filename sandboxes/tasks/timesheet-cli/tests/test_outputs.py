"""The specification, line by line, on hidden logs."""

import json

import pytest

DAY = "2024-03-04"


@pytest.fixture
def timesheet(run, scratch):
    """(lines of a log, command, options) -> what the program did; the options come after FILE."""

    def call(lines, command="report", *options):
        (scratch / "a.log").write_text("".join(line + "\n" for line in lines))
        return run(["python3", "-m", "timesheet", command, scratch / "a.log", *options])

    return call


@pytest.fixture
def shown(timesheet):
    """As `timesheet`, but the lines it printed."""

    def call(lines, command="report", *options):
        done = timesheet(lines, command, *options)
        assert done.code == 0, done.err
        return done.out.splitlines()

    return call


def test_the_example_of_the_instruction(run):
    options = ["--since", "2024-03-05", "--until", "2024-03-06"]
    done = run(["python3", "-m", "timesheet", "report", "sample.log", *options])
    assert (done.code, done.out) == (0, "ops 2:50\nmail 0:40\ntotal 3:30\n")


def test_minutes_are_padded_and_hours_are_not(shown):
    assert shown([f"{DAY} 00:00-23:00 a: x", f"{DAY} 00:00-23:00 a: x"]) == ["a 46:00", "total 46:00"]
    assert shown([f"{DAY} 08:00-08:00 a: x"]) == ["a 0:00", "total 0:00"]


def test_halves_are_rounded_up_for_each_entry(shown):
    assert shown([f"{DAY} 08:00-08:25 a: x", f"{DAY} 08:00-08:05 b:"]) == ["a 0:30", "b 0:10", "total 0:40"]
    assert shown([f"{DAY} 08:00-08:44 a: x", f"{DAY} 08:00-08:44 a: y"]) == ["a 1:20", "total 1:20"]


def test_a_few_minutes_count_ten(shown):
    assert shown([f"{DAY} 08:00-08:01 a: x", f"{DAY} 23:59-00:03 a: x"]) == ["a 0:20", "total 0:20"]


def test_entries_past_midnight(shown):
    assert shown([f"{DAY} 22:00-06:10 a: x", f"{DAY} 23:50-00:00 b: x"]) == ["a 8:10", "b 0:10", "total 8:20"]


def test_colons_in_notes_and_case_of_projects(shown):
    lines = [f"{DAY} 08:00-09:00 Home page: a: b: c", f"{DAY} 09:00-10:00 HOME PAGE: at 10:30"]
    assert shown(lines) == ["home page 2:00", "total 2:00"]


def test_longest_first_and_equal_ones_by_name(shown):
    lines = [f"{DAY} 08:00-09:00 {name}: x" for name in ("mu", "pi", "eta")] + [f"{DAY} 08:00-11:00 nu: x"]
    assert shown(lines) == ["nu 3:00", "eta 1:00", "mu 1:00", "pi 1:00", "total 6:00"]


def test_tags_without_punctuation_and_case(shown):
    lines = [f"{DAY} 08:00-09:00 a: #Bug, in C# and #fix!?", f"{DAY} 08:00-08:30 b: #bug; # a#b #."]
    assert shown(lines, "tags") == ["#bug 1:30", "#fix 1:00"]


def test_a_tag_counts_once_for_an_entry(shown):
    assert shown([f"{DAY} 08:00-09:00 a: #x and #X: #x #y"], "tags") == ["#x 1:00", "#y 1:00"]


def test_comments_and_empty_lines(shown):
    assert shown(["# a", "", f"{DAY} 08:00-09:00 a: x", "   ", "#"]) == ["a 1:00", "total 1:00"]
    assert shown(["# nothing"]) == ["total 0:00"] and shown(["# nothing"], "tags") == []


def test_errors_name_the_line_of_the_file(timesheet):
    done = timesheet(["# a", "", f"{DAY} 08:00-09:00 a: x", "# b", "tomorrow"])
    assert (done.code, done.out) == (1, "") and done.err.strip().endswith("/a.log:5: not an entry")


def test_dates_times_and_projects_must_be_real(timesheet):
    for bad in (
        "2024-02-30 08:00-09:00 a: x", f"{DAY} 08:00-24:00 a: x", f"{DAY} 08:60-09:00 a: x", f"{DAY} 8:00-9:00 a: x",
        f"{DAY} 08:00-09:00  : x", f"{DAY} 08:00-09:00 a", f"x {DAY} 08:00-09:00 a: x",
    ):  # fmt: skip
        done = timesheet([f"{DAY} 08:00-09:00 a: x", bad], "tags")
        assert (done.code, done.out, done.err.strip()[-16:]) == (1, "", ":2: not an entry"), bad


def test_since_and_until_include_their_days(shown):
    lines = [f"2024-03-0{day} 23:00-01:00 d{day}: #t" for day in range(1, 6)]
    assert shown(lines, "report", "--since", "2024-03-04") == ["d4 2:00", "d5 2:00", "total 4:00"]
    assert shown(lines, "report", "--until=2024-03-01") == ["d1 2:00", "total 2:00"]
    assert shown(lines, "tags", "--until", "2024-03-03", "--since", "2024-03-02") == ["#t 4:00"]


def test_bad_lines_are_errors_whatever_the_days(timesheet):
    done = timesheet([f"{DAY} 08:00-09:00 a: x", "2024-01-01 08:00 a: x"], "report", "--since", DAY)
    assert (done.code, done.out) == (1, "")


def test_json(shown):
    lines = [f"{DAY} 08:00-09:00 B: #t", f"{DAY} 08:00-10:00 a: #u #t"]
    (found,) = shown(lines, "report", "--format", "json")
    assert json.loads(found) == {"projects": {"a": 120, "b": 60}, "total": 180}
    (found,) = shown(lines, "tags", "--format=json", "--since", DAY)
    assert json.loads(found) == {"tags": {"#t": 180, "#u": 120}}


def test_options_before_the_file_and_bad_ones(run):
    good = run(["python3", "-m", "timesheet", "tags", "--format", "text", "--since", "2024-03-07", "sample.log"])
    assert (good.code, good.out) == (0, "#writing 2:50\n")
    for option in ("--since=2024-02-30", "--until=today", "--format=xml"):
        done = run(["python3", "-m", "timesheet", "report", option, "sample.log"])
        assert (done.code, done.out) == (2, "")


def test_sums_of_the_library_do_not_grow_from_call_to_call(run):
    code = (
        "from timesheet.parse import BadLine, parse; from timesheet.report import by_project, by_tag\n"
        "one = parse(['2024-03-04 23:00-01:00 A: #x'])\n"
        "by_project(one); print(by_project(one), by_tag(one), one[0].date, one[0].minutes, one[0].project)\n"
        "try:\n    parse(['', '# b', 'c'])\nexcept BadLine as error:\n    print(error.number)\n"
    )
    assert run(["python3", "-c", code]).out == "{'a': 120} {'#x': 120} 2024-03-04 120 a\n3\n"
