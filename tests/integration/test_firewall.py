"""The public port in the firewalls of a host: opened, found closed by the audit, and closed when its instance goes.

What takes the packets is the kernel of the machine, whose tables each host has to itself.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import shapes
from v100ctl.lab.containers import put_file
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image

from .hosts import on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

MODEL = "/srv/models/x.gguf"
SERVER = """#!/usr/bin/python3
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "it is a fast processor"}
        self.answer({"choices": [{"message": message}], "usage": {"completion_tokens": 5}})


HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
#: Brings a firewall up with a way in for SSH.
SETUP = {
    "ufw": "apt-get install -y --no-install-recommends ufw && ufw allow 22/tcp && ufw --force enable",
    # It reads the names of protocols from netbase's /etc/protocols.
    "firewalld": "apt-get install -y --no-install-recommends firewalld netbase && systemctl enable --now firewalld",
}
SHOWN = {
    "ufw": "ufw status | awk '$1 ~ /^[0-9]+\\/tcp$/ {print $1}' | sort -u",
    "firewalld": "firewall-cmd --list-ports; firewall-cmd --permanent --list-ports",
}
CLOSE = {
    "ufw": "ufw delete allow proto tcp to any port 8000",
    "firewalld": "firewall-cmd --remove-port=8000/tcp",
}


@pytest.fixture
def start_host(lab: Lab, lab_reporter: Reporter, tmp_path: Path) -> Iterator[Callable[[str], RunningHost]]:
    names: list[str] = []
    model = tmp_path / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)

    def start(firewall: str) -> RunningHost:
        name = f"test-{os.getpid()}-{firewall}"
        names.append(name)
        host = lab.up(LabHost(name, owner=run_identity()), ensure_image(lab.client, lab_reporter), lab_reporter)
        on_host(host, "mkdir -p /srv/models")
        put_file(host.container, MODEL, model.read_bytes(), mode=0o644)
        on_host(host, f"apt-get update -qq && DEBIAN_FRONTEND=noninteractive {SETUP[firewall]}")
        return host

    yield start
    if names:
        lab.down(*names)


def inventory(folder: Path, host: RunningHost, **changed: Any) -> Path:
    archive = folder / "engine.tar.gz"
    if not archive.exists():
        with tarfile.open(archive, "w:gz") as packed:
            member = tarfile.TarInfo("bin/server")
            member.size, member.mode = len(SERVER), 0o755
            packed.addfile(member, io.BytesIO(SERVER.encode()))
    source = {"from_controller": str(archive), "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(), "kind": "archive"}
    definition = {
        "source": source,
        "backend": "cpu",
        "argv": ["{release}/bin/server", "{listen}", "{port}"],
        "health_path": "/health",
    }
    model = {"path": MODEL, "sha256": on_host(host, f"sha256sum {MODEL}").split()[0]}
    instance = {"engine": "external", "external": "small", "model": model, "listen": "0.0.0.0", "port": 8000}
    variables = {
        "llama_cpp_backend": "cpu",
        "gateway_firewall": "auto",
        "llm_server_allow_unauthenticated": True,
        "external_engine_definitions": {"small": definition},
        "llm_server_instances": {"chat": instance},
    }
    return write_inventory(folder / "hosts.yml", {host.name: host.variables()}, variables={**variables, **changed})


@pytest.mark.slow
@pytest.mark.parametrize("firewall", ["ufw", "firewalld"])
def test_the_public_port_is_opened_and_closed(start_host: Callable[[str], RunningHost], firewall: str, tmp_path: Path) -> None:
    host = start_host(firewall)
    before = on_host(host, SHOWN[firewall]).split()
    assert "8000/tcp" not in before
    path = inventory(tmp_path, host)
    done = v100ctl("provision", "-i", path, "--check", "--json")
    assert done.code == 2, done.out + done.err
    assert "firewall.closed:8000" in done.document["hosts"][host.name]["changes"]
    assert on_host(host, SHOWN[firewall]).split() == before

    done = v100ctl("provision", "-i", path, "--json")
    assert done.code == 0, done.out + done.err
    now = on_host(host, SHOWN[firewall]).split()
    assert set(now) - set(before) == {"8000/tcp"}
    assert now.count("8000/tcp") == (1 if firewall == "ufw" else 2)
    done = v100ctl("provision", "-i", path, "--force", "--json")
    assert (done.code, done.document["hosts"][host.name]["status"]) == (0, "unchanged"), done.err

    on_host(host, CLOSE[firewall])
    done = v100ctl("audit", "-i", path, "--json")
    assert done.code == 2, done.err
    (finding,) = done.document["hosts"][host.name]["findings"]
    assert (finding["id"], finding["kind"], finding["role"]) == ("firewall.closed:8000", "drifted", "gateway")
    done = v100ctl("audit", "-i", path, "--fix", "--yes", "--json")
    assert done.code == 0, done.out + done.err
    assert set(on_host(host, SHOWN[firewall]).split()) - set(before) == {"8000/tcp"}

    # The instance goes, and with it what was opened for it.
    path = inventory(tmp_path, host, llm_server_instances={})
    done = v100ctl("plan", "-i", path, "--json")
    changes = {change["what"] for change in done.document["hosts"][host.name]["changes"]}
    assert {"unit.unwanted:v100-chat.service", "firewall.unwanted:8000"} <= changes
    done = v100ctl("provision", "-i", path, "--json")
    assert done.code == 0, done.out + done.err
    assert on_host(host, SHOWN[firewall]).split() == before
    assert on_host(host, "ls /etc/systemd/system/v100-chat.service 2>/dev/null; true") == ""
    done = v100ctl("provision", "-i", path, "--json")
    assert (done.code, done.document["hosts"][host.name]["status"]) == (0, "unchanged"), done.err
