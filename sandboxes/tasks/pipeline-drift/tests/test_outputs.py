"""run.sh on months made here, each with one kind of data that used to go wrong, and the report of May."""

import pytest

PROGRAM = "/app/run.sh"


@pytest.fixture
def month(run, scratch):
    """(stdout, stderr) of run.sh for a month of these contents"""

    def report(sales, prices, void="", cwd="/app", name="month"):
        folder = scratch / name
        folder.mkdir(mode=0o755)
        for file, text in {"sales": sales, "prices": prices, "void": void}.items():
            (folder / f"{file}.txt").write_text(text)
            (folder / f"{file}.txt").chmod(0o644)
        done = run([PROGRAM, folder if cwd == "/app" else name], cwd=cwd)
        return done.out, done.err

    return report


def test_the_report_of_may(read):
    assert read("/app/may_report.txt") == (
        "Benches|4|48000\ngarden|12|5855\nhand tools|17|11760\nmachines|400000|300000000000\n"
        "TOTAL|400033|300000065615\n"
    )


def test_a_plain_month(month):
    out, err = month("b|2\na|1\nb|3\n", "a|100|tools\nb|5|garden\n")
    assert (out, err) == ("garden|5|25\ntools|1|100\nTOTAL|6|125\n", "")


def test_skus_that_begin_alike_are_joined(month):
    sales = "".join(f"{sku}|1\n" for sku in ("K1", "K10", "K100", "K1-A", "K2", "K1.5", "K1/2", "K", "K11"))
    prices = "".join(f"{sku}|10|all\n" for sku in ("K2", "K11", "K", "K100", "K10", "K1", "K1-A", "K1/2", "K1.5"))
    assert month(sales, prices) == ("all|9|90\nTOTAL|9|90\n", "")


def test_void_skus_are_whole_skus(month):
    out, _ = month("A1|1\nA10|2\nXA1|4\n1|8\n", "A1|1|t\nA10|1|t\nXA1|1|t\n1|1|t\n", "A1\n")
    assert out == "t|14|14\nTOTAL|14|14\n"


def test_void_skus_are_no_patterns(month):
    out, _ = month("K.1|1\nKx1|2\n-e|4\n", "K.1|1|t\nKx1|1|t\n-e|1|t\n", "K.1\n-e\n")
    assert out == "t|2|2\nTOTAL|2|2\n"


def test_nothing_is_void_when_the_list_is_empty(month):
    assert month("a|1\nb|1\n", "a|5|x\nb|5|y\n")[0] == "x|1|5\ny|1|5\nTOTAL|2|10\n"


def test_a_last_line_without_a_newline_counts(month):
    assert month("a|1\na|41", "a|2|t\n")[0] == "t|42|84\nTOTAL|42|84\n"


def test_backslashes_are_part_of_a_sku(month):
    out, _ = month("a\\n1|3\na\\\\b|2\nan1|1\n", "a\\n1|10|t\na\\\\b|1|t\nan1|1|u\n")
    assert out == "t|5|32\nu|1|1\nTOTAL|6|33\n"


def test_cents_beyond_two_to_the_31(month):
    out, _ = month("m|3000\nn|1\n", "m|1000000000|big\nn|1|big\n")
    assert out == "big|3001|3000000000001\nTOTAL|3001|3000000000001\n"


def test_units_beyond_two_to_the_31(month):
    sales = "s|2147483647\ns|2147483647\nr|9007194959770000\n"
    assert month(sales, "s|1|screws\nr|0|rice\n")[0] == (
        "rice|9007194959770000|0\nscrews|4294967294|4294967294\nTOTAL|9007199254737294|4294967294\n"
    )


def test_skus_that_are_equal_as_numbers_are_different(month):
    out, _ = month("7|1\n007|10\n7.0|100\n7|1\n007|10\n", "7|1|a\n007|1|b\n7.0|1|c\n")
    assert out == "a|2|2\nb|20|20\nc|100|100\nTOTAL|122|122\n"


def test_skus_without_a_price_are_reported_once_and_do_not_count(month):
    out, err = month("z|1\na|1\nB|2\nz|3\nv|1\n", "a|7|t\n", "v\n")
    assert out == "t|1|7\nTOTAL|1|7\n"
    assert err == "no price: B\nno price: z\n"


def test_categories_are_in_byte_order_with_the_total_last(month):
    sales, prices = "a|1\nb|1\nc|1\nd|1\n", "a|1|Zinc\nb|1|apples\nc|1|Apple pie\nd|1|UNDER\n"
    assert [line.split("|")[0] for line in month(sales, prices)[0].splitlines()] == [
        "Apple pie", "UNDER", "Zinc", "apples", "TOTAL",
    ]  # fmt: skip


def test_a_month_without_sales(month):
    assert month("", "a|1|t\n") == ("TOTAL|0|0\n", "")


def test_any_directory_and_a_folder_with_a_space(month, scratch):
    assert month("a|1\n", "a|3|t\n", cwd=scratch, name="june 2025")[0] == "t|1|3\nTOTAL|1|3\n"
