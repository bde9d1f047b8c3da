"""The fault proxy itself: each mode does to an SDK client what its name says."""

import threading
import time

import docker
import pytest
import requests
from docker_proxy import DockerProxy

pytestmark = pytest.mark.docker


def client_of(proxy: DockerProxy, timeout: float = 1.0) -> docker.DockerClient:
    return docker.DockerClient(base_url=proxy.url, version="1.41", timeout=timeout)


def test_without_a_fault_the_engine_answers_and_requests_are_recorded() -> None:
    with DockerProxy() as proxy:
        client = client_of(proxy)
        assert client.ping()
        assert any("/_ping" in line for line in proxy.requests)
        client.close()


def test_stall_holds_bytes_and_back_delivers() -> None:
    with DockerProxy() as proxy:
        client = client_of(proxy)
        proxy.stall()
        with pytest.raises(requests.exceptions.ReadTimeout):
            client.ping()
        proxy.back()
        assert client.ping()
        client.close()


@pytest.mark.parametrize("fault", ["refuse", "cut"])
def test_new_connections_are_refused_until_back(fault: str) -> None:
    with DockerProxy() as proxy:
        getattr(proxy, fault)()
        fresh = client_of(proxy)
        with pytest.raises(requests.exceptions.ConnectionError):
            fresh.ping()
        proxy.back()
        assert fresh.ping()
        fresh.close()


def test_cut_ends_a_stream_in_the_middle() -> None:
    with DockerProxy() as proxy:
        client = client_of(proxy, timeout=30)
        ended = threading.Event()

        def follow() -> None:
            try:
                for _ in client.api.events():
                    pass
            except (requests.exceptions.RequestException, docker.errors.DockerException, OSError):
                pass
            ended.set()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        time.sleep(0.3)
        assert not ended.is_set()
        proxy.cut()
        assert ended.wait(3)


def test_fail_answers_500_the_asked_number_of_times() -> None:
    with DockerProxy() as proxy:
        client = client_of(proxy)
        proxy.fail("/version", times=1)
        with pytest.raises(docker.errors.APIError, match="injected"):
            client.version()
        assert client.version()["ApiVersion"]
        client.close()


def test_no_thread_is_left_after_the_block() -> None:
    before = threading.active_count()
    with DockerProxy() as proxy:
        client = client_of(proxy)
        client.ping()
    assert threading.active_count() <= before
    client.close()
