"""After the role."""

import json

import pytest
from testinfra.host import Host

CONTROL = "python3 -I -S -B /opt/v100ctl/gateway/gateway_control.py"
KEYS = ["first-key-of-the-test", "second-key+of/the=test~"]
#: Reads requests as JSON (path, method, headers) and prints status and body of each.
REQUESTS = """
import json, sys, urllib.error, urllib.request
answers = []
for path, method, headers in json.loads(sys.argv[1]):
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request("http://127.0.0.1:8001" + path, body, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        answer = error
    answers.append((answer.status, answer.read().decode()))
print(json.dumps(answers))
"""
Request = tuple[str, str, dict[str, str]]
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


def test_it_runs_and_comes_back_after_a_reboot(host: Host) -> None:
    unit = host.service("v100ctl-gateway")
    assert unit.is_running
    assert unit.is_enabled


def test_requests_reach_the_engine(host: Host) -> None:
    assert host.socket("tcp://127.0.0.1:8000").is_listening
    assert not host.socket("tcp://0.0.0.0:8000").is_listening
    answer = host.check_output("python3 -c %s %s", ASK, "http://127.0.0.1:8000/stream?until=/")
    assert answer.split() == ["end"]


def test_it_serves_as_an_account_of_its_own(host: Host) -> None:
    main = int(host.check_output("systemctl show --value --property MainPID v100ctl-gateway"))
    (worker,) = host.process.filter(ppid=main)
    assert worker.user == "haproxy"


def test_the_configuration_is_the_one_that_is_loaded(host: Host) -> None:
    status = json.loads(host.check_output(f"{CONTROL} status"))
    assert f"description v100ctl {status['digest']}\n" in host.file("/etc/v100ctl/gateway.cfg").content_string
    assert status["servers"]["chat"]["status"].startswith("UP")


def test_only_root_may_take_a_server_out(host: Host) -> None:
    socket = host.file("/run/v100ctl-gateway/admin.sock")
    assert (socket.user, socket.mode & 0o077) == ("root", 0)


def test_the_unit_is_sound(host: Host) -> None:
    assert host.run("systemd-analyze verify v100ctl-gateway.service").stderr == ""


def answers(host: Host, requests: list[Request]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = json.loads(host.check_output("python3 -c %s %s", REQUESTS, json.dumps(requests)))
    return found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": f"Bearer {KEYS[0].upper()}"},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": KEYS[0]},
        {"Authorization": "Bearer "},
        {"x-api-key": "wrong"},
        # A wrong one is not mended by a right one elsewhere.
        {"Authorization": "Bearer wrong", "x-api-key": KEYS[0]},
    ],
    ids=str,
)
def test_no_key_and_a_wrong_key_are_refused(host: Host, headers: dict[str, str]) -> None:
    paths = ["/headers", "/metrics", "/slots", "/v1/chat/completions", "/health/../headers", "//health", "/health/"]
    requests: list[Request] = [(path, method, headers) for path in paths for method in ("GET", "POST")]
    for asked, (status, body) in zip(requests, answers(host, requests), strict=True):
        assert status == 401, asked
        assert json.loads(body)["error"]["code"] == "invalid_api_key"


def test_every_key_opens_in_each_form_and_reaches_the_engine_in_one(host: Host) -> None:
    forms = [("Authorization", "Bearer {}"), ("authorization", "bearer  {}"), ("x-api-key", "{}")]
    for key in KEYS:
        requests: list[Request] = [
            ("/headers", method, {name: form.format(key)}) for name, form in forms for method in ("GET", "POST")
        ]
        for asked, (status, body) in zip(requests, answers(host, requests), strict=True):
            assert status == 200, asked
            assert json.loads(body) == {"Authorization": [f"Bearer {key}"], "x-api-key": []}


def test_health_and_what_a_browser_asks_before_need_no_key(host: Host) -> None:
    found = answers(host, [("/health", "GET", {}), ("/headers", "OPTIONS", {})])
    assert [status for status, _ in found] == [200, 200]


def test_keys_are_for_root_alone_and_stand_nowhere_else(host: Host) -> None:
    keys = host.file("/etc/v100ctl/gateway/locked.keys")
    assert (keys.user, keys.group, keys.mode) == ("root", "root", 0o600)
    # Of the key that no test sends, and so written that looking for it leaves no trace of it.
    found = host.run("grep -rl 'unsent-key-of-the-tes[t]' /etc /opt /run /var/log /var/lib /tmp /root")
    assert found.stdout.split() == ["/etc/v100ctl/gateway/locked.keys"]
    assert host.run("journalctl --no-pager | grep -c 'unsent-key-of-the-tes[t]'").stdout.strip() == "0"
    assert host.run("ps axww | grep 'unsent-key-of-the-tes[t]'").stdout == ""
