"""Which CUDA toolkit compiles llama.cpp on a host, with which compiler, and whether its code runs on the planned driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from v100ctl.catalog import Catalog, Distribution, version_key
from v100ctl.catalog.hardware import CudaRow, PackageSource
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig
from v100ctl.plan.driver import OLDEST_KEPT_BRANCH, source_in_words
from v100ctl.plan.driver_actions import with_repository
from v100ctl.plan.types import CudaDecision, DriverDecision, Rule

#: The newest CUDA that makes machine code for compute capability 7.0.
LAST_FOR_VOLTA = "12.9"
#: Where Debian's `nvidia-cuda-toolkit` has its programs; `/usr/bin/nvcc` is a script that calls the one in there.
DISTRIBUTION_FOLDER = "/usr/lib/nvidia-cuda-toolkit"
#: Those that this toolkit is made for: every driver that it keeps loads their PTX too.
_KNOWN_TO_535 = ("11.8", "12.1")


def decide_cuda(
    config: HostConfig,
    facts: Facts,
    driver: DriverDecision | None,
    distribution: Distribution | None,
    catalog: Catalog,
    *,
    compiles_here: bool,
    in_container: bool = False,
) -> tuple[CudaDecision | None, tuple[Rule, ...]]:
    """The toolkit for a host that compiles (``None`` for one that gets a ready release), and what is wrong with it.

    Args:
        config: What the inventory asks for.
        facts: What the probe found.
        driver: The driver that the host gets.
        distribution: The host's.
        catalog: What is known.
        compiles_here: Whether something may have to be compiled on this host.
        in_container: Whether something may have to be compiled for this host in a container of its distribution.
    """
    row = catalog.cuda_toolkit(config.cuda_toolkit_version)
    if row is None:
        known = ", ".join(item.version for item in catalog.cuda if item.sm_min <= 70 <= item.sm_max)
        rule = Rule(
            "cuda-version-unknown",
            "refuse",
            f"`cuda_toolkit_version: {config.cuda_toolkit_version}` has no row in the catalog of {catalog.as_of}",
            f"one of {known}",
        )
        return None, (rule,)
    rules = [*_architecture_rules(config, row, catalog), *_driver_rules(config, row, driver, catalog)]
    if not compiles_here and not in_container:
        return None, tuple(rules)
    if in_container:
        # Neither the host's toolkit nor its driver is in there.
        facts, driver = facts.model_copy(update={"cuda_toolkits": ()}), None
    installed = next((toolkit for toolkit in facts.cuda_toolkits if toolkit.version == row.version and toolkit.nvcc), None)
    source = next((item for item in _sources(row, distribution) if item.usable), None)
    compiler, compiler_rules = _host_compiler(row, source, distribution, catalog)
    rules += compiler_rules
    # A toolkit that cannot make the code need not be found.
    makes = all(row.sm_min <= code <= row.sm_max for code in _architecture_codes(config))
    if installed is None and distribution is not None and makes:
        rules += _source_rules(config, row, distribution, catalog)
    if installed is None and source is not None and driver is not None and makes:
        rules += _beside_driver_rules(row, source, driver, distribution, catalog)
    patched = installed is None and source is not None and source.glibc_patched
    rules += _glibc_rules(row, facts, patched=patched)
    if in_container:
        return None, tuple(rules)
    program = compiler_program(compiler)
    decision = CudaDecision(
        version=row.version,
        action="keep" if installed else "install",
        source=installed.path if installed else source_in_words(source) if source else "",
        host_compiler=compiler,
        packages=(
            *((*source.pins, *source.packages) if source and not installed else ()),
            *((compiler,) if compiler and program not in facts.compilers else ()),
        ),
        manager=distribution.package_manager if distribution else "",
        repository=(source.repository or "") if source and not installed else "",
        nvcc=f"{installed.path}/bin/nvcc" if installed else _nvcc(row, source),
        host_compiler_path=f"/usr/bin/{program}" if program else "",
        architectures=tuple(sorted(_architecture_codes(config))),
        driver_branch=driver.branch if driver else "",
    )
    if source is not None and installed is None and distribution is not None:
        decision = with_repository(decision, config, facts, source, driver, distribution, catalog)
    return decision, tuple(rules)


def toolchain(config: HostConfig, facts: Facts, distribution: Distribution, catalog: Catalog) -> dict[str, Any]:
    """Where a build finds the toolkit, on this host or on another one of the same distribution: the first place that has it.

    Returns:
        ``version``, and the paths of ``nvcc`` and ``host_compiler``, the likeliest first.
    """
    version = config.cuda_toolkit_version
    row = catalog.cuda_toolkit(version)
    source = next((item for item in _sources(row, distribution) if item.usable), None) if row else None
    compiler = _host_compiler(row, source, distribution, catalog)[0] if row else ""
    installed = [f"{toolkit.path}/bin/nvcc" for toolkit in facts.cuda_toolkits if toolkit.version == version and toolkit.nvcc]
    planned = [_nvcc(row, source)] if row and source else []
    usual = [f"/usr/local/cuda-{version}/bin/nvcc", f"{DISTRIBUTION_FOLDER}/bin/nvcc"]
    return {
        "version": version,
        "nvcc": list(dict.fromkeys([*installed, *planned, *usual])),
        "host_compiler": [f"/usr/bin/{compiler_program(compiler or 'g++')}"],
    }


def builder_image(config: HostConfig, facts: Facts, distribution: Distribution, catalog: Catalog) -> dict[str, Any]:
    """What a container that compiles for hosts of this distribution is made of.

    Returns:
        ``distribution`` and ``version``, the ``packages`` of the toolkit and the compiler beside it, the ``components`` of the
        distribution's archive that they are in, and ``files`` and ``key`` of NVIDIA's repository where they come from there.
    """
    image: dict[str, Any] = {"distribution": distribution.id, "version": distribution.version_id}
    row = catalog.cuda_toolkit(config.cuda_toolkit_version)
    source = next((item for item in _sources(row, distribution) if item.usable), None) if row else None
    if config.llama_cpp_backend != "cuda" or row is None or source is None:
        return {**image, "packages": [], "components": [], "files": [], "key": None}
    decision = CudaDecision(row.version, "install", "", "")
    if source.of_nvidia:
        decision = with_repository(decision, config, facts, source, None, distribution, catalog)
    compiler = _host_compiler(row, source, distribution, catalog)[0]
    return {
        **image,
        "packages": [*source.pins, *source.packages, *([compiler] if compiler else [])],
        "components": [] if source.of_nvidia else (source.repository or "").split(),
        "files": [{"path": file.path, "content": file.content} for file in decision.files],
        "key": dataclasses.asdict(decision.key) if decision.key else None,
    }


def compiler_program(package: str) -> str:
    """The C++ compiler that a package brings: itself, but for Enterprise Linux, where `gcc-c++` brings `g++`."""
    return "g++" if package == "gcc-c++" else package


def _nvcc(row: CudaRow, source: PackageSource | None) -> str:
    """Where the compiler lies after the installation, in a folder of its own and not where a link of several versions leads."""
    if source is None:
        return ""
    return f"/usr/local/cuda-{row.version}/bin/nvcc" if source.of_nvidia else f"{DISTRIBUTION_FOLDER}/bin/nvcc"


def _architecture_codes(config: HostConfig) -> set[int]:
    return {int(name.split("-")[0]) for name in config.llama_cpp_cuda_architectures.split(";")}


def _architecture_rules(config: HostConfig, row: CudaRow, catalog: Catalog) -> Iterator[Rule]:
    codes = _architecture_codes(config)
    dropped = sorted(code for code in codes if code < row.sm_min)
    missing = sorted(code for code in codes if code > row.sm_max)
    if dropped:
        able = [item.version for item in catalog.cuda if item.sm_min <= dropped[0] <= item.sm_max]
        yield Rule(
            "cuda-drops-architecture",
            "refuse",
            f"CUDA {row.version} compiles for compute capability {row.sm_min / 10:.1f} and later, no longer for sm_{dropped[0]}",
            f'`cuda_toolkit_version: "{able[-1]}"`' if able else None,
        )
    if missing:
        able = [item.version for item in catalog.cuda if item.sm_min <= missing[-1] <= item.sm_max]
        yield Rule(
            "cuda-lacks-architecture",
            "refuse",
            f"CUDA {row.version} does not know sm_{missing[-1]} yet",
            f'`cuda_toolkit_version: "{able[0]}"`' if able else "an architecture that the catalog's toolkits know",
        )


def _driver_rules(config: HostConfig, row: CudaRow, driver: DriverDecision | None, catalog: Catalog) -> Iterator[Rule]:
    if driver is None:
        return
    branch = catalog.driver(driver.branch)
    # Of a branch that is still to be installed the newest version is taken.
    version = driver.version or f"{driver.branch}.999"
    if not row.runs_machine_code(version):
        have = driver.version or f"of branch {driver.branch}"
        older = [item.version for item in catalog.cuda if item.targets("7.0") and item.runs_machine_code(version)]
        other = f', or `cuda_toolkit_version: "{older[-1]}"`' if older else ""
        newer = next(
            item.branch
            for item in catalog.drivers
            if int(item.branch) >= OLDEST_KEPT_BRANCH and row.runs_machine_code(f"{item.branch}.999")
        )
        yield Rule(
            "driver-too-old-for-cuda",
            "refuse",
            f"driver {have} is older than {row.driver_min}, which code from CUDA {row.version} needs",
            f'`nvidia_driver_branch: "{newer}"`{other}',
        )
        return
    if branch is None or row.loads_ptx(version):
        return
    names = config.llama_cpp_cuda_architectures.split(";")
    if any(name.endswith("-virtual") for name in names) and not any(not name.endswith("-virtual") for name in names):
        machine_code = ";".join(name.removesuffix("-virtual") + "-real" for name in names)
        yield Rule(
            "cuda-ptx-newer-than-driver",
            "refuse",
            f"`llama_cpp_cuda_architectures: {config.llama_cpp_cuda_architectures}` makes PTX only; "
            f"driver branch {branch.branch} knows CUDA {branch.cuda} and does not load PTX of {row.version}",
            f'`llama_cpp_cuda_architectures: "{machine_code}"`',
        )
    elif not all(name.endswith("-real") for name in names):
        machine_code = ";".join(f"{name.split('-')[0]}-real" for name in names)
        yield Rule(
            "cuda-ptx-newer-than-driver",
            "info",
            f"driver branch {branch.branch} knows CUDA {branch.cuda}: it runs the machine code that CUDA {row.version} makes, "
            "and cannot use the PTX beside it",
            f'`llama_cpp_cuda_architectures: "{machine_code}"` leaves the PTX out',
        )


def _sources(row: CudaRow, distribution: Distribution | None) -> tuple[PackageSource, ...]:
    return row.sources(distribution.id, distribution.version_id) if distribution else ()


def _source_rules(config: HostConfig, row: CudaRow, distribution: Distribution, catalog: Catalog) -> Iterator[Rule]:
    sources = _sources(row, distribution)
    if any(item.usable for item in sources):
        return
    able = [
        item.version
        for item in catalog.cuda
        if item.targets("7.0") and any(source.usable for source in _sources(item, distribution))
    ]
    reason = next((f": {item.reason}" for item in sources if item.reason), "")
    if able:
        # What drivers from 535 on know needs nothing else; of later ones the newest, whose PTX an older driver does not load.
        version = next((item for item in _KNOWN_TO_535 if item in able), LAST_FOR_VOLTA if LAST_FOR_VOLTA in able else able[-1])
        nearest = f'`cuda_toolkit_version: "{version}"`'
        if version not in _KNOWN_TO_535:
            machine_code = ";".join(f"{name.split('-')[0]}-real" for name in config.llama_cpp_cuda_architectures.split(";"))
            nearest += f' with `llama_cpp_cuda_architectures: "{machine_code}"`'
    else:
        # One whose packages are called the same, and whose C library is not newer.
        makers = [
            item.name
            for item in catalog.distributions
            if item.package_manager == distribution.package_manager
            and version_key(item.glibc) <= version_key(distribution.glibc)
            and catalog.toolkits_for(item.id, item.version_id, "7.0")
        ]
        nearest = (
            f"`llama_cpp_build_on: HOST` with a host of {' or '.join(makers) or 'another distribution that has the toolkit'}"
        )
    yield Rule(
        "cuda-not-packaged",
        "refuse",
        f"{distribution.name} has no packages of CUDA {row.version}{reason}",
        nearest,
    )


def _beside_driver_rules(
    row: CudaRow, source: PackageSource, driver: DriverDecision, distribution: Distribution | None, catalog: Catalog
) -> Iterator[Rule]:
    """Packages of a toolkit may ask for a driver newer than the code needs."""
    if source.driver_min is None or int(driver.branch) >= int(source.driver_min):
        return
    able = [
        item.branch
        for item in catalog.drivers
        if item.drives_volta
        and int(item.branch) >= int(source.driver_min)
        and distribution is not None
        and any(way.usable for way in item.sources(distribution.id, distribution.version_id))
    ]
    yield Rule(
        "cuda-package-needs-newer-driver",
        "refuse",
        f"{source_in_words(source)} has CUDA {row.version} in packages that need driver {source.driver_min} or newer; "
        f"the host gets branch {driver.branch}",
        f'`nvidia_driver_branch: "{able[-1]}"`' if able else "`llama_cpp_build_on: HOST` with another host",
    )


def _glibc_rules(row: CudaRow, facts: Facts, *, patched: bool) -> Iterator[Rule]:
    if facts.libc.name != "glibc" or not facts.libc.version or patched or row.accepts_glibc(facts.libc.version):
        return
    yield Rule(
        "cuda-glibc-too-new",
        "refuse",
        f"the host has glibc {facts.libc.version}; the math headers of NVIDIA's CUDA {row.version} do not compile with "
        f"{row.glibc_max_exclusive} and later, whichever compiler is used",
        "`llama_cpp_build_on: HOST` with a host of an older distribution, or the distribution's own patched toolkit",
    )


def _host_compiler(
    row: CudaRow, source: PackageSource | None, distribution: Distribution | None, catalog: Catalog
) -> tuple[str, tuple[Rule, ...]]:
    """The newest compiler that this CUDA takes and the distribution has: its package, and what is wrong."""
    if distribution is None:
        return "", ()
    if source is not None and source.host_compiler:
        return source.host_compiler, ()
    if row.accepts_gcc(distribution.gcc):
        return distribution.compilers[distribution.gcc], ()
    other = distribution.compiler(row.gcc_max)
    if other is not None:
        return other, ()
    able = [
        item.version
        for item in catalog.cuda
        if item.targets("7.0")
        and any(
            way.usable and (way.host_compiler or item.accepts_gcc(distribution.gcc) or distribution.compiler(item.gcc_max))
            for way in _sources(item, distribution)
        )
    ]
    refusal = Rule(
        "cuda-compiler-too-new",
        "refuse",
        f"CUDA {row.version} takes gcc up to {row.gcc_max}; {distribution.name} has {distribution.gcc} and none old enough",
        f'`cuda_toolkit_version: "{able[0]}"`' if able else "`llama_cpp_build_on: HOST` with a host of an older distribution",
    )
    return "", (refusal,)
