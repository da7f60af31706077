"""The gateway: which ports, which files, and the program that takes a server out."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import shlex
import socket
import string
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
    module.CONFIG = tmp_path / "gateway.cfg"
    module.KEYS = tmp_path / "keys"
    module.KEYS.mkdir()
    module.POLL_S = 0.01
    module.CONNECTIONS = (tmp_path / "tcp", tmp_path / "tcp6")
    module.CONNECTIONS[0].write_text(CONNECTIONS)
    module.ACCOUNT = pwd.getpwuid(0).pw_name
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


def test_connections_of_others_are_no_requests(control: Any, haproxy: Haproxy, capsys: pytest.CaptureFixture[str]) -> None:
    haproxy.running = 0
    # Such as a Prometheus on the same host, which keeps its connection.
    control.CONNECTIONS[0].write_text(CONNECTIONS + OPEN.replace("00000000     0        0 4", "00000000   111        0 4"))
    assert control.main(["drain", "chat", "--limit-s", "0"]) == 0
    assert json.loads(capsys.readouterr().out) == {"running": 0}
    # Where nobody has the gateway's name, each counts.
    control.ACCOUNT = "no such user"
    assert control.main(["drain", "chat", "--limit-s", "0"]) == control.EXIT_LIMIT


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connections_are_found_as_the_kernel_writes_them(control: Any, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as client:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"nothing can listen on {address} here")
        listener.listen()
        port = listener.getsockname()[1]
        table = Path("/proc/net/tcp6" if ":" in address else "/proc/net/tcp")
        engine = gateway.address_of(address, port)
        assert control.open_connections(table.read_text(), engine, os.getuid()) == 0
        client.connect((address, port))
        assert control.open_connections(table.read_text(), engine, os.getuid()) == 1
        assert control.open_connections(table.read_text(), engine, os.getuid() + 1) == 0


@pytest.mark.parametrize("engine", ["", "gpu1:8000", "10.0.0.1:", ":8000", "[fd00::1]:x", "/run/a.sock"])
def test_what_has_no_address_has_no_connection(control: Any, engine: str) -> None:
    assert control.open_connections(CONNECTIONS + OPEN, engine) == 0


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


#: As HAProxy 2.6 tells it; 2.2 has no columns behind ``srvrecord``.
STATE = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight srv_time_since_last_change \
srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn \
srv_port srvrecord{more}
3 engine-chat 1 {server} {address} 2 8 1 1 3 8 2 0 6 0 0 0 {name} {port} -{more_values}
"""


def kept(server: str, address: str, port: int, *, name: str = "-", tls: int | None = 0) -> str:
    more, values = ("", "") if tls is None else (" srv_use_ssl srv_check_port", f" {tls} 0")
    return STATE.format(server=server, address=address, name=name, port=port, more=more, more_values=values)


NAMED = kept("gpu1", "10.0.0.1", 1, name="a.example")


@pytest.mark.parametrize(
    ("configured", "before", "after"),
    [
        ("server gpu1 10.0.0.1:8000 check", kept("gpu1", "10.0.0.1", 8000), kept("gpu1", "10.0.0.1", 8000)),
        # Its port, or whether it speaks TLS, has changed since.
        ("server engine 127.0.0.1:18001 check", kept("engine", "127.0.0.1", 18000), kept("engine", "127.0.0.1", 18001)),
        ("server engine 127.0.0.1:1 check", kept("engine", "127.0.0.1", 2, tls=None), kept("engine", "127.0.0.1", 1, tls=None)),
        ("server gpu1 [fd00::1]:8001 check", kept("gpu1", "fd00::1", 8000), kept("gpu1", "fd00::1", 8001)),
        ("server gpu1 10.0.0.1:1 check ssl verify required", kept("gpu1", "10.0.0.1", 1), kept("gpu1", "10.0.0.1", 1, tls=1)),
        ("server gpu1 10.0.0.1:1 check", kept("gpu1", "10.0.0.1", 1, tls=1), kept("gpu1", "10.0.0.1", 1)),
        # A name that is what it was keeps its address for the case that nobody knows it now; another one does not.
        ("server gpu1 a.example:1 check", NAMED, NAMED),
        ("server gpu1 b.example:1 check", NAMED, kept("gpu1", "-", 1)),
        ("server gpu1 b.example:1 check", kept("gpu1", "10.0.0.1", 1), kept("gpu1", "-", 1)),
        ("server gpu1 10.0.0.2:1 check", NAMED, kept("gpu1", "-", 1)),
    ],
)
def test_what_is_kept_of_a_server_does_not_hide_what_has_changed(control: Any, configured: str, before: str, after: str) -> None:
    text = f"# x\nfrontend chat\n    bind :8000\nbackend engine-chat\n    retries 3\n    {configured}\n"
    assert control.fitted(before, text) == after


def test_servers_that_are_gone_are_kept_no_longer(control: Any) -> None:
    (*head, _) = kept("gpu1", "10.0.0.1", 1).splitlines()
    # One of that name stands behind another front.
    text = "backend engine-chat\n    server gpu2 10.0.0.1:1\nbackend engine-other\n    server gpu1 10.0.0.1:1\n"
    assert control.fitted(kept("gpu1", "10.0.0.1", 1), text).splitlines() == head


@pytest.mark.parametrize(
    "path", ["/health", "/h?full=1&x=[2]", "/h#x", "/h'x", '/h"x', "/h\\x", "/$HOME", "/" + string.punctuation]
)
@pytest.mark.parametrize("placement", ["host", "fleet"])
def test_words_of_the_user_stay_one_word(placement: str, path: str) -> None:
    engine = {
        "source": {"path": "/srv/e", "sha256": "ab" * 32, "kind": "file"},
        "backend": "cpu",
        "argv": ["{release}/bin/e", "--port", "{port}"],
        "health_path": path,
        "must_log": ["ready"],
    }
    listed = {"instance": "chat", "host": "gpu1", "address": "10.0.0.1", "port": 8000, "health_path": path, "tls": True}
    config = make_config(
        {"listen": "10.1.2.3", "engine": "external", "external": "own", "api_keys": ["0123456789abcdef"]},
        **{**WANTED, "gateway_placement": placement},
        gateway_servers=[listed],
        external_engine_definitions={"own": engine},
        gateway_tls_certificate="/etc/ssl/a#b.pem",
        gateway_server_ca="/etc/ssl/c#d.pem",
    )
    text = next(file.content for file in make_plan(config=config).files if file.path == gateway.CONFIG)
    # HAProxy's quotes are a shell's.
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert ["option", "httpchk", "GET", path] in lines
    assert next(line for line in lines if line[:1] == ["bind"] and "crt" in line)[2:5] == ["ssl", "crt", "/etc/ssl/a#b.pem"]
    if placement == "host":
        assert ["acl", "needs_none", "path", path.partition("?")[0]] in lines
    else:
        assert "/etc/ssl/c#d.pem" in next(line for line in lines if line[:1] == ["server"])


@pytest.mark.parametrize("placement", ["host", "fleet"])
def test_no_server_reads_a_request_that_another_has_read_or_whose_client_has_left(placement: str) -> None:
    listed = {"instance": "chat", "host": "gpu1", "address": "10.0.0.1", "port": 8000}
    config = make_config({"listen": "10.1.2.3"}, **{**WANTED, "gateway_placement": placement}, gateway_servers=[listed])
    text = next(file.content for file in make_plan(config=config).files if file.path == gateway.CONFIG)
    assert re.findall(r"(?m)^    retry-on (.*)$", text) == ["conn-failure"]
    defaults = text[text.index("\ndefaults\n") : text.index("\nfrontend ")]
    assert "    option abortonclose\n" in defaults


@pytest.mark.parametrize("placement", ["host", "fleet"])
def test_the_configurations_servers_are_read_back(control: Any, placement: str) -> None:
    listed = {"instance": "chat", "host": "gpu1", "address": "fd00::1", "port": 8000, "tls": True}
    config = make_config({"listen": "10.1.2.3"}, **{**WANTED, "gateway_placement": placement}, gateway_servers=[listed])
    text = next(file.content for file in make_plan(config=config).files if file.path == gateway.CONFIG)
    found = control.configured_servers(text)
    if placement == "host":
        assert found == {("engine-chat", "engine"): {"address": "127.0.0.1", "port": "18000", "tls": False}}
    else:
        assert found == {("engine-chat", "gpu1"): {"address": "[fd00::1]", "port": "8000", "tls": True}}


def test_a_start_fits_what_was_kept(control: Any, tmp_path: Path) -> None:
    control.CONFIG = tmp_path / "gateway.cfg"
    assert control.main(["fit"]) == 0, "nothing was kept"
    (tmp_path / "servers").write_text(kept("engine", "127.0.0.1", 18000))
    assert control.main(["fit"]) == 0, "nothing is configured"
    assert (tmp_path / "servers").read_text() == kept("engine", "127.0.0.1", 18000)
    control.CONFIG.write_text("backend engine-chat\n    server engine 127.0.0.1:18001 check\n")
    assert control.main(["fit"]) == 0
    assert (tmp_path / "servers").read_text() == kept("engine", "127.0.0.1", 18001)
    unit = next(file.content for file in behind_gateway().files if file.path == gateway.UNIT_PATH)
    fit = unit.index(f"ExecStartPre=-/usr/bin/python3 -I -S -B {gateway.PROGRAM} fit\n")
    assert fit < unit.index("ExecStart=")


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
