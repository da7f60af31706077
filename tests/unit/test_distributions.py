"""What each supported distribution is called on to install and to run, role by role, as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_driver_actions import KERNELS, host
from v100ctl.catalog import load_catalog
from v100ctl.facts import Facts
from v100ctl.plan import HostPlan
from v100ctl.plan.units import PROTECT_PROC_SINCE

from .factory import make_config, make_facts, make_plan

RELEASES = sorted(KERNELS)
APT_RUNTIME, DNF_RUNTIME = ("libgomp1", "libstdc++6", "ca-certificates"), ("libgomp", "libstdc++", "ca-certificates")
APT_PYTHON, DNF_PYTHON = ("python3-venv", "python3-dev", "gcc", "libc6-dev"), ("python3-devel", "gcc", "glibc-devel")


def facts_of(release: str, **changes: Any) -> Facts:
    name, _, version = release.partition("/")
    row = load_catalog().distribution(name, version)
    assert row is not None
    return make_facts(
        **{
            "distribution": {"id": name, "version_id": version, "name": row.name},
            "kernel": KERNELS[release],
            "libc": {"name": "glibc", "version": row.glibc},
            "python": {"version": f"{row.python}.1", "executable": "/usr/bin/python3"},
            "packages": {"manager": "dpkg" if row.package_manager == "apt" else "rpm", "installed": {}},
            **changes,
        }
    )


def dnf(release: str) -> bool:
    return release.startswith("rhel")


@pytest.mark.parametrize("release", RELEASES)
def test_llama_cpp(release: str) -> None:
    """What a server needs while it runs, and what compiles it."""
    decided = make_plan(facts_of(release))
    assert decided.packages == (DNF_RUNTIME if dnf(release) else APT_RUNTIME)
    (made,) = decided.releases
    assert made.toolchain_packages == (("gcc-c++" if dnf(release) else "g++"), "cmake", "ninja-build")
    assert bool(made.toolchain_repositories) == dnf(release)
    assert [rule.id for rule in decided.rules if rule.severity == "refuse"] == []


@pytest.mark.parametrize(
    ("name", "version", "repository"),
    [
        ("rocky", "9.6", "crb"),
        ("almalinux", "10.0", "crb"),
        ("rhel", "9.6", "codeready-builder-for-rhel-9-x86_64-rpms"),
        ("rhel", "10.1", "codeready-builder-for-rhel-10-x86_64-rpms"),
    ],
)
def test_ninja_comes_from_a_repository_that_is_asked_for_it_alone(name: str, version: str, repository: str) -> None:
    distribution = {"id": name, "version_id": version, "name": name}
    (made,) = make_plan(facts_of(f"rhel/{version.partition('.')[0]}", distribution=distribution)).releases
    assert made.toolchain_repositories == (repository,)
    # Where a package came from decides no byte of the release.
    other = make_plan(facts_of(f"rhel/{version.partition('.')[0]}")).releases[0]
    assert other.build_id == made.build_id


@pytest.mark.parametrize("release", RELEASES)
def test_vllm(release: str) -> None:
    config = make_config({"engine": "vllm", "gpus": [0]}, llama_cpp_backend="cuda")
    packages = make_plan(host(release), config).packages
    assert packages == ((*DNF_RUNTIME, *DNF_PYTHON) if dnf(release) else (*APT_RUNTIME, *APT_PYTHON))


HOST_COMPILERS = {
    # The default compiler where CUDA 11.8 takes it, the newest that it takes where the release has one.
    "debian/11": "g++-10",
    "debian/12": "g++-11",
    "ubuntu/20.04": "g++-9",
    "ubuntu/22.04": "g++-11",
    "rhel/9": "gcc-c++",
}


@pytest.mark.parametrize("release", RELEASES)
def test_cuda_toolkit(release: str) -> None:
    """11.8 and its compiler, where the release has them; where not, that is said."""
    decided = make_plan(host(release), make_config({"gpus": [0]}, llama_cpp_backend="cuda"))
    assert decided.cuda is not None
    refused = {rule.id for rule in decided.rules if rule.severity == "refuse" and rule.id.startswith("cuda-")}
    assert bool(refused & {"cuda-not-packaged", "cuda-compiler-too-new"}) == (release not in HOST_COMPILERS)
    if release in HOST_COMPILERS:
        assert decided.cuda.host_compiler == HOST_COMPILERS[release]
        assert HOST_COMPILERS[release] in decided.cuda.packages
        program = "g++" if dnf(release) else HOST_COMPILERS[release]
        assert decided.cuda.host_compiler_path == f"/usr/bin/{program}"
        # What a build is told names the same one.
        assert decided.releases[0].build["cuda"]["host_compiler"] == [f"/usr/bin/{program}"]


@pytest.mark.parametrize("release", RELEASES)
def test_cron(release: str) -> None:
    nightly = {"nightly_restart": {"enabled": True, "window": "03:00-05:00"}}
    decided = make_plan(facts_of(release), make_config(nightly))
    package, unit = ("cronie", "crond.service") if dnf(release) else ("cron", "cron.service")
    assert decided.packages[-1] == package
    assert unit in decided.upkeep.units
    # One that is there already does it.
    other = "cronie" if package == "cron" else "cron"
    there = make_plan(facts_of(release, packages={"installed": {other: "1"}}), make_config(nightly))
    assert package not in there.packages and unit not in there.upkeep.units


@pytest.mark.parametrize("release", [release for release in RELEASES if release != "ubuntu/20.04"])
def test_gateway(release: str) -> None:
    decided = make_plan(facts_of(release), make_config(gateway_placement="host"))
    assert "haproxy" in decided.packages
    assert [rule.id for rule in decided.rules if rule.severity == "refuse"] == []


def _unit(decided: HostPlan) -> str:
    return next(file.content for file in decided.files if file.path.endswith("/v100-chat.service"))


@pytest.mark.parametrize(
    ("version", "hides"), [(245, False), (PROTECT_PROC_SINCE - 1, False), (PROTECT_PROC_SINCE, True), (257, True)]
)
def test_units_hold_what_their_systemd_knows(version: int, hides: bool) -> None:
    unit = _unit(make_plan(make_facts(systemd={"version": version, "state": "running"})))
    assert ("\nProtectProc=invisible\n" in unit) == hides
    # The rest of them is older than the oldest systemd that a supported release has (245, Ubuntu 20.04).
    assert "\nProtectClock=yes\n" in unit and "\nType=exec\n" in unit


@pytest.mark.parametrize("state", ["", "permissive", "enforcing"])
def test_releases_are_labelled_where_selinux_is(state: str) -> None:
    decided = make_plan(facts_of("rhel/9", selinux=state))
    assert [release.relabel for release in decided.releases] == [bool(state)]
    # A label is no part of a release.
    assert dataclasses.replace(decided.releases[0], relabel=False) == make_plan(facts_of("rhel/9")).releases[0]


def test_no_role_names_a_distribution_in_a_condition() -> None:
    """What differs between distributions is the plan's: roles look at the package manager at most."""
    roles = Path(__file__).parents[2] / "roles"
    words = ("ansible_distribution", "ansible_os_family", "os_family")
    assert [path for path in roles.rglob("tasks/*.yml") if any(word in path.read_text("utf-8") for word in words)] == []
