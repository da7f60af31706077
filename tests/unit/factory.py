"""Facts and configurations that unit tests start from: a bare, healthy Debian 12 host and one practice instance."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import date
from typing import Any

from v100ctl.compare import keyed_digest
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, parse_config
from v100ctl.plan import HostPlan, plan

SALT = "00" * 16
AS_OF = date(2026, 11, 29)
GIB = 1024**3

BARE_FACTS: dict[str, Any] = {
    "schema": "v100ctl/facts/1",
    "hostname": "h1",
    "machine": "x86_64",
    "kernel": "6.1.0-57-amd64",
    "distribution": {"id": "debian", "version_id": "12", "codename": "bookworm", "name": "Debian GNU/Linux 12 (bookworm)"},
    "libc": {"name": "glibc", "version": "2.36"},
    "cpu": {
        "model": "Intel(R) Xeon(R) Gold 6148",
        "logical_count": 40,
        "physical_count": 20,
        "usable_count": 40,
        "level": "x86-64-v4",
    },
    "memory": {"total_bytes": 64 * GIB, "available_bytes": 60 * GIB},
    "filesystems": {
        "/opt/v100ctl": {"mount": "/", "total_bytes": 100 * GIB, "free_bytes": 50 * GIB},
        "/var/lib/v100ctl": {"mount": "/", "total_bytes": 100 * GIB, "free_bytes": 50 * GIB},
    },
    "systemd": {"version": 252, "state": "running"},
    "packages": {"manager": "dpkg", "installed": {"libc6": "2.36-9"}},
}

MODEL: dict[str, Any] = {"url": "https://models.example/tiny.gguf", "sha256": "ab" * 32, "size_bytes": 100_000_000}


def merge(base: Any, change: Any) -> Any:
    """``base`` with ``change`` merged in, mapping by mapping."""
    if isinstance(base, Mapping) and isinstance(change, Mapping):
        merged = dict(base)
        for key, value in change.items():
            merged[key] = merge(base.get(key), value)
        return merged
    return copy.deepcopy(change)


def make_facts(**changes: Any) -> Facts:
    """The bare host's facts with some of them changed."""
    return Facts.model_validate(merge(BARE_FACTS, changes))


def make_config(instance: Mapping[str, Any] | None = None, **variables: Any) -> HostConfig:
    """The configuration of a CPU host with one instance ``chat``; ``instance`` is merged into it."""
    chat = merge({"model": MODEL}, instance or {})
    return parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": {"chat": chat}, **variables})


def make_plan(facts: Facts | None = None, config: HostConfig | None = None) -> HostPlan:
    """The plan of the bare host."""
    return plan("h1", config or make_config(), facts or make_facts(), as_of=AS_OF)


def applied_facts(decided: HostPlan, **changes: Any) -> Facts:
    """Facts of a host on which ``decided`` was applied and serves."""
    import hashlib
    import json

    document: dict[str, Any] = {
        "packages": {"installed": {name: "1" for name in decided.packages}},
        "accounts": {"v100": {"uid": 999, "gid": 999}},
        "releases": [{"path": item.path, "engine": item.engine, "build_id": item.build_id} for item in decided.releases],
        "models": {
            item.path: {"exists": True, "size_bytes": item.size_bytes or 1, "sha256": item.sha256} for item in decided.models
        },
        "files": {
            item.path: {"kind": "directory", "mode": item.mode, "owner": item.owner, "group": item.group}
            for item in decided.directories
        }
        | {
            item.path: {
                "kind": "file",
                **(
                    {"keyed_digest": keyed_digest(SALT, item.content)}
                    if item.secret
                    else {"sha256": hashlib.sha256(item.content.encode()).hexdigest(), "content": item.content}
                ),
                "mode": item.mode,
                "owner": item.owner,
                "group": item.group,
            }
            for item in decided.all_files
        },
        "secret_salt": SALT,
        "host_json": {"document": json.loads(decided.host_json.content) if decided.host_json else None},
        "units": {
            unit.name: {
                "load_state": "loaded",
                "active_state": "active",
                "sub_state": "running",
                "unit_file_state": "enabled",
                "main_pid": 100 + number,
            }
            for number, unit in enumerate(decided.units)
            if unit.state == "started"
        }
        | {
            name: {"load_state": "loaded", "active_state": "active", "sub_state": "running", "unit_file_state": "enabled"}
            for name in decided.upkeep.units
        },
        "processes": [
            {
                "pid": 100 + number,
                "unit": item.unit,
                "executable": item.argv[0],
                "argv": list(item.argv),
                "environ": dict(item.environment),
                "keys_current": True if item.api_keys_file else None,
                "user": "v100",
            }
            for number, item in enumerate(decided.instances)
        ],
        "listeners": [
            {"address": item.listen, "port": item.port, "pid": 100 + number, "command": "llama-server", "unit": item.unit}
            for number, item in enumerate(decided.instances)
        ],
        "health": {item.name: {"status": 200} for item in decided.instances},
    }
    return Facts.model_validate(merge(merge(BARE_FACTS, document), changes))
