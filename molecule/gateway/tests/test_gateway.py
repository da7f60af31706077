"""After the role."""

import json

from testinfra.host import Host

CONTROL = "python3 -I -S -B /opt/v100ctl/gateway/gateway_control.py"
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
