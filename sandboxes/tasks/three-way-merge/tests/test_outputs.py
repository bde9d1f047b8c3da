"""Behaviour of the merged package: what each branch changed, and both together."""

import pytest

LIST = "# spare parts\n\nwasher, 4,0.05\n nut ,9,0.07\nbolt,12,0.35\nrod,2,19.99\n"


@pytest.fixture
def stock(run, scratch):
    """(list, command, ...) -> what `python3 -m stock` did."""

    def call(text, command, *more):
        (scratch / "list.csv").write_text(text)
        return run(["python3", "-m", "stock", command, scratch / "list.csv", *more], cwd="/app/merged")

    return call


@pytest.fixture
def python(run):
    def call(code):
        done = run(["python3", "-c", code], cwd="/app/merged")
        assert done.code == 0, done.err
        return done.out.strip()

    return call


def total(stock, text):
    done = stock(text, "total")
    assert done.code == 0, done.err
    return done.out.strip()


def test_money_is_exact_and_has_two_decimals(stock):
    assert total(stock, "a,3,0.10\n") == "0.30"
    assert total(stock, "a,9,1.15\nb,1,4.35\nc,1,2\nd,1,0.5\n") == "17.20"


def test_many_of_a_kind_count_less(stock):
    assert total(stock, "a,10,1.00\n") == "9.00"
    assert total(stock, "a,9,1.00\nb,100,0.20\n") == "27.00"


def test_each_discount_is_rounded_half_a_cent_up(stock):
    assert total(stock, "a,15,0.01\n") == "0.14"
    assert total(stock, "a,15,0.01\nb,15,0.01\nc,15,0.03\n") == "0.69"


def test_large_totals_stay_exact(stock):
    assert total(stock, "a,9,90071992547409.93\nb,1,0.01\n") == "810647932926689.38"


def test_comments_empty_lines_and_spaces(stock):
    assert stock(LIST, "report").out == "bolt: 12 @ 0.35\nnut: 9 @ 0.07\nrod: 2 @ 19.99\nwasher: 4 @ 0.05\n"


def test_low_items_look_as_in_the_report(stock):
    assert stock(LIST, "low").out == "rod: 2 @ 19.99\nwasher: 4 @ 0.05\n"


def test_low_takes_a_limit(stock):
    assert stock(LIST, "low", "4").out == "rod: 2 @ 19.99\n"
    assert stock(LIST, "low", "10").out.splitlines()[0] == "nut: 9 @ 0.07"


@pytest.mark.parametrize("line", ["nut,x,0.07", "nut,1", "nut,1,1,1"])
def test_a_line_that_is_no_item(stock, line):
    done = stock(f"# list\nbolt,1,1\n{line}\n", "total")
    assert (done.code, done.out) == (1, "") and done.err.strip().endswith("list.csv:3: not an item")


def test_a_price_that_is_no_number(stock):
    done = stock("bolt,1,1\n\nnut,1,cheap\n", "report")
    assert (done.code, done.out) == (1, "") and done.err.strip().endswith("list.csv:3: not an item")


def test_an_unknown_command(stock):
    done = stock(LIST, "sell")
    assert (done.code, done.out) == (2, "") and "usage" in done.err


def test_names_and_modules_are_those_of_ours(python):
    found = "from stock import model, render; print([hasattr(model, n) for n in ('load', 'total_cents', 'low')], "
    assert python(found + "hasattr(model, 'total'), hasattr(model, 'report'), hasattr(render, 'report'))") == (
        "[True, True, True] False False True"
    )


def test_functions_work_on_items_with_cents(python):
    items = "i = [{'name': 'a', 'quantity': 11, 'cents': 5}, {'name': 'b', 'quantity': 5, 'cents': 1}]; "
    code = "from stock.model import low, total_cents; " + items
    assert python(code + "print(total_cents(i), low(i), [x['name'] for x in low(i, 6)])") == "55 [] ['b']"


def test_all_changes_are_listed_once_in_order(read):
    ours, theirs = read("/app/ours/CHANGES.md").splitlines(), read("/app/theirs/CHANGES.md").splitlines()
    wanted = [line for line in ours + [line for line in theirs if line not in ours] if line.startswith("- ")]
    found = [line.rstrip() for line in read("/app/merged/CHANGES.md").splitlines() if line.startswith("- ")]
    assert found == wanted and len(wanted) == 9
