"""The two reports, against figures worked out by hand from the exports."""

import json
import re

import pytest


@pytest.fixture
def lines(read):
    return read("/app/report.csv").split("\n")


@pytest.fixture
def by_region(lines):
    return {line.split(",")[0]: line for line in lines}


@pytest.fixture
def customers(read):
    return json.loads(read("/app/customers.json"))


def test_the_report_has_a_header_four_lines_and_a_final_newline(lines):
    assert lines[0] == "region,orders,units,revenue"
    assert len(lines) == 6 and lines[5] == ""
    assert all(line.count(",") == 3 for line in lines[:5])


def test_regions_are_sorted_by_revenue_and_total_comes_last(lines):
    assert [line.split(",")[0] for line in lines[1:5]] == ["south", "north", "west", "total"]


def test_north(by_region):
    assert by_region["north"] == "north,7,537,236.55"


def test_south_with_decimal_commas(by_region):
    assert by_region["south"] == "south,6,1069,384.15"


def test_west_with_a_byte_order_mark_and_a_blank_line(by_region):
    assert by_region["west"] == "west,5,1725,176.40"


def test_total(by_region):
    assert by_region["total"] == "total,18,3331,797.10"


def test_the_counts_of_the_total_are_the_sums_of_the_regions(by_region):
    for column in (1, 2):
        parts = [int(by_region[name].split(",")[column]) for name in ("north", "south", "west")]
        assert sum(parts) == int(by_region["total"].split(",")[column])


def test_revenue_has_two_decimals(lines):
    assert all(re.fullmatch(r"\d+\.\d\d", line.split(",")[3]) for line in lines[1:5])


def test_customer_revenue_is_text_with_two_decimals(customers):
    assert customers and all(re.fullmatch(r"\d+\.\d\d", value) for value in customers.values())


def test_customers_without_net_revenue_are_left_out(customers):
    assert sorted(customers) == ["Dahl", "Ferreira", "Hill & Sons", "Marlow Ltd", "Okafor, Lund and Co", "Quinn"]


def test_a_customer_of_two_offices_is_rounded_half_up_once(customers):
    assert customers["Ferreira"] == "243.90"


def test_customers_with_repeated_and_returned_orders(customers):
    wanted = {
        "Dahl": "87.75",
        "Hill & Sons": "196.25",
        "Marlow Ltd": "142.80",
        "Okafor, Lund and Co": "125.50",
        "Quinn": "24.40",
    }
    assert {name: customers[name] for name in wanted} == wanted
