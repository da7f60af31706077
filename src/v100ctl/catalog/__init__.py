"""Dated facts about distributions and engines, each row with its source.

The YAML files beside this module are the only home of compatibility and flag knowledge; the plan reads them through the models
below, and roles and templates never do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import date
from importlib import resources
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict

from v100ctl.catalog.profiles import Profile, load_profiles


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Archive(_Row):
    """One place that serves an engine's source; ``strip`` is the folder in it that is the source tree."""

    kind: Literal["url", "pypi"]
    strip: str
    url: str | None = None
    requirement: str | None = None
    sha256: str | None = None


class CmakeOptions(_Row):
    """Options of a build: ``common`` always, ``cuda`` with that backend."""

    source: str
    common: dict[str, str]
    cuda: dict[str, str] = {}


#: A flag, or (for a boolean) the flag for each value.
Flag = str | dict[Literal["true", "false"], str]


class LlamaCppFlags(BaseModel):
    """How one build spells each setting; ``always`` are the words that every launch gets."""

    model_config = ConfigDict(extra="allow", frozen=True)

    source: str
    always: tuple[tuple[str, ...], ...] = ()

    def flag(self, setting: str) -> Flag | None:
        """The spelling of ``setting``, ``None`` where this build has none."""
        extra: dict[str, Any] = self.model_extra or {}
        found = extra.get(setting)
        return found if isinstance(found, str | dict) else None

    def settings(self) -> dict[str, str]:
        """Flag -> the setting that it spells."""
        spelled: dict[str, str] = {}
        for setting in self.model_extra or {}:
            flag = self.flag(setting)
            spelled |= dict.fromkeys([flag] if isinstance(flag, str) else (flag or {}).values(), setting)
        return spelled


class LlamaCppBuild(_Row):
    """One build of llama.cpp that can be compiled and launched."""

    build: int
    commit: str
    licence: str
    source: str
    archives: tuple[Archive, ...]
    tree_sha256: str
    targets: tuple[str, ...]
    build_bytes: int
    release_bytes: int
    cmake_options: CmakeOptions
    cpu_level: str
    flags: LlamaCppFlags
    #: Flags whose value is a secret; every user of a host can read a command line.
    secret_flags: tuple[str, ...]
    quantised_v_needs_flash_attention: bool
    health_path: str


class Distribution(_Row):
    """A Linux distribution that roles can provision."""

    id: str
    version_id: str
    name: str
    package_manager: Literal["apt"]
    tested: Literal["run", "rendered"]
    toolchain_packages: tuple[str, ...]
    runtime_packages: tuple[str, ...]
    source: str


class Catalog(_Row):
    """Everything that is known, with the date on which the oldest part was checked."""

    as_of: date
    llama_cpp: tuple[LlamaCppBuild, ...]
    distributions: tuple[Distribution, ...]
    #: By name.
    profiles: Mapping[str, Profile]

    def llama_cpp_build(self, build: int) -> LlamaCppBuild | None:
        """The row of ``build``, ``None`` where the catalog has none."""
        return next((row for row in self.llama_cpp if row.build == build), None)

    def distribution(self, distribution_id: str, version_id: str) -> Distribution | None:
        """The row of a distribution's release, ``None`` where it is not supported."""
        return next((row for row in self.distributions if (row.id, row.version_id) == (distribution_id, version_id)), None)


_Model = TypeVar("_Model", bound=BaseModel)


@functools.cache
def _document(name: str) -> dict[str, Any]:
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    # The C loader reads the same YAML several times faster; not every build of PyYAML has it.
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    if not isinstance(loaded, dict):
        raise TypeError(f"catalog file {name} is not a mapping")
    return loaded


def _rows(model: type[_Model], name: str, key: str) -> tuple[_Model, ...]:
    return tuple(model.model_validate(row) for row in _document(name)[key])


@functools.cache
def load_catalog() -> Catalog:
    """The catalog that this version ships."""
    files = ("llama_cpp.yml", "distributions.yml")
    profiles = load_profiles()
    return Catalog(
        as_of=min([_document(name)["as_of"] for name in files] + [row.as_of for row in profiles.values()]),
        llama_cpp=_rows(LlamaCppBuild, "llama_cpp.yml", "builds"),
        distributions=_rows(Distribution, "distributions.yml", "distributions"),
        profiles=profiles,
    )
