"""API keys: where they come from, which files carry them, and that nothing else does."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_probe_host_script import await_program
from v100ctl.compare import compare, keyed_digest
from v100ctl.errors import InventoryError
from v100ctl.examine import Examined
from v100ctl.fleet import FleetHost
from v100ctl.plan import HostPlan
from v100ctl.plan.keys import first_keys
from v100ctl.plan.report import host_document
from v100ctl.probe import host_script

from .factory import AS_OF, applied_facts, make_config, make_facts, make_plan

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"


def keyed(*keys: Any, **variables: Any) -> HostPlan:
    return make_plan(config=make_config({"api_keys": list(keys), "listen": "10.1.2.3"}, **variables))


def content(decided: HostPlan, path: str) -> str:
    return next(file.content for file in decided.files if file.path == path)


# --- where they come from -----------------------------------------------------------------------------------------------------


def test_keys_come_from_variables_and_from_files_of_the_controller(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# of the second team\n{OTHER}\r\n\n")
    config = make_config({"api_keys": [KEY, {"from_controller": str(tmp_path / "keys")}]})
    assert config.llm_server_instances["chat"].keys == (KEY, OTHER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        (b"# nothing\n", "holds no key"),
        (b"$ANSIBLE_VAULT;1.1;AES256\n", "encrypted"),
        (b"\xff", "no text"),
    ],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, text: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(InventoryError, match=message):
        make_config({"api_keys": [{"from_controller": str(file)}]})


@pytest.mark.parametrize("value", [KEY, [[KEY]], [{"from_controller": "relative"}], [{KEY: "x"}], [12345678]])
def test_a_wrong_value_is_no_part_of_its_message(value: Any) -> None:
    with pytest.raises(InventoryError) as error:
        make_config({"api_keys": value})
    assert "0123456789abcdef" not in f"{error.value}{error.value.hint}"


# --- what carries them --------------------------------------------------------------------------------------------------------


def test_llama_cpp_reads_a_file_that_its_log_says_nothing_of() -> None:
    decided = keyed(KEY)
    (instance,) = decided.instances
    path = "/etc/v100ctl/instances/chat.keys"
    assert instance.argv[instance.argv.index("--api-key-file") + 1] == path == instance.api_keys_file
    # Of one key the engine logs the last characters, of two how many there are.
    assert content(decided, path) == f"{KEY}\n{KEY}\n"
    assert content(keyed(KEY, OTHER), path) == f"{KEY}\n{OTHER}\n"
    # Its parser is asked before the file is written.
    assert instance.parser_argv[instance.parser_argv.index("--api-key-file") + 1] == "/dev/null"
    assert first_keys(decided) == {"chat": KEY}
    assert first_keys(make_plan()) == {}
    for file in decided.files:
        if file.path.startswith("/etc/v100ctl/instances/"):
            assert (file.mode, file.owner, file.group, file.secret) == ("0640", "root", "v100", True)


def test_vllm_gets_one_in_its_environment_quoted_for_systemd() -> None:
    key = 'a"b\\c$d`e' + "0123456789"
    instance = {"engine": "vllm", "profile": "vllm-16gb-latency", "gpus": [0], "model": {"url": None, "path": "/srv/m"}}
    cards = make_facts(
        gpus=[{"pci_address": "0000:3b:00.0", "pci_id": "10de:1db4", "index": 0, "uuid": "GPU-1"}], python={"version": "3.11.2"}
    )
    decided = make_plan(cards, make_config({**instance, "api_keys": [key]}, llama_cpp_backend="cuda"))
    text = content(decided, "/etc/v100ctl/instances/chat.env")
    assert 'VLLM_API_KEY="a\\"b\\\\c\\$d\\`e0123456789"\n' in text
    (held,) = decided.instances
    assert key not in json.dumps(dict(held.environment))
    assert "EnvironmentFile=/etc/v100ctl/instances/chat.env\n" in content(decided, "/etc/systemd/system/v100-chat.service")


def test_other_keys_change_no_unit_and_no_configuration() -> None:
    """What everybody may read holds nothing that could be compared with a guess."""
    first, second = keyed(KEY, gateway_placement="host"), keyed(OTHER, gateway_placement="host")
    changed = {one.path for one, two in zip(first.files, second.files, strict=True) if one.content != two.content}
    assert changed == {
        "/etc/v100ctl/gateway/chat.keys",
        "/etc/v100ctl/instances/chat.env",
        "/etc/v100ctl/instances/chat.keys",
    }
    assert first.host_json == second.host_json
    assert first.instances == second.instances
    assert first.gateway == second.gateway


def test_only_the_servers_whose_keys_change_are_started_anew() -> None:
    first, second = keyed(KEY), keyed(OTHER)
    findings = compare(second, applied_facts(first))
    assert {finding.id.partition(":")[0] for finding in findings} == {"file.content"}
    assert {name for finding in findings for name in finding.restarts} == {"chat"}
    other = {"model": {"url": "https://models.example/tiny.gguf", "sha256": "ab" * 32}, "port": 8001}
    both = {"chat": {**other, "api_keys": [KEY], "port": 8000}, "embed": {**other, "api_keys": [KEY]}}
    before = make_plan(config=make_config(llm_server_instances=both))
    both["embed"]["api_keys"] = [OTHER]
    after = make_plan(config=make_config(llm_server_instances=both))
    assert {name for finding in compare(after, applied_facts(before)) for name in finding.restarts} == {"embed"}


def test_the_gateway_asks_for_the_key() -> None:
    decided = keyed(KEY, OTHER, gateway_placement="host")
    keys = next(file for file in decided.files if file.path == "/etc/v100ctl/gateway/chat.keys")
    assert (keys.mode, keys.owner, keys.secret) == ("0600", "root", True)
    assert keys.content.splitlines()[1:] == [f"{KEY} {KEY}", f"{OTHER} {OTHER}"]
    assert "map(/etc/v100ctl/gateway/chat.keys)" in content(decided, "/etc/v100ctl/gateway.cfg")
    open_to_all = make_plan(config=make_config(gateway_placement="host"))
    assert "refuse" not in content(open_to_all, "/etc/v100ctl/gateway.cfg")
    # One that asks for none any more leaves no keys behind.
    left = make_plan(applied_facts(decided), make_config(gateway_placement="host")).gateway
    assert left is not None
    assert left.absent_files == ("/etc/v100ctl/gateway/chat.keys",)
    gone = make_plan(applied_facts(decided)).gateway
    assert gone is not None
    assert "/etc/v100ctl/gateway/chat.keys" in gone.absent_files


@pytest.mark.parametrize("gateway", ["none", "host"])
@pytest.mark.parametrize("key", [KEY, "weak key", "kurzer-schlüssel", "tiny-k"])
def test_no_output_shows_a_key(gateway: str, key: str) -> None:
    """Everything that a command prints or that everybody may read, before and after it is applied."""
    from v100ctl.cli.show import console

    config = make_config({"api_keys": [key, OTHER], "listen": "10.1.2.3"}, gateway_placement=gateway)
    decided = make_plan(config=config)
    host = FleetHost("h1", {}, config)
    shown: list[str] = [repr(config), repr(host), config.model_dump_json()]
    for facts in (make_facts(), applied_facts(make_plan()), applied_facts(decided)):
        state = Examined(host, None, facts, decided, compare(decided, facts))
        shown += [json.dumps(host_document(state), ensure_ascii=False), repr(state.findings)]
    public = dataclasses.replace(decided, files=tuple(file for file in decided.files if not file.secret))
    shown += [json.dumps(public.to_role_variables(), ensure_ascii=False), repr(public)]
    assert decided.host_json is not None
    shown.append(decided.host_json.content)
    out = console(no_color=True, output=None)
    assert isinstance(out.file, io.TextIOBase)
    for text in shown:
        assert key not in text
        assert OTHER not in text
        for digest in (key, f"{key}\n", f"{key}\n{OTHER}\n"):
            assert hashlib.sha256(digest.encode()).hexdigest() not in text


# --- what the probe tells of them ---------------------------------------------------------------------------------------------


def test_the_probe_tells_of_a_file_of_keys_only_what_its_salt_makes_comparable(tmp_path: Path) -> None:
    (tmp_path / "chat.keys").write_text(f"{KEY}\n")
    reporter = host_script.FileReporter(host_script.Names(), salt="ab" * 16)
    reporter.add(str(tmp_path / "chat.keys"))
    (entry,) = reporter.files.values()
    assert entry["keyed_digest"] == keyed_digest("ab" * 16, f"{KEY}\n")
    assert (entry["sha256"], entry["content"]) == ("", None)


def test_the_probe_says_whether_a_process_has_the_keys_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat.keys"
    read = host_script.keys_of
    monkeypatch.setattr(host_script, "keys_of", lambda instance: read(instance, str(tmp_path)))
    digest = hashlib.sha256(f"{KEY}\n".encode()).hexdigest()
    environment = {"V100CTL_KEYS_SHA256": digest, "PATH": os.environ["PATH"]}
    argv = ["/bin/sleep", "600"]
    with subprocess.Popen(argv, env=environment) as process:
        await_program(process, argv)
        try:
            told = []
            for text in (None, f"{KEY}\n", f"{OTHER}\n"):
                if text:
                    file.write_text(text)
                found = host_script.collect_process(process.pid, "v100-chat.service", host_script.Names())
                assert digest not in json.dumps(found)
                told.append(found["keys_current"])
        finally:
            process.kill()
    assert told == [None, True, False]
    assert host_script.keys_of("../chat") == b""


@pytest.fixture
def locked_port() -> Iterator[int]:
    """A server whose every path wants the key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_health_is_asked_for_with_the_key(locked_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat.keys").write_text(f"{KEY}\n{OTHER}\n")
    read = host_script.keys_of
    monkeypatch.setattr(host_script, "keys_of", lambda instance: read(instance, str(tmp_path)))
    url = f"http://127.0.0.1:{locked_port}/health"
    answers = host_script.collect_health({"chat": url, "other": url})
    assert (answers["chat"]["status"], answers["other"]["status"]) == (200, 401)


def test_the_day_of_a_plan_is_no_part_of_its_keys() -> None:
    assert AS_OF.isoformat() not in "".join(file.content for file in keyed(KEY).files if file.secret)
