"""What the role `nvidia_driver` does where dnf is.

No Enterprise Linux was to be had, so its programs are stand-ins that write down how they are called. What they are called with is
decided and tested as data; this shows that the role calls them so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.unit.factory import make_config, make_facts, make_plan
from v100ctl.lab.containers import put_file
from v100ctl.plan.driver_actions import RPM_KEY, YUM_REPOSITORY

from .hosts import ROOT, WriteInventory, on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

KERNEL = "5.14.0-503.11.1.el9_5.x86_64"
#: Any key will do, since it is named; this one is on every Debian.
KEY, FINGERPRINT = "debian-archive-bookworm-stable.gpg", "4D64FEC119C2029067D6E791F8D2585B8783D481"
STAND_IN = """#!/bin/sh
echo "${0##*/} $*" >> /root/calls
case "${0##*/} $*" in
  "rpm --query gpg-pubkey") printf 'gpg-pubkey-7fa2af80-576db785\\ngpg-pubkey-3228467c-613798eb\\n' ;;
  "rpm --query --all"*)
    printf '%s 535.309.01\\n' nvidia-driver-cuda kmod-nvidia-latest-dkms nvidia-kmod-common nvidia-persistenced
    printf 'nvidia-container-toolkit 1.17.4\\n' ;;
  dkms*) echo "nvidia/535.309.01, KERNEL, x86_64: installed" ;;
  lsinitrd*) echo "-rw-r--r--   1 root     root           32 Jan  1  1970 etc/modprobe.d/other.conf" ;;
esac
""".replace("KERNEL", KERNEL)


@pytest.mark.slow
def test_dnf_is_called_as_decided(fresh_lab_host: RunningHost, lab_inventory: WriteInventory, tmp_path: Path) -> None:
    host = fresh_lab_host
    for name in ("dnf", "rpm", "dkms", "lsinitrd", "dracut"):
        put_file(host.container, f"/usr/local/sbin/{name}", STAND_IN.encode(), mode=0o755)
    locks = "# Added lock\\n!nvidia-persistenced-3:580.82.07-1.el9.*\\nnvidia-kmod-common-3:535.309.01-1.el9.*\\n"
    on_host(host, f"mkdir -p /etc/dnf/plugins && printf '{locks}' > /etc/dnf/plugins/versionlock.list")
    on_host(host, f"mkdir /srv/key && cp /usr/share/keyrings/{KEY} /srv/key/key.asc")
    on_host(host, "systemd-run --quiet --unit key python3 -m http.server --bind 127.0.0.1 --directory /srv/key 8099")
    facts = make_facts(
        distribution={"id": "rocky", "version_id": "9.4", "name": "Rocky Linux 9.4"},
        kernel=KERNEL,
        kernels_installed=[KERNEL],
        gpus=[{"pci_address": "0000:3b:00.0", "pci_id": "10de:1db4", "pci_class": "0302", "bar1_bytes": 16 << 30}],
        packages={"manager": "rpm", "installed": {}},
    )
    config = make_config(
        {"gpus": [0]},
        llama_cpp_backend="cuda",
        nvidia_driver_branch="535",
        nvidia_driver_repository_key_url="http://127.0.0.1:8099/key.asc",
        nvidia_driver_repository_key_fingerprint=FINGERPRINT,
    )
    decision = make_plan(facts, config).to_role_variables()["driver"]
    playbook = tmp_path / "site.yml"
    role = {"ansible.builtin.include_role": {"name": "nvidia_driver"}}
    playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "become": True, "tasks": [role]}]))
    variables = {"nvidia_driver_decision": decision, "nvidia_driver_reboot": "never"}
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "-i",
            str(lab_inventory(host, variables=json.loads(json.dumps(variables)))),
            str(playbook),
        ],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
            "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert on_host(host, "cat /root/calls").splitlines() == [
        "rpm --query gpg-pubkey",
        "rpm --erase gpg-pubkey-7fa2af80-576db785",
        "dnf --assumeyes install epel-release",
        f"dnf --assumeyes install kernel-devel-{KERNEL} kernel-devel-matched-{KERNEL}",
        "dnf --assumeyes module reset nvidia-driver",
        "dnf --assumeyes module enable nvidia-driver:535-dkms",
        "dnf --assumeyes install --allowerasing nvidia-driver-cuda kmod-nvidia-latest-dkms nvidia-persistenced nvidia-modprobe",
        # The format ends with a line break.
        "rpm --query --all --queryformat %{NAME} %{VERSION}",
        " *nvidia* libcuda1* cuda-drivers*",
        "dnf --assumeyes install python3-dnf-plugin-versionlock",
        # What is locked already stays so, and what is no part of the driver is left alone.
        "dnf --assumeyes versionlock add kmod-nvidia-latest-dkms nvidia-driver-cuda nvidia-persistenced",
        f"dkms status -k {KERNEL}",
        f"lsinitrd /boot/initramfs-{KERNEL}.img",
        f"dracut --force /boot/initramfs-{KERNEL}.img {KERNEL}",
    ]
    # The key that was checked, in the place that the repository's file names.
    assert f"gpgkey=file://{RPM_KEY}\n" in on_host(host, f"cat {YUM_REPOSITORY}")
    on_host(host, f"cmp {RPM_KEY} /srv/key/key.asc")
    assert "blacklist nouveau" in on_host(host, "cat /etc/modprobe.d/v100ctl-nouveau.conf")
