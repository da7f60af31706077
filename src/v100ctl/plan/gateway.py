"""The host's front: HAProxy on the public ports, the engines behind it on loopback.

With it a restart costs no request: those that run end first, and new ones wait. Without it an engine listens itself.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from v100ctl.catalog import Distribution
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.paths import content_dir
from v100ctl.plan.render import MANAGED_HEADER, render
from v100ctl.plan.rules.instance import port_rules
from v100ctl.plan.types import GatewayDecision, GatewayFront, Instance, ManagedFile, Rule
from v100ctl.plan.units import unit_name

ROLE = "gateway"
PACKAGE = "haproxy"
UNIT = "v100ctl-gateway.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
RUNTIME_FOLDER = "/run/v100ctl-gateway"
FOLDER = "/opt/v100ctl/gateway"
PROGRAM = f"{FOLDER}/gateway_control.py"
WAIT_SCRIPT = f"{FOLDER}/wait.lua"
CONFIG = "/etc/v100ctl/gateway.cfg"
#: A map for each front that asks for a key: the keys that open it, and the key that the engine is shown for each.
KEYS_FOLDER = "/etc/v100ctl/gateway"
FILES = (UNIT_PATH, PROGRAM, WAIT_SCRIPT, CONFIG)

#: An engine behind the gateway listens on its public port plus this, or minus it where there is no such port.
PORT_OFFSET = 10000
_LAST_PORT = 65535
#: Connections at once, idle ones included; two descriptors each.
CONNECTIONS = 4000
#: How long a stream may be silent: a prompt that fills a long context is read for many minutes.
STREAM_TIMEOUT_S = 3600


def engine_port(port: int) -> int:
    """Where the engine listens whose public port is ``port``."""
    return port + PORT_OFFSET if port + PORT_OFFSET <= _LAST_PORT else port - PORT_OFFSET


def behind(spec: InstanceSpec, config: HostConfig) -> InstanceSpec:
    """The instance as its engine is started: behind a gateway on loopback and another port, else as it is."""
    if config.gateway_placement != "host":
        return spec
    return spec.model_copy(update={"listen": "127.0.0.1", "port": engine_port(spec.port)})


def decide_gateway(
    config: HostConfig, facts: Facts, public: Mapping[str, InstanceSpec], instances: Mapping[str, Instance]
) -> tuple[GatewayDecision | None, tuple[ManagedFile, ...]]:
    """The gateway of a host, and its files; one that an earlier run has left and that is wanted no more is ``absent``.

    Args:
        config: What the inventory asks for.
        facts: What the probe found.
        public: The instances as the inventory has them.
        instances: The same as they are started.
    """
    maps = key_maps(facts)
    if config.gateway_placement != "host" or not instances:
        left = [path for path in FILES if path in facts.files and facts.files[path].kind == "file"]
        ours = any((facts.files[path].content or "").startswith(f"# {MANAGED_HEADER}\n") for path in left)
        return (GatewayDecision(UNIT, "absent", "", (), (*left, *maps)) if ours or maps else None), ()
    keys = tuple(_keys_file(name, public[name]) for name in sorted(instances) if public[name].keys)
    fronts = tuple(
        GatewayFront(
            instance=name,
            bind=address_of(public[name].listen, public[name].port),
            engine=address_of(instance.listen, instance.port),
            health_path=_path(instance.health_url),
            keys_file=_keys_path(name) if public[name].keys else "",
        )
        for name, instance in sorted(instances.items())
    )
    values: dict[str, Any] = {
        "fronts": fronts,
        "wait_s": config.gateway_wait_s,
        "certificate": config.gateway_tls_certificate,
    }
    digest, files = haproxy_files("gateway/haproxy.cfg.j2", values, keys)
    unwanted = tuple(path for path in maps if path not in {file.path for file in keys})
    return GatewayDecision(UNIT, "started", digest, fronts, unwanted), files


def key_maps(facts: Facts) -> tuple[str, ...]:
    """The files of keys that a gateway on the host has."""
    return tuple(path for path, file in sorted(facts.files.items()) if path.startswith(f"{KEYS_FOLDER}/") and file.kind == "file")


def haproxy_files(
    template: str, values: Mapping[str, Any], keys: tuple[ManagedFile, ...] = ()
) -> tuple[str, tuple[ManagedFile, ...]]:
    """The files of a HAProxy with a configuration of that template, and the digest by which a running one is known.

    Args:
        template: Of its configuration, below ``templates/``.
        values: What the template takes, beside what is the same for every gateway.
        keys: Files that have to be there before the configuration.
    """
    values = {
        **values,
        "connections": CONNECTIONS,
        "stream_timeout_s": STREAM_TIMEOUT_S,
        "runtime_folder": RUNTIME_FOLDER,
        "wait_script": WAIT_SCRIPT,
    }
    script = render("gateway/wait.lua.j2")
    digest = hashlib.sha256((render(template, **values, digest="") + script).encode()).hexdigest()[:16]
    unit = render(
        "systemd/gateway.service.j2",
        config=CONFIG,
        program=PROGRAM,
        runtime_folder=RUNTIME_FOLDER,
        runtime_name=RUNTIME_FOLDER.rpartition("/")[2],
        connections=CONNECTIONS,
    )
    return digest, (
        ManagedFile(PROGRAM, (content_dir() / "roles/gateway/files/gateway_control.py").read_text("utf-8"), ROLE, mode="0755"),
        ManagedFile(WAIT_SCRIPT, script, ROLE),
        *keys,
        ManagedFile(CONFIG, render(template, **values, digest=digest), ROLE),
        ManagedFile(UNIT_PATH, unit, ROLE),
    )


def _path(url: str) -> str:
    # With its query: an engine may want one.
    parts = urlsplit(url, allow_fragments=False)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def _keys_path(instance: str) -> str:
    return f"{KEYS_FOLDER}/{instance}.keys"


def _keys_file(name: str, spec: InstanceSpec) -> ManagedFile:
    # For root alone: HAProxy reads it before it becomes another user.
    lines = [f"# {MANAGED_HEADER}"]
    # vLLM knows one key; the others are this gateway's own.
    lines += [f"{key} {spec.keys[0] if spec.engine == 'vllm' else key}" for key in spec.keys]
    return ManagedFile(_keys_path(name), "\n".join(lines) + "\n", ROLE, mode="0600", instance=name, secret=True)


def address_of(listen: str, port: int) -> str:
    """``ADDRESS:PORT``, with brackets where the address holds colons."""
    return f"[{listen}]:{port}" if ":" in listen else f"{listen}:{port}"


def is_ip_address(address: str) -> bool:
    """Whether it is the address itself and no name that has to be looked up."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def host_rules(config: HostConfig, facts: Facts, distribution: Distribution | None) -> Iterator[Rule]:
    """Rules about the host that a gateway, its own or the fleet's, is to run on."""
    if config.gateway_placement == "none":
        return
    nearest = "`gateway_placement: none`: engines listen themselves, and ask for keys themselves"
    if config.gateway_placement == "fleet":
        nearest = "a host of Debian or of a newer Ubuntu for the gateway"
    if distribution is not None and "gateway" in distribution.refused:
        yield Rule("gateway-unsupported", "refuse", f"{distribution.name}: {distribution.refused['gateway']}", nearest)
    elif facts.selinux == "enforcing":
        yield Rule(
            "gateway-selinux",
            "refuse",
            "SELinux confines HAProxy here: it binds and connects to few ports unless `haproxy_connect_any` is on, and nobody "
            f"has tried whether its policy lets it use {RUNTIME_FOLDER} and {FOLDER}",
            nearest,
        )


def gateway_rules(
    config: HostConfig,
    facts: Facts,
    public: Mapping[str, InstanceSpec],
    going: Collection[str],
    leaving: Collection[int] = (),
) -> Iterator[Rule]:
    """Rules about the ports of a host with a gateway.

    ``going``: units that are stopped before it starts, ``leaving``: processes of others that are.
    """
    if config.gateway_placement != "host":
        return
    ports = {spec.port: name for name, spec in public.items()}
    # Every engine of ours has left its public port before the gateway takes it.
    ours = {UNIT, *(unit_name(name) for name in public), *going}
    for name, spec in sorted(public.items()):
        inner = engine_port(spec.port)
        if inner in ports:
            yield Rule(
                "gateway-port-twice",
                "refuse",
                f"behind the gateway the engine listens on port {inner} (its own {spec.port} and {PORT_OFFSET}), "
                f"which is the public port of {ports[inner]}",
                f"another `port` for {ports[inner]}",
                instance=name,
            )
        yield from port_rules(name, spec, facts, ours, leaving)
