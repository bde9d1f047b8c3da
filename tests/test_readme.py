"""Every command and file the README names exists: a command that was renamed fails here."""

import re
import shlex
from pathlib import Path

import pytest

from mini_rome.cli import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
INLINE = re.findall(r"`([^`\n]+)`", README)
LINES = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()] + INLINE
MAKE = [line for line in LINES if line.startswith("make ")]
VERBS = [line for line in LINES if re.match(r"(\.venv/bin/)?mini-rome ", line)]
RECIPES = sorted(set(re.findall(r"recipes/\w+\.py", README)))
TREE = next(block for block in BLOCKS if block.startswith("mini_rome/ "))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_sweep_found_the_commands() -> None:
    assert len(MAKE) >= 6 and len(VERBS) >= 3 and len(RECIPES) >= 1


@pytest.mark.parametrize("line", MAKE)
def test_make_targets_exist(line: str) -> None:
    target = shlex.split(line)[1]
    assert target in make_targets()


@pytest.mark.parametrize("line", VERBS)
def test_verbs_and_their_options_parse(line: str) -> None:
    options = build_parser().parse_args(shlex.split(line)[1:])
    assert callable(options.run)


def test_an_unknown_verb_would_be_noticed() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["no-such-verb"])


@pytest.mark.parametrize("path", RECIPES)
def test_recipes_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def tree_files() -> list[Path]:
    """Names at the start of a line of the tree are at the top or, indented, in mini_rome/."""
    found = []
    for line in TREE.splitlines():
        names = re.split(r"\s{3,}", line.strip())[0].split()
        base = ROOT / "mini_rome" if line.startswith("  ") else ROOT
        found += [base / name for name in names]
    return found


def test_files_of_the_tree_exist() -> None:
    assert len(tree_files()) >= 25
    assert [str(path) for path in tree_files() if not path.exists()] == []


def test_the_tree_names_every_module_and_top_folder() -> None:
    """`verify.py` in the tree stands for verify_fresh.py too: a part of it, split off by its name."""
    named = {path.name for path in tree_files()}
    modules = {path.stem for path in (ROOT / "mini_rome").glob("*.py") if path.name != "__init__.py"}
    assert len(modules) >= 20
    assert [stem for stem in sorted(modules) if not named & {f"{stem}.py", f"{stem.split('_')[0]}.py"}] == []
    assert named >= {"mini_rome", "recipes", "sandboxes", "tests"}


def test_inline_files_exist() -> None:
    names = {name for name in INLINE if re.fullmatch(r"[\w/]+\.py", name)}
    places = (ROOT, ROOT / "mini_rome")
    assert len(names) >= 12
    assert [name for name in sorted(names) if not any((place / name).exists() for place in places)] == []
