"""Box images, built without a registry: Debian packages are downloaded by apt, unpacked by dpkg-deb, never installed.

The same packages give the same image id: entries sorted, times fixed, owner root, set-id bits cleared, byte code made
with a fixed hash seed. `base` (55 MB) is what a box needs: a shell, text tools, Python for the runner. `tools` adds
what tasks and attacks use: python3, pytest, curl, ssh. Both lists live in sandboxes/KIND/packages.txt, beside a
Dockerfile for machines that can pull. Busybox would be 4 MB, but cannot host the runner and agrees less with `sim`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mini_rome.errors import ConfigError, ImageMissing, SandboxError

if TYPE_CHECKING:
    import docker

KINDS = ("base", "tools")
LAYERED = ("grader",)  # made from another of ours and a layer; nothing but what they are for needs them
DEFAULT_IMAGE = "mini-rome/base:latest"
DEFINITIONS = Path(__file__).resolve().parents[2] / "sandboxes"
_CREATED = "2025-01-01T00:00:00Z"
_MTIME = 1735689600
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib32": "usr/lib32", "lib64": "usr/lib64"}
_PRUNED = (
    "usr/share/doc/", "usr/share/man/", "usr/share/info/", "usr/share/locale/", "usr/share/lintian/",
    "usr/share/bug/", "usr/lib/systemd/", "usr/lib/udev/", "usr/share/bash-completion/", "etc/init.d/",
    "etc/cron.daily/",
)
OWN_HOSTS = "mini-rome.hosts"  # label of an image, and so of those made from it: "own" where it brings /etc/hosts
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/debian_version": "12\n",
    # With its own names of the local machine a box needs no network of the engine, which takes half of a start.
    "etc/hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost\n",
    "etc/resolv.conf": "nameserver 127.0.0.1\n",
}
_DIRECTORIES = ("app", "home/agent", "root", "tmp", "dev", "proc", "sys", "run", "var/tmp", "mnt", "opt", "srv")


@dataclass
class _Node:
    """One entry of the layer: a tar header and the contents of a file."""

    info: tarfile.TarInfo
    data: bytes = b""


def build_command(kind: str) -> str:
    """What a user types to get the image."""
    return f"mini-rome image build {kind}"


def kind_of(image: str) -> str:
    """`mini-rome/tools:latest` -> `tools`; the image's own name where it is not one of ours."""
    name = image.removeprefix("mini-rome/").partition(":")[0]
    return name if image.startswith("mini-rome/") and name in (*KINDS, *LAYERED) else image


def ensure(client: docker.DockerClient, image: str) -> str:
    """The image's id. Raises ImageMissing naming the build command; never pulls."""
    from docker.errors import ImageNotFound

    try:
        return client.images.get(image).id
    except ImageNotFound:
        kind = kind_of(image)
        way = build_command(kind) if kind in (*KINDS, *LAYERED) else f"docker pull {image}"
        raise ImageMissing(
            f"image {image!r} is not on this engine, and nothing is pulled unasked; get it with: {way}"
        ) from None


def list_images(client: docker.DockerClient) -> list[tuple[str, str, int]]:
    """(tag, id, bytes) of the images built here."""
    found = client.images.list(filters={"label": "mini-rome.kind"})
    return sorted((tag, image.id, image.attrs["Size"]) for image in found for tag in image.tags)


def build(client: docker.DockerClient, kind: str = "base") -> str:
    """Build and tag `mini-rome/KIND:latest`; its id. From Debian packages where apt is, else by its Dockerfile.

    Raises ConfigError for an unknown kind, SandboxError with the log's end when a step fails.
    """
    if kind == "grader":
        from mini_rome.course.image import build_grader

        return build_grader(client)
    if kind not in KINDS:
        raise ConfigError(f"image kind {kind!r}: choose one of {', '.join((*KINDS, *LAYERED))}")
    tag = f"mini-rome/{kind}:latest"
    if not (_have("apt-get") and _have("dpkg-deb")):
        return _build_dockerfile(client, kind, tag)
    with tempfile.TemporaryDirectory(prefix="mini-rome-image-") as scratch:
        debs = _download(_packages(kind), Path(scratch))
        nodes = _unpack(debs)
        _add_own_files(nodes)
        _add_bytecode(nodes, Path(scratch) / "root")
        archive = Path(scratch) / "image.tar"
        _write_archive(nodes, kind, tag, archive)
        before = [image.id for image in client.images.list(name=tag)]
        with archive.open("rb") as stream:
            built = client.images.load(stream)[0].id
    for old in before:
        if old != built:
            _forget(client, old)
    return built


def _forget(client: docker.DockerClient, image: str) -> None:
    """Remove the image a new one took the tag from, unless something else still uses it."""
    from docker.errors import APIError

    try:
        client.images.remove(image)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def _have(program: str) -> bool:
    return any(os.access(Path(folder) / program, os.X_OK) for folder in os.get_exec_path())


def _packages(kind: str) -> list[str]:
    return (DEFINITIONS / kind / "packages.txt").read_text().split()


def _call(command: list[str], **options: object) -> bytes:
    """Run one of the host's own tools; its output. Raises SandboxError with the end of what it said."""
    done = subprocess.run(command, capture_output=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-800:]
        raise SandboxError(f"{command[0]} failed with status {done.returncode}: {said}")
    return done.stdout


def _download(packages: list[str], scratch: Path) -> list[Path]:
    """Packages with all they depend on, as if nothing were installed on the host (10-20 MB/s from a near mirror)."""
    cache = scratch / "archives"
    (cache / "partial").mkdir(parents=True)
    options = [f"Dir::Cache::archives={cache}", "Dir::State::status=/dev/null", "Debug::NoLocking=1"]
    if os.geteuid() == 0:
        options.append("APT::Sandbox::User=root")
    flags = [word for option in options for word in ("-o", option)]
    _call(["apt-get", *flags, "--no-install-recommends", "--download-only", "-y", "-q", "install", *packages])
    return sorted(cache.glob("*.deb"))


def _unpack(debs: list[Path]) -> dict[str, _Node]:
    """Package contents in memory: /usr merged, documentation left out, nothing executed."""
    nodes: dict[str, _Node] = {}
    for deb in debs:
        tar = _call(["dpkg-deb", "--fsys-tarfile", str(deb)])
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for info in archive:
                path = _merged(info.name)
                if not path or path in _MERGED or f"{path}/".startswith(_PRUNED) or "/gconv/" in path:
                    continue
                stream = archive.extractfile(info) if info.isreg() else None
                info.linkname = _merged(info.linkname) if info.islnk() else info.linkname
                nodes[path] = _Node(info, stream.read() if stream else b"")
    return nodes


def _merged(path: str) -> str:
    """`./bin/ls` -> `usr/bin/ls`."""
    parts = path.removeprefix("./").rstrip("/").split("/")
    if parts[0] in _MERGED and len(parts) > 1:
        parts[:1] = _MERGED[parts[0]].split("/")
    return "/".join(parts).removeprefix(".")


def _node(kind: bytes, mode: int, data: bytes = b"", target: str = "") -> _Node:
    info = tarfile.TarInfo()
    info.type, info.mode, info.linkname = kind, mode, target
    return _Node(info, data)


def _add_own_files(nodes: dict[str, _Node]) -> None:
    """What maintainer scripts would have made: users, links of /usr, `sh`, `awk`, the agent's folders."""
    for path, text in _FILES.items():
        nodes[path] = _node(tarfile.REGTYPE, 0o644, text.encode())
    for path in _DIRECTORIES:
        nodes[path] = _node(tarfile.DIRTYPE, 0o755)
    for link, target in _MERGED.items():
        nodes[link] = _node(tarfile.SYMTYPE, 0o777, target=target)
        nodes.setdefault(target, _node(tarfile.DIRTYPE, 0o755))
    shell = "dash" if "usr/bin/dash" in nodes else "bash"
    for name, target in (("sh", shell), ("awk", "mawk"), ("nc", "nc.openbsd"), ("vi", "vim.tiny")):
        link = f"usr/bin/{name}"
        if f"usr/bin/{target}" in nodes and link not in nodes:
            nodes[link] = _node(tarfile.SYMTYPE, 0o777, target=target)


def _add_bytecode(nodes: dict[str, _Node], root: Path) -> None:
    """Compile the image's Python with its own interpreter; never checked, so that times do not matter."""
    wanted = ("usr/lib/", "usr/lib64/", "usr/bin/python3")
    for name in sorted(name for name in nodes if name.startswith(wanted)):
        _extract(nodes[name], root / name, root)
    (root / "lib64").symlink_to("usr/lib64")
    loader = sorted([*(root / "usr/lib64").glob("ld-linux*"), *(root / "usr/lib").rglob("ld-linux*")])[0]
    python = sorted((root / "usr/bin").glob("python3.*"))[0]
    libraries = ":".join(str(path) for path in (root / "usr/lib").glob("*-linux-gnu*"))
    code = [root / "usr/lib" / python.name, root / "usr/lib/python3"]
    environment = {"PYTHONHOME": str(root / "usr"), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    _call(
        [str(loader.resolve()), "--library-path", libraries, str(python), "-B", "-S", "-m", "compileall", "-q", "-q",
         "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/",
         *(str(path) for path in code if path.is_dir())],
        env=environment,
    )
    for path in sorted((root / "usr/lib").rglob("*.pyc")):
        nodes.setdefault(str(path.relative_to(root)), _node(tarfile.REGTYPE, 0o644, path.read_bytes()))


def _extract(node: _Node, path: Path, root: Path) -> None:
    """One entry of Debian's own packages into the scratch folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if node.info.isreg():
        path.write_bytes(node.data)
        path.chmod(0o755)
    elif node.info.issym() and not path.is_symlink() and not node.info.linkname.startswith("/"):
        path.symlink_to(node.info.linkname)
    elif node.info.islnk():
        path.write_bytes((root / node.info.linkname).read_bytes())


def _write_archive(nodes: dict[str, _Node], kind: str, tag: str, archive: Path) -> None:
    """A docker-archive of one layer, every byte of it determined by the packages."""
    layer = archive.with_suffix(".layer")
    with layer.open("wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(nodes):
            tar.addfile(_header(path, nodes[path]), io.BytesIO(nodes[path].data) if nodes[path].data else None)
    with layer.open("rb") as written:
        diff_id = f"sha256:{hashlib.file_digest(written, 'sha256').hexdigest()}"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config = json.dumps(
        {
            "architecture": machine, "os": "linux", "created": _CREATED,
            "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["/bin/bash"], "WorkingDir": "/app",
                       "Labels": {"mini-rome.kind": kind, OWN_HOSTS: "own"}},
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created": _CREATED, "created_by": build_command(kind)}],
        },
        sort_keys=True,
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as tar:
        for path, data in ((name, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(path)
            info.size, info.mtime = len(data), _MTIME
            tar.addfile(info, io.BytesIO(data))
        tar.add(layer, "layer.tar")


def _header(path: str, node: _Node) -> tarfile.TarInfo:
    """Owner root but for the agent's folders, fixed time, no set-id bits."""
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.size = node.info.type, node.info.linkname, len(node.data)
    info.mode = 0o1777 if path in ("tmp", "var/tmp") else node.info.mode & 0o755
    info.mtime = _MTIME
    info.uid = info.gid = 1000 if path in ("app", "home/agent") else 0
    return info


def _build_dockerfile(client: docker.DockerClient, kind: str, tag: str) -> str:
    """Where there is no apt: the classic builder, which pulls debian:bookworm-slim."""
    from docker.errors import APIError, BuildError

    try:
        image, _ = client.images.build(path=str(DEFINITIONS / kind), tag=tag, rm=True, forcerm=True)
    except (APIError, BuildError) as error:
        raise SandboxError(f"building {tag} from {DEFINITIONS / kind / 'Dockerfile'} failed: {error}") from error
    return image.id
