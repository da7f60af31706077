"""``host.json``: what was applied to a host, without secrets and without anything measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from v100ctl.findings import SEAL, seal
from v100ctl.plan.types import HostPlan, ManagedFile

HOST_JSON = "/etc/v100ctl/host.json"


def with_host_json(decided: HostPlan) -> HostPlan:
    """Add ``host.json``: what was applied, without secrets and without anything measured."""
    # What a step reads is planned until the step is done, and the document has to be the same before and after.
    read_by_steps = {path for item in decided.models for path in item.source.get("inputs", ())}
    document: dict[str, Any] = {
        "schema": "v100ctl/host/1",
        "comment": "Managed by v100ctl. Changes are overwritten.",
        "packages": [*decided.packages, *(decided.monitoring.packages if decided.monitoring else ())],
        "releases": [{"engine": item.engine, "build_id": item.build_id, "path": item.path} for item in decided.releases],
        "models": [
            {"path": item.path, "sha256": item.sha256}
            for item in decided.models
            if not any(file.path in read_by_steps for file in item.files)
        ],
        "files": {
            item.path: {
                # A digest of a key tells whoever can try keys which is the right one, and everybody may read this file.
                **({"secret": True} if item.secret else {"sha256": hashlib.sha256(item.content.encode()).hexdigest()}),
                "mode": item.mode,
                "owner": item.owner,
                "group": item.group,
            }
            for item in decided.files
        },
        "instances": {
            item.name: {
                "unit": item.unit,
                "engine": item.engine,
                "argv": list(item.argv),
                "digest": item.digest,
                "gpus": list(item.gpus),
                "release_path": item.release_path,
                "model_path": item.model_path,
                "listen": item.listen,
                "port": item.port,
                "health_url": item.health_url,
                **({"api_keys_file": item.api_keys_file} if item.api_keys_file else {}),
            }
            for item in decided.instances
        },
    }
    if decided.tuning is not None:
        # One that is missing later has to be told from one that never was.
        document["cards"] = [card.pci_address for card in decided.tuning.cards]
    if decided.gateway is not None and decided.gateway.state == "started":
        document["gateway"] = {
            "unit": decided.gateway.unit,
            "fronts": {front.instance: {"bind": front.bind, "engine": front.engine} for front in decided.gateway.fronts},
        }
    if decided.firewall is not None and decided.firewall.ports:
        # Whoever has opened a port closes it.
        document["firewall"] = {"kind": decided.firewall.kind, "ports": list(decided.firewall.ports)}
    if decided.driver is not None:
        document["driver"] = {"branch": decided.driver.branch, "packages": list(decided.driver.packages)}
    # An edited record must not pass for what was applied.
    document[SEAL] = seal(document)
    content = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return dataclasses.replace(decided, host_json=ManagedFile(HOST_JSON, content, role="llm_server"))
