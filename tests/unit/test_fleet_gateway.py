"""The gateway of a fleet: which servers, which configuration, and the same in the words of others."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from v100ctl.cli import cli
from v100ctl.compare import compare
from v100ctl.errors import InventoryError
from v100ctl.facts import Facts
from v100ctl.fleet import GatewayServer, HostConfig, load_fleet, with_servers
from v100ctl.plan import HostPlan, gateway, plan
from v100ctl.plan.firewall import public_ports
from v100ctl.plan.fleet_gateway import OUTPUTS, render_for, servers_of
from v100ctl.probe import host_script

from .factory import AS_OF, MODEL, make_config, make_facts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "roles/gateway/files/gateway_control.py"
STATISTICS = """# pxname,svname,qcur,qmax,scur,smax,slim,stot,bin,bout,dreq,dresp,ereq,econ,eresp,wretr,wredis,status,weight,addr
chat,FRONTEND,,,3,9,4000,12,1,1,0,0,0,,,,,OPEN,,
engine-chat,gpu1,0,0,2,2,,9,1,1,,0,,0,0,0,0,UP,1,10.0.0.1:8000
engine-chat,gpu2,0,0,1,2,,9,1,1,,0,,0,0,0,0,DRAIN,1,10.0.0.2:8000
engine-chat,BACKEND,0,0,3,2,400,9,1,1,0,0,,0,0,0,0,UP,1,
"""


def host(address: str, **changes: Any) -> tuple[dict[str, Any], HostConfig]:
    return {"ansible_host": address}, make_config({"listen": address, **changes}, llm_server_allow_unauthenticated=True)


HOSTS = {"gpu2": host("10.0.0.2"), "gpu1": host("10.0.0.1")}


def config_of(servers: tuple[GatewayServer, ...], **variables: Any) -> HostConfig:
    config = make_config(llm_server_instances={}, gateway_placement="fleet", **variables)
    return with_servers(config.model_copy(update={"llm_server_instances": {}}), servers)


def decide(hosts: dict[str, Any] | None = None, facts: Facts | None = None, **variables: Any) -> HostPlan:
    config = config_of(servers_of(HOSTS if hosts is None else hosts), **variables)
    return plan("front", config, facts or make_facts(), as_of=AS_OF)


def text_of(decided: HostPlan) -> str:
    return next(file.content for file in decided.files if file.path == gateway.CONFIG)


def test_it_is_in_front_of_the_instances_of_one_name_on_all_hosts() -> None:
    decided = decide()
    assert decided.verdict == "ok"
    assert "nothing-to-serve" not in {rule.id for rule in decided.rules}
    assert "haproxy" in decided.packages
    assert decided.gateway is not None
    (front,) = decided.gateway.fronts
    assert (front.bind, front.servers) == ("127.0.0.1:8000", ("gpu1", "gpu2"))
    text = text_of(decided)
    assert "    balance leastconn\n" in text
    assert "    option httpchk GET /health\n" in text
    assert "    server gpu1 10.0.0.1:8000 check inter 2s fastinter 500ms fall 3 rise 1\n" in text
    assert f"description v100ctl {decided.gateway.digest}\n" in text
    assert "stats uri /\n" in text
    assert "frontend v100ctl_stats" not in text_of(decide(gateway_stats_port=0))


def test_several_names_have_a_front_each_and_ports_may_be_given() -> None:
    hosts = {"gpu1": host("10.0.0.1"), "gpu2": host("10.0.0.2", port=8001)}
    assert {rule.id for rule in decide(hosts).rules if rule.severity == "refuse"} == {"gateway-fleet-port"}
    given = decide(hosts, gateway_ports={"chat": 443}, gateway_listen="10.0.0.9")
    assert given.verdict == "ok"
    assert given.gateway is not None
    assert given.gateway.fronts[0].bind == "10.0.0.9:443"
    assert "gateway-fleet-open" in {rule.id for rule in given.rules}


def test_a_gateway_without_servers_is_refused() -> None:
    assert {rule.id for rule in decide({}).rules if rule.severity == "refuse"} == {"gateway-fleet-empty"}
    listed = GatewayServer(instance="chat", host="old1", address="10.9.9.9", port=8000).model_dump()
    assert decide({}, gateway_servers=[listed]).verdict == "ok"


def test_what_only_itself_can_reach_is_told() -> None:
    alone = {"gpu1": host("127.0.0.1")}
    assert {rule.id for rule in decide(alone).rules if rule.severity == "refuse"} == {"gateway-fleet-loopback"}
    assert decide({**HOSTS, "gpu3": host("127.0.0.1")}).verdict == "warn"


def test_different_models_under_one_name_are_told() -> None:
    other = host("10.0.0.3", model={"url": MODEL["url"], "sha256": "cd" * 32, "size_bytes": 1})
    assert "gateway-fleet-models-differ" in {rule.id for rule in decide({**HOSTS, "gpu3": other}).rules}


def test_servers_that_speak_tls_are_checked_by_name() -> None:
    variables, _ = host("10.0.0.1")
    secure = make_config(
        {"listen": "10.0.0.1"},
        gateway_placement="host",
        gateway_tls_certificate="/etc/ssl/x.pem",
        llm_server_allow_unauthenticated=True,
        gateway_address="gpu1.example",
    )
    own = decide({"gpu1": (variables, secure)}, gateway_server_ca="/etc/ssl/ca.pem")
    assert own.packages == ("haproxy",)
    text = text_of(own)
    assert "server gpu1 gpu1.example:8000 check inter 2s fastinter 500ms fall 3 rise 1 init-addr libc,last,none ssl " in text
    assert " ssl verify required ca-file /etc/ssl/ca.pem verifyhost gpu1.example\n" in text
    # Else what the front's own distribution trusts: HAProxy's word for that is not known to 2.2.
    for name, version, bundle in (
        ("debian", "11", "/etc/ssl/certs/ca-certificates.crt"),
        ("rocky", "9.6", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"),
    ):
        facts = make_facts(distribution={"id": name, "version_id": version, "name": name})
        decided = decide({"gpu1": (variables, secure)}, facts)
        assert f"ca-file {bundle} verifyhost gpu1.example\n" in text_of(decided)
        assert decided.packages == ("haproxy", "ca-certificates")


def test_keys_of_a_gateway_that_this_host_had_alone_go() -> None:
    # With one of them left the role would wait in vain for the gateway to load it.
    left = f"{gateway.KEYS_FOLDER}/chat.keys"
    decided = decide(facts=make_facts(files={left: {"kind": "file"}}))
    assert decided.gateway is not None
    assert (decided.gateway.state, decided.gateway.absent_files) == ("started", (left,))
    assert decide().gateway != decided.gateway


def test_a_name_that_nobody_knows_takes_no_other_server_away() -> None:
    text = text_of(decide({**HOSTS, "gpu3": host("0.0.0.0"), "gpu4": ({}, HOSTS["gpu1"][1])}))
    # HAProxy starts with none at all where it cannot look up one, and else would trust what it kept more than what is known now.
    assert "    server gpu4 gpu4:8000 check inter 2s fastinter 500ms fall 3 rise 1 init-addr libc,last,none\n" in text
    assert text.count("init-addr") == 1


def test_a_server_with_a_number_is_checked_by_the_name_of_its_host() -> None:
    secure = make_config(
        {"listen": "0.0.0.0"},
        gateway_placement="host",
        gateway_tls_certificate="/etc/ssl/x.pem",
        llm_server_allow_unauthenticated=True,
    )
    # HAProxy finds no address in a certificate: it would take each for a wrong one.
    assert " verifyhost gpu1.example\n" in text_of(decide({"gpu1.example": ({"ansible_host": "10.0.0.1"}, secure)}))
    for name in ("10.0.0.1", "fd00::1", "gpu 1"):
        refused = decide({name: ({"ansible_host": "10.0.0.1"}, secure)})
        assert {rule.id for rule in refused.rules if rule.severity == "refuse"} == {"gateway-fleet-certificate"}


def keyed(*keys: str) -> tuple[dict[str, Any], HostConfig]:
    return {"ansible_host": "10.0.0.1"}, make_config({"listen": "0.0.0.0", "api_keys": list(keys)})


@pytest.mark.parametrize(
    ("hosts", "differ"),
    [
        ({"a": keyed("x" * 16), "b": keyed("x" * 16)}, False),
        ({"a": keyed("x" * 16, "y" * 16), "b": keyed("y" * 16, "x" * 16)}, False),
        ({"a": keyed("x" * 16), "b": keyed("y" * 16)}, True),
        ({"a": keyed("x" * 16), "b": keyed("x" * 16, "y" * 16)}, True),
        ({"a": keyed("x" * 16), "b": HOSTS["gpu1"]}, True),
        (HOSTS, False),
    ],
)
def test_different_keys_under_one_name_are_told_and_shown_nowhere(hosts: dict[str, Any], differ: bool) -> None:
    decided = decide(hosts)
    assert ("gateway-fleet-keys-differ" in {rule.id for rule in decided.rules}) == differ
    told = repr(servers_of(hosts)) + repr(decided) + json.dumps(decided.to_role_variables())
    assert "x" * 16 not in told and "y" * 16 not in told


def test_two_hosts_whose_names_become_one_are_told() -> None:
    config = HOSTS["gpu1"][1]
    hosts = {"gpu 1": ({"ansible_host": "10.0.0.1"}, config), "gpu/1": ({"ansible_host": "10.0.0.2"}, config)}
    assert {rule.id for rule in decide(hosts).rules if rule.severity == "refuse"} == {"gateway-fleet-host-twice"}


@pytest.mark.parametrize("name", ["v100ctl-stats", "engine-chat", "chat"])
def test_no_two_parts_of_the_configuration_have_one_name(name: str) -> None:
    server = GatewayServer(instance=name, host="gpu1", address="10.0.0.1", port=8001)
    text = text_of(
        plan("front", config_of((*servers_of(HOSTS), server), gateway_ports={"chat": 8000}), make_facts(), as_of=AS_OF)
    )
    for kind in ("frontend", "backend"):
        named = re.findall(rf"(?m)^{kind} (.*)$", text)
        assert named and len(named) == len(set(named))


def test_a_host_that_serves_beside_the_gateway_has_both_ports() -> None:
    own = make_config({"listen": "0.0.0.0"}, llm_server_allow_unauthenticated=True, gateway_placement="fleet")
    for listen, ports in (("10.0.0.9", {8000: "chat", 8443: "chat"}), ("127.0.0.1", {8000: "chat"})):
        config = own.model_copy(update={"gateway_listen": listen, "gateway_ports": {"chat": 8443}})
        decided = plan("front", with_servers(config, servers_of(HOSTS)), make_facts(), as_of=AS_OF)
        assert public_ports(config, config.llm_server_instances, decided.gateway) == ports


@pytest.mark.parametrize(
    ("status", "finding", "fix"),
    [
        ("DRAIN", "taken-out", "open chat@gpu2"),
        ("MAINT", "taken-out", "open chat@gpu2"),
        ("MAINT (resolution)", "name-unknown", "reload"),
    ],
)
def test_a_server_that_was_taken_out_is_found_by_host(status: str, finding: str, fix: str) -> None:
    decided = decide()
    assert decided.gateway is not None
    statistics = STATISTICS.replace("DRAIN", status)
    seen = host_script.gateway_facts("description: v100ctl " + decided.gateway.digest + "\n", statistics)
    unit = {"load_state": "loaded", "active_state": "active", "sub_state": "running", "unit_file_state": "enabled"}
    facts = make_facts(gateway=seen, units={gateway.UNIT: unit})
    (found,) = [found for found in compare(decided, facts) if found.layer == "service"]
    assert found.id == f"service.{finding}:chat@gpu2"
    assert fix in found.fix


def test_its_program_knows_servers_by_instance_and_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gateway_control", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    asked: list[str] = []

    def ask(command: str) -> str:
        asked.append(command)
        return STATISTICS if command == "show stat" else "1\n"

    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    assert script.main(["open", "chat@gpu1"]) == 0
    assert "set server engine-chat/gpu1 state ready" in asked
    # Also after a start anew.
    assert (tmp_path / "servers").read_text() == "1\n"
    assert script.main(["drain", "chat@gpu1", "--limit-s", "0"]) == script.EXIT_LIMIT
    # The role opens what is behind the gateway of a host alone.
    assert script.main(["open", "chat"]) == script.EXIT_UNKNOWN


def test_the_inventory_tells_the_servers_also_past_a_limit(tmp_path: Path) -> None:
    serving = {"llama_cpp_backend": "cpu", "llm_server_instances": {"chat": {"model": MODEL, "listen": "0.0.0.0"}}}
    document = {
        "all": {
            "children": {
                "gpus": {
                    "hosts": {"gpu1": {"ansible_host": "10.0.0.1"}, "gpu2": {"ansible_host": "10.0.0.2"}},
                    "vars": {**serving, "llm_server_allow_unauthenticated": True},
                },
                "builders": {"hosts": {"b1": {}}},
                "fronts": {"hosts": {"front": {"gateway_placement": "fleet"}}},
            }
        }
    }
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump(document))
    fleet = load_fleet([path])
    assert set(fleet.hosts) == {"gpu1", "gpu2", "front"}
    servers = fleet.hosts["front"].config.gateway_servers
    assert [(server.host, server.address) for server in servers] == [("gpu1", "10.0.0.1"), ("gpu2", "10.0.0.2")]
    narrow = load_fleet([path], "front")
    assert set(narrow.hosts) == {"front"}
    assert narrow.hosts["front"].config.gateway_servers == servers
    assert set(load_fleet([path], "gpu1").gateways) == {"front"}


@pytest.mark.parametrize(
    ("name", "variables", "says"),
    [
        ("gpu1", {"ansible_host": "fe80::1%eth0"}, "without a zone"),
        ("gpu1", {"ansible_host": "10.0.0.1 # x"}, "an IP address or a name"),
        ("gpu1", {"ansible_host": "a:b"}, "an IP address, not 'a:b'"),
        ("gpu1", {"ansible_host": "-oProxyCommand=x"}, "an IP address or a name"),
        ("gp\u00fc1", {}, "an IP address or a name"),
        ("gpu 1", {}, "an IP address or a name"),
    ],
)
def test_a_host_that_others_cannot_reach_by_its_address_is_named(name: str, variables: dict[str, Any], says: str) -> None:
    config = HOSTS["gpu1"][1]
    with pytest.raises(InventoryError, match=re.escape(says)) as error:
        servers_of({name: (variables, config)})
    assert name in error.value.message and "gateway_address" in (error.value.hint or "")
    # It may say another one, and without an instance nobody wants to reach it.
    elsewhere = config.model_copy(update={"gateway_address": "10.0.0.7"})
    assert [server.address for server in servers_of({name: (variables, elsewhere)})] == ["10.0.0.7"]
    assert servers_of({name: (variables, config.model_copy(update={"llm_server_instances": {}}))}) == ()


def test_hosts_are_reached_as_ssh_reaches_them() -> None:
    config = HOSTS["gpu1"][1]
    long = "g" * 63 + ".example.org"
    hosts = {"a": ({"ansible_ssh_host": "10.0.0.1"}, config), "fd00::7": ({}, config), long: ({}, config)}
    assert [server.address for server in servers_of(hosts)] == ["10.0.0.1", "fd00::7", long]
    assert [server.host for server in servers_of(hosts)] == ["a", "fd00__7", long]


@pytest.mark.parametrize("zone", ["eth0", "a b\n    bind 0.0.0.0:1", ""])
@pytest.mark.parametrize("variable", ["gateway_listen", "gateway_address", "monitoring_listen"])
def test_an_address_with_a_zone_is_none(variable: str, zone: str) -> None:
    with pytest.raises(InventoryError, match=variable):
        make_config(**{variable: f"fe80::1%{zone}"})


def test_the_same_for_those_who_have_a_gateway() -> None:
    servers = servers_of(HOSTS)
    nginx = render_for("nginx", servers)
    assert "upstream v100-chat {\n    least_conn;\n    server 10.0.0.1:8000 max_fails=3 fail_timeout=5s;\n" in nginx
    models = yaml.safe_load(render_for("litellm", servers))["model_list"]
    assert models[0]["litellm_params"]["api_base"] == "http://10.0.0.1:8000/v1"
    (target,) = json.loads(render_for("prometheus", servers))
    assert target == {"targets": ["10.0.0.1:8000", "10.0.0.2:8000"], "labels": {"instance_name": "chat", "model": "chat"}}


def litellm_keys(hosts: dict[str, Any]) -> list[str]:
    found = yaml.safe_load(render_for("litellm", servers_of(hosts)))["model_list"]
    return [model["litellm_params"]["api_key"] for model in found]


def test_litellm_is_told_of_keys_where_there_are_some_and_of_none_where_there_are_none() -> None:
    a, b = keyed("x" * 16), keyed("y" * 16)
    assert litellm_keys({"gpu1": a, "gpu2": a}) == ["os.environ/V100_CHAT_KEY"] * 2
    # It would send the key of $OPENAI_API_KEY, if there is one, and else fail.
    assert litellm_keys(HOSTS) == ["none", "none"]
    assert litellm_keys({"gpu1": a, "gpu2": HOSTS["gpu2"]}) == ["os.environ/V100_CHAT_KEY", "none"]
    assert litellm_keys({"gpu-1": a, "gpu.2": b, "gpu3": a}) == [
        "os.environ/V100_CHAT_GPU_1_KEY",
        "os.environ/V100_CHAT_GPU_2_KEY",
        "os.environ/V100_CHAT_GPU_1_KEY",
    ]
    for output in OUTPUTS:
        assert "x" * 16 not in render_for(output, servers_of({"gpu1": a}))


def test_prometheus_is_told_what_each_server_serves_and_how_it_is_asked() -> None:
    secure = {"gateway_placement": "host", "gateway_tls_certificate": "/etc/x.pem", "llm_server_allow_unauthenticated": True}
    hosts = {
        **HOSTS,
        "gpu3": host("10.0.0.3", settings={"served_model_name": 'a "name": [x] #y'}),
        "gpu4": ({"ansible_host": "fd00::4"}, make_config({"listen": "::"}, **secure)),
    }
    found = [(group["targets"], group["labels"]) for group in json.loads(render_for("prometheus", servers_of(hosts)))]
    assert found == [
        (["10.0.0.3:8000"], {"instance_name": "chat", "model": 'a "name": [x] #y'}),
        (["10.0.0.1:8000", "10.0.0.2:8000"], {"instance_name": "chat", "model": "chat"}),
        (["[fd00::4]:8000"], {"instance_name": "chat", "model": "chat", "__scheme__": "https"}),
    ]
    # To all servers of one upstream nginx speaks alike.
    with pytest.raises(InventoryError, match="gpu4 speak TLS"):
        render_for("nginx", servers_of(hosts))
    alone = render_for("nginx", servers_of({"gpu4": hosts["gpu4"]}))
    assert "# These speak TLS: `proxy_pass https://v100-chat;`" in alone and "    server [fd00::4]:8000 " in alone


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_nobody_else_reaches_is_left_out_and_said(output: str, tmp_path: Path) -> None:
    def told(listens: dict[str, str]) -> tuple[str, str]:
        shared = {"llama_cpp_backend": "cpu", "llm_server_allow_unauthenticated": True}
        hosts = {
            name: {"ansible_host": f"{name}.example", "llm_server_instances": {"chat": {"model": MODEL, "listen": listen}}}
            for name, listen in listens.items()
        }
        path = tmp_path / "hosts.yml"
        path.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": shared}}))
        result = CliRunner().invoke(cli, ["gateway", output, "-i", str(path)])
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    said, warned = told({"gpu1": "0.0.0.0", "gpu2": "127.0.0.1"})
    assert "gpu1.example" in said and "gpu2" not in said
    assert "gpu2/chat listens on loopback alone" in warned and "gpu1" not in warned
    _, warned = told({"gpu2": "::1"})
    assert "no host has an instance that another host reaches" in warned
    assert told({"gpu1": "0.0.0.0"})[1] == ""
