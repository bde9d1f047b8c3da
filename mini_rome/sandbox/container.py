"""The calls that make, attach to and remove one container."""

from __future__ import annotations

import secrets

from docker.errors import APIError, DockerException, ImageNotFound
from requests.exceptions import RequestException

from mini_rome.errors import SandboxError
from mini_rome.sandbox import reaper, runtime
from mini_rome.sandbox.base import Limits
from mini_rome.sandbox.engine import Engine, unavailable
from mini_rome.sandbox.hardening import Profile, container_options


def create(
    host: Engine, image: str, run: str, limits: Limits, task_name: str, profile: Profile
) -> tuple[str, str]:
    """A created container: (id, name). A name that is taken is left alone and another one tried.

    Raises ConfigError for a profile that would bind more than the folder of a socket which is this run's own.
    """
    if profile.socket_folder:
        runtime.check(profile.socket_folder, run)
    labels = reaper.labels(run, task_name, limits.ttl_s)
    for attempt in range(5):
        name = f"mini-rome-{run}-{secrets.token_hex(6)}"
        try:
            own_hosts = host.own_hosts(image)
            container, config = container_options(image, name, labels, limits, profile, host.runtime, own_hosts)
            made = host.client.api.create_container(
                **container, host_config=host.client.api.create_host_config(**config)
            )
            return made["Id"], name
        except ImageNotFound:
            host.ensure(image)  # says how to get it
            raise
        except APIError as error:
            if error.status_code != 409 or attempt == 4:
                raise SandboxError(f"{name}: the engine could not create the box: {explain(error)}") from error
        except RequestException as error:
            raise unavailable(host.host, error) from error
    raise AssertionError("unreachable")


def attach(host: Engine, container: str) -> object:
    return host.client.api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})


def explain(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).splitlines()[0][:300]


def remove_quietly(host: Engine, container: str) -> None:
    """Remove; where the engine does not answer, the end of stdin, the reaper and the TTL remain."""
    try:
        host.remove(container)
    except (DockerException, RequestException, OSError):
        return
