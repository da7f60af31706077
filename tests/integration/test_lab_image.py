"""How the lab host image comes about: from a registry, from none, and after an interruption.

The registry is a real one as far as Docker Engine can tell: it speaks the distribution protocol over HTTP, and an engine of
its own has it as its mirror. The other way, from the machine's package mirror, is what made the image that the other tests boot.
"""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound

from v100ctl import locks
from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import LabError
from v100ctl.lab import image
from v100ctl.lab.engine import Daemon, ensure_docker
from v100ctl.lab.hosts import Lab
from v100ctl.lab.image import IMAGE_LABEL, Recipe, ensure_image, remove_images

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starting a Docker Engine takes root")

# Steps that need neither packages nor a network, so that they run in a base of a few programs.
RECIPE = Recipe(packages=("one", "two"), install='echo "$@" > /packages', setup="echo yes > /set-up")


def _layer() -> bytes:
    """A root file system of this machine's `sh`, `sleep`, `cat` and `rm` with their libraries, as a tar archive."""
    programs = ["/bin/sh", "/bin/sleep", "/bin/cat", "/bin/rm"]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = sorted({word for word in listed.split() if word.startswith("/") and not word.endswith(":")})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in [*programs, *libraries]:
            archive.add(path, arcname=path.lstrip("/"))
    return buffer.getvalue()


class _Registry(http.server.BaseHTTPRequestHandler):
    """`library/debian` by the distribution protocol, version 2, the same for every tag."""

    blobs: dict[str, bytes]
    manifest: bytes

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path == "/v2/":
            self._answer(b"{}", "application/json")
        elif "/manifests/" in self.path:
            self._answer(self.manifest, "application/vnd.docker.distribution.manifest.v2+json")
        elif name in self.blobs:
            self._answer(self.blobs[name], "application/octet-stream")
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", _digest(body))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextmanager
def _registry() -> Iterator[str]:
    layer = _layer()
    packed = gzip.compress(layer, compresslevel=1)
    configuration = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]}}
    ).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": len(configuration),
            "digest": _digest(configuration),
        },
        "layers": [
            {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": len(packed), "digest": _digest(packed)}
        ],
    }
    blobs = {_digest(content): content for content in (packed, configuration)}
    handler = type("Handler", (_Registry,), {"blobs": blobs, "manifest": json.dumps(manifest).encode()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def client(make_daemon: Callable[..., Daemon]) -> Iterator[docker.DockerClient]:
    """An engine of its own that pulls from the registry above."""
    with _registry() as url:
        made = ensure_docker(make_reporter(stream=io.StringIO()), install=False, daemon=make_daemon(f"--registry-mirror={url}"))
        yield made
        made.close()


def _read(client: docker.DockerClient, name: str, path: str) -> str:
    return client.containers.run(name, ["/bin/cat", path], remove=True, network_mode="none").decode().strip()


def test_a_pulled_base_gets_packages_and_set_up_and_then_its_name(client: docker.DockerClient) -> None:
    made = ensure_image(client, make_reporter(stream=io.StringIO()), recipe=RECIPE)
    assert made.tags == [f"v100ctl/lab-host:debian-12-{RECIPE.digest}"]
    assert _read(client, made.tags[0], "/packages") == "one two"
    assert _read(client, made.tags[0], "/set-up") == "yes"
    assert client.containers.list(all=True) == []
    # The second time it is found; nothing is said, because nothing is done.
    said = io.StringIO()
    assert ensure_image(client, make_reporter(stream=said), recipe=RECIPE).id == made.id
    assert said.getvalue() == ""

    # Another release is another image, and neither stands for the other.
    other = ensure_image(client, make_reporter(stream=io.StringIO()), debian="13", recipe=RECIPE)
    assert other.tags == [f"v100ctl/lab-host:debian-13-{RECIPE.digest}"]
    assert ensure_image(client, make_reporter(stream=io.StringIO()), debian="12", recipe=RECIPE).tags == made.tags

    changed = Recipe(packages=RECIPE.packages, install=RECIPE.install, setup="echo other > /set-up")
    assert ensure_image(client, make_reporter(stream=io.StringIO()), recipe=changed).id != made.id
    assert remove_images(client) == []
    assert client.images.list(all=True, filters={"label": IMAGE_LABEL}) == []


def test_an_image_that_a_foreign_container_uses_is_reported_and_stays(client: docker.DockerClient) -> None:
    made = ensure_image(client, make_reporter(stream=io.StringIO()), recipe=RECIPE)
    foreign = client.containers.create(made.tags[0], ["/bin/sleep", "1"])
    assert remove_images(client) == made.tags
    foreign.remove()
    assert remove_images(client) == []


def test_a_failed_step_names_itself_and_leaves_no_image(client: docker.DockerClient) -> None:
    broken = Recipe(packages=("one",), install="echo 'E: Unable to locate package one' >&2; exit 100", setup="")
    with pytest.raises(LabError, match="step to install packages failed: E: Unable to locate package one"):
        ensure_image(client, make_reporter(stream=io.StringIO()), recipe=broken)
    assert client.images.list(filters={"label": IMAGE_LABEL}) == []
    assert client.containers.list(all=True) == []


def test_killed_while_it_is_made_then_made_whole(
    client: docker.DockerClient, make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    program = tmp_path / "make.py"
    program.write_text(
        "import docker, io, sys\n"
        "from v100ctl.apply.reporter import make_reporter\n"
        "from v100ctl.lab.image import Recipe, ensure_image\n"
        "recipe = Recipe(packages=('one', 'two'), install='echo \"$@\" > /packages; sleep 600', setup='')\n"
        "ensure_image(docker.DockerClient(base_url=sys.argv[1]), make_reporter(stream=io.StringIO()), recipe=recipe)\n",
        encoding="utf-8",
    )
    url = f"unix://{Path(os.environ['XDG_STATE_HOME']).parent}/s"
    victim = subprocess.Popen([sys.executable, str(program), url])
    try:
        _await(lambda: bool(client.containers.list(filters={"label": IMAGE_LABEL})))
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert client.images.list(filters={"label": IMAGE_LABEL}) == []

    # The lock went with its holder, and what it left is cleared away.
    made = ensure_image(client, make_reporter(stream=io.StringIO()), recipe=RECIPE)
    assert _read(client, made.tags[0], "/set-up") == "yes"
    assert client.containers.list(all=True) == []


def test_two_at_once_make_it_once(client: docker.DockerClient) -> None:
    said = [io.StringIO(), io.StringIO()]
    slow = Recipe(packages=(), install="sleep 1", setup="")
    made: list[str | None] = []
    threads = [
        threading.Thread(
            target=lambda stream=stream: made.append(ensure_image(client, make_reporter(stream=stream), recipe=slow).id)
        )
        for stream in said
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert len(set(made)) == 1
    texts = [stream.getvalue() for stream in said]
    assert sum("making the lab host image ..." in text for text in texts) == 1
    assert sum("another v100ctl is making" in text for text in texts) == 1


def test_a_registry_that_never_answers_is_given_up(make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_FIRST_ANSWER_TIMEOUT_S", 1.0)
    said = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine_daemon = make_daemon(f"--registry-mirror=http://127.0.0.1:{silent.getsockname()[1]}")
        client = ensure_docker(make_reporter(stream=io.StringIO()), install=False, daemon=engine_daemon)
        assert image.registry_base(client, make_reporter(stream=said), "debian", "12") is None
    assert "no registry gives debian:12 (no answer for 1 s)" in said.getvalue()
    with pytest.raises(ImageNotFound):
        client.images.get("debian:12")


def test_a_mirror_that_cannot_be_reached_is_said_in_apts_words(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(image, "apt_sources", lambda distribution, suite: [f"deb http://127.0.0.1:{port}/debian {suite} main"])
    monkeypatch.setattr(image, "registry_base", lambda *_: None)
    recipe = Recipe(setup="of this test")
    with pytest.raises(
        LabError, match=r"mmdebstrap could not make a .* system from this machine's package mirror: E: "
    ) as caught:
        ensure_image(lab.client, make_reporter(stream=io.StringIO()), recipe=recipe)
    assert str(tmp_path) in (caught.value.hint or "")
    # Docker Engine takes an archive that was cut off for a whole one.
    assert lab.client.images.list(filters={"label": f"{IMAGE_LABEL}={recipe.digest}"}) == []


def _await(condition: Callable[[], bool]) -> None:
    from v100ctl.lab import engine

    assert engine._await(condition, 30)


def test_a_lock_waits_for_its_holder_and_says_so(tmp_path: Path) -> None:
    order: list[str] = []
    entered, waiting = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.exclusive(tmp_path / "lock"):
            entered.set()
            waiting.wait(10)
            order.append("first")

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(10)
    with locks.exclusive(tmp_path / "lock", waiting.set):
        order.append("second")
    holder.join()
    assert order == ["first", "second"]
