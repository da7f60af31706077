"""What `v100ctl try --down` and `--purge` leave behind, on an engine that can be stopped for it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from v100ctl import practice
from v100ctl.apply.reporter import make_reporter
from v100ctl.lab import LABEL, engine, lab_dir
from v100ctl.lab.engine import Daemon, ensure_docker
from v100ctl.lab.hosts import FOLDER_LABEL, Lab
from v100ctl.lab.image import IMAGE_LABEL
from v100ctl.paths import cache_dir, state_dir

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starting a Docker Engine takes root")


@pytest.fixture
def own_engine(make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Daemon:
    """This machine's own engine, as far as the code under test knows; not started."""
    daemon = make_daemon()
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engine, "system_daemon", lambda: daemon)
    return daemon


def _start(said: io.StringIO | None = None) -> docker.DockerClient:
    return ensure_docker(make_reporter(stream=said or io.StringIO()), install=False)


def _fill(client: docker.DockerClient) -> None:
    """One object of each kind that the lab keeps: two hosts, of which one runs, an image, a cache entry, a log."""
    listed = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True).stdout
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in ["/bin/sleep", *(word for word in listed.split() if word.startswith("/"))]:
            archive.add(path, arcname=path.lstrip("/"))
    client.api.import_image_from_data(
        buffer.getvalue(), repository="v100ctl/lab-host", tag="x-1", changes=[f"LABEL {IMAGE_LABEL}=x"]
    )
    for name in (practice.HOST, "other"):
        container = client.containers.create(
            "v100ctl/lab-host:x-1",
            ["/bin/sleep", "600"],
            name=f"v100ctl-{name}",
            labels={LABEL: name, FOLDER_LABEL: str(lab_dir())},
            network_mode="none",
            stop_signal="SIGKILL",
        )
        if name == practice.HOST:
            container.start()
    for file in (cache_dir() / "models" / "x", state_dir() / "logs" / "x", practice.inventory_path()):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x", encoding="utf-8")


def _dockerd_runs(daemon: Daemon) -> bool:
    pid = engine._read_pid(daemon.pid_file)
    return pid is not None and engine._program(pid) == "dockerd"


def test_down_takes_the_practice_hosts_and_leaves_the_rest(own_engine: Daemon) -> None:
    client = _start()
    _fill(client)
    reporter = make_reporter(stream=io.StringIO())
    assert practice.down(reporter) == [practice.HOST]
    assert practice.down(reporter) == []
    assert [state.name for state in Lab(client).list()] == ["other"]
    assert not practice.inventory_path().exists()
    assert client.images.get("v100ctl/lab-host:x-1").tags
    assert (cache_dir() / "models" / "x").exists()


@pytest.mark.parametrize("engine_is", ["running", "killed"])
def test_purge_leaves_nothing_and_may_be_repeated(engine_is: str, own_engine: Daemon) -> None:
    _fill(_start())
    if engine_is == "killed":
        pid = engine._read_pid(own_engine.pid_file)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert engine._await(lambda: not _dockerd_runs(own_engine), 10)
    practice.purge(make_reporter(stream=io.StringIO()))
    assert not _dockerd_runs(own_engine)
    assert not cache_dir().exists()
    assert not state_dir().exists()

    said = io.StringIO()
    practice.purge(make_reporter(stream=said))
    assert "starting Docker Engine" not in said.getvalue()
    assert not state_dir().exists()

    # What the engine still holds on its disk is nothing of the lab's.
    client = _start()
    assert client.containers.list(all=True) == []
    assert client.images.list(all=True) == []


def test_purge_leaves_an_engine_that_others_use(own_engine: Daemon) -> None:
    client = _start()
    _fill(client)
    client.images.get("v100ctl/lab-host:x-1").tag("somebodys", "1")
    foreign = client.containers.run("somebodys:1", ["/bin/sleep", "600"], name="theirs", network_mode="none", detach=True)
    said = io.StringIO()
    practice.purge(make_reporter(stream=said))
    foreign.reload()
    assert foreign.status == "running"
    assert _dockerd_runs(own_engine)
    assert "Docker Engine is left running: it runs theirs" in said.getvalue()
    assert [container.name for container in client.containers.list(all=True)] == ["theirs"]
    foreign.remove(force=True)
