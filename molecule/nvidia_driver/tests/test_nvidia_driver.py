"""After the role."""

import pytest
from testinfra.host import Host

VERSION = "535.309.01-0+deb12u1"


@pytest.mark.parametrize("name", ["nvidia-kernel-dkms", "libcuda1", "nvidia-smi", "libnvidia-ml1", "nvidia-alternative"])
def test_packages_are_those_of_the_branch_and_held(host: Host, name: str) -> None:
    assert host.package(name).version == VERSION
    assert name in host.check_output("apt-mark showhold").splitlines()


def test_no_desktop_comes_along(host: Host) -> None:
    assert not host.package("xserver-xorg-core").is_installed


def test_the_library_of_cuda_is_there(host: Host) -> None:
    assert "libcuda.so.1" in host.check_output("ldconfig -p")


def test_nvidia_smi_is_the_real_one_and_finds_no_driver(host: Host) -> None:
    done = host.run("nvidia-smi")
    assert done.rc == 9
    assert "couldn't communicate with the NVIDIA driver" in done.stdout


def test_apt_takes_no_other_branch(host: Host) -> None:
    policy = host.check_output("apt-cache policy nvidia-kernel-dkms")
    assert f"Candidate: {VERSION}" in policy
    assert f"{VERSION} 1001" in policy


def test_unattended_upgrades_leaves_it_alone(host: Host) -> None:
    settings = host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert all(f'"{pattern}"' in settings for pattern in ("nvidia-.*", "libnvidia-.*", "cuda-.*"))


def test_components_were_added_to_the_hosts_own_archives(host: Host) -> None:
    text = host.file("/etc/apt/sources.list.d/v100ctl-archive.sources").content_string
    assert "Components: contrib non-free non-free-firmware" in text
    assert "Suites: bookworm-security" in text


def test_nouveau_is_kept_off_by_modprobe_itself(host: Host) -> None:
    settings = host.check_output("modprobe --showconfig").splitlines()
    assert "blacklist nouveau" in settings
    assert "options nouveau modeset=0" in settings


def test_a_reboot_is_known_to_be_due(host: Host) -> None:
    marker = host.file("/var/lib/v100ctl/state/nvidia_driver_reboot").content_string.strip()
    assert marker == host.file("/proc/sys/kernel/random/boot_id").content_string.strip()
