"""Drift: what hosts are, compared with what is planned for them and with each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from v100ctl.access import Access
from v100ctl.audit.alike import Traits, odd_ones_out, traits_of
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, UnreachableError
from v100ctl.examine import Examined, examine_each
from v100ctl.findings import Finding
from v100ctl.fleet import Fleet
from v100ctl.plan.keys import first_keys
from v100ctl.plan.types import describe
from v100ctl.probe.text import escaped

AUDIT_SCHEMA = "v100ctl/audit/1"
HostAuditStatus = Literal["clean", "drift", "unreachable", "error"]
#: What one host may say in a report: a broken or hostile one must not fill it.
MAX_FINDINGS = 500
MAX_TEXT_CHARACTERS = 64 * 1024
MAX_NAME_CHARACTERS = 400

#: Called with each host as it is done.
OnHost = Callable[[str, "HostAudit"], None]


@dataclass(frozen=True)
class Speed:
    """An instance, as in the plan, how fast it was when it was proved, and what opens it where it asks for a key."""

    instance: Mapping[str, Any]
    tokens_per_second: float
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class HostAudit:
    """One host of a report.

    ``status``: ``error`` where the probe failed or the plan refuses the host. ``error`` and ``hint`` say why a host was not
    asked, or is refused. ``traits`` are what it is compared by with others of its kind.
    """

    status: HostAuditStatus
    findings: tuple[Finding, ...] = ()
    probe_ms: float | None = None
    error: str = ""
    hint: str | None = None
    traits: Traits | None = field(default=None, repr=False)
    #: Instances that run now and that mending its findings would restart.
    restarts: tuple[str, ...] = ()
    #: How fast its instances were when they were proved.
    speeds: tuple[Speed, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, state: Examined) -> HostAudit:
        """What is kept of a host that was examined. Whatever it says is bounded, and holds nothing that a terminal obeys."""
        findings = bounded(state.findings)
        if state.error is not None:
            status: HostAuditStatus = "unreachable" if isinstance(state.error, UnreachableError) else "error"
            hint = state.error.hint and escaped(state.error.hint, MAX_TEXT_CHARACTERS)
            return cls(status, error=escaped(state.error.message, MAX_TEXT_CHARACTERS), hint=hint)
        refusals = [rule for rule in state.plan.rules if rule.severity == "refuse"] if state.plan is not None else []
        return cls(
            status="error" if refusals else "drift" if findings else "clean",
            findings=findings,
            probe_ms=round(state.facts.probe_ms, 1) if state.facts else None,
            error=escaped("; ".join(describe(rule) for rule in refusals), MAX_TEXT_CHARACTERS),
            traits=traits_of(state),
            restarts=state.restarts,
            speeds=tuple(_speeds(state)),
        )


def _speeds(state: Examined) -> Iterator[Speed]:
    if state.facts is None or state.plan is None:
        return
    keys = first_keys(state.plan)
    for instance in state.plan.instances:
        baseline = state.facts.baselines.get(instance.name)
        if baseline is not None and baseline.tokens_per_second and baseline.digest == instance.digest:
            named = {name: getattr(instance, name) for name in ("name", "unit", "completion_url", "model_alias")}
            yield Speed(named, baseline.tokens_per_second, keys.get(instance.name))


@dataclass(frozen=True)
class AuditReport:
    """All hosts. ``interrupted``: not all of them were asked, since somebody pressed Ctrl-C."""

    hosts: Mapping[str, HostAudit]
    interrupted: bool = False

    @classmethod
    def of(cls, states: Mapping[str, Examined]) -> AuditReport:
        """The report on hosts that were examined."""
        return cls({name: HostAudit.of(state) for name, state in states.items()})

    def status(self, name: str) -> HostAuditStatus:
        """The status of one host."""
        return self.hosts[name].status

    @property
    def exit_code(self) -> int:
        """1 before 2 before 0, over all hosts; 2 where a finding is more than a warning; 130 where it was interrupted."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        statuses = {host.status for host in self.hosts.values()}
        if statuses & {"unreachable", "error"}:
            return EXIT_ERROR
        findings = [finding for host in self.hosts.values() for finding in host.findings]
        # Warnings alone are no failure: a timer that runs this must not cry for them.
        return EXIT_DIFFERENCES if any(finding.severity in ("error", "critical") for finding in findings) else EXIT_OK

    def with_findings(self, more: Mapping[str, Iterable[Finding]]) -> AuditReport:
        """The report with more findings, by host."""
        hosts = dict(self.hosts)
        for name, added in more.items():
            host = hosts[name]
            findings = bounded((*host.findings, *added))
            hosts[name] = dataclasses.replace(
                host, findings=findings, status="drift" if host.status == "clean" and findings else host.status
            )
        return dataclasses.replace(self, hosts=hosts)

    def to_json(self) -> dict[str, Any]:
        """The document of the contract ``v100ctl/audit/1``."""
        return {
            "schema": AUDIT_SCHEMA,
            "hosts": {
                name: {
                    "status": host.status,
                    "probe_ms": host.probe_ms,
                    "findings": [
                        {
                            "id": finding.id,
                            "kind": finding.kind,
                            "layer": finding.layer,
                            "instance": finding.instance,
                            "role": finding.role,
                            "expected": finding.expected,
                            "actual": finding.actual,
                            "severity": finding.severity,
                            "fix": finding.fix,
                        }
                        for finding in host.findings
                    ],
                    **({"error": host.error} if host.error else {}),
                }
                for name, host in self.hosts.items()
            },
        }


def bounded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings with what a host said cut to a length and without control characters, and no more of them than anybody reads."""
    kept: list[Finding] = []
    for number, finding in enumerate(findings):
        if number == MAX_FINDINGS:
            kept.append(
                dataclasses.replace(
                    kept[-1],
                    id="findings.more",
                    expected=f"at most {MAX_FINDINGS} findings",
                    actual="more, which are not listed",
                    severity="error",
                    instance=None,
                )
            )
            break
        kept.append(
            dataclasses.replace(
                finding,
                id=escaped(finding.id, MAX_NAME_CHARACTERS),
                expected=escaped(finding.expected, MAX_TEXT_CHARACTERS, lines=True),
                actual=escaped(finding.actual, MAX_TEXT_CHARACTERS, lines=True),
                fix=escaped(finding.fix, MAX_TEXT_CHARACTERS),
            )
        )
    return tuple(kept)


def audit(fleet: Fleet, *, access: Access, as_of: date, deep: bool = False, on_host: OnHost | None = None) -> AuditReport:
    """Probe every host in one round trip each, compare it with its plan, then with its like.

    Hosts are judged as they answer and only findings are kept. After Ctrl-C the report holds those that have answered.

    Args:
        fleet: The hosts.
        access: How they are reached.
        as_of: Today, for the plan.
        deep: Hash releases and models instead of trusting size and time.
        on_host: Called with each host as it is done.
    """
    found: dict[str, HostAudit] = {}
    interrupted = False
    try:
        for name, state in examine_each(list(fleet.hosts.values()), access, as_of=as_of, deep=deep):
            found[name] = HostAudit.of(state)
            if on_host is not None:
                on_host(name, found[name])
    except KeyboardInterrupt:
        interrupted = True
    hosts = {name: found.get(name) or HostAudit("error", error="interrupted before it answered") for name in fleet.hosts}
    report = AuditReport(hosts, interrupted)
    return report.with_findings(odd_ones_out({name: host.traits for name, host in hosts.items() if host.traits is not None}))
