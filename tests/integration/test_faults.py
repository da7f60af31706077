"""Bad input and faults: each ends in one paragraph that says what to do, exit 1, and the host as it was."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.device.shapes import MODELS as SHAPES
from tests.device.shapes import write
from v100ctl.lab.hosts import PASSWORD_ADMIN

from .hosts import Done, WriteInventory, on_host, serving_variables, snapshot, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

# The engine is compiled once, by the first `try`.
pytestmark = pytest.mark.usefixtures("practiced")

MODELS = "/var/lib/v100ctl/models"


def refused(done: Done, *texts: str) -> None:
    """Exit 1 and one paragraph with all of ``texts``: on stderr, or in the table where a host is one row of many."""
    assert done.code == 1, (done.out, done.err)
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err + done.out, (done.out, done.err)


def test_a_port_taken_by_another_process_is_named(lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    inventory = lab_inventory(lab_host, variables=serving_variables(port=8017))
    on_host(lab_host, "systemd-run --quiet --unit squatter python3 -m http.server --bind 127.0.0.1 8017; sleep 1")
    try:
        before = snapshot(lab_host)
        refused(v100ctl("provision", "-i", inventory), "port-taken", "http.server", "8018")
        assert snapshot(lab_host) == before
    finally:
        on_host(lab_host, "systemctl stop squatter")
    assert v100ctl("plan", "-i", inventory).code == 2, "the port is free again"


def test_an_unsupported_distribution_is_refused(fresh_lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    on_host(fresh_lab_host, "printf 'ID=gentoo\\nVERSION_ID=2.17\\nPRETTY_NAME=\"Gentoo 2.17\"\\n' > /etc/os-release")
    inventory = lab_inventory(fresh_lab_host, variables=serving_variables())
    before = snapshot(fresh_lab_host)
    refused(v100ctl("provision", "-i", inventory), "distribution-unsupported", "Gentoo 2.17", "Debian 12")
    assert snapshot(fresh_lab_host) == before


def test_a_full_disk_is_seen_before_anything_happens(fresh_lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    on_host(fresh_lab_host, "mkdir -p /var/lib/v100ctl && mount -t tmpfs -o size=64m tmpfs /var/lib/v100ctl")
    inventory = lab_inventory(fresh_lab_host, variables=serving_variables())
    before = snapshot(fresh_lab_host)
    refused(v100ctl("provision", "-i", inventory), "disk-space", "/var/lib/v100ctl has 64 MiB free")
    assert snapshot(fresh_lab_host) == before


def test_a_disk_that_fills_in_the_middle_is_survived(fresh_lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    # The plan cannot know the size of a model that the inventory does not give.
    variables = serving_variables()
    del variables["llm_server_instances"]["chat"]["model"]["size_bytes"]
    on_host(fresh_lab_host, f"mkdir -p {MODELS} && mount -t tmpfs -o size=40m tmpfs {MODELS}")
    inventory = lab_inventory(fresh_lab_host, variables=variables)
    done = v100ctl("provision", "-i", inventory)
    refused(done, "hint:")
    assert "No space left" in done.err or "disk" in done.err.lower()
    assert on_host(fresh_lab_host, f"find {MODELS} -name '*.gguf' -not -name '.*'") == "", (
        "nothing half-written under its own name"
    )
    on_host(fresh_lab_host, f"umount {MODELS}")
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err


def test_a_wrong_sha256_is_found_before_a_host_is_touched(
    lab_host: RunningHost, lab_inventory: WriteInventory, tmp_path: Path
) -> None:
    wrong = tmp_path / "model.gguf"
    write(SHAPES["smallest"](), wrong)
    variables = serving_variables(port=8018)
    variables["llm_server_instances"]["chat"]["model"] = {"from_controller": str(wrong), "sha256": "ab" * 32}
    inventory = lab_inventory(lab_host, variables=variables)
    before = snapshot(lab_host)
    refused(v100ctl("provision", "-i", inventory), "sha256", "ab" * 32)
    assert snapshot(lab_host) == before


def test_what_is_no_model_is_refused_before_a_host_is_touched(
    lab_host: RunningHost, lab_inventory: WriteInventory, tmp_path: Path
) -> None:
    page = tmp_path / "model.gguf"
    page.write_text("<!DOCTYPE html><title>Sign in to download</title>", encoding="utf-8")
    variables = serving_variables(port=8018)
    variables["llm_server_instances"]["chat"]["model"] = {"from_controller": str(page), "sha256": "ab" * 32}
    before = snapshot(lab_host)
    refused(v100ctl("provision", "-i", lab_inventory(lab_host, variables=variables)), "model-invalid", "GGUF")
    assert snapshot(lab_host) == before


def test_a_busy_package_manager_is_waited_for_and_named(fresh_lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    hold = (
        "import fcntl, time; lock = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); time.sleep(600)"
    )
    on_host(fresh_lab_host, f'systemd-run --quiet --unit holder python3 -c "{hold}"; sleep 1')
    inventory = lab_inventory(fresh_lab_host, variables={**serving_variables(), "preflight_package_lock_timeout_s": 6})
    done = v100ctl("provision", "-i", inventory)
    refused(done, "python3", "pid")
    on_host(fresh_lab_host, "systemctl stop holder")
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err


def test_a_host_without_python_is_offered_one(fresh_lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    on_host(
        fresh_lab_host, "dpkg --purge --force-depends python3 python3-minimal python3.11 python3.11-minimal >/dev/null 2>&1; true"
    )
    assert on_host(fresh_lab_host, "command -v python3 || echo none").strip() == "none"
    inventory = lab_inventory(fresh_lab_host, variables=serving_variables())
    refused(v100ctl("provision", "-i", inventory), "no Python", "apt-get install")
    done = v100ctl("provision", "-i", inventory, "--yes", "--check", "--json")
    assert done.code == 1, "--check installs nothing"
    done = v100ctl("provision", "-i", inventory, "--yes", "--json")
    assert done.code == 0, done.err


def test_a_sudo_password_works_for_probe_and_roles(
    make_lab_host: Callable[..., RunningHost], lab_inventory: WriteInventory
) -> None:
    import pexpect

    host = dataclasses.replace(make_lab_host(sudo_password="a sudo 'pass\"word"), user=PASSWORD_ADMIN)
    inventory = lab_inventory(host, variables=serving_variables())
    refused(v100ctl("plan", "-i", inventory), "sudo")
    child = pexpect.spawn(
        sys.executable,
        ["-P", "-m", "v100ctl", "provision", "-i", str(inventory), "-K", "--no-color"],
        encoding="utf-8",
        timeout=900,
    )
    child.expect("sudo password: ")
    child.sendline("a sudo 'pass\"word")
    output = child.read()
    child.close()
    assert child.exitstatus == 0, output
    assert 'pass"word' not in output
    variables = {**serving_variables(), "ansible_become_password": "wrong"}
    refused(v100ctl("plan", "-i", lab_inventory(host, variables=variables)), "password")
    variables["ansible_become_password"] = "a sudo 'pass\"word"
    done = v100ctl("provision", "-i", lab_inventory(host, variables=variables), "--json")
    assert (done.code, done.document["hosts"][host.name]["status"]) == (0, "unchanged"), done.err


def test_an_unreachable_host_does_not_keep_the_others(lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    import yaml

    inventory = lab_inventory(lab_host, variables=serving_variables(port=8019))
    document = yaml.safe_load(inventory.read_text())
    # Port 1 of loopback: refused at once, and no other machine is asked.
    document["all"]["hosts"]["gone"] = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_user": "nobody"}
    inventory.write_text(yaml.safe_dump(document))
    done = v100ctl("plan", "-i", inventory, "--json")
    assert done.code == 1
    hosts = done.document["hosts"]
    assert (hosts["gone"]["verdict"], hosts[lab_host.name]["verdict"]) == ("unreachable", "ok")
