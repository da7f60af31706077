"""Probe hosts, plan each, compare: the first half of ``plan``, ``provision`` and ``audit``."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import shlex
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from v100ctl.access import Access
from v100ctl.compare import Finding, compare
from v100ctl.errors import ProbeError, V100ctlError
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.fleet import FleetHost, HostConfig, ModelSpec
from v100ctl.models import collect, hub
from v100ctl.models.collect import HeaderRequest, collect_headers, first_file
from v100ctl.models.host import read_answer
from v100ctl.models.source import ModelFormatError
from v100ctl.models.types import Known, ModelHeader, NotAModel
from v100ctl.plan import Headers, HostPlan, plain_known, plan, present_instances, probe_request
from v100ctl.plan.models import hub_url, model_path, model_specs, with_listings
from v100ctl.probe import Connection, probe_hosts
from v100ctl.probe.run import probe_each
from v100ctl.probe.text import printable

#: Called as each host answers, from the thread that asked it.
OnDone = Callable[[str, Facts | V100ctlError], None]


@dataclass(frozen=True)
class Examined:
    """One host: what was found, decided and different; or the error that kept it from being asked."""

    host: FleetHost
    connection: Connection | None = None
    facts: Facts | None = None
    plan: HostPlan | None = None
    findings: tuple[Finding, ...] = ()
    error: V100ctlError | None = None

    @property
    def changes(self) -> tuple[Finding, ...]:
        """The findings that provisioning would mend (what is not ours is left alone)."""
        return tuple(finding for finding in self.findings if finding.kind != "external")

    @property
    def restarts(self) -> tuple[str, ...]:
        """Instances that run now and that mending the differences would restart."""
        if self.facts is None or self.plan is None:
            return ()
        running = {item.name for item in self.plan.instances if self.facts.process_of(item.unit) is not None}
        return tuple(sorted(running & {name for finding in self.changes for name in finding.restarts}))


def examine(
    hosts: Sequence[FleetHost], access: Access, *, as_of: date, deep: bool = False, on_done: OnDone | None = None
) -> dict[str, Examined]:
    """Probe all hosts at once, then plan and compare each.

    A host that cannot be asked gets its ``error`` and never delays the others beyond ``access.timeout_s``.
    """
    hosts = with_hub_listings(hosts, timeout_s=access.timeout_s)
    items, results = _connections(hosts, access, deep=deep)
    by_name = {host.name: host for host in hosts}
    found = probe_hosts(items, forks=access.forks, timeout_s=access.timeout_s, on_done=on_done)
    reached = [by_name[name] for name, outcome in found.items() if not isinstance(outcome, V100ctlError)]
    headers = read_headers(reached, {name: connection for name, (connection, _) in items.items()}, access)
    for name, outcome in found.items():
        host, connection = by_name[name], items[name][0]
        if isinstance(outcome, V100ctlError):
            results[name] = Examined(host, connection, error=outcome)
        else:
            results[name] = decide(host, connection, outcome, headers=headers[name], as_of=as_of)
    return {host.name: results[host.name] for host in hosts}


def examine_each(
    hosts: Sequence[FleetHost], access: Access, *, as_of: date, deep: bool = False
) -> Iterator[tuple[str, Examined]]:
    """Like :func:`examine`, in one round trip for each host: what was not read of their models before is not read now.

    Each host comes as soon as it has answered and is forgotten then: a thousand of them take no more memory than a few.
    """
    hosts = with_hub_listings(hosts, timeout_s=access.timeout_s)
    items, failed = _connections(hosts, access, deep=deep)
    by_name = {host.name: host for host in hosts}
    headers = known_headers([by_name[name] for name in items])
    yield from failed.items()
    for name, outcome in probe_each(items, forks=access.forks, timeout_s=access.timeout_s):
        host, connection = by_name[name], items[name][0]
        if isinstance(outcome, V100ctlError):
            yield name, Examined(host, connection, error=outcome)
        else:
            yield name, _judge(host, connection, outcome, headers=headers[name], as_of=as_of)


def _judge(host: FleetHost, connection: Connection, facts: Facts, *, headers: Headers, as_of: date) -> Examined:
    """Like :func:`decide`; an answer that nobody has thought of costs its own host alone."""
    try:
        return decide(host, connection, facts, headers=headers, as_of=as_of)
    except V100ctlError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {printable(str(error))}"
        return Examined(
            host,
            connection,
            error=ProbeError(
                f"{host.name}: what it answers cannot be judged ({reason})",
                hint=f"the host lies, or this is a bug to report: `v100ctl plan --limit {shlex.quote(host.name)}` shows where",
            ),
        )


def _connections(
    hosts: Sequence[FleetHost], access: Access, *, deep: bool
) -> tuple[dict[str, tuple[Connection, ProbeRequest]], dict[str, Examined]]:
    """The way to each host and what it is asked for; and the hosts to which there is none."""
    items: dict[str, tuple[Connection, ProbeRequest]] = {}
    failed: dict[str, Examined] = {}
    for host in hosts:
        try:
            connection = Connection.from_vars(
                host.name,
                host.variables,
                ask=access.secrets,
                host_keys=access.host_keys,
                confirm_host_key=access.confirm_host_key,
            )
        except V100ctlError as error:
            failed[host.name] = Examined(host, error=error)
            continue
        items[host.name] = (connection, probe_request(host.config, deep=deep))
    return items, failed


def with_hub_listings(
    hosts: Sequence[FleetHost], *, timeout_s: float = hub.DEFAULT_TIMEOUT_S, ask: bool = True
) -> list[FleetHost]:
    """The hosts with what model hubs have of their models. ``ask``: ``False`` takes only what is known from before."""
    found = hub.collect([host.config for host in hosts], timeout_s=timeout_s, ask=ask)
    return [dataclasses.replace(host, config=with_listings(host.config, found)) for host in hosts]


def read_headers(
    hosts: Sequence[FleetHost], connections: Mapping[str, Connection], access: Access
) -> dict[str, dict[str, Known]]:
    """What is known of every model of every host, by host and by the model's path there: its header, or why there is none.

    A host without a connection is not asked; what lies here or answers by HTTP is read all the same.
    """
    return _by_host(hosts, collect_headers(_header_requests(hosts, connections), access))


def known_headers(hosts: Sequence[FleetHost]) -> dict[str, dict[str, Known]]:
    """Like :func:`read_headers`, asking nobody: from files of this machine and what was read from elsewhere before."""
    return _by_host(hosts, collect.known_headers(_header_requests(hosts, {})))


def headers_for_playbook(config: HostConfig, answer: str) -> dict[str, Any]:
    """What a playbook knows of its host's models, as plain data, by path.

    Args:
        config: The host's configuration.
        answer: What the header script printed on the host; empty where it was not run.
    """
    requests = [
        _header_request(None, None, config, model) for spec in present_instances(config).values() for model in model_specs(spec)
    ]
    on_host: dict[str, ModelHeader | V100ctlError] = {}
    if answer:
        on_host = read_answer(answer, models_on_host(config))
    elsewhere = [request for request in requests if request.path not in on_host]
    outcomes = {request.path: outcome for request, outcome in collect_headers(elsewhere, Access()).items()} | on_host
    return {path: plain_known(_known(outcome)) for path, outcome in outcomes.items()}


def models_on_host(config: HostConfig) -> list[str]:
    """The models whose headers nobody but the host has: those that lie there already, or are brought or made there."""
    specs = [model for spec in present_instances(config).values() for model in model_specs(spec)]
    return sorted({model_path(spec) for spec in specs if spec.path is not None or spec.from_host or spec.prepare})


def _header_request(
    host: str | None,
    connection: Connection | None,
    config: HostConfig,
    model: ModelSpec,
    connections: Mapping[str, Connection] = types.MappingProxyType({}),
) -> HeaderRequest:
    there = model.from_host if model.prepare is None else None
    if there is not None and (other := connections.get(there.host)) is not None:
        path = str(first_file(model, Path(there.path)))
        return HeaderRequest(host, other, model, model_path(model), path_there=path)
    if model.hf is None:
        return HeaderRequest(host, connection, model, model_path(model))
    path = ""
    if model.hf.file is not None:
        # The parts of a split file are looked for beside the first.
        path = model.parts[0].path if model.listing is not None and model.parts else model.hf.file
    url = hub_url(model, path, config) if model.parts else ""
    return HeaderRequest(host, connection, model, model_path(model), url, config.model_store_hf_token.get_secret_value())


def _header_requests(hosts: Sequence[FleetHost], connections: Mapping[str, Connection]) -> list[HeaderRequest]:
    return [
        _header_request(host.name, connections.get(host.name), host.config, model, connections)
        for host in hosts
        for spec in present_instances(host.config).values()
        for model in model_specs(spec)
    ]


def _known(outcome: ModelHeader | V100ctlError) -> Known:
    if isinstance(outcome, ModelFormatError):
        return NotAModel(outcome.message)
    return outcome if isinstance(outcome, ModelHeader) else outcome.message


def _by_host(
    hosts: Sequence[FleetHost], outcomes: Mapping[HeaderRequest, ModelHeader | V100ctlError]
) -> dict[str, dict[str, Known]]:
    known: dict[str, dict[str, Known]] = {host.name: {} for host in hosts}
    for request, outcome in outcomes.items():
        if request.host is not None:
            known[request.host][request.path] = _known(outcome)
    return known


@functools.cache
def _ansible_core() -> str:
    # Reading a package's metadata takes longer than many a comparison.
    return importlib.metadata.version("ansible-core")


def decide(
    host: FleetHost, connection: Connection | None, facts: Facts, *, headers: Headers | None = None, as_of: date
) -> Examined:
    """Plan and compare one host whose facts are known. ``headers``: what is known of its models, by path on the host."""
    decided = plan(host.name, host.config, facts, headers=headers, as_of=as_of, ansible_core=_ansible_core())
    return Examined(host, connection, facts, decided, compare(decided, facts))
