"""The catalog's data: every row has its source, ranges neither overlap nor leave holes, and what must be answerable is."""

from __future__ import annotations

import itertools
import re
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import v100ctl.catalog
from v100ctl.catalog import CudaRow, PackageSource, load_catalog, version_key
from v100ctl.catalog.hardware import ENTERPRISE_LINUX, KernelBuilds

CATALOG = load_catalog()
AS_OF = date(2026, 11, 29)
RELEASES = [(row.id, row.version_id) for row in CATALOG.distributions]
HARDWARE_FILES = ("gpus.yml", "drivers.yml", "cuda.yml", "distributions.yml")

FOLDER = Path(v100ctl.catalog.__file__).parent
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yml"))


def document(name: str) -> dict[str, Any]:
    text = (FOLDER / name).read_text(encoding="utf-8")
    # The C loader reads the big files in a fraction of the time.
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    assert isinstance(loaded, dict)
    return loaded


def rows_without_source(document: dict[str, Any]) -> list[str]:
    """Rows (mappings in a list at the top) that neither have a source nor stand in a file that has one for them all."""
    if str(document.get("source", "")).strip():
        return []
    return [
        f"{key}[{index}]"
        for key, value in document.items()
        if isinstance(value, list)
        for index, row in enumerate(value)
        if isinstance(row, dict) and not str(row.get("source") or "").strip()
    ]


def test_there_are_files() -> None:
    assert set(HARDWARE_FILES) <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_dated_and_every_row_has_a_source(name: str) -> None:
    loaded = document(name)
    assert isinstance(loaded["as_of"], date)
    assert date(2026, 1, 1) <= loaded["as_of"]
    assert rows_without_source(loaded) == []


def test_a_row_without_a_source_is_seen() -> None:
    assert rows_without_source({"as_of": AS_OF, "rows": [{"a": 1, "source": " "}, {"a": 2, "source": "seen"}]}) == ["rows[0]"]


def package_sources() -> list[tuple[str, PackageSource]]:
    by_driver = [
        (f"{row.branch} on {release}", one) for row in CATALOG.drivers for release, many in row.packages.items() for one in many
    ]
    by_cuda = [
        (f"{row.version} on {release}", one) for row in CATALOG.cuda for release, many in row.repositories.items() for one in many
    ]
    return by_driver + by_cuda


def test_nested_rows_have_sources_too() -> None:
    assert [name for name, one in package_sources() if not one.source.strip()] == []
    assert [row.branch for row in CATALOG.drivers for one in row.kernels if not one.source.strip()] == []


def test_the_catalog_is_as_old_as_its_oldest_part() -> None:
    assert min(document(name)["as_of"] for name in HARDWARE_FILES) >= CATALOG.as_of
    assert CATALOG.age_days(CATALOG.as_of) == 0
    assert CATALOG.age_days(CATALOG.as_of + timedelta(days=400)) == 400
    assert CATALOG.age_days(CATALOG.as_of - timedelta(days=1)) == 0


def test_hardware_is_read_only_when_asked_for() -> None:
    fresh = load_catalog.__wrapped__()
    assert not {"gpus", "drivers", "cuda", "architectures"} & set(vars(fresh))
    assert fresh.drivers is fresh.drivers


def test_parts_can_be_replaced() -> None:
    without = CATALOG.model_copy(update={"drivers": ()})
    assert without.driver("580") is None
    assert CATALOG.driver("580") is not None


# --- GPUs


@pytest.mark.parametrize(
    ("pci_id", "name", "gib", "form"),
    [
        ("10de:1db1", "Tesla V100-SXM2-16GB", 16, "SXM2"),
        ("10de:1db5", "Tesla V100-SXM2-32GB", 32, "SXM2"),
        ("10de:1db4", "Tesla V100-PCIE-16GB", 16, "PCIE"),
        ("10de:1db6", "Tesla V100-PCIE-32GB", 32, "PCIE"),
        ("10de:1df6", "Tesla V100S-PCIE-32GB", 32, "PCIE"),
        ("10de:1db8", "Tesla V100-SXM3-32GB", 32, "SXM3"),
        ("10de:1db3", "Tesla V100-FHHL-16GB", 16, "FHHL"),
        ("10de:1db2", "Tesla V100-DGXS-16GB", 16, "DGXS"),
        ("10de:1db7", "Tesla V100-DGXS-32GB", 32, "DGXS"),
    ],
)
def test_v100s(pci_id: str, name: str, gib: int, form: str) -> None:
    row = CATALOG.gpu(pci_id)
    assert row is not None
    assert (row.name, row.form, row.compute_capability, row.architecture) == (name, form, "7.0", "volta")
    assert row.memory_total_bytes == gib * 1024**3
    # The driver reserves a little of what the chips hold.
    assert 0 < row.memory_total_bytes - row.memory_bytes < 0.02 * row.memory_total_bytes
    assert (row.pcie_generation, row.pcie_width) == (3, 16)
    assert row.nvswitch == (form == "SXM3")
    assert row.power_limit_w is not None
    assert row.power_min_w is None or row.power_min_w < row.power_limit_w
    assert CATALOG.gpu(pci_id.upper()) is row
    architecture = CATALOG.architecture(pci_id)
    assert architecture is not None
    assert (architecture.name, architecture.open_modules) == ("volta", "refused")


@pytest.mark.parametrize("pci_id", ["10de:1df0", "10de:1df2"])
def test_a_v100_without_a_marketing_name_is_one_all_the_same(pci_id: str) -> None:
    row = CATALOG.gpu(pci_id)
    assert row is not None
    assert CATALOG.gpu_named(row.name) is row
    assert (row.architecture, row.memory_total_bytes) == ("volta", 32 * 1024**3)


def test_ids_and_names_are_unique() -> None:
    ids = [row.pci_id for row in CATALOG.gpus] + [row.pci_id for row in CATALOG.neighbours]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"10de:[0-9a-f]{4}", one) for one in ids)
    names = {row.pci_id: row.name for row in CATALOG.gpus if row.pci_id != "10de:1df5"}
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Tesla V100-SXM2-16GB", "10de:1db1"),
        ("V100-SXM2-16GB", "10de:1db1"),
        ("v100-sxm2-16gb", "10de:1db1"),
        ("NVIDIA Tesla V100-PCIE-32GB", "10de:1db6"),
        (" tesla v100s-pcie-32gb ", "10de:1df6"),
        ("Tesla V100-SXM3-32GB-H", "10de:1db8"),
        ("V100", None),
        ("NVIDIA H200", None),
        ("", None),
    ],
)
def test_a_v100_by_name(asked: str, found: str | None) -> None:
    row = CATALOG.gpu_named(asked)
    assert (row.pci_id if row else None) == found


def test_a_slip_of_a_name_has_a_neighbour() -> None:
    assert CATALOG.gpu_names_like("V100-SMX2-16GB")[0] == "V100-SXM2-16GB"
    assert CATALOG.gpu_names_like("v100 pcie 32gb")[0] == "V100-PCIE-32GB"
    assert CATALOG.gpu_names_like("zebra") == ()
    assert all(CATALOG.gpu_named(name) for name in CATALOG.gpu_names)


def test_architectures_do_not_share_ids() -> None:
    ranges = sorted(one for row in CATALOG.architectures for one in row.ranges)
    assert all(first <= last for first, last in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))


CARDS = [(row.pci_id, row.name, row.architecture) for row in CATALOG.gpus] + [
    (row.pci_id, row.name, row.architecture) for row in CATALOG.neighbours
]


@pytest.mark.parametrize(("pci_id", "name", "architecture"), CARDS, ids=[name for _, name, _ in CARDS])
def test_every_card_lies_in_its_architecture(pci_id: str, name: str, architecture: str) -> None:
    by_id, by_name = CATALOG.architecture(pci_id), CATALOG.architecture("", name)
    assert by_id is not None
    assert by_id.name == architecture
    assert by_name is None or by_name.name == architecture


@pytest.mark.parametrize(
    ("pci_id", "name", "needed"),
    [
        ("10de:2901", "NVIDIA B200", True),
        ("", "NVIDIA B200", True),
        ("", "NVIDIA GeForce RTX 5090", True),
        ("", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("10de:2342", "NVIDIA GH200 480GB", True),
        ("10de:3182", "", True),
        ("10de:3002", "", True),
        ("10de:2335", "NVIDIA H200", False),
        ("", "NVIDIA H200", False),
        ("", "NVIDIA GeForce RTX 3050", False),
        ("", "NVIDIA RTX A6000", False),
        ("10de:1eb8", "Tesla T4", False),
        ("10de:1db1", "Tesla V100-SXM2-16GB", False),
        ("10de:ffff", "NVIDIA Something 9000", False),
        ("1002:73bf", "", False),
        ("", "", False),
    ],
)
def test_which_cards_need_open_modules(pci_id: str, name: str, needed: bool) -> None:
    assert CATALOG.needs_open_modules(name, pci_id) is needed


@pytest.mark.parametrize("name", ["maxwell", "pascal", "volta"])
def test_cards_without_a_system_processor_refuse_open_modules(name: str) -> None:
    assert [row.open_modules for row in CATALOG.architectures if row.name == name] == ["refused"]


@given(st.text(max_size=40), st.text(max_size=40))
def test_an_unknown_card_is_no_error(pci_id: str, name: str) -> None:
    CATALOG.architecture(pci_id, name)
    assert CATALOG.gpu(pci_id) is None or pci_id.strip().lower().startswith("10de:")
    CATALOG.gpu_named(name)
    CATALOG.gpu_names_like(name)


# --- Drivers


def test_every_driver_version_from_the_first_row_on_has_one_branch() -> None:
    branches = [int(row.branch) for row in CATALOG.drivers]
    assert branches == sorted(set(branches))
    for major in range(branches[0], branches[-1] + 100):
        row = CATALOG.driver(f"{major}.10.01")
        assert row is not None
        assert row.branch == str(max(branch for branch in branches if branch <= major))
    assert CATALOG.driver(f"{branches[0] - 1}.99") is None
    assert CATALOG.driver("") is None
    assert CATALOG.driver("unknown") is None


def test_branches_are_in_the_order_of_their_dates_and_cuda_versions() -> None:
    released = [row.released for row in CATALOG.drivers if row.released]
    assert released == sorted(released)
    cuda = [version_key(row.cuda) for row in CATALOG.drivers]
    assert cuda == sorted(set(cuda))
    for row in CATALOG.drivers:
        assert row.first_version is None or row.first_version.split(".")[0] == row.branch
        assert row.released is None or row.end_of_life is None or row.released < row.end_of_life
        # The last day of a month, since months are what NVIDIA names.
        assert row.end_of_life is None or (row.end_of_life + timedelta(days=1)).day == 1


def test_volta_leaves_the_driver_once() -> None:
    drives = [row.drives_volta for row in CATALOG.drivers]
    assert drives == sorted(drives, reverse=True)
    last = max((row for row in CATALOG.drivers if row.drives_volta), key=lambda row: int(row.branch))
    assert last.branch == "580"


def test_open_is_the_default_from_560_on() -> None:
    assert {row.default_modules for row in CATALOG.drivers if int(row.branch) < 560} == {"proprietary"}
    assert {row.default_modules for row in CATALOG.drivers if int(row.branch) >= 560} == {"open"}
    assert all(row.proprietary_modules for row in CATALOG.drivers if row.drives_volta)


@pytest.mark.parametrize(
    ("version", "as_of", "ended"),
    [
        ("535.309.01", date(2026, 6, 30), False),
        ("535.309.01", date(2026, 7, 1), True),
        ("580.159.04", date(2028, 6, 30), False),
        ("580.159.04", date(2028, 7, 1), True),
        ("550.163.01", date(2026, 11, 29), True),
        ("595.71.05", date(2026, 11, 29), False),
    ],
)
def test_end_of_life(version: str, as_of: date, ended: bool) -> None:
    row = CATALOG.driver(version)
    assert row is not None
    assert row.has_ended(as_of) is ended


@pytest.mark.parametrize(
    ("driver", "kernel", "packaged_by", "builds"),
    [
        ("535.309.01-0+deb12u1", "6.1.0-57-amd64", "debian", True),
        ("535.274.02-1~deb13u1", "6.12.118+deb13-amd64", "debian", True),
        ("535.216.01", "6.8.0-90-generic", None, True),
        ("535.216.01", "6.17.0-5-generic", None, None),
        ("535.54.03", "6.12.0", None, None),
        ("580.119.02", "6.12.0-124.52.2.el10_1.x86_64", None, True),
        ("580.119.02", "7.0.9-1", None, False),
        ("580.65.06", "7.0.9-1", None, False),
        ("580.119.02-0ubuntu0.24.04.1", "7.0.9-1", "ubuntu", None),
        ("580.142", "7.0.12_1", None, True),
        ("580.142", "7.1.0_1", None, False),
        ("580.159.04", "7.1.2", None, True),
        ("580.159.04", "7.2.0", None, None),
        ("580.173.02-0ubuntu0.24.04.1", "6.8.0-90-generic", "ubuntu", True),
        ("550.163.01-2", "6.12.118+deb13-amd64", "debian", True),
        ("550.163.01-2", "7.3.4+deb13-amd64", "debian", False),
        ("550.163.01-2", "7.1.5+deb13-amd64", "debian", None),
        ("535.274.02-1~deb13u1", "7.3.4+deb13-amd64", "debian", False),
        ("580.159.04", "", None, None),
        ("580.159.04", "custom", None, None),
    ],
)
def test_kernels_that_modules_build_for(driver: str, kernel: str, packaged_by: str | None, builds: bool | None) -> None:
    row = CATALOG.driver(driver)
    assert row is not None
    answer, entry = row.builds_for(driver, kernel, packaged_by)
    assert answer is builds
    assert (entry is None) is (answer is None)


def test_a_distributions_patches_do_not_speak_for_nvidias_own_release() -> None:
    row = CATALOG.driver("525")
    assert row is not None
    assert row.builds_for("525.147.05", "6.14.2", "debian")[0] is True
    assert row.builds_for("525.147.05", "6.14.2")[0] is None


def test_kernel_entries_are_in_order() -> None:
    for row in CATALOG.drivers:
        for entry in row.kernels:
            assert entry.driver.split(".")[0] == row.branch
            assert entry.newest or entry.fails_from
            if entry.newest and entry.fails_from:
                assert version_key(entry.newest) < version_key(entry.fails_from)
        for by in {entry.packaged_by for entry in row.kernels}:
            versions = [version_key(entry.driver) for entry in row.kernels if entry.packaged_by == by]
            assert versions == sorted(set(versions)), row.branch


def test_success_holds_for_later_drivers_and_failure_for_earlier_ones() -> None:
    row = CATALOG.drivers[-1].model_copy(
        update={
            "kernels": (
                KernelBuilds(driver="620.1", newest="6.10", fails_from="6.12", source="s"),
                KernelBuilds(driver="620.2", newest="6.12", source="s"),
                KernelBuilds(driver="620.2", newest="6.14", fails_from="6.16", packaged_by="debian", source="s"),
            )
        }
    )
    assert row.builds_for("620.0", "6.12.1")[0] is False
    assert row.builds_for("620.0", "6.9.0")[0] is None
    assert row.builds_for("620.1", "6.11.0")[0] is None
    assert row.builds_for("620.1", "6.12.1")[0] is False
    assert row.builds_for("620.2", "6.12.1")[0] is True
    assert row.builds_for("620.3", "6.9.0")[0] is True
    assert row.builds_for("620.2", "6.14.0", "debian")[0] is True
    assert row.builds_for("620.2", "6.16.0", "debian")[0] is False
    assert row.builds_for("620.2", "6.16.0")[0] is None


# --- CUDA


def test_cuda_versions_are_unique_and_in_order() -> None:
    versions = [version_key(row.version) for row in CATALOG.cuda]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("row", CATALOG.cuda, ids=lambda row: row.version)
def test_ptx_loads_from_the_first_branch_with_that_cuda(row: CudaRow) -> None:
    able = [branch.branch for branch in CATALOG.drivers if version_key(branch.cuda) >= version_key(row.version)]
    assert able[0] == row.ptx_driver_min
    assert version_key(row.driver_bundled)[0] == int(row.ptx_driver_min)
    assert version_key(row.driver_min) <= version_key(row.driver_bundled)


@pytest.mark.parametrize("row", CATALOG.cuda, ids=lambda row: row.version)
def test_every_compiler_and_every_libc_has_an_answer(row: CudaRow) -> None:
    accepted = [major for major in range(4, 30) if row.accepts_gcc(major)]
    assert accepted == list(range(4, row.gcc_max + 1))
    libcs = [f"2.{minor}" for minor in range(17, 60)]
    answers = [row.accepts_glibc(libc) for libc in libcs]
    assert answers == sorted(answers, reverse=True)
    assert answers[0]
    assert {row.accepts_gcc(release.gcc) for release in CATALOG.distributions} <= {True, False}


@pytest.mark.parametrize(
    ("version", "capability", "targets"),
    [("11.8", "7.0", True), ("12.9", "7.0", True), ("13.0", "7.0", False), ("13.0", "7.5", True), ("11.8", "10.0", False)],
)
def test_what_a_toolkit_targets(version: str, capability: str, targets: bool) -> None:
    row = CATALOG.cuda_toolkit(version)
    assert row is not None
    assert row.targets(capability) is targets


@pytest.mark.parametrize(
    ("version", "driver", "machine_code", "ptx"),
    [
        ("12.9", "535.309.01", True, False),
        ("12.9", "580.159.04", True, True),
        ("11.8", "535.309.01", True, True),
        ("12.1", "535.309.01", True, True),
        ("11.8", "450.80.02", True, False),
        ("12.1", "470.256.02", False, False),
        ("13.0", "535.309.01", False, False),
        ("13.0", "580.65.06", True, True),
    ],
)
def test_machine_code_and_ptx_differ(version: str, driver: str, machine_code: bool, ptx: bool) -> None:
    row = CATALOG.cuda_toolkit(version)
    assert row is not None
    assert (row.runs_machine_code(driver), row.loads_ptx(driver)) == (machine_code, ptx)


@pytest.mark.parametrize(
    ("asked", "found"), [("12.9.86", "12.9"), ("12-9", "12.9"), ("11.8", "11.8"), ("12", None), ("9.2", None), ("", None)]
)
def test_a_toolkit_by_version(asked: str, found: str | None) -> None:
    row = CATALOG.cuda_toolkit(asked)
    assert (row.version if row else None) == found


# --- Where each comes from


@pytest.mark.parametrize("release", RELEASES, ids="/".join)
@pytest.mark.parametrize("branch", ["535", "580"])
def test_every_release_has_an_answer_for_both_branches(release: tuple[str, str], branch: str) -> None:
    row = CATALOG.driver(branch)
    assert row is not None
    assert row.sources(*release) != ()


@pytest.mark.parametrize("release", RELEASES, ids="/".join)
@pytest.mark.parametrize("version", ["11.8", "12.1", "12.9"])
def test_every_release_has_an_answer_for_each_toolkit(release: tuple[str, str], version: str) -> None:
    row = CATALOG.cuda_toolkit(version)
    assert row is not None
    assert row.sources(*release) != ()


@pytest.mark.parametrize(("name", "one"), package_sources(), ids=[name for name, _ in package_sources()])
def test_a_source_says_what_to_install_or_why_not(name: str, one: PackageSource) -> None:
    if one.usable:
        assert one.packages
        assert one.repository
        assert one.installs is None
    else:
        assert one.reason
        assert not one.pins
    assert (one.kind == "transitional") == (one.installs is not None)


def test_releases_named_by_rows_are_known() -> None:
    named = {release for row in CATALOG.drivers for release in row.packages} | {
        release for row in CATALOG.cuda for release in row.repositories
    }
    assert named <= {"/".join(release) for release in RELEASES}


def test_a_580_pin_on_debian_12_without_nvidias_repository() -> None:
    row = CATALOG.driver("580")
    assert row is not None
    own = [one for one in row.sources("debian", "12") if not one.of_nvidia]
    assert [one.kind for one in own] == ["none"]
    assert "535" in str(own[0].reason)
    theirs = [one for one in row.sources("debian", "12") if one.of_nvidia]
    assert [one.pins for one in theirs] == [("nvidia-driver-pinning-580",)]


@pytest.mark.parametrize("version", ["22.04", "24.04"])
def test_ubuntus_535_is_580(version: str) -> None:
    row = CATALOG.driver("535")
    assert row is not None
    first, second = row.sources("ubuntu", version)
    assert (first.kind, first.installs, first.usable) == ("transitional", "580", False)
    assert (second.kind, second.packages) == ("nvidia_repository", ("cuda-drivers-535",))


def test_debian_13_has_no_580_at_all() -> None:
    row = CATALOG.driver("580")
    assert row is not None
    assert [one.usable for one in row.sources("debian", "13")] == [False, False]
    older = CATALOG.driver("535")
    assert older is not None
    assert [one.packages[0] for one in older.sources("debian", "13")] == ["nvidia-tesla-535-kernel-dkms"]


def test_no_branch_is_installed_unheld() -> None:
    """An upgrade must not change the branch: each usable source pins, holds, or is a stream of its own."""
    for branch in ("535", "580"):
        row = CATALOG.driver(branch)
        assert row is not None
        for release, many in row.packages.items():
            for one in many:
                assert not one.usable or one.pins or one.hold or one.kind == "dnf_module", (branch, release)


@pytest.mark.parametrize(
    ("release", "toolkits"),
    [
        (("debian", "11"), ["11.8", "12.1", "12.6"]),
        (("debian", "12"), ["11.8", "12.3", "12.4", "12.9"]),
        (("debian", "13"), ["12.4"]),
        (("ubuntu", "20.04"), ["11.8", "12.1", "12.9"]),
        (("ubuntu", "22.04"), ["11.8", "12.1", "12.4", "12.8", "12.9"]),
        (("ubuntu", "24.04"), ["12.5", "12.9"]),
        (("rhel", "9"), ["11.8", "12.1", "12.9"]),
        (("rhel", "10"), []),
        (("rocky", "9.4"), ["11.8", "12.1", "12.9"]),
        (("gentoo", "2.17"), []),
    ],
)
def test_toolkits_that_a_release_can_have(release: tuple[str, str], toolkits: list[str]) -> None:
    assert [row.version for row, _ in CATALOG.toolkits_for(*release, "7.0")] == toolkits


def test_debian_13s_toolkit_goes_with_550_but_not_with_535() -> None:
    ((row, one),) = CATALOG.toolkits_for("debian", "13", "7.0")
    assert (row.version, one.host_compiler, one.driver_min) == ("12.4", "g++-13", "550")


@pytest.mark.parametrize("release", RELEASES, ids="/".join)
def test_a_toolkit_that_a_release_can_have_finds_a_compiler_there(release: tuple[str, str]) -> None:
    distribution = CATALOG.distribution(*release)
    assert distribution is not None
    for row in CATALOG.cuda:
        for one in row.sources(*release):
            if not one.usable:
                continue
            package = distribution.compiler(row.gcc_max)
            assert package is not None, row.version
            assert one.host_compiler in (None, package), row.version
            # Without a compiler of its own named, the default one must do.
            assert one.host_compiler or row.accepts_gcc(distribution.gcc), row.version


# --- Distributions


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("debian", "12"), "Debian 12 (bookworm)"),
        (("rocky", "9.4"), "Enterprise Linux 9"),
        (("almalinux", "10.1"), "Enterprise Linux 10"),
        (("rhel", "9"), "Enterprise Linux 9"),
        (("rocky", "8.10"), None),
        (("linuxmint", "22"), None),
        (("ubuntu", "24.10"), None),
        (("debian", ""), None),
    ],
)
def test_a_distribution_by_its_os_release(asked: tuple[str, str], found: str | None) -> None:
    row = CATALOG.distribution(*asked)
    assert (row.name if row else None) == found


def test_every_distribution_names_what_the_roles_need() -> None:
    assert set(RELEASES) == {
        *(("debian", version) for version in ("11", "12", "13")),
        *(("ubuntu", version) for version in ("20.04", "22.04", "24.04")),
        *(("rhel", version) for version in ("9", "10")),
    }
    for row in CATALOG.distributions:
        assert row.toolchain_packages and row.runtime_packages and row.python_packages, row.name
        assert row.gcc in row.compilers
        # Each rebuild of Enterprise Linux has its own names for repositories.
        for names in (row.toolchain_repository, row.dkms_source):
            assert set(names) == (set(ENTERPRISE_LINUX) if row.package_manager == "dnf" else set()), row.name


@pytest.mark.parametrize(
    ("version", "python"), [("2.19.14", "3.8"), ("2.20.0", "3.9"), ("2.21.5", "3.9"), ("2.18.1", None), ("", None)]
)
def test_the_python_that_ansible_wants_on_a_host(version: str, python: str | None) -> None:
    row = CATALOG.ansible_core(version)
    assert (row.host_python_min if row else None) == python


@pytest.mark.parametrize(
    ("release", "gcc_max", "package"),
    [
        (("debian", "12"), 11, "g++-11"),
        (("debian", "12"), 13, "g++-12"),
        (("debian", "13"), 11, None),
        (("ubuntu", "24.04"), 12, "g++-12"),
        (("rhel", "10"), 13, None),
    ],
)
def test_the_newest_compiler_that_fits(release: tuple[str, str], gcc_max: int, package: str | None) -> None:
    row = CATALOG.distribution(*release)
    assert row is not None
    assert row.compiler(gcc_max) == package


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("535.309.01-0ubuntu1", (535, 309, 1)),
        ("6.1.0-57-amd64", (6, 1, 0)),
        ("7.3.4+deb13-amd64", (7, 3, 4)),
        ("2.36", (2, 36)),
        ("", ()),
        ("unknown", ()),
        ("..", ()),
    ],
)
def test_version_key(text: str, key: tuple[int, ...]) -> None:
    assert version_key(text) == key


def test_a_version_of_thousands_of_digits_is_no_error() -> None:
    from v100ctl.catalog import version_key

    assert version_key("5" * 10_000)[0] > 0
    assert version_key("535.309.01-0ubuntu1") == (535, 309, 1)
