"""A Docker Engine beside the machine's own: started, killed in the worst ways, and started again."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tarfile

import docker
import pytest

from v100ctl.apply.reporter import Reporter, make_reporter
from v100ctl.errors import LabError
from v100ctl.lab import engine
from v100ctl.lab.engine import Daemon, ensure_docker, stop_engine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starting a Docker Engine takes root")


def _reporter() -> Reporter:
    return make_reporter(stream=io.StringIO())


def _import_sleep(client: docker.DockerClient) -> str:
    """An image that holds this machine's `sleep` and the libraries that it is linked with."""
    listed = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True).stdout
    libraries = [word for word in listed.split() if word.startswith("/")]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in ["/bin/sleep", *libraries]:
            archive.add(path, arcname=path.lstrip("/"))
    client.api.import_image_from_data(buffer.getvalue(), repository="sleep", tag="1")
    return "sleep:1"


def _pid_of(daemon: Daemon) -> int:
    pid = engine._read_pid(daemon.pid_file)
    assert pid is not None
    return pid


def _kill_hard(daemon: Daemon) -> int:
    pid = _pid_of(daemon)
    assert engine._program(pid) == "dockerd"
    os.kill(pid, signal.SIGKILL)
    assert engine._await(lambda: engine._program(pid) is None, 10)
    return pid


def test_a_killed_engine_is_started_again_with_its_containers(daemon: Daemon) -> None:
    client = ensure_docker(_reporter(), install=False, daemon=daemon)
    container = client.containers.run(
        _import_sleep(client), ["/bin/sleep", "600"], name="left", network_mode="none", stop_signal="SIGKILL", detach=True
    )
    _kill_hard(daemon)
    # This dockerd's kernel-side tie takes its containerd along; other versions leave one behind, which keeps its database locked.
    orphan = subprocess.Popen(
        ["containerd", "--config", str(daemon.containerd_configuration)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    # What the pid files mean after a reboot: other programs run under the numbers.
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert engine._await(lambda: engine._orphaned_containerds(daemon) == [orphan.pid], 10)
        daemon.pid_file.write_text(str(other.pid), encoding="ascii")
        daemon.containerd_pid_file.write_text(str(other.pid), encoding="ascii")
        assert daemon.socket.is_socket()

        again = ensure_docker(_reporter(), install=False, daemon=daemon)

        assert other.poll() is None, "a program that only had the number must be left alone"
        assert orphan.poll() is not None
        assert _pid_of(daemon) != other.pid
    finally:
        for process in (other, orphan):
            process.kill()
            process.wait()
    left = again.containers.get(container.id or "")
    left.start()
    left.reload()
    assert left.status == "running"
    left.remove(force=True)


def test_a_zombie_under_the_pid_file_is_no_obstacle(daemon: Daemon) -> None:
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    try:
        assert engine._await(lambda: (engine._stat_of(zombie) or ("", "", 0))[1] == "Z", 10)
        daemon.pid_file.write_text(str(zombie), encoding="ascii")
        assert ensure_docker(_reporter(), install=False, daemon=daemon).ping()
    finally:
        os.waitpid(zombie, 0)


def test_a_folder_in_the_sockets_place_is_no_obstacle_while_empty(daemon: Daemon) -> None:
    daemon.socket.mkdir()
    (daemon.socket / "kept").touch()
    with pytest.raises(LabError, match="in the place of Docker Engine's socket"):
        ensure_docker(_reporter(), install=False, daemon=daemon)
    (daemon.socket / "kept").unlink()
    assert ensure_docker(_reporter(), install=False, daemon=daemon).ping()


def test_a_running_engine_is_left_alone_and_only_ones_own_is_stopped(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_docker(_reporter(), install=False, daemon=daemon)
    pid = _pid_of(daemon)
    ensure_docker(_reporter(), install=False, daemon=daemon)
    assert _pid_of(daemon) == pid

    own = os.environ["XDG_STATE_HOME"]
    monkeypatch.setenv("XDG_STATE_HOME", f"{own}-other")
    assert not stop_engine(_reporter(), daemon=daemon)
    assert engine._program(pid) == "dockerd"
    monkeypatch.setenv("XDG_STATE_HOME", own)
    assert stop_engine(_reporter(), daemon=daemon)
    assert engine._program(pid) is None
    assert engine._orphaned_containerds(daemon) == []
    assert not stop_engine(_reporter(), daemon=daemon)


def test_an_engine_that_cannot_start_says_why_in_its_own_words(daemon: Daemon) -> None:
    broken = Daemon(
        daemon.socket, daemon.pid_file, daemon.exec_root, daemon.log_file, (*daemon.arguments, "--storage-driver=nonsense")
    )
    with pytest.raises(LabError, match=r"dockerd could not start: .*driver not supported") as caught:
        ensure_docker(_reporter(), install=False, daemon=broken)
    assert str(daemon.log_file) in (caught.value.hint or "")
