"""The launcher with a real Python, real pip and real packages: on this machine, and on a bare one."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.models.containers import Container

from v100ctl.apply.reporter import make_reporter
from v100ctl.lab.engine import ensure_docker
from v100ctl.lab.image import ensure_image

# The launcher's own logic has unit tests; installing everything twice takes minutes.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a clone of this checkout would hold, with changes that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    folder = tmp_path / "a checkout"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def test_killed_while_pip_is_at_work_the_next_run_completes(checkout: Path) -> None:
    # Without uv: pip is what every machine has, and the slower one to kill.
    path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "uv").exists())
    variables = {**environment(), "PATH": path}
    process = subprocess.Popen(
        [checkout / "v100ctl", "--version"], env=variables, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not list(checkout.glob(".venv/lib/python3.*/site-packages/ansible")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(random.random())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (checkout / ".venv/v100ctl.ready").exists()

    result = subprocess.run([checkout / "v100ctl", "--version"], env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    again = subprocess.run([checkout / "v100ctl", "--version"], env=variables, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout, again.stderr) == (0, result.stdout, "")
    # Every package is whole, and the programs that the tool starts are there.
    subprocess.run([checkout / ".venv/bin/python", "-m", "pip", "check"], env=variables, check=True)
    subprocess.run([checkout / ".venv/bin/ansible-playbook", "--version"], env=variables, check=True)


@pytest.fixture
def bare_machine(checkout: Path) -> Iterator[Container]:
    """A Debian with Python, without its venv module, that trusts whom this machine trusts; the checkout is in /srv/v100ctl."""
    client = ensure_docker(make_reporter(), install=True)
    image = ensure_image(client, make_reporter())
    volumes = {path: {"bind": path, "mode": "ro"} for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()}
    settings = {name: value for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_INDEX_URL")}
    container = client.containers.run(
        image,
        ["sleep", "infinity"],
        entrypoint="",
        detach=True,
        init=True,
        volumes=volumes,
        environment=settings,
        labels={"v100ctl.lab": "launcher-test"},
    )
    try:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as opened:
            opened.add(checkout, "v100ctl")
        container.put_archive("/srv", archive.getvalue())
        yield container
    finally:
        container.remove(force=True, v=True)
        client.close()


def run_in(container: Container, *command: str, user: str = "root") -> tuple[int, str, str]:
    code, (stdout, stderr) = container.exec_run(list(command), user=user, demux=True)
    return code, (stdout or b"").decode(), (stderr or b"").decode()


def test_bare_machine_says_what_is_missing_and_installs_it_when_told(bare_machine: Container) -> None:
    launcher = "/srv/v100ctl/v100ctl"
    _, version, _ = run_in(bare_machine, "/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2], end='')")
    line = f"apt-get update && apt-get install -y python{version}-venv"

    code, stdout, stderr = run_in(bare_machine, launcher, "--version", user="nobody")
    assert (code, stdout) == (1, "")
    assert "cannot write to /srv/v100ctl" in stderr

    code, stdout, stderr = run_in(bare_machine, "env", "V100CTL_VENV=/tmp/venv", launcher, "--version", user="nobody")
    assert (code, stdout) == (1, "")
    assert f"run `sudo sh -c '{line}'`" in stderr

    code, stdout, stderr = run_in(bare_machine, launcher, "--version")
    assert (code, stdout) == (1, "")
    assert stderr == (
        f"error: /usr/bin/python3.11 has no venv module\nhint: run `{line}`, then this again; with `--yes` it is run for you\n"
    )

    _, stdout, stderr = run_in(bare_machine, launcher, "--yes", "--version")
    assert f"running `{line}`" in stderr
    # apt's own words are no data.
    assert "Setting up" not in stdout

    # Once it is there, everybody may use it, from anywhere and without a word.
    run_in(bare_machine, "ln", "-s", launcher, "/usr/local/bin/v100ctl")
    code, stdout, stderr = run_in(bare_machine, "v100ctl", "--version", user="nobody")
    assert (code, stderr) == (0, "")
    assert stdout
