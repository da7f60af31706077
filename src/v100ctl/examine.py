"""Probe hosts, plan each, compare: the first half of ``plan``, ``provision`` and ``audit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from v100ctl.access import Access
from v100ctl.compare import Finding, compare
from v100ctl.errors import V100ctlError
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.fleet import FleetHost
from v100ctl.plan import HostPlan, plan, probe_request
from v100ctl.probe import Connection, probe_hosts

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
    results: dict[str, Examined] = {}
    items: dict[str, tuple[Connection, ProbeRequest]] = {}
    by_name = {host.name: host for host in hosts}
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
            results[host.name] = Examined(host, error=error)
            continue
        items[host.name] = (connection, probe_request(host.config, deep=deep))

    found = probe_hosts(items, forks=access.forks, timeout_s=access.timeout_s, on_done=on_done)
    for name, outcome in found.items():
        host, connection = by_name[name], items[name][0]
        if isinstance(outcome, V100ctlError):
            results[name] = Examined(host, connection, error=outcome)
        else:
            results[name] = decide(host, connection, outcome, as_of=as_of)
    return {host.name: results[host.name] for host in hosts}


def decide(host: FleetHost, connection: Connection | None, facts: Facts, *, as_of: date) -> Examined:
    """Plan and compare one host whose facts are known."""
    decided = plan(host.name, host.config, facts, as_of=as_of)
    return Examined(host, connection, facts, decided, compare(decided, facts))
