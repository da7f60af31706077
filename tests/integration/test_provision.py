"""Whole runs against a lab host: real SSH, real systemd, a real engine and model, a real answer.

The tests of this file share one host and run in order: bare, provisioned, unchanged, drifted, changed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from v100ctl.fleet import load_fleet

from .hosts import ROOT, on_host, serving_variables, snapshot, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

# The engine is compiled once, by the first `try`.
pytestmark = pytest.mark.usefixtures("practiced")

UNIT = "v100-chat.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"


@pytest.fixture(scope="module")
def inventory(lab_host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from v100ctl.lab.hosts import write_inventory

    path = tmp_path_factory.mktemp("fleet") / "hosts.yml"
    return write_inventory(path, {lab_host.name: lab_host.variables()}, variables=serving_variables())


@pytest.fixture(scope="module")
def bare(lab_host: RunningHost) -> Iterator[None]:
    """Nothing of an earlier session is on a shared host that was kept."""
    remove = (
        f"systemctl disable --now {UNIT} v100ctl-watchdog; rm -f /etc/systemd/system/v100ctl-watchdog.service;"
        f"rm -rf {UNIT_FILE} {UNIT_FILE}.d /etc/v100ctl /opt/v100ctl /var/lib/v100ctl;"
        "systemctl daemon-reload; userdel v100; apt-get -qq purge -y libgomp1; true"
    )
    on_host(lab_host, remove)
    yield
    on_host(lab_host, remove)


def write_variables(inventory: Path, variables: dict[str, Any]) -> None:
    """Replace the variables of all hosts."""
    import yaml

    document = yaml.safe_load(inventory.read_text())
    document["all"]["vars"] = variables
    inventory.write_text(yaml.safe_dump(document))


@pytest.mark.usefixtures("bare")
def test_check_on_a_bare_host_changes_nothing(lab_host: RunningHost, inventory: Path) -> None:
    before = snapshot(lab_host)
    done = v100ctl("provision", "-i", inventory, "--check", "--json")
    assert done.code == 2, done.err
    result = done.document["hosts"][lab_host.name]
    assert result["status"] == "would-change"
    assert any(change.startswith("release.missing:") for change in result["changes"])
    assert snapshot(lab_host) == before


def test_a_bare_host_serves_after_one_command(lab_host: RunningHost, inventory: Path) -> None:
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    result = done.document["hosts"][lab_host.name]
    assert result["status"] == "changed"
    assert result["proofs"]["chat"]["tokens"] > 0
    assert Path(done.document["log"]).is_file()


def test_what_runs_is_what_was_planned(lab_host: RunningHost, lab_ssh: Any, inventory: Path) -> None:
    done = v100ctl("plan", "-i", inventory, "--json")
    assert done.code == 0, done.err
    planned = done.document["hosts"][lab_host.name]["instances"]["chat"]
    assert lab_ssh.service(UNIT).is_running
    assert lab_ssh.service(UNIT).is_enabled
    with lab_ssh.sudo():
        assert lab_ssh.file(UNIT_FILE).content_string == planned["unit"]
        pid = lab_ssh.check_output(f"systemctl show --property MainPID --value {UNIT}")
        argv = lab_ssh.file(f"/proc/{pid}/cmdline").content.decode().rstrip("\0").split("\0")
        assert argv == planned["argv"]
        assert lab_ssh.check_output(f"stat -c %U /proc/{pid}") == "v100"
        release = Path(argv[0]).parents[1]
        assert lab_ssh.file(f"{release}/release.json").exists
        assert lab_ssh.check_output("find /opt/v100ctl/engines -name '.*' -o -perm /022 ! -type l") == ""
    assert lab_ssh.socket("tcp://127.0.0.1:8000").is_listening


def test_render_prints_the_bytes_on_the_host(lab_host: RunningHost, inventory: Path) -> None:
    done = v100ctl("render", lab_host.name, "-i", inventory)
    assert done.code == 0, done.err
    for path in (UNIT_FILE, "/etc/v100ctl/host.json"):
        assert on_host(lab_host, f"cat {path}") in done.out + "\n"


def test_a_second_run_changes_nothing_and_needs_no_ansible(lab_host: RunningHost, inventory: Path) -> None:
    before = snapshot(lab_host)
    started = on_host(lab_host, f"systemctl show --property ExecMainStartTimestampMonotonic {UNIT}")
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    assert done.document["log"] is None
    assert done.document["hosts"][lab_host.name]["status"] == "unchanged"
    assert done.document["hosts"][lab_host.name]["proofs"]["chat"]["tokens"] > 0
    assert snapshot(lab_host) == before
    assert on_host(lab_host, f"systemctl show --property ExecMainStartTimestampMonotonic {UNIT}") == started


@pytest.mark.parametrize("arguments", [[], ["--check"]], ids=["run", "check"])
def test_plain_ansible_finds_nothing_to_change(inventory: Path, lab_host: RunningHost, arguments: list[str]) -> None:
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [program, "-i", inventory, "playbooks/provision.yml", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    recap = re.search(rf"^{re.escape(lab_host.name)}\s*:.*$", done.stdout, re.MULTILINE)
    assert recap is not None
    assert re.search(r"changed=0 .*unreachable=0 .*failed=0 .*rescued=0", recap[0]), done.stdout


def test_audit_is_clean(lab_host: RunningHost, inventory: Path) -> None:
    done = v100ctl("audit", "-i", inventory, "--json")
    assert (done.code, done.document["hosts"][lab_host.name]["findings"]) == (0, [])
    done = v100ctl("audit", "-i", inventory, "--deep", "--json")
    assert (done.code, done.document["hosts"][lab_host.name]["findings"]) == (0, [])


#: What somebody does to a host, and the findings that it must leave.
DRIFT = [
    (f"sed -i 's/--parallel 1/--parallel 2/' {UNIT_FILE}", {f"file.content:{UNIT_FILE}", f"unit.stale:{UNIT}"}),
    (f"chmod 0666 {UNIT_FILE}", {f"file.mode:{UNIT_FILE}"}),
    (f"systemctl stop {UNIT}", {f"unit.inactive:{UNIT}"}),
    (f"systemctl disable {UNIT}", {f"unit.disabled:{UNIT}"}),
    ("rm /opt/v100ctl/engines/llama_cpp/*/lib/libllama.so.0*", {"release.damaged:"}),
    ("touch /var/lib/v100ctl/models/*.gguf", {"model.unverified:"}),
    ("truncate -s 1000 /var/lib/v100ctl/models/*.gguf", {"model.unverified:"}),
    ("rm /etc/v100ctl/host.json", {"file.missing:/etc/v100ctl/host.json"}),
    (f"systemctl stop {UNIT}; userdel v100", {"account.missing:v100", f"unit.inactive:{UNIT}"}),
]


def test_each_drift_is_found_and_one_run_mends_all(lab_host: RunningHost, inventory: Path) -> None:
    found: set[str] = set()
    expected: set[str] = set()
    for command, identifiers in DRIFT:
        on_host(lab_host, command)
        done = v100ctl("audit", "-i", inventory, "--json")
        assert done.code == 2, (command, done.out, done.err)
        seen = {finding["id"] for finding in done.document["hosts"][lab_host.name]["findings"]}
        missing = {identifier for identifier in identifiers if not any(item.startswith(identifier) for item in seen)}
        assert not missing, (command, seen)
        found |= seen
        expected |= identifiers
    assert expected
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    assert done.document["hosts"][lab_host.name]["status"] == "changed"
    assert v100ctl("audit", "-i", inventory, "--deep").code == 0


def test_a_changed_setting_restarts_the_server_once(lab_host: RunningHost, inventory: Path) -> None:
    write_variables(inventory, serving_variables(settings={"context_length": 1024, "parallel": 2}))
    done = v100ctl("plan", "-i", inventory, "--json")
    assert done.code == 2, done.err
    changes = done.document["hosts"][lab_host.name]["changes"]
    assert {name for change in changes for name in change["restarts"]} == {"chat"}
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    assert "--ctx-size 2048" in on_host(lab_host, f"cat {UNIT_FILE}")
    assert load_fleet([inventory]).hosts[lab_host.name].config.llm_server_instances["chat"].settings.parallel == 2


def test_a_command_line_that_the_engine_refuses_leaves_its_server_as_it_is(lab_host: RunningHost, inventory: Path) -> None:
    serving = f"systemctl show --value --property MainPID,NeedDaemonReload {UNIT}; sha256sum {UNIT_FILE} /etc/v100ctl/host.json"
    before = on_host(lab_host, serving)
    # What the catalog knows is refused before Ansible runs.
    write_variables(inventory, serving_variables(extra_args=["--no-such-flag"]))
    done = v100ctl("provision", "-i", inventory)
    assert done.code == 1
    assert "argv-refused" in done.err
    assert "--no-such-flag" in done.err
    # Which devices there are only the engine on the host knows.
    write_variables(inventory, serving_variables(extra_args=["--device", "CUDA7"]))
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 1
    message = done.document["hosts"][lab_host.name]["message"]
    assert "the engine refuses its command line" in message
    assert "invalid device: CUDA7" in message
    assert on_host(lab_host, serving) == before
    write_variables(inventory, serving_variables(settings={"context_length": 1024, "parallel": 2}))
    done = v100ctl("provision", "-i", inventory, "--json")
    assert (done.code, done.document["hosts"][lab_host.name]["status"]) == (0, "unchanged"), done.err


def test_the_host_goes_back_to_what_it_served_before(lab_host: RunningHost, inventory: Path) -> None:
    done = v100ctl("history", lab_host.name, "-i", inventory, "--json")
    assert done.code == 0, done.err
    remembered = done.document["hosts"][lab_host.name]
    # The runs between that changed nothing, and the one that mended what had drifted, left no state of their own.
    newest, first = remembered["states"]
    assert (remembered["current"], remembered["previous"]) == (newest["id"], first["id"])
    done = v100ctl("rollback", lab_host.name, "-i", inventory, "--check", "--json")
    assert (done.code, done.document["hosts"][lab_host.name]["restarted"]) == (2, ["chat"]), done.err
    done = v100ctl("rollback", lab_host.name, "-i", inventory, "--yes", "--json")
    assert done.code == 0, done.err
    result = done.document["hosts"][lab_host.name]
    assert (result["status"], result["to"], result["restarted"]) == ("restored", first["id"], ["chat"])
    assert result["proofs"]["chat"]["tokens"] > 0
    assert "--parallel 1" in on_host(lab_host, f"cat {UNIT_FILE}")
    # The inventory still wants the other one, and gets it with the next run.
    assert v100ctl("plan", "-i", inventory).code == 2
    assert v100ctl("provision", "-i", inventory).code == 0
    done = v100ctl("history", "-i", inventory, "--json")
    states = done.document["hosts"][lab_host.name]["states"]
    assert [state["state"] for state in states] == [newest["state"], first["state"], newest["state"], first["state"]]
    assert on_host(lab_host, "stat -c %a /var/lib/v100ctl/state/history/*.json").split() == ["600"] * 4


KEYS = ["first-secret-0123456789", "second-secret-0123456789"]
NEW_KEY = "third-secret-0123456789"
#: Prints the status of each path for each key of a server on this host.
ASK = """
import itertools, json, sys, urllib.error, urllib.request
found = {}
for path, key in itertools.product(*json.loads(sys.argv[1])):
    request = urllib.request.Request("http://127.0.0.1:8000" + path, headers={"Authorization": "Bearer " + key} if key else {})
    try:
        found[path + " " + key] = urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        found[path + " " + key] = error.code
print(json.dumps(found))
"""
LOCKED = ["/v1/models", "/props", "/metrics", "/slots"]


def statuses(host: RunningHost, paths: list[str], keys: list[str]) -> set[int]:
    code, output = host.execute("python3", "-c", ASK, json.dumps([paths, keys]))
    assert code == 0, output
    return set(json.loads(output).values())


def test_the_engine_asks_for_a_key_and_nothing_shows_one(lab_host: RunningHost, inventory: Path) -> None:
    write_variables(inventory, serving_variables(api_keys=KEYS))
    shown = [v100ctl("plan", "-i", inventory, "--json")]
    provisioned = v100ctl("provision", "-i", inventory, "--json", "-vvv")
    assert provisioned.code == 0, provisioned.err
    assert statuses(lab_host, LOCKED, ["", "wrong", KEYS[0].upper()]) == {401}
    assert statuses(lab_host, LOCKED, KEYS) == {200}
    assert statuses(lab_host, ["/health"], [""]) == {200}
    shown += [provisioned, v100ctl("render", lab_host.name, "-i", inventory), v100ctl("plan", "-i", inventory)]
    shown += [v100ctl("audit", "-i", inventory, "--deep", "--json"), v100ctl("status", "-i", inventory, "--json")]
    assert shown[-2].code == 0, shown[-2].out
    assert shown[-1].document["hosts"][lab_host.name]["instances"]["chat"]["state"] == "serving"
    texts = [text for done in shown for text in (done.out, done.err)]
    texts.append(Path(provisioned.document["log"]).read_text(encoding="utf-8"))
    # So written that looking for them leaves no trace of them.
    pattern = "(first|second)-secre[t]"
    texts.append(on_host(lab_host, f"journalctl --no-pager | grep -E '{pattern}'; ps axww | grep -E '{pattern}'; true"))
    assert not [text for text in texts if re.search(pattern, text)]
    held = on_host(lab_host, f"grep -rlE '{pattern}' /etc /opt /run /tmp /root /var/log /var/lib; true").split()
    assert held == ["/etc/v100ctl/instances/chat.keys"]
    assert on_host(lab_host, f"stat -c '%U:%G %a' {held[0]}").strip() == "root:v100 640"
    # Of a single key the engine would log its end.
    assert "****" not in on_host(lab_host, f"journalctl --no-pager --unit {UNIT} --output cat")


@pytest.mark.slow
def test_other_keys_restart_the_server_and_it_is_restarted_by_hand(lab_host: RunningHost, inventory: Path) -> None:
    write_variables(inventory, serving_variables(api_keys=[NEW_KEY]))
    planned = v100ctl("plan", "-i", inventory, "--json")
    changes = planned.document["hosts"][lab_host.name]["changes"]
    assert {change["what"].partition(":")[0] for change in changes} == {"file.content"}
    assert {name for change in changes for name in change["restarts"]} == {"chat"}
    assert v100ctl("provision", "-i", inventory).code == 0
    assert statuses(lab_host, LOCKED, KEYS) == {401}
    assert statuses(lab_host, LOCKED, [NEW_KEY]) == {200}
    name = f"{lab_host.name}/chat"
    for verb, code in (("stop", 2), ("start", 0), ("restart", 0)):
        done = v100ctl(verb, name, "-i", inventory)
        assert done.code == 0, done.err
        assert v100ctl("status", "-i", inventory).code == code
    assert "Started" in v100ctl("logs", name, "-i", inventory, "-n", "500").out
    write_variables(inventory, serving_variables(settings={"context_length": 1024, "parallel": 2}))
    assert v100ctl("provision", "-i", inventory).code == 0
    assert statuses(lab_host, ["/props"], [""]) == {200}
    assert on_host(lab_host, "ls /etc/v100ctl/instances") == ""


def test_an_instance_that_is_absent_is_removed(lab_host: RunningHost, inventory: Path) -> None:
    write_variables(inventory, serving_variables(state="absent"))
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    assert on_host(lab_host, f"ls {UNIT_FILE} 2>/dev/null; pgrep llama-server; true") == ""
    assert v100ctl("audit", "-i", inventory).code == 0
