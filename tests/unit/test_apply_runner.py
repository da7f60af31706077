"""Real runs of small playbooks on this machine, through ansible-runner."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from v100ctl.apply import ApplyError, ApplyResult, PlainReporter, Secrets, run_playbook
from v100ctl.apply.process import ansible_environment
from v100ctl.apply.reporter import Status, Unit
from v100ctl.apply.runner import LOGS_KEPT

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}


class Recorder(PlainReporter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.calls: list[tuple[Any, ...]] = []
        self.printed: list[str] = []

    def host_step(self, host: str, role: str | None, task: str) -> None:
        self.calls.append(("step", host, role, task))

    def host_progress(self, host: str, label: str, done: int, total: int | None, unit: Unit) -> None:
        self.calls.append(("progress", host, label, done, total, unit))

    def host_done(self, host: str, status: Status, changed: int) -> None:
        self.calls.append(("done", host, status, changed))

    def failure(self, host: str, task: str, message: str, hint: str | None) -> None:
        self.calls.append(("failure", host, task, message, hint))

    def _print(self, text: Text) -> None:
        self.printed.append(text.plain)


def write(path: Path, plays: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"hosts": "all", "gather_facts": False, **play} for play in plays]))
    return str(path)


def inventory(**hosts: Mapping[str, Any]) -> dict[str, Any]:
    return {"all": {"hosts": {name: {**LOCAL, **variables} for name, variables in hosts.items()}}}


def private_dirs() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("v100ctl-apply-*")}


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path


COUNTER = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
done = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(done))
print(json.dumps({"state": "running", "phase": "compile", "done": done, "total": 3}))
sys.exit(done < 3)
"""

#: Everything that events can say, in one run: the host `a` does it all, `b` cannot be reached, `c` is not asked for.
MIXED: list[dict[str, Any]] = [
    {
        "tasks": [
            {"name": "Say hello", "ansible.builtin.debug": {"msg": "hello {{ who }} ✓"}},
            {
                "name": "Wait for the build",
                "ansible.builtin.command": {"argv": [sys.executable, "-c", COUNTER, "{{ counter }}"]},
                "register": "build",
                "until": "build.rc == 0",
                "retries": 5,
                "delay": 0,
            },
            {"name": "Hide", "ansible.builtin.command": "echo hunter{{ 1 + 1 }}", "no_log": True},
            {"name": "Ignore", "ansible.builtin.command": "false", "ignore_errors": True},
            {
                "block": [{"name": "Break", "ansible.builtin.command": "false"}],
                "rescue": [{"name": "Mend", "ansible.builtin.debug": {"msg": "mended"}}],
            },
            {
                "name": "Loop",
                "ansible.builtin.command": {"argv": ["sh", "-c", "{{ item.run }}"]},
                "loop": [{"name": "good", "run": "true"}, {"name": "bad", "run": "echo No space left on device >&2; exit 3"}],
            },
        ]
    }
]


class Mixed:
    def __init__(self, folder: Path) -> None:
        self.reporter = Recorder()
        unreachable = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
        before = private_dirs()
        self.result: ApplyResult = run_playbook(
            write(folder / "mixed.yml", MIXED),
            inventory(a={}, b=unreachable, c={}),
            ["a", "b"],
            reporter=self.reporter,
            extra_vars={"who": "you", "counter": str(folder / "counter")},
            capture=["Say hello", "Hide"],
        )
        self.left = private_dirs() - before


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # What CI systems and users may have set.
        patch.setenv("JOB_ID", "not-a-number")
        patch.setenv("ANSIBLE_FORCE_COLOR", "1")
        yield Mixed(tmp_path_factory.mktemp("mixed"))


def test_hosts_are_counted(mixed: Mixed) -> None:
    hosts = mixed.result.hosts

    assert set(hosts) == {"a", "b"}, "c is outside the limit"
    assert (hosts["a"].status, hosts["a"].failed, hosts["a"].rescued, hosts["a"].ignored) == ("failed", 1, 1, 1)
    assert (hosts["b"].status, hosts["b"].unreachable) == ("unreachable", 1)
    assert not mixed.result.succeeded


def test_only_what_failed_for_good_is_a_failure(mixed: Mixed) -> None:
    first, second = mixed.result.failures

    assert (first.host, first.role, first.task) == ("a", None, "Loop")
    assert first.message == "bad: non-zero return code\nNo space left on device"
    assert first.hint is not None and "disk is full" in first.hint
    # `b` said nothing in "Say hello", which needs no connection.
    assert (second.host, second.task) == ("b", "Wait for the build")
    assert "Connection refused" in second.message


def test_steps_and_progress_are_reported(mixed: Mixed) -> None:
    calls = mixed.reporter.calls

    assert ("step", "a", None, "Say hello") in calls
    assert [call[2:] for call in calls if call[0] == "progress"] == [
        ("compile", 1, 3, "steps"),
        ("compile", 2, 3, "steps"),
    ]
    assert [call[1:3] for call in calls if call[0] == "done"] == [("a", "failed"), ("b", "unreachable")]
    assert [call[1:3] for call in calls if call[0] == "failure"] == [("a", "Loop"), ("b", "Wait for the build")]


def test_results_are_captured_by_task_and_hidden_ones_stay_hidden(mixed: Mixed) -> None:
    assert mixed.result.results["Say hello"]["a"]["msg"] == "hello you ✓"
    assert "hunter2" not in json.dumps(mixed.result.results["Hide"]["a"])
    assert set(mixed.result.results) == {"Say hello", "Hide"}


def test_the_log_has_everything_but_secrets(mixed: Mixed) -> None:
    path = mixed.result.log_path
    text = path.read_text()

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.name.endswith("-mixed.log")
    assert f"log: {path}" in mixed.reporter.printed
    assert "TASK [Say hello]" in text and "hello you ✓" in text and "PLAY RECAP" in text
    assert "hunter2" not in text
    assert "\x1b" not in text


def test_nothing_temporary_is_left(mixed: Mixed) -> None:
    assert mixed.left == set()


def test_passwords_reach_ansible_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `sudo` that asks for a password; the task behind it looks for that password in arguments, environments and files."""
    # These tests may be run as root, whom Ansible would spare the `sudo` to root.
    monkeypatch.setenv("ANSIBLE_BECOME_ALLOW_SAME_USER", "True")
    sudo = tmp_path / "sudo"
    sudo.write_text(
        textwrap.dedent("""\
            #!/bin/sh
            while [ "$1" != /bin/sh ]; do [ "$1" = -p ] && prompt=$2; shift; done
            printf '%s' "$prompt" >&2
            read -r answer
            until [ "$answer" = 'pass word$1' ]; do
                printf '%s\\n%s' 'Sorry, try again.' "$prompt" >&2
                read -r answer || exit 1
            done
            exec "$@"
            """)
    )
    sudo.chmod(0o755)
    search = textwrap.dedent("""\
        import glob, pathlib, sys
        needle = sys.argv[1][::-1].encode()
        found = []
        files = [*glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/proc/[0-9]*/environ")]
        files += glob.glob(sys.argv[2] + "/**", recursive=True)
        for file in files:
            try:
                if needle in pathlib.Path(file).read_bytes():
                    found.append(file)
            except OSError:
                pass
        print(len(files) > 10, found)
        """)
    private = f"{tempfile.gettempdir()}/v100ctl-apply-*"
    task = {
        "name": "Search",
        "ansible.builtin.command": {"argv": [sys.executable, "-c", search, "1$drow ssap", private]},
        "become": True,
    }
    playbook = write(tmp_path / "search.yml", [{"tasks": [task]}])
    hosts = inventory(a={"ansible_become_exe": str(sudo)})

    right = run_playbook(
        playbook,
        hosts,
        None,
        reporter=Recorder(),
        passwords=Secrets(connection_password="unused", become_password="pass word$1"),
        capture=["Search"],
        verbosity=3,
    )
    assert right.results["Search"]["a"]["stdout"] == "True []"
    assert "pass word" not in right.log_path.read_text()
    assert "pass word" not in repr(Secrets(become_password="pass word$1"))

    wrong = run_playbook(playbook, hosts, None, reporter=Recorder(), passwords=Secrets(become_password="wrong"))
    (failure,) = wrong.failures
    assert failure.hint is not None and "sudo password was wrong" in failure.hint


def test_check_changes_nothing_and_variables_beside_the_inventory_count(tmp_path: Path) -> None:
    (tmp_path / "fleet" / "group_vars").mkdir(parents=True)
    hosts = tmp_path / "fleet" / "hosts.yml"
    hosts.write_text(json.dumps(inventory(a={})))
    (tmp_path / "fleet" / "group_vars" / "all.yml").write_text(json.dumps({"target": str(tmp_path / "made")}))
    task = {"name": "Make", "ansible.builtin.copy": {"content": "x", "dest": "{{ target }}", "mode": "0644"}}
    playbook = write(tmp_path / "make.yml", [{"tasks": [task]}])

    result = run_playbook(playbook, [hosts], ["a"], reporter=Recorder(), check=True)

    assert (result.succeeded, result.changed) == (True, 1)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("playbook", "hosts", "words", "hint"),
    [
        ("- hosts: all\n  tasks: [\n", None, "YAML parsing failed", "safe to run again"),
        ("- hosts: nosuch\n  tasks: []\n", None, "ran on no host", "--limit"),
    ],
)
def test_what_cannot_start_is_an_error(tmp_path: Path, playbook: str, hosts: list[str] | None, words: str, hint: str) -> None:
    path = tmp_path / "bad.yml"
    path.write_text(playbook)
    reporter = Recorder()

    with pytest.raises(ApplyError) as caught:
        run_playbook(str(path), inventory(a={}), hosts, reporter=reporter)

    assert words in caught.value.message
    assert caught.value.hint is not None and hint in caught.value.hint
    assert any(line.startswith("log: ") for line in reporter.printed)
    assert reporter.printed[-1].startswith("Bad: failed after ")


def test_a_vault_password_that_nobody_gave_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="vault password"):
        run_playbook(str(tmp_path / "p.yml"), [], None, reporter=Recorder(), vault_arguments=["--ask-vault-password"])


def test_an_error_while_reporting_stops_ansible(tmp_path: Path) -> None:
    class Broken(Recorder):
        def host_step(self, host: str, role: str | None, task: str) -> None:
            raise RuntimeError("broken reporter")

    playbook = write(tmp_path / "sleep.yml", [{"tasks": [{"name": "Sleep", "ansible.builtin.command": "sleep 271828"}]}])

    with pytest.raises(RuntimeError, match="broken reporter"):
        run_playbook(playbook, inventory(a={}), None, reporter=Broken())
    assert running("sleep 271828") == []


def test_old_logs_are_removed(tmp_path: Path, state: Path) -> None:
    logs = state / "v100ctl" / "logs"
    logs.mkdir(parents=True)
    for number in range(LOGS_KEPT + 5):
        (logs / f"20200101T0000{number:02d}Z-provision.log").touch()
    (logs / "mine.txt").touch()
    path = tmp_path / "none.yml"
    path.write_text("- hosts: nosuch\n  tasks: []\n")

    with pytest.raises(ApplyError):
        run_playbook(str(path), inventory(a={}), None, reporter=Recorder())

    kept = sorted(file.name for file in logs.iterdir())
    assert len(kept) == LOGS_KEPT + 1
    assert kept[0] == "20200101T000006Z-provision.log"
    assert kept[-1] == "mine.txt" and kept[-2].endswith("-none.log")


def test_a_log_folder_that_cannot_be_made_is_an_error(state: Path, tmp_path: Path) -> None:
    (state / "v100ctl").write_text("a file where a folder should be")

    with pytest.raises(ApplyError, match="log folder"):
        run_playbook(str(tmp_path / "p.yml"), [], None, reporter=Recorder())


# The environment


def locale_of(**variables: str) -> str | None:
    """What Ansible's LC_ALL would be set to in an environment with these locale variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LC_") and name != "LANG"}
    program = (
        "import os, pathlib; from v100ctl.apply.process import ansible_environment as e;"
        "print(e(os.environ, pathlib.Path('/tmp/x')).get('LC_ALL'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return None if done.stdout.strip() == "None" else done.stdout.strip()


@pytest.mark.parametrize("variables", [{"LC_ALL": "C.UTF-8"}, {"LANG": "C.UTF-8"}])
def test_a_utf8_locale_is_left_alone(variables: dict[str, str]) -> None:
    assert locale_of(**variables) is None


@pytest.mark.parametrize("variables", [{"LC_ALL": "POSIX"}, {"LC_ALL": "xx_YY.UTF-8"}, {"LANG": "xx_YY.UTF-8"}])
def test_another_locale_is_replaced(variables: dict[str, str]) -> None:
    assert locale_of(**variables) == "C.UTF-8"


def test_the_users_ansible_variables_win_but_for_host_keys() -> None:
    user = {
        "ANSIBLE_PIPELINING": "False",
        "ANSIBLE_CONFIG": "/home/u/ansible.cfg",
        "ANSIBLE_ROLES_PATH": "/home/u/roles",
        "ANSIBLE_HOST_KEY_CHECKING": "False",
        "PATH": "/usr/bin",
    }

    added = ansible_environment(user, Path("/tmp/v100ctl-apply-x/cp"))

    assert "ANSIBLE_PIPELINING" not in added and "ANSIBLE_CONFIG" not in added
    assert added["ANSIBLE_HOST_KEY_CHECKING"] == "True"
    assert added["ANSIBLE_ROLES_PATH"].endswith(":/home/u/roles")
    assert added["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert ansible_environment({}, Path("/tmp/x"))["ANSIBLE_PIPELINING"] == "True"


def test_a_host_that_dies_in_the_middle_of_a_task_is_given_up_after_two_minutes() -> None:
    told = configparser.ConfigParser()
    told.read(ansible_environment({}, Path("/tmp/x"))["ANSIBLE_CONFIG"])
    argv = ["ssh", "-F", "none", "-G", *shlex.split(told["ssh_connection"]["ssh_args"]), "192.0.2.1"]
    resolved = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    found = dict(line.split(" ", 1) for line in resolved.splitlines())
    assert int(found["serveraliveinterval"]) * int(found["serveralivecountmax"]) == 120
    # And what Ansible itself would have said.
    assert (found["controlmaster"], found["controlpersist"], found["compression"]) == ("auto", "60", "yes")


def test_a_control_path_that_is_too_long_is_left_to_ansible() -> None:
    assert "ANSIBLE_SSH_CONTROL_PATH_DIR" in ansible_environment({}, Path("/tmp/v100ctl-apply-x/cp"))
    assert "ANSIBLE_SSH_CONTROL_PATH_DIR" not in ansible_environment({}, Path("/tmp") / ("x" * 80))


# Signals


def running(argument: str) -> list[int]:
    """Process ids whose command line is or ends with ``argument``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip().endswith(argument):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what} in a minute"
        time.sleep(0.05)


def test_ctrl_c_stops_ansible_and_leaves_nothing(tmp_path: Path) -> None:
    command = "sleep 3141592"
    playbook = write(tmp_path / "sleep.yml", [{"tasks": [{"name": "Sleep", "ansible.builtin.command": command}]}])
    program = (
        # pytest may have been started with SIGINT ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from v100ctl.apply import make_reporter, run_playbook\n"
        f"run_playbook({playbook!r}, {inventory(a={})!r}, None, reporter=make_reporter(), title='Sleep')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: running(command), "task")
    (private,) = tmp_path.glob("v100ctl-apply-*")
    assert private.stat().st_mode & 0o777 == 0o700

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert running(command) == []
    assert not private.exists()
    assert "stopping Ansible" in stderr and "log: " in stderr and "Sleep: failed after" in stderr
