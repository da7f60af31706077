"""Rules about the host alone: its distribution, service manager, packages, disks."""

from __future__ import annotations

from collections.abc import Iterator

from v100ctl.catalog import Catalog, Distribution, LlamaCppBuild, version_key
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import Model, Release, Rule

#: Space for packages, logs and files made aside, beyond what is counted.
_SPARE_BYTES = 256 * 1024**2
#: ``model_store_slice_bytes`` by default.
SLICE_BYTES = 1024**3


def host_rules(facts: Facts, catalog: Catalog) -> Iterator[Rule]:
    """Rules about the host alone."""
    distribution = catalog.distribution(facts.distribution.id, facts.distribution.version_id)
    if distribution is None:
        found = (
            facts.distribution.name
            or f"{facts.distribution.id} {facts.distribution.version_id}".strip()
            or "an unknown distribution"
        )
        yield Rule(
            "distribution-unsupported",
            "refuse",
            f"{found} has no row in the catalog of {catalog.as_of}",
            ", ".join(row.name for row in catalog.distributions),
        )
    elif distribution.tested == "partly":
        yield Rule(
            "distribution-untested",
            "info",
            f"{distribution.name}: this project's tests run there, except for {distribution.not_run}",
            ", ".join(row.name for row in catalog.distributions if row.tested == "run"),
        )
    elif distribution.tested == "rendered":
        run = [row for row in catalog.distributions if row.tested == "run"]
        # Where apt is, all but the names is what the tests run elsewhere.
        strange = distribution.package_manager not in {row.package_manager for row in run}
        yield Rule(
            "distribution-untested",
            "warn" if strange else "info",
            f"{distribution.name}: package names were looked up, but this project's tests do not run there"
            + (f", nor anywhere else where {distribution.package_manager} is" if strange else ""),
            ", ".join(row.name for row in run),
        )
    if facts.machine != "x86_64":
        yield Rule("machine-unsupported", "refuse", f"the machine is {facts.machine or 'unknown'}", "x86_64")
    if facts.systemd is None:
        yield Rule(
            "systemd-missing",
            "refuse",
            "systemd is not the running service manager (PID 1)",
            "a host or container that boots systemd",
        )
    if facts.packages.half_configured:
        names = ", ".join(facts.packages.half_configured[:5])
        yield Rule(
            "packages-half-configured", "warn", f"packages are left half configured: {names}", "`dpkg --configure -a` on the host"
        )
    for filesystem in ("/opt/v100ctl", "/var/lib/v100ctl"):
        found_at = facts.filesystems.get(filesystem)
        if found_at and found_at.read_only:
            yield Rule(
                "filesystem-read-only",
                "refuse",
                f"{filesystem} lies on {found_at.mount}, which is mounted read-only",
                "a writable disk",
            )
        if filesystem == "/opt/v100ctl" and found_at and found_at.no_exec:
            yield Rule(
                "filesystem-noexec",
                "refuse",
                f"{filesystem}, where engines lie, is on {found_at.mount}, which is mounted `noexec`",
                f"`mount -o remount,exec {found_at.mount}`, and the same in /etc/fstab",
            )


def controller_rules(facts: Facts, catalog: Catalog, ansible_core: str) -> Iterator[Rule]:
    """Can the controller's Ansible work with the host's Python? ``ansible_core``: its version; empty where that is not known."""
    row, python = catalog.ansible_core(ansible_core), facts.python.version
    if row is None or not python or version_key(python) >= version_key(row.host_python_min):
        return
    able = [item for item in catalog.ansible_cores if version_key(python) >= version_key(item.host_python_min)]
    older = able[-1] if able else None
    yield Rule(
        "ansible-core-too-new",
        "refuse",
        f"the host's Python is {python}; ansible-core {ansible_core} on the controller needs {row.host_python_min} there",
        f"ansible-core {older.version}, which v100ctl's lock has for Python {older.controller_python_min}: in a checkout "
        f"`rm -r .venv`, then `V100CTL_PYTHON=python{older.controller_python_min} ./v100ctl plan`"
        if older
        else "a newer release of the distribution: no ansible-core that v100ctl runs with takes this Python",
    )


def space_rules(
    releases: tuple[Release, ...],
    models: tuple[Model, ...],
    facts: Facts,
    row: LlamaCppBuild | None,
    *,
    builds_here: bool,
    wheels: tuple[Release, ...] = (),
) -> Iterator[Rule]:
    """Is there room for what is missing? Counts per filesystem, what is there already not at all. ``wheels``: of vLLM."""
    needs: dict[str, tuple[str, int]] = {}

    def need(path: str, size_bytes: int) -> None:
        filesystem = facts.filesystems.get(path)
        if filesystem is not None:
            mount, so_far = filesystem.mount, needs.get(filesystem.mount, (path, 0))
            needs[mount] = (so_far[0], so_far[1] + size_bytes)

    for release in releases:
        found = facts.release(release.path)
        if found is not None and not found.problem:
            continue
        if release.engine == "external":
            # Copied, then unpacked beside the final folder; what an archive holds is often half again as large.
            need("/opt/v100ctl", 3 * (release.build["size_bytes"] or 0))
        elif release.engine == "llama_cpp" and row is not None:
            # The archive is unpacked beside the final folder, so for a moment both lie there.
            cuda = release.build["backend"] == "cuda"
            need("/opt/v100ctl", 2 * (row.release_bytes + (row.cuda_beside.release_bytes if cuda else 0)))
            if builds_here:
                need("/var/lib/v100ctl", release.build.get("build_space_bytes", row.build_bytes))
    for release in wheels:
        found = facts.release(release.path)
        if found is None or found.problem:
            need("/opt/v100ctl", release.build["release_bytes"])
            need("/var/lib/v100ctl", release.build["download_bytes"])
    for file in (file for model in models for file in model.files):
        present = facts.models.get(file.path)
        if file.source["kind"] != "host" and not (present and present.exists) and file.size_bytes:
            # What is brought comes in slices, each of which lies beside it for a moment.
            beside_bytes = min(file.size_bytes, SLICE_BYTES) if file.source["kind"] in ("controller", "fleet", "pypi") else 0
            store = "/var/lib/v100ctl/models" if "/var/lib/v100ctl/models" in facts.filesystems else "/var/lib/v100ctl"
            need(store, file.size_bytes + beside_bytes)
    for mount, (path, size_bytes) in needs.items():
        free_bytes = facts.filesystems[path].free_bytes
        if free_bytes < size_bytes + _SPARE_BYTES:
            yield Rule(
                "disk-space",
                "refuse",
                f"{mount} has {gib(free_bytes)} free; {gib(size_bytes)} are needed there and {gib(_SPARE_BYTES)} to spare",
                f"free at least {gib(size_bytes + _SPARE_BYTES - free_bytes)} on {mount}, or mount a disk at {path}",
            )


def distribution_of(facts: Facts, catalog: Catalog) -> Distribution | None:
    """The catalog's row of the host's distribution."""
    return catalog.distribution(facts.distribution.id, facts.distribution.version_id)


def _toolchain_rules(
    config: HostConfig, facts: Facts, row: LlamaCppBuild, distribution: Distribution, catalog: Catalog, *, in_container: bool
) -> Iterator[Rule]:
    """Rules about the programs that compile."""
    if in_container and distribution.package_manager != "apt":
        yield Rule(
            "build-container-unsupported",
            "refuse",
            f"`llama_cpp_build_on: container`: containers that compile are made of Debian and Ubuntu, not of {distribution.name}",
            "`llama_cpp_build_on: first`, or a host of that distribution",
        )
        return
    on_cards = config.llama_cpp_backend == "cuda"
    needs = row.cmake_options.cuda_cmake_min if on_cards else row.cmake_options.cmake_min
    version = ("" if in_container else facts.packages.installed.get("cmake")) or distribution.cmake
    if version_key(version) < version_key(needs):
        # What is compiled there runs here: its C library is not newer.
        able = [
            item.name
            for item in catalog.distributions
            if version_key(item.cmake) >= version_key(needs) and version_key(item.glibc) <= version_key(distribution.glibc)
        ]
        yield Rule(
            "cmake-too-old",
            "refuse",
            f"{distribution.name} has CMake {version}; llama.cpp {row.build} needs {needs}"
            + (" to compile for cards" if on_cards else ""),
            f"`llama_cpp_build_on: HOST` with a host of {' or '.join(able)}" if able else "a newer release of the distribution",
        )
    if config.llama_cpp_ccache and distribution.ccache_package is None:
        yield Rule(
            "ccache-not-packaged",
            "refuse",
            f"`llama_cpp_ccache`: {distribution.name} itself has no package of ccache",
            "`llama_cpp_ccache: false`, or `llama_cpp_build_on: HOST` with a host of another distribution",
        )


#: What one compiler may take at its peak (`JOB_MEMORY_BYTES` of the build script, which runs as many at once as memory allows).
BUILD_JOB_BYTES = 2 * 1024**3


def memory_bytes(facts: Facts) -> int:
    """What programs on the host can have in all: its memory, or less where a container is limited. 0 where it is not known."""
    return min(facts.memory.total_bytes, facts.memory.limit_bytes or facts.memory.total_bytes)


def build_rules(
    config: HostConfig,
    releases: tuple[Release, ...],
    facts: Facts,
    row: LlamaCppBuild | None,
    catalog: Catalog,
    *,
    builds_here: bool,
    in_container: bool,
) -> Iterator[Rule]:
    """Can what is missing be compiled here, or in a container of this distribution?"""
    compiled = [facts.release(release.path) for release in releases if release.engine == "llama_cpp"]
    missing = any(found is None or found.problem for found in compiled)
    distribution = distribution_of(facts, catalog)
    if missing and distribution is not None and row is not None and (builds_here or in_container):
        yield from _toolchain_rules(config, facts, row, distribution, catalog, in_container=in_container)
    total_bytes = memory_bytes(facts)
    if builds_here and missing and 0 < total_bytes < BUILD_JOB_BYTES:
        yield Rule(
            "memory-for-build",
            "warn",
            f"the host has {gib(total_bytes)} of memory; one compiler may take {gib(BUILD_JOB_BYTES)}",
            "`llama_cpp_build_on: HOST` with a host that has more; a release that was made there is copied",
        )


def limit_rules(facts: Facts, wanted_nofile: int) -> Iterator[Rule]:
    """What the host cannot give: it is planned for with less, and that is no drift."""
    hard = facts.limits.nofile_hard
    if hard is not None and hard < wanted_nofile:
        yield Rule(
            "limit-nofile",
            "info",
            f"units ask for {wanted_nofile} open files, and this host allows {hard}: they get that",
            "`ulimit -Hn` of the container or of PID 1 raised, where many connections are expected",
        )
