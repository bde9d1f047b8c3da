import json

import pytest

CASES = {
    "Hello World": "hello-world",
    "--a--": "a",
    "Top 10": "top-10",
    "x_y.z": "x-y-z",
    "": "",
    "!!!": "",
    "Straße": "stra-e",
}


@pytest.mark.parametrize("text", CASES)
def test_a_slug(run, text):
    code = "import sys; sys.path.insert(0, '/app'); from slug import slug; print(slug(sys.argv[1]))"
    assert run(["python3", "-B", "-c", code, text]).out.strip() == CASES[text]


def test_the_report_names_every_check(read):
    found = json.loads(read("/app/STATUS.json"))
    assert set(found["checks"]) == {"plain", "runs", "ends", "digits", "mirror"}
    assert set(found["checks"].values()) <= {"passed", "failed"} and found["release"] in ("yes", "no")
