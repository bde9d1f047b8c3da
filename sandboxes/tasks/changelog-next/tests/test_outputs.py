"""Next versions and rewritten files, on hidden changelogs."""

import pytest

TOP = "# Changelog\n\n## [Unreleased]\n\n"


def changelog(body, *versions):
    return TOP + body + "".join(f"\n## [{version}] - 2024-01-01\n\n### Added\n- x\n" for version in versions)


@pytest.fixture
def tool(run, read, scratch):
    """(command, text, ...) -> (exit code, what it printed, text of the file afterwards)."""
    path = scratch / "CHANGELOG.md"

    def call(command, text, *more):
        path.write_text(text)
        path.chmod(0o666)
        done = run(["python3", "/app/changelog.py", command, path, *more])
        return done.code, done.out.strip(), read(path)

    return call


def following(tool, body, *versions):
    code, said, _ = tool("next", changelog(body, *versions))
    return said if code == 0 else code


def test_the_visible_examples(run):
    minor = run(["python3", "/app/changelog.py", "next", "/app/examples/minor.md"])
    quiet = run(["python3", "/app/changelog.py", "next", "/app/examples/quiet.md"])
    assert (minor.code, minor.out.strip()) == (0, "1.5.0")
    assert (quiet.code, quiet.out.strip()) == (3, "") and quiet.err.strip()


def test_fixes_and_other_sections_raise_the_patch(tool):
    assert following(tool, "### Fixed\n- a\n", "2.9.9", "2.9.8") == "2.9.10"
    assert following(tool, "### Security\n- a\n", "1.0.0") == "1.0.1"


def test_additions_changes_and_deprecations_raise_the_minor(tool):
    for section in ("Added", "Changed", "Deprecated"):
        assert following(tool, f"### Fixed\n- a\n\n### {section}\n- b\n", "1.9.3") == "1.10.0"


def test_removals_and_breaking_entries_raise_the_major(tool):
    assert following(tool, "### Added\n- a\n\n### Removed\n- b\n", "1.9.3") == "2.0.0"
    assert following(tool, "### Fixed\n- a\n- BREAKING: b\n", "9.1.0", "9.0.0") == "10.0.0"


def test_breaking_counts_only_where_an_entry_begins(tool):
    assert following(tool, "### Fixed\n- not BREAKING\n  BREAKING news\n", "1.2.3") == "1.2.4"


def test_before_one_point_zero_everything_is_a_step_lower(tool):
    assert following(tool, "### Removed\n- a\n", "0.4.2") == "0.5.0"
    assert following(tool, "### Added\n- a\n", "0.4.2") == "0.4.3"
    assert following(tool, "### Fixed\n- a\n", "0.4.2") == "0.4.3"


def test_the_first_release(tool):
    assert following(tool, "### Removed\n- a\n") == "0.1.0"


def test_an_empty_section_has_no_say(tool):
    assert following(tool, "### Removed\n\n### Fixed\n- a\n", "1.2.3") == "1.2.4"
    assert following(tool, "### Removed\n\n### Added\n\n", "1.2.3") == 3


def test_fenced_code_has_no_say(tool):
    fenced = "### Fixed\n- a:\n```\n### Removed\n- b\n## [7.0.0] - 2020-01-01\n```\n- c\n"
    assert following(tool, fenced, "1.2.3") == "1.2.4"


def test_a_release_moves_everything_under_the_new_heading(tool):
    body = "### Added\n- a\n  more\n\n### Fixed\n- b\n"
    text = changelog(body, "1.0.0")
    code, said, after = tool("release", text, "2024-05-06")
    assert (code, said) == (0, "1.1.0")
    assert after == text.replace(TOP, TOP + "## [1.1.0] - 2024-05-06\n\n")


def test_a_release_drops_sections_without_entries(tool):
    text = changelog("### Added\n\n### Fixed\n- b\n\n### Removed\n\n", "1.0.0")
    _, _, after = tool("release", text, "2024-05-06")
    wanted = changelog("## [1.0.1] - 2024-05-06\n\n### Fixed\n- b\n\n", "1.0.0")
    assert after.replace("\n\n\n", "\n\n") == wanted.replace("\n\n\n", "\n\n")


def test_a_release_leaves_old_releases_and_code_as_they_were(tool):
    old = "\n## [0.9.0] - 2024-01-01\n\n### Removed\n\n### Added\n- x  \n\n```\n## [Unreleased]\n```\n[link]: x"
    _, said, after = tool("release", TOP + "### Fixed\n- b\n```\n### Added\n```\n" + old, "2024-05-06")
    assert said == "0.9.1"
    assert after == TOP + "## [0.9.1] - 2024-05-06\n\n### Fixed\n- b\n```\n### Added\n```\n" + old


def test_without_entries_the_file_stays(tool):
    text = changelog("### Added\n\n", "1.0.0")
    assert tool("release", text, "2024-05-06") == (3, "", text)


def test_releasing_twice_finds_nothing_the_second_time(tool):
    _, _, after = tool("release", changelog("### Added\n- a\n", "1.0.0"), "2024-05-06")
    assert tool("next", after)[0] == 3
