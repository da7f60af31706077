"""On request: how fast each model answers now, against when it was proved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from v100ctl.access import Access
from v100ctl.apply import Reporter
from v100ctl.audit import AuditReport, Speed
from v100ctl.errors import V100ctlError
from v100ctl.findings import Finding
from v100ctl.fleet import Fleet
from v100ctl.probe import Connection, open_session
from v100ctl.serving import PROOF_MAX_TOKENS, PROOF_PROMPT, PROOF_TIMEOUT_S, ask

#: A short answer is a rough measure: only one that is slower than this part of the baseline is told.
SLOW = 0.7


def ask_speeds(fleet: Fleet, report: AuditReport, *, access: Access, reporter: Reporter) -> AuditReport:
    """Ask every instance that has a baseline one question, host after host. Where the engine tells no speed it is timed."""
    found: dict[str, list[Finding]] = {}
    for name, host in report.hosts.items():
        if host.status not in ("clean", "drift") or not host.speeds:
            continue
        with reporter.phase(f"{name}: asking {', '.join(speed.instance['name'] for speed in host.speeds)}"):
            found[name] = _ask_host(fleet, name, host.speeds, access)
    return report.with_findings(found)


def _ask_host(fleet: Fleet, name: str, speeds: tuple[Speed, ...], access: Access) -> list[Finding]:
    found = []
    try:
        connection = Connection.from_vars(
            name,
            fleet.hosts[name].variables,
            ask=access.secrets,
            host_keys=access.host_keys,
            confirm_host_key=access.confirm_host_key,
        )
        with open_session(connection) as session:
            for speed in speeds:
                try:
                    answer = ask(
                        session,
                        speed.instance,
                        PROOF_PROMPT,
                        max_tokens=PROOF_MAX_TOKENS,
                        timeout_s=PROOF_TIMEOUT_S,
                        api_key=speed.api_key,
                    )
                except V100ctlError as error:
                    found.append(_finding(speed.instance, "no-answer", "an answer", error.message, "error"))
                    continue
                now = answer.tokens_per_second or answer.tokens / max(answer.elapsed_s, 0.001)
                if now < speed.tokens_per_second * SLOW:
                    expected = f"about {speed.tokens_per_second:.1f} tokens/s, as when it was proved"
                    found.append(_finding(speed.instance, "slow", expected, f"{now:.1f} tokens/s", "warn"))
    except V100ctlError as error:
        found += [_finding(speed.instance, "no-answer", "an answer", error.message, "error") for speed in speeds]
    return found


def _finding(instance: Mapping[str, Any], what: str, expected: str, actual: str, severity: Any) -> Finding:
    return Finding(
        f"service.{what}:{instance['name']}",
        "external",
        "service",
        "llm_server",
        expected,
        actual,
        severity,
        f"`journalctl --unit {instance['unit']}` on the host; look at its card's heat and clocks, and at what else runs there",
        str(instance["name"]),
    )
