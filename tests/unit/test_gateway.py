"""The gateway: which ports, which files, and the program that takes a server out."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from v100ctl.compare import compare
from v100ctl.facts import Facts
from v100ctl.plan import HostPlan, gateway, probe_request
from v100ctl.probe import host_script

from .factory import applied_facts, make_config, make_facts, make_plan, merge

SCRIPT = Path(__file__).resolve().parents[2] / "roles/gateway/files/gateway_control.py"
STATISTICS = """# pxname,svname,qcur,qmax,scur,smax,slim,stot,bin,bout,dreq,dresp,ereq,econ,eresp,wretr,wredis,status,weight,addr
chat,FRONTEND,,,3,9,4000,12,1,1,0,0,0,,,,,OPEN,,
engine-chat,engine,0,0,2,2,,9,1,1,,0,,0,0,0,0,{status},1,127.0.0.1:18000
engine-chat,BACKEND,0,0,2,2,400,9,1,1,0,0,,0,0,0,0,UP,1,
"""
#: As the kernel writes it: one that listens, one to another port, one that waits for its end.
CONNECTIONS = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:4650 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:A001 0100007F:4651 01 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100007F:A002 0100007F:4650 06 00000000:00000000 00:00000000 00000000     0        0 3
"""
OPEN = "   3: 0100007F:A003 0100007F:4650 01 00000000:00000000 00:00000000 00000000     0        0 4\n"
INFO = "Name: HAProxy\nVersion: 2.6.12\nnode: h1\ndescription: v100ctl 0123456789abcdef\nStopping: 0\n"


def behind_gateway(**changes: Any) -> HostPlan:
    return make_plan(config=make_config({"listen": "10.1.2.3"}, **merge(WANTED, changes)))


WANTED = {"gateway_placement": "host", "llm_server_allow_unauthenticated": True}


# --- the plan -----------------------------------------------------------------------------------------------------------------


def test_the_engine_goes_to_loopback_and_the_gateway_takes_its_port() -> None:
    decided = behind_gateway()
    (instance,) = decided.instances
    assert (instance.listen, instance.port) == ("127.0.0.1", 18000)
    assert instance.argv[instance.argv.index("--port") + 1] == "18000"
    assert instance.health_url == "http://127.0.0.1:18000/health"
    assert decided.gateway is not None
    (front,) = decided.gateway.fronts
    assert (front.bind, front.engine, front.health_path) == ("10.1.2.3:8000", "127.0.0.1:18000", "/health")
    assert decided.verdict == "ok"
    assert "haproxy" in decided.packages
    config = next(file.content for file in decided.files if file.path == gateway.CONFIG)
    assert "    bind 10.1.2.3:8000\n" in config
    assert "ssl" not in config.replace("ssl-default-bind-options", "").replace("ssl-min-ver", "")
    assert probe_request(make_config(**WANTED)).health == {"chat": "http://127.0.0.1:18000/health"}


def test_without_it_the_engine_listens_itself() -> None:
    decided = make_plan()
    assert decided.gateway is None
    assert decided.instances[0].port == 8000
    assert "haproxy" not in decided.packages


def test_a_public_port_needs_permission_behind_a_gateway_too() -> None:
    assert "listen-unauthenticated" in {rule.id for rule in behind_gateway(llm_server_allow_unauthenticated=False).rules}


def test_addresses_of_both_families_and_certificates() -> None:
    config = make_config({"listen": "::1", "port": 60000}, **WANTED, gateway_tls_certificate="/etc/ssl/private/chat.pem")
    decided = make_plan(config=config)
    text = next(file.content for file in decided.files if file.path == gateway.CONFIG)
    assert "    bind [::1]:60000 ssl crt /etc/ssl/private/chat.pem alpn h2,http/1.1\n" in text
    # There is no port above 65535.
    assert "    server engine 127.0.0.1:50000 check" in text


def test_what_changes_the_configuration_changes_its_digest_and_no_server() -> None:
    first, second = behind_gateway(), behind_gateway(gateway_wait_s=77)
    assert first.gateway is not None and second.gateway is not None
    assert first.gateway.digest != second.gateway.digest
    assert first.instances[0].digest == second.instances[0].digest


def test_one_that_is_wanted_no_more_goes() -> None:
    before = applied_facts(behind_gateway())
    decided = make_plan(facts=before)
    assert decided.gateway is not None
    assert decided.gateway.state == "absent"
    assert set(decided.gateway.absent_files) == set(gateway.FILES)
    assert [finding.id for finding in compare(decided, before) if finding.role == "gateway"] == [f"unit.unwanted:{gateway.UNIT}"]
    # Somebody else's file of that name is left alone.
    foreign = make_facts(files={gateway.CONFIG: {"kind": "file", "content": "global\n"}})
    assert make_plan(facts=foreign).gateway is None


@pytest.mark.parametrize(
    ("listener", "taken"),
    [
        ({"address": "10.1.2.3", "unit": "nginx.service"}, True),
        ({"address": "0.0.0.0", "unit": ""}, True),
        ({"address": "10.9.9.9", "unit": "nginx.service"}, False),
        ({"address": "10.1.2.3", "unit": gateway.UNIT}, False),
        # Engines that still listen themselves: this one, and one that the inventory has dropped.
        ({"address": "10.1.2.3", "unit": "v100-chat.service"}, False),
        ({"address": "10.1.2.3", "unit": "v100-old.service"}, False),
    ],
)
def test_who_may_hold_the_public_port(listener: dict[str, Any], taken: bool) -> None:
    facts = make_facts(
        listeners=[{"port": 8000, "pid": 7, "command": "x", **listener}],
        host_json={"document": {"instances": {"old": {}}}},
    )
    decided = make_plan(facts=facts, config=make_config({"listen": "10.1.2.3"}, **WANTED))
    assert ("port-taken" in {rule.id for rule in decided.rules}) is taken


# --- what differs -------------------------------------------------------------------------------------------------------------


def serving(decided: HostPlan, **changes: Any) -> Facts:
    """Facts of a host whose gateway runs as decided."""
    assert decided.gateway is not None
    running: dict[str, Any] = {
        "units": {
            gateway.UNIT: {
                "load_state": "loaded",
                "active_state": "active",
                "sub_state": "running",
                "unit_file_state": "enabled",
                "main_pid": 90,
            }
        },
        "gateway": {"digest": decided.gateway.digest, "servers": {"chat": {"status": "UP"}}},
    }
    return applied_facts(decided, **merge(running, changes))


def test_a_gateway_as_planned_is_clean() -> None:
    decided = behind_gateway()
    assert compare(decided, serving(decided)) == ()


@pytest.mark.parametrize(
    ("change", "identity", "kind"),
    [
        ({"units": {gateway.UNIT: None}}, f"unit.missing:{gateway.UNIT}", "drifted"),
        ({"units": {gateway.UNIT: {"unit_file_state": "disabled"}}}, f"unit.disabled:{gateway.UNIT}", "drifted"),
        ({"units": {gateway.UNIT: {"unit_file_state": "masked"}}}, f"unit.masked:{gateway.UNIT}", "drifted"),
        ({"units": {gateway.UNIT: {"need_daemon_reload": True}}}, f"unit.stale:{gateway.UNIT}", "drifted"),
        ({"units": {gateway.UNIT: {"active_state": "failed"}}}, f"unit.inactive:{gateway.UNIT}", "drifted"),
        ({"gateway": {"digest": "0123"}}, f"process.stale:{gateway.UNIT}", "drifted"),
        ({"gateway": {"servers": {"chat": {"status": "DRAIN"}}}}, "service.taken-out:chat", "external"),
        ({"gateway": {"servers": {"chat": {"status": "MAINT"}}}}, "service.taken-out:chat", "external"),
    ],
)
def test_each_fault_is_found(change: dict[str, Any], identity: str, kind: str) -> None:
    decided = behind_gateway()
    facts = serving(decided)
    document = merge(facts.model_dump(by_alias=True, mode="json"), change)
    if change.get("units") == {gateway.UNIT: None}:
        del document["units"][gateway.UNIT]
    findings = compare(decided, Facts.model_validate(document))
    assert [(finding.id, finding.kind, finding.role) for finding in findings] == [(identity, kind, "gateway")]


def test_who_may_not_ask_the_gateway_sees_no_drift() -> None:
    decided = behind_gateway()
    assert compare(decided, serving(decided).model_copy(update={"gateway": None})) == ()


# --- the probe ----------------------------------------------------------------------------------------------------------------


def test_the_probe_reads_the_running_gateway() -> None:
    facts = host_script.gateway_facts(INFO, STATISTICS.format(status="UP 1/2"))
    assert facts == {"digest": "0123456789abcdef", "servers": {"chat": {"status": "UP 1/2", "requests_running": 2}}}


@pytest.mark.parametrize("text", ["", "\n", "# pxname", "Unknown command", "a,b\x1b[31m,c\n", "description: other\n"])
def test_the_probe_survives_any_answer(text: str) -> None:
    assert host_script.gateway_facts(text, text) == {"digest": "", "servers": {}}


# --- the program on the host --------------------------------------------------------------------------------------------------


class Haproxy:
    """Answers on a socket as HAProxy's runtime API does; after ``requests`` questions the running requests have ended."""

    def __init__(self, folder: Path) -> None:
        self.commands: list[str] = []
        self.running = 2
        self.status = "UP"
        self.engine = "127.0.0.1:18000"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / "admin.sock"))
        #: The keys that it has loaded, by the file that they came from.
        self.maps: dict[str, list[str]] = {}
        self.listener.listen()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Nobody listens any more: a thread that still did could answer for whoever gets the same descriptor next."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()

    def _serve(self) -> None:
        while True:
            try:
                channel, _ = self.listener.accept()
            except OSError:
                return
            with channel:
                command = channel.recv(1000).decode().strip()
                self.commands.append(command)
                channel.sendall(self._answer(command).encode())

    def _answer(self, command: str) -> str:
        state = re.fullmatch(r"set server engine-chat/engine state (drain|ready)", command)
        if state:
            self.status = {"drain": "DRAIN", "ready": "UP"}[state[1]]
            return "\n"
        if command == "show info":
            return INFO
        if command == "show map":
            return "# id (file) description\n" + "".join(f"0 ({path}) pattern loaded from file\n" for path in self.maps)
        if command.startswith("show map "):
            return "".join(f"0x55d0c8{number} {line}\n" for number, line in enumerate(self.maps[command[9:]]))
        if command == "show servers state":
            return "1\n# be_id be_name\n"
        text = STATISTICS.format(status=self.status).replace(",0,0,2,2,,9", f",0,0,{self.running},2,,9")
        text = text.replace("127.0.0.1:18000", self.engine)
        if self.status == "DRAIN":
            self.running = max(0, self.running - 1)
        return text


@pytest.fixture
def control(tmp_path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("gateway_control", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER = tmp_path
    module.KEYS = tmp_path / "keys"
    module.KEYS.mkdir()
    module.POLL_S = 0.01
    # A kernel without IPv6 has no second table.
    module.CONNECTIONS = (tmp_path / "tcp", tmp_path / "tcp6")
    module.CONNECTIONS[0].write_text(CONNECTIONS)
    return module


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[Haproxy]:
    found = Haproxy(tmp_path)
    yield found
    found.close()


def test_drain_waits_for_the_last_request(control: Any, haproxy: Haproxy, capsys: pytest.CaptureFixture[str]) -> None:
    assert control.main(["drain", "chat", "--limit-s", "30"]) == 0
    assert json.loads(capsys.readouterr().out) == {"running": 0}
    assert haproxy.status == "DRAIN"


def test_drain_says_what_still_runs_at_the_limit(control: Any, haproxy: Haproxy, capsys: pytest.CaptureFixture[str]) -> None:
    assert control.main(["drain", "chat", "--limit-s", "0"]) == control.EXIT_LIMIT
    assert json.loads(capsys.readouterr().out) == {"running": 2}


def test_drain_sees_what_a_process_before_still_serves(
    control: Any, haproxy: Haproxy, capsys: pytest.CaptureFixture[str]
) -> None:
    haproxy.running = 0
    control.CONNECTIONS[0].write_text(CONNECTIONS + OPEN)
    assert control.main(["drain", "chat", "--limit-s", "0"]) == control.EXIT_LIMIT
    assert json.loads(capsys.readouterr().out) == {"running": 1}


@pytest.mark.parametrize("engine", ["", "<NOSRV>:0", "unix:1", "127.0.0.1", "[::1]:", "gpu1.example:8000"])
def test_what_is_no_address_has_no_connections(control: Any, engine: str) -> None:
    assert control.open_connections(CONNECTIONS + OPEN, engine) == 0


@pytest.mark.skipif(sys.byteorder != "little", reason="the tables are written as the processor keeps its numbers")
@pytest.mark.parametrize(
    ("engine", "written"),
    [
        ("[::1]:18000", "00000000000000000000000001000000:4650"),
        ("[2001:db8::a:7]:443", "B80D0120000000000000000007000A00:01BB"),
    ],
)
def test_requests_to_servers_with_ipv6_are_waited_for(
    control: Any, haproxy: Haproxy, capsys: pytest.CaptureFixture[str], engine: str, written: str
) -> None:
    haproxy.running, haproxy.engine = 0, engine
    own = "00000000000000000000000001000000:A003"
    control.CONNECTIONS[1].write_text(f"  sl  local_address remote_address st\n   0: {own} {written} 01 0:0\n")
    assert control.main(["drain", "chat", "--limit-s", "0"]) == control.EXIT_LIMIT
    assert json.loads(capsys.readouterr().out) == {"running": 1}
    control.CONNECTIONS[1].write_text(f"  sl  local_address remote_address st\n   0: {own} {written} 06 0:0\n")
    assert control.main(["drain", "chat", "--limit-s", "0"]) == 0


def test_open_lets_requests_in(control: Any, haproxy: Haproxy, capsys: pytest.CaptureFixture[str]) -> None:
    haproxy.status = "DRAIN"
    assert control.main(["open", "chat", "--limit-s", "30"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "UP"


def test_status_and_save(control: Any, haproxy: Haproxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert control.main(["status"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "digest": "0123456789abcdef",
        "keys_current": True,
        "servers": {"chat": {"engine": "127.0.0.1:18000", "running": 2, "status": "UP"}},
    }
    assert control.main(["save"]) == 0
    assert (tmp_path / "servers").read_text() == "1\n# be_id be_name\n"


def test_of_two_that_save_at_once_the_later_state_stays(control: Any, tmp_path: Path) -> None:
    answers = ["one is out", "both are out"]
    second = threading.Thread(target=control.save)

    def ask(_command: str) -> str:
        answer = answers.pop(0)
        if answers:
            # Another one takes its server out and saves, while this one has its answer already.
            second.start()
            second.join(0.3)
        return answer

    control.ask = ask
    assert control.save() == 0
    second.join()
    assert (tmp_path / "servers").read_text() == "both are out"


def test_save_without_a_gateway_writes_nothing(control: Any, tmp_path: Path) -> None:
    assert control.main(["save"]) == 0
    assert not (tmp_path / "servers").exists()
    control.FOLDER = tmp_path / "missing"
    assert control.main(["save"]) == 0


def test_keys_that_were_not_loaded_are_seen(control: Any, haproxy: Haproxy, tmp_path: Path) -> None:
    file = control.KEYS / "chat.keys"
    file.write_text("# header\nkey-a engine-key\nkey-b engine-key\n")
    socket_path = str(tmp_path / "admin.sock")

    def current() -> bool:
        told = host_script.gateway_keys_current(str(control.KEYS), socket_path)
        assert told == control.keys_current()
        return bool(told)

    assert not current(), "the file is new"
    haproxy.maps = {str(file): ["key-b engine-key", "key-a engine-key"]}
    assert current()
    haproxy.maps = {str(file): ["key-a engine-key"]}
    assert not current(), "a key is new"
    file.unlink()
    assert not current(), "the keys are gone"


def test_a_gateway_with_older_keys_is_no_clean_one() -> None:
    decided = make_plan(config=make_config({"listen": "10.1.2.3", "api_keys": ["0123456789abcdef"]}, gateway_placement="host"))
    assert compare(decided, serving(decided, gateway={"keys_current": True})) == ()
    (finding,) = compare(decided, serving(decided, gateway={"keys_current": False}))
    assert finding.id == f"process.keys:{gateway.UNIT}"


def test_no_gateway_and_no_such_instance_are_told_apart(control: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert control.main(["drain", "chat"]) == control.EXIT_NOT_RUNNING
    assert control.main(["save"]) == 0
    answering = Haproxy(tmp_path)
    assert control.main(["drain", "other"]) == control.EXIT_UNKNOWN
    answering.close()
    assert "it has chat" in capsys.readouterr().err
    assert answering.status == "UP"
