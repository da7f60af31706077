"""What can happen to a host with two V100s whose servers stand in for real ones: each fault is found with its kind, layer, what
was expected and what is there, nothing else is, and `audit --fix` mends what roles can mend.

The tests share one host and run in order; each leaves it clean. Many faults are made before each look.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import shapes
from v100ctl.access import Access
from v100ctl.audit import audit
from v100ctl.audit.formats import LAYERS
from v100ctl.cli.options import today
from v100ctl.fleet import load_fleet
from v100ctl.lab.containers import put_file
from v100ctl.lab.gpu import FakeCards, FakeDriver
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image

from .hosts import Done, on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

pytestmark = pytest.mark.slow

MODEL = "/srv/models/x.gguf"
LIMIT_W = 180
ASK_AGAIN = 5
#: A server with what an audit looks at: a health path, the name of its model, memory that grows when it is told to.
SERVER = """#!/usr/bin/python3
import argparse
import json
import os
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for flag in ("model", "host", "alias"):
    parser.add_argument(f"--{flag}", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--slow", action="store_true")
options = parser.parse_args()
held = []


class Handler(BaseHTTPRequestHandler):
    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/grow":
            # Every page is written, so that it is really held.
            held.append(bytearray(b"x") * (1200 << 20))
        models = {"data": [{"id": os.environ.get("NAMED", options.alias)}]}
        known = {"/health": {"status": "ok"}, "/grow": {}, "/v1/models": models}
        self.answer(known[self.path]) if self.path in known else self.send_error(404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "REFUSES" in os.environ:
            self.send_error(500)
            return
        message = {"role": "assistant", "content": f"{asked['model']} is a model"}
        timings = {"predicted_per_second": float(os.environ.get("SPEED", 50))}
        self.answer({"choices": [{"message": message}], "usage": {"completion_tokens": 5}, "timings": timings})

    def log_message(self, *arguments):
        pass


with open(options.model, "rb") as model:
    assert model.read(4) == b"GGUF"
ThreadingHTTPServer((os.environ.get("LISTEN", options.host), options.port), Handler).serve_forever()
"""
ARGV = ["{release}/bin/server", "--model", "{model}", "--host", "{listen}", "--port", "{port}", "--alias", "{alias}"]


@dataclass(frozen=True)
class Fault:
    """Something that somebody does to the host, and the finding that has to come of it.

    ``identity`` may name the cards as ``CARD0`` and ``CARD1``, and end in ``*``. ``undo`` is for what no role mends.
    """

    do: str
    identity: str
    kind: str
    layer: str
    expected: str
    actual: str
    fix: str = "v100ctl provision"
    undo: str = ""
    severity: str = "error"


class Host:
    """The host, and what a user does with it."""

    def __init__(self, host: RunningHost, inventory: Path, archive: Path) -> None:
        self.host = host
        self.inventory = inventory
        self.archive = archive
        self.cards: list[str] = []

    def write(self, **changes: Any) -> None:
        """The inventory; ``changes`` to its variables."""
        digest = on_host(self.host, f"sha256sum {MODEL}").split()[0]
        source = {"from_controller": str(self.archive), "sha256": hashlib.sha256(self.archive.read_bytes()).hexdigest()}
        engine = {
            "source": {**source, "kind": "archive", "strip_components": 1},
            "argv": ARGV,
            "health_path": "/health",
            # The lab's card shows that it holds this.
            "env": {"FAKE_CUDA_MEMORY_MIB": "9000"},
        }
        served = {"engine": "external", "external": "toy", "model": {"path": MODEL, "sha256": digest}}
        variables = {
            "external_engine_definitions": {"toy": engine},
            "gpu_tuning_power_limit_w": LIMIT_W,
            "gpu_tuning_application_clocks_mhz": "877,1380",
            "gpu_tuning_compute_mode": "default",
            "nvidia_driver_reboot": "auto",
            "llm_server_instances": {
                "chat": {**served, "gpus": [0], "port": 8000},
                "aux": {**served, "gpus": [1], "port": 8001},
            },
            **changes,
        }
        write_inventory(self.inventory, {self.host.name: self.host.variables()}, variables=variables)

    def run(self, *arguments: str | Path) -> Done:
        """A command on this inventory."""
        return v100ctl(arguments[0], "-i", self.inventory, *arguments[1:])

    def audit(self, *options: str | Path) -> tuple[Done, dict[str, dict[str, Any]]]:
        """The findings by id, without the kernel log's memory of earlier tests.

        A machine on which much else runs may keep `nvidia-smi` beyond the probe's limit, which looks like a driver that hangs:
        then it is asked again.
        """
        for last in reversed(range(ASK_AGAIN)):
            done = self.run("audit", "--json", *options)
            found = done.document["hosts"][self.host.name]["findings"]
            if last == 0 or "driver.wedged" not in [finding["id"] for finding in found]:
                return done, {finding["id"]: finding for finding in found if not finding["id"].startswith("gpu.xid:")}
        raise AssertionError("it was asked")

    def look_for(self, faults: list[Fault], *options: str) -> None:
        """Make the faults, audit once, and hold each finding against its fault; nothing else may be found."""
        for fault in faults:
            on_host(self.host, fault.do)
        done, found = self.audit(*options)
        wanted = {self.named(fault.identity): fault for fault in faults}
        left = dict(found)
        problems = []
        for identity, fault in wanted.items():
            matching = [name for name in left if name == identity or (identity.endswith("*") and name.startswith(identity[:-1]))]
            if not matching:
                problems.append(f"{identity} was not found")
                continue
            finding = left.pop(matching[0])
            for key in ("kind", "layer", "severity"):
                if finding[key] != getattr(fault, key):
                    problems.append(f"{identity}: {key} {finding[key]}, not {getattr(fault, key)}")
            problems += [
                f"{identity}: {key} {finding[key][:300]!r} has no {getattr(fault, key)!r}"
                for key in ("expected", "actual", "fix")
                if self.named(getattr(fault, key)) not in finding[key]
            ]
        problems += [f"{name} was found too: {finding['actual'][:200]!r}" for name, finding in left.items()]
        assert problems == [], "\n".join(problems)
        codes = {2} if any(fault.severity in ("error", "critical") for fault in faults) else {0}
        assert done.code in codes | {1}, done.err

    def named(self, text: str) -> str:
        """With the cards' own names."""
        for number, card in enumerate(self.cards):
            text = text.replace(f"CARD{number}", card)
        return text

    def undo(self, faults: list[Fault]) -> None:
        """Take back what no role mends, last first."""
        for fault in reversed(faults):
            if fault.undo:
                on_host(self.host, fault.undo)
        on_host(self.host, f"{healthy('chat')}; {healthy('aux')}")

    def mend(self, *options: str) -> dict[str, Any]:
        """`audit --fix`, which has to leave nothing; its document."""
        done, found = self.audit("--fix", "--yes", *options)
        assert (done.code, found) == (0, {}), done.err[-3000:] + json.dumps(done.document.get("fixed"))
        return done.document


@pytest.fixture(scope="module")
def host(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two V100-SXM2-16GB with driver 535, provisioned as a user does it."""
    folder = tmp_path_factory.mktemp("audit")
    archive = folder / "toy-1.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, content, mode in (("bin/server", SERVER, 0o755), ("share/notes.txt", "notes\n", 0o644)):
            member = tarfile.TarInfo(f"toy-1/{name}")
            member.size, member.mode = len(content), mode
            packed.addfile(member, io.BytesIO(content.encode()))
    model = folder / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)
    name = f"test-{os.getpid()}-audit"
    made = LabHost(name, owner=run_identity(), cards=FakeCards.parse("2xV100-SXM2-16GB"), driver=FakeDriver.parse("535"))
    running = lab.up(made, ensure_image(lab.client, lab_reporter), lab_reporter)
    on_host(running, f"mkdir -p {Path(MODEL).parent}")
    put_file(running.container, MODEL, model.read_bytes(), mode=0o644)
    host = Host(running, folder / "hosts.yml", archive)
    host.write()
    done = host.run("provision", "--json")
    assert done.code == 0, done.err
    host.cards = on_host(running, "nvidia-smi --query-gpu=uuid --format=csv,noheader").split()
    yield host
    lab.down(name)


def unit_file(name: str) -> str:
    return f"/etc/systemd/system/v100-{name}.service"


def healthy(name: str) -> str:
    """Waits until a server answers."""
    ask = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORTS[name]}/health', timeout=5)"
    return f'for _ in $(seq 150); do python3 -c "{ask}" 2> /dev/null && break; sleep 0.4; done'


def started_with(name: str, *lines: str, value: str = "") -> str:
    """Starts a server once as somebody else would, and leaves no trace of it but the process. ``value``: for a `%s`."""
    drop_in = f"/run/systemd/system/v100-{name}.service.d"
    written = "\\n".join(("[Service]", *lines))
    return (
        f"mkdir -p {drop_in} && printf '{written}\\n' \"{value}\" > {drop_in}/x.conf && systemctl daemon-reload && "
        f"systemctl restart v100-{name} && rm -r {drop_in} && systemctl daemon-reload && "
        # Its answers are part of what is looked at.
        f"{healthy(name)}"
    )


PORTS = {"chat": 8000, "aux": 8001}
MAIN_PID = "$(systemctl show --value --property MainPID v100-{}.service)"
CHAT, AUX = unit_file("chat"), unit_file("aux")
KERNEL = "99.1.0-1-amd64"

#: Files, packages, units and settings: all of it is somebody's doing, and roles put it back.
CHANGED = [
    Fault(f"chmod 0666 {AUX}", f"file.mode:{AUX}", "drifted", "file", "root:root 0644", "root:root 0666"),
    Fault(
        "echo >> /etc/v100ctl/gpu_tuning.json",
        "file.content:/etc/v100ctl/gpu_tuning.json",
        "drifted",
        "file",
        "power_limit_w",
        "\n\n",
    ),
    Fault(
        "chown nobody /opt/v100ctl/gpu_tuning/apply_tuning.py",
        "file.mode:/opt/v100ctl/gpu_tuning/apply_tuning.py",
        "drifted",
        "file",
        "root:root 0755",
        "nobody:root 0755",
    ),
    Fault(
        "mv /opt/v100ctl/llm_server/check_start.py /root/ && ln -s /root/check_start.py /opt/v100ctl/llm_server/check_start.py",
        "file.missing:/opt/v100ctl/llm_server/check_start.py",
        "drifted",
        "file",
        "a file",
        "a symlink",
    ),
    Fault(
        "rm /etc/apt/preferences.d/v100ctl-nvidia-driver",
        "file.missing:/etc/apt/preferences.d/v100ctl-nvidia-driver",
        "drifted",
        "file",
        "a file",
        "absent",
    ),
    Fault(
        "echo 'Unattended-Upgrade::Package-Blacklist {};' > /etc/apt/apt.conf.d/52v100ctl-nvidia-driver",
        "file.content:/etc/apt/apt.conf.d/52v100ctl-nvidia-driver",
        "drifted",
        "file",
        "libnvidia-.*",
        "Blacklist {}",
    ),
    Fault(
        "rm /etc/modprobe.d/v100ctl-nouveau.conf",
        "file.missing:/etc/modprobe.d/v100ctl-nouveau.conf",
        "drifted",
        "file",
        "a file",
        "absent",
    ),
    Fault(
        "rm /etc/security/limits.d/90-v100ctl.conf",
        "file.missing:/etc/security/limits.d/90-v100ctl.conf",
        "drifted",
        "file",
        "a file",
        "absent",
    ),
    Fault(
        "sed -i 's/^Description=.*/Description=x/' /etc/systemd/system/v100ctl-devices.service",
        "file.content:/etc/systemd/system/v100ctl-devices.service",
        "drifted",
        "file",
        "Description=",
        "Description=x",
    ),
    Fault(
        "chmod 0777 /etc/v100ctl/instances",
        "directory.mode:/etc/v100ctl/instances",
        "drifted",
        "file",
        "root:v100 0750",
        "root:v100 0777",
    ),
    Fault("chown nobody /var/lib/v100ctl/models", "directory.mode:/var/lib/v100ctl/models", "drifted", "file", "0755", "nobody"),
    Fault(
        'sed -i \'s/\\("sha256": "\\)../\\100/\' /etc/v100ctl/host.json',
        "file.content:/etc/v100ctl/host.json",
        "drifted",
        "file",
        '"digest"',
        '"sha256": "00',
    ),
    Fault(
        "apt-mark unhold $(apt-mark showhold | grep nvidia | head -n 1)",
        "driver.unheld",
        "drifted",
        "driver",
        "held:",
        "not held",
    ),
    Fault("systemctl disable v100-chat", "unit.disabled:v100-chat.service", "drifted", "unit", "enabled", "disabled"),
    Fault(
        "systemctl disable v100ctl-gpu-tuning",
        "gpu.unit-disabled:v100ctl-gpu-tuning.service",
        "drifted",
        "unit",
        "enabled",
        "disabled",
        severity="warn",
    ),
    Fault(
        "systemctl disable nvidia-persistenced",
        "gpu.unit-disabled:nvidia-persistenced.service",
        "drifted",
        "unit",
        "enabled",
        "disabled",
        severity="warn",
    ),
    Fault("nvidia-smi -i 0 -pl 200", "gpu.power-limit:CARD0", "drifted", "hardware", "180 W", "200 W", severity="warn"),
    Fault(
        "nvidia-smi -i 1 -ac 877,1312",
        "gpu.application-clocks:CARD1",
        "drifted",
        "hardware",
        "877,1380 MHz",
        "877,1312 MHz",
        severity="warn",
    ),
    Fault(
        "nvidia-smi -i 0 -c 3",
        "gpu.compute-mode:CARD0",
        "drifted",
        "hardware",
        "default",
        "exclusive_process",
        severity="warn",
    ),
    Fault("nvidia-smi -i 1 -pm 0", "gpu.persistence:CARD1", "drifted", "hardware", "persistence mode on", "off", severity="warn"),
    # A card that sleeps forgets what was set.
    Fault("true", "gpu.power-limit:CARD1", "drifted", "hardware", "180 W", "300 W", severity="warn"),
    Fault(
        "echo more >> $(echo /opt/v100ctl/engines/external/*/share/notes.txt)",
        "release.damaged:*",
        "drifted",
        "file",
        "/opt/v100ctl/engines/external/",
        "share/notes.txt has 11 bytes, not 6",
    ),
    Fault(
        f"sed -i s/RestartSec=5/RestartSec=1/ {CHAT}", f"file.content:{CHAT}", "drifted", "file", "RestartSec=5", "RestartSec=1"
    ),
    # What systemd has loaded is not what lies there. (Disabling a unit, above, has it load everything anew.)
    Fault("true", "unit.stale:v100-chat.service", "drifted", "unit", "as loaded", "changed since"),
    Fault(
        "echo hidden > /etc/v100ctl/instances/gone.keys",
        "file.unwanted:/etc/v100ctl/instances/gone.keys",
        "pending",
        "file",
        "absent",
        "secrets that nothing needs",
        severity="warn",
    ),
    Fault(f"touch {MODEL}", f"model.unverified:{MODEL}", "drifted", "file", "sha256", "changed since it was verified"),
]

#: Processes that are not what their units say: roles start them anew.
RUNNING = [
    Fault(
        f"words=$(tr '\\0' ' ' < /proc/{MAIN_PID.format('chat')}/cmdline); "
        + started_with(
            "chat", "ExecStart=", "ExecStart=%s --slow", "LimitNOFILE=100", "LimitMEMLOCK=65536", "CPUAffinity=0", value="$words"
        ),
        "process.argv:chat",
        "drifted",
        "process",
        "--alias chat",
        "--slow",
    ),
    Fault("true", "process.limit-nofile:chat", "drifted", "process", "open files", "100"),
    Fault("true", "process.limit-memlock:chat", "drifted", "process", "", "65536 bytes"),
    Fault("true", "process.cpus:chat", "drifted", "process", "0-", "0"),
    Fault(
        started_with("aux", "Environment=V100CTL_INSTANCE_DIGEST=0123456789abcdef"),
        "process.stale:aux",
        "drifted",
        "process",
        "digest ",
        "digest 0123456789abcdef",
    ),
]
RUNNING_TOO = [
    Fault(started_with("chat", "User=nobody"), "process.user:chat", "drifted", "process", "v100", "nobody"),
    Fault(
        started_with("aux", "Environment=CUDA_DEVICE_ORDER=FASTEST_FIRST"),
        "process.environment:aux",
        "drifted",
        "process",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_DEVICE_ORDER=FASTEST_FIRST",
    ),
]
STOPPED = [
    Fault("systemctl stop v100-chat", "unit.inactive:v100-chat.service", "drifted", "unit", "active", "inactive (dead)"),
    Fault(
        "mkdir -p /run/systemd/system/v100-aux.service.d && printf '[Service]\\nRestartSec=100ms\\nExecStartPre=/bin/false\\n' "
        "> /run/systemd/system/v100-aux.service.d/x.conf && systemctl daemon-reload && systemctl restart v100-aux || "
        "for _ in $(seq 200); do systemctl is-failed -q v100-aux && break; sleep 0.2; done; "
        "rm -r /run/systemd/system/v100-aux.service.d && systemctl daemon-reload && systemctl is-failed v100-aux",
        "unit.start-limit:v100-aux.service",
        "drifted",
        "unit",
        "active",
        "starts it no more",
    ),
    Fault(
        "rm -r /opt/v100ctl/gpu_tuning",
        "file.missing:/opt/v100ctl/gpu_tuning/apply_tuning.py",
        "drifted",
        "file",
        "a file",
        "absent",
    ),
    Fault(
        "rm -r /var/lib/v100ctl/state/baselines",
        "directory.missing:/var/lib/v100ctl/state/baselines",
        "drifted",
        "file",
        "",
        "absent",
    ),
]
#: Without it nobody knows what was applied, and everything else would be pending.
LOST = [Fault("rm /etc/v100ctl/host.json", "file.missing:/etc/v100ctl/host.json", "drifted", "file", "a file", "absent")]

#: What is not ours: it is told, with what to do, and left alone.
FOREIGN = [
    Fault(
        "mkdir -p /etc/systemd/system/v100-chat.service.d && printf '[Service]\\nNice=5\\n' > "
        "/etc/systemd/system/v100-chat.service.d/nice.conf && systemctl daemon-reload",
        "unit.drop-in:/etc/systemd/system/v100-chat.service.d/nice.conf",
        "external",
        "unit",
        "no drop-in",
        "nice.conf",
        "rm /etc/systemd/system/v100-chat.service.d/nice.conf",
        "rm -r /etc/systemd/system/v100-chat.service.d && systemctl daemon-reload",
        "warn",
    ),
    Fault(
        "printf '[Service]\\nExecStart=/bin/sleep 1d\\n' > /etc/systemd/system/v100-mine.service && systemctl daemon-reload && "
        "systemctl start v100-mine",
        "unit.foreign:v100-mine.service",
        "external",
        "unit",
        "no unit of others",
        "active",
        "systemctl disable --now v100-mine.service",
        "systemctl stop v100-mine; rm /etc/systemd/system/v100-mine.service; systemctl daemon-reload",
        "warn",
    ),
    Fault(
        "echo '0 3 * * * root systemctl restart v100-chat.service TOKEN=hidden' > /etc/cron.d/nightly",
        "file.cron:/etc/cron.d/nightly",
        "external",
        "file",
        "no job of others",
        "v100-chat.service",
        "/etc/cron.d/nightly",
        "rm /etc/cron.d/nightly",
        "warn",
    ),
    Fault(
        "mkdir -p /var/spool/cron/crontabs && echo '0 4 * * 0 /sbin/reboot' > /var/spool/cron/crontabs/root",
        "file.cron:/var/spool/cron/crontabs/root",
        "external",
        "file",
        "restarts",
        "`reboot`",
        "crontabs/root",
        "rm /var/spool/cron/crontabs/root",
        "warn",
    ),
    Fault(
        # No file of ours: a role removes those.
        "ln -s /root/old.keys /etc/v100ctl/instances/old.keys",
        "file.unknown:/etc/v100ctl/instances/old.keys",
        "external",
        "file",
        "absent",
        "an instance old",
        "rm /etc/v100ctl/instances/old.keys",
        "rm /etc/v100ctl/instances/old.keys",
        "warn",
    ),
    Fault(
        "printf 'Package: nvidia-driver\\nPin: version 550*\\nPin-Priority: 1001\\n' > /etc/apt/preferences.d/mine",
        "package.preference:/etc/apt/preferences.d/mine",
        "external",
        "package",
        "v100ctl-nvidia-driver",
        "nvidia-driver",
        "rm /etc/apt/preferences.d/mine",
        "rm /etc/apt/preferences.d/mine",
        "warn",
    ),
    Fault(
        "cp /var/lib/dpkg/status /root/status && "
        "sed -i '/^Package: sudo$/,/^$/s/^Status: .*/Status: install ok half-configured/' /var/lib/dpkg/status",
        "package.half-configured",
        "external",
        "package",
        "every package",
        "sudo",
        "dpkg --configure -a",
        "mv /root/status /var/lib/dpkg/status",
    ),
    Fault(
        # A kernel that came by itself, and no module with it.
        f"mkdir -p /boot /lib/modules/{KERNEL} && touch /boot/vmlinuz-{KERNEL} /lib/modules/{KERNEL}/modules.dep",
        "driver.next-boot",
        "external",
        "driver",
        f"for kernel {KERNEL}, which boots next",
        "no modules",
        f"dkms autoinstall -k {KERNEL}",
        f"rm -r /boot/vmlinuz-{KERNEL} /lib/modules/{KERNEL}",
    ),
    Fault(
        "FAKE_CUDA_MEMORY_MIB=512 CUDA_VISIBLE_DEVICES=CARD1 setsid sleep 2d > /dev/null 2>&1 & sleep 1",
        "gpu.foreign-process:CARD1",
        "external",
        "process",
        "no program of others",
        "`sleep 2d` (pid ",
        "kill",
        "pkill -f '[s]leep 2d'",
    ),
    Fault(
        "cp /opt/v100ctl/engines/external/*/bin/server /root/server && "
        "FAKE_CUDA_MEMORY_MIB=512 CUDA_VISIBLE_DEVICES=CARD0 setsid "
        f"/root/server --model {MODEL} --host 127.0.0.1 --port 8099 --alias x > /dev/null 2>&1 & sleep 1",
        "gpu.orphan:CARD0",
        "external",
        "process",
        "servers that their units have started",
        "server",
        "kill",
        "pkill -f '[p]ort 8099'",
    ),
    Fault(
        "f=$(readlink -f /usr/lib/x86_64-linux-gnu/libz.so.1); cp -p $f $f.new && mv $f.new $f",
        "process.libraries:chat",
        "external",
        "process",
        "the libraries that are installed",
        "libz.so",
        "systemctl restart v100-",
        "systemctl restart v100-chat v100-aux",
        "warn",
    ),
    Fault("true", "process.libraries:aux", "external", "process", "installed", "libz.so", "systemctl restart", severity="warn"),
]

#: What a server does that was started as planned, and what its card and its neighbours do.
BEHAVING = [
    Fault(
        "python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8000/grow', timeout=60)\"",
        "process.memory-growth:chat",
        "external",
        "process",
        "as after its start",
        "1.",
        "nightly_restart",
        "systemctl restart v100-chat",
        "warn",
    ),
    Fault(
        started_with("aux", "Environment=NAMED=other LISTEN=0.0.0.0"),
        "service.model:aux",
        "external",
        "service",
        "the model aux",
        "other",
        "systemctl restart v100-aux",
        "systemctl restart v100-aux",
    ),
    Fault(
        "true",
        "service.exposed:aux",
        "external",
        "service",
        "127.0.0.1:8001",
        "0.0.0.0",
        "systemctl restart v100-aux",
        severity="critical",
    ),
    Fault(
        "fake-v100 fault throttled 0 do",
        "gpu.throttled:CARD0",
        "external",
        "hardware",
        "clocks as asked",
        "88 C",
        "air",
        "fake-v100 fault throttled 0 undo",
        "warn",
    ),
    Fault(
        "fake-v100 fault link-degraded 1 do",
        "gpu.link-degraded:CARD1",
        "external",
        "hardware",
        "8 GT/s and 16 lanes",
        "x8",
        "riser",
        "fake-v100 fault link-degraded 1 undo",
        "warn",
    ),
]
HANGING = [
    Fault(
        f"kill -STOP {MAIN_PID.format('chat')}",
        "service.unhealthy:chat",
        "drifted",
        "service",
        "HTTP 200",
        "no answer within",
        "journalctl -u v100-chat.service",
        f"kill -CONT {MAIN_PID.format('chat')}",
    ),
    Fault(
        "systemctl stop v100-aux && (setsid python3 -m http.server --bind 127.0.0.1 8001 > /dev/null 2>&1 & sleep 3)",
        "service.port-taken:aux",
        "external",
        "service",
        "v100-aux.service on port 8001",
        "python3 -m http.server",
        "provision --adopt ",
        "pkill -f '[h]ttp.server --bind'; systemctl start v100-aux",
    ),
    Fault("true", "unit.inactive:v100-aux.service", "drifted", "unit", "active", "inactive (dead)"),
]
BROKEN = [
    Fault(
        "fake-v100 fault uvm-poisoned - do",
        "driver.uvm-poisoned",
        "external",
        "driver",
        "CUDA programs start",
        "unknown error",
        "v100ctl recover",
        "fake-v100 fault uvm-poisoned - undo",
        "critical",
    ),
    Fault(
        "fake-v100 fault memory-error 1 do",
        "gpu.retirement-pending:CARD1",
        "external",
        "hardware",
        "no page waits",
        "page",
        "v100ctl recover",
        "fake-v100 fault memory-error 1 undo",
    ),
    Fault(
        "true",
        "gpu.ecc-errors:CARD1",
        "external",
        "hardware",
        "no memory error",
        "1 since the driver was loaded",
        "v100ctl recover",
        severity="warn",
    ),
]
GONE = [
    Fault(
        "fake-v100 fault fallen-off 1 do",
        "gpu.fallen-off:*",
        "external",
        "hardware",
        "answers on the bus",
        "",
        "power the host off",
        "fake-v100 fault fallen-off 1 undo",
        "critical",
    ),
    # Nobody tells the UUID of a card that is gone, so what would be written names it by its place.
    Fault("true", f"file.content:{AUX}", "pending", "file", "0000:", "GPU-"),
    Fault("true", "file.content:/etc/v100ctl/host.json", "pending", "file", "0000:", "GPU-"),
    Fault("true", "process.stale:aux", "pending", "process", "digest ", "digest "),
]
ALL = (CHANGED, RUNNING, RUNNING_TOO, STOPPED, LOST, FOREIGN, BEHAVING, HANGING, BROKEN, GONE)
CLEAN_RUNS = 100


def test_a_hundred_audits_of_a_clean_host_find_nothing(host: Host, tmp_path: Path) -> None:
    """None of them is asked again. Every tenth comes as a command with files to write, the others without its start."""
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    fleet = load_fleet((str(host.inventory),))
    seconds = []
    for number in range(CLEAN_RUNS):
        began_s = time.monotonic()
        if number % 10 == 0:
            options: list[str | Path] = ["-o", page, "--since", report] if number else []
            done = host.run("audit", "-o", report, *options)
            audited = json.loads(report.read_text(encoding="utf-8"))["hosts"]
            assert done.code == 0, (number, done.err, audited)
        else:
            audited = audit(fleet, access=Access(), as_of=today()).to_json()["hosts"]
        seconds.append(time.monotonic() - began_s)
        found = audited[host.host.name]
        assert (found["status"], found["findings"]) == ("clean", []), number
    commands = seconds[::10]
    others = [taken for number, taken in enumerate(seconds) if number % 10]
    print(
        f"{CLEAN_RUNS} clean audits: {statistics.median(others):.2f} s (median), at most {max(others):.2f} s; "
        f"{len(commands)} of them as commands: {statistics.median(commands):.2f} s (median), at most {max(commands):.2f} s"
    )


def test_what_was_changed_is_found_and_mended(host: Host) -> None:
    host.look_for(CHANGED)
    started = on_host(host.host, "systemctl show --property ExecMainStartTimestampMonotonic v100-chat v100-aux")
    document = host.mend()
    assert document["fixed"][host.host.name]["status"] == "changed"
    assert started == on_host(host.host, "systemctl show --property ExecMainStartTimestampMonotonic v100-chat v100-aux"), (
        "nothing of it needed a restart"
    )


@pytest.mark.parametrize("faults", [RUNNING, RUNNING_TOO, STOPPED, LOST], ids=["running", "running-too", "stopped", "lost"])
def test_servers_that_do_not_run_as_planned_are_started_anew(host: Host, faults: list[Fault]) -> None:
    host.look_for(faults)
    host.mend()


@pytest.mark.parametrize(
    "faults", [FOREIGN, BEHAVING, HANGING, BROKEN, GONE], ids=["foreign", "behaving", "hanging", "broken", "gone"]
)
def test_what_no_role_mends_is_told_and_left_alone(host: Host, faults: list[Fault]) -> None:
    try:
        host.look_for([Fault(**{**vars(fault), "do": host.named(fault.do)}) for fault in faults])
    finally:
        # The next faults want a whole host.
        host.undo(faults)
    done, found = host.audit()
    for _ in range(ASK_AGAIN):
        if found:
            done, found = host.audit()
    assert found == {}, done.out


# --- what an audit may be told ------------------------------------------------------------------------------------------------


def test_since_tells_what_is_new_and_what_has_gone(host: Host, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    identity = "unit.disabled:v100-aux.service"
    host.run("audit", "-o", before)
    on_host(host.host, "systemctl disable v100-aux")
    host.run("audit", "-o", after)
    done, found = host.audit("--since", before)
    assert set(found) == {identity}
    assert done.document["since"] == {"new": {host.host.name: [identity]}, "gone": {}}
    done, _ = host.audit("--since", after)
    assert done.document["since"] == {"new": {}, "gone": {}}
    table = host.run("audit", "--since", before, "--no-color")
    assert (table.code, "new" in table.out) == (2, True), table.out
    on_host(host.host, "systemctl enable v100-aux")
    done, _ = host.audit("--since", after)
    assert done.document["since"] == {"new": {}, "gone": {host.host.name: [identity]}}


def test_speed_is_held_against_the_proof(host: Host) -> None:
    done, found = host.audit("--speed")
    assert (done.code, found) == (0, {}), done.out
    faults = [
        Fault(
            # A server that is as planned otherwise.
            started_with("chat", "Environment=SPEED=20"),
            "service.slow:chat",
            "external",
            "service",
            "about 50.0 tokens/s",
            "20.0 tokens/s",
            "heat and clocks",
            "systemctl restart v100-chat",
            "warn",
        ),
        Fault(
            started_with("aux", "Environment=REFUSES=1"),
            "service.no-answer:aux",
            "external",
            "service",
            "an answer",
            "HTTP 500",
            "journalctl --unit v100-aux.service",
            "systemctl restart v100-aux",
        ),
    ]
    host.look_for(faults, "--speed")
    assert host.audit()[1] == {}, "only who asks for it waits for answers"
    host.undo(faults)
    done, found = host.audit("--speed")
    assert (done.code, found) == (0, {}), done.out


NOTES = "/opt/v100ctl/engines/external/*/share/notes.txt"
#: Nothing that a size or a time tells.
HIDDEN = [
    Fault(
        f"f=$(echo {NOTES}); touch -r $f /root/time && printf 'nOtes\\n' > $f && touch -r /root/time $f && rm /root/time",
        "release.damaged:*",
        "drifted",
        "file",
        "/opt/v100ctl/engines/external/",
        "share/notes.txt",
        "audit --deep --fix",
    ),
    Fault(
        "usermod --shell /bin/bash v100",
        "ansible.changed:llm_server:*",
        "drifted",
        "unit",
        "nothing that Ansible would change",
        "",
        "audit --deep --fix",
    ),
]
HIDDEN_MODEL = Fault(
    f"cp -p {MODEL} /root/x.gguf && at=$(($(stat -c %s {MODEL}) - 1)) && "
    f"printf x | dd of={MODEL} bs=1 seek=$at conv=notrunc 2> /dev/null && touch -r /root/x.gguf {MODEL}",
    f"model.wrong:{MODEL}",
    "drifted",
    "file",
    "sha256 ",
    "sha256 ",
    "audit --deep --fix",
    f"mv /root/x.gguf {MODEL}",
)


def test_what_only_a_deep_audit_sees(host: Host) -> None:
    for fault in (*HIDDEN, HIDDEN_MODEL):
        on_host(host.host, fault.do)
    assert host.audit()[1] == {}, "sizes, times and records are as they were"
    nothing = [Fault(**{**vars(fault), "do": "true"}) for fault in (*HIDDEN, HIDDEN_MODEL)]
    host.look_for(nothing, "--deep")
    # Nobody but its owner has another copy of this file.
    on_host(host.host, HIDDEN_MODEL.undo)
    document = host.mend("--deep")
    assert document["fixed"][host.host.name]["roles"] == ["external_engine", "llm_server"]
    assert on_host(host.host, f"cat {NOTES}; getent passwd v100").splitlines()[0] == "notes"
    assert not on_host(host.host, "getent passwd v100").strip().endswith("bash")


def checks(host: Host, *arguments: str | Path) -> Done:
    """The audit as a user of pytest has it, outside this checkout."""
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfEw", "--v100ctl-inventory", host.inventory, *arguments]
    done = subprocess.run([*map(str, argv)], cwd=host.inventory.parent, capture_output=True, text=True, timeout=600, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_the_same_checks_come_as_a_test_suite(host: Host, tmp_path: Path) -> None:
    over_ssh = [
        "--pyargs",
        "v100ctl.audit.checks",
        f"--hosts=ssh://{host.host.name}",
        f"--ssh-config={host.host.ssh_config_path}",
    ]
    through_docker = ["--pyargs", "v100ctl.audit.checks", f"--hosts=docker://{host.host.container.name}"]
    for backend in (over_ssh, through_docker):
        done = checks(host, *backend)
        assert (done.code, f"{1 + len(LAYERS)} passed" in done.out) == (0, True), done.out
    on_host(host.host, f"systemctl disable v100-aux; chmod 0666 {AUX}; nvidia-smi -i 0 -pl 200")
    for backend in (over_ssh, through_docker):
        done = checks(host, *backend)
        assert done.code == 1, done.out
        assert f"2 failed, {len(LAYERS) - 1} passed" in done.out, done.out
        assert re.findall(r"^FAILED .*test_layer\[[^]]*?(\w+)\]", done.out, re.M) == ["file", "unit"]
        assert f"error: file.mode:{AUX} (drifted)\n  expected: root:root 0644\n  actual: root:root 0666" in done.out
        # A warning fails nothing, as in `audit` itself.
        assert re.search(r"AuditWarning: .*warn: gpu\.power-limit:", done.out, re.S), done.out
    own = tmp_path / "test_own.py"
    own.write_text(OWN_TEST, encoding="utf-8")
    done = checks(host, own, *over_ssh[2:])
    assert (done.code, "1 passed" in done.out) == (0, True), done.out
    on_host(host.host, f"systemctl enable v100-aux; chmod 0644 {AUX}; nvidia-smi -i 0 -pl {LIMIT_W}")
    done = checks(host, *over_ssh)
    assert done.code == 0, done.out


#: What a user writes beside ours.
OWN_TEST = """
def test_of_my_own(host, v100ctl_facts, v100ctl_plan, v100ctl_findings):
    assert host.file(v100ctl_plan.instances[0].argv[0]).is_file
    assert len(v100ctl_facts.gpus) == 2
    assert "unit.disabled:v100-aux.service" in [finding.id for finding in v100ctl_findings]
"""


def test_there_are_many_faults() -> None:
    identities = {fault.identity for faults in (*ALL, HIDDEN, [HIDDEN_MODEL]) for fault in faults}
    assert len(identities) >= 60
