"""Openings in a host's own firewall, for the public ports and nothing else.

A port that somebody else has opened stays theirs: it is not opened again, and not closed when its instance goes. Which ones are
ours stands in ``host.json``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from v100ctl.facts import Facts, FirewallRule
from v100ctl.findings import Applied
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.types import FirewallDecision, GatewayDecision, Rule

#: What `ufw status` shows beside a rule of ours.
_COMMENT = "v100ctl"


def public_ports(config: HostConfig, public: Mapping[str, InstanceSpec], gateway: GatewayDecision | None) -> dict[int, str]:
    """The ports that others than the host itself reach, with their instances."""
    found = {spec.port: name for name, spec in sorted(public.items()) if not ipaddress.ip_address(spec.listen).is_loopback}
    if (
        config.gateway_placement == "fleet"
        and gateway is not None
        and not ipaddress.ip_address(config.gateway_listen).is_loopback
    ):
        # Beside those of the host's own engines: the gateway of the fleet is not what is in front of them here.
        found |= {int(front.bind.rpartition(":")[2]): front.instance for front in gateway.fronts}
    return found


def decide(config: HostConfig, facts: Facts, ports: Mapping[int, str]) -> FirewallDecision | None:
    """What is opened and closed; ``None`` where there is nothing to do with a firewall.

    Args:
        config: What the inventory asks for.
        facts: What the probe found.
        ports: What :func:`public_ports` returned.
    """
    found = facts.firewall
    if found is None:
        return None
    recorded = recorded_ports(facts)
    wanted = set(ports) if config.gateway_firewall == "auto" else set()
    wanted = {port for port in wanted if port in recorded or (not _is_open(port, facts) and not _is_denied(port, facts))}
    unwanted = tuple(port for port in sorted(recorded - wanted) if _any(port, found.rules) or _any(port, found.permanent))
    closed = tuple(port for port in sorted(wanted) if not _is_open(port, facts))
    if not wanted and not unwanted:
        return None
    return FirewallDecision(
        kind=found.kind,
        ports=tuple(sorted(wanted)),
        closed=closed,
        unwanted=unwanted,
        open_calls=tuple(call for port in closed for call in _calls(found.kind, found.zone, port, opens=True)),
        close_calls=tuple(call for port in unwanted for call in _calls(found.kind, found.zone, port, opens=False)),
    )


def firewall_rules(config: HostConfig, facts: Facts, ports: Mapping[int, str]) -> Iterator[Rule]:
    """What cannot be opened, and what nobody can reach."""
    found = facts.firewall
    if config.gateway_firewall == "auto" and ports and found is None:
        yield Rule(
            "firewall-none",
            "info",
            "`gateway_firewall: auto`, and neither ufw nor firewalld is active on the host: nothing is opened",
            "`ufw enable` or firewalld first, where the host shall have one (with a way in for SSH)",
        )
    if found is None:
        return
    recorded = recorded_ports(facts)
    for port, name in sorted(ports.items()):
        if config.gateway_firewall == "auto" and _is_denied(port, facts):
            yield Rule(
                "firewall-denied",
                "warn",
                f"a rule of the host's {found.kind} denies port {port}, so nobody else reaches {name}; it is left as it is",
                f"`ufw delete deny {port}` on the host" if found.kind == "ufw" else "take that rule out",
                instance=name,
            )
        elif config.gateway_firewall == "none" and port not in recorded and not _is_open(port, facts):
            yield Rule(
                "firewall-closed",
                "info",
                f"the host's {found.kind} has no opening for port {port} of {name}: others may not reach it",
                "`gateway_firewall: auto` opens it",
                instance=name,
            )


def recorded_ports(facts: Facts) -> frozenset[int]:
    """The ports that an earlier run has opened, in the firewall that is active now."""
    record = Applied.read(facts.host_json.document, facts.host_json.problem).mapping("firewall")
    ports = record.get("ports")
    if facts.firewall is None or record.get("kind") != facts.firewall.kind or not isinstance(ports, list):
        return frozenset()
    return frozenset(port for port in ports if isinstance(port, int) and 0 < port < 65536)


def _first(port: int, rules: Sequence[FirewallRule]) -> FirewallRule | None:
    return next((rule for rule in rules if rule.first_port <= port <= rule.last_port), None)


def _any(port: int, rules: Sequence[FirewallRule]) -> bool:
    """Whether there is an opening for this very port."""
    return any(rule.allows and rule.first_port == port == rule.last_port for rule in rules)


def _is_open(port: int, facts: Facts) -> bool:
    """Whether others get through to a port, now and after a restart of the firewall."""
    found = facts.firewall
    if found is None:
        return True
    firsts = (_first(port, found.rules), _first(port, found.permanent))
    return all(rule.allows if rule is not None else found.lets_in for rule in firsts)


def _is_denied(port: int, facts: Facts) -> bool:
    """Whether somebody has said that a port stays closed."""
    rule = _first(port, facts.firewall.rules) if facts.firewall else None
    return rule is not None and not rule.allows


def _calls(kind: str, zone: str, port: int, *, opens: bool) -> Iterator[tuple[str, ...]]:
    if kind == "ufw":
        rule = ("allow", "proto", "tcp", "to", "any", "port", str(port))
        yield ("ufw", *rule, "comment", _COMMENT) if opens else ("ufw", "delete", *rule)
        return
    change = f"--{'add' if opens else 'remove'}-port={port}/tcp"
    yield "firewall-cmd", f"--zone={zone}", change
    yield "firewall-cmd", "--permanent", f"--zone={zone}", change
