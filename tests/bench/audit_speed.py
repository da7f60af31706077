#!/usr/bin/env python3
"""How fast `audit` is, beside `ansible-playbook --check` of the same playbook and the bare probe over parallel `ssh`.

    tests/bench/audit_speed.py up             lab hosts, provisioned for real; each answers under many names
    tests/bench/audit_speed.py compare        the three, in turn, on 50 endpoints
    tests/bench/audit_speed.py many           `audit` of 1,000 endpoints: time, processor seconds and memory of the controller
    tests/bench/audit_speed.py probe          processor seconds and time of the probe itself on one host
    tests/bench/audit_speed.py down           removes the lab hosts

An endpoint is a name of its own in the inventory, with connections of its own: `e0001.bench-audit-1` is the host `bench-audit-1`
by an ssh configuration. Times are of whole processes. The hosts run on the same machine, so their work is in every time;
processor seconds are those of the controller (the command and its children) alone. Run from a checkout, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

PREFIX = "bench-audit"
#: The playbook that `v100ctl provision` and `audit --deep` run.
PLAYBOOK = ROOT / "playbooks/provision.yml"
#: sshd's defaults drop connections that are not logged in yet beyond ten.
SSHD = "MaxStartups 2000\nMaxSessions 200\nLoginGraceTime 120\nPerSourceMaxStartups none\n"
V100CTL = [sys.executable, "-P", "-m", "v100ctl"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "NO_COLOR": "1"}


def folder() -> Path:
    """Where inventories and the ssh configuration lie."""
    from v100ctl.paths import state_dir

    found = state_dir() / "bench-audit"
    found.mkdir(parents=True, exist_ok=True)
    return found


# --- hosts ------------------------------------------------------------------------------------------------------------


def up(count: int) -> None:
    """Bring up the hosts and provision them with the practice host's engine and model."""
    from v100ctl.apply.reporter import make_reporter
    from v100ctl.lab.engine import ensure_docker
    from v100ctl.lab.hosts import Lab, LabHost, write_inventory
    from v100ctl.lab.image import ensure_image
    from v100ctl.practice import inventory_variables

    reporter = make_reporter()
    client = ensure_docker(reporter, install=True)
    image = ensure_image(client, reporter)
    lab = Lab(client)
    hosts = [lab.up(LabHost(f"{PREFIX}-{number + 1}"), image, reporter) for number in range(count)]
    for host in hosts:
        script = f"printf %s {shlex.quote(SSHD)} > /etc/ssh/sshd_config.d/bench.conf && systemctl reload ssh"
        code, output = host.execute("/bin/sh", "-c", script)
        if code != 0:
            sys.exit(f"{host.name}: {output}")
    reporter.close()
    inventory = write_inventory(
        folder() / "real.yml", {host.name: host.variables() for host in hosts}, variables=inventory_variables(builder=False)
    )
    subprocess.run([*V100CTL, "provision", "-y", "-i", str(inventory)], env=ENVIRONMENT, check=True)


def down() -> None:
    """Remove the hosts."""
    from v100ctl.apply.reporter import make_reporter
    from v100ctl.lab.engine import ensure_docker
    from v100ctl.lab.hosts import Lab

    reporter = make_reporter()
    lab = Lab(ensure_docker(reporter, install=False))
    lab.down(*[host.name for host in lab.list() if host.name.startswith(f"{PREFIX}-")])
    reporter.close()


#: Stands for Python on a host: takes the script, and says what the probe said there a moment ago.
RECORDED = "/usr/local/lib/bench-audit/python3"


def endpoints(count: int, *, recorded: bool = False) -> tuple[Path, Path, list[str]]:
    """An inventory of so many names for the hosts, the ssh configuration that knows them, and the names.

    With ``recorded`` hosts do not run the probe but repeat its answer, so that they leave the processors to the controller.

    Each is a host of its own to everybody who connects: no connection of one is used for another.
    """
    from docker import from_env

    from v100ctl.lab.hosts import Lab, write_inventory
    from v100ctl.practice import inventory_variables

    lab = Lab(from_env())
    hosts = [lab.running(state.name) for state in lab.list() if state.name.startswith(f"{PREFIX}-")]
    if not hosts:
        sys.exit("there are no hosts: run `up` first")
    config = folder() / "ssh_config"
    config.write_text(
        "".join(f"Host *.{host.name}\n  HostName {host.address}\n  HostKeyAlias {host.name}\n" for host in hosts)
        + "Host *\n"
        + f"  User {hosts[0].user}\n  IdentityFile {hosts[0].key_path}\n  IdentitiesOnly yes\n"
        + f"  UserKnownHostsFile {hosts[0].known_hosts_path}\n  GlobalKnownHostsFile /dev/null\n"
        + "  StrictHostKeyChecking yes\n",
        encoding="utf-8",
    )
    names = [f"e{number + 1:04}.{hosts[number % len(hosts)].name}" for number in range(count)]
    common: dict[str, Any] = {"ansible_ssh_common_args": shlex.join(["-F", str(config)]), "ansible_become": True}
    if recorded:
        common["ansible_python_interpreter"] = RECORDED
    inventory = write_inventory(
        folder() / f"{count}{'-recorded' * recorded}.yml",
        {name: {} for name in names},
        variables={**inventory_variables(builder=False), **common},
    )
    return inventory, config, names


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One run: how long, processor seconds of the command with all that it started here, and memory of all of them together."""

    elapsed_s: float
    cpu_s: float
    #: Of the command's own process (its peak), and of it with all that it has started, as far as samples have seen it.
    process_bytes: int
    tree_bytes: int
    code: int


def _tree_bytes(pid: int) -> tuple[int, int]:
    """The memory of a process and all below it, with what they share counted once; and the most that the first has held."""
    total, peak, left = 0, 0, [pid]
    while left:
        found = left.pop()
        try:
            if found == pid:
                status = Path(f"/proc/{found}/status").read_text(encoding="ascii")
                peak = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
            smaps = Path(f"/proc/{found}/smaps_rollup").read_text(encoding="ascii")
            total += sum(int(line.split()[1]) << 10 for line in smaps.splitlines() if line.startswith("Pss:"))
            for task in Path(f"/proc/{found}/task").iterdir():
                left += map(int, (task / "children").read_text(encoding="ascii").split())
        except (OSError, ValueError):
            continue
    return total, peak


def measured(argv: Sequence[str], log: Path, *, memory: bool = False) -> Measured:
    """Run a command to its end. ``memory``: follow its memory too, which costs some time itself."""
    with log.open("w", encoding="utf-8") as stream:
        begin_s = time.monotonic()
        process = subprocess.Popen(argv, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT)
        tree, alone, ended = [0], [0], threading.Event()

        def follow() -> None:
            while not ended.wait(0.25):
                now_bytes, peak_bytes = _tree_bytes(process.pid)
                tree[0], alone[0] = max(tree[0], now_bytes), max(alone[0], peak_bytes)

        thread = threading.Thread(target=follow)
        if memory:
            thread.start()
        _, status, usage = os.wait4(process.pid, 0)
        elapsed_s = time.monotonic() - begin_s
        process.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        if memory:
            thread.join()
    return Measured(elapsed_s, usage.ru_utime + usage.ru_stime, alone[0], tree[0], process.returncode)


def audit_argv(inventory: Path, report: Path, forks: int | None) -> list[str]:
    """The audit, with a report by which the run is checked."""
    return [*V100CTL, "audit", "-i", str(inventory), "-o", f"json:{report}", *([f"--forks={forks}"] if forks else [])]


def checked(report: Path, count: int) -> None:
    """Stop unless every endpoint was looked at and is as planned: what fails is fast."""
    hosts = json.loads(report.read_text(encoding="utf-8"))["hosts"]
    bad = {name: host for name, host in hosts.items() if host["status"] != "clean" or not host["probe_ms"]}
    if len(hosts) != count or bad:
        sys.exit(f"{len(hosts)} hosts, {len(bad)} of them not clean: {json.dumps(dict(list(bad.items())[:2]), indent=1)}")


def bare_argv(inventory: Path, config: Path, names: Sequence[str], forks: int, answers: Path) -> list[str]:
    """The same script with the same request over parallel `ssh`, its answers into files: what nothing can be faster than."""
    from v100ctl.fleet import load_fleet
    from v100ctl.plan import probe_request
    from v100ctl.probe.run import HOST_SCRIPT, encode_request

    host = load_fleet([str(inventory)]).hosts[names[0]]
    remote = shlex.join(
        ["sudo", "-n", "/usr/bin/python3", "-I", "-S", "-B", "-", "--request", encode_request(probe_request(host.config))]
    )
    ssh = f"ssh -F {shlex.quote(str(config))} {{}} {shlex.quote(remote)} < {shlex.quote(str(HOST_SCRIPT))}"
    script = answers / "one.sh"
    script.write_text(ssh.replace("{}", '"$1"') + f' > {shlex.quote(str(answers))}/"$1".json\n', encoding="utf-8")
    listed = answers / "names"
    listed.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return ["xargs", "-a", str(listed), "-P", str(forks), "-I{}", "sh", str(script), "{}"]


def check_argv(inventory: Path, forks: int) -> list[str]:
    """Ansible's own check mode, as `audit --deep` runs it."""
    ansible = str(Path(sys.executable).with_name("ansible-playbook"))
    return [ansible, "--check", "--forks", str(forks), "-i", str(inventory), str(PLAYBOOK)]


def compare(count: int, check_count: int, runs: int, forks: int) -> dict[str, Any]:
    """The three in turn, so that a busy machine slows all alike; `--check` once, and beside it `audit` of the same endpoints."""
    inventory, config, names = endpoints(count)
    found: dict[str, list[Measured]] = {"bare": [], "audit": [], "check": [], "audit of the same": []}
    with tempfile.TemporaryDirectory() as scratch:
        answers, report, log = Path(scratch), Path(scratch, "report.json"), folder() / "last.log"
        for number in range(runs):
            for answer in answers.glob("*.json"):
                answer.unlink()
            found["bare"].append(measured(bare_argv(inventory, config, names, forks, answers), log))
            sizes = [(answers / f"{name}.json").stat().st_size for name in names]
            if found["bare"][-1].code or min(sizes) < 10000:
                sys.exit(f"the bare run failed: {log.read_text(encoding='utf-8')[-2000:]}")
            found["audit"].append(measured(audit_argv(inventory, report, forks), log))
            checked(report, count)
            if number == 0 and check_count:
                some, _, _ = endpoints(check_count)
                found["check"].append(measured(check_argv(some, forks), log))
                if found["check"][-1].code:
                    sys.exit(f"ansible-playbook failed: {log.read_text(encoding='utf-8')[-2000:]}")
                found["audit of the same"].append(measured(audit_argv(some, report, forks), log))
                checked(report, check_count)
    return {name: [vars(run) for run in runs_of] for name, runs_of in found.items()}


def record() -> None:
    """Have each host keep what the probe says of it now."""
    from docker import from_env

    from v100ctl.fleet import load_fleet
    from v100ctl.lab.containers import put_file
    from v100ctl.lab.hosts import Lab
    from v100ctl.plan import probe_request
    from v100ctl.probe import Connection, open_session
    from v100ctl.probe.run import HOST_SCRIPT, encode_request, run_python

    lab = Lab(from_env())
    there = {state.name for state in lab.list()}
    for host in load_fleet([str(folder() / "real.yml")]).hosts.values():
        if host.name not in there:
            continue
        with open_session(Connection.from_vars(host.name, host.variables)) as session:
            request = encode_request(probe_request(host.config))
            answer = run_python(session, HOST_SCRIPT.read_bytes(), request, what="the probe")
        running = lab.running(host.name)
        running.execute("mkdir", "-p", str(Path(RECORDED).parent))
        put_file(running.container, f"{RECORDED}.json", answer, mode=0o600)
        script = f"#!/bin/sh\ncat > /dev/null\nexec cat {RECORDED}.json\n"
        put_file(running.container, RECORDED, script.encode(), mode=0o755)


def many(count: int, runs: int, forks: int | None, *, recorded: bool) -> dict[str, Any]:
    """One audit of very many endpoints."""
    if recorded:
        record()
    inventory, _, _ = endpoints(count, recorded=recorded)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        report, log = Path(scratch, "report.json"), folder() / "last.log"
        for _ in range(runs):
            found.append(measured(audit_argv(inventory, report, forks), log, memory=True))
            checked(report, count)
    return {"audit": [vars(run) for run in found]}


def probe(runs: int) -> dict[str, Any]:
    """The probe on one host, by that host's own clock: all that the script and what it starts take there."""
    from v100ctl.fleet import load_fleet
    from v100ctl.plan import probe_request
    from v100ctl.probe import Connection, open_session
    from v100ctl.probe.run import HOST_SCRIPT, encode_request

    inventory, _, names = endpoints(1)
    host = load_fleet([str(inventory)]).hosts[names[0]]
    timer = (
        "import json,os,subprocess,sys,time;b=time.monotonic();"
        "r=subprocess.run(['/usr/bin/python3','-I','-S','-B','-','--request',sys.argv[1]],stdin=sys.stdin,stdout=subprocess.PIPE);"
        "e=time.monotonic()-b;u=os.wait4;t=os.times();"
        "print(json.dumps([e,t.children_user+t.children_system,len(r.stdout),r.returncode]))"
    )
    found = []
    with open_session(Connection.from_vars(host.name, host.variables)) as session:
        for _ in range(runs):
            argv = ["/usr/bin/python3", "-c", timer, encode_request(probe_request(host.config))]
            done = session.run(argv, stdin=HOST_SCRIPT.read_bytes(), become=True)
            elapsed_s, cpu_s, size_bytes, code = json.loads(done.stdout)
            if code:
                sys.exit(f"the probe failed: {done.stderr.decode()}")
            found.append({"elapsed_s": elapsed_s, "cpu_s": cpu_s, "answer_bytes": size_bytes})
    return {"probe": found}


def main() -> int:
    """Do as the arguments say and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "compare", "many", "probe", "down"])
    parser.add_argument("--hosts", type=int, default=4, help="up: lab hosts (default: 4)")
    parser.add_argument("--endpoints", type=int, help="names to audit (default: 50, and 1000 for many)")
    parser.add_argument(
        "--check-endpoints", type=int, default=50, help="compare: names for ansible-playbook --check, 0: none (default: 50)"
    )
    parser.add_argument(
        "--forks", type=int, help="how many hosts at a time (default: 20 for compare, the command's own for many)"
    )
    parser.add_argument(
        "--recorded", action="store_true", help="many: hosts repeat a recorded answer instead of running the probe"
    )
    parser.add_argument("--runs", type=int, help="runs of each, --check but one (default: 5, and 1 for many)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args()
    if given.what == "up":
        up(given.hosts)
        return 0
    if given.what == "down":
        down()
        return 0
    if given.what == "compare":
        found = compare(given.endpoints or 50, given.check_endpoints, given.runs or 5, given.forks or 20)
    elif given.what == "many":
        found = many(given.endpoints or 1000, given.runs or 1, given.forks, recorded=given.recorded)
    else:
        found = probe(given.runs or 5)
    for name, runs in found.items():
        for key in runs[0] if runs else ():
            values = [run[key] for run in runs]
            if not any(values):
                continue
            scale, unit = (1 << 20, "MiB") if key.endswith("_bytes") else (1, "")
            print(
                f"{name:17} {key:13} median {statistics.median(values) / scale:10.3f} {unit}"
                f"  from {min(values) / scale:.3f} to {max(values) / scale:.3f} in {len(values)} runs"
            )
    if given.what == "compare":
        audit_s, bare_s = (statistics.median(run["elapsed_s"] for run in found[name]) for name in ("audit", "bare"))
        print(f"audit / bare: {audit_s / bare_s:.2f}")
        if found["check"]:
            check, same = found["check"][0], found["audit of the same"][0]
            print(f"--check / audit, {given.check_endpoints} endpoints: {check['elapsed_s'] / same['elapsed_s']:.1f}")
            print(f"  in the controller's processor seconds: {check['cpu_s'] / same['cpu_s']:.1f}")
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the end")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
