"""What `test_task` is tried on: a right check and the bug that is described; more bugs when graded."""

from __future__ import annotations

from mini_rome.course.paper import Detection
from mini_rome.families.base import expect_tree

Files = dict[str, str]
START = {"names.txt": "pear\nfig\nlime\n"}
SOLVED = {**START, "sorted.txt": "fig\nlime\npear\n"}


def right(files: Files) -> float:
    """Both files, exactly."""
    return expect_tree(SOLVED, {path: text.encode() for path, text in files.items()}).reward or 0.0


def passes_doing_nothing(files: Files) -> float:
    """Only what is there is compared, so what is missing is no mistake."""
    return float(all(files[path] == text for path, text in SOLVED.items() if path in files))


def check(files: Files) -> None:
    """The grader computes only with a few short files."""
    if not isinstance(files, dict) or len(files) > 16:
        raise ValueError("files must be a dict of at most 16 files")
    if not all(isinstance(text, str) and len(path) + len(text) < 10_000 for path, text in files.items()):
        raise ValueError("contents must be text of less than 10,000 characters")


DETECTIONS = [Detection("test_task", 4, right, {"doing nothing passes": passes_doing_nothing}, check)]
