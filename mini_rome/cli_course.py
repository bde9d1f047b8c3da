"""The verb `course`: release assignments, check one's own, grade submissions, prove the grader."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mini_rome.cli_options import add_group, add_verb


def add_course(verbs: argparse._SubParsersAction) -> None:
    group = add_group(verbs, "course", "Course assignments: release, check, grade.")
    release = add_verb(group, "release", run_release, "Write the students' zips: the same bytes from the same files.")
    release.add_argument("--out", type=Path, default=Path("released"), metavar="FOLDER", help="default: released")
    text = "write the snapshots of the public tests anew, after a change that was meant"
    release.add_argument("--update-snapshots", action="store_true", help=text)
    add_assignments_option(release)
    check = add_verb(group, "check", run_check, "Count the points that the public tests give your own exercises.")
    text = "an assignment's folder (default: here)"
    check.add_argument("folder", nargs="?", type=Path, default=Path("."), metavar="FOLDER", help=text)
    grade = add_verb(group, "grade", run_grade, "Grade submissions in boxes without network: a table and feedback.")
    grade.add_argument("zips", nargs="+", type=Path, metavar="ZIP", help="submissions, named after the students")
    text = "of the hidden inputs: a number or word that no student knows; one seed for a class"
    grade.add_argument("--seed", required=True, help=text)
    text = "the table; feedback/STUDENT.json goes beside it (default: grades.csv)"
    grade.add_argument("--out", type=Path, default=Path("grades.csv"), metavar="CSV", help=text)
    text = "submissions at once; a box takes one core and up to 2 GB (default: 2)"
    grade.add_argument("--jobs", type=int, default=2, metavar="N", help=text)
    text = "without Docker: run submissions as programs of this machine, with your files and network in reach"
    grade.add_argument("--unsafe-local", action="store_true", help=text)
    add_assignments_option(grade)
    prove = add_verb(group, "prove", run_prove, "Grade staff, skeletons, wrong answers, attacks; print the claims.")
    prove.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these assignments (default: all)")
    prove.add_argument("--seeds", nargs="+", default=["0", "1", "2"], metavar="S", help="default: 0 1 2")
    add_assignments_option(prove)


def add_assignments_option(verb: argparse.ArgumentParser) -> None:
    text = "where the assignments are (default: notebooks/assignments of the checkout)"
    verb.add_argument("--assignments", type=Path, metavar="FOLDER", help=text)


def folders_of(options: argparse.Namespace) -> list[Path]:
    from mini_rome.course.paper import ASSIGNMENTS, assignment_folders

    return assignment_folders(options.assignments or ASSIGNMENTS)


def run_release(options: argparse.Namespace) -> int:
    from mini_rome.course.release import release

    for name, digest in release(folders_of(options), options.out, options.update_snapshots).items():
        print(f"{digest}  {options.out / name}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    from mini_rome.course.student import check

    return check(options.folder)


def run_grade(options: argparse.Namespace) -> int:
    from mini_rome.course.paper import make_paper
    from mini_rome.course.runners import UNSAFE, Boxed, Local
    from mini_rome.course.submissions import check_plan, grade_all

    check_plan(options.zips, options.seed, options.jobs, options.out)
    if options.unsafe_local:
        print(UNSAFE, file=sys.stderr)
    else:
        say_engine()
    papers = [make_paper(folder, options.seed) for folder in folders_of(options)]
    grade_all(options.zips, papers, Local if options.unsafe_local else Boxed, options.seed, options.out, options.jobs)
    print(f"{options.out}, and {options.out.parent / 'feedback'}")
    return 0


def say_engine() -> None:
    """Raises SandboxUnavailable or ImageMissing, with the way on, before anything is read."""
    from mini_rome.course.image import GRADER_IMAGE
    from mini_rome.errors import SandboxUnavailable
    from mini_rome.sandbox.engine import engine

    try:
        found = engine()
    except SandboxUnavailable as error:
        raise SandboxUnavailable(
            f"{error.args[0].splitlines()[0]}\nSubmissions are graded in Docker boxes: start Docker, or read them "
            f"yourself and add --unsafe-local, which runs them as programs of this machine."
        ) from error
    found.ensure(GRADER_IMAGE)
    print(f"sandbox: docker, profile grader: {found.line}")


def run_prove(options: argparse.Namespace) -> int:
    from mini_rome.course.prove import prove

    say_engine()
    folders = [folder for folder in folders_of(options) if not options.only or folder.name in options.only]
    return prove(folders, options.seeds)
