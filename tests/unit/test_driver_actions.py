"""What has to be done for a driver, release by release: package calls, files and holds, as data."""

from __future__ import annotations

import re
from typing import Any

import pytest

from v100ctl.catalog import load_catalog
from v100ctl.compare import compare
from v100ctl.facts import Facts
from v100ctl.plan import HostPlan
from v100ctl.plan.driver_actions import (
    ARCHIVE_SOURCES,
    NOUVEAU,
    NVIDIA_KEY,
    NVIDIA_SOURCES,
    PREFERENCES,
    RPM_KEY,
    SIGNING,
    UPGRADES,
    YUM_REPOSITORY,
    is_driver_package,
    upstream_version,
)
from v100ctl.plan.types import DriverDecision

from .factory import make_config, make_facts, make_plan, merge

V100 = {"pci_address": "0000:3b:00.0", "pci_id": "10de:1db4", "pci_class": "0302", "bar1_bytes": 16 << 30}
KERNELS = {
    "debian/11": "5.10.0-35-amd64",
    "debian/12": "6.1.0-57-amd64",
    "debian/13": "6.12.118+deb13-amd64",
    "ubuntu/20.04": "5.4.0-216-generic",
    "ubuntu/22.04": "5.15.0-160-generic",
    "ubuntu/24.04": "6.8.0-100-generic",
    "rhel/9": "5.14.0-503.11.1.el9_5.x86_64",
    "rhel/10": "6.12.0-55.9.1.el10_0.x86_64",
}
ARCHIVE = {"path": "/etc/apt/sources.list", "uri": "http://archive.example/debian", "suite": "bookworm", "components": ["main"]}


def host(release: str = "debian/12", **changes: Any) -> Facts:
    """A bare host of a release, with one V100."""
    name, _, version = release.partition("/")
    kernel = KERNELS[release]
    base = {
        "distribution": {"id": name, "version_id": version, "name": release},
        "kernel": kernel,
        "kernels_installed": [kernel],
        "gpus": [V100],
    }
    return make_facts(**merge(base, changes))


def decide(facts: Facts, **variables: Any) -> HostPlan:
    return make_plan(facts, make_config({"gpus": [0]}, llama_cpp_backend="cuda", **variables))


def driver(facts: Facts, **variables: Any) -> DriverDecision:
    decided = decide(facts, **variables).driver
    assert decided is not None
    return decided


def words(decision: DriverDecision) -> list[str]:
    """The calls without what every call of apt has."""
    options = r" (--yes|--assumeyes|--no-install-recommends|-o \S+)(?= )"
    return [re.sub(options, "", f"{' '.join(call.argv)} ")[:].strip() for call in decision.calls]


def content(decision: DriverDecision, path: str) -> str:
    return next(file.content for file in decision.files if file.path == path)


DEBIAN = "nvidia-kernel-dkms libcuda1 nvidia-smi nvidia-persistenced nvidia-modprobe"
NVIDIA_FOR_DEBIAN = "nvidia-driver-cuda nvidia-kernel-dkms nvidia-persistenced nvidia-modprobe"
NVIDIA_FOR_EL = "nvidia-driver-cuda kmod-nvidia-latest-dkms nvidia-persistenced nvidia-modprobe"
REPLACING = "--allow-downgrades --allow-change-held-packages"


CALLS: list[tuple[str, str, list[str]]] = [
    ("debian/11", "535", ["apt-get update", "HEADERS", f"apt-get install {REPLACING} {DEBIAN}"]),
    ("debian/12", "535", ["apt-get update", "HEADERS", f"apt-get install {REPLACING} {DEBIAN}"]),
    (
        "debian/12",
        "580",
        [
            "apt-get update",
            "HEADERS",
            "apt-get install nvidia-driver-pinning-580",
            f"apt-get install {REPLACING} {NVIDIA_FOR_DEBIAN}",
        ],
    ),
    (
        "debian/13",
        "535",
        [
            "apt-get update",
            "HEADERS",
            f"apt-get install {REPLACING} nvidia-tesla-535-kernel-dkms libnvidia-tesla-535-cuda1 nvidia-tesla-535-smi "
            "libnvidia-tesla-535-cfg1 nvidia-persistenced nvidia-modprobe",
        ],
    ),
    (
        "ubuntu/20.04",
        "535",
        ["apt-get update", "HEADERS", f"apt-get install {REPLACING} nvidia-driver-535 nvidia-dkms-535 nvidia-utils-535"],
    ),
    ("ubuntu/22.04", "535", ["apt-get update", "HEADERS", f"apt-get install {REPLACING} cuda-drivers-535"]),
    ("ubuntu/24.04", "535", ["apt-get update", "HEADERS", f"apt-get install {REPLACING} cuda-drivers-535"]),
    ("ubuntu/22.04", "580", ["apt-get update", "HEADERS", f"apt-get install {REPLACING} nvidia-driver-580"]),
    ("ubuntu/24.04", "580", ["apt-get update", "HEADERS", f"apt-get install {REPLACING} nvidia-driver-580"]),
    *(
        (
            "rhel/9",
            branch,
            [
                "dnf install https://dl.fedoraproject.org/pub/epel/epel-release-latest-9.noarch.rpm",
                "DEVEL",
                "dnf module reset nvidia-driver",
                f"dnf module enable nvidia-driver:{branch}-dkms",
                f"dnf install --allowerasing {NVIDIA_FOR_EL}",
            ],
        )
        for branch in ("535", "580")
    ),
    (
        "rhel/10",
        "580",
        [
            "dnf install https://dl.fedoraproject.org/pub/epel/epel-release-latest-10.noarch.rpm",
            "DEVEL",
            "dnf install python3-dnf-plugin-versionlock",
            "dnf versionlock add *nvidia*580*",
            f"dnf install --allowerasing {NVIDIA_FOR_EL}",
        ],
    ),
]


@pytest.mark.parametrize(("release", "branch", "expected"), CALLS)
def test_calls_on_a_bare_host(release: str, branch: str, expected: list[str]) -> None:
    kernel = KERNELS[release]
    said = {
        "HEADERS": f"apt-get install linux-headers-{kernel}",
        "DEVEL": f"dnf install kernel-devel-{kernel} kernel-devel-matched-{kernel}",
    }
    assert words(driver(host(release), nvidia_driver_branch=branch)) == [said.get(call, call) for call in expected]


def test_every_release_that_has_a_branch_has_its_calls_above() -> None:
    catalog = load_catalog()
    had = {
        (f"{row.id}/{row.version_id}", branch)
        for row in catalog.distributions
        for branch in ("535", "580")
        if (found := catalog.driver(branch)) is not None
        and any(source.usable for source in found.sources(row.id, row.version_id))
    }
    assert {(release, branch) for release, branch, _ in CALLS} == had


@pytest.mark.parametrize("release", [release for release in KERNELS if not release.startswith("rhel")])
def test_a_branch_is_pinned_and_held_and_left_alone_by_unattended_upgrades(release: str) -> None:
    decision = driver(host(release), nvidia_driver_branch="535")
    assert "Pin: version 535.*\nPin-Priority: 1001\n" in content(decision, PREFERENCES)
    upgrades = content(decision, UPGRADES)
    assert all(f'"{pattern}";' in upgrades for pattern in ("nvidia-.*", "libnvidia-.*", "cuda-.*"))
    assert decision.hold
    assert content(decision, NOUVEAU).endswith("blacklist nouveau\noptions nouveau modeset=0\n")


def test_ubuntus_transitional_packages_cannot_win() -> None:
    text = content(driver(host("ubuntu/22.04"), nvidia_driver_branch="535"), PREFERENCES)
    assert text.index("Pin: release o=Ubuntu\nPin-Priority: -1\n") < text.index("Pin: version 535.*")
    assert "o=Ubuntu" not in content(driver(host("ubuntu/22.04"), nvidia_driver_branch="580"), PREFERENCES)


@pytest.mark.parametrize(
    ("release", "branch", "folder"),
    [("debian/12", "580", "debian12"), ("ubuntu/22.04", "535", "ubuntu2204"), ("ubuntu/24.04", "535", "ubuntu2404")],
)
def test_nvidias_repository_comes_with_its_key(release: str, branch: str, folder: str) -> None:
    decision = driver(host(release), nvidia_driver_branch=branch)
    row = load_catalog().nvidia_repository
    assert f"URIs: {row.url}/{folder}/x86_64/\nSuites: /\nSigned-By: {NVIDIA_KEY}\n" in content(decision, NVIDIA_SOURCES)
    assert decision.key is not None
    assert (decision.key.url, decision.key.fingerprint) == (
        f"{row.url}/{folder}/x86_64/3bf863cc.pub",
        "EB693B3035CD5710E231E123A4B469963BF863CC",
    )
    assert decision.untrusted_keys == ("AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80",)
    mirror = driver(host(release), nvidia_driver_branch=branch, nvidia_driver_repository_url="http://mirror.example/cuda")
    assert f"URIs: http://mirror.example/cuda/{folder}/x86_64/\n" in content(mirror, NVIDIA_SOURCES)
    assert mirror.key is not None and mirror.key.url == f"http://mirror.example/cuda/{folder}/x86_64/3bf863cc.pub"


def test_enterprise_linux_gets_a_repository_file() -> None:
    text = content(driver(host("rhel/9"), nvidia_driver_branch="535"), YUM_REPOSITORY)
    assert f"/rhel9/x86_64\nenabled=1\ngpgcheck=1\ngpgkey=file://{RPM_KEY}\n" in text
    key = driver(host("rhel/9"), nvidia_driver_branch="535").key
    assert key is not None
    # dnf takes a key from the disk unasked: there it is only after its fingerprint was checked.
    assert (key.path, key.url.rpartition("/")[2]) == (RPM_KEY, "D42D0685.pub")
    assert key.fingerprint == "610C7B14E068A878070DA4E99CD0A493D42D0685"


@pytest.mark.parametrize("release", ["debian/12", "rhel/9"])
def test_a_mirror_that_signs_anew_has_a_key_of_its_own(release: str) -> None:
    fingerprint = "0123456789ABCDEF0123456789ABCDEF01234567"
    names = {
        "nvidia_driver_repository_url": "http://mirror.example/cuda",
        "nvidia_driver_repository_key_url": "http://mirror.example/key.asc",
        "nvidia_driver_repository_key_fingerprint": fingerprint,
    }
    key = driver(host(release), nvidia_driver_branch="580", **names).key
    assert key is not None
    assert (key.url, key.fingerprint) == ("http://mirror.example/key.asc", fingerprint)


def test_other_files_of_nvidias_repository_go_since_apt_refuses_two_keys_for_one_place() -> None:
    url = f"{load_catalog().nvidia_repository.url}/debian12/x86_64"
    entries = [
        {"path": "/etc/apt/sources.list.d/cuda.list", "uri": url, "suite": "/"},
        {"path": "/etc/apt/sources.list.d/mine.list", "uri": f"{url}/", "suite": "/"},
        {"path": "/etc/apt/sources.list.d/mine.list", "uri": "http://mine.example", "suite": "/"},
        {"path": NVIDIA_SOURCES, "uri": f"{url}/", "suite": "/"},
    ]
    assert driver(host(apt_sources=entries), nvidia_driver_branch="580").absent_files == ("/etc/apt/sources.list.d/cuda.list",)
    assert driver(host(apt_sources=entries), nvidia_driver_branch="535").absent_files == ()


def test_components_come_from_the_archives_that_the_host_uses() -> None:
    entries = [
        {**ARCHIVE, "origin": "Debian", "signed_by": "/usr/share/keyrings/debian-archive-keyring.gpg"},
        {
            **ARCHIVE,
            "suite": "bookworm-security",
            "uri": "http://security.example/",
            "components": ["main", "contrib"],
            "origin": "Debian",
        },
        {**ARCHIVE, "uri": "http://elsewhere.example", "origin": "somebody"},
        {**ARCHIVE, "uri": "http://never-fetched.example"},
        {"path": ARCHIVE_SOURCES, "uri": ARCHIVE["uri"], "suite": "bookworm", "components": ["non-free"], "origin": "Debian"},
    ]
    text = content(driver(host(apt_sources=entries)), ARCHIVE_SOURCES)
    assert text.splitlines()[1:] == [
        "Types: deb",
        "URIs: http://archive.example/debian",
        "Suites: bookworm",
        "Components: contrib non-free non-free-firmware",
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg",
        "",
        "Types: deb",
        "URIs: http://security.example/",
        "Suites: bookworm-security",
        "Components: non-free non-free-firmware",
    ]


def test_a_host_that_has_the_components_gets_no_file_for_them() -> None:
    entry = {**ARCHIVE, "components": ["main", "contrib", "non-free", "non-free-firmware"], "origin": "Debian"}
    assert ARCHIVE_SOURCES not in {file.path for file in driver(host(apt_sources=[entry])).files}
    never_fetched = driver(host(apt_sources=[{**ARCHIVE, "trusted": True}]))
    assert "Trusted: yes" in content(never_fetched, ARCHIVE_SOURCES)


def installed(version: str = "535.309.01-0+deb12u1", **others: str) -> dict[str, Any]:
    """Packages and modules of a host that has Debian's driver."""
    names = {name: version for name in DEBIAN.split()} | {"nvidia-persistenced": "535.171.04-1~deb12u1", "libnvidia-ml1": version}
    kernel = KERNELS["debian/12"]
    packages = {f"linux-headers-{kernel}": "6.1.192-3", **names, **others}
    upstream = upstream_version(version)
    return {
        "packages": {"installed": packages},
        "nvidia": {
            **dict.fromkeys(("module_version", "on_disk_module_version", "library_version"), upstream),
            **dict.fromkeys(("module_flavour", "on_disk_module_flavour"), "proprietary"),
        },
    }


def with_files(facts: Facts, decision: DriverDecision) -> Facts:
    """The host with the decision's files on it."""
    files = {
        file.path: {"kind": "file", "mode": "0644", "owner": "root", "group": "root", "content": file.content}
        for file in decision.files
    }
    return Facts.model_validate(merge(facts.model_dump(by_alias=True, mode="json"), {"files": files}))


def findings(facts: Facts, **variables: Any) -> list[str]:
    return [item.id for item in compare(decide(facts, **variables), facts) if item.id.startswith("driver.")]


def test_a_driver_that_was_found_is_protected_and_not_touched() -> None:
    decision = driver(host(**installed("580.159.04-1")))
    assert (decision.action, decision.calls, decision.packages, decision.unwanted) == ("keep", (), (), ())
    assert "found on the host and kept" in content(decision, PREFERENCES)
    assert "Pin: version 580.*" in content(decision, PREFERENCES)


def test_a_driver_of_this_toolkit_is_kept_whole() -> None:
    bare = driver(host())
    here = with_files(host(**installed()), bare)
    assert (driver(here).action, driver(here).calls) == ("keep", ())
    assert driver(here).files == bare.files, "installing changes no file of the plan"
    without = {
        "packages": {"installed": {name: version for name, version in here.packages.installed.items() if name != "nvidia-smi"}}
    }
    less = Facts.model_validate({**here.model_dump(by_alias=True, mode="json"), **without})
    assert words(driver(less))[-1].endswith(DEBIAN)
    assert "driver.package-missing:nvidia-smi" in findings(less)


def test_another_version_of_a_package_is_seen_and_mended() -> None:
    mixed = with_files(host(**installed(**{"nvidia-smi": "580.159.04-1"})), driver(host()))
    assert "driver.package-version:nvidia-smi" in findings(mixed)
    assert driver(mixed).calls


def test_holds_are_part_of_the_plan() -> None:
    here = with_files(
        host(**installed(**{"nvidia-cuda-toolkit": "11.8.89~11.8.0-5", "libcudart11.0": "11.8.89"})), driver(host())
    )
    (loose,) = [item for item in compare(decide(here), here) if item.id == "driver.unheld"]
    assert "libnvidia-ml1" in loose.expected and "nvidia-cuda-toolkit" not in loose.expected
    held = merge(here.model_dump(by_alias=True, mode="json"), {"packages": {"held": [*DEBIAN.split(), "libnvidia-ml1"]}})
    assert findings(Facts.model_validate(held)) == []


def test_an_exact_version_is_pinned_and_asked_for() -> None:
    decision = driver(host(**installed()), nvidia_driver_branch="535.261.03")
    assert decision.action == "replace"
    assert words(decision)[-1] == (
        f"apt-get install {REPLACING} nvidia-kernel-dkms=535.261.03* libcuda1=535.261.03* nvidia-smi=535.261.03* "
        "nvidia-persistenced nvidia-modprobe"
    )
    text = content(decision, PREFERENCES)
    assert text.index("Pin: version 535.261.03*\nPin-Priority: 1002") < text.index("Pin: version 535.*\nPin-Priority: 1001")
    same = driver(host(), nvidia_driver_version="535.261.03")
    assert content(same, PREFERENCES) == text


def test_what_is_held_is_released_before_it_is_replaced() -> None:
    """apt changes a held package only where it is named, and most packages of a driver come as dependencies."""
    state = merge(installed(), {"packages": {"held": ["libnvidia-ml1", "linux-image-amd64", "nvidia-smi"]}})
    calls = words(driver(host(**state), nvidia_driver_branch="535.261.03"))
    assert calls[1] == "apt-mark unhold libnvidia-ml1 nvidia-smi"
    assert "install" in calls[2]
    assert driver(with_files(host(**state), driver(host()))).calls == ()


def test_moving_to_another_branch_takes_the_old_one_along_in_one_call() -> None:
    decision = driver(host(**installed()), nvidia_driver_branch="580")
    assert decision.action == "replace"
    assert decision.unwanted == ("libcuda1", "libnvidia-ml1", "nvidia-smi")
    assert words(decision)[1:] == [
        "apt-get install nvidia-driver-pinning-580",
        f"apt-get install {REPLACING} --purge {NVIDIA_FOR_DEBIAN}",
    ]
    # Both archives share these names, so that to remove one could be to refuse what the others depend on.
    assert decision.calls[-1].settles == ("libcuda1", "libnvidia-ml1", "nvidia-smi")


def test_open_modules_of_the_same_branch_go() -> None:
    state = {
        "packages": {
            "installed": {"nvidia-driver-580-open": "580.173.02-0ubuntu1", "nvidia-dkms-580-open": "580.173.02-0ubuntu1"}
        },
        "nvidia": {"module_version": "580.173.02", "module_flavour": "open", "library_version": "580.173.02"},
    }
    decision = driver(host("ubuntu/24.04", **state))
    assert (decision.branch, decision.action) == ("580", "replace")
    assert decision.unwanted == ("nvidia-dkms-580-open", "nvidia-driver-580-open")
    assert "nvidia-driver-580 " in f"{words(decision)[-1]} "
    assert words(decision)[-1].endswith(" nvidia-dkms-580-open- nvidia-driver-580-open-")
    assert decision.calls[-1].settles == ()


def test_going_back_from_580_takes_its_pin_away() -> None:
    state = installed("580.159.04-1", **{"nvidia-driver-pinning-580": "580-1", "cuda-drivers": "580.159.04-1"})
    decision = driver(host(**state), nvidia_driver_branch="535")
    assert {"nvidia-driver-pinning-580", "cuda-drivers", "libnvidia-ml1"} <= set(decision.unwanted)
    assert not set(decision.unwanted) & set(DEBIAN.split()), "what has the same name becomes the other version"
    assert words(decision)[-1].endswith(" nvidia-driver-pinning-580-")
    assert {"cuda-drivers", "libnvidia-ml1"} <= set(decision.calls[-1].settles)


def test_another_stream_is_switched_to() -> None:
    packages = {name: "3:535.309.01-1.el9" for name in NVIDIA_FOR_EL.split()} | {"dkms": "3.2.1-1.el9"}
    state = {
        "nvidia": {"module_version": "535.309.01", "module_flavour": "proprietary", "library_version": "535.309.01"},
        "packages": {"installed": packages},
    }
    decision = driver(host("rhel/9", **state), nvidia_driver_branch="580")
    assert words(decision)[1:] == [
        "dnf module switch-to nvidia-driver:580-dkms --allowerasing",
        f"dnf install --allowerasing {NVIDIA_FOR_EL}",
    ]
    assert [call.disturbs for call in decision.calls] == [False, True, True]
    kept = driver(host("rhel/9", **state), nvidia_driver_branch="535", nvidia_driver_source="nvidia_repository")
    assert (kept.action, [call for call in words(kept) if "devel" not in call]) == ("keep", [])


def rpm_driver(version: str, release: str = "el9", **others: str) -> dict[str, Any]:
    """A host that has NVIDIA's packages for Enterprise Linux, loaded."""
    names = {name: f"3:{version}-1.{release}" for name in (*NVIDIA_FOR_EL.split(), "nvidia-kmod-common", "libnvidia-ml")}
    return {
        "nvidia": {"module_version": version, "module_flavour": "proprietary", "library_version": version},
        "packages": {"manager": "rpm", "installed": {**names, "dkms": "3.3.0-1", **others}},
    }


def test_another_branch_without_streams_brings_back_what_is_newer() -> None:
    """What is there satisfies `install`, so a newer branch would stay."""
    state = rpm_driver("590.48.01", "el10", **{"python3-dnf-plugin-versionlock": "4.7.0-8.el10"})
    decision = driver(host("rhel/10", **state), nvidia_driver_branch="580")
    there = sorted((*NVIDIA_FOR_EL.split(), "nvidia-kmod-common", "libnvidia-ml"))
    assert words(decision)[1:] == [
        "dnf versionlock add *nvidia*580*",
        f"dnf distro-sync --allowerasing {' '.join(there)}",
        f"dnf install --allowerasing {NVIDIA_FOR_EL}",
    ]
    assert [call.disturbs for call in decision.calls] == [False, False, True, True]


def test_dnf_holds_each_package_of_a_driver_at_its_version() -> None:
    state = rpm_driver("535.309.01")
    found = driver(host("rhel/9", **state))
    assert (found.action, found.hold_package) == ("keep", "python3-dnf-plugin-versionlock")
    (loose,) = [item for item in compare(decide(host("rhel/9", **state)), host("rhel/9", **state)) if item.id == "driver.unheld"]
    assert "kmod-nvidia-latest-dkms" in loose.expected and "nvidia-kmod-common" in loose.expected
    assert " dkms" not in loose.expected
    held = merge(state, {"packages": {"held": [*NVIDIA_FOR_EL.split(), "nvidia-kmod-common", "libnvidia-ml"]}})
    assert "driver.unheld" not in findings(host("rhel/9", **held))
    # What is held is let go before it is replaced.
    moved = words(driver(host("rhel/9", **held), nvidia_driver_branch="580"))
    assert moved[1].startswith("dnf versionlock delete nvidia-driver-cuda ")
    assert moved[2].startswith("dnf module switch-to nvidia-driver:580-dkms")
    assert driver(host()).hold_package == "", "apt can by itself"


def test_headers_of_enterprise_linux_bring_no_other_kernel() -> None:
    """`kernel-devel-matched` wants the kernel of its own version: without one named, dnf would install the newest."""
    old, new = KERNELS["rhel/9"], "5.14.0-570.12.1.el9_6.x86_64"
    devel = {"kernel-devel": "5.14.0-503.11.1.el9_5"}
    state = rpm_driver("535.309.01", **devel)
    decision = driver(
        host("rhel/9", kernels_installed=[old, new], **state),
        nvidia_driver_branch="535",
        nvidia_driver_source="nvidia_repository",
    )
    assert words(decision) == [f"dnf install kernel-devel-{new} kernel-devel-matched-{new}"]
    assert decision.kernels == (old, new)
    assert decision.initramfs == tuple(("dracut", "--force", f"/boot/initramfs-{kernel}.img", kernel) for kernel in (old, new))
    both = rpm_driver(
        "535.309.01",
        **{
            "kernel-devel": "5.14.0-503.11.1.el9_5, 5.14.0-570.12.1.el9_6",
            "kernel-devel-matched": "5.14.0-570.12.1.el9_6",
        },
    )
    there = host("rhel/9", kernels_installed=[old, new], **both)
    assert words(driver(there, nvidia_driver_branch="535", nvidia_driver_source="nvidia_repository")) == []


def test_an_exact_version_on_enterprise_linux() -> None:
    calls = words(driver(host("rhel/9"), nvidia_driver_version="535.309.01"))
    assert calls[-1].split()[3] == "nvidia-driver-cuda-535.309.01"


@pytest.mark.parametrize(("name", "package"), [("rocky", "epel-release"), ("almalinux", "epel-release")])
def test_dkms_comes_from_epel(name: str, package: str) -> None:
    distribution = {"distribution": {"id": name, "version_id": "9.4", "name": name}}
    assert words(driver(host("rhel/9", **distribution)))[0] == f"dnf install {package}"
    known = merge(distribution, {"packages": {"installed": {"epel-release": "9-7.el9"}}})
    assert not [call for call in words(driver(host("rhel/9", **known))) if "epel" in call]


def test_a_driver_that_came_as_a_program_is_uninstalled_only_to_be_replaced() -> None:
    state = {
        "nvidia": {"module_version": "525.60.13", "module_flavour": "proprietary", "uninstaller": "/usr/bin/nvidia-uninstall"}
    }
    assert driver(host(**state)).uninstaller == ("/usr/bin/nvidia-uninstall", "--silent")
    assert driver(host(**merge(state, {"nvidia": {"module_version": "580.159.04"}}))).uninstaller == ()


def test_package_files_come_from_the_controller() -> None:
    decision = driver(host(), nvidia_driver_source="local_files", nvidia_driver_local_files="/srv/driver")
    assert [call.local_packages for call in decision.calls] == [False, True]
    assert not {ARCHIVE_SOURCES, NVIDIA_SOURCES} & {file.path for file in decision.files}
    assert decision.local_packages


@pytest.mark.parametrize(
    ("release", "kernels", "images", "headers", "checked"),
    [
        ("debian/12", ["6.1.0-57-amd64"], ["linux-image-amd64", "linux-image-6.1.0-57-amd64"], ["6.1.0-57-amd64", "amd64"], 1),
        ("debian/12", ["6.1.0-57-amd64", "6.1.0-58-amd64"], [], ["6.1.0-57-amd64", "6.1.0-58-amd64"], 2),
        ("debian/12", ["6.1.0-57-cloud-amd64"], ["linux-image-cloud-amd64"], ["6.1.0-57-cloud-amd64", "cloud-amd64"], 1),
        (
            "ubuntu/22.04",
            ["6.8.0-100-generic"],
            ["linux-image-generic-hwe-22.04", "linux-image-unsigned-6.8.0-100-generic"],
            ["6.8.0-100-generic", "generic-hwe-22.04"],
            1,
        ),
        ("debian/12", ["6.1.70-custom"], ["linux-image-amd64"], [], 0),
    ],
)
def test_headers_follow_the_kernels(
    release: str, kernels: list[str], images: list[str], headers: list[str], checked: int
) -> None:
    """Those of the kernel that runs, of the one that boots next, and of those that the installed image packages will bring."""
    packages = {"installed": {name: "1" for name in images}}
    decision = driver(host(release, kernel=kernels[0], kernels_installed=kernels, packages=packages))
    calls = [call for call in words(decision) if "linux-headers" in call]
    assert calls == ([f"apt-get install {' '.join(f'linux-headers-{name}' for name in headers)}"] if headers else [])
    assert len(decision.kernels) == checked
    assert decision.initramfs == tuple(("update-initramfs", "-u", "-k", kernel) for kernel in kernels)


def test_modules_are_signed_with_the_key_that_was_named() -> None:
    names = {"nvidia_driver_signing_key": "/k/mok.key", "nvidia_driver_signing_certificate": "/k/mok.pub"}
    decision = driver(host(secure_boot=True), **names)
    assert content(decision, SIGNING).endswith("mok_signing_key=/k/mok.key\nmok_certificate=/k/mok.pub\n")
    assert (decision.signed, decision.certificate) == (True, "/k/mok.pub")
    assert decide(host(secure_boot=True), **names).verdict == "warn"
    assert decide(host(secure_boot=True)).verdict == "refused"
    assert decide(host("rhel/9", secure_boot=True), **names).driver.signed  # type: ignore[union-attr]
    # A DKMS that reads no such file would leave them unsigned.
    assert decide(host("debian/11", secure_boot=True), **names).verdict == "refused"


def test_a_driver_that_waits_for_a_reboot_is_told() -> None:
    state = {"nvidia": {"on_disk_module_version": "535.309.01", "on_disk_module_flavour": "proprietary"}}
    assert findings(host(**state)) == ["driver.not-loaded"]
    assert findings(host(**merge(state, {"nvidia": {"module_version": "535.309.01", "module_flavour": "proprietary"}}))) == []


def test_headers_alone_disturb_no_server() -> None:
    """A kernel that came meanwhile needs its headers, and the driver that serves stays as it is."""
    kernels = {"kernels_installed": [KERNELS["debian/12"], "6.1.0-58-amd64"]}
    newer = with_files(host(**merge(installed(), kernels)), driver(host()))
    decision = driver(newer)
    assert words(decision) == ["apt-get update", "apt-get install linux-headers-6.1.0-58-amd64"]
    assert [call.disturbs for call in decision.calls] == [False, False]
    assert [call.disturbs for call in driver(host()).calls] == [False, False, True]


def test_servers_that_run_are_named() -> None:
    serving = {"processes": [{"pid": 7, "unit": "v100-chat.service"}]}
    assert driver(host(**serving)).serving == ("chat",)
    assert driver(host()).serving == ()


@pytest.mark.parametrize(
    ("name", "version", "part"),
    [
        ("libcuda1", "535.309.01-0+deb12u1", True),
        ("libnvidia-ml1:i386", "535.309.01-0+deb12u1", True),
        ("cuda-drivers", "1:580.159.04-1", True),
        ("nvidia-cuda-toolkit", "11.8.89~11.8.0-5~deb12u1", False),
        ("nvidia-container-toolkit", "1.17.4-1", False),
        ("nvidia-support", "20220217+3~deb12u1", False),
        ("libc6", "535.1", False),
    ],
)
def test_packages_of_the_driver(name: str, version: str, part: bool) -> None:
    assert is_driver_package(name, version) is part
