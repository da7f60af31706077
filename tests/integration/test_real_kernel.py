"""The driver on a kernel of its own: a virtual machine with a V100 on its bus, two NUMA nodes, an initramfs and real reboots.

Takes root on Debian 12, loop devices, 6 GB of disk and 3 GB of memory; QEMU and the tools that make its disk are installed where
they lack. On a processor without ``vmx`` and ``svm`` a boot takes minutes.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from v100ctl.catalog import load_catalog
from v100ctl.facts import Facts
from v100ctl.lab.hosts import write_inventory
from v100ctl.lab.qemu import Card, Disk, Hardware, VirtualHost, VirtualMachine, make_disk
from v100ctl.probe import host_script

from .hosts import ROOT, TIMEOUT_S, serving_variables

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter

pytestmark = pytest.mark.slow

VERSION = "535.309.01"
CARD = Card("10de:1db1", "10de:1212", node=1)
BLACKLIST = "etc/modprobe.d/v100ctl-nouveau.conf"

# Before the first boot, at this machine's own speed. nouveau goes into the initramfs as with plymouth, which many servers have.
# Then the package of modules comes in, and DKMS builds them for the guest's kernel; the initramfs stays as it was, and knows
# nothing of the driver. What else the driver consists of is left to the role, in apt's cache.
_SCRIPT = r"""
cat > /etc/initramfs-tools/hooks/lab-graphics <<'END'
#!/bin/sh
[ "$1" = prereqs ] && exit 0
# Not `manual_add_modules`, which looks for each of hundreds of firmware files, a minute of a translated processor.
modprobe --all --ignore-install --set-version="$version" --show-depends nouveau | while read -r _ path _; do
    mkdir -p "$DESTDIR/${path%/*}"
    cp "$path" "$DESTDIR/$path"
done
END
chmod 0755 /etc/initramfs-tools/hooks/lab-graphics
update-initramfs -u -k all
echo update_initramfs=no > /etc/initramfs-tools/update-initramfs.conf

archives=/etc/apt/sources.list.d/build.list
grep -h '^deb ' /etc/apt/sources.list.d/*.list > /tmp/own
sed 's/ main$/ contrib non-free non-free-firmware/' /tmp/own > "$archives"
apt-get -q update
apt-get -q -y --no-install-recommends install linux-headers-amd64
apt-get -q -y --no-install-recommends install nvidia-kernel-dkms
apt-get -q -y --no-install-recommends --download-only install PACKAGES
rm "$archives"
echo update_initramfs=yes > /etc/initramfs-tools/update-initramfs.conf
"""

_PLAYBOOK = f"""
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.import_tasks: {ROOT}/playbooks/tasks/plan.yml
    - ansible.builtin.include_role:
        name: nvidia_driver
      vars:
        nvidia_driver_decision: "{{{{ v100ctl_plan.driver }}}}"
        nvidia_driver_reboot_timeout_s: 1800
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the role: how it ended, and the boots before and after it."""

    code: int
    out: str
    boots: tuple[str, str]

    @property
    def changed(self) -> int:
        """How many tasks changed something, by the recap."""
        found = re.search(r"changed=(\d+)", self.out)
        assert found is not None, self.out[-4000:]
        return int(found.group(1))


def output(host: VirtualHost, command: str) -> str:
    """What a command as root writes."""
    done = host.run(command)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def probe(host: VirtualHost) -> Facts:
    """The host's facts, as every run of the product learns them."""
    script = Path(host_script.__file__).read_text(encoding="utf-8")
    done = subprocess.run(
        host.ssh_command("sudo", "python3", "-", "--request", "{}"),
        input=script,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Facts.model_validate(json.loads(done.stdout))


def boot_id(host: VirtualHost) -> str:
    return output(host, "cat /proc/sys/kernel/random/boot_id").strip()


def loaded(host: VirtualHost) -> set[str]:
    """The names of loaded modules."""
    return {line.split()[0] for line in output(host, "cat /proc/modules").splitlines()}


def unload(host: VirtualHost) -> None:
    """Unloads the driver, as far as it is loaded."""
    for name in ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia"):
        output(host, f"! grep -q '^{name} ' /proc/modules || rmmod {name}")


def initramfs(host: VirtualHost) -> list[str]:
    return output(host, "lsinitramfs /boot/initrd.img-$(uname -r)").splitlines()


def provision(host: VirtualHost, folder: Path) -> Run:
    """Runs the role as the plan decides, over SSH."""
    variables = {**serving_variables(), "llama_cpp_backend": "cuda"}
    inventory = write_inventory(folder / "hosts.yml", {host.name: host.variables()}, variables=variables)
    playbook = folder / "driver.yml"
    playbook.write_text(_PLAYBOOK, encoding="utf-8")
    before = boot_id(host)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)],
        cwd=ROOT,
        env={
            **os.environ,
            "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
            "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
            # sshd itself takes seconds to say its first word.
            "ANSIBLE_TIMEOUT": "120",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Run(done.returncode, done.stdout + done.stderr, (before, boot_id(host)))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, lab_reporter: Reporter) -> Iterator[Disk]:
    # Where every instruction is translated, this takes longer than any other test may.
    faulthandler.cancel_dump_traceback_later()
    driver = load_catalog().driver("535")
    assert driver is not None
    packages = " ".join(driver.sources("debian", "12")[0].packages)
    made = make_disk(tmp_path_factory.mktemp("qemu"), "real-kernel", lab_reporter, script=_SCRIPT.replace("PACKAGES", packages))
    yield made
    made.path.unlink()


@pytest.fixture(scope="module")
def bare(disk: Disk) -> Iterator[VirtualHost]:
    """The host after its first boot: with nouveau from the initramfs, and the driver as one that came in since."""
    with VirtualMachine("real-kernel", disk, Hardware(cards=(CARD,))) as host:
        unload(host)
        yield host


@pytest.fixture(scope="module")
def bare_facts(bare: VirtualHost) -> Facts:
    return probe(bare)


@pytest.fixture(scope="module")
def first(bare: VirtualHost, bare_facts: Facts, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The role's first run, after the bare host was looked at."""
    faulthandler.cancel_dump_traceback_later()
    return provision(bare, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def driven(bare: VirtualHost, first: Run) -> VirtualHost:
    """The host after that."""
    assert first.code == 0, first.out[-6000:]
    return bare


def test_a_disk_is_made_with_modules_for_its_kernel(disk: Disk) -> None:
    assert disk.host_key.startswith("ssh-ed25519 ")
    assert disk.path.stat().st_blocks * 512 > 500 << 20


def test_the_kernel_has_two_numa_nodes_and_the_card_is_on_the_second(bare_facts: Facts) -> None:
    assert [node.cpus for node in bare_facts.cpu.numa_nodes] == ["0", "1"]
    (card,) = bare_facts.gpus
    assert (card.pci_id, card.pci_class, card.numa_node) == (CARD.pci_id, "0302", 1)


def test_the_probe_sees_which_kernel_boots_and_what_can_be_built_for_it(bare_facts: Facts) -> None:
    assert bare_facts.virtualization in ("qemu", "kvm")
    assert bare_facts.kernels_installed == (bare_facts.kernel,)
    assert bare_facts.kernel_headers == (bare_facts.kernel,)


def test_a_bare_host_loads_nouveau_from_its_initramfs(bare_facts: Facts) -> None:
    assert bare_facts.nouveau.loaded
    assert bare_facts.nvidia.module_version == ""


def test_the_host_was_really_rebooted(bare: VirtualHost, first: Run, driven: VirtualHost) -> None:
    assert first.boots[0] != first.boots[1]
    assert first.changed > 0


def test_nouveau_stays_out_because_the_initramfs_says_so(driven: VirtualHost) -> None:
    listed = initramfs(driven)
    assert BLACKLIST in listed
    # The module is there still, and the kernel has met the card before the disk was mounted: the settings in there decided.
    assert [path for path in listed if path.endswith("/nouveau.ko")]
    assert "nouveau" not in loaded(driven)


def test_the_module_of_the_branch_is_loaded(driven: VirtualHost) -> None:
    facts = probe(driven)
    assert facts.nvidia.module_version == VERSION
    assert facts.nvidia.on_disk_module_version == VERSION
    assert not facts.nouveau.loaded
    assert facts.nouveau.blacklisted


def test_the_rest_of_the_driver_came_with_the_role(driven: VirtualHost) -> None:
    # The modules alone, which is what was there before, are no driver.
    assert probe(driven).nvidia.library_version == VERSION
    assert driven.run("test -x /usr/bin/nvidia-smi -a -e /etc/modprobe.d/nvidia.conf").returncode == 0


def test_a_second_run_changes_nothing(driven: VirtualHost, tmp_path: Path) -> None:
    again = provision(driven, tmp_path)
    assert again.code == 0, again.out[-6000:]
    assert again.changed == 0
    assert again.boots[0] == again.boots[1]


def test_without_a_card_the_module_says_no_such_device(driven: VirtualHost) -> None:
    address = f"/sys/bus/pci/devices/{probe(driven).gpus[0].pci_address}"
    unload(driven)
    try:
        output(driven, f"echo 1 > {address}/remove")
        done = driven.run("modprobe nvidia")
        assert done.returncode == 1
        # Debian's name for the branch's module; the one that was asked for leads to it.
        assert "could not insert 'nvidia_current': No such device" in done.stderr, done.stderr
    finally:
        output(driven, "echo 1 > /sys/bus/pci/rescan")
    output(driven, "modprobe nvidia")
    assert "nvidia" in loaded(driven)
