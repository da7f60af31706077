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

from v100ctl.catalog.llama_cpp import Archive, CmakeOptions, LlamaCppBuild, LlamaCppFlags, LlamaCppParser, ParserFlag
from v100ctl.catalog.profiles import Profile, load_profiles

__all__ = [
    "Archive",
    "Catalog",
    "CmakeOptions",
    "Distribution",
    "LlamaCppBuild",
    "LlamaCppFlags",
    "LlamaCppParser",
    "ParserFlag",
    "Profile",
    "load_catalog",
]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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

    def llama_cpp_parser(self, build: int) -> LlamaCppParser | None:
        """What ``llama-server`` of ``build`` takes, ``None`` where nobody has read its source. Loaded when it is asked for."""
        row = self.llama_cpp_build(build)
        return _llama_cpp_parser(build, tuple((row.former_flags if row else {}).items()))

    @property
    def llama_cpp_parser_builds(self) -> tuple[int, ...]:
        """The builds that :meth:`llama_cpp_parser` knows, oldest first; more than can be installed."""
        files = resources.files(__name__).joinpath("llama_cpp_parsers").iterdir()
        return tuple(sorted(int(item.name.removesuffix(".yml")) for item in files if item.name.endswith(".yml")))

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
def _llama_cpp_parser(build: int, former_flags: tuple[tuple[str, str], ...]) -> LlamaCppParser | None:
    name = f"llama_cpp_parsers/{build}.yml"
    if not resources.files(__name__).joinpath(name).is_file():
        return None
    return LlamaCppParser.model_validate({**_document(name), "former_flags": dict(former_flags)})


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
