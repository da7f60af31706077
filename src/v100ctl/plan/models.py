"""The model files of a host: where each lies and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from v100ctl.fleet import InstanceSpec, ModelSpec
from v100ctl.plan.types import Model

MODELS_DIR = "/var/lib/v100ctl/models"


def model_path(spec: ModelSpec) -> str:
    """Where the model lies on the host. A fetched one is named by its hash too, so that two versions never share a path."""
    return spec.path or f"{MODELS_DIR}/{spec.sha256[:12]}-{spec.file_name}"


def model_specs(spec: InstanceSpec) -> Iterator[ModelSpec]:
    """The models that an instance reads: its own, and the one that drafts for it."""
    yield spec.model
    speculative = spec.settings.speculative
    if speculative is not None and speculative.model is not None:
        yield speculative.model


def planned_models(present: Mapping[str, InstanceSpec]) -> tuple[Model, ...]:
    """All models of all instances, each once, by path."""
    models: dict[str, Model] = {}
    for instance in present.values():
        for spec in model_specs(instance):
            path = model_path(spec)
            models[path] = Model(path, spec.sha256, spec.size_bytes, _source(spec))
    return tuple(models[path] for path in sorted(models))


def _source(spec: ModelSpec) -> dict[str, Any]:
    if spec.path is not None:
        return {"kind": "host"}
    if spec.url is not None:
        return {"kind": "url", "url": spec.url}
    if spec.from_controller is not None:
        return {"kind": "controller", "path": spec.from_controller}
    return {"kind": "pypi", "requirement": spec.pypi, "archive_sha256": spec.archive_sha256, "member": spec.member}
