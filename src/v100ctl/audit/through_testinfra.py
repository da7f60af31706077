"""Probe, plan and compare a host that testinfra reaches, by whichever of its backends."""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Sequence
from datetime import date
from typing import Any

from v100ctl.audit import bounded
from v100ctl.compare import compare
from v100ctl.errors import InventoryError, ProbeError
from v100ctl.examine import known_headers
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.findings import Finding
from v100ctl.fleet import Fleet, FleetHost, load_fleet
from v100ctl.plan import HostPlan, plan, probe_request
from v100ctl.probe.run import HOST_SCRIPT, encode_request, parse_facts
from v100ctl.probe.text import last_line

#: What a document may be, in characters; testinfra has no bound of its own.
_MAX_DOCUMENT = 32 << 20
#: testinfra gives commands no standard input, and an argument has at most 128 KiB: the script goes along packed.
_UNPACK = "import base64,zlib;exec(compile(zlib.decompress(base64.b64decode({!r})),'probe','exec'))"


class AuditWarning(UserWarning):
    """Findings that are no failure."""


def planned_host(fleet: Fleet, host: Any) -> FleetHost:
    """The inventory's host that testinfra's ``host`` is: by name, by address, or the only one that there is.

    Raises:
        InventoryError: it is none of them.
    """
    name = str(host.backend.get_hostname())
    if name in fleet.hosts:
        return fleet.hosts[name]
    for planned in fleet.hosts.values():
        if str(planned.variables.get("ansible_host", "")) == name:
            return planned
    if len(fleet.hosts) == 1:
        return next(iter(fleet.hosts.values()))
    raise InventoryError(
        f"the inventory {', '.join(fleet.sources)} has no host {name}", hint="give `--hosts` names or addresses that it knows"
    )


def probe(host: Any, request: ProbeRequest) -> Facts:
    """What a host is, over testinfra's own connection, as root.

    Raises:
        ProbeError: it has no Python, or did not return a document.
    """
    packed = base64.b64encode(zlib.compress(HOST_SCRIPT.read_bytes(), 9)).decode("ascii")
    as_root = contextlib.nullcontext() if host.user().name == "root" else host.sudo()
    with as_root:
        done = host.run("python3 -I -S -B -c %s --request %s", _UNPACK.format(packed), encode_request(request))
    name = str(host.backend.get_hostname())
    if done.rc != 0:
        raise ProbeError(f"{name}: the probe failed with exit code {done.rc}: {last_line(done.stderr)}")
    if len(done.stdout) > _MAX_DOCUMENT:
        raise ProbeError(f"{name}: the probe printed more than {_MAX_DOCUMENT} characters")
    return parse_facts(name, done.stdout.encode("utf-8", "surrogateescape"))


def decide(planned: FleetHost, facts: Facts, *, as_of: date) -> HostPlan:
    """The plan of a host, without asking anybody else."""
    headers = known_headers([planned])[planned.name]
    return plan(planned.name, planned.config, facts, headers=headers, as_of=as_of)


def findings(decided: HostPlan, facts: Facts) -> tuple[Finding, ...]:
    """What differs, bounded and without control characters."""
    return bounded(compare(decided, facts))


def fleet_of(paths: Sequence[str]) -> Fleet:
    """The inventory; the usual places where no path is given."""
    return load_fleet(tuple(paths))


def request_for(planned: FleetHost) -> ProbeRequest:
    """What the host is asked for."""
    return probe_request(planned.config)
