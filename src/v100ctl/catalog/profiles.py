"""Profiles: settings that somebody tuned on a V100, as data, with what differs from their report and why.

One YAML file a profile in ``profiles/``. A profile holds the *intent* (:class:`~v100ctl.fleet.Settings`); how a build spells it
stands elsewhere in the catalog. Its model is a recommendation: an instance names its own. ``docs/profiles.md`` is made from
these files by ``python -m v100ctl.catalog.profiles_page``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import date
from importlib import resources
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from v100ctl.catalog.rows import Row
from v100ctl.fleet import Settings

__all__ = [
    "Claim",
    "Difference",
    "ExternalEngine",
    "Profile",
    "ProfileFile",
    "ProfileModel",
    "load_profiles",
]


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)*$")]


class ProfileFile(Row):
    """One file of a recommended model. What could not be looked up is ``None``."""

    name: str
    size_bytes: int | None = Field(default=None, gt=0)
    sha256: Sha256 | None = None


class ProfileModel(Row):
    """A public model that fits the profile's card: ``files`` of ``repository`` on Hugging Face.

    ``architecture`` is GGUF's ``general.architecture``, or the first of ``architectures`` in a ``config.json``.
    """

    name: str
    repository: str = Field(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    architecture: str
    licence: str
    files: tuple[ProfileFile, ...] = Field(min_length=1)
    note: str | None = None
    source: str

    @property
    def size_bytes(self) -> int | None:
        """All files together, ``None`` where the size of one is not known."""
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def url(self, file: ProfileFile) -> str:
        """Where ``file`` is served, at the pinned revision where there is one."""
        return f"https://huggingface.co/{self.repository}/resolve/{self.revision or 'main'}/{file.name}"


class ExternalEngine(Row):
    """What an engine that the user brings needs, and how it is launched.

    ``argv`` holds words with ``{release}``, ``{model}``, ``{listen}``, ``{port}`` or the name of a setting in braces.
    ``log_proof`` is a line that only the right kernels print, ``None`` where none is known.
    """

    release: str
    argv: tuple[str, ...] = Field(min_length=1)
    health_path: str = Field(pattern=r"^/")
    log_proof: str | None = None
    driver_min: Version
    cuda_runtime: Version
    glibc_min: Version
    note: str | None = None
    source: str


class Claim(Row):
    """A speed as its report gives it: not measured by this project."""

    speed: str
    where: str


class Difference(Row):
    """Where a profile is not what its report did: what the report says, what a pinned engine says, what the profile does."""

    report: str
    engine: str
    profile: str


class Profile(Row):
    """A named set of settings for a card."""

    as_of: date
    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    title: str
    for_whom: str
    engine: Literal["llama_cpp", "vllm", "external"]
    #: What a card needs in all, as :attr:`v100ctl.facts.Gpu` counts it.
    min_memory_bytes: int = Field(gt=0)
    card: str
    settings: Settings
    external: ExternalEngine | None = None
    model: ProfileModel
    claims: tuple[Claim, ...]
    differs: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    source: str

    @model_validator(mode="after")
    def _external_engine_is_described(self) -> Self:
        if (self.engine == "external") != (self.external is not None):
            raise ValueError("`external` belongs to `engine: external`, and only there")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """The settings that the profile sets, as an inventory would write them."""
        return self.settings.model_dump(mode="json", exclude_unset=True)


@functools.cache
def load_profiles() -> Mapping[str, Profile]:
    """The shipped profiles by name, in the order of their names."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    profiles: dict[str, Profile] = {}
    folder = resources.files("v100ctl.catalog").joinpath("profiles")
    for path in sorted(folder.iterdir(), key=lambda item: item.name):
        if path.name.endswith(".yml"):
            loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - both are safe loaders
            profile = Profile.model_validate(loaded)
            profiles[profile.id] = profile
    return profiles
