"""Engines that the user brings: the inventory's definition over what its profile says, a release to install, an argv to run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from v100ctl.catalog.profiles import Profile
from v100ctl.fleet import PLACEHOLDER, ExternalEngine, ExternalSource, InstanceSpec, Settings
from v100ctl.plan.llama_cpp import DEFAULT_CONTEXT_LENGTH, DEFAULT_PARALLEL, ENGINES_DIR
from v100ctl.plan.types import Release

DEFAULT_HEALTH_PATH = "/health"
#: Bumped when the install script lays a release out differently.
RELEASE_LAYOUT = 1
_RELEASE = "{release}"


@dataclass(frozen=True)
class Needs:
    """What an engine needs of its host; empty where it says nothing. ``title`` names the engine for people.

    ``own_driver``: the least driver is the inventory's word, not the profile's.
    """

    title: str
    driver: str = ""
    cuda: str = ""
    glibc: str = ""
    own_driver: bool = False


@dataclass(frozen=True)
class Engine:
    """How one instance's engine is started: the definition's values over its profile's.

    ``argv`` is empty where neither says how it is started.
    """

    name: str
    definition: ExternalEngine
    argv: tuple[str, ...]
    health_path: str
    must_log: tuple[str, ...]
    needs: Needs

    @property
    def names(self) -> frozenset[str]:
        """The placeholders that its command line and environment hold."""
        words = (*self.argv, *self.definition.env.values())
        return frozenset(name for word in words for name in PLACEHOLDER.findall(word))


def needs_of(spec: InstanceSpec, definitions: Mapping[str, ExternalEngine], profile: Profile | None) -> Needs:
    """What the engine of an instance needs, as far as its definition (where there is one) and its profile say."""
    definition = definitions.get(spec.external or "")
    known = profile.external if profile else None
    return Needs(
        title=known.release if known else f"the engine `{spec.external}`",
        driver=(definition.min_driver if definition else None) or (known.driver_min if known else ""),
        cuda=(definition.min_cuda if definition else None) or "",
        glibc=(definition.min_glibc if definition else None) or (known.glibc_min if known else ""),
        own_driver=definition is not None and definition.min_driver is not None,
    )


def engine_of(spec: InstanceSpec, definitions: Mapping[str, ExternalEngine], profile: Profile | None) -> Engine | None:
    """The engine of an instance, ``None`` where no definition has the name that it gives."""
    definition = definitions.get(spec.external or "")
    if definition is None or spec.external is None:
        return None
    known = profile.external if profile else None
    must_log = definition.must_log
    if must_log is None:
        must_log = (known.log_proof,) if known and known.log_proof else ()
    return Engine(
        name=spec.external,
        definition=definition,
        argv=definition.argv or (known.argv if known else ()),
        health_path=definition.health_path or (known.health_path if known else DEFAULT_HEALTH_PATH),
        must_log=must_log,
        needs=needs_of(spec, definitions, profile),
    )


def build_release(engine: Engine) -> Release:
    """The release that holds an engine's files. Its id hashes everything that decides the bytes."""
    source = engine.definition.source
    decides = {
        "layout": RELEASE_LAYOUT,
        "sha256": source.sha256,
        "kind": source.kind,
        "strip_components": source.strip_components,
        # A single program keeps its own name.
        "file_name": source.file_name if source.kind == "file" else "",
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    build_id = f"{engine.name}-{digest}"
    check = engine.definition.check or ()
    build: dict[str, Any] = {
        "schema": "v100ctl/external/1",
        "engine": "external",
        "name": engine.name,
        "build_id": build_id,
        "kind": source.kind,
        "file_name": source.file_name,
        "strip_components": source.strip_components,
        "sha256": source.sha256,
        "size_bytes": source.size_bytes,
        "source": _source(source),
        "licence": engine.definition.licence or "",
        "programs": sorted({word.removeprefix(f"{_RELEASE}/") for word in (engine.argv[:1] + check[:1]) if _is_inside(word)}),
        "paths": sorted({word.removeprefix(f"{_RELEASE}/") for word in engine.argv[1:] if _is_inside(word)}),
        "check": list(check),
        "check_environment": {
            name: value for name, value in sorted(engine.definition.env.items()) if set(PLACEHOLDER.findall(value)) <= {"release"}
        },
    }
    return Release(
        engine="external", build_id=build_id, path=f"{ENGINES_DIR}/external/{build_id}", build=build, toolchain_packages=()
    )


def _is_inside(word: str) -> bool:
    """Whether a word of the command line is one path of the release, and nothing else."""
    return word.startswith(f"{_RELEASE}/") and not PLACEHOLDER.search(word.removeprefix(_RELEASE))


def _source(source: ExternalSource) -> dict[str, Any]:
    if source.path is not None:
        return {"kind": "host", "path": source.path}
    if source.url is not None:
        return {"kind": "url", "url": source.url}
    return {"kind": "controller", "path": source.from_controller}


class UnsetPlaceholderError(KeyError):
    """A word names a setting that has no value. ``args[0]`` is its name."""


def values(
    engine: Engine,
    spec: InstanceSpec,
    *,
    release_path: str,
    model_path: str,
    draft_model_path: str | None,
    alias: str,
    gpu_count: int,
    api_keys_file: str | None = None,
) -> dict[str, str]:
    """What each placeholder stands for; a setting without a value is left out."""
    settings = spec.settings
    found: dict[str, Any] = dict(_settings(settings))
    found.setdefault("context_length", DEFAULT_CONTEXT_LENGTH)
    found.setdefault("parallel", DEFAULT_PARALLEL)
    found |= {
        "release": release_path,
        "model": model_path,
        "alias": alias,
        "listen": spec.listen,
        "port": spec.port,
        "gpu_count": gpu_count,
    }
    if draft_model_path is not None:
        found["draft_model"] = draft_model_path
    if api_keys_file is not None:
        found["api_keys_file"] = api_keys_file
    return {name: _word(value) for name, value in found.items()}


def _settings(settings: Settings) -> Iterator[tuple[str, Any]]:
    for name, value in settings.model_dump(mode="json", exclude_none=True).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if not isinstance(item, dict))
        else:
            yield name, value


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def filled(word: str, known: Mapping[str, str]) -> str:
    """``word`` with every placeholder replaced, in one pass: a value that looks like a placeholder stays as it is.

    Raises:
        UnsetPlaceholderError: it names a setting without a value.
    """

    def value(match: Any) -> str:
        try:
            return known[match[1]]
        except KeyError:
            raise UnsetPlaceholderError(match[1]) from None

    return PLACEHOLDER.sub(value, word)


def context_length(engine: Engine, spec: InstanceSpec) -> int:
    """Tokens that one request may use, 0 where nobody tells the engine."""
    if "context_length" not in engine.names:
        return 0
    return spec.settings.context_length or DEFAULT_CONTEXT_LENGTH


def unused_settings(engine: Engine, settings: Settings) -> tuple[str, ...]:
    """Settings that were given and that no word of the command line or the environment says."""
    # The alias is what clients send; an engine that does not check it need not be told.
    ignored = {"served_model_name", "speculative.kind", "speculative.model", "rope_scaling.kind"}
    return tuple(sorted({name for name, _ in _settings(settings)} - engine.names - ignored))
