"""Where the metrics of a fleet are, for Prometheus.

The servers are those that a gateway is told of (:mod:`v100ctl.plan.fleet_gateway`), and beside them are the exporters of hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from v100ctl.catalog import Catalog
from v100ctl.fleet import GatewayServer, HostConfig
from v100ctl.plan import present_instances
from v100ctl.plan.fleet_gateway import reached_at, server_name, servers_of
from v100ctl.plan.gateway import address_of
from v100ctl.plan.profiles import applied as with_profile
from v100ctl.plan.render import MANAGED_HEADER

NODE_JOB = "v100ctl-node"
DCGM_JOB = "v100ctl-dcgm"
#: Each instance has a job of its own: it may ask for a key of its own.
ENGINE_JOB = "v100ctl-engine"

#: What an audit has written speaks of other hosts than the one whose exporter serves it.
_AUDIT_LABELS = [
    {
        "source_labels": ["__name__", "exported_host"],
        "regex": "v100ctl_audit_.+;(.+)",
        "target_label": "host",
        "replacement": "$1",
    },
    {"source_labels": ["__name__"], "regex": "v100ctl_audit_.+", "target_label": "exported_host", "replacement": ""},
]

Hosts = Mapping[str, tuple[Mapping[str, Any], HostConfig]]


@dataclass(frozen=True)
class Engines:
    """Servers of one name that are asked in one way. ``key`` opens them, empty where they ask for none."""

    instance: str
    path: str
    servers: tuple[GatewayServer, ...]
    #: Of its file, below the folder of keys; unique.
    key_name: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"Engines({self.instance!r}, {self.path!r}, {len(self.servers)} servers)"


def engines_of(hosts: Hosts, catalog: Catalog) -> tuple[Engines, ...]:
    """The servers that tell metrics, by name and by what opens them."""
    found: dict[tuple[str, str, bool, str], list[GatewayServer]] = {}
    for name, (variables, config) in sorted(hosts.items()):
        specs = present_instances(config)
        for server in servers_of({name: (variables, config)}):
            spec, _ = with_profile(server.instance, specs[server.instance], catalog)
            row = catalog.monitoring.engines.get(spec.engine)
            if row is None or spec.settings.metrics is False:
                continue
            key = spec.keys[0] if spec.keys else ""
            found.setdefault((server.instance, row.path, server.tls, key), []).append(server)
    names = [instance for instance, _, _, key in found if key]
    engines = []
    for (instance, path, _, key), servers in found.items():
        # Where like-named servers have different keys, the first host tells them apart.
        key_name = "" if not key else f"{instance}.key" if names.count(instance) == 1 else f"{instance}-{servers[0].host}.key"
        engines.append(Engines(instance, path, tuple(servers), key_name, key))
    return tuple(engines)


def _exporters(hosts: Hosts, *, dcgm: bool) -> Iterator[dict[str, Any]]:
    for name, (variables, config) in sorted(hosts.items()):
        if not config.monitoring_enabled or (dcgm and not config.monitoring_dcgm):
            continue
        address = reached_at(name, variables, config)
        port = config.monitoring_dcgm_port if dcgm else config.monitoring_port
        yield {"targets": [address_of(address, port)], "labels": {"host": server_name(name)}}


def unreachable_of(hosts: Hosts, catalog: Catalog) -> list[str]:
    """Targets that listen on loopback alone, in words: only a Prometheus on that host reaches them."""
    words = [
        f"the exporters of {name} (`monitoring_listen`)"
        for name, (_, config) in sorted(hosts.items())
        if config.monitoring_enabled and (config.monitoring_listen == "::1" or config.monitoring_listen.startswith("127."))
    ]
    words += [
        f"{server.host}/{engines.instance} (`listen`)"
        for engines in engines_of(hosts, catalog)
        for server in engines.servers
        if server.on_loopback
    ]
    return words


def scrape_configs(hosts: Hosts, catalog: Catalog, *, keys_folder: str) -> list[dict[str, Any]]:
    """The jobs."""
    jobs: list[dict[str, Any]] = []
    for name, dcgm in ((NODE_JOB, False), (DCGM_JOB, True)):
        targets = list(_exporters(hosts, dcgm=dcgm))
        if targets:
            jobs.append(
                {"job_name": name, "static_configs": targets, **({} if dcgm else {"metric_relabel_configs": _AUDIT_LABELS})}
            )
    engines = engines_of(hosts, catalog)
    names = [item.instance for item in engines]
    for item in engines:
        alone = names.count(item.instance) == 1
        job: dict[str, Any] = {
            "job_name": f"{ENGINE_JOB}-{item.instance}" + ("" if alone else f"-{item.servers[0].host}"),
            "metrics_path": item.path,
            "scheme": "https" if item.servers[0].tls else "http",
        }
        if item.key_name:
            job["authorization"] = {"credentials_file": f"{keys_folder.rstrip('/')}/{item.key_name}"}
        job["static_configs"] = [
            {"targets": [address_of(server.address, server.port)], "labels": labels_of(server)} for server in item.servers
        ]
        jobs.append(job)
    return jobs


def labels_of(server: GatewayServer) -> dict[str, str]:
    """What a server's series carry, beside Prometheus' own labels."""
    return {"host": server.host, "instance_name": server.instance, "model": server.model}


def render_prometheus(hosts: Hosts, catalog: Catalog, *, keys_folder: str, rule_files: Sequence[str]) -> str:
    """A whole configuration; whoever has one takes its jobs and its rules."""
    document = {"rule_files": list(rule_files), "scrape_configs": scrape_configs(hosts, catalog, keys_folder=keys_folder)}
    return f"# {MANAGED_HEADER}\n" + yaml.safe_dump(document, sort_keys=False)
