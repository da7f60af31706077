#!/usr/bin/env python3
"""How the toolkit and Ansible do as a fleet grows: a few lab hosts stand for many, each under many addresses.

fleet_size.py up --hosts 200        starts the lab hosts, has them serve, gives them their addresses (once; the others need it)
fleet_size.py fleet                 v100ctl's plan and the dry run of a rollout over all of them
fleet_size.py ansible --hosts 50    ansible-playbook over some: forks, serial, connection reuse
fleet_size.py pull                  one host by `ansible-pull` on the host itself, beside a push to it
fleet_size.py down                  removes the lab hosts

Each address answers on its own: SSH, sudo, the probe and what Ansible sends run there as on a host of its own. They share the
machine's processors with the controller, which real hosts would not: so the controller's own processor time, that of all hosts,
and the controller's largest memory stand beside the time by the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.device import shapes  # noqa: E402
from v100ctl.apply.reporter import Reporter, make_reporter  # noqa: E402
from v100ctl.lab import lab_dir  # noqa: E402
from v100ctl.lab.containers import put_file  # noqa: E402
from v100ctl.lab.engine import ensure_docker  # noqa: E402
from v100ctl.lab.hosts import Lab, LabHost, RunningHost, write_inventory  # noqa: E402
from v100ctl.lab.image import ensure_image  # noqa: E402

#: Each stands for a share of the fleet.
CONTAINERS = 4
FRONT = "fleet-size-front"
MODEL = "/srv/models/x.gguf"
#: One host's addresses come one after another; Docker gives its own from the other end of the range.
ADDRESSES = "172.17.{}.{}"
#: As many log in at once as the controller has forks, which a host of its own would never see.
SSHD = "MaxStartups 1000\nMaxSessions 1000\n"
VENV_BIN = ROOT / ".venv/bin" if (ROOT / ".venv").is_dir() else Path(sys.executable).parent
#: Speaks as an engine does.
SERVER = """#!/usr/bin/python3
import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for flag in ("host", "port", "model", "ctx-size"):
    parser.add_argument(f"--{flag}", required=True)
options = parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "one two three"}
        body = json.dumps({"choices": [{"message": message}], "usage": {"completion_tokens": 3}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""
#: What a role does most: run something, and write what is there already. `wait_s`: a host does something, and is waited for.
PLAYBOOK = """
- hosts: all
  gather_facts: false
  become: true
  serial: "{{ at_once | default('100%') }}"
  tasks:
    - ansible.builtin.command: {argv: [systemctl, is-active, v100-chat]}
      changed_when: false
    - ansible.builtin.copy: {content: "one\\n", dest: /etc/fleet-size, mode: "0644"}
    - ansible.builtin.command: {argv: [sleep, "{{ wait_s | default(0) }}"]}
      changed_when: false
"""


# --- the lab ------------------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The lab hosts that serve."""
    return [f"fleet-size-{number}" for number in range(1, CONTAINERS + 1)]


def folder() -> Path:
    """What is kept between two calls: keys of hosts, inventory, what the last run said."""
    made = lab_dir() / "fleet-size"
    made.mkdir(exist_ok=True)
    return made


def model() -> bytes:
    """A small model whose header is a real one."""
    path = folder() / "x.gguf"
    if not path.exists():
        shapes.write(shapes.MODELS["smallest"](), path)
    return path.read_bytes()


def variables(context_length: int = 1024) -> dict[str, Any]:
    """What every host of the fleet serves."""
    program = folder() / "server"
    program.write_text(SERVER, encoding="utf-8")
    engine = {
        "source": {"from_controller": str(program), "sha256": hashlib.sha256(SERVER.encode()).hexdigest(), "kind": "file"},
        "backend": "cpu",
        "argv": shlex.split("{release}/bin/server --host {listen} --port {port} --model {model} --ctx-size {context_length}"),
    }
    chat = {
        "engine": "external",
        "external": "server",
        "model": {"path": MODEL, "sha256": hashlib.sha256(model()).hexdigest()},
        "gpus": [],
        "listen": "0.0.0.0",
        "settings": {"context_length": context_length},
    }
    return {
        "external_engine_definitions": {"server": engine},
        "llm_server_allow_unauthenticated": True,
        "llm_server_instances": {"chat": chat},
    }


def up(hosts: int) -> None:
    """Lab hosts that serve, and their addresses."""
    reporter = make_reporter()
    lab = Lab(ensure_docker(reporter, install=False))
    running = _start(lab, reporter)
    path = folder() / "hosts.yml"
    write_inventory(path, {name: running[name].variables() for name in names()}, variables=variables())
    provision = [sys.executable, "-P", "-m", "v100ctl", "provision", "--yes", "-i"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([*provision, str(path)], cwd=ROOT, check=True, env=environment)
    known, made = [], {}
    for number in range(hosts):
        host = running[names()[number % CONTAINERS]]
        address = ADDRESSES.format(200 + number // 200, 1 + number % 200)
        known.append(f"{address} {host.host_key}\n")
        host.execute("ip", "address", "replace", f"{address}/16", "dev", "eth0")
        made[f"gpu{number + 1:03}"] = {**host.variables(), "ansible_host": address}
    known_hosts = folder() / "known_hosts"
    known_hosts.write_text("".join(known), encoding="utf-8")
    for values in made.values():
        arguments = values["ansible_ssh_common_args"]
        values["ansible_ssh_common_args"] = arguments.replace(str(lab.folder / "known_hosts"), str(known_hosts))
    front = {**running[FRONT].variables(), "gateway_placement": "fleet", "gateway_listen": "0.0.0.0"}
    (folder() / "made.json").write_text(json.dumps({"hosts": made, "front": front}), encoding="utf-8")
    with_front = str(inventory(hosts, front=True))
    subprocess.run([*provision, with_front, "--limit", "front"], cwd=ROOT, check=True, env=environment)
    reporter.close()


def _start(lab: Lab, reporter: Reporter) -> dict[str, RunningHost]:
    image = ensure_image(lab.client, reporter)
    running = {name: lab.up(LabHost(name), image, reporter) for name in (*names(), FRONT)}
    for host in running.values():
        put_file(host.container, "/etc/ssh/sshd_config.d/fleet-size.conf", SSHD.encode(), mode=0o644)
        host.execute("mkdir", "-p", "/srv/models")
        put_file(host.container, MODEL, model(), mode=0o644)
        host.execute("systemctl", "reload", "ssh")
    return running


def inventory(hosts: int, *, context_length: int = 1024, front: bool = False) -> Path:
    """An inventory of the first hosts."""
    made = json.loads((folder() / "made.json").read_text(encoding="utf-8"))
    chosen = dict(list(made["hosts"].items())[:hosts])
    if len(chosen) < hosts:
        sys.exit(f"`fleet_size.py up` has made {len(chosen)} hosts")
    groups = {
        "gpus": {"hosts": chosen, "vars": variables(context_length)},
        "fronts": {"hosts": {"front": made["front"]} if front else {}},
    }
    path = folder() / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"children": groups}}, sort_keys=False), encoding="utf-8")
    return path


# --- measuring ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run took: by the clock, of the controller's and the hosts' processors, and the most memory of one process here."""

    wall_s: float
    cpu_s: float
    hosts_cpu_s: float
    peak_mib: float
    code: int
    out: str


def hosts_cpu_s() -> float:
    """The processor time that all processes of the lab hosts have used so far, those that have ended among them."""
    client = docker.from_env()
    ticks = 0
    for container in client.containers.list(filters={"name": "fleet-size"}):
        listed = container.exec_run(["/bin/sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null"]).output.decode("utf-8", "replace")
        # proc(5), fields 14 to 17: its own time and that of children that it has waited for.
        ticks += sum(sum(map(int, line.rpartition(")")[2].split()[11:15])) for line in listed.splitlines() if ")" in line)
    client.close()
    return ticks / os.sysconf("SC_CLK_TCK")


def run(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """Runs it to its end. What hosts use is counted by their containers: they are no children of the controller."""
    log = folder() / "log"
    hosts_before_s = hosts_cpu_s()
    began_s = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began_s
    return Run(
        wall_s,
        used.ru_utime + used.ru_stime,
        hosts_cpu_s() - hosts_before_s,
        used.ru_maxrss / 1024,
        os.waitstatus_to_exitcode(status),
        log.read_text(encoding="utf-8", errors="replace"),
    )


def show(name: str, done: Run, wanted_code: int) -> None:
    """One row of the table; a run that did not end as it should is shown and ends everything."""
    if done.code != wanted_code:
        sys.exit(f"{name}: exit code {done.code}\n{done.out[-4000:]}")
    row = "".join(f" {seconds:>7.1f} s" for seconds in (done.wall_s, done.cpu_s, done.hosts_cpu_s))
    print(f"{name:<44}{row} {done.peak_mib:>7.0f} MiB", flush=True)


def head() -> None:
    """What the columns are."""
    print(f"{'':<44} {'clock':>9} {'here':>9} {'hosts':>9} {'memory':>11}", flush=True)


def fleet(hosts: int, forks: Sequence[int]) -> None:
    """v100ctl's own reading of the fleet: plan, and a rollout that only says what it would do."""
    head()
    program = [sys.executable, "-P", "-m", "v100ctl"]
    for at_once in forks:
        path = inventory(hosts, front=True)
        options = ["-i", str(path), "--forks", str(at_once), "--json"]
        show(f"plan, {hosts} hosts as planned, forks {at_once}", run([*program, "plan", *options]), 0)
        path = inventory(hosts, context_length=2048, front=True)
        show(f"rollout --check, {hosts} hosts, forks {at_once}", run([*program, "rollout", *options, "--check"]), 2)


def ansible(hosts: int, forks: Sequence[int]) -> None:
    """ansible-playbook as the toolkit sets it, and without what it sets."""
    playbook = folder() / "playbook.yml"
    playbook.write_text(PLAYBOOK, encoding="utf-8")
    head()

    def play(name: str, at_once: int, count: int, *extra: str, **environment: str) -> None:
        argv = [str(VENV_BIN / "ansible-playbook"), "-i", str(inventory(count)), "--forks", str(at_once), *extra, str(playbook)]
        # Sockets of connections that are kept must not be there from the run before.
        with_sockets = {"ANSIBLE_SSH_CONTROL_PATH_DIR": f"/tmp/fs{os.getpid()}-{time.monotonic_ns() % 10**6}"}
        settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_HOST_KEY_CHECKING": "True"}
        show(name, run(argv, {**settings, **with_sockets, **environment}), 0)

    # What the playbook writes is there afterwards.
    play(f"{hosts} hosts, forks {forks[-1]}, first run", forks[-1], hosts)
    for at_once in forks:
        play(f"{hosts} hosts, forks {at_once}", at_once, hosts)
    for at_once in forks:
        play(f"{hosts} hosts, forks {at_once}, 10 s of waiting", at_once, hosts, "-e", "wait_s=10")
    play(f"{hosts} hosts, serial 10, 10 s of waiting", max(forks), hosts, "-e", "wait_s=10", "-e", "at_once=10")
    few = max(1, hosts // 5)
    common = "ANSIBLE_SSH_ARGS"
    for name, environment in {
        "as the toolkit sets it": {},
        "no pipelining": {"ANSIBLE_PIPELINING": "False"},
        "no ControlPersist": {common: "-o ControlMaster=no"},
        "neither": {"ANSIBLE_PIPELINING": "False", common: "-o ControlMaster=no"},
    }.items():
        play(f"{few} hosts, {name}", few, few, **environment)


def pull() -> None:
    """The playbook on a host itself, from a repository, beside the same over SSH; nothing is left to be changed by either."""
    reporter = make_reporter()
    lab = Lab(ensure_docker(reporter, install=False))
    host = lab.running(names()[0])
    reporter.close()
    _put_checkout(host)
    playbook = "playbooks/provision.yml"
    head()
    path = folder() / "hosts.yml"
    write_inventory(path, {host.name: host.variables()}, variables=variables())
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    push = [str(VENV_BIN / "ansible-playbook"), "-i", str(path), str(ROOT / playbook)]
    own = {"ansible_connection": "local", "ansible_become": True, "ansible_python_interpreter": "/usr/bin/python3"}
    inside = write_inventory(folder() / "own.yml", {host.name: own}, variables=variables())
    put_file(host.container, "/srv/hosts.yml", inside.read_bytes(), mode=0o600)
    # The engine's source, where the inventory has it.
    host.execute("mkdir", "-p", str(folder()))
    put_file(host.container, str(folder() / "server"), SERVER.encode(), mode=0o644)
    on_host = ["docker", "exec", host.container.name or "", "sh", "-ec"]
    # As the user's own, who has cloned the same repository.
    pulled = "cd /srv && ANSIBLE_CONFIG=/srv/v100ctl/ansible.cfg PATH=/srv/v100ctl/.venv/bin:$PATH ansible-pull "
    pulled += "-U file:///srv/v100ctl -C main -d /srv/pulled -i /srv/hosts.yml"
    program = [sys.executable, "-P", "-m", "v100ctl", "provision", "-i", str(path)]
    show("ansible-pull", _timed_there(run([*on_host, f"{pulled} {playbook}; times"])), 0)
    show("ansible-pull -o, the repository unchanged", _timed_there(run([*on_host, f"{pulled} -o {playbook}; times"])), 0)
    show("ansible-playbook over SSH", run(push, settings), 0)
    show("v100ctl provision", run(program), 0)


def _timed_there(done: Run) -> Run:
    """A run whose last line is what the shell's `times` says of its children: they are nobody's once they have ended."""
    found = re.findall(r"([0-9]+)m([0-9.]+)s", done.out.splitlines()[-1])
    return dataclasses.replace(done, hosts_cpu_s=sum(60 * int(minutes) + float(seconds) for minutes, seconds in found))


def _put_checkout(host: RunningHost) -> None:
    """A repository and its environment on the host, as a user makes them."""
    if host.execute("test", "-d", "/srv/v100ctl/.git")[0] == 0:
        return
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as opened:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                opened.add(ROOT / name, f"v100ctl/{name}")
        for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
            if Path(path).exists():
                opened.add(Path(path).resolve(), f"machine/{Path(path).name}")
    host.container.put_archive("/srv", archive.getvalue())
    settings = " ".join(f"{name}={value}" for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_INDEX_URL"))
    for command in (
        "cp /srv/machine/ca-certificates.crt /etc/ssl/certs/; cp /srv/machine/pip.conf /etc/ || true",
        "apt-get -qq update && apt-get -qq install --yes --no-install-recommends git python3-venv >/dev/null",
        f"env {settings} /srv/v100ctl/v100ctl --version",
        "cd /srv/v100ctl && git init -q -b main && git add -A && "
        "git -c user.name=b -c user.email=b@example.org commit -q --allow-empty -m checkout",
    ):
        code, said = host.execute("/bin/sh", "-c", command)
        if code != 0:
            sys.exit(f"{command}: {said}")


def main() -> int:
    """One of the above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "fleet", "ansible", "pull", "down"])
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--forks", type=int, nargs="+", default=None)
    options = parser.parse_args()
    if options.what == "up":
        up(options.hosts)
    elif options.what == "fleet":
        fleet(options.hosts, options.forks or [20])
    elif options.what == "ansible":
        ansible(options.hosts, options.forks or [5, 25, 50])
    elif options.what == "pull":
        pull()
    elif options.what == "down":
        Lab(ensure_docker(make_reporter(), install=False)).down(*names(), FRONT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
