"""Drift: what hosts are, compared with what is planned for them and with each other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from v100ctl.access import Access
from v100ctl.audit.alike import Traits, odd_ones_out, traits_of
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, UnreachableError
from v100ctl.examine import Examined, examine_each
from v100ctl.findings import DEEP_FIX, PROVISION, Finding
from v100ctl.fleet import Fleet
from v100ctl.plan.keys import first_keys
from v100ctl.plan.types import describe
from v100ctl.probe.host_script import HIDDEN, SECRET_TEXT, is_secret
from v100ctl.probe.text import escaped

AUDIT_SCHEMA = "v100ctl/audit/1"
HostAuditStatus = Literal["clean", "drift", "unreachable", "error"]
#: What one host may say in a report: a broken or hostile one must not fill it.
MAX_FINDINGS = 500
MAX_TEXT_CHARACTERS = 64 * 1024
MAX_NAME_CHARACTERS = 400
#: All texts of one host together; what comes after them is cut shorter.
MAX_HOST_CHARACTERS = 2 * 1024**2
_SHORT_CHARACTERS = 1000
#: Shorter ones are also words that have nothing to do with them.
_LEAST_SECRET_CHARACTERS = 6
#: What a flag or an assignment begins with, and its value.
_NAMED = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]{0,60})[ =]|\b([A-Za-z_]\w{0,60})=")
_VALUE = re.compile(r"\"[^\"\n]*\"?|'[^'\n]*'?|[^\s\"']+")
#: Findings whose hashes only a deep look takes.
_HASHED = ("release.damaged:", "model.wrong:")

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
    #: What must stand in no report, whoever repeats it.
    secrets: tuple[str, ...] = field(default=(), repr=False)
    #: How fast its instances were when they were proved.
    speeds: tuple[Speed, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, state: Examined, *, deep: bool = False) -> HostAudit:
        """What is kept of a host that was examined. Whatever it says is bounded, and holds nothing that a terminal obeys.

        ``deep``: releases and models were hashed, which a usual run of the roles does not do.
        """
        secrets = _secrets(state)
        found = (
            dataclasses.replace(finding, fix=DEEP_FIX)
            if deep and finding.fix == PROVISION and finding.id.startswith(_HASHED)
            else finding
            for finding in state.findings
        )
        findings = bounded(found, secrets)
        if state.error is not None:
            status: HostAuditStatus = "unreachable" if isinstance(state.error, UnreachableError) else "error"
            hint = state.error.hint and _kept(state.error.hint, MAX_TEXT_CHARACTERS, secrets)
            return cls(status, error=_kept(state.error.message, MAX_TEXT_CHARACTERS, secrets), hint=hint, secrets=secrets)
        refusals = [rule for rule in state.plan.rules if rule.severity == "refuse"] if state.plan is not None else []
        return cls(
            status="error" if refusals else "drift" if findings else "clean",
            findings=findings,
            probe_ms=round(state.facts.probe_ms, 1) if state.facts else None,
            error=_kept("; ".join(describe(rule) for rule in refusals), MAX_TEXT_CHARACTERS, secrets),
            traits=traits_of(state),
            secrets=secrets,
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
            findings = bounded((*host.findings, *added), host.secrets)
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


def _secrets(state: Examined) -> tuple[str, ...]:
    """What this side knows and a host may repeat: passwords that it was given, API keys, the hub's token. The longest first."""
    found = {state.connection.password or "", state.connection.become_password or ""} if state.connection else set()
    found.add(state.host.config.model_store_hf_token.get_secret_value())
    for spec in state.host.config.llm_server_instances.values():
        found.update(spec.keys)
    return tuple(sorted((secret for secret in found if len(secret) >= _LEAST_SECRET_CHARACTERS), key=len, reverse=True))


def _without_values(text: str) -> str:
    """A text in which nothing follows a flag or a variable that is called like a secret."""
    parts, done = [], 0
    for name in _NAMED.finditer(text):
        value = _VALUE.match(text, name.end())
        if name.start() >= done and value is not None and is_secret(name[1] or name[2]):
            parts += [text[done : name.end()], HIDDEN]
            done = value.end()
    return "".join((*parts, text[done:]))


def _kept(text: str, limit: int, secrets: tuple[str, ...], *, lines: bool = False) -> str:
    """A text as it may stand in a report: without secrets, those of ours and what looks like one, cut and escaped."""
    # What is cut away anyway is not searched, and what was only searched in part is cut away.
    begin = text[: 2 * limit]
    for secret in secrets:
        begin = begin.replace(secret, HIDDEN)
    begin = SECRET_TEXT.sub(HIDDEN, _without_values(begin))
    if len(text) <= limit:
        return escaped(begin, len(begin), lines=lines)
    begin = begin[: min(limit, max(0, len(begin) - limit // 2))]
    return f"{escaped(begin, limit, lines=lines)}... and {len(text) - len(begin)} more characters"


def bounded(findings: Iterable[Finding], secrets: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Findings with what a host said cut to a length, without control characters and secrets, and no more than anybody reads.

    Args:
        findings: What was found.
        secrets: What stands in no report.
    """
    kept: list[Finding] = []
    left = MAX_HOST_CHARACTERS
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
        limit = MAX_TEXT_CHARACTERS if left > 0 else _SHORT_CHARACTERS
        kept.append(
            dataclasses.replace(
                finding,
                id=_kept(finding.id, MAX_NAME_CHARACTERS, secrets),
                expected=_kept(finding.expected, limit, secrets, lines=True),
                actual=_kept(finding.actual, limit, secrets, lines=True),
                fix=_kept(finding.fix, limit, secrets),
            )
        )
        left -= sum(map(len, (kept[-1].expected, kept[-1].actual, kept[-1].fix)))
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
            found[name] = HostAudit.of(state, deep=deep)
            if on_host is not None:
                on_host(name, found[name])
    except KeyboardInterrupt:
        interrupted = True
    hosts = {name: found.get(name) or HostAudit("error", error="interrupted before it answered") for name in fleet.hosts}
    report = AuditReport(hosts, interrupted)
    return report.with_findings(odd_ones_out({name: host.traits for name, host in hosts.items() if host.traits is not None}))
