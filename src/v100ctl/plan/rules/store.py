"""Rules about where models come from, what is made of them, and what lies in the store that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from v100ctl.catalog import LlamaCppBuild
from v100ctl.fleet import SPLIT_GGUF, HostConfig, InstanceSpec, ModelSpec
from v100ctl.plan.models import source_specs
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import Rule


def store_rules(
    host: str, present: Mapping[str, InstanceSpec], config: HostConfig, unused: Mapping[str, int], row: LlamaCppBuild | None
) -> Iterator[Rule]:
    """Rules about the models of one host. ``unused``: what lies in its store and belongs to no instance, with sizes."""
    for name, spec in sorted(present.items()):
        for model in source_specs(spec):
            yield from _source_rules(name, host, model)
            yield from _prepare_rules(name, spec, model, row)
    hubs = any(model.hf is not None for spec in present.values() for model in source_specs(spec))
    if hubs and config.model_store_hf_token.get_secret_value() and not _private(config.model_store_hf_endpoint):
        yield Rule(
            "hub-token-unencrypted",
            "warn",
            f"`model_store_hf_token` goes to {config.model_store_hf_endpoint} unencrypted",
            "an endpoint with https, or no token where the mirror asks for none",
        )
    if unused and not config.model_store_prune:
        yield Rule(
            "model-unused",
            "info",
            f"{gib(sum(unused.values()))} in the store belong to no instance: {', '.join(unused)}",
            "`model_store_prune: true` removes them",
        )


def _private(endpoint: str) -> bool:
    address = urlsplit(endpoint)
    try:
        return address.scheme == "https" or ip_address(address.hostname or "").is_loopback
    except ValueError:
        return False


def _source_rules(name: str, host: str, model: ModelSpec) -> Iterator[Rule]:
    hub = model.hf
    if hub is not None and not model.parts:
        said = model.listing.problem if model.listing is not None else "nobody has asked"
        yield Rule(
            "model-hub-unread",
            "refuse",
            f"what {hub.repo} holds at {hub.revision} is not known: {said}",
            "`sha256` (of a file) or `files` in the inventory, which need no hub to plan",
            instance=name,
        )
    elif hub is not None and not hub.pinned and model.sha256 is None and not model.files:
        commit = model.listing.commit if model.listing is not None else ""
        yield Rule(
            "model-revision-moving",
            "warn",
            f"{hub.repo} at `{hub.revision}` is whatever is published there on the day: a later run may bring another model",
            f"`revision: {commit}`, which is what it is now",
            instance=name,
        )
    yield from _split_rules(name, model)
    if model.from_host is not None and model.from_host.host == host:
        yield Rule(
            "model-from-itself",
            "refuse",
            f"`from_host` names {host} itself",
            f"`path: {model.from_host.path}`",
            instance=name,
        )


def _split_rules(name: str, model: ModelSpec) -> Iterator[Rule]:
    """Is a GGUF that is split over several files listed whole?"""
    names = [part.name for part in model.parts] if model.in_folder else [model.source_name]
    found = [match for match in map(SPLIT_GGUF.fullmatch, names) if match]
    for stem, total in sorted({(match[1], match[3]) for match in found}):
        numbers = {int(match[2]) for match in found if (match[1], match[3]) == (stem, total)}
        missing = set(range(1, int(total) + 1)) - numbers
        if missing:
            example = f"{stem}-{min(missing):05d}-of-{total}.gguf"
            yield Rule(
                "model-parts-missing",
                "refuse",
                f"{len(numbers)} of the model's {int(total)} files are listed; {example} is not",
                "`files` with the name and sha256 of each (`sha256sum *` prints them)",
                instance=name,
            )


def _prepare_rules(name: str, spec: InstanceSpec, model: ModelSpec, row: LlamaCppBuild | None) -> Iterator[Rule]:
    prepare = model.prepare
    if prepare is None or prepare.quantize is None:
        return
    if spec.engine != "llama_cpp":
        yield Rule(
            "prepare-engine",
            "refuse",
            f"`quantize` is a program of llama.cpp, and this instance's engine is {spec.engine}",
            "`argv` with a program of that engine, or a model that needs no step",
            instance=name,
        )
    elif row is not None and prepare.quantize not in row.quantize.types:
        yield Rule(
            "prepare-type-unknown",
            "refuse",
            f"`llama-quantize` of build {row.build} has no type {prepare.quantize}",
            f"one of {', '.join(row.quantize.types)}",
            instance=name,
        )
    elif row is not None and prepare.imatrix is None and prepare.quantize in row.quantize.needs_imatrix:
        yield Rule(
            "prepare-needs-imatrix",
            "refuse",
            f"`llama-quantize` refuses {prepare.quantize} without an importance matrix",
            "`imatrix`, a file that many publish beside the model, or a larger type such as Q3_K_S",
            instance=name,
        )
