"""An engine of one's own on a host with V100s, from the profile `pxq-16gb-256k`: a small server stands in for the real one.

The tests share one host and run in order.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import shapes
from v100ctl.lab.containers import put_file
from v100ctl.lab.gpu import FakeCards, FakeDriver
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image

from .hosts import on_host, snapshot, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

# The scenario `external_engine` runs the role by default.
pytestmark = pytest.mark.slow

UNIT = "v100-long.service"
MODEL_ON_HOST = "/srv/models/x.gguf"
#: Starts a host with this driver.
StartHost = Callable[[str], "RunningHost"]
#: What the report of the profile looks for in the log.
KERNEL = "pxq kernel active"
#: Takes the words of the profile's command line, and says on which kernels it runs.
SERVER = """#!/usr/bin/python3
import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("model", "host", "port", "ctx-size", "parallel", "cache-type-k", "cache-type-v", "flash-attn"):
    parser.add_argument(f"--{flag}", required=True)
parser.add_argument("-ngl", required=True)
parser.add_argument("--plain-kernels", action="store_true")
options = parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"status": "ok"}) if self.path == "/health" else self.send_error(404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": f"{asked['model']} holds {options.ctx_size} tokens"}
        self.answer({"choices": [{"message": message}], "usage": {"completion_tokens": 5}})


name = (Path(__file__).resolve().parents[1] / "lib/kernels.txt").read_text().strip()
with open(options.model, "rb") as model:
    assert model.read(4) == b"GGUF"
cards = os.environ["CUDA_VISIBLE_DEVICES"]
print(f"{name} inactive: falling back to plain kernels" if options.plain_kernels else f"{name} active on {cards}", flush=True)
HTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


def make_archive(path: Path) -> Path:
    """The archive that somebody hands over."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, mode in (("bin/llama-server", SERVER, 0o755), ("lib/kernels.txt", "pxq kernel\n", 0o644)):
            member = tarfile.TarInfo(f"pxa-v3.1/{name}")
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_archive(tmp_path_factory.mktemp("engine") / "pxa-v3.1.tar.gz")


@pytest.fixture(scope="module")
def start_host(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartHost]:
    """Starts hosts with one V100 of 16 GB, a driver and a model."""
    names: list[str] = []
    model = tmp_path_factory.mktemp("model") / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)

    def start(driver: str) -> RunningHost:
        name = f"test-{os.getpid()}-external-{driver}"
        names.append(name)
        made = LabHost(name, owner=run_identity(), cards=FakeCards.parse("1xV100-SXM2-16GB"), driver=FakeDriver.parse(driver))
        host = lab.up(made, ensure_image(lab.client, lab_reporter), lab_reporter)
        on_host(host, "mkdir -p /srv/models")
        put_file(host.container, MODEL_ON_HOST, model.read_bytes(), mode=0o644)
        return host

    yield start
    if names:
        lab.down(*names)


@pytest.fixture(scope="module")
def host(start_host: StartHost) -> RunningHost:
    return start_host("580")


def inventory(folder: Path, host: RunningHost, engine: Path, **definition: Any) -> Path:
    """An inventory whose only instance serves by the profile; ``definition`` adds to its engine's."""
    digest = on_host(host, f"sha256sum {MODEL_ON_HOST}").split()[0]
    source = {"from_controller": str(engine), "sha256": hashlib.sha256(engine.read_bytes()).hexdigest()}
    definitions = {
        "pxa": {
            "source": {**source, "kind": "archive", "strip_components": 1},
            # The lab's card shows that it holds this.
            "env": {"FAKE_CUDA_MEMORY_MIB": "14200"},
            "must_log": [KERNEL],
            "must_not_log": ["falling back"],
            **definition,
        }
    }
    long = {"profile": "pxq-16gb-256k", "external": "pxa", "model": {"path": MODEL_ON_HOST, "sha256": digest}}
    variables = {"external_engine_definitions": definitions, "llm_server_instances": {"long": {**long, "port": 8000}}}
    return write_inventory(folder / "hosts.yml", {host.name: host.variables()}, variables=variables)


def test_the_profile_serves_with_a_stand_in(host: RunningHost, engine: Path, tmp_path: Path) -> None:
    path = inventory(tmp_path, host, engine)
    done = v100ctl("provision", "-i", path, "--json")
    assert done.code == 0, done.err
    result = done.document["hosts"][host.name]
    assert (result["status"], result["proofs"]["long"]["tokens"]) == ("changed", 5)
    assert "holds 262144 tokens" in result["proofs"]["long"]["text"]
    assert KERNEL in on_host(host, f"journalctl --unit {UNIT} --output cat --no-pager")
    pid = on_host(host, f"systemctl show --property MainPID --value {UNIT}").strip()
    assert on_host(host, f"stat -c %U /proc/{pid}").strip() == "v100"
    # Nothing was compiled or installed for it.
    assert on_host(host, "ls /opt/v100ctl/engines").split() == ["external"]


def test_what_was_applied_is_found_again(host: RunningHost, engine: Path, tmp_path: Path) -> None:
    path = inventory(tmp_path, host, engine)
    done = v100ctl("provision", "-i", path, "--json")
    assert (done.code, done.document["hosts"][host.name]["status"]) == (0, "unchanged"), done.err
    done = v100ctl("audit", "-i", path, "--deep", "--json")
    assert (done.code, done.document["hosts"][host.name]["findings"]) == (0, [])


def test_audit_finds_what_was_changed(host: RunningHost, engine: Path, tmp_path: Path) -> None:
    path = inventory(tmp_path, host, engine)
    on_host(host, "echo more >> $(echo /opt/v100ctl/engines/external/pxa-*/lib/kernels.txt)")
    done = v100ctl("audit", "-i", path, "--json")
    assert done.code == 2, done.err
    (finding,) = done.document["hosts"][host.name]["findings"]
    assert finding["id"].startswith("release.damaged:pxa-")
    assert "lib/kernels.txt has 16 bytes, not 11" in finding["actual"]


def test_a_server_without_the_right_kernel_is_no_success(host: RunningHost, engine: Path, tmp_path: Path) -> None:
    """It answers all the same, only slowly: the log alone tells."""
    applied = on_host(host, "cat /etc/v100ctl/host.json")
    serve = ["{release}/bin/llama-server", "--plain-kernels", "--model", "{model}", "--host", "{listen}", "--port", "{port}"]
    serve += ["--ctx-size", "{context_length}", "--parallel", "{parallel}", "-ngl", "99"]
    serve += ["--cache-type-k", "{kv_cache_type_k}", "--cache-type-v", "{kv_cache_type_v}", "--flash-attn", "{flash_attention}"]
    done = v100ctl("provision", "-i", inventory(tmp_path, host, engine, argv=serve), "--json")
    assert done.code == 1, done.out
    result = done.document["hosts"][host.name]
    assert result["status"] == "failed"
    said = json.dumps(result)
    assert "it has logged `pxq kernel inactive: falling back to plain kernels`" in said
    assert f"nothing like `{KERNEL}`" in said
    before = json.loads(applied)["instances"]["long"]
    assert f"The last one that was proved here is of {before['release_path']} (digest {before['digest']})" in said
    # What is recorded is still the plan that was proved, and what was damaged is whole again.
    assert on_host(host, "cat /etc/v100ctl/host.json") == applied
    assert on_host(host, "cat /opt/v100ctl/engines/external/pxa-*/lib/kernels.txt") == "pxq kernel\n"


def test_the_right_kernel_brings_it_back(host: RunningHost, engine: Path, tmp_path: Path) -> None:
    done = v100ctl("provision", "-i", inventory(tmp_path, host, engine), "--json")
    assert (done.code, done.document["hosts"][host.name]["status"]) == (0, "changed"), done.err


def test_the_public_release_is_refused_on_535(start_host: StartHost, engine: Path, tmp_path: Path) -> None:
    old = start_host("535")
    path = inventory(tmp_path, old, engine)
    before = snapshot(old)
    done = v100ctl("provision", "-i", path, "--json")
    assert done.code == 1, done.out
    assert "PXA v3.1 needs driver 570 or newer; the host has 535" in done.out + done.err
    assert snapshot(old) == before
