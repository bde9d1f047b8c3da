"""Fixtures of the sandbox tests.

A module asks for them with `pytest_plugins = ("box_fixtures",)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import docker
import pytest
from boxes import close_pools, pool

from mini_rome.sandbox import Sandbox
from mini_rome.sandbox.engine import engine


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture
def box(backend: str) -> Iterator[Sandbox]:
    """A clean box of each backend."""
    with pool(backend).box() as taken:
        yield taken


@pytest.fixture
def docker_box() -> Iterator[Sandbox]:
    """A clean container of the default image."""
    with pool("docker").box() as taken:
        yield taken


@pytest.fixture
def tools_box() -> Iterator[Sandbox]:
    """A clean container of the image with python3, curl, ssh and their like."""
    with pool("docker", "mini-rome/tools:latest").box() as taken:
        yield taken


@pytest.fixture
def client() -> docker.DockerClient:
    """The client that the boxes share."""
    return engine().client
