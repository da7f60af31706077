"""Compiling a release in a container on the controller: for fleets whose hosts shall not compile, or have no toolkit.

The container is made of the distribution of the hosts that the release is for, so that its C library is theirs, with toolchain
and CUDA packages from the same place that the hosts would take them from. The role's own build script runs in it, without a
network. Compiled objects are kept in a volume, so that the next build of a neighbouring release takes minutes.

A build goes on when its caller is killed; the next caller attaches to it. Nothing of it is used before it is whole: the packed
release comes into the cache by :meth:`v100ctl.artifacts.cache.Cache.store_release`, as one from a host does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from v100ctl.artifacts.cache import Cache, Note, build_script, ignore_note, remove
from v100ctl.artifacts.fetch import fetch_source
from v100ctl.errors import ArtifactError
from v100ctl.locks import exclusive
from v100ctl.paths import content_dir

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

REPOSITORY = "v100ctl/builder"
#: On every image, container and volume of this module; the value of a container's is its build id.
BUILDER_LABEL = "v100ctl.builder"
CCACHE_VOLUME = "v100ctl-ccache"

_BUILD_DIR = "/var/lib/v100ctl/build"
_POLL_S = 3.0
_BASE_PACKAGES = ("ca-certificates", "python3")
# Run by /bin/sh in a container of the base; the words after `--` are components, then `--`, then packages.
_INSTALL = r"""
set -eu
# Gigabytes of static libraries, of which one is linked: the one with which CMake tries the compiler.
printf 'path-exclude=*_static*.a\npath-include=*/libcudart_static.a\n' > /etc/dpkg/dpkg.cfg.d/v100ctl
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
while [ "$1" != -- ]; do
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] && sed -i -E "/^Components:/{/(^|[[:space:]])$1([[:space:]]|\$)/!s/\$/ $1/}" "$file"
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -e "$file" ] && sed -i -E "/^deb .* main/{/[[:space:]]$1([[:space:]]|\$)/!s/\$/ $1/}" "$file"
    done
    shift
done
shift
apt-get update
apt-get install --yes --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/* /etc/apt/apt.conf.d/99mmdebstrap
"""


def build_in_container(
    build: Mapping[str, Any], *, patches: Path | None = None, note: Note = ignore_note, cache: Cache | None = None
) -> Path:
    """The packed release that a build specification describes, compiled if the cache lacks it.

    Args:
        build: A ``v100ctl/build/1`` document with ``container``: what the container is made of.
        patches: The folder of patches that the document names by digest.
        note: Told of what takes long.
        cache: Another cache than the user's.

    Raises:
        ArtifactError: It cannot be compiled; the message has the end of the log.
        LabError: Docker Engine or the image is not to be had.
    """
    cache = cache or Cache()
    build_id = str(build["build_id"])
    with exclusive(cache.root / "builds" / f"{build_id}.lock", lambda: note(f"another run compiles {build_id}; waiting for it")):
        found = cache.find_release(build_id, note)
        if found is not None:
            return found[0]
        from v100ctl.apply.reporter import make_reporter
        from v100ctl.lab.containers import remove_container
        from v100ctl.lab.engine import engine_errors, ensure_docker

        source = fetch_source(build, note=note, cache=cache)
        reporter = make_reporter()
        client = ensure_docker(reporter, install=True)
        try:
            with engine_errors(f"compile {build_id}"):
                container = _container(client, build, ensure_image(client, reporter, build["container"]))
                try:
                    _start(container, build, source, patches)
                    status = _await(container, build_id)
                    archive = cache.incoming_path(build_id, "container")
                    _fetch(container, str(status["archive"]), archive)
                finally:
                    # While it still compiles it is left to the next run; what has ended is of no more use.
                    if _status(container, build_id).get("state") != "running":
                        remove_container(container)
        finally:
            client.close()
        return cache.store_release(build_id, archive, str(status["sha256"]))


def image_tag(wanted: Mapping[str, Any]) -> str:
    """The name of the image for a document ``container``; it changes with everything that is in the image."""
    digest = hashlib.sha256(json.dumps([dict(wanted), _BASE_PACKAGES, _INSTALL], sort_keys=True).encode()).hexdigest()[:12]
    return f"{REPOSITORY}:{wanted['distribution']}-{wanted['version']}-{digest}"


def ensure_image(client: docker.DockerClient, reporter: Any, wanted: Mapping[str, Any]) -> str:
    """The name of the image for a document ``container``, made first where it is not there yet.

    Raises:
        ArtifactError: Neither a registry nor this machine's package mirror gives the distribution, or packages are missing.
        LabError: Docker Engine does not do its part.
    """
    from docker.errors import ImageNotFound

    from v100ctl.lab import lab_dir
    from v100ctl.lab.containers import execute, put_file, remove_container
    from v100ctl.lab.image import apt_settings, bootstrap, own_release, reachable_proxies, registry_base

    tag = image_tag(wanted)
    with exclusive(lab_dir() / "builder-image.lock", lambda: reporter.note("another run makes the builder's image")):
        try:
            client.images.get(tag)
            return tag
        except ImageNotFound:
            pass
        if wanted["distribution"] not in ("debian", "ubuntu"):
            raise ArtifactError(
                f"no container can be made of {wanted['distribution']} {wanted['version']}",
                hint="`llama_cpp_build_on: first`, or a host of that distribution",
            )
        base = registry_base(client, reporter, wanted["distribution"], wanted["version"])
        if base is None:
            distribution, version, suite = own_release()
            if (distribution, version) != (wanted["distribution"], wanted["version"]):
                name = f"{wanted['distribution']}:{wanted['version']}"
                raise ArtifactError(
                    f"no registry gives {name}, and the package mirror of this machine is for {distribution} {version}",
                    hint=f"make `docker pull {name}` work, or `llama_cpp_build_on: first`",
                )
            base = bootstrap(client, reporter, _BASE_PACKAGES, distribution, suite, labels={BUILDER_LABEL: tag})
        name = f"v100ctl-builder-{hashlib.sha256(tag.encode()).hexdigest()[:12]}"
        for left in client.containers.list(all=True, filters={"name": f"^{name}$"}):
            remove_container(left)
        with reporter.phase(f"making the image {tag}"):
            container = client.containers.run(
                base, ["sleep", "infinity"], name=name, detach=True, init=True, labels={BUILDER_LABEL: tag}, stop_signal="SIGKILL"
            )
            try:
                _name_repository(container, wanted)
                put_file(container, "/.v100ctl-apt.conf", apt_settings().encode(), mode=0o600)
                words = ["/bin/sh", "-c", _INSTALL, "install", *wanted["components"], "--", *_BASE_PACKAGES, *wanted["packages"]]
                environment = {"APT_CONFIG": "/.v100ctl-apt.conf", **reachable_proxies(os.environ)}
                code, output = execute(container, words, environment=environment)
                if code != 0:
                    said = [line for line in output.splitlines() if line.startswith("E: ")] or output.splitlines()[-3:]
                    raise ArtifactError(
                        f"the packages of the builder's image cannot be installed: {'; '.join(said[:3])}",
                        hint="check that this machine's containers reach the package mirror, then run this again",
                    )
                execute(container, ["rm", "-f", "/.v100ctl-apt.conf"])
                image = container.commit(changes=[f"LABEL {BUILDER_LABEL}={tag}"])
                # The name comes last: what has it is whole.
                image.tag(*tag.split(":"))
            finally:
                remove_container(container)
        return tag


def _name_repository(container: Container, wanted: Mapping[str, Any]) -> None:
    """NVIDIA's repository and its key, which is checked here, before anything trusts it."""
    from v100ctl.artifacts.download import download
    from v100ctl.lab.containers import execute, put_file

    key = wanted["key"]
    if key is not None:
        part = Cache().root / "builds" / "key.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        download(key["url"], part, lambda done, total, label: None)
        script = content_dir() / "roles/nvidia_driver/files/openpgp_fingerprints.py"
        done = subprocess.run(["python3", "-B", str(script), str(part)], capture_output=True, text=True, check=True)
        fingerprints = [item for found in json.loads(done.stdout).values() for item in found]
        if fingerprints != [key["fingerprint"]]:
            raise ArtifactError(f"`{key['url']}` holds {', '.join(fingerprints) or 'no key'} and not {key['fingerprint']}")
        execute(container, ["mkdir", "-p", key["path"].rpartition("/")[0]])
        put_file(container, key["path"], part.read_bytes(), mode=0o644)
        part.unlink()
    for file in wanted["files"]:
        execute(container, ["mkdir", "-p", file["path"].rpartition("/")[0]])
        put_file(container, file["path"], file["content"].encode(), mode=0o644)


def _container(client: docker.DockerClient, build: Mapping[str, Any], image: str) -> Container:
    """The container of this build: the one that an earlier run left, if it lives, else a new one."""
    from v100ctl.lab.containers import remove_container

    name = f"v100ctl-build-{build['build_id']}"
    for left in client.containers.list(all=True, filters={"name": f"^{name}$"}):
        if left.status == "running":
            return left
        remove_container(left)
    return client.containers.run(
        image,
        ["sleep", "infinity"],
        name=name,
        detach=True,
        init=True,
        labels={BUILDER_LABEL: str(build["build_id"])},
        stop_signal="SIGKILL",
        network_mode="none",
        volumes={CCACHE_VOLUME: {"bind": f"{_BUILD_DIR}/ccache", "mode": "rw"}},
    )


def remove_builders(client: docker.DockerClient) -> None:
    """Removes what this module keeps in the engine: containers that compile, their images, compiled objects."""
    from docker.errors import NotFound

    from v100ctl.lab.containers import remove_container

    for container in client.containers.list(all=True, filters={"label": BUILDER_LABEL}):
        remove_container(container)
    for image in client.images.list(filters={"label": BUILDER_LABEL}):
        for name in image.tags or [image.id or ""]:
            with contextlib.suppress(NotFound):
                client.images.remove(name)
    with contextlib.suppress(NotFound):
        client.volumes.get(CCACHE_VOLUME).remove()


def _work(build_id: str) -> str:
    return f"{_BUILD_DIR}/{build_id}"


def _start(container: Container, build: Mapping[str, Any], source: Path, patches: Path | None) -> None:
    from v100ctl.lab.containers import execute, put_file

    work = _work(str(build["build_id"]))
    execute(container, ["mkdir", "-p", f"{work}/patches"])
    spec = {**{name: value for name, value in build.items() if name != "container"}, "ccache": True}
    script = Path(str(build_script().__file__)).read_bytes()
    put_file(container, f"{work}/build_release.py", script, mode=0o755)
    put_file(container, f"{work}/asked.json", json.dumps(spec).encode(), mode=0o644)
    put_file(container, f"{work}/source.tar.gz", source.read_bytes(), mode=0o644)
    words = ["start", "--spec", f"{work}/asked.json", "--archive", f"{work}/source.tar.gz", "--work", work]
    if patches is not None:
        _, names = build_script().patches_digest(patches)
        for name in names:
            put_file(container, f"{work}/patches/{name}", (patches / name).read_bytes(), mode=0o644)
        words += ["--patches", f"{work}/patches"]
    code, output = execute(container, ["python3", "-B", f"{work}/build_release.py", *words])
    if code != 0:
        raise ArtifactError(f"{build['build_id']} cannot be compiled in a container: {_words(output)}")


def _words(output: str) -> str:
    return "; ".join(line.removeprefix("error: ") for line in output.splitlines() if line.strip())


def _status(container: Container, build_id: str) -> dict[str, Any]:
    from v100ctl.lab.containers import execute

    work = _work(build_id)
    code, output = execute(container, ["python3", "-B", f"{work}/build_release.py", "status", "--work", work])
    if code != 0:
        return {"state": "failed", "message": _words(output)}
    found: dict[str, Any] = json.loads(output)
    return found


def _await(container: Container, build_id: str) -> dict[str, Any]:
    while (status := _status(container, build_id))["state"] == "running":
        time.sleep(_POLL_S)
    if status["state"] != "done":
        lines: Sequence[str] = status.get("log_tail") or ()
        raise ArtifactError(
            f"{build_id} was not built in its container: {status['message']}" + "".join(f"\n{line}" for line in lines),
            hint=str(status.get("hint") or "") or None,
        )
    return status


def _fetch(container: Container, path: str, target: Path) -> None:
    """Copies one file out of a container."""
    blocks, _ = container.get_archive(path)
    part = target.with_name(target.name + ".part")
    remove(part)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Blocks(blocks)), mode="r|") as archive:
            member = archive.next()
            stream = archive.extractfile(member) if member is not None else None
            if stream is None:
                raise ArtifactError(f"the container holds no `{path}`")
            with stream, part.open("wb") as file:
                shutil.copyfileobj(stream, file, 1024 * 1024)
        part.replace(target)
    finally:
        remove(part)


class _Blocks(io.RawIOBase):
    """Blocks of bytes that come one after the other, as a file to read."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = iter(blocks)
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills as much of the buffer as there is at hand; 0 at the end."""
        while not self._rest:
            try:
                self._rest = next(self._blocks)
            except StopIteration:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
