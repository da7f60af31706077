"""The model files of a host: where each lies, where it comes from, and what is made of it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from v100ctl.facts import Facts
from v100ctl.fleet import SPLIT_GGUF, HostConfig, InstanceSpec, ModelSpec, Prepare
from v100ctl.models.types import HubFile, HubListing
from v100ctl.plan.types import Model, ModelFile

MODELS_DIR = "/var/lib/v100ctl/models"
#: Names that this toolkit gives, and thus may take away: all begin with a part of a digest.
OUR_NAME = re.compile(r"[0-9a-f]{12}-.+")
#: Where a file of a model that a hub has not listed yet would lie: nowhere.
_UNKNOWN = "not-listed-yet"


def model_path(spec: ModelSpec) -> str:
    """What the engine is given: a file, the first of a split GGUF's, or the folder of a model that is one.

    A fetched one is named by its digest too, so that two versions never share a path.
    """
    if spec.prepare is not None:
        return f"{MODELS_DIR}/{spec.digest[:12] or _UNKNOWN}-{_made_name(spec, spec.prepare)}"
    return source_path(spec)


def source_path(spec: ModelSpec) -> str:
    """Where what comes lies, before any step that prepares it; see :func:`model_path`."""
    folder = model_folder(spec)
    if folder is None:
        return spec.path or f"{MODELS_DIR}/{spec.source_digest[:12] or _UNKNOWN}-{spec.file_name}"
    first = sorted(part.name for part in spec.parts)[:1]
    ggufs = bool(spec.parts) and all(part.name.endswith(".gguf") for part in spec.parts)
    return f"{folder}/{first[0]}" if ggufs else folder


def model_folder(spec: ModelSpec) -> str | None:
    """The folder of a model that is several files; ``None`` for a single file."""
    if not spec.in_folder:
        return None
    if spec.path is not None:
        # The first of several files, or the folder that holds them.
        return spec.path if posixpath.basename(spec.path) not in spec.files else posixpath.dirname(spec.path)
    name = spec.file_name
    split = SPLIT_GGUF.fullmatch(name)
    return f"{MODELS_DIR}/{spec.source_digest[:12] or _UNKNOWN}-{split[1] if split else name}"


def _made_name(spec: ModelSpec, prepare: Prepare) -> str:
    if prepare.output is not None:
        return prepare.output
    split = SPLIT_GGUF.fullmatch(spec.file_name)
    stem = split[1] if split else spec.file_name.removesuffix(".gguf")
    return f"{stem}-{prepare.quantize}.gguf"


def model_specs(spec: InstanceSpec) -> Iterator[ModelSpec]:
    """The models that an instance reads: its own, and the one that drafts for it."""
    yield spec.model
    speculative = spec.settings.speculative
    if speculative is not None and speculative.model is not None:
        yield speculative.model


def source_specs(spec: InstanceSpec) -> Iterator[ModelSpec]:
    """Every model that has to come from somewhere for an instance: those that it reads, and those that one is made of."""
    for model in model_specs(spec):
        yield model
        if model.prepare is not None and model.prepare.imatrix is not None:
            yield model.prepare.imatrix


def file_paths(spec: ModelSpec) -> Iterator[str]:
    """Every file of a model on the host: what comes, and what is made of it."""
    folder = model_folder(spec)
    if folder is not None:
        yield from (f"{folder}/{part.name}" for part in spec.parts)
    else:
        yield source_path(spec)
    if spec.prepare is not None:
        yield model_path(spec)


def with_listings(config: HostConfig, listings: Mapping[str, HubListing]) -> HostConfig:
    """The configuration with what hubs said of their repositories (:func:`listing_key` -> listing)."""
    if not listings:
        return config

    def listed(model: ModelSpec) -> ModelSpec:
        prepare = model.prepare
        if prepare is not None and prepare.imatrix is not None:
            prepare = prepare.model_copy(update={"imatrix": listed(prepare.imatrix)})
            model = model.model_copy(update={"prepare": prepare})
        listing = listings.get(listing_key(config, model) or "")
        return model if listing is None else model.with_listing(listing)

    def resolved(spec: InstanceSpec) -> InstanceSpec:
        speculative = spec.settings.speculative
        if speculative is not None and speculative.model is not None:
            speculative = speculative.model_copy(update={"model": listed(speculative.model)})
            spec = spec.model_copy(update={"settings": spec.settings.model_copy(update={"speculative": speculative})})
        return spec.model_copy(update={"model": listed(spec.model)})

    instances = {name: resolved(spec) for name, spec in config.llm_server_instances.items()}
    return config.model_copy(update={"llm_server_instances": instances})


def listing_key(config: HostConfig, model: ModelSpec) -> str | None:
    """What a hub has to be asked for this model, as one text; ``None`` where the inventory says all of it."""
    hub = model.hf
    if hub is None or model.sha256 is not None or model.files:
        return None
    return " ".join([config.model_store_hf_endpoint.rstrip("/"), hub.repo, hub.revision, hub.file or "*", *hub.include])


def planned_models(present: Mapping[str, InstanceSpec], config: HostConfig, facts: Facts) -> tuple[Model, ...]:
    """All models of all instances, each once, by path; what one is made of only while that has not been made."""
    models: dict[str, Model] = {}
    for name, instance in present.items():
        for spec in model_specs(instance):
            for model in _planned(name, spec, config, facts):
                models.setdefault(model.path, model)
    # What is made comes after what it is made of.
    return tuple(sorted(models.values(), key=lambda model: (model.source["kind"] == "prepared", model.path)))


def _planned(instance: str, spec: ModelSpec, config: HostConfig, facts: Facts) -> Iterator[Model]:
    source = _source_model(spec, config)
    prepare = spec.prepare
    if prepare is None:
        yield source
        return
    path, digest = model_path(spec), spec.digest
    inputs = [source]
    if prepare.imatrix is not None:
        inputs.append(_source_model(prepare.imatrix, config))
    made = facts.models.get(path)
    if not (made and made.exists and made.sha256):
        yield from inputs
    step = {
        "kind": "prepared",
        "recipe": digest,
        "argv": _step_argv(prepare, source.path, inputs[1].path if len(inputs) > 1 else ""),
        "environment": dict(prepare.environment),
        "timeout_s": prepare.timeout_s,
        "inputs": [file.path for model in inputs for file in model.files],
        "instance": instance,
    }
    # Nobody knows how large it will be: what is quantised is smaller than what it is made of.
    size_bytes = source.size_bytes if prepare.quantize is not None else None
    yield Model(path, digest, None, step, (ModelFile(path, "", size_bytes, step),))


def _step_argv(prepare: Prepare, source_path: str, imatrix_path: str) -> list[str]:
    """The words of a step; ``{output}`` is left to the host and ``{release}`` to :func:`with_release_paths`."""
    if prepare.quantize is None:
        known = {"{input}": source_path, "{imatrix}": imatrix_path}
        return [re.sub(r"\{(input|imatrix)\}", lambda match: known[match[0]], word) for word in prepare.argv]
    switches = [
        *(["--allow-requantize"] if prepare.allow_requantize else []),
        *(["--pure"] if prepare.pure else []),
        *(["--imatrix", imatrix_path] if imatrix_path else []),
        *(["--output-tensor-type", prepare.output_tensor_type] if prepare.output_tensor_type else []),
        *(["--token-embedding-type", prepare.token_embedding_type] if prepare.token_embedding_type else []),
    ]
    for tensor, kind in sorted(prepare.tensor_types.items()):
        switches += ["--tensor-type", f"{tensor}={kind}"]
    threads = [str(prepare.threads)] if prepare.threads else []
    return ["{release}/bin/llama-quantize", *switches, source_path, "{output}", prepare.quantize, *threads]


def with_release_paths(models: tuple[Model, ...], release_paths: Mapping[str, str]) -> tuple[Model, ...]:
    """The models with ``{release}`` in their steps filled in: instance -> the folder of its engine.

    A step of an instance whose engine was not decided is left out: that plan is refused.
    """
    found = []
    for model in models:
        if model.source["kind"] == "prepared":
            release = release_paths.get(model.source["instance"])
            if release is None:
                continue
            step = {**model.source, "argv": [word.replace("{release}", release) for word in model.source["argv"]]}
            file = model.files[0]
            model = Model(model.path, model.sha256, model.size_bytes, step, (ModelFile(file.path, "", file.size_bytes, step),))
        found.append(model)
    return tuple(found)


def _source_model(spec: ModelSpec, config: HostConfig) -> Model:
    path, folder = source_path(spec), model_folder(spec)
    if folder is None:
        part = spec.parts[0] if spec.parts else HubFile(name=spec.file_name, sha256="")
        source = _source(spec, part, config, alone=True)
        # What a hub has not listed is not there yet, and such a plan is refused.
        files: tuple[ModelFile, ...] = (
            (ModelFile(path, part.sha256, part.size_bytes or spec.size_bytes, source),) if spec.parts else ()
        )
    else:
        files = tuple(
            ModelFile(f"{folder}/{part.name}", part.sha256, part.size_bytes, _source(spec, part, config, alone=False))
            for part in spec.parts
        )
        source = {"kind": files[0].source["kind"] if files else "hf"}
    sizes = [file.size_bytes for file in files]
    size_bytes = spec.size_bytes or (sum(size or 0 for size in sizes) if sizes and None not in sizes else None)
    return Model(path, spec.source_digest, size_bytes, source, files)


def _source(spec: ModelSpec, part: HubFile, config: HostConfig, *, alone: bool) -> dict[str, Any]:
    if spec.path is not None:
        return {"kind": "host"}
    if spec.url is not None:
        return {"kind": "url", "url": spec.url if alone else _beside(spec.url, part.name, spec.files)}
    if spec.hf is not None:
        return {
            "kind": "hf",
            "url": hub_url(spec, part.path or spec.hf.file or part.name if alone else _in_repo(spec, part), config),
        }
    if spec.from_controller is not None:
        return {
            "kind": "controller",
            "path": spec.from_controller if alone else _within(spec.from_controller, part.name, spec.files),
        }
    if spec.from_host is not None:
        there = spec.from_host.path
        return {"kind": "fleet", "host": spec.from_host.host, "path": there if alone else _within(there, part.name, spec.files)}
    return {"kind": "pypi", "requirement": spec.pypi, "archive_sha256": spec.archive_sha256, "member": spec.member}


def _in_repo(spec: ModelSpec, part: HubFile) -> str:
    if part.path:
        return part.path
    # Files that the inventory lists lie beside the one that it names, or in the repository itself.
    folder = posixpath.dirname(spec.hf.file) if spec.hf is not None and spec.hf.file else ""
    return posixpath.join(folder, part.name)


def hub_url(spec: ModelSpec, path: str, config: HostConfig) -> str:
    """Where a hub has a file of a repository; the folder of all its files for an empty ``path``."""
    hub = spec.hf
    if hub is None:
        raise ValueError("the model does not come from a hub")
    revision = spec.listing.commit if spec.listing is not None and spec.listing.commit else hub.revision
    return f"{config.model_store_hf_endpoint.rstrip('/')}/{hub.repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


def _within(there: str, name: str, names: Mapping[str, str]) -> str:
    """A file beside the one that is named, or in the folder that is."""
    folder = posixpath.dirname(there) if posixpath.basename(there) in names else there.rstrip("/")
    return f"{folder}/{name}"


def _beside(url: str, name: str, names: Mapping[str, str]) -> str:
    address = urlsplit(url)
    return urlunsplit(address._replace(path=_within(address.path, quote(name), {quote(other): "" for other in names})))


def unused_models(models: tuple[Model, ...], facts: Facts) -> dict[str, int]:
    """What lies in the store by a name of ours and belongs to no planned model: path -> size in bytes."""
    used = {file.path for model in models for file in model.files} | {model.path for model in models}
    return {
        path: size_bytes
        for path, size_bytes in sorted(facts.stored_models.items())
        if OUR_NAME.fullmatch(posixpath.basename(path))
        and path not in used
        and not any(name.startswith(f"{path}/") for name in used)
    }
