"""The driver's modules, really built by DKMS for a kernel of Debian's. A container can show them, not load them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v100ctl.lab.hosts import RunningHost

from .hosts import ROOT, TIMEOUT_S


@pytest.mark.slow
def test_modules_and_initramfs_are_made_for_the_kernel_that_boots_next(
    fresh_lab_host: RunningHost, fresh_lab_ssh: Any, lab_inventory: Callable[..., Path]
) -> None:
    host = fresh_lab_ssh
    with host.sudo():
        install = "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install linux-image-amd64 initramfs-tools"
        host.run_expect([0], f"apt-get -q update && {install}")
        kernel = host.check_output("ls /boot").partition("vmlinuz-")[2].split()[0]
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                "-i",
                str(lab_inventory(fresh_lab_host)),
                str(ROOT / "molecule/nvidia_driver/converge.yml"),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
                "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
                "MOLECULE_PROJECT_DIRECTORY": str(ROOT),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        module = f"/lib/modules/{kernel}/updates/dkms/nvidia-current.ko"
        assert host.check_output(f"modinfo -F version {module}") == "535.309.01"
        assert host.check_output(f"modinfo -F vermagic {module}").split()[0] == kernel
        assert host.check_output(f"modinfo -F license {module}") == "NVIDIA"
        assert "etc/modprobe.d/v100ctl-nouveau.conf" in host.check_output(f"lsinitramfs /boot/initrd.img-{kernel}").splitlines()
        assert ": installed" in host.check_output(f"dkms status -k {kernel}")
