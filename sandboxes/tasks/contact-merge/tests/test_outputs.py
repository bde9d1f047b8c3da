"""merge.py on inputs of every kind, and the result of the given file."""

import json

PROGRAM = "/app/merge.py"


def entry(number, name="n", emails=(), phones=(), updated="2024-01-01"):
    return {"id": number, "name": name, "emails": list(emails), "phones": list(phones), "updated": updated}


def merge(run, entries):
    done = run(["python3", PROGRAM], stdin="".join(json.dumps(item) + "\n" for item in entries))
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def merged(run, entries):
    return [person["merged"] for person in merge(run, entries)]


def test_the_given_file(read):
    people = [json.loads(line) for line in read("/app/people.jsonl").splitlines()]
    assert [person["merged"] for person in people] == [[3, 7, 12], [4], [5, 9], [8], [10]]
    assert people[0] == {
        "id": 3,
        "name": "R. Lindqvist",
        "emails": ["rl@work.example", "rosa.lindqvist@mail.example"],
        "phones": ["+46701234567"],
        "merged": [3, 7, 12],
    }
    assert people[2]["name"] == "Benjamin Achebe"


def test_addresses_are_compared_without_case_space_and_tag(run):
    people = merge(run, [entry(2, emails=[" Ann+x+y@B.example "]), entry(1, emails=["ann@b.EXAMPLE"])])
    assert len(people) == 1 and people[0]["emails"] == ["ann@b.example"]


def test_a_plus_in_the_domain_part_is_no_tag(run):
    assert merge(run, [entry(1, emails=["a@b+c.example"])])[0]["emails"] == ["a@b+c.example"]


def test_phones_are_compared_by_digits_and_leading_plus(run):
    people = merge(run, [entry(1, phones=["0049 (30) 555-0100"]), entry(2, phones=["+49.30.5550100"]),
                         entry(3, phones=["49305550100"])])  # fmt: skip
    assert [person["merged"] for person in people] == [[1, 2], [3]]
    assert people[0]["phones"] == ["+49305550100"]


def test_extensions_stay_but_do_not_link(run):
    people = merge(run, [entry(1, phones=["123456"]), entry(2, phones=["12-34-56"]), entry(3, phones=["+123456"])])
    assert [person["merged"] for person in people] == [[1], [2], [3]]
    assert [person["phones"] for person in people] == [["123456"], ["123456"], ["+123456"]]


def test_seven_digits_link(run):
    assert merged(run, [entry(1, phones=["1234567"]), entry(2, phones=["123-4567"])]) == [[1, 2]]


def test_a_late_entry_joins_two_groups_that_stood_apart(run):
    entries = [
        entry(5, emails=["a@x.example"]),
        entry(4, emails=["b@x.example"]),
        entry(3, phones=["5550001"]),
        entry(9, emails=["b@x.example", "a@x.example"], phones=["555-0001"]),
    ]
    assert merged(run, entries) == [[3, 4, 5, 9]]


def test_a_long_chain_in_any_order_is_one_person(run):
    chain = [entry(i, emails=[f"p{i}@x.example", f"p{i + 1}@x.example"]) for i in range(1, 400)]
    shuffled = [chain[(i * 211) % len(chain)] for i in range(len(chain))]
    assert merged(run, shuffled) == [list(range(1, 400))]


def test_the_name_is_of_the_newest_then_longest_then_smallest_id(run):
    same = ["s@x.example"]
    newest = [entry(1, "A much longer old name", same, updated="2023-12-31"), entry(2, "New", same)]
    longest = [entry(3, "Ab", ["t@x.example"]), entry(4, "Abcd", ["t@x.example"])]
    smallest = [entry(6, "Wxyz", ["u@x.example"]), entry(5, "Efgh", ["u@x.example"])]
    people = merge(run, newest + longest + smallest)
    assert [(person["id"], person["name"]) for person in people] == [(1, "New"), (3, "Abcd"), (5, "Efgh")]


def test_people_are_sorted_by_number_not_by_text(run):
    assert merged(run, [entry(10), entry(9), entry(100), entry(1)]) == [[1], [9], [10], [100]]


def test_each_address_and_number_appears_once_and_sorted(run):
    emails = ["z@x.example", "Z+1@x.example", "b@x.example"]
    people = merge(run, [entry(1, emails=emails, phones=["5550002", "+15550002", "555 0002"])])
    assert people[0]["emails"] == ["b@x.example", "z@x.example"]
    assert people[0]["phones"] == ["+15550002", "5550002"]


def test_bad_lines_are_reported_and_the_rest_is_processed(run):
    text = json.dumps(entry(1)) + "\n\n{oops\n[1]\n" + json.dumps(entry(2)) + "\n"
    done = run(["python3", PROGRAM], stdin=text)
    assert done.code == 1
    assert [json.loads(line)["id"] for line in done.out.splitlines()] == [1, 2]
    assert "line 3:" in done.err and "line 4:" in done.err and "line 1:" not in done.err and "line 5:" not in done.err


def test_names_keep_their_letters(run):
    done = run(["python3", PROGRAM], stdin=json.dumps(entry(1, "Zoë 山田"), ensure_ascii=False) + "\n")
    assert "Zoë 山田" in done.out


def test_twenty_thousand_lines_in_time(run):
    entries = [entry(i, f"n{i}", [f"m{i // 2}@x.example"], [f"+1555{i:07d}"]) for i in range(20000)]
    assert len(merge(run, entries)) == 10000
