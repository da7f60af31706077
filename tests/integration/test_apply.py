"""Playbooks over real SSH to a lab host: passwords, and what signals and broken connections leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from v100ctl.apply import ApplyResult, PlainReporter, Secrets, run_playbook

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

PING = {"name": "Ping", "ansible.builtin.ping": {}}
NEVER_S = 86_399


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a path short enough for Unix sockets, which pytest's own ones need not have."""
    path = Path(tempfile.mkdtemp(prefix="v100a"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path)


def write(path: Path, task: dict[str, Any], **play: Any) -> str:
    path.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task], **play}]))
    return str(path)


def inventory(host: RunningHost, **variables: Any) -> dict[str, Any]:
    return {"all": {"hosts": {host.name: {**host.variables(), **variables}}}}


def quiet() -> PlainReporter:
    return PlainReporter(Console(quiet=True))


def processes(words: str) -> list[str]:
    """Command lines that hold ``words``, on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what} in a minute"
        time.sleep(0.05)


def test_a_run_leaves_no_connection_open(lab_host: RunningHost, tmp_path: Path, temp: Path) -> None:
    seen = f"ls -d {temp}/v100ctl-apply-*/cp/*"
    task = {"name": "Look", "ansible.builtin.command": f"sh -c '{seen}'", "delegate_to": "localhost", "become": False}
    playbook = tmp_path / "look.yml"
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [PING, task]}]))

    result = run_playbook(str(playbook), inventory(lab_host), None, reporter=quiet(), capture=["Look"])

    assert result.succeeded, result.failures
    socket = result.results["Look"][lab_host.name]["stdout"]
    assert socket, "the connection was shared while the playbook ran"
    assert processes(socket) == []
    assert processes(str(temp)) == []
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        (Secrets(become_password="open sesame"), None),
        (Secrets(become_password="close sesame"), "Incorrect sudo password"),
        (None, "Missing sudo password"),
    ],
)
def test_sudo_asks_for_a_password(
    make_lab_host: Callable[..., RunningHost], tmp_path: Path, secrets: Secrets | None, message: str | None
) -> None:
    from v100ctl.lab.hosts import PASSWORD_ADMIN

    host = make_lab_host(sudo_password="open sesame")
    playbook = write(tmp_path / "ping.yml", PING, become=True)

    result = run_playbook(playbook, inventory(host, ansible_user=PASSWORD_ADMIN), None, reporter=quiet(), passwords=secrets)

    assert [failure.message for failure in result.failures] == ([] if message is None else [message])
    assert all(failure.hint for failure in result.failures)


def test_a_connection_that_is_cut_is_unreachable_and_the_next_run_works(lab_host: RunningHost, tmp_path: Path) -> None:
    cut = write(tmp_path / "cut.yml", {"name": "Cut", "ansible.builtin.command": "pkill -9 -f 'sshd: [a-z]'"})

    result = run_playbook(cut, inventory(lab_host, ansible_ssh_retries=0), None, reporter=quiet())

    (failure,) = result.failures
    assert (result.hosts[lab_host.name].status, failure.task) == ("unreachable", "Cut")
    assert failure.hint is not None and "the connection broke" in failure.hint
    assert run_playbook(write(tmp_path / "ping.yml", PING), inventory(lab_host), None, reporter=quiet()).succeeded


def test_an_unknown_and_a_changed_host_key_are_refused(lab_host: RunningHost, tmp_path: Path) -> None:
    kind, _, key = lab_host.host_key.partition(" ")
    unknown, changed = tmp_path / "unknown", tmp_path / "changed"
    unknown.touch()
    # One bit of the key is another.
    changed.write_text(f"{lab_host.address} {kind} {key[:-1]}{'A' if key[-1] != 'A' else 'Q'}\n")
    playbook = write(tmp_path / "ping.yml", PING)

    def hint(known_hosts: Path) -> str | None:
        arguments = f"-F /dev/null -o GlobalKnownHostsFile=/dev/null -o UserKnownHostsFile={known_hosts}"
        variables = {"ansible_ssh_common_args": arguments, "ansible_ssh_extra_args": f"-o HostKeyAlgorithms={kind}"}
        result: ApplyResult = run_playbook(playbook, inventory(lab_host, **variables), None, reporter=quiet())
        assert result.hosts[lab_host.name].status == "unreachable"
        return result.failures[0].hint

    assert "is not known here" in (hint(unknown) or "")
    assert "is not the known one" in (hint(changed) or "")
    assert unknown.read_text() == ""


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGINT, signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP]])
def test_a_signal_leaves_nothing_running(
    lab_host: RunningHost, tmp_path: Path, temp: Path, numbers: list[signal.Signals]
) -> None:
    process = start(lab_host, tmp_path)

    for number in numbers:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == -numbers[0]
    assert "stopping Ansible" in stderr
    assert processes(str(temp)) == []
    assert list(temp.iterdir()) == []


def test_ansible_does_not_outlive_a_killed_program_and_its_folder_goes_with_the_next_run(
    lab_host: RunningHost, tmp_path: Path, temp: Path
) -> None:
    process = start(lab_host, tmp_path)
    (left,) = temp.iterdir()

    process.kill()
    process.communicate(timeout=60)

    wait_until(lambda: not processes("playbook_process.py --parent " + str(process.pid)), "end of Ansible")
    assert left.exists()
    assert run_playbook(write(tmp_path / "ping.yml", PING), inventory(lab_host), None, reporter=quiet()).succeeded
    assert list(temp.iterdir()) == []


def start(host: RunningHost, tmp_path: Path) -> subprocess.Popen[str]:
    """A program of its own whose task sleeps on ``host``, once it does."""
    playbook = write(tmp_path / "sleep.yml", {"name": "Sleep", "ansible.builtin.command": f"sleep {NEVER_S}"})
    program = (
        # pytest may have been started with signals ignored, as `nohup` and background jobs are.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from v100ctl.apply import make_reporter, run_playbook\n"
        f"run_playbook({playbook!r}, {inventory(host)!r}, None, reporter=make_reporter(), title='Sleep')\n"
    )
    host.execute("pkill", "-x", "sleep")
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: host.execute("pgrep", "-x", "-f", f"sleep {NEVER_S}")[0] == 0, "task on the host")
    return process
