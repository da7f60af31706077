"""The units of all profiles as they land on a host.

``python -m tests.unit.plan.golden`` writes them anew, to be read as a diff.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.unit.factory import AS_OF
from v100ctl.catalog import load_catalog
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import DIGEST_VARIABLE, plan
from v100ctl.plan.render import render
from v100ctl.plan.units import DEVICES_UNIT

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
#: A host whose card at NUMA node 1 has 32 GB: every profile fits there.
HOST = HERE / "hosts/v100-pcie-32gb-x2-ubuntu-24.04-driver-580.json"


def units() -> dict[str, str]:
    """The unit of each profile that is planned with a command line.

    What is hashed has a word in its place: what a release is compiled from is not a unit's business.
    """
    facts = Facts.model_validate_json(HOST.read_bytes())
    found = {}
    for name, profile in load_catalog().profiles.items():
        model: dict[str, Any] = {"path": f"/srv/models/{name}", "sha256": "ab" * 32}
        instance = {"engine": profile.engine, "profile": name, "model": model, "gpus": [facts.gpus[1].uuid]}
        config = parse_config("h1", {"llm_server_instances": {"chat": instance}})
        decided = plan("h1", config, facts, as_of=AS_OF)
        for file in decided.files:
            if file.instance == "chat" and file.path.endswith(".service"):
                content = re.sub(r"(/engines/[a-z_]+/[^/]+)-[0-9a-f]{12}(?=/)", r"\1-BUILD", file.content)
                found[name] = re.sub(rf"(?<={DIGEST_VARIABLE}=)[0-9a-f]{{16}}", "DIGEST", content)
    return found


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / DEVICES_UNIT).write_text(render("systemd/devices.service.j2"), encoding="utf-8")
    for name, content in units().items():
        (GOLDEN / f"{name}.service").write_text(content, encoding="utf-8")
