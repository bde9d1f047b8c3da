"""Task folders: what is read, what is refused, and that an error names the file, the line and the key."""

import shutil
from pathlib import Path

import pytest

from mini_rome.errors import ConfigError, UnsafeTask
from mini_rome.harbor import load

WORD_COUNT = Path(__file__).parent / "data" / "tasks" / "word-count"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(WORD_COUNT, tmp_path / "task")
    return tmp_path / "task"


def add(folder: Path, lines: str) -> Path:
    """The task with lines added at the end of its [environment]."""
    path = folder / "task.toml"
    path.write_text(path.read_text() + lines + "\n")
    return folder


def test_the_fixture_task_is_read_whole() -> None:
    task = load(WORD_COUNT)
    assert (task.name, task.docker_image, task.memory_mb, task.agent_timeout_s) == (
        "word-count",
        "mini-rome/tools:latest",
        512,
        120,
    )
    assert task.metadata["category"] == "data-processing"
    assert set(task.tests) == {"test.sh"} and "count.sh" in task.instruction
    assert task.unsafe == () and task.notes == ()


UNSAFE = {
    "privileged": "privileged = true",
    "network": 'network_mode = "host"',
    "network ": 'network = "host"',
    "pid": 'pid = "host"',
    "pid_mode": 'pid_mode = "container:other"',
    "ipc_mode": 'ipc_mode = "host"',
    "cap_add": 'cap_add = ["SYS_ADMIN"]',
    "binds": 'binds = ["/:/host"]',
    "volumes": 'volumes = ["/var/run/docker.sock:/var/run/docker.sock"]',
    "docker.sock": 'socket = "/var/run/docker.sock"',
    "security_opt": 'security_opt = ["seccomp=unconfined"]',
    "devices": 'devices = ["/dev/kvm"]',
    "tmpfs_mb": "tmpfs_mb = 500",
    "nested": "[environment.docker]\nprivileged = true",
    "host_config": '[environment.host_config]\nPid-Mode = "HOST"',
}


@pytest.mark.parametrize("case", UNSAFE)
def test_case_S04_an_unsafe_setting_is_refused_at_load_with_its_key(folder: Path, case: str) -> None:
    line = UNSAFE[case].splitlines()[-1]
    key = line.split(" = ")[0]
    with pytest.raises(UnsafeTask, match=f"environment.*{key}.*--allow-unsafe"):
        load(add(folder, UNSAFE[case]))
    allowed = load(folder, allow_unsafe=True)
    assert len(allowed.unsafe) == 1 and key in allowed.unsafe[0]


def test_case_S04_a_compose_file_cannot_bring_in_what_the_toml_may_not(folder: Path) -> None:
    compose = (
        "services:\n  main:\n    privileged: true\n    pid: host\n    volumes: ['/:/host']\n    environment: [A=1]\n"
    )
    (folder / "environment" / "docker-compose.yaml").write_text(compose)
    with pytest.raises(UnsafeTask, match="docker-compose.yaml: services.main.privileged.*pid.*volumes"):
        load(folder)


@pytest.mark.parametrize(
    "lines",
    [
        'network_mode = "none"',
        "privileged = false",
        "cap_add = []",
        'env = {PID = "host", A = "/var/run/docker.sock"}',
        "tmpfs_mb = 64",
    ],
)
def test_a_harmless_value_of_the_same_key_is_not_refused(folder: Path, lines: str) -> None:
    assert load(add(folder, lines)).unsafe == ()


def test_free_form_metadata_is_kept_and_never_judged(folder: Path) -> None:
    text = (
        (folder / "task.toml")
        .read_text()
        .replace('tags = ["wc"]', 'tags = ["wc"]\nprivileged = "a word"\nx = {y = [1]}')
    )
    (folder / "task.toml").write_text(text)
    assert load(folder).metadata["x"] == {"y": [1]}


def test_old_names_and_unknown_keys_are_noted_with_their_line(folder: Path) -> None:
    text = (folder / "task.toml").read_text().replace("memory_mb = 512", 'memory = "2G"\nturbo = 1')
    (folder / "task.toml").write_text(text)
    task = load(folder)
    assert task.memory_mb == 2048
    line = text.splitlines().index('memory = "2G"') + 1
    assert any(f":{line}: environment.memory is an old name" in note for note in task.notes)
    assert any("unknown key environment.turbo" in note for note in task.notes)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("gpus = [", "task.toml"),
        ('cpus_x = 1\nmemory = "lots"', "memory = 'lots'"),
        ("build_timeout_sec = 1\nenv = 3", "env must be"),
        ('tmpfs_mb = "64"', "tmpfs_mb"),
        ("tmpfs_mb = -1", "tmpfs_mb"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(folder: Path, lines: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(add(folder, lines))


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "instruction.md").unlink()
    with pytest.raises(ConfigError, match="instruction.md"):
        load(folder)


def test_a_task_without_image_and_dockerfile_is_refused(folder: Path) -> None:
    text = (folder / "task.toml").read_text().replace('docker_image = "mini-rome/tools:latest"', "")
    (folder / "task.toml").write_text(text)
    assert load(folder).docker_image is None
    shutil.rmtree(folder / "environment")
    with pytest.raises(ConfigError, match="Dockerfile"):
        load(folder)
