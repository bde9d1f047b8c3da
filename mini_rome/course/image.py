"""The grader's image: the tools image and one layer with the project's wheels, copied from this environment.

So a submission runs with the versions that the grader compares with, and nothing is downloaded. mini_rome itself is
not among them: the box of a submission gets the few modules that the assignment allows (`paper.library`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from mini_rome.errors import ConfigError, SandboxError
from mini_rome.sandbox import images

if TYPE_CHECKING:
    import docker

GRADER_IMAGE = "mini-rome/grader:latest"
PYTHON = (3, 11)  # of Debian 12, so of the tools image: compiled wheels must be for it
_LEFT_OUT = re.compile(r"torch/(include|test|share)/|(^|/)tests?/|\.(pyi|a|h|lib)$|\.\./|_test\.so$|bin/protoc")


def build_grader(client: docker.DockerClient) -> str:
    """Build and tag the image; its id. Builds the tools image first where it is missing; half a minute, 1 GB.

    Raises ConfigError under another Python than the image's, SandboxError when the engine fails.
    """
    from docker.errors import APIError, BuildError, ImageNotFound

    if sys.version_info[:2] != PYTHON:
        raise ConfigError(
            f"image kind 'grader': its wheels are copied from this environment, which has Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}; the image has 3.11. Build it from a 3.11: "
            f"make PYTHON=python3.11 image"
        )
    try:
        client.images.get("mini-rome/tools:latest")
    except ImageNotFound:
        images.build(client, "tools")
    with tempfile.TemporaryDirectory(prefix="mini-rome-grader-") as scratch:
        folder = Path(scratch)
        shutil.copy(images.DEFINITIONS / "grader" / "Dockerfile", folder)
        for each in closure((images.DEFINITIONS / "grader" / "wheels.txt").read_text().split()):
            copy(each, folder / "site")
        try:
            image, _ = client.images.build(path=scratch, tag=GRADER_IMAGE, rm=True, forcerm=True)
        except (APIError, BuildError) as error:
            raise SandboxError(f"building {GRADER_IMAGE} failed: {error}") from error
    return image.id


def closure(names: list[str]) -> list[Distribution]:
    """The installed distributions of these names and all that they require, sorted by name.

    Raises ConfigError for one of `names` that is not installed; what only an extra or another system needs is left.
    """
    from packaging.requirements import Requirement

    found: dict[str, Distribution] = {}
    pending = [Requirement(name) for name in names]
    while pending:
        need = pending.pop()
        key = need.name.lower().replace("_", "-")
        if key in found or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            found[key] = distribution(need.name)
        except PackageNotFoundError:
            raise ConfigError(f"{need.name} is not installed, and the grader's image needs it: make venv") from None
        pending += [Requirement(line) for line in found[key].requires or []]
    return [found[key] for key in sorted(found)]


def copy(wheel: Distribution, site: Path) -> None:
    """The files of one distribution into the layer, without headers, stubs and tests; times kept, for the .pyc."""
    for path in wheel.files or []:
        source = Path(str(path.locate()))
        if _LEFT_OUT.search(path.as_posix()) or not source.is_file():
            continue
        target = site / path
        if target.exists():  # some wheels list a file twice
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)  # of 700 MB no byte is copied, where the file system allows
        except OSError:
            shutil.copy2(source, target)
