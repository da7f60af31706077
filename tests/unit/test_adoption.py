"""Servers that somebody runs by hand: what the probe says of them, what the plan makes of it, and how they are stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import importlib.util
import io
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.factory import AS_OF
from v100ctl.access import Access
from v100ctl.apply import ApplyResult, make_reporter, runner
from v100ctl.catalog import load_catalog
from v100ctl.cli.provision import result_document
from v100ctl.compare import compare
from v100ctl.examine import Examined, decide
from v100ctl.facts import Facts, ManagedFile
from v100ctl.fleet import Fleet, FleetHost, parse_config
from v100ctl.plan import plan, probe_request
from v100ctl.plan.adoption import ADOPTED
from v100ctl.probe import host_script as probe
from v100ctl.provision import adopted_since, adopting, fixable, provision

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "roles/llm_server/files/adopt.py"
CASES = Path(__file__).parent / "plan/cases"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("adopt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the probe ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["llama-server", "--api-key", "k1", "-m", "x"], ["llama-server", "--api-key", "(hidden)", "-m", "x"]),
        (["llama-server", "--api-key", "-k1", "--port", "1"], ["llama-server", "--api-key", "(hidden)", "--port", "1"]),
        (["vllm", "serve", "--api-key", "k1", "k2"], ["vllm", "serve", "--api-key", "(hidden)", "(hidden)"]),
        (["vllm", "--api-key=k1", "x"], ["vllm", "--api-key=(hidden)", "x"]),
        (["vllm", "--api_key=k1"], ["vllm", "--api_key=(hidden)"]),
        (["vllm", "--api-k", "k1"], ["vllm", "--api-k", "(hidden)"]),
        (["llama-server", "-hft", "t"], ["llama-server", "-hft", "(hidden)"]),
        (["env", "HF_TOKEN=t", "x"], ["env", "HF_TOKEN=(hidden)", "x"]),
        (["python3", "-c", "key = 1", "x"], ["python3", "-c", "(hidden)", "x"]),
        (["x", "https://me:pass@host/a", "hf_abcdefghijkl"], ["x", "https://(hidden)@host/a", "(hidden)"]),
        # No secrets: a file's name, a number, the context.
        (["llama-server", "--api-key-file", "/k", "-c", "4096"], ["llama-server", "--api-key-file", "/k", "-c", "4096"]),
        (["x", "--max-num-batched-tokens", "1", "-ctk", "q8_0"], ["x", "--max-num-batched-tokens", "1", "-ctk", "q8_0"]),
    ],
)
def test_secrets_do_not_leave_the_host(argv: list[str], shown: list[str]) -> None:
    assert probe.without_secrets(argv) == shown


def test_every_flag_that_the_catalog_calls_secret_is_one_to_the_probe() -> None:
    catalog = load_catalog()
    flags = {flag for row in (*catalog.llama_cpp, *catalog.vllm_rows) for flag in row.secret_flags}
    assert {flag for flag in flags if probe.without_secrets(["x", flag, "value"])[2] != probe.HIDDEN} == set()


@pytest.mark.parametrize(
    ("cgroup", "around", "own"),
    [
        ("0::/system.slice/my.service\n", "0::/init.scope\n", "/system.slice/my.service"),
        (
            "1:name=systemd:/docker/abc/system.slice/my.service\n",
            "1:name=systemd:/docker/abc/init.scope\n",
            "/system.slice/my.service",
        ),
        # What the host itself lies in is no container on it.
        (f"1:name=systemd:/docker/{'a' * 64}\n", f"1:name=systemd:/docker/{'a' * 64}/init.scope\n", ""),
        (f"0::/system.slice/docker-{'a' * 64}.scope\n", "0::/init.scope\n", f"/system.slice/docker-{'a' * 64}.scope"),
        ("", "", ""),
    ],
)
def test_the_control_group_without_what_the_host_lies_in(cgroup: str, around: str, own: str) -> None:
    assert probe.own_group(cgroup, around) == own


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[str]:
    """Docker's socket, with one container that publishes port 8000."""
    listed = [
        {
            "Id": "c" * 64,
            "Names": ["/vllm"],
            "Image": "vllm/vllm-openai:v0.8.5.post1",
            "Ports": [{"PrivatePort": 8000, "PublicPort": 8000, "Type": "tcp"}],
        }
    ]
    shown = {
        "Path": "python3",
        "Args": ["-m", "vllm.entrypoints.openai.api_server", "--api-key", "k"],
        "HostConfig": {"RestartPolicy": {"Name": "always"}},
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(listed if self.path == "/containers/json" else shown).encode()
            self.send_response(200 if self.path.startswith("/containers/") else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Not here."""

        def address_string(self) -> str:
            return "docker"

    path = str(tmp_path / "docker.sock")
    with socketserver.UnixStreamServer(path, Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path
        server.shutdown()


def test_a_container_is_named_by_docker_itself(docker: str) -> None:
    found = probe.docker_container("", 8000, docker)
    assert found is not None
    assert (found["name"], found["image"], found["restarts"]) == ("vllm", "vllm/vllm-openai:v0.8.5.post1", True)
    assert found["argv"][-1] == probe.HIDDEN
    assert probe.docker_container("c" * 64, 0, docker) == found
    assert probe.docker_container("", 8001, docker) is None
    assert probe.docker_container("", 8000, docker + ".gone") is None


def test_who_listens_on_a_port_that_was_asked_about(hand_run: Callable[..., tuple[subprocess.Popen[bytes], int]]) -> None:
    server, port = hand_run("--api-key", "a-secret")
    done = subprocess.run(
        [sys.executable, "-I", "-S", probe.__file__, "--request", json.dumps({"ports": [port]})],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a-secret" not in done.stdout
    (found,) = Facts.model_validate_json(done.stdout).occupants
    assert (found.pid, found.ports) == (server.pid, (port,))
    assert found.argv[-2:] == ("--api-key", "(hidden)")
    assert found.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert found.environ["LLAMA_API_KEY"] == "(hidden)"
    # Nobody is told of who was not asked about.
    done = subprocess.run(
        [sys.executable, "-I", "-S", probe.__file__, "--request", "{}"], capture_output=True, text=True, check=True
    )
    assert server.pid not in [occupant.pid for occupant in Facts.model_validate_json(done.stdout).occupants]


# --- the plan -----------------------------------------------------------------------------------------------------------------


def decided(case: str) -> tuple[Any, Facts]:
    import yaml

    folder = CASES / case
    ((name, variables),) = yaml.safe_load((folder / "fleet.yml").read_text())["all"]["hosts"].items()
    facts = Facts.model_validate_json((folder / "facts.json").read_bytes())
    return plan(name, parse_config(name, variables), facts, as_of=AS_OF), facts


def test_an_adoption_is_a_difference_that_its_role_mends() -> None:
    made, facts = decided("a-hand-run-server-of-a-unit-that-is-replaced")
    (finding,) = [item for item in compare(made, facts) if item.id.startswith("process.hand-run:")]
    assert (finding.id, finding.role, finding.instance) == ("process.hand-run:my-llm.service", "llm_server", "chat")
    assert fixable(finding)
    assert "service.port-taken:chat" not in [item.id for item in compare(made, facts)]
    (variables,) = made.to_role_variables()["adoptions"]
    assert (variables["pid"], variables["start_ticks"], variables["port"]) == (77, 4711, 8000)


def test_who_is_not_adopted_is_somebody_elses_matter() -> None:
    made, facts = decided("a-hand-run-server-on-the-port")
    findings = {item.id: item for item in compare(made, facts)}
    assert not [name for name in findings if name.startswith("process.hand-run:")]
    found = findings.get("service.port-taken:chat")
    assert found is not None
    assert (found.kind, "--adopt h1/chat" in found.fix, "started inside tmux" in found.actual) == ("external", True, True)
    assert made.to_role_variables()["adoptions"] == []


def test_both_ports_of_an_instance_are_asked_about() -> None:
    made = parse_config(
        "h1", {"gateway_placement": "host", "llm_server_instances": {"chat": {"model": {"path": "/m.gguf", "sha256": "ab" * 32}}}}
    )
    assert probe_request(made).ports == (8000, 18000)


def test_what_the_command_line_says_is_added_to_the_inventorys_own() -> None:
    model = {"llm_server_instances": {"chat": {"model": {"path": "/m.gguf", "sha256": "ab" * 32}}}}
    hosts = {
        "h1": FleetHost("h1", {}, parse_config("h1", {**model, "llm_server_adopt": ["chat"]})),
        "h2": FleetHost("h2", {}, parse_config("h2", model)),
    }
    fleet, variables = adopting(Fleet(hosts=hosts, sources=(), vault_arguments=(), vault_password=None), [("h2", "chat")])
    assert sorted(variables["llm_server_adopt"]) == ["h1/chat", "h2/chat"]
    assert set(fleet.hosts["h1"].config.llm_server_adopt) == {"h1/chat", "h2/chat"}
    assert adopting(fleet, []) == (fleet, {})


# --- the script that stops them -----------------------------------------------------------------------------------------------

SERVER = """
import os, signal, socket, subprocess, sys, time
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", 0))
listener.listen()
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--child" in sys.argv:
    child = subprocess.Popen(["sleep", "300"])
print(listener.getsockname()[1], flush=True)
time.sleep(300)
"""


@pytest.fixture
def hand_run(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """Starts a server on a port of its own; ended with the test."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> tuple[subprocess.Popen[bytes], int]:
        server = subprocess.Popen(
            [sys.executable, str(program), *words],
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "0", "LLAMA_API_KEY": "a-secret"},
        )
        started.append(server)
        assert server.stdout is not None
        return server, int(server.stdout.readline())

    yield start
    for server in started:
        server.kill()
        server.wait()


def wanted(script: ModuleType, pid: int, port: int, **changed: Any) -> dict[str, Any]:
    salt = "5a" * 16
    document = {
        "instance": "chat",
        "where": f"port {port}",
        "listen": "127.0.0.1",
        "port": port,
        "pid": pid,
        "start_ticks": script.start_ticks(pid),
        "command_digest": probe.keyed_digest(salt, Path(f"/proc/{pid}/cmdline").read_bytes()),
        "salt": salt,
        "command": "server.py",
        "user": "alice",
        "unit": "",
        "unit_user": "",
        "undo": "as alice: server.py",
    }
    return document | changed


def adopt(request: list[dict[str, Any]], record: Path, limit_s: float = 10.0) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            str(SCRIPT),
            "--request",
            json.dumps(request),
            "--record",
            str(record),
            "--limit-s",
            str(limit_s),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def reaped(server: subprocess.Popen[bytes]) -> threading.Thread:
    """Somebody who takes notice when it ends, as a shell does."""
    thread = threading.Thread(target=server.wait, daemon=True)
    thread.start()
    return thread


def test_a_process_is_ended_and_recorded(script: ModuleType, hand_run: Any, tmp_path: Path) -> None:
    server, port = hand_run()
    reaped(server)
    record = tmp_path / "state/adopted.json"
    request = [wanted(script, server.pid, port)]
    code, answer = adopt(request, record)
    assert (code, answer["changed"], answer["problems"]) == (0, True, [])
    assert server.wait(5) == -signal.SIGTERM
    assert json.loads(record.read_text())["adopted"] == answer["stopped"]
    # The probe gives no content of a file that not everybody may read.
    assert record.stat().st_mode & 0o777 == 0o644
    assert (answer["stopped"][0]["state"], answer["stopped"][0]["undo"]) == ("stopped", "as alice: server.py")
    # Once more: it has gone, so there is nothing to do.
    code, answer = adopt(request, record)
    assert (code, answer) == (0, {"changed": False, "stopped": [], "problems": []})


def test_one_that_does_not_listen_to_sigterm_is_killed_with_its_children(
    script: ModuleType, hand_run: Any, tmp_path: Path
) -> None:
    server, port = hand_run("--stubborn", "--child")
    reaped(server)
    children = script.descendants(server.pid)
    assert len(children) == 1
    code, answer = adopt([wanted(script, server.pid, port)], tmp_path / "adopted.json", limit_s=0.5)
    assert (code, answer["problems"]) == (0, [])
    assert server.wait(5) == -signal.SIGKILL
    assert script.left(children) == []


@pytest.mark.parametrize(
    "changed",
    [{"command_digest": "00" * 32}, {"start_ticks": 1}],
    ids=["another-command-line", "another-start"],
)
def test_another_process_with_its_number_is_left_alone(
    script: ModuleType, hand_run: Any, tmp_path: Path, changed: dict[str, Any]
) -> None:
    server, port = hand_run()
    code, answer = adopt([wanted(script, server.pid, port, **changed)], tmp_path / "adopted.json")
    # Of one that was started later it is known that the planned one has ended; its port is not free all the same.
    assert (code, answer["changed"]) == (1, False)
    assert ("plan again" in answer["problems"][0]) or ("is taken again" in answer["problems"][0])
    assert server.poll() is None
    assert not (tmp_path / "adopted.json").exists()


def test_one_that_somebody_starts_anew_is_told(script: ModuleType, hand_run: Any, tmp_path: Path) -> None:
    server, _ = hand_run()
    reaped(server)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        request = wanted(script, server.pid, other.getsockname()[1])
        code, answer = adopt([request], tmp_path / "adopted.json")
    assert code == 1
    assert "is taken again" in answer["problems"][0]
    # What was stopped is recorded all the same.
    assert json.loads((tmp_path / "adopted.json").read_text())["adopted"] == answer["stopped"]


def test_a_unit_is_stopped_and_disabled(
    script: ModuleType, hand_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd itself is met in tests/integration/test_adoption.py."""
    server, port = hand_run()
    reaped(server)
    calls = tmp_path / "calls"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\ncase $1 in show) echo enabled;; stop) kill {server.pid}; sleep 0.2;; esac\n'
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, answer = adopt([wanted(script, server.pid, port, unit="my.service")], tmp_path / "adopted.json")
    assert (code, answer["stopped"][0]["unit_was"]) == (0, "enabled")
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["show", "stop", "disable"]


def test_a_damaged_record_is_no_obstacle(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "adopted.json"
    path.write_text("{")
    assert script.read_record(path) == []
    script.write_record([{"pid": 1}], path)
    assert script.read_record(path) == [{"pid": 1}]


def test_the_scripts_agree_on_the_digest(script: ModuleType) -> None:
    assert (script.DIGEST_ROUNDS, script.MAX_COMMAND_BYTES) == (probe.KEYED_DIGEST_ROUNDS, 1 << 17)
    assert script.command_digest(os.getpid(), "ab") == probe.keyed_digest("ab", Path("/proc/self/cmdline").read_bytes())


def test_what_was_stopped_before_a_failure_is_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    folder = CASES / "a-hand-run-server-of-a-unit-that-is-replaced"
    ((name, variables),) = yaml.safe_load((folder / "fleet.yml").read_text())["all"]["hosts"].items()
    host = FleetHost(name, {}, parse_config(name, variables))
    facts = Facts.model_validate_json((folder / "facts.json").read_bytes())
    entry = {
        "instance": "chat",
        "unit": "my-llm.service",
        "command": "llama-server",
        "undo": "systemctl enable --now my-llm.service",
    }
    kept = {"kind": "file", "content": json.dumps({"schema": "v100ctl/adopted/1", "adopted": [entry]})}
    after = Facts.model_validate({**json.loads(facts.model_dump_json(by_alias=True)), "files": {ADOPTED: kept}, "occupants": []})
    states = iter([facts, after])

    def examine(hosts: Any, *args: Any, **kwargs: Any) -> dict[str, Examined]:
        return {name: decide(host, None, next(states), as_of=AS_OF)}

    def run_playbook(*args: Any, **kwargs: Any) -> ApplyResult:
        counts = runner.HostResult("failed", ok=1, changed=1, failed=1, unreachable=0, skipped=0, rescued=0, ignored=0)
        failure = runner.Failure(name, "llm_server", "Prove", "it does not answer", None)
        return ApplyResult({name: counts}, (failure,), {}, tmp_path / "log")

    monkeypatch.setattr("v100ctl.provision.examine", examine)
    monkeypatch.setattr("v100ctl.provision.run_playbook", run_playbook)
    monkeypatch.setattr("v100ctl.provision.fetch", lambda *args: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    reporter = make_reporter(stream=io.StringIO())
    result = provision(Fleet({name: host}, sources=("x",)), access=Access(), reporter=reporter, as_of=AS_OF)
    reporter.close()
    assert (result.hosts[name].status, result.hosts[name].adopted) == ("failed", (entry,))
    assert result_document(result)["hosts"][name]["adopted"] == [entry]


def test_a_record_that_is_none_is_no_obstacle() -> None:
    made, facts = decided("a-hand-run-server-on-the-port")
    state = Examined(FleetHost("h1", {}, parse_config("h1", {})), None, facts, made)
    for content in ("{", "[]", '{"adopted": 1}', None):
        file = ManagedFile(content=content)
        other = dataclasses.replace(state, facts=facts.model_copy(update={"files": {ADOPTED: file}}))
        assert adopted_since(state, other) == ()
