"""Dated facts about distributions and engines, each row with its source.

The YAML files beside this module are the only home of compatibility and flag knowledge; the plan reads them through the models
below, and roles and templates never do.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from datetime import date
from importlib import resources
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from v100ctl.catalog.hardware import (
    ENTERPRISE_LINUX,
    AnsibleCore,
    Architecture,
    CudaRow,
    Distribution,
    DriverBranch,
    GpuRow,
    KernelBuilds,
    NeighbourGpu,
    NvidiaRepository,
    PackageSource,
    device_of,
    plain_name,
)
from v100ctl.catalog.llama_cpp import Archive, CmakeOptions, LlamaCppBuild, LlamaCppFlags, LlamaCppParser, ParserFlag
from v100ctl.catalog.monitoring import Monitoring
from v100ctl.catalog.profiles import Profile, load_profiles
from v100ctl.catalog.rows import Row, version_key
from v100ctl.catalog.vllm import VllmArgument, VllmParser, VllmRow, load_parser

__all__ = [
    "AnsibleCore",
    "Architecture",
    "Archive",
    "Catalog",
    "CmakeOptions",
    "CudaRow",
    "Distribution",
    "DriverBranch",
    "GpuRow",
    "KernelBuilds",
    "LlamaCppBuild",
    "LlamaCppFlags",
    "LlamaCppParser",
    "Monitoring",
    "NeighbourGpu",
    "PackageSource",
    "ParserFlag",
    "Profile",
    "VllmArgument",
    "VllmParser",
    "VllmRow",
    "load_catalog",
    "version_key",
]


#: Files whose dates make the catalog's; big generated ones carry the date on which they were made, which is not an age.
_DATED_FILES = ("llama_cpp.yml", "distributions.yml", "gpus.yml", "drivers.yml", "cuda.yml", "vllm.yml", "monitoring.yml")


class Catalog(Row):
    """Everything that is known, with the date on which the oldest part was checked."""

    as_of: date
    llama_cpp: tuple[LlamaCppBuild, ...]
    distributions: tuple[Distribution, ...]
    #: By name.
    profiles: Mapping[str, Profile]

    def llama_cpp_build(self, build: int) -> LlamaCppBuild | None:
        """The row of ``build``, ``None`` where the catalog has none."""
        return next((row for row in self.llama_cpp if row.build == build), None)

    def llama_cpp_parser(self, build: int) -> LlamaCppParser | None:
        """What ``llama-server`` of ``build`` takes, ``None`` where nobody has read its source. Loaded when it is asked for."""
        row = self.llama_cpp_build(build)
        return _llama_cpp_parser(build, tuple((row.former_flags if row else {}).items()))

    @property
    def llama_cpp_parser_builds(self) -> tuple[int, ...]:
        """The builds that :meth:`llama_cpp_parser` knows, oldest first; more than can be installed."""
        files = resources.files(__name__).joinpath("llama_cpp_parsers").iterdir()
        return tuple(sorted(int(item.name.removesuffix(".yml")) for item in files if item.name.endswith(".yml")))

    def age_days(self, as_of: date) -> int:
        """How many days before ``as_of`` the oldest part was checked; 0 where that lies in the future."""
        return max((as_of - self.as_of).days, 0)

    def distribution(self, distribution_id: str, version_id: str) -> Distribution | None:
        """The row of a distribution's release, ``None`` where nothing is known about it.

        Rebuilds of Enterprise Linux have the row of ``rhel``, point releases that of their major. What the roles cannot set up
        there is in the row's ``refused``.
        """
        wanted = ENTERPRISE_LINUX.get(distribution_id, distribution_id)
        version = version_id.partition(".")[0] if wanted == "rhel" else version_id
        return next((row for row in self.distributions if (row.id, row.version_id) == (wanted, version)), None)

    @functools.cached_property
    def ansible_cores(self) -> tuple[AnsibleCore, ...]:
        """Versions of ansible-core that differ in the Pythons that they take, the oldest first."""
        return _rows(AnsibleCore, "distributions.yml", "ansible_core")

    def ansible_core(self, version: str) -> AnsibleCore | None:
        """The row that answers for ``2.21.5``; ``None`` for what is older than all, and for none."""
        asked = version_key(version)[:2]
        return next((row for row in reversed(self.ansible_cores) if asked and version_key(row.version) <= asked), None)

    @functools.cached_property
    def vllm_rows(self) -> tuple[VllmRow, ...]:
        """Versions of vLLM, the oldest first."""
        return _rows(VllmRow, "vllm.yml", "versions")

    @property
    def vllm_versions(self) -> tuple[str, ...]:
        """The versions of vLLM that can be launched, the oldest first."""
        return tuple(row.version for row in self.vllm_rows if row.launchable)

    def vllm(self, version: str) -> VllmRow | None:
        """The row of ``version``, ``None`` where nothing is known about it. It may say that a V100 cannot run it."""
        exact = next((row for row in self.vllm_rows if row.version == version), None)
        return exact or next((row for row in self.vllm_rows if row.answers_for(version)), None)

    def vllm_parser(self, version: str) -> VllmParser | None:
        """What vLLM ``version`` takes, ``None`` where nobody has asked it. Loaded when it is asked for."""
        return load_parser(version)

    @functools.cached_property
    def gpus(self) -> tuple[GpuRow, ...]:
        """The V100s."""
        return _rows(GpuRow, "gpus.yml", "gpus")

    @functools.cached_property
    def neighbours(self) -> tuple[NeighbourGpu, ...]:
        """Cards of other generations, and Volta cards that are no V100."""
        return _rows(NeighbourGpu, "gpus.yml", "neighbours")

    @functools.cached_property
    def architectures(self) -> tuple[Architecture, ...]:
        """Generations of GPUs, the oldest first."""
        return _rows(Architecture, "gpus.yml", "architectures")

    @functools.cached_property
    def drivers(self) -> tuple[DriverBranch, ...]:
        """Branches of the driver, the oldest first."""
        return _rows(DriverBranch, "drivers.yml", "drivers")

    @functools.cached_property
    def nvidia_repository(self) -> NvidiaRepository:
        """NVIDIA's own package repositories."""
        return NvidiaRepository.model_validate(_document("drivers.yml")["nvidia_repository"])

    @functools.cached_property
    def cuda(self) -> tuple[CudaRow, ...]:
        """CUDA toolkits, the oldest first."""
        return _rows(CudaRow, "cuda.yml", "cuda")

    @functools.cached_property
    def monitoring(self) -> Monitoring:
        """What exports a host's metrics."""
        document = _document("monitoring.yml")
        return Monitoring.model_validate({key: value for key, value in document.items() if key != "as_of"})

    def gpu(self, pci_id: str) -> GpuRow | None:
        """The V100 with this vendor and device, ``10de:1db1`` in either case; ``None`` for every other card."""
        wanted = pci_id.strip().lower()
        return next((row for row in self.gpus if row.pci_id == wanted), None)

    def gpu_named(self, name: str) -> GpuRow | None:
        """The V100 of this name, in either case, with or without ``Tesla``: ``V100-SXM2-16GB``."""
        wanted = plain_name(name)
        return next((row for row in self.gpus if wanted in {plain_name(known) for known in (row.name, *row.also)}), None)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The V100s by name, each once, as :meth:`gpu_named` takes them."""
        return tuple(dict.fromkeys(row.name.removeprefix("Tesla ") for row in self.gpus))

    def gpu_names_like(self, name: str) -> tuple[str, ...]:
        """Known names that ``name`` may be a slip for, the nearest first."""
        by_plain = {plain_name(known): known for known in self.gpu_names}
        return tuple(by_plain[near] for near in difflib.get_close_matches(plain_name(name), by_plain, n=3, cutoff=0.5))

    def architecture(self, pci_id: str, name: str = "") -> Architecture | None:
        """The generation of any NVIDIA card, by its device id or, where that is in no known range, by its name.

        ``None`` where neither tells; a card newer than the catalog is no error.
        """
        device = device_of(pci_id)
        if device is not None:
            found = next((row for row in self.architectures if row.has(device)), None)
            if found is not None:
                return found
        patterns = ((row, row.name_pattern) for row in self.architectures)
        return next((row for row, pattern in patterns if pattern and name and re.search(pattern, name, re.IGNORECASE)), None)

    def needs_open_modules(self, name: str, pci_id: str = "") -> bool:
        """Does a card of this name (or id, which is surer) refuse the proprietary kernel modules that a V100 needs?"""
        found = self.architecture(pci_id, name)
        return found is not None and found.open_modules == "required"

    def driver(self, version: str) -> DriverBranch | None:
        """The branch that answers for a branch or version (``535``, ``580.159.04``); ``None`` before the first, or for none.

        A version newer than the last row has that row: what left the driver does not come back.
        """
        asked = version_key(version)[:1]
        return next((row for row in reversed(self.drivers) if asked and version_key(row.branch) <= asked), None)

    def cuda_toolkit(self, version: str) -> CudaRow | None:
        """The toolkit of ``12.9``, ``12.9.86`` or ``12-9``; ``None`` where the catalog has none."""
        asked = version_key(version.replace("-", "."))[:2]
        return next((row for row in self.cuda if version_key(row.version) == asked), None)

    def toolkits_for(self, distribution_id: str, version_id: str, capability: str) -> tuple[tuple[CudaRow, PackageSource], ...]:
        """Toolkits that a release can have and that make machine code for ``capability`` (``7.0``) there, the oldest first.

        Each comes with the best source whose headers compile with the release's libc. Nothing for a release without a row.
        """
        distribution = self.distribution(distribution_id, version_id)
        if distribution is None:
            return ()
        pairs = (
            (row, next((one for one in row.sources(distribution.id, distribution.version_id) if one.usable), None))
            for row in self.cuda
            if row.targets(capability)
        )
        return tuple(
            (row, one) for row, one in pairs if one is not None and (one.glibc_patched or row.accepts_glibc(distribution.glibc))
        )


_Model = TypeVar("_Model", bound=BaseModel)


@functools.cache
def _document(name: str) -> dict[str, Any]:
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    # The C loader reads the same YAML several times faster; not every build of PyYAML has it.
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    if not isinstance(loaded, dict):
        raise TypeError(f"catalog file {name} is not a mapping")
    return loaded


def _checked_on(name: str) -> date:
    """The date in a file's head, without reading the rest of it."""
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    found = re.search(r"^as_of: (\d{4}-\d{2}-\d{2})$", text, re.MULTILINE)
    if found is None:
        raise TypeError(f"catalog file {name} has no `as_of: DATE`")
    return date.fromisoformat(found.group(1))


def _rows(model: type[_Model], name: str, key: str) -> tuple[_Model, ...]:
    return tuple(model.model_validate(row) for row in _document(name)[key])


@functools.cache
def _llama_cpp_parser(build: int, former_flags: tuple[tuple[str, str], ...]) -> LlamaCppParser | None:
    name = f"llama_cpp_parsers/{build}.yml"
    if not resources.files(__name__).joinpath(name).is_file():
        return None
    return LlamaCppParser.model_validate({**_document(name), "former_flags": dict(former_flags)})


@functools.cache
def load_catalog() -> Catalog:
    """The catalog that this version ships."""
    profiles = load_profiles()
    return Catalog(
        as_of=min([_checked_on(name) for name in _DATED_FILES] + [row.as_of for row in profiles.values()]),
        llama_cpp=_rows(LlamaCppBuild, "llama_cpp.yml", "builds"),
        distributions=_rows(Distribution, "distributions.yml", "distributions"),
        profiles=profiles,
    )
