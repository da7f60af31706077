"""`v100ctl tune` on a host with systemd, where a stand-in of known speed is installed as the engine's release.

The tests of this file share one host and run in order. Each leaves a server that serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from v100ctl.lab.containers import put_file
from v100ctl.tune.host_script import DROP_IN_NAME

from .hosts import ROOT, on_host, serving_variables, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

pytestmark = pytest.mark.slow

UNIT = "v100-chat.service"
DROP_IN = f"/run/systemd/system/{UNIT}.d/{DROP_IN_NAME}"
DIMENSIONS = ("--dimension", "ubatch_size=256,1024", "--dimension", "flash_attention=on")
LEASE_S = 30


def engine() -> bytes:
    """The stand-in as one program."""
    folder = ROOT / "tests/engine_stand_in"
    library = (folder / "__init__.py").read_text(encoding="utf-8")
    program = (folder / "__main__.py").read_text(encoding="utf-8")
    program = program.replace("from __future__ import annotations\n", "").replace(
        "from tests.engine_stand_in import Behaviour, StandIn\n", ""
    )
    return ("#!/usr/bin/python3\n" + library + program).encode()


def install(host: RunningHost, release: str) -> None:
    """The stand-in where the plan has the release of llama.cpp."""
    program = engine()
    files = {"bin/llama-server": {"size_bytes": len(program), "sha256": hashlib.sha256(program).hexdigest(), "mode": "0755"}}
    document = {"schema": "v100ctl/release/1", "build_id": release.rsplit("/", 1)[1], "engine": "llama_cpp", "files": files}
    on_host(host, f"mkdir -p {release}/bin")
    put_file(host.container, f"{release}/bin/llama-server", program, mode=0o755)
    put_file(host.container, f"{release}/release.json", json.dumps(document).encode(), mode=0o644)


@pytest.fixture(scope="module")
def fleet(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningHost, Path]]:
    """A host that serves with the stand-in, and its inventory."""
    from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
    from v100ctl.lab.image import ensure_image

    host = lab.up(LabHost(f"tune-{os.getpid()}", owner=run_identity()), ensure_image(lab.client, lab_reporter), lab_reporter)
    settings = {"parallel": 2, "context_length": 2048, "flash_attention": "off", "batch_size": 512, "ubatch_size": 512}
    path = tmp_path_factory.mktemp("fleet") / "hosts.yml"
    write_inventory(path, {host.name: host.variables()}, variables=serving_variables(settings=settings))
    plan = v100ctl("render", host.name, "-i", path)
    release = re.search(r"/opt/v100ctl/engines/llama_cpp/[A-Za-z0-9.-]+", plan.out)
    assert release is not None, plan.err
    install(host, release[0])
    done = v100ctl("provision", "-i", path, "--json")
    assert done.code == 0, done.err
    yield host, path
    lab.down(host.name)


def wait_for(what: Callable[[], Any], limit_s: float = 180.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        found = what()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError("it never came")


def words(host: RunningHost) -> str:
    """The command line of the server that runs now."""
    pid = on_host(host, f"systemctl show --value --property MainPID {UNIT}").strip()
    code, line = host.execute("/bin/sh", "-c", f"tr '\\0' ' ' </proc/{pid}/cmdline")
    return line if code == 0 else ""


def is_live(host: RunningHost) -> bool:
    """Whether the live settings run and nothing of a trial is left."""
    left = on_host(host, f"ls -d {DROP_IN} /run/v100ctl/tune/chat 2>/dev/null || true").strip()
    ends = on_host(host, "systemctl is-active v100ctl-tune-chat.service || true").strip()
    return not left and ends != "active" and "--ubatch-size 512 " in words(host)


def is_tried(host: RunningHost) -> bool:
    """Whether a trial of other words runs."""
    code, _ = host.execute("test", "-e", DROP_IN)
    return code == 0 and "--ubatch-size 512 " not in words(host)


def test_a_dry_run_touches_nothing(fleet: tuple[RunningHost, Path]) -> None:
    host, inventory = fleet
    before = on_host(host, f"systemctl show --value --property InvocationID {UNIT}")
    done = v100ctl("tune", f"{host.name}/chat", "-i", inventory, "--dry-run", "--objective", "throughput")
    assert done.code == 0, done.err
    assert "not tried: [quantised-v-needs-flash-attention]" in done.out
    assert on_host(host, f"systemctl show --value --property InvocationID {UNIT}") == before


def test_the_live_settings_come_back_after_the_controller_was_killed(fleet: tuple[RunningHost, Path]) -> None:
    host, inventory = fleet
    argv = [sys.executable, "-P", "-m", "v100ctl", "tune", f"{host.name}/chat", "-i", str(inventory), *DIMENSIONS]
    for _ in range(2):
        tuning = subprocess.Popen([*argv, "--lease", str(LEASE_S)], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for(lambda: is_tried(host))
            assert on_host(host, "systemctl is-active v100ctl-tune-chat.service").strip() == "active"
            assert DROP_IN not in on_host(host, f"systemd-analyze verify {UNIT} 2>&1 || true")
            # Nobody else restarts it meanwhile.
            assert host.execute("flock", "--nonblock", "/run/v100ctl/chat.lock", "true")[0] == 1
        finally:
            os.killpg(tuning.pid, signal.SIGKILL)
            tuning.wait()
        # The dead-man as well: systemd has it come back.
        on_host(host, "systemctl kill --signal KILL v100ctl-tune-chat.service")
        wait_for(lambda: is_live(host))
        again = v100ctl("plan", "-i", inventory, "--json")
        assert again.code == 0, again.out


def test_it_goes_on_and_finds_the_winner(fleet: tuple[RunningHost, Path], tmp_path: Path) -> None:
    host, inventory = fleet
    picture = tmp_path / "tune.svg"
    done = v100ctl("tune", f"{host.name}/chat", "-i", inventory, *DIMENSIONS, "--json", "--chart", picture, "--write", "--yes")
    assert done.code == 0, done.err
    assert "trials of an earlier run" in done.err
    document = done.document
    assert document["choices"] == {"ubatch_size": "1024", "flash_attention": "on"}, document
    assert "ubatch_size: 1024" in document["diff"] and document["changes"] == [host.name]
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert is_live(host)
    # What was written is carried out as any other change.
    assert v100ctl("plan", "-i", inventory, "--json").code == 2
    provisioned = v100ctl("provision", "-i", inventory, "--json")
    assert provisioned.code == 0, provisioned.err
    assert "--ubatch-size 1024 " in words(host) and "--flash-attn on" in words(host)
