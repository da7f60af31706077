"""Lab hosts over real SSH, from every state that a host can be found in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v100ctl.apply.reporter import Reporter
from v100ctl.errors import LabError
from v100ctl.lab import LABEL
from v100ctl.lab.containers import execute
from v100ctl.lab.hosts import PASSWORD_ADMIN, Lab, LabHost, RunningHost, is_running, run_identity
from v100ctl.lab.image import ensure_image


def _ssh(host: RunningHost, *command: str, user: str = "", stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = host.ssh_command(*command)
    if user:
        argv[1:1] = ["-l", user]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, timeout=60)


# --- what a host is ---------------------------------------------------------------------------------------------------


def test_it_is_a_booted_debian_with_an_administrator(lab_ssh: Any) -> None:
    assert lab_ssh.system_info.distribution in {"debian", "ubuntu"}
    assert lab_ssh.check_output("systemctl is-system-running") == "running"
    assert lab_ssh.user().name == "admin"
    assert lab_ssh.check_output("sudo -n id -u") == "0"
    assert lab_ssh.check_output("ps -o comm= -p 1") == "systemd"
    assert lab_ssh.check_output("systemctl --failed --no-legend --plain") == ""


def test_units_really_run_and_are_confined_by_their_group(lab_ssh: Any) -> None:
    with lab_ssh.sudo():
        assert lab_ssh.check_output("systemd-run --wait --pipe --quiet cat /proc/self/cgroup").count("run-u") > 0


def test_its_identity_is_its_own(lab_host: RunningHost, fresh_lab_host: RunningHost) -> None:
    assert lab_host.host_key != fresh_lab_host.host_key
    one, other = (_ssh(host, "cat", "/etc/machine-id").stdout for host in (lab_host, fresh_lab_host))
    assert re.fullmatch(r"[0-9a-f]{32}\n", one)
    assert one != other


def test_only_the_key_logs_in_and_never_as_root(lab_host: RunningHost) -> None:
    offered = _ssh(lab_host, "true", user="nobody-here")
    assert offered.returncode == 255
    assert "Permission denied (publickey)" in offered.stderr
    assert "Permission denied (publickey)" in _ssh(lab_host, "true", user="root").stderr


def test_what_it_must_not_do_to_the_machine_it_cannot(lab_ssh: Any) -> None:
    with lab_ssh.sudo():
        assert lab_ssh.run("date --set=2001-01-01").rc != 0
        mask = int(lab_ssh.check_output("awk '/^CapBnd/ {print $2}' /proc/self/status"), 16)
    sys_module, sys_rawio, sys_time, sys_admin = (1 << bit for bit in (16, 17, 25, 21))
    assert not mask & (sys_module | sys_rawio | sys_time)
    assert mask & sys_admin


def test_a_sudo_password_is_asked_for(make_lab_host: Callable[..., RunningHost]) -> None:
    host = make_lab_host(sudo_password="four words: é 'n\" $x")
    assert _ssh(host, "sudo", "-n", "true", user=PASSWORD_ADMIN).returncode != 0
    assert _ssh(host, "sudo", "-S", "id", "-u", user=PASSWORD_ADMIN, stdin="wrong\n").returncode != 0
    right = _ssh(host, "sudo", "-S", "-p", "", "id", "-u", user=PASSWORD_ADMIN, stdin="four words: é 'n\" $x\n")
    assert right.stdout == "0\n"
    assert "four words" not in json.dumps(host.container.attrs)
    assert execute(host.container, ["ls", "/root/.lab-password"])[0] != 0


# --- reaching it ------------------------------------------------------------------------------------------------------


def test_a_host_with_another_key_at_its_address_is_refused(fresh_lab_host: RunningHost) -> None:
    code, _ = fresh_lab_host.execute("sh", "-c", "rm /etc/ssh/ssh_host_ed25519_key* && systemctl restart ssh")
    assert code == 0
    refused = _ssh(fresh_lab_host, "true")
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr


def test_ansible_reaches_it_by_the_inventory_alone(
    lab_host: RunningHost, lab_inventory: Callable[..., Path], tmp_path: Path
) -> None:
    inventory = lab_inventory(lab_host, variables={"greeting": "it's {50%}"}, groups={"some": [lab_host.name]})
    # A user's own configuration that would send the connection elsewhere.
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text("Host *\n  Port 1\n  User nobody\n", encoding="utf-8")
    result = subprocess.run(
        ["ansible", "some", "-i", str(inventory), "-m", "ansible.builtin.command", "-a", "id -un"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(home), "ANSIBLE_HOST_KEY_CHECKING": "true"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "root"


def test_apt_inside_knows_what_this_machine_knows(lab_ssh: Any) -> None:
    from v100ctl.lab.image import apt_settings

    with lab_ssh.sudo():
        assert lab_ssh.file("/etc/apt/apt.conf.d/90v100ctl-lab").content_string == apt_settings()
        assert lab_ssh.run("apt-get update").rc == 0


# --- states it is found in --------------------------------------------------------------------------------------------


@pytest.fixture
def host(make_lab_host: Callable[..., RunningHost]) -> RunningHost:
    return make_lab_host()


def _up_again(lab: Lab, host: RunningHost, reporter: Reporter) -> RunningHost:
    return lab.up(LabHost(host.name, owner=run_identity()), ensure_image(lab.client, reporter), reporter)


def test_one_that_runs_is_left_alone(lab: Lab, host: RunningHost, lab_reporter: Reporter) -> None:
    started = host.container.attrs["State"]["StartedAt"]
    again = _up_again(lab, host, lab_reporter)
    again.container.reload()
    assert again.container.id == host.container.id
    assert again.container.attrs["State"]["StartedAt"] == started


@pytest.mark.parametrize("how", ["shut down inside", "stopped", "killed"])
def test_one_that_has_stopped_is_started_with_what_it_holds(
    how: str, lab: Lab, host: RunningHost, lab_reporter: Reporter
) -> None:
    assert _ssh(host, "sudo", "touch", "/var/lib/kept").returncode == 0
    if how == "shut down inside":
        _ssh(host, "sudo", "systemctl", "poweroff")
        host.container.wait(timeout=60)
    elif how == "stopped":
        host.container.stop()
    else:
        host.container.kill()
    again = _up_again(lab, host, lab_reporter)
    assert again.container.id == host.container.id
    assert again.host_key == host.host_key
    assert _ssh(again, "test", "-e", "/var/lib/kept").returncode == 0


def test_one_that_is_paused_is_made_anew(lab: Lab, host: RunningHost, lab_reporter: Reporter) -> None:
    host.container.pause()
    assert _ssh(_up_again(lab, host, lab_reporter), "true").returncode == 0


def test_one_made_in_another_way_is_replaced(lab: Lab, host: RunningHost, lab_reporter: Reporter) -> None:
    image = ensure_image(lab.client, lab_reporter)
    other = lab.client.images.get(host.container.commit().id or "")
    try:
        replaced = lab.up(LabHost(host.name, owner=run_identity()), other, lab_reporter)
        assert replaced.container.id != host.container.id
        assert _ssh(replaced, "true").returncode == 0
        assert lab.up(LabHost(host.name, owner=run_identity()), image, lab_reporter).container.id != replaced.container.id
    finally:
        lab.client.images.remove(other.id or "", force=True)


def test_the_program_that_made_it_may_be_killed_at_any_moment(lab: Lab, lab_reporter: Reporter) -> None:
    name = f"killed-{os.getpid()}"
    try:
        # Nine moments over the second or two that it takes; a later run may find any state that these leave.
        for tenths in range(1, 10):
            victim = subprocess.Popen(
                [sys.executable, "-m", "v100ctl.lab", "up", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                victim.wait(timeout=tenths * 0.2)
            except subprocess.TimeoutExpired:
                victim.send_signal(signal.SIGKILL)
                victim.wait()
            if tenths % 3 == 0:
                lab.down(name)
        up = lab.up(LabHost(name), ensure_image(lab.client, lab_reporter), lab_reporter)
        assert _ssh(up, "true").returncode == 0
    finally:
        lab.down(name)


def test_down_removes_what_is_named_and_nothing_else(lab: Lab, lab_host: RunningHost, host: RunningHost) -> None:
    assert lab.down(host.name) == [host.name]
    assert lab.down(host.name) == []
    names = [state.name for state in lab.list()]
    assert host.name not in names
    assert lab_host.name in names
    assert f"{host.name}," not in host.known_hosts_path.read_text(encoding="utf-8")
    assert _ssh(lab_host, "true").returncode == 0


def test_a_foreign_container_of_its_name_is_never_touched(lab: Lab, lab_reporter: Reporter) -> None:
    image = ensure_image(lab.client, lab_reporter)
    for labels, whose in (({}, "is not a lab host"), ({LABEL: "x", f"{LABEL}.folder": "/other"}, "belongs to the lab in /other")):
        wanted = LabHost(f"foreign-{os.getpid()}")
        foreign = lab.client.containers.create(image.tags[0], ["true"], name=wanted.container_name, labels=labels)
        try:
            with pytest.raises(LabError, match=whose):
                lab.up(wanted, image, lab_reporter)
            lab.down(wanted.name)
            foreign.reload()
            assert foreign.status == "created"
        finally:
            foreign.remove()


def test_one_that_does_not_boot_says_what_its_journal_says(
    lab: Lab, host: RunningHost, lab_reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("v100ctl.lab.hosts._BOOT_TIMEOUT_S", 5.0)
    assert host.execute("sh", "-c", "echo 'Port nonsense' > /etc/ssh/sshd_config.d/20-broken.conf")[0] == 0
    host.container.stop()
    with pytest.raises(LabError, match="did not boot within 5 s: sshd does not answer") as caught:
        _up_again(lab, host, lab_reporter)
    assert "nonsense" in caught.value.message or "ssh.service" in caught.value.message
    assert host.container.name in (caught.value.hint or "")


def test_hosts_of_a_run_that_is_over_are_found_and_removed(lab: Lab, lab_reporter: Reporter) -> None:
    with subprocess.Popen(["sleep", "0"]) as process:
        gone = f"{process.pid}:1"
    assert not is_running(gone)
    assert is_running(run_identity())
    orphan = LabHost(f"orphan-{os.getpid()}", owner=gone)
    lab.up(orphan, ensure_image(lab.client, lab_reporter), lab_reporter)
    assert lab.down_orphans() == [orphan.name]
    assert lab.down_orphans() == []
