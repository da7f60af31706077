"""Mend what roles mend: just the roles that the findings name run, through the same apply as ``provision``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from v100ctl.access import Access
from v100ctl.apply import Reporter
from v100ctl.audit import AuditReport, HostAudit
from v100ctl.errors import V100ctlError
from v100ctl.fleet import Fleet
from v100ctl.provision import Confirm, provision, roles_that_mend
from v100ctl.provision import fixable as is_fixable


@dataclass(frozen=True)
class HostFix:
    """What was done on one host: the roles that ran, how that ended (``provision``'s word), and why it did not go well."""

    roles: tuple[str, ...]
    status: str
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it stands in a report."""
        return {"roles": list(self.roles), "status": self.status, "message": self.message}


def fix(
    fleet: Fleet,
    report: AuditReport,
    *,
    access: Access,
    reporter: Reporter,
    as_of: date,
    confirm: Confirm = lambda question: False,
    verbosity: int = 0,
    deep: bool = False,
) -> dict[str, HostFix]:
    """Run the roles that the findings name. Hosts whose servers restart come one after the other, and none after one that fails.

    Args:
        fleet: The hosts of the report.
        report: What was found.
        access: How they are reached.
        reporter: Where progress goes.
        as_of: Today, for the plan.
        confirm: Asked before servers are restarted.
        verbosity: Ansible's ``-v`` count.
        deep: The report is a deep one: its findings stand, also those that another look without hashes would not see.
    """
    wanted = {
        name: host
        for name, host in report.hosts.items()
        if host.status == "drift" and any(is_fixable(finding) for finding in host.findings)
    }
    calm = [name for name, host in wanted.items() if not host.restarts]
    restarting = [name for name, host in wanted.items() if host.restarts]
    done: dict[str, HostFix] = {}
    if restarting:
        servers = ", ".join(f"{name}/{item}" for name in restarting for item in wanted[name].restarts)
        if not confirm(f"{servers} restart{'s' if len(restarting) == 1 else ''}. Go on?"):
            for name in restarting:
                done[name] = HostFix((), "stopped", f"{servers} would restart, and nobody said yes; `--yes` says so")
            restarting = []
    failed = ""
    for batch in [*([calm] if calm else []), *([name] for name in restarting)]:
        if failed and wanted[batch[0]].restarts:
            done[batch[0]] = HostFix((), "stopped", f"{failed} was not mended, and so nothing is restarted after it")
            continue
        done |= _fix(fleet, {name: wanted[name] for name in batch}, access, reporter, as_of, verbosity, deep=deep)
        failed = failed or next((name for name in batch if wanted[name].restarts and done[name].status not in _WELL), "")
    return done


_WELL = ("changed", "unchanged")


def _fix(
    fleet: Fleet,
    hosts: Mapping[str, HostAudit],
    access: Access,
    reporter: Reporter,
    as_of: date,
    verbosity: int,
    *,
    deep: bool,
) -> Mapping[str, HostFix]:
    batch = dataclasses.replace(fleet, hosts={name: fleet.hosts[name] for name in hosts})
    # Ansible's own findings are none of the probe's: another look would not name their roles.
    named = {name: roles_that_mend(host.findings) for name, host in hosts.items()} if deep else {}
    try:
        result = provision(
            batch,
            access=access,
            reporter=reporter,
            as_of=as_of,
            verbosity=verbosity,
            named_roles=True,
            more_roles=named,
            deep=deep,
        )
    except V100ctlError as error:
        return {name: HostFix((), "failed", error.message) for name in hosts}
    return {name: HostFix(host.roles, host.status, host.message) for name, host in result.hosts.items()}
