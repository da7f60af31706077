"""The fleet's front: HAProxy on a host of its own, before the instances of one name on all hosts.

Which servers there are follows from the inventory (:func:`servers_of`). What stands here beside the configuration of HAProxy are
the same servers in the words of others: nginx, LiteLLM and Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from v100ctl.catalog import Distribution
from v100ctl.errors import InventoryError
from v100ctl.facts import Facts
from v100ctl.fleet import GatewayServer, HostConfig, InstanceSpec, host_address
from v100ctl.plan.adoption import ANYWHERE, holding, overlap, who
from v100ctl.plan.gateway import PACKAGE, UNIT, address_of, haproxy_files, is_ip_address, key_maps
from v100ctl.plan.keys import is_loopback
from v100ctl.plan.render import MANAGED_HEADER
from v100ctl.plan.types import GatewayDecision, GatewayFront, ManagedFile, Rule
from v100ctl.plan.units import unit_name

#: Has the authorities that the host trusts, under this name everywhere.
CA_PACKAGE = "ca-certificates"
#: Where people, and a Prometheus on the host, see the statistics.
STATS_ADDRESS = "127.0.0.1"
#: Ways to print the servers for those who have a gateway of their own.
OUTPUTS = ("nginx", "litellm", "prometheus")


def server_name(host: str) -> str:
    """What a host of the inventory is called where its name becomes a word of somebody's configuration."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", host)


def reached_at(host: str, variables: Mapping[str, Any], config: HostConfig) -> str:
    """Where other hosts reach a host of the inventory: as SSH does, unless it says otherwise."""
    # The second is Ansible's older name for the first.
    return config.gateway_address or str(variables.get("ansible_host") or variables.get("ansible_ssh_host") or host)


def servers_of(hosts: Mapping[str, tuple[Mapping[str, Any], HostConfig]]) -> tuple[GatewayServer, ...]:
    """The servers that a fleet's gateway is in front of.

    Args:
        hosts: Variables and configuration of every host of the inventory, by name.

    Raises:
        InventoryError: A host has an instance, and nothing to reach it by from another host.
    """
    # Which path tells an engine's health is decided where instances are planned.
    from v100ctl.plan import health_path, present_instances

    found = []
    groups: dict[str, list[frozenset[str]]] = {}
    for name, (variables, config) in sorted(hosts.items()):
        address = reached_at(name, variables, config)
        for instance, spec in sorted(present_instances(config).items()):
            try:
                host_address(address)
            except ValueError as error:
                raise InventoryError(
                    f"host {name}: where other hosts reach {instance} {error}",
                    hint="`gateway_address: ADDRESS` for that host, which SSH does not look at",
                ) from error
            # Which ones the keys are stands nowhere, nor anything that could be compared with guesses.
            known = groups.setdefault(instance, [frozenset()])
            keys = frozenset(spec.keys)
            if keys not in known:
                known.append(keys)
            found.append(
                GatewayServer(
                    instance=instance,
                    host=server_name(name),
                    address=address,
                    port=spec.port,
                    health_path=health_path(spec, config) or "/health",
                    tls=config.gateway_placement == "host" and bool(config.gateway_tls_certificate),
                    on_loopback=is_loopback(spec.listen),
                    listens_on="" if spec.listen in ANYWHERE else spec.listen,
                    name="" if is_ip_address(name) or server_name(name) != name else name,
                    keys_group=known.index(keys),
                    model=spec.settings.served_model_name or instance,
                    model_digest=spec.model.digest,
                )
            )
    return tuple(found)


def fronts_of(config: HostConfig) -> dict[str, tuple[GatewayServer, ...]]:
    """The servers by the instance's name, which is what they have in common."""
    fronts: dict[str, list[GatewayServer]] = {}
    for server in config.gateway_servers:
        fronts.setdefault(server.instance, []).append(server)
    return {name: tuple(servers) for name, servers in sorted(fronts.items())}


def _port(config: HostConfig, instance: str, servers: Sequence[GatewayServer]) -> int:
    return config.gateway_ports.get(instance) or servers[0].port


def decide(
    config: HostConfig, facts: Facts, distribution: Distribution | None
) -> tuple[GatewayDecision | None, tuple[ManagedFile, ...], tuple[str, ...]]:
    """The gateway of the fleet, its files, and the packages that it needs; ``None`` where it has no server."""
    servers = fronts_of(config)
    if not servers:
        return None, (), ()
    certified = any(server.tls for server in config.gateway_servers) and not config.gateway_server_ca
    fronts = tuple(
        GatewayFront(
            instance=name,
            bind=address_of(config.gateway_listen, _port(config, name, found)),
            engine="",
            health_path=found[0].health_path,
            servers=tuple(server.host for server in found),
        )
        for name, found in servers.items()
    )
    values: dict[str, Any] = {
        "fronts": [(front, [_line(server) for server in servers[front.instance]]) for front in fronts],
        "wait_s": config.gateway_wait_s,
        "certificate": config.gateway_tls_certificate,
        # HAProxy's own word for it, `@system-ca`, is not known to 2.2.
        "server_ca": config.gateway_server_ca or (distribution.ca_bundle if distribution else ""),
        "stats_bind": address_of(STATS_ADDRESS, config.gateway_stats_port) if config.gateway_stats_port else "",
    }
    digest, files = haproxy_files("gateway/fleet.cfg.j2", values)
    # Keys are the servers' own matter: those that a gateway of this host alone has left are loaded by nobody.
    decision = GatewayDecision(UNIT, "started", digest, fronts, key_maps(facts))
    return decision, files, (PACKAGE, *((CA_PACKAGE,) if certified else ()))


def certified_name(server: GatewayServer) -> str:
    """What a server's certificate has to be for; empty where it has no name: HAProxy looks at no addresses in certificates."""
    return server.name if is_ip_address(server.address) else server.address


def _line(server: GatewayServer) -> dict[str, Any]:
    return {
        "name": server.host,
        "address": address_of(server.address, server.port),
        "health_path": server.health_path,
        "is_name": not is_ip_address(server.address),
        "tls": server.tls,
        "certified_name": certified_name(server),
    }


def fleet_rules(config: HostConfig, facts: Facts, going: Collection[str] = ()) -> Iterator[Rule]:
    """Rules about the gateway of a fleet. ``going``: units that are stopped before it starts."""
    if config.gateway_placement != "fleet":
        return
    fronts = fronts_of(config)
    if not fronts:
        yield Rule(
            "gateway-fleet-empty",
            "refuse",
            "the gateway of the fleet has no server: no host of the inventory has an instance",
            "`llm_server_instances` for the hosts that serve, or `gateway_servers`",
        )
    loopback = is_loopback(config.gateway_listen)
    if fronts and not loopback and not config.llm_server_allow_unauthenticated and not config.gateway_tls_certificate:
        yield Rule(
            "gateway-fleet-open",
            "info",
            f"the gateway listens on {config.gateway_listen} and passes keys through as they come: who may use a server is what "
            "the server itself asks for",
            "`gateway_tls_certificate`, so that nobody on the way reads a key",
        )
    unknown = sorted(set(config.gateway_ports) - set(fronts))
    if fronts and unknown:
        yield Rule(
            "gateway-fleet-port-unused",
            "warn",
            f"`gateway_ports` names {', '.join(unknown)}, which no server is called",
            f"the names of its servers: {', '.join(fronts)}",
        )
    yield from _port_rules(config, fronts, facts, going)
    for name, servers in fronts.items():
        yield from _server_rules(name, servers)


def _port_rules(
    config: HostConfig, fronts: Mapping[str, Sequence[GatewayServer]], facts: Facts, going: Collection[str]
) -> Iterator[Rule]:
    """Rules about the ports that the gateway listens on."""
    # HAProxy takes a port twice without a word, and each connection goes to one or the other.
    taken: dict[int, str] = {}
    if config.gateway_stats_port and overlap(config.gateway_listen, STATS_ADDRESS):
        taken[config.gateway_stats_port] = "its statistics (`gateway_stats_port`)"
    own = {name: spec for name, spec in config.llm_server_instances.items() if spec.state == "present"}
    ours = {UNIT, *(unit_name(name) for name in own), *going}
    for name, servers in fronts.items():
        ports = {server.port for server in servers}
        if len(ports) > 1 and name not in config.gateway_ports:
            yield Rule(
                "gateway-fleet-port",
                "refuse",
                f"its servers have different ports ({', '.join(map(str, sorted(ports)))}), so the gateway's own is not known",
                f"`gateway_ports: {{{name}: {servers[0].port}}}`",
                instance=name,
            )
        port = _port(config, name, servers)
        holder = next(
            (f"{own_name} of this host" for own_name, spec in own.items() if _same_place(spec, config.gateway_listen, port)), None
        )
        if port in taken or holder:
            yield Rule(
                "gateway-fleet-port",
                "refuse",
                f"the gateway would listen on port {port} for {taken.get(port, holder)} and for {name}"
                if port in taken
                else f"the gateway would listen on port {port} for {name}, which {holder} listens on",
                f"another port in `gateway_ports: {{{name}: ...}}`",
                instance=name,
            )
        taken.setdefault(port, name)
        yield from _taken(config.gateway_listen, port, facts, ours, f"another port in `gateway_ports: {{{name}: ...}}`", name)
    if fronts and config.gateway_stats_port:
        yield from _taken(STATS_ADDRESS, config.gateway_stats_port, facts, ours, "another `gateway_stats_port`, or 0", None)


def _same_place(spec: InstanceSpec, listen: str, port: int) -> bool:
    return spec.port == port and overlap(spec.listen, listen)


def _taken(listen: str, port: int, facts: Facts, ours: Collection[str], nearest: str, instance: str | None) -> Iterator[Rule]:
    for listener in holding(listen, port, facts, ours):
        occupant = facts.occupant(listener.pid)
        owner = f"`{listener.command}` (pid {listener.pid})" if listener.pid else "another process"
        yield Rule(
            "gateway-fleet-port-taken",
            "refuse",
            f"port {port} on {listener.address} is the gateway's, and taken by {who(occupant) if occupant else owner}",
            nearest,
            instance=instance,
        )
        break


def _server_rules(name: str, servers: Sequence[GatewayServer]) -> Iterator[Rule]:
    """Rules about the servers behind one front."""
    hosts = [server.host for server in servers]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        yield Rule(
            "gateway-fleet-host-twice",
            "refuse",
            f"{', '.join(twice)} stands for more than one server: each needs a name of its own, of letters, digits and `_.-`",
            "another name in the inventory, or another `host` in `gateway_servers`",
            instance=name,
        )
    unreachable = [server.host for server in servers if server.on_loopback]
    if unreachable:
        yield Rule(
            "gateway-fleet-loopback",
            "refuse" if len(unreachable) == len(servers) else "warn",
            f"{', '.join(unreachable)} listen on loopback alone, where no other host reaches them",
            "`listen:` with an address of the network that the gateway is in",
            instance=name,
        )
    for server in servers:
        elsewhere = server.listens_on and not server.on_loopback and server.listens_on != server.address
        if elsewhere and is_ip_address(server.address):
            yield Rule(
                "gateway-fleet-address",
                "warn",
                f"{server.host} listens on {server.listens_on} alone, and the gateway would reach it at {server.address}",
                f"`gateway_address: {server.listens_on}` for that host, or another `listen:`",
                instance=name,
            )
    nameless = [server.host for server in servers if server.tls and not certified_name(server)]
    if nameless:
        yield Rule(
            "gateway-fleet-certificate",
            "refuse",
            f"{', '.join(nameless)} speak TLS and have no name: HAProxy looks at no addresses in a certificate",
            "`gateway_address: NAME` for such a host, as its certificate has it",
            instance=name,
        )
    paths = sorted({server.health_path for server in servers})
    if len(paths) > 1:
        yield Rule(
            "gateway-fleet-health-differs",
            "refuse",
            f"its servers tell their health at different paths ({', '.join(paths)}), and the gateway asks all of one name at one",
            "one name for each engine",
            instance=name,
        )
    if len({server.keys_group for server in servers}) > 1:
        yield Rule(
            "gateway-fleet-keys-differ",
            "warn",
            "its servers have different `api_keys`: a request gets an answer from some and 401 from others, with the same key",
            "the same `api_keys` for all of one name",
            instance=name,
        )
    digests = {server.model_digest for server in servers if server.model_digest}
    if len(digests) > 1:
        yield Rule(
            "gateway-fleet-models-differ",
            "warn",
            f"its servers have {len(digests)} different models: the same question gets answers of one or the other",
            "one name for each model",
            instance=name,
        )


# --- for those who have a gateway of their own --------------------------------------------------------------------------------


def reachable(servers: Iterable[GatewayServer]) -> tuple[GatewayServer, ...]:
    """Those that another host can reach: who has no health checks would send them requests all the same."""
    return tuple(server for server in servers if not server.on_loopback)


def render_for(output: str, servers: Sequence[GatewayServer]) -> str:
    """The servers in the words of ``nginx`` (upstreams), ``litellm`` (its proxy) or ``prometheus`` (``file_sd``).

    Raises:
        InventoryError: There are no words for them.
    """
    by_name: dict[str, list[GatewayServer]] = {}
    for server in servers:
        by_name.setdefault(server.instance, []).append(server)
    if output == "nginx":
        return _nginx(by_name)
    if output == "litellm":
        return _litellm(by_name)
    return _prometheus(servers)


def _prometheus(servers: Sequence[GatewayServer]) -> str:
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for server in servers:
        groups.setdefault((server.instance, server.model, server.tls), []).append(address_of(server.address, server.port))
    targets = [
        {
            "targets": found,
            # A job asks all of its targets in one way, unless they say otherwise.
            "labels": {"instance_name": name, "model": model, **({"__scheme__": "https"} if tls else {})},
        }
        for (name, model, tls), found in sorted(groups.items())
    ]
    return json.dumps(targets, indent=2) + "\n"


def _nginx(by_name: Mapping[str, Sequence[GatewayServer]]) -> str:
    lines = [
        f"# {MANAGED_HEADER}",
        "# A stream needs `proxy_buffering off;` and `proxy_read_timeout 3600s;` where it is passed on.",
        "# A prompt of more than 1 MiB needs a greater `client_max_body_size`.",
    ]
    for name, servers in sorted(by_name.items()):
        secure = [server.host for server in servers if server.tls]
        if secure and len(secure) < len(servers):
            raise InventoryError(
                f"of the servers of {name} {', '.join(secure)} speak TLS and others not; nginx asks all of an upstream alike",
                hint="`gateway_tls_certificate` on all of their hosts or on none, or `--limit`",
            )
        if secure:
            lines.append(
                f"# These speak TLS: `proxy_pass https://v100-{name};`, with `proxy_ssl_verify on;` and what that needs."
            )
        lines += [f"upstream v100-{name} {{", "    least_conn;"]
        lines += [f"    server {address_of(server.address, server.port)} max_fails=3 fail_timeout=5s;" for server in servers]
        lines += ["}"]
    return "\n".join(lines) + "\n"


def _litellm(by_name: Mapping[str, Sequence[GatewayServer]]) -> str:
    models = [
        {
            "model_name": server.model,
            "litellm_params": {
                "model": f"openai/{server.model}",
                "api_base": f"{'https' if server.tls else 'http'}://{address_of(server.address, server.port)}/v1",
                "api_key": key,
            },
        }
        for _, servers in sorted(by_name.items())
        for server, key in zip(servers, _litellm_keys(servers), strict=True)
    ]
    document = {"model_list": models, "router_settings": {"routing_strategy": "least-busy"}}
    return f"# {MANAGED_HEADER}\n" + yaml.safe_dump(document, sort_keys=False)


def _litellm_keys(servers: Sequence[GatewayServer]) -> Iterator[str]:
    """What stands for the key of each server of one name: LiteLLM reads the key itself from its own environment."""
    first = {server.keys_group: server for server in reversed(servers)}
    several = len([group for group in first if group]) > 1
    for server in servers:
        # Where like-named servers have different keys, the first host tells them apart.
        words = (server.instance, first[server.keys_group].host) if several else (server.instance,)
        variable = "_".join(["V100", *(re.sub(r"[^A-Z0-9]", "_", word.upper()) for word in words), "KEY"])
        # A client of OpenAI's needs some key, and would send that of $OPENAI_API_KEY to who asks for none.
        yield f"os.environ/{variable}" if server.keys_group else "none"
