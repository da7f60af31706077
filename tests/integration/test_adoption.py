"""A server that somebody runs by hand on an instance's port and card: named, left alone, and replaced when that is said.

The tests share one host and run in order.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.device import shapes
from v100ctl.lab.containers import put_file
from v100ctl.lab.gpu import FakeCards, FakeDriver
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image

from .hosts import on_host, snapshot, v100ctl
from .test_external_engine import KERNEL, SERVER

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

MODEL = "/srv/models/x.gguf"
PORT = 8000
SECRET = "a-key-that-nobody-may-see"
HAND_RUN = "/opt/hand/bin/llama-server"
WORDS = (
    f"--model {MODEL} --host 127.0.0.1 --port {PORT} --ctx-size 4096 --parallel 2 --cache-type-k q8_0 --cache-type-v q8_0 "
    f"--flash-attn on -ngl 99 --api-key {SECRET}"
)
#: The lab's card shows that it holds this.
ON_CARD = "FAKE_CUDA_MEMORY_MIB=9000"
UNIT = f"""[Service]
User=nobody
Environment={ON_CARD} CUDA_VISIBLE_DEVICES=0 LLAMA_ARG_THREADS=3
ExecStart={HAND_RUN} {WORDS}
Restart=always
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def host(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    """A host with one V100, and somebody's own server in /opt/hand."""
    name = f"test-{os.getpid()}-adoption"
    made = LabHost(name, owner=run_identity(), cards=FakeCards.parse("1xV100-SXM2-16GB"), driver=FakeDriver.parse("580"))
    host = lab.up(made, ensure_image(lab.client, lab_reporter), lab_reporter)
    model = tmp_path_factory.mktemp("model") / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)
    on_host(host, "mkdir -p /srv/models /opt/hand/bin /opt/hand/lib")
    put_file(host.container, MODEL, model.read_bytes(), mode=0o644)
    theirs = SERVER.replace('parser.add_argument("-ngl"', 'parser.add_argument("--api-key")\nparser.add_argument("-ngl"')
    put_file(host.container, HAND_RUN, theirs.encode(), mode=0o755)
    put_file(host.container, "/opt/hand/lib/kernels.txt", b"theirs\n", mode=0o644)
    yield host
    lab.down(name)


@pytest.fixture(scope="module")
def inventory(host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One instance on the card, whose engine is a small server of one's own."""
    folder = tmp_path_factory.mktemp("inventory")
    archive = folder / "engine.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, content, mode in (("bin/llama-server", SERVER, 0o755), ("lib/kernels.txt", "pxq kernel\n", 0o644)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            packed.addfile(member, io.BytesIO(content.encode()))
    source = {"from_controller": str(archive), "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(), "kind": "archive"}
    definition = {"source": source, "env": {"FAKE_CUDA_MEMORY_MIB": "14200"}, "must_log": [KERNEL]}
    model = {"path": MODEL, "sha256": on_host(host, f"sha256sum {MODEL}").split()[0]}
    instance = {"profile": "pxq-16gb-256k", "external": "pxa", "model": model, "port": PORT}
    variables = {"external_engine_definitions": {"pxa": definition}, "llm_server_instances": {"long": instance}}
    return write_inventory(folder / "hosts.yml", {host.name: host.variables()}, variables=variables)


def main_pid(host: RunningHost, unit: str) -> int:
    return int(on_host(host, f"systemctl show --property MainPID --value {unit}"))


def reasons(out: str, host: RunningHost, rule_id: str) -> list[str]:
    rules = json.loads(out)["hosts"][host.name]["rules"]
    return [f"{rule['reason']} | {rule['nearest']}" for rule in rules if rule["id"] == rule_id]


def test_it_is_named_and_left_alone(host: RunningHost, inventory: Path) -> None:
    put_file(host.container, "/etc/systemd/system/my-llm.service", UNIT.encode(), mode=0o644)
    on_host(host, "systemctl daemon-reload && systemctl enable --now my-llm.service")
    on_host(host, f"for i in $(seq 50); do curl -fs 127.0.0.1:{PORT}/health && break; sleep 0.2; done")
    before, pid = snapshot(host), main_pid(host, "my-llm.service")
    planned = v100ctl("plan", "-i", inventory, "--json")
    assert planned.code == 1, planned.err
    (said,) = reasons(planned.out, host, "port-taken")
    for words in (HAND_RUN, "--api-key (hidden)", "of nobody, started by the unit my-llm.service (enabled)", "--adopt"):
        assert words.replace("(hidden)", "'(hidden)'") in said, said
    (said,) = reasons(planned.out, host, "gpu-in-use")
    assert "my-llm.service" in said
    (said,) = reasons(planned.out, host, "hand-run-server")
    assert "context_length: 2048" in said, said
    assert "parallel: 2" in said, said
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 1, done.out
    assert done.document["hosts"][host.name]["status"] == "refused"
    assert SECRET not in planned.out + planned.err + done.out + done.err
    assert (snapshot(host), main_pid(host, "my-llm.service")) == (before, pid)


@pytest.mark.slow
def test_check_says_what_would_be_stopped(host: RunningHost, inventory: Path) -> None:
    before, pid = snapshot(host), main_pid(host, "my-llm.service")
    done = v100ctl("provision", "-i", inventory, "--adopt", f"{host.name}/long", "--check", "--json")
    assert done.code == 2, done.out + done.err
    assert "process.hand-run:my-llm.service" in done.document["hosts"][host.name]["changes"]
    assert (snapshot(host), main_pid(host, "my-llm.service")) == (before, pid)


@pytest.mark.slow
def test_its_unit_is_replaced_when_told(host: RunningHost, inventory: Path) -> None:
    done = v100ctl("provision", "-i", inventory, "--adopt", f"{host.name}/long", "--json")
    assert done.code == 0, done.out + done.err
    result = done.document["hosts"][host.name]
    assert result["status"] == "changed"
    (entry,) = result["adopted"]
    assert (entry["unit"], entry["unit_was"], entry["state"]) == ("my-llm.service", "enabled", "stopped")
    assert entry["undo"] == "systemctl enable --now my-llm.service"
    assert on_host(host, "systemctl is-active my-llm.service; systemctl is-enabled my-llm.service; true").split() == [
        "inactive",
        "disabled",
    ]
    assert on_host(host, "cat /etc/systemd/system/my-llm.service") == UNIT
    record = json.loads(on_host(host, "cat /var/lib/v100ctl/state/adopted.json"))
    assert record["adopted"] == [entry]
    assert SECRET not in done.out + done.err + json.dumps(record)
    # What was told once is not needed again.
    again = v100ctl("provision", "-i", inventory, "--json")
    assert (again.code, again.document["hosts"][host.name]["status"]) == (0, "unchanged"), again.err
    assert again.document["hosts"][host.name]["adopted"] == []
    audited = v100ctl("audit", "-i", inventory, "--json")
    assert (audited.code, audited.document["hosts"][host.name]["findings"]) == (0, [])


@pytest.mark.slow
def test_a_process_without_a_unit_is_replaced_too(host: RunningHost, inventory: Path) -> None:
    on_host(host, "systemctl stop v100-long.service my-llm.service 2>/dev/null; true")
    command = f"{ON_CARD} CUDA_VISIBLE_DEVICES=0 {HAND_RUN} {WORDS}"
    start = f"cd /opt/hand && setsid nohup env {command} >/dev/null 2>&1 & echo $!"
    pid = on_host(host, f"su -s /bin/sh games -c {shlex.quote(start)}").split()[-1]
    on_host(host, f"for i in $(seq 50); do curl -fs 127.0.0.1:{PORT}/health && break; sleep 0.2; done")
    refused = v100ctl("provision", "-i", inventory)
    assert refused.code == 1
    assert "of games" in refused.err
    done = v100ctl("provision", "-i", inventory, "--adopt", "long", "--json")
    assert done.code == 0, done.out + done.err
    (entry,) = done.document["hosts"][host.name]["adopted"]
    assert (entry["unit"], entry["user"], entry["state"]) == ("", "games", "stopped")
    assert entry["undo"].startswith("as games: cd /opt/hand && CUDA_VISIBLE_DEVICES=0 ")
    assert on_host(host, f"test -d /proc/{pid} && echo there; true") == ""
    assert json.loads(on_host(host, "cat /var/lib/v100ctl/state/adopted.json"))["adopted"][-1] == entry
    assert SECRET not in done.out + done.err + refused.out + refused.err
