"""A host's own firewall: what the probe reads of it, and what is opened and closed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.factory import AS_OF
from v100ctl.compare import compare
from v100ctl.facts import Facts, FirewallFacts, FirewallRule
from v100ctl.findings import seal
from v100ctl.fleet import parse_config
from v100ctl.plan import HostPlan, plan
from v100ctl.probe import host_script as probe
from v100ctl.provision import roles_that_mend

#: As ufw 0.36.2 writes them (`_write_rules` of its `backend_iptables.py`): ports, a range, an application, and rules of
#: one network, one interface, another direction and another protocol.
UFW_RULES = """*filter
### RULES ###

### tuple ### allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in
-A ufw-user-input -p tcp --dport 22 -j ACCEPT

### tuple ### limit any 2222 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### deny tcp 81 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### allow tcp 8000:8010,9000 0.0.0.0/0 any 0.0.0.0/0 in comment=7631303063746c
### tuple ### allow tcp 80 0.0.0.0/0 any 0.0.0.0/0 WWW - in
### tuple ### allow tcp 7000 0.0.0.0/0 any 10.0.0.0/8 in
### tuple ### allow tcp 7001 0.0.0.0/0 any 0.0.0.0/0 in_eth1
### tuple ### allow tcp 7002 0.0.0.0/0 any 0.0.0.0/0 out
### tuple ### allow udp 7003 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### route:allow tcp 7004 0.0.0.0/0 any 0.0.0.0/0 in
### END RULES ###
"""

#: In the form of `firewall-cmd --list-all`.
ZONE = """public (active)
  target: default
  icmp-block-inversion: no
  interfaces: eth0
  sources:
  services: dhcpv6-client ssh
  ports: 8000/tcp 9000-9010/tcp 53/udp
  protocols:
"""


def test_ufws_own_rules() -> None:
    spans = [(rule["allows"], rule["first_port"], rule["last_port"]) for rule in probe.parse_ufw_rules(UFW_RULES)]
    assert spans == [(True, 22, 22), (True, 2222, 2222), (False, 81, 81), (True, 8000, 8010), (True, 9000, 9000), (True, 80, 80)]


def test_ufw_counts_where_it_is_enabled(tmp_path: Path) -> None:
    assert probe.collect_ufw(str(tmp_path)) is None
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/default").mkdir()
    (tmp_path / "etc/ufw/ufw.conf").write_text("# ENABLED=yes\nENABLED=no\nLOGLEVEL=low\n")
    assert probe.collect_ufw(str(tmp_path)) is None
    (tmp_path / "etc/ufw/ufw.conf").write_text("ENABLED=yes\n")
    (tmp_path / "etc/default/ufw").write_text('IPV6=yes\nDEFAULT_INPUT_POLICY="DROP"\n')
    (tmp_path / "etc/ufw/user.rules").write_text(UFW_RULES)
    found = FirewallFacts.model_validate(probe.collect_ufw(str(tmp_path)))
    assert (found.kind, found.lets_in, len(found.rules)) == ("ufw", False, 6)
    (tmp_path / "etc/default/ufw").write_text('DEFAULT_INPUT_POLICY="ACCEPT"\n')
    assert FirewallFacts.model_validate(probe.collect_ufw(str(tmp_path))).lets_in


def test_firewallds_default_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.collect_firewalld(str(tmp_path)) is None
    (tmp_path / "run/firewalld").mkdir(parents=True)
    (tmp_path / "etc/firewalld/zones").mkdir(parents=True)
    (tmp_path / "etc/firewalld/zones/public.xml").write_text(
        '<zone>\n<service name="ssh"/>\n<port port="9000-9010" protocol="tcp"/>\n<port protocol="udp" port="53"/>\n</zone>\n'
    )
    monkeypatch.setattr(probe, "run_command", lambda argv, limit_s: ZONE)
    found = FirewallFacts.model_validate(probe.collect_firewalld(str(tmp_path)))
    assert (found.kind, found.zone, found.lets_in) == ("firewalld", "public", False)
    assert [(rule.first_port, rule.last_port) for rule in found.rules] == [(8000, 8000), (9000, 9010)]
    assert [(rule.first_port, rule.last_port) for rule in found.permanent] == [(9000, 9010)]

    def refuses(argv: list[str], limit_s: float) -> str:
        raise probe.ProbeFailure("FirewallD is not running")

    monkeypatch.setattr(probe, "run_command", refuses)
    assert probe.collect_firewalld(str(tmp_path)) is None


CHAT = {"model": {"url": "https://models.example/tiny.gguf", "sha256": "ab" * 32, "size_bytes": 100_000_000}, "listen": "0.0.0.0"}
FACTS = json.loads((Path(__file__).parent / "plan/cases/a-port-that-is-opened/facts.json").read_text())


def decided(
    *, kind: str = "ufw", opened: tuple[int, ...] = (), recorded: tuple[int, ...] = (), **variables: Any
) -> tuple[HostPlan, Facts]:
    rules = tuple(FirewallRule(allows=True, first_port=port, last_port=port) for port in (22, *opened))
    firewall = FirewallFacts.model_validate({"kind": kind, "zone": "public", "rules": rules, "permanent": rules})
    document: dict[str, Any] = {"instances": {}, "firewall": {"kind": kind, "ports": list(recorded)}}
    document["digest"] = seal(document)
    facts = Facts.model_validate({**FACTS, "firewall": None, "host_json": {"document": document if recorded else None}})
    facts = facts.model_copy(update={"firewall": firewall})
    defaults = {"llama_cpp_backend": "cpu", "llm_server_allow_unauthenticated": True, "gateway_firewall": "auto"}
    config = parse_config("h1", {"llm_server_instances": {"chat": CHAT}, **defaults, **variables})
    return plan("h1", config, facts, as_of=AS_OF), facts


def findings(made: HostPlan, facts: Facts) -> dict[str, str]:
    return {item.id: item.kind for item in compare(made, facts) if item.id.startswith("firewall.")}


def record(made: HostPlan) -> Any:
    assert made.host_json is not None
    return json.loads(made.host_json.content).get("firewall")


def test_a_closed_port_is_opened_and_recorded() -> None:
    made, facts = decided()
    assert made.firewall is not None
    assert made.firewall.open_calls == (("ufw", "allow", "proto", "tcp", "to", "any", "port", "8000", "comment", "v100ctl"),)
    assert findings(made, facts) == {"firewall.closed:8000": "pending"}
    assert "gateway" in roles_that_mend(compare(made, facts))
    after, facts = decided(opened=(8000,), recorded=(8000,))
    assert findings(after, facts) == {}
    assert record(after) == record(made) == {"kind": "ufw", "ports": [8000]}


def test_one_that_was_opened_and_is_closed_has_drifted() -> None:
    made, facts = decided(recorded=(8000,))
    assert findings(made, facts) == {"firewall.closed:8000": "drifted"}


def test_somebody_elses_opening_stays_theirs() -> None:
    made, facts = decided(opened=(8000,))
    assert (made.firewall, record(made), findings(made, facts)) == (None, None, {})
    gone, facts = decided(opened=(8000,), llm_server_instances={})
    assert (gone.firewall, findings(gone, facts)) == (None, {})


@pytest.mark.parametrize(
    "variables", [{"llm_server_instances": {}}, {"gateway_firewall": "none"}], ids=["no-instance", "no-firewall"]
)
def test_what_was_opened_for_one_that_is_gone_is_closed(variables: dict[str, Any]) -> None:
    made, facts = decided(opened=(8000,), recorded=(8000,), **variables)
    assert made.firewall is not None
    assert made.firewall.close_calls == (("ufw", "delete", "allow", "proto", "tcp", "to", "any", "port", "8000"),)
    assert findings(made, facts) == {"firewall.unwanted:8000": "pending"}
    assert record(made) is None
    # Somebody has closed it before.
    made, facts = decided(recorded=(8000,), **variables)
    assert (made.firewall, findings(made, facts)) == (None, {})


def test_firewalld_is_told_for_now_and_for_later() -> None:
    made, _ = decided(kind="firewalld")
    assert made.firewall is not None
    assert made.firewall.open_calls == (
        ("firewall-cmd", "--zone=public", "--add-port=8000/tcp"),
        ("firewall-cmd", "--permanent", "--zone=public", "--add-port=8000/tcp"),
    )


def test_only_the_public_port_is_opened() -> None:
    made, _ = decided(gateway_placement="host")
    assert made.firewall is not None
    assert made.firewall.ports == (8000,)
    loopback, _ = decided(llm_server_instances={"chat": {**CHAT, "listen": "127.0.0.1"}})
    assert loopback.firewall is None
    untouched, _ = decided(gateway_firewall="none")
    assert untouched.firewall is None


def test_a_record_that_somebody_has_edited_closes_nothing() -> None:
    made, facts = decided(opened=(8000,), recorded=(8000,), llm_server_instances={})
    assert facts.host_json.document is not None
    document = {**facts.host_json.document, "firewall": {"kind": "ufw", "ports": [22]}}
    edited = facts.model_copy(update={"host_json": facts.host_json.model_copy(update={"document": document})})
    config = parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": {}})
    assert made.firewall is not None
    assert plan("h1", config, edited, as_of=AS_OF).firewall is None
