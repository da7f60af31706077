"""Hosts that lie, over a real sshd: what they answer ends neither the audit nor its reports, and delays no other host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from v100ctl.lab.containers import put_file
from v100ctl.lab.hosts import RunningHost, write_inventory

from .hosts import ROOT, on_host, serving_variables, v100ctl

# `tests/unit/test_audit_hostile.py` has most of these answers without a host.
pytestmark = pytest.mark.slow

TIMEOUT_S = 20
#: What the host takes for its Python, by the name under which it is in the inventory. Each is given the probe on its stdin.
LIARS = {
    "endless": 'exec yes \'{"schema": "v100ctl/facts/1"}\'',
    "gigabyte": "exec head -c 1073741824 /dev/zero",
    "shouting": "exec head -c 1073741824 /dev/zero >&2",
    "silent": "exec sleep 600",
    "deaf": "exec </dev/null; exec sleep 600",
    "dripping": "while :; do echo x; sleep 1; done",
    "broken": "cat >/dev/null; echo '{\"schema\": '",
    "nested": "cat >/dev/null; head -c 20000000 /dev/zero | tr '\\0' '['",
    "escapes": "cat >/dev/null; printf '\\033[2J\\033]0;owned\\007\\302\\233' ; printf '\\033[2J\\n' >&2; exit 3",
    "huge": "cat >/dev/null; printf '{\"memory\": {\"total_bytes\": 1'; head -c 5000000 /dev/zero | tr '\\0' 0; echo '}}'",
    "dead": "kill -9 $$",
}
FOLDER = "/usr/local/lib/liars"


def test_liars_delay_nobody_and_fill_nothing(fresh_lab_host: RunningHost, tmp_path: Path) -> None:
    host = fresh_lab_host
    on_host(host, f"mkdir -p {FOLDER}")
    hosts: dict[str, dict[str, Any]] = {"honest": host.variables()}
    for name, does in LIARS.items():
        put_file(host.container, f"{FOLDER}/{name}", f"#!/bin/bash\n{does}\n".encode(), mode=0o755)
        hosts[name] = {**host.variables(), "ansible_python_interpreter": f"{FOLDER}/{name}"}
    inventory = write_inventory(tmp_path / "hosts.yml", hosts, variables=serving_variables())
    written = {name: tmp_path / f"report.{name}" for name in ("json", "xml", "html", "prom", "txt")}
    argv = [sys.executable, "-P", "-m", "v100ctl", "audit", "-i", str(inventory), "--timeout", str(TIMEOUT_S)]
    argv += [word for path in written.values() for word in ("-o", str(path))]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, said) == (1, b"")
    # 32 MiB and what holds them for each of those that talk without end, at most.
    assert usage.ru_maxrss << 10 < 1 << 30

    report = json.loads(written["json"].read_text(encoding="utf-8"), parse_constant=lambda name: 1 / 0)["hosts"]
    assert list(report) == list(hosts)
    assert report["honest"]["status"] == "drift"
    assert {finding["kind"] for finding in report["honest"]["findings"]} == {"pending"}
    reasons = {
        "endless": "more than 32 MiB of output",
        "gigabyte": "more than 32 MiB of output",
        "shouting": "more than 32 MiB of output",
        "silent": "no answer within",
        "deaf": "no answer within",
        "dripping": "no answer within",
        "broken": "did not return a usable document",
        "nested": "did not return a usable document",
        "escapes": "failed with exit code 3",
        "huge": "did not return a usable document",
        "dead": "exit code",
    }
    for name, words in reasons.items():
        assert report[name]["findings"] == []
        late = "no answer within" in report[name]["error"]
        # On a busy machine the time may be over before 32 MiB are full, or before a short answer is there.
        assert late or words in report[name]["error"]
        assert report[name]["status"] == ("unreachable" if late else "error")
        assert len(report[name]["error"]) < 1000
    suites = ElementTree.fromstring(written["xml"].read_text(encoding="utf-8"))  # noqa: S314 - it was written here
    assert {suite.get("name") for suite in suites if suite.get("errors") == "1"} == set(LIARS)
    for path in written.values():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
        assert "honest" in text and "dripping" in text


def test_links_and_lies_where_files_are_expected(fresh_lab_host: RunningHost, tmp_path: Path) -> None:
    host = fresh_lab_host
    inventory = write_inventory(tmp_path / "hosts.yml", {host.name: host.variables()}, variables=serving_variables())
    unit = "/etc/systemd/system/v100-chat.service"
    on_host(
        host,
        "echo 'nobody-may-see-this' > /root/secret; chmod 600 /root/secret;"
        "mkdir -p /etc/v100ctl/instances /opt/v100ctl/engines/llama_cpp /var/lib/v100ctl/models /elsewhere;"
        f"ln -s /root/secret {unit}; ln -s /root/secret /etc/v100ctl/host.json;"
        "ln -s /root/secret /etc/v100ctl/instances/chat.keys; ln -s / /etc/v100ctl/instances/tree;"
        "ln -s /elsewhere /opt/v100ctl/engines/llama_cpp/b1-cpu; ln -s /root/secret /etc/cron.d/v100ctl;"
        "mkfifo /etc/v100ctl/fifo",
    )

    def audited() -> dict[str, dict[str, Any]]:
        done = v100ctl("audit", "-i", inventory, "--json", "--timeout", "60")
        assert done.code == 2, done.err
        assert "nobody-may-see-this" not in done.out + done.err
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done.out)
        found = done.document["hosts"][host.name]
        assert found["status"] == "drift"
        return {finding["id"]: finding for finding in found["findings"]}

    found = audited()
    assert found[f"file.missing:{unit}"]["actual"] == "a symlink"
    assert found["file.missing:/etc/v100ctl/host.json"]["actual"] == "a symlink"
    assert not any("b1-cpu" in identifier for identifier in found)

    # A record that cannot be read is one that somebody has changed: what it says is not believed, and the rest is still seen.
    deep = '{"files":' * 400 + "{}" + "}" * 400
    digits = '{"cards": [' + "9" * 100_000 + "]}"
    outside = json.dumps({"files": {"/root/secret": {}, "/etc/shadow": {}, "/dev/zero": {}}, "instances": {"../../etc": {}}})
    odd = json.dumps({"files": 7, "instances": [1], "packages": {"x": 1e300}, "host": "another", "digest": 5})
    for record in (deep, digits, outside, odd, '{"x": 1e999, "y": "\x1b[2J\u202e"}'):
        on_host(host, "rm -f /etc/v100ctl/host.json")
        put_file(host.container, "/etc/v100ctl/host.json", record.encode(), mode=0o644)
        found = audited()
        assert found[f"file.missing:{unit}"]["actual"] == "a symlink"
        # Its text is shown as what it is, a file that differs; nothing else speaks of what it names.
        del found["file.content:/etc/v100ctl/host.json"]
        assert not any(word in json.dumps(found) for word in ("/etc/shadow", "/root/secret", "/dev/zero", "another"))
