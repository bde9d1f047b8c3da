"""Task folders: what is read, what is refused, and that an error names the file, the line and the key."""

import shutil
from pathlib import Path

import pytest

from mini_rome.errors import ConfigError, UnsafeTask
from mini_rome.tasks.harbor import fetches, load, load_tree

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


def tree(root: Path, count: int) -> Path:
    """Many tasks, named by their folders."""
    for number in range(count):
        shutil.copytree(WORD_COUNT, root / f"task-{number:03}")
        path = root / f"task-{number:03}" / "task.toml"
        path.write_text(path.read_text().replace('name = "word-count"', ""))
    return root


@pytest.mark.parametrize("under", [".", "tasks"])
def test_of_500_tasks_3_broken_ones_are_listed_and_497_load(tmp_path: Path, under: str) -> None:
    root = tree(tmp_path / under, 500)
    (root / "task-007" / "task.toml").write_text("[task\n")
    (root / "task-100" / "instruction.md").write_bytes("café".encode("latin-1"))
    (root / "task-499" / "task.toml").unlink()
    (root / "_common").mkdir()
    (root / "notes.txt").write_text("no task")
    tasks, broken = load_tree(tmp_path)
    assert len(tasks) == 497 and len({task.name for task in tasks}) == 497
    assert [each.folder.name for each in broken] == ["task-007", "task-100", "task-499"]
    assert "task.toml:1:" in broken[0].error and "UTF-8" in broken[1].error and "No such file" in broken[2].error


def test_one_folder_is_a_tree_of_one_and_no_folder_is_an_error(tmp_path: Path) -> None:
    assert [task.name for task in load_tree(WORD_COUNT)[0]] == ["word-count"]
    with pytest.raises(ConfigError, match="no task folder there"):
        load_tree(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        load_tree(tmp_path / "nowhere")


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(WORD_COUNT, tmp_path / name)
    with pytest.raises(ConfigError, match="both named 'word-count'"):
        load_tree(tmp_path)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "shift-jis"])
def test_an_instruction_in_another_encoding_is_an_error_with_its_line(folder: Path, encoding: str) -> None:
    text = "first line\ncaf\u00e9\n" if encoding == "latin-1" else "first line\n\u4e2d\u6587\u8a9e\n"
    (folder / "instruction.md").write_bytes(text.encode(encoding))
    line = 1 if encoding == "utf-16" else 2
    with pytest.raises(ConfigError, match=rf"instruction\.md:{line}: not UTF-8.*save the file as UTF-8"):
        load(folder)


def test_a_byte_order_mark_is_no_other_encoding(folder: Path) -> None:
    (folder / "instruction.md").write_bytes(b"\xef\xbb\xbfDo it.\n")
    assert load(folder).instruction == "Do it.\n"


def test_an_error_of_the_toml_names_file_and_line(folder: Path) -> None:
    text = (folder / "task.toml").read_text().replace("memory_mb = 512", "memory_mb = = 512")
    (folder / "task.toml").write_text(text)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "= =" in each)
    with pytest.raises(ConfigError, match=rf"task\.toml:{line}: "):
        load(folder)


def test_a_task_without_tests_or_with_an_empty_instruction_is_refused(folder: Path) -> None:
    (folder / "instruction.md").write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        load(folder)
    (folder / "instruction.md").write_text("x")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match="test.sh: missing"):
        load(folder)


def test_each_phase_has_its_network_policy(folder: Path) -> None:
    assert (load(folder).agent_network, load(folder).verifier_network) == (False, False)
    text = (folder / "task.toml").read_text()
    path = folder / "task.toml"
    path.write_text(text.replace("[verifier]", '[verifier]\nnetwork_mode = "public"'))
    assert (load(folder).agent_network, load(folder).verifier_network) == (False, True)
    path.write_text(text.replace("memory_mb = 512", "memory_mb = 512\nallow_internet = true"))
    task = load(folder)
    assert (task.agent_network, task.verifier_network) == (True, True)
    assert any("which the agent's box never has" in note for note in task.notes)
    path.write_text(text.replace("[verifier]", '[verifier]\nnetwork_mode = "fast"'))
    with pytest.raises(ConfigError, match="network_mode = 'fast'"):
        load(folder)


def test_a_test_script_that_fetches_is_said_with_its_line_and_a_local_one_is_not(folder: Path) -> None:
    assert fetches(load(folder)) == []
    script = "#!/bin/bash\n# curl is not used here\ncurl http://localhost:80/\napt-get install -y curl\nuvx pytest\n"
    (folder / "tests" / "test.sh").write_text(script)
    assert [line.split("test.sh:")[1] for line in fetches(load(folder))] == [
        "4: apt-get install -y curl", "5: uvx pytest"
    ]  # fmt: skip


def test_what_a_solution_must_leave_alone_is_read_relative_to_the_work_dir(folder: Path) -> None:
    assert load(folder).inputs is None
    path = folder / "task.toml"
    path.write_text(path.read_text().replace('tags = ["wc"]', 'tags = ["wc"]\ninputs = ["/app/data/", "a.txt"]'))
    assert load(folder).inputs == ("data", "a.txt")
