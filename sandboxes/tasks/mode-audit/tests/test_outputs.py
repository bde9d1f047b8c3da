"""Modes after the repair, and the report."""

import csv
import hashlib
import io

import pytest

CONTENTS = "4992f76367f874f4b4aff855e698753b2416aa85e455e1065bd3a0b19ef849fd"
REPORT = """path,old,new
.,2775,0755
bin/stats,4755,0755
cron jobs/nightly.sh,0744,0755
private,0755,0700
private/backup.sh,0755,0600
private/old,0775,0700
private/old/notes.txt,0444,0600
tls,0777,0755
tls/site.key,0640,0600
uploads,1777,1770
uploads/cat.txt,0666,0644
www/img,0777,0755
www/index.html,0666,0644
"www/quotes, old.txt",0664,0755
www/run.sh.txt,0755,0644
"""


@pytest.fixture
def modes(run):
    """{path below site: four octal digits}; links have none."""
    listed = run(["find", "/app/site", "-not", "-type", "l", "-printf", "%m\\t%P\\n"]).out.splitlines()
    return {path or ".": mode.zfill(4) for mode, _, path in (line.partition("\t") for line in listed)}


@pytest.fixture
def report(read):
    return {row["path"]: (row["old"], row["new"]) for row in csv.DictReader(io.StringIO(read("/app/audit.csv")))}



def test_the_private_folder(modes):
    assert [modes[f"private{name}"] for name in ("", "/old", "/login.txt")] == ["0700", "0700", "0600"]


def test_files_below_private_whatever_they_are(modes):
    assert [modes[f"private/{name}"] for name in ("backup.sh", "old/notes.txt")] == ["0600", "0600"]


def test_keys_and_certificates(modes):
    assert [modes[f"tls/{name}"] for name in ("site.key", "chain.pem", "site.crt")] == ["0600", "0600", "0644"]


def test_scripts_by_name(modes):
    assert [modes[name] for name in ("bin/deploy.sh", "cron jobs/nightly.sh")] == ["0755", "0755"]


def test_scripts_by_their_first_bytes(modes):
    assert [modes[name] for name in ("bin/stats", "www/quotes, old.txt")] == ["0755", "0755"]


def test_plain_files(modes):
    plain = ("bin/README", "www/index.html", "www/run.sh.txt", "www/img/logo.gif", "uploads/cat.txt")
    assert [modes[name] for name in plain] == ["0644"] * 5


def test_folders_and_their_special_bits(modes):
    assert [modes[name] for name in (".", "bin", "www", "www/img", "tls", "cron jobs")] == ["0755"] * 6
    assert modes["uploads"] == "1770"


def test_names_contents_and_links_are_as_they_were(run):
    links = run(["find", "/app/site", "-type", "l", "-printf", "%P %l\\n"]).out.splitlines()
    assert sorted(links) == ["www/cert ../tls/site.crt", "www/secret ../private"]
    names = run(["find", "/app/site", "-not", "-type", "d", "-printf", "%P\\n"]).out.splitlines()
    assert len(names) == 17
    texts = run(["cat", *(f"/app/site/{name}" for name in sorted(names) if name != "www/secret")]).out
    assert hashlib.sha256(texts.encode()).hexdigest() == CONTENTS


def test_the_report_names_what_was_wrong(report):
    wanted = {row["path"] for row in csv.DictReader(io.StringIO(REPORT))}
    assert set(report) == wanted


def test_the_report_gives_old_modes_with_special_bits(report):
    assert {path: report[path][0] for path in (".", "bin/stats", "uploads", "private")} == {
        ".": "2775", "bin/stats": "4755", "uploads": "1777", "private": "0755"
    }  # fmt: skip


def test_the_report_gives_the_new_modes(report, modes):
    assert report and all(new == modes[path] and old != new for path, (old, new) in report.items())


def test_the_report_is_sorted_and_quoted_as_asked(read):
    assert read("/app/audit.csv") == REPORT
