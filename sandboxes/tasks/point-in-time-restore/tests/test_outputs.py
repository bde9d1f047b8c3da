"""The restored tree, entry by entry, and the report."""

import json

import pytest

WALK = """
import json, os, stat
found = {}
for folder, folders, files in os.walk("/app/restored"):
    for name in folders + files:
        path = os.path.join(folder, name)
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            entry = ["link", "", os.readlink(path)]
        elif stat.S_ISDIR(info.st_mode):
            entry = ["folder", oct(info.st_mode & 0o7777), ""]
        else:
            entry = ["file", oct(info.st_mode & 0o7777), open(path).read()]
        found[os.path.relpath(path, "/app/restored")] = entry
print(json.dumps(found))
"""
FOLDERS = "bin docs docs/img etc notes site site/releases site/releases/6 site/releases/7 site/releases/8 site/upload"
FILES = [
    "bin/check health", "bin/deploy", "bin/legacy", "docs/img/chart.svg", "docs/intro.txt", "etc/app.conf",
    "etc/secret.key", "notes/june.txt", "site/releases/6/index.html", "site/releases/7/index.html",
    "site/releases/8/index.html", "site/upload/queue.db",
]  # fmt: skip


@pytest.fixture
def tree(run):
    done = run(["python3", "-c", WALK])
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found, "/app/restored is empty or missing"
    return found


@pytest.fixture
def report(read):
    return json.loads(read("/app/restore.json"))


def test_the_folders_are_those_of_that_moment(tree):
    assert sorted(path for path, entry in tree.items() if entry[0] == "folder") == FOLDERS.split()


def test_the_files_are_those_of_that_moment(tree):
    assert sorted(path for path, entry in tree.items() if entry[0] == "file") == FILES


def test_files_that_never_changed_are_from_the_full_backup(tree):
    assert tree["site/releases/6/index.html"][2] == "<h1>six</h1>\n"


def test_files_that_only_abandoned_backups_changed_are_untouched(tree):
    assert tree["docs/intro.txt"][2] == "intro\n"
    assert "site/hotfix.patch" not in tree


def test_settings_are_of_the_last_change_on_the_line(tree):
    assert tree["etc/app.conf"][2] == "port=8080\nworkers=4\n"


def test_contents_of_the_archive_that_went_bad(tree):
    assert tree["etc/secret.key"][2] == "k-0003\n"
    assert tree["site/upload/queue.db"][2] == "q3 " * 40 + "\n"


def test_deleted_files_and_folders_are_gone(tree):
    assert not {"docs/faq.txt", "docs/img/logo.svg", "site/releases/6/old.css"} & set(tree)


def test_a_file_that_came_back_after_its_deletion(tree):
    assert tree["bin/legacy"][2] == "#!/bin/sh\necho legacy again\n"


def test_a_file_that_became_a_folder(tree):
    assert tree["notes"][0] == "folder" and tree["notes/june.txt"][2] == "notes is a folder now\n"


def test_nothing_later_than_the_moment_is_there(tree):
    assert "site/releases/8/extra.js" not in tree and "notes/june.txt" in tree


def test_the_link_is_a_link(tree):
    assert tree["site/current"] == ["link", "", "releases/8"]


def test_modes(tree):
    wanted = {
        "etc/secret.key": "0o600", "site/upload/queue.db": "0o664", "site/upload": "0o775", "bin/deploy": "0o750",
        "bin/check health": "0o755", "docs/intro.txt": "0o644", "etc": "0o755",
    }  # fmt: skip
    assert {path: tree[path][1] for path in wanted} == wanted


def test_no_list_of_deletions_is_left(tree):
    assert not [path for path in tree if path.endswith(".deleted")]


def test_the_report_names_the_line_of_backups(report):
    assert report["chain"] == ["b1", "b2", "b3", "b5"]


def test_the_report_names_the_archive_that_was_bad(report):
    assert report["replaced"] == ["b3"]


def test_the_report_counts_files_and_bytes(report):
    assert (report["files"], report["bytes"]) == (12, 301)
