"""The role `nvidia_driver` on hosts that play V100s: another branch, what others left behind, and the reboot between.

What a repository of NVIDIA's gives is played by a signed one on the host, with small packages of the same names; apt, dpkg and
gpg are real. What is loaded after a reboot is what dpkg knows then.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from v100ctl.compare import compare
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.lab.containers import put_file
from v100ctl.plan import plan, probe_request
from v100ctl.plan.driver_actions import is_driver_package, upstream_version
from v100ctl.probe import probe_host
from v100ctl.probe.connection import Connection

from .hosts import ROOT, Done, WriteInventory, on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

# The scenario `nvidia_driver` installs, pins and mends a driver by default.
pytestmark = pytest.mark.slow

PORT = 8099
MIRROR = f"http://127.0.0.1:{PORT}"
OLD, NEW, NEXT_BRANCH = "580.126.20", "580.159.04", "590.48.01"
INSTANCE = {"model": {"path": "/srv/models/any.gguf", "sha256": "ab" * 32}, "gpus": [0], "port": 8000}
UNIT = f"""[Unit]
After=network.target
[Service]
ExecStart=/usr/bin/python3 /srv/mirror_server.py /srv/mirror {PORT} /srv/mirror.log
[Install]
WantedBy=multi-user.target
"""
# What the role replaces and what it must not be stopped by: a `.run` driver's uninstaller, a list with a key that was rotated,
# holds, and a package that a killed dpkg left unpacked.
LEFT_BEHIND = f"""
printf '#!/bin/sh\\necho "$@" > /root/uninstalled\\nrm -f "$0"\\n' > /usr/bin/nvidia-uninstall
chmod 0755 /usr/bin/nvidia-uninstall
cp /srv/rotated.asc /etc/apt/trusted.gpg.d/cudatools.asc
echo 'deb {MIRROR}/debian12/x86_64/ /' > /etc/apt/sources.list.d/cuda.list
apt-mark hold nvidia-driver nvidia-kernel-dkms libcuda1 libnvidia-ml1 nvidia-smi
sed -i '/^Package: nvidia-smi$/,/^$/s/^Status: hold ok installed/Status: hold ok unpacked/' /var/lib/dpkg/status
dpkg --audit | grep -q nvidia-smi
"""


def facts_of(host: RunningHost, variables: dict[str, Any]) -> Facts:
    """What the probe sees over SSH, asked for what a plan with these variables needs."""
    return probe_host(Connection.from_vars(host.name, host.variables()), probe_request(parse_config(host.name, variables)))


def differences(host: RunningHost, variables: dict[str, Any]) -> list[str]:
    """The ids of the driver's findings."""
    facts = facts_of(host, variables)
    decided = plan(host.name, parse_config(host.name, variables), facts, as_of=date(2026, 11, 29))
    return sorted(item.id for item in compare(decided, facts) if item.role == "nvidia_driver")


def driver_packages(host: RunningHost) -> dict[str, str]:
    """The installed packages of a driver, with their versions as NVIDIA numbers them."""
    listed = on_host(host, "dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\\n'").splitlines()
    rows = [line.split() for line in listed if not line.startswith("not-installed")]
    return {name: upstream_version(version) for _, name, version in rows if is_driver_package(name, version)}


def playbook_of(checkout: Path) -> str:
    """A playbook that plans and runs the role, then tells that it went on."""
    decision = "{{ v100ctl_plan.driver | combine({'untrusted_keys': rotated} if rotated is defined else {}) }}"
    tasks = [
        {"ansible.builtin.include_tasks": str(checkout / "playbooks/tasks/plan.yml")},
        {"ansible.builtin.include_role": {"name": "nvidia_driver"}, "vars": {"nvidia_driver_decision": decision}},
        {"ansible.builtin.debug": {"msg": "what follows needs the driver"}},
    ]
    return yaml.safe_dump([{"hosts": "all", "gather_facts": False, "become": True, "tasks": tasks}])


@pytest.fixture
def play(tmp_path: Path, lab_inventory: WriteInventory) -> Callable[..., Done]:
    """Runs the role on a host as a playbook does, with variables; the last task tells whether the play went on after it."""
    playbook = tmp_path / "site.yml"
    playbook.write_text(playbook_of(ROOT), encoding="utf-8")

    def run(host: RunningHost, variables: dict[str, Any]) -> Done:
        argv = [str(Path(sys.executable).with_name("ansible-playbook"))]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
            "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        }
        done = subprocess.run(
            [*argv, "-i", str(lab_inventory(host, variables=variables)), str(playbook)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def changed(done: Done) -> int:
    """How many tasks of a run changed something."""
    assert done.code == 0, done.out + done.err
    found = re.search(r"changed=([0-9]+)", done.out.rpartition("PLAY RECAP")[2])
    assert found is not None
    return int(found.group(1))


def serve_mirror(host: RunningHost, *versions: str) -> tuple[str, str]:
    """Makes the host's repository and serves it; the fingerprints of its key and of one that was rotated."""
    folder = Path(__file__).parent
    for name in ("make_nvidia_repository.py", "mirror_server.py"):
        put_file(host.container, f"/srv/{name}", (folder / name).read_bytes(), mode=0o644)
    put_file(host.container, "/etc/systemd/system/mirror.service", UNIT.encode(), mode=0o644)
    on_host(host, "apt-get -qq update && apt-get -qq install --yes --no-install-recommends gpg gpg-agent >/dev/null")
    made = on_host(
        host, f"python3 /srv/make_nvidia_repository.py /srv/mirror/debian12/x86_64 /srv/rotated.asc {' '.join(versions)}"
    )
    on_host(host, "cp /srv/mirror/debian12/x86_64/mirror.asc /srv/mirror/ && systemctl enable --now mirror.service")
    key, rotated = made.split()[-2:]
    return key, rotated


def moving_to_580(key: str) -> dict[str, Any]:
    """Variables of a host that gets 580 from a mirror that signs anew, its key fetched through a proxy."""
    return {
        "llama_cpp_backend": "cuda",
        "llm_server_instances": {"chat": INSTANCE},
        "nvidia_driver_branch": "580",
        "nvidia_driver_source": "nvidia_repository",
        "nvidia_driver_repository_url": MIRROR,
        "nvidia_driver_repository_key_url": "http://mirror.example/mirror.asc",
        "nvidia_driver_repository_key_fingerprint": key,
        "nvidia_driver_proxy": MIRROR,
        "nvidia_driver_reboot_timeout_s": 180,
    }


def test_another_branch_from_nvidias_repository(make_v100_host: Callable[..., RunningHost], play: Callable[..., Done]) -> None:
    host = make_v100_host(driver="535")
    key, rotated = serve_mirror(host, OLD, NEW, NEXT_BRANCH)
    on_host(host, f"set -e\n{LEFT_BEHIND}")
    # A server of ours, as far as a look at the processes goes.
    on_host(host, "systemd-run --quiet --unit v100-chat sleep infinity")
    variables = {**moving_to_580(key), "rotated": [rotated]}
    before = facts_of(host, variables)
    assert before.nvidia.module_version.startswith("535.")
    packages = driver_packages(host)

    refused = play(host, variables)
    assert refused.code != 0
    assert "chat serve on the driver that would be replaced" in refused.out
    assert "Nothing was changed" in refused.out
    assert driver_packages(host) == packages
    assert on_host(host, "ls /etc/apt/sources.list.d /etc/apt/keyrings").count("v100ctl") == 0

    told = {**variables, "nvidia_driver_reboot_serving": True}
    done = play(host, told)
    assert changed(done) > 0
    assert "what follows needs the driver" in done.out
    after = facts_of(host, told)
    assert after.boot_id not in ("", before.boot_id)
    assert (after.nvidia.module_version, after.nvidia.module_flavour, after.nvidia.smi.status) == (NEW, "proprietary", "ok")
    # Nothing of 535 is left, whether it has a successor of its name or not.
    found = driver_packages(host)
    assert set(found.values()) - {"580"} == {NEW}
    assert {"libcuda1", "libnvidia-ml1", "nvidia-kernel-dkms", "nvidia-driver-cuda"} <= set(found)
    assert not {"nvidia-smi", "nvidia-driver"} & set(found)
    assert differences(host, told) == []
    assert on_host(host, "cat /root/uninstalled").split() == ["--silent"]
    assert on_host(host, "dpkg --audit") == ""
    assert on_host(host, "ls /etc/apt/trusted.gpg.d /etc/apt/sources.list.d").count("cuda") == 0
    assert "GET http://mirror.example/mirror.asc" in on_host(host, "cat /srv/mirror.log")

    # Held, and without the hold still kept on its branch by the pin.
    held = on_host(host, "apt-mark showhold").split()
    assert set(found) - {"nvidia-driver-pinning-580"} <= set(held)
    assert "nvidia" not in on_host(host, "apt-get -s dist-upgrade")
    unheld = on_host(host, f"apt-mark unhold {' '.join(held)} >/dev/null; apt-get -s dist-upgrade; apt-cache policy libcuda1")
    assert NEXT_BRANCH in unheld
    assert "Inst " not in unheld
    assert f"Candidate: {NEW}-1" in unheld
    on_host(host, f"apt-mark hold {' '.join(held)}")

    assert changed(play(host, told)) == 0
    assert facts_of(host, told).boot_id == after.boot_id


def test_the_long_way_round(
    make_v100_host: Callable[..., RunningHost],
    play: Callable[..., Done],
    lab_reboot: Callable[[RunningHost], RunningHost],
    tmp_path: Path,
) -> None:
    """Debian's own packages, an older version, another branch, package files, and back: one host, one run after another."""
    host = make_v100_host(driver="none")
    key, _ = serve_mirror(host, OLD, NEW)
    variables = {"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": INSTANCE}, "nvidia_driver_reboot_timeout_s": 180}

    # A bare host. What is loaded after its reboot is what Debian calls 535.
    assert changed(play(host, variables)) > 0
    facts = facts_of(host, variables)
    debians = facts.nvidia.module_version
    assert debians.startswith("535.")
    assert differences(host, variables) == []
    on_host(host, "apt-get -qq install --yes --no-install-recommends unattended-upgrades >/dev/null")
    on_host(host, "apt-mark unhold libcuda1 nvidia-smi")
    # Whatever comes from anywhere may be upgraded, as far as this setting goes.
    anything = 'Unattended-Upgrade::Origins-Pattern { "origin=*"; };'
    put_file(host.container, "/etc/apt/apt.conf.d/99anything", anything.encode(), mode=0o644)
    told = on_host(host, "unattended-upgrade --dry-run --debug 2>&1")
    blacklist = next(line for line in told.splitlines() if "blacklist" in line.lower())
    assert all(pattern in blacklist for pattern in ("nvidia-.*", "libnvidia-.*", "cuda-.*"))

    # An older version, without a reboot: the run says what is left and goes no further.
    older = {**variables, "nvidia_driver_version": "535.261.03"}
    for contract, reason in (("never", "`nvidia_driver_reboot` is `never`"), ("ask", "nobody said yes")):
        done = play(host, {**older, "nvidia_driver_reboot": contract})
        assert done.code == 0, done.out
        assert f"Driver 535.261.03 is installed on {host.name} and not loaded yet: {reason}" in " ".join(done.out.split())
        assert "what follows needs the driver" not in done.out
        assert facts_of(host, older).nvidia.module_version == debians
        assert facts_of(host, older).boot_id == facts_of(host, variables).boot_id
    # Its address may be another one now.
    host = lab_reboot(host)
    done = play(host, {**older, "nvidia_driver_reboot": "never"})
    assert done.code == 0, done.out
    assert "what follows needs the driver" in done.out
    assert facts_of(host, older).nvidia.module_version == "535.261.03"
    assert differences(host, older) == []
    assert changed(play(host, older)) == 0

    # Another branch, from a place whose key is another one: nothing is told to apt.
    moving = moving_to_580(key)
    foreign = play(host, {**moving, "nvidia_driver_repository_key_fingerprint": "0" * 40})
    assert foreign.code != 0
    assert f"holds {key} and not {'0' * 40}; apt was not told of it" in " ".join(foreign.out.split())
    known = on_host(host, "ls /etc/apt/sources.list.d /etc/apt/keyrings").split()
    assert not {"v100ctl-nvidia.asc", "v100ctl-nvidia.sources"} & set(known)
    assert changed(play(host, moving)) > 0
    assert facts_of(host, moving).nvidia.module_version == NEW
    assert set(driver_packages(host).values()) - {"580"} == {NEW}
    assert differences(host, moving) == []

    # Package files from the controller, older than what is there, with a repository that has the newer ones.
    folder = tmp_path / "driver"
    folder.mkdir()
    for name in on_host(host, f"cd /srv/mirror/debian12/x86_64 && ls *_{OLD}-1_amd64.deb").split():
        if "open" not in name:
            archive, _ = host.container.get_archive(f"/srv/mirror/debian12/x86_64/{name}")
            with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as opened:
                opened.extract(name, folder, filter="data")
    files = {
        **moving,
        "nvidia_driver_source": "local_files",
        "nvidia_driver_local_files": str(folder),
        "nvidia_driver_version": OLD,
    }
    assert changed(play(host, files)) > 0
    assert facts_of(host, files).nvidia.module_version == OLD
    assert set(driver_packages(host).values()) - {"580"} == {OLD}

    # And back to the distribution's.
    back = {**variables, "nvidia_driver_branch": "535", "nvidia_driver_source": "distribution"}
    assert changed(play(host, back)) > 0
    assert facts_of(host, back).nvidia.module_version == debians
    assert "580" not in " ".join(driver_packages(host).values())
    assert differences(host, back) == []


@pytest.mark.slow
def test_the_next_boot_gets_its_modules_back(make_v100_host: Callable[..., RunningHost], play: Callable[..., Done]) -> None:
    """DKMS really builds for Debian's kernel, which the host boots next as far as its disk says."""
    host = make_v100_host(driver="none")
    install = "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install linux-image-amd64 initramfs-tools"
    on_host(host, f"apt-get -q update && {install}")
    variables = {"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": INSTANCE}, "nvidia_driver_reboot_timeout_s": 180}
    assert changed(play(host, variables)) > 0
    facts = facts_of(host, variables)
    (kernel,) = facts.kernels_installed
    version = facts.nvidia.library_version
    assert kernel != facts.kernel and version.startswith("535.")
    assert (facts.nvidia.next_boot_module_version, facts.nvidia.next_boot_module_flavour) == (version, "proprietary")
    assert differences(host, variables) == []

    on_host(host, f"dkms uninstall nvidia-current/{version} -k {kernel}")
    assert facts_of(host, variables).nvidia.next_boot_module_version == ""
    assert differences(host, variables) == ["driver.next-boot"]
    assert changed(play(host, variables)) > 0
    assert facts_of(host, variables).nvidia.next_boot_module_version == version
    assert differences(host, variables) == []
    assert changed(play(host, variables)) == 0


#: What Debian's other releases carry of each branch, with a package that only this branch's set has.
CARRIED = {
    "11": {"535": ("535.309.01", "nvidia-kernel-dkms")},
    "13": {"535": ("535.274.02", "nvidia-tesla-535-kernel-dkms"), "550": ("550.163.01", "nvidia-kernel-dkms")},
}


@pytest.mark.parametrize("release", sorted(CARRIED))
def test_real_packages_of_other_releases(
    release: str, make_v100_host: Callable[..., RunningHost], play: Callable[..., Done]
) -> None:
    """A bare host gets 535; 580 is refused with the reason; where there is another branch, it takes the place of the first."""
    host = make_v100_host(driver="none", debian=release)
    variables = {"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": INSTANCE}, "nvidia_driver_reboot_timeout_s": 180}

    config = parse_config(host.name, {**variables, "nvidia_driver_branch": "580"})
    refused = plan(host.name, config, facts_of(host, variables), as_of=date(2026, 11, 29))
    rule = next(rule for rule in refused.rules if rule.id == "driver-not-packaged")
    assert rule.severity == "refuse"
    assert f"Debian {release} " in rule.reason and "packages of driver branch 580: " in rule.reason
    assert on_host(host, "ls /etc/apt/sources.list.d").strip() == ""

    # What a host gets unasked first, then every other branch, and the first once more.
    branches = ["auto", *(branch for branch in CARRIED[release] if branch != "535")]
    for branch in branches if len(branches) == 1 else [*branches, "535"]:
        version, package = CARRIED[release]["535" if branch == "auto" else branch]
        asked = {**variables, "nvidia_driver_branch": branch}
        assert changed(play(host, asked)) > 0
        facts = facts_of(host, asked)
        assert (facts.nvidia.module_version, facts.nvidia.module_flavour) == (version, "proprietary")
        assert facts.nvidia.smi.status == "ok"
        found = driver_packages(host)
        assert found[package] == version
        assert {found[name] for name in found if name not in ("nvidia-modprobe", "nvidia-persistenced")} == {version}
        assert set(found) <= set(on_host(host, "apt-mark showhold").split())
        assert "nvidia" not in on_host(host, "apt-get -s dist-upgrade")
        assert differences(host, asked) == []
        assert changed(play(host, asked)) == 0
    assert on_host(host, "dpkg --audit") == ""


def test_a_host_that_provisions_itself_goes_on_after_its_reboot(
    make_v100_host: Callable[..., RunningHost], lab_reboot: Callable[[RunningHost], RunningHost]
) -> None:
    host = make_v100_host(driver="535")
    key, _ = serve_mirror(host, NEW)
    before = facts_of(host, moving_to_580(key))
    # A checkout on the host, with its own environment, as a user makes one.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as opened:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                opened.add(ROOT / name, f"v100ctl/{name}")
        for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
            if Path(path).exists():
                opened.add(Path(path).resolve(), f"machine/{Path(path).name}")
    host.container.put_archive("/srv", archive.getvalue())
    on_host(host, "cp /srv/machine/ca-certificates.crt /etc/ssl/certs/; cp /srv/machine/pip.conf /etc/ || true")
    on_host(host, "apt-get -qq install --yes --no-install-recommends python3-venv >/dev/null")
    settings = " ".join(f"{name}={value}" for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_INDEX_URL"))
    on_host(host, f"env {settings} /srv/v100ctl/v100ctl --version")
    # The host's interpreter is the system's: the environment's own would be another.
    own = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    hosts = {"all": {"hosts": {host.name: own}, "vars": moving_to_580(key)}}
    put_file(host.container, "/srv/hosts.yml", yaml.safe_dump(hosts).encode(), mode=0o644)
    put_file(host.container, "/srv/v100ctl/playbooks/driver_alone.yml", playbook_of(Path("/srv/v100ctl")).encode(), mode=0o644)
    command = "cd /srv/v100ctl && .venv/bin/ansible-playbook -i /srv/hosts.yml /srv/v100ctl/playbooks/driver_alone.yml"

    told = " ".join(on_host(host, command).split())
    assert f"Driver {NEW} is installed on {host.name} and not loaded yet: this run is on the host itself" in told
    assert "Reboot it, then run the same command again: it goes on from here" in told
    assert "what follows needs the driver" not in told
    facts = facts_of(host, moving_to_580(key))
    assert (facts.boot_id, facts.nvidia.module_version) == (before.boot_id, before.nvidia.module_version)

    lab_reboot(host)
    assert "what follows needs the driver" in on_host(host, command)
    assert facts_of(host, moving_to_580(key)).nvidia.module_version == NEW
    assert "changed=0 " in on_host(host, command)
