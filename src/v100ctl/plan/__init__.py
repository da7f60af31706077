"""Decide everything about a host before it is touched.

:func:`plan` is pure: facts, configuration, model headers, catalog and a date go in, a
:class:`~v100ctl.plan.types.HostPlan` comes out. The CLI and the Ansible filter plugin both call it, on the same probe, so both
make the same host.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from v100ctl.catalog import Catalog, Distribution, load_catalog
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.fleet import (
    CONFIG_VARIABLES,
    INSTANCE_NAME,
    VARIABLE_PREFIXES,
    GatewayServer,
    HostConfig,
    InstanceSpec,
    parse_config,
    plain,
    with_servers,
)
from v100ctl.models.types import HubListing, Known, ModelHeader, NotAModel
from v100ctl.plan import (
    adoption,
    driver_actions,
    external,
    firewall,
    fleet_gateway,
    gateway,
    llama_cpp,
    monitoring,
    tuning,
    units,
    upkeep,
)
from v100ctl.plan.cuda import decide_cuda
from v100ctl.plan.host_json import HOST_JSON, with_host_json
from v100ctl.plan.instances import Planner
from v100ctl.plan.keys import INSTANCES_DIR, leftover_files
from v100ctl.plan.models import (
    MODELS_DIR,
    file_paths,
    model_path,
    model_specs,
    planned_models,
    source_specs,
    unused_models,
    with_listings,
    with_release_paths,
)
from v100ctl.plan.render import MANAGED_HEADER
from v100ctl.plan.rules.host import build_rules, controller_rules, distribution_of, host_rules, limit_rules, space_rules
from v100ctl.plan.rules.instance import fleet_of_one_rules
from v100ctl.plan.rules.store import store_rules
from v100ctl.plan.types import Account, CudaDecision, Directory, HostPlan, Rule, Unit, describe, plain_data
from v100ctl.plan.units import BASELINES_DIR, DIGEST_VARIABLE, HISTORY_DIR, LIMIT_NOFILE, local_url, unit_name

__all__ = [
    "DIGEST_VARIABLE",
    "HOST_JSON",
    "Headers",
    "HostPlan",
    "from_ansible",
    "health_path",
    "model_path",
    "model_specs",
    "plain_known",
    "plan",
    "present_instances",
    "probe_request",
    "toolkit_for",
    "toolkit_from_ansible",
]

#: Where servers that speak OpenAI's protocol tell which models they have.
MODELS_PATH = "/v1/models"
#: What is known of each model, by its path on the host: its header, or why that could not be read.
Headers = Mapping[str, Known]


def present_instances(config: HostConfig) -> dict[str, InstanceSpec]:
    """The instances that shall serve."""
    return {name: spec for name, spec in config.llm_server_instances.items() if spec.state == "present"}


def probe_request(config: HostConfig, *, deep: bool = False) -> ProbeRequest:
    """What the probe has to look at for this configuration, beside the places that this toolkit always manages."""
    present = present_instances(config)
    return ProbeRequest(
        files=(
            *(directory.path for directory in _directories()),
            *driver_actions.FILES,
            *tuning.FILES,
            *gateway.FILES,
            *monitoring.FILES,
            *units.FILES,
            *upkeep.FILES,
            adoption.ADOPTED,
        ),
        ports=tuple(sorted({port for spec in present.values() for port in (spec.port, gateway.behind(spec, config).port)})),
        health={
            name: local_url(gateway.behind(spec, config), path)
            for name, spec in present.items()
            if (path := health_path(spec, config))
        },
        identity={name: local_url(gateway.behind(spec, config), MODELS_PATH) for name, spec in present.items()},
        models=tuple(sorted({path for spec in present.values() for model in source_specs(spec) for path in file_paths(model)})),
        deep=deep,
    )


def health_path(spec: InstanceSpec, config: HostConfig) -> str | None:
    """Where an instance says that it is well; ``None`` where nothing is known about its engine."""
    catalog = load_catalog()
    profile = catalog.profiles.get(spec.profile or "")
    engine = profile.engine if profile and "engine" not in spec.model_fields_set else spec.engine
    if engine == "external":
        found = external.engine_of(spec, config.external_engine_definitions, profile)
        return found.health_path if found else None
    row = catalog.vllm(config.vllm_version) if engine == "vllm" else catalog.llama_cpp_build(config.llama_cpp_build)
    return row.health_path if row else None


def plan(
    host: str,
    config: HostConfig,
    facts: Facts,
    *,
    headers: Headers | None = None,
    catalog: Catalog | None = None,
    as_of: date,
    ansible_core: str = "",
) -> HostPlan:
    """Decide everything for one host.

    Args:
        host: Its inventory name.
        config: What the inventory asks for.
        facts: What the probe found.
        headers: What is known of its models. They decide verdicts and figures, never a byte that lands on the host, so a plan
            without them makes the same host.
        catalog: What is known; the shipped one by default.
        as_of: Today, for rows that end on a date.
        ansible_core: The version of it that will carry the plan out; empty where that is not known.

    Returns:
        The plan; its verdict is ``refused`` when any rule refuses.
    """
    catalog = catalog or load_catalog()
    distribution = distribution_of(facts, catalog)
    present = present_instances(config)
    models = planned_models(present, config, facts)
    dropped = _instances_on_host(facts) - set(config.llm_server_instances)
    absent = set(config.llm_server_instances) - set(present)
    going = frozenset(unit_name(name) for name in dropped | absent)

    planner = Planner(host, config, facts, headers or {}, catalog, as_of, models=models, going=going)
    planner.decide()
    models = with_release_paths(models, {name: item.release_path for name, item in planner.instances.items()})
    unused = unused_models(models, facts)
    care, care_files, care_packages = upkeep.decide_upkeep(host, config, facts, planner.specs, planner.instances, catalog)
    if config.gateway_placement == "fleet":
        front, front_files, front_packages = fleet_gateway.decide(config, facts, distribution)
    else:
        front, front_files = gateway.decide_gateway(config, facts, planner.public, planner.instances)
        front_packages = (gateway.PACKAGE,) if front and front.state == "started" else ()
    ports = firewall.public_ports(config, planner.public, front)
    watch, watch_files = monitoring.decide_monitoring(config, facts, planner.driver, planner.cuda, catalog)
    # An instance that the inventory has dropped is stopped and removed.
    started = [Unit(unit_name(name), name, enabled=False, state="absent") for name in sorted(dropped)]
    for name in sorted(config.llm_server_instances):
        if name in absent:
            started.append(Unit(unit_name(name), name, enabled=False, state="absent"))
        elif name in planner.instances:
            started.append(Unit(unit_name(name), name, enabled=True, state="started"))
    rules = [
        *host_rules(facts, catalog),
        *controller_rules(facts, catalog, ansible_core),
        *planner.host_verdicts,
        *fleet_of_one_rules(config),
        *store_rules(host, planner.specs, config, unused, planner.llama_cpp_row),
        *gateway.host_rules(config, facts, distribution),
        *gateway.gateway_rules(config, facts, planner.public, going, planner.leaving),
        *fleet_gateway.fleet_rules(config, facts, going),
        *firewall.firewall_rules(config, facts, ports),
        *planner.instance_verdicts,
        *upkeep.upkeep_rules(config, planner.specs, planner.instances, catalog),
        *monitoring.monitoring_rules(config, facts, planner.driver, planner.cuda, planner.public, distribution, catalog),
        *limit_rules(facts, LIMIT_NOFILE),
        *build_rules(
            config,
            planner.releases,
            facts,
            planner.llama_cpp_row,
            catalog,
            builds_here=planner.builds_here,
            in_container=config.llama_cpp_build_on == llama_cpp.CONTAINER,
        ),
        *space_rules(
            planner.releases, models, facts, planner.llama_cpp_row, builds_here=planner.builds_here, wheels=planner.vllm_releases
        ),
    ]
    # Those of an instance that goes are removed with it.
    kept = {file.path for file in planner.secret_files} | {
        f"{INSTANCES_DIR}/{name}.{kind}" for name in dropped | absent for kind in ("env", "keys")
    }
    return with_host_json(
        HostPlan(
            host=host,
            as_of=as_of.isoformat(),
            rules=tuple(rules),
            packages=(
                *_packages(distribution, present),
                *front_packages,
                *care_packages,
            ),
            directories=_directories(),
            releases=tuple(
                dataclasses.replace(release, relabel=facts.selinux != "")
                for release in (*planner.releases, *planner.vllm_releases)
            ),
            models=models,
            unused_models=tuple(unused) if config.model_store_prune else (),
            files=(
                *(planner.driver.files if planner.driver else ()),
                *(planner.cuda.files if planner.cuda else ()),
                *planner.tuning_files,
                *units.shared_files(facts, planner.instances.values()),
                *planner.secret_files,
                *(planner.files[name] for name in sorted(planner.files)),
                *front_files,
                *care_files,
                *watch_files,
            ),
            absent_files=leftover_files(facts, kept),
            units=tuple(started),
            instances=tuple(planner.instances[name] for name in sorted(planner.instances)),
            driver=planner.driver,
            cuda=planner.cuda,
            tuning=planner.tuning,
            gateway=front,
            upkeep=care,
            adoptions=planner.adoptions,
            firewall=firewall.decide(config, facts, ports),
            monitoring=watch,
        )
    )


def _packages(distribution: Distribution | None, present: Mapping[str, InstanceSpec]) -> tuple[str, ...]:
    """The distribution's packages that the instances need while they run."""
    if distribution is None or not present:
        return ()
    in_python = any(spec.engine == "vllm" for spec in present.values())
    return (*distribution.runtime_packages, *(distribution.python_packages if in_python else ()))


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
        Directory(INSTANCES_DIR, mode="0750", group=account.group),
        Directory("/opt/v100ctl"),
        Directory(units.PROGRAMS_DIR),
        Directory(llama_cpp.ENGINES_DIR),
        Directory(account.home),
        Directory(MODELS_DIR),
        Directory(f"{account.home}/state"),
        Directory(BASELINES_DIR),
        Directory(HISTORY_DIR, mode="0700"),
        Directory(upkeep.STATE_DIR),
    )


def from_ansible(
    variables: Mapping[str, Any],
    facts: Mapping[str, Any],
    as_of: date,
    *,
    headers: Mapping[str, Any] | None = None,
    listings: Mapping[str, Any] | None = None,
    servers: Sequence[GatewayServer] = (),
    ansible_core: str = "",
) -> dict[str, Any]:
    """The plan as role variables, from what a playbook has at hand (the filter plugin's entry).

    Args:
        variables: The host's variables (``hostvars[inventory_hostname]``).
        facts: The probe's document.
        as_of: Today.
        headers: Model headers as plain data, by path on the host; a text says why one could not be read.
        listings: What hubs said of their repositories, as plain data (:func:`v100ctl.plan.models.listing_key`).
        servers: For the gateway of a fleet: what the inventory's hosts serve.
        ansible_core: The version of it that runs.

    Raises:
        InventoryError: a variable is wrong.
        pydantic.ValidationError: ``facts`` is not a probe's document.
    """
    host = str(variables["inventory_hostname"])
    known_listings = {key: HubListing.model_validate(value) for key, value in (listings or {}).items()}
    config = with_servers(with_listings(parse_config(host, ansible_variables(variables)), known_listings), servers)
    known = {path: _known(value) for path, value in (headers or {}).items()}
    decided = plan(host, config, Facts.model_validate(facts), headers=known, as_of=as_of, ansible_core=ansible_core)
    return decided.to_role_variables()


def toolkit_for(
    config: HostConfig, builder: Facts, *, catalog: Catalog | None = None
) -> tuple[CudaDecision | None, tuple[Rule, ...]]:
    """The toolkit on a host that compiles for another, and what is wrong with it; ``None`` where nothing is compiled for cards.

    The host need not have a card. A driver that it has is left alone by the role, which looks at what the packages would do.

    Args:
        config: What the inventory asks for the host that gets the engine.
        builder: What the probe found on the one that compiles it.
        catalog: What is known; the shipped one by default.
    """
    catalog = catalog or load_catalog()
    if config.llama_cpp_backend != "cuda" or not any(spec.engine == "llama_cpp" for spec in present_instances(config).values()):
        return None, ()
    return decide_cuda(config, builder, None, distribution_of(builder, catalog), catalog, compiles_here=True)


def toolkit_from_ansible(variables: Mapping[str, Any], builder: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`toolkit_for` as plain data for a playbook: ``cuda``, and ``refusals`` as lines for people.

    Args:
        variables: Those of the host that gets the engine.
        builder: The probe's document of the host that compiles it.

    Raises:
        InventoryError: a variable is wrong.
        pydantic.ValidationError: ``builder`` is not a probe's document.
    """
    config = parse_config(str(variables["inventory_hostname"]), ansible_variables(variables))
    decision, rules = toolkit_for(config, Facts.model_validate(builder))
    return {"cuda": plain_data(decision), "refusals": [describe(rule) for rule in rules if rule.severity == "refuse"]}


def plain_known(known: Known) -> Any:
    """What is known of a model as plain data, for a playbook."""
    if isinstance(known, ModelHeader):
        return known.model_dump(mode="json")
    return {"not_a_model": known.reason} if isinstance(known, NotAModel) else known


def _known(plain: Any) -> Known:
    if isinstance(plain, str):
        return plain
    return NotAModel(str(plain["not_a_model"])) if "not_a_model" in plain else ModelHeader.model_validate(plain)


def ansible_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that v100ctl reads, as plain data. Look-alikes come without values: only their names are looked at."""
    names = [name for name in variables if name.startswith(VARIABLE_PREFIXES)]
    return {name: plain(variables[name]) if name in CONFIG_VARIABLES else None for name in names}
