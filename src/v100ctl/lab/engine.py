"""Docker Engine, found running, started, or installed.

:func:`ensure_docker` is all that callers need. A running engine is used as it is, whatever started it. Otherwise, as root, the
distribution's packages are installed (Debian, Ubuntu) and the daemon is started: by systemd where it runs, else directly, in a
session of its own with a log file. What an engine leaves behind that was killed (pid files that now name another program, its
socket, a ``containerd`` without its ``dockerd``) is cleared away first, because ``dockerd`` itself trusts some of it.

An engine that is started directly carries a mark in its environment. :func:`stop_engine` stops that one and no other, also when
the program that started it was killed before it could have written anything down.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker
import requests
from docker.errors import APIError, DockerException

from v100ctl.apply.reporter import Reporter
from v100ctl.errors import LabError
from v100ctl.lab import lab_dir
from v100ctl.locks import exclusive

#: What Docker Engine needs from Debian's and Ubuntu's archives. ``docker.io`` does without iptables only on paper.
ENGINE_PACKAGES = ("docker.io", "iptables")
#: In the environment of an engine that this tool started; the value is the lab folder of whoever did.
STARTED_BY = "V100CTL_LAB_ENGINE"

_PING_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_APT_LISTS_MAX_AGE_S = 24 * 3600.0
_APT_LOCK_TIMEOUT_S = 600
# Removing a host of several gigabytes holds up every other request on a busy disk.
_API_TIMEOUT_S = 300
_DAEMON_CONFIGURATION = Path("/etc/docker/daemon.json")


@dataclass(frozen=True)
class Daemon:
    """Where one ``dockerd`` keeps its runtime files, and what it is started with beyond its own configuration file.

    Several can live side by side when all paths differ.
    """

    socket: Path
    pid_file: Path
    exec_root: Path
    log_file: Path
    arguments: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The address for API clients."""
        return f"unix://{self.socket}"

    @property
    def containerd_configuration(self) -> Path:
        """What a ``containerd`` that belongs to this daemon has on its command line."""
        return self.exec_root / "containerd" / "containerd.toml"

    @property
    def containerd_pid_file(self) -> Path:
        """Where the daemon writes down its ``containerd``; it believes the number without checking what runs under it."""
        return self.exec_root / "containerd" / "containerd.pid"


def system_daemon(configuration: Path = _DAEMON_CONFIGURATION) -> Daemon:
    """This machine's own daemon: Docker's default paths, or what its configuration file says instead."""
    settings: Mapping[str, object] = {}
    try:
        loaded = json.loads(configuration.read_text(encoding="utf-8"))
        settings = loaded if isinstance(loaded, dict) else {}
    except (OSError, ValueError):
        # An unreadable file is dockerd's to complain about, in its own words, when it is started.
        settings = {}

    def path(key: str, default: str) -> Path:
        value = settings.get(key)
        return Path(value) if isinstance(value, str) and value.startswith("/") else Path(default)

    return Daemon(
        socket=Path("/var/run/docker.sock"),
        pid_file=path("pidfile", "/var/run/docker.pid"),
        exec_root=path("exec-root", "/var/run/docker"),
        log_file=lab_dir() / "dockerd.log",
    )


def ensure_docker(reporter: Reporter, *, install: bool, daemon: Daemon | None = None) -> docker.DockerClient:
    """A client of a Docker Engine that answers.

    Args:
        reporter: Told what is being done, when something has to be.
        install: Whether packages may be installed. Starting an installed engine is always tried.
        daemon: Another daemon than this machine's own (see :func:`system_daemon`); ``$DOCKER_HOST`` is not looked at then.

    Raises:
        LabError: The engine cannot be reached, started or installed, with the command that helps. Also for an engine whose
            containers have no address that this machine can reach.
    """
    remote = os.environ.get("DOCKER_HOST", "") if daemon is None else ""
    if remote:
        client, problem = _connect(remote, from_environment=True)
        if client is None:
            raise LabError(
                f"no Docker Engine answers at $DOCKER_HOST ({remote}): {problem}",
                hint="start it, or `unset DOCKER_HOST` to use this machine's own",
            )
        return _usable(client, remote)
    daemon = daemon or system_daemon()
    client, problem = _connect(daemon.url)
    if client is not None:
        return _usable(client, daemon.url)
    if isinstance(problem, PermissionError):
        raise LabError(
            f"this user may not use Docker Engine's socket {daemon.socket}",
            hint="run as root, or run `sudo usermod -aG docker $USER` and log in again",
        )
    with exclusive(
        lab_dir() / "engine.lock", lambda: reporter.note("another v100ctl is making Docker Engine ready; waiting for it")
    ):
        client, problem = _connect(daemon.url)
        if client is None:
            _install_and_start(reporter, daemon, install=install)
            client, problem = _connect(daemon.url)
    if client is None:
        raise LabError(f"Docker Engine was started but does not answer on {daemon.socket}: {problem}", hint=_log_hint(daemon))
    return _usable(client, daemon.url)


def engine_answers() -> bool:
    """Whether an engine is there and may be used by this user."""
    remote = os.environ.get("DOCKER_HOST", "")
    client, _ = _connect(remote, from_environment=True) if remote else _connect(system_daemon().url)
    if client is not None:
        client.close()
    return client is not None


def docker_is_installed() -> bool:
    """Whether an engine could be started on this machine."""
    return _dockerd() is not None


def stop_engine(reporter: Reporter, *, daemon: Daemon | None = None) -> bool:
    """Stops the engine, if it was started directly by this tool for this lab folder.

    Returns:
        Whether there was one.

    Raises:
        LabError: It does not end.
    """
    daemon = daemon or system_daemon()
    pid = _read_pid(daemon.pid_file)
    if pid is None or _program(pid) != "dockerd" or _environment_of(pid).get(STARTED_BY) != str(lab_dir()):
        return False
    with reporter.phase("stopping the Docker Engine that was started for the lab"):
        _end(pid, "dockerd")
        for orphan in _orphaned_containerds(daemon):
            _end(orphan, "containerd")
    return True


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turns an error of the engine or of the way to it into a :class:`LabError` that says what it kept from being done.

    Args:
        what: Completes "Docker Engine could not ...".
    """
    try:
        yield
    except (DockerException, requests.RequestException) as error:
        reason = explanation(error)
        hint = (
            "`docker system df` shows what takes the space"
            if "no space left" in reason
            else "see the engine's log, then run this again"
        )
        raise LabError(f"Docker Engine could not {what}: {reason}", hint=hint) from error


def explanation(error: BaseException) -> str:
    """The engine's own words on one line, without the HTTP around them."""
    text = error.explanation if isinstance(error, APIError) and isinstance(error.explanation, str) else str(_root_cause(error))
    return " ".join(text.split())


# --- connecting -------------------------------------------------------------------------------------------------------


def _connect(url: str, *, from_environment: bool = False) -> tuple[docker.DockerClient | None, BaseException | None]:
    """A client that has been answered, or ``None`` with what went wrong."""
    client: docker.DockerClient | None = None
    try:
        # Making a client already asks for the API's version, so it fails like any request.
        client = (
            docker.from_env(timeout=_API_TIMEOUT_S)
            if from_environment
            else docker.DockerClient(base_url=url, timeout=_API_TIMEOUT_S)
        )
        client.ping()
    except (DockerException, requests.RequestException, OSError) as error:
        if client is not None:
            client.close()
        return None, _root_cause(error)
    return client, None


def _root_cause(error: BaseException) -> BaseException:
    """The operating system's own error inside the wrappers of three HTTP libraries."""
    seen: set[int] = set()
    queue: list[object] = [error]
    while queue:
        current = queue.pop(0)
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, PermissionError | FileNotFoundError | ConnectionError) and not isinstance(
            current, requests.RequestException
        ):
            return current
        queue += [current.__cause__, current.__context__, getattr(current, "reason", None), *current.args]
    return error


def _usable(client: docker.DockerClient, where: str) -> docker.DockerClient:
    """The client again, if lab hosts of its engine can be reached from here."""
    if not where.startswith(("unix://", "/")):
        raise LabError(
            f"$DOCKER_HOST names an engine on another machine ({where}), whose containers cannot be reached over SSH from here",
            hint="run this on that machine, or `unset DOCKER_HOST` to use this machine's own engine",
        )
    information = client.info()
    options = " ".join(information.get("SecurityOptions") or ())
    if "name=rootless" in options or "Docker Desktop" in str(information.get("OperatingSystem", "")):
        kind = "rootless Docker" if "name=rootless" in options else "Docker Desktop"
        raise LabError(
            f"{kind} answers at {where}, but this machine cannot reach its containers' addresses",
            hint="use the system's own Docker Engine: `export DOCKER_HOST=unix:///var/run/docker.sock`",
        )
    return client


# --- installing -------------------------------------------------------------------------------------------------------


def _install_and_start(reporter: Reporter, daemon: Daemon, *, install: bool) -> None:
    """Brings the engine from absent or stopped to answering. The caller holds the engine's lock."""
    installed = _dockerd() is not None and _find("iptables") is not None
    if os.geteuid() != 0:
        if installed:
            raise LabError(
                "Docker Engine is not running, and starting it needs root", hint=f"run {_start_command()}, or run this as root"
            )
        raise LabError("Docker Engine is not installed, and installing it needs root", hint=_install_hint())
    if not installed:
        if not install:
            raise LabError("Docker Engine is not installed", hint=_install_hint())
        if not _is_debian_like():
            raise LabError(
                f"Docker Engine is not installed, and v100ctl installs it on Debian and Ubuntu only (this is {_system_name()})",
                hint=_install_hint(),
            )
        install_packages(reporter, ENGINE_PACKAGES, purpose="Docker Engine")
        # The package starts the service on most systems; the ways of starting it below cope with that.
    with reporter.phase("starting Docker Engine"):
        if Path("/run/systemd/system").is_dir():
            _start_with_systemd(daemon)
        else:
            _start_directly(daemon)


def install_packages(reporter: Reporter, packages: Sequence[str], *, purpose: str) -> None:
    """Installs ``packages`` with apt, as root on Debian or Ubuntu.

    Waits for other users of apt and says who they are; fetches the package lists first when they are missing or old; finishes
    what an interrupted dpkg left half done.

    Raises:
        LabError: apt refused, with its own words and the log's path.
    """
    log = lab_dir() / "apt.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    with reporter.phase(f"installing {' '.join(packages)} for {purpose}"):
        updated = not _apt_lists_are_fresh()
        if updated:
            _apt(reporter, ["apt-get", "update"], log)
        code, output = _apt(reporter, command, log)
        if code != 0 and "dpkg --configure -a" in output:
            _apt(reporter, ["dpkg", "--configure", "-a"], log)
            code, output = _apt(reporter, command, log)
        if code != 0 and not updated:
            # Lists that are only hours old may already name files that the mirror has replaced.
            _apt(reporter, ["apt-get", "update"], log)
            code, output = _apt(reporter, command, log)
        if code != 0:
            complaints = [line.strip() for line in output.splitlines() if line.startswith(("E: ", "dpkg: error"))]
            reason = "; ".join(complaints[-3:]) or f"it ended with status {code}"
            raise LabError(
                f"apt could not install {' '.join(packages)} for {purpose}: {reason}",
                hint=f"run `{' '.join(command)}` by hand to see why; the whole output is in {log}",
            )


def _apt(reporter: Reporter, command: Sequence[str], log: Path) -> tuple[int, str]:
    """Runs one apt or dpkg command once nothing else holds the package manager's locks; its output also goes to ``log``."""
    _wait_for_package_locks(reporter)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "a", "LC_ALL": "C.UTF-8"}
    if command[0] == "apt-get":
        # Somebody may have taken the lock since it was looked at.
        command = [command[0], "-o", f"DPkg::Lock::Timeout={_APT_LOCK_TIMEOUT_S}", *command[1:]]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"$ {' '.join(command)}\n{result.stdout}\n")
    return result.returncode, result.stdout


def _wait_for_package_locks(reporter: Reporter) -> None:
    from v100ctl.probe.host_script import package_locks

    deadline_s = time.monotonic() + _APT_LOCK_TIMEOUT_S
    told = ""
    while holders := package_locks():
        names = ", ".join(sorted({f"{holder.get('command') or 'a process'} (pid {holder['pid']})" for holder in holders}))
        if time.monotonic() > deadline_s:
            raise LabError(
                f"the package manager has been locked for {_APT_LOCK_TIMEOUT_S // 60} minutes by {names}",
                hint="wait until it has finished, then run this again",
            )
        if names != told:
            reporter.note(f"waiting for {names}, which holds the package manager's lock")
            told = names
        time.sleep(1)


def _apt_lists_are_fresh(lists: Path = Path("/var/lib/apt/lists")) -> bool:
    try:
        if not any("_Packages" in path.name for path in lists.iterdir()):
            return False
        # The index files carry the mirror's time; the folders change whenever lists are fetched.
        changed_s = max(path.stat().st_mtime for path in (lists, lists / "partial") if path.exists())
    except OSError:
        return False
    return time.time() - changed_s < _APT_LISTS_MAX_AGE_S


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The fields of ``os-release``, unquoted; empty where there is none."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return fields
    for line in text.splitlines():
        match = re.fullmatch(r"\s*([A-Z][A-Z0-9_]*)=(?:\"(.*)\"|'(.*)'|(.*?))\s*", line)
        if match:
            fields[match[1]] = next((value for value in match.groups()[1:] if value is not None), "")
    return fields


def _is_debian_like() -> bool:
    return os_release().get("ID") in {"debian", "ubuntu"}


def _system_name() -> str:
    return os_release().get("PRETTY_NAME") or os.uname().sysname


def _install_hint() -> str:
    packages = " ".join(ENGINE_PACKAGES)
    release = os_release()
    family = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    if family & {"debian", "ubuntu"}:
        return f"run `sudo apt-get update && sudo apt-get install -y {packages}`, or run this as root"
    if release.get("ID") == "fedora":
        return "run `sudo dnf install -y moby-engine && sudo systemctl start docker`, then run this again"
    if family & {"rhel", "centos", "fedora"}:
        return (
            "run `sudo dnf config-manager --add-repo https://download.docker.com/linux/rhel/docker-ce.repo && "
            "sudo dnf install -y docker-ce && sudo systemctl start docker`, then run this again"
        )
    if family & {"arch"}:
        return "run `sudo pacman -S --needed docker && sudo systemctl start docker`, then run this again"
    if family & {"suse", "opensuse"}:
        return "run `sudo zypper install -y docker && sudo systemctl start docker`, then run this again"
    return "install Docker Engine for your system (https://docs.docker.com/engine/install/) and start it, then run this again"


def _start_command() -> str:
    return "`sudo systemctl start docker`" if Path("/run/systemd/system").is_dir() else "`sudo dockerd`"


# --- starting ---------------------------------------------------------------------------------------------------------


def _find(program: str) -> str | None:
    # A user's PATH lacks the sbin folders on Debian.
    return shutil.which(
        program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    )


def _dockerd() -> str | None:
    return _find("dockerd")


def _start_with_systemd(daemon: Daemon) -> None:
    # The socket unit of Docker's packages would hold the socket open in front of an engine that cannot start.
    subprocess.run(["systemctl", "reset-failed", "docker.service", "docker.socket"], capture_output=True, check=False)
    result = subprocess.run(["systemctl", "start", "docker.service"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        journal = subprocess.run(
            ["journalctl", "--unit=docker.service", "--lines=40", "--output=cat", "--no-pager"],
            capture_output=True,
            text=True,
            check=False,
        )
        reason = _complaint(journal.stdout) or result.stderr.strip() or f"systemctl ended with status {result.returncode}"
        raise LabError(f"systemd could not start Docker Engine: {reason}", hint="see `journalctl -u docker`")
    if not _await(lambda: _connect(daemon.url)[0] is not None, _START_TIMEOUT_S):
        raise LabError(
            f"systemd started Docker Engine, but nothing answers on {daemon.socket}",
            hint="see `systemctl status docker` and `journalctl -u docker`",
        )


def _start_directly(daemon: Daemon) -> None:
    """Starts ``dockerd`` in a session of its own and waits until it answers. Only called when none answers."""
    program = _dockerd()
    if program is None:
        raise LabError("dockerd is not installed", hint=_install_hint())
    _await_other_daemon(daemon)
    if _connect(daemon.url)[0] is not None:
        return
    clear_leftovers(daemon)
    daemon.log_file.parent.mkdir(parents=True, exist_ok=True)
    with daemon.log_file.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [program, *daemon.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**os.environ, STARTED_BY: str(lab_dir())},
            start_new_session=True,
        )
    answered = _await(lambda: process.poll() is not None or _connect(daemon.url)[0] is not None, _START_TIMEOUT_S)
    if process.poll() is None and answered:
        return
    reason = _complaint(_tail(daemon.log_file, log_start))
    if process.poll() is None:
        _end(process.pid, "dockerd")
        process.wait()
        raise LabError(
            f"dockerd did not answer on {daemon.socket} within {_START_TIMEOUT_S:.0f} s" + (f": {reason}" if reason else ""),
            hint=_log_hint(daemon),
        )
    raise LabError(f"dockerd could not start: {reason or f'it ended with status {process.returncode}'}", hint=_log_hint(daemon))


def _await_other_daemon(daemon: Daemon) -> None:
    """Gives a daemon that already runs the time to answer: it may have been started by somebody else just now."""
    pid = _read_pid(daemon.pid_file)
    if pid is None or _program(pid) != "dockerd":
        return
    if not _await(lambda: _connect(daemon.url)[0] is not None or _program(pid) != "dockerd", _START_TIMEOUT_S):
        raise LabError(
            f"dockerd runs (pid {pid}) but does not answer on {daemon.socket}",
            hint=f"end it with `kill {pid}` and run this again, or set $DOCKER_HOST to the socket that it listens on",
        )


def clear_leftovers(daemon: Daemon) -> None:
    """Removes what a killed daemon left that would keep the next one from starting.

    ``dockerd`` refuses to start when its pid file names *any* live process, a zombie included, and adopts whatever runs under
    its ``containerd.pid``. Pid numbers are used again, after a reboot within seconds. A ``containerd`` without its ``dockerd``
    still holds its database locked. The socket and the containers' own supervisors are dealt with by ``dockerd``.
    Only for a daemon that does not run.
    """
    for orphan in _orphaned_containerds(daemon):
        _end(orphan, "containerd")
    containerd_pid = _read_pid(daemon.containerd_pid_file)
    if containerd_pid is None or _program(containerd_pid) != "containerd":
        daemon.containerd_pid_file.unlink(missing_ok=True)
    pid = _read_pid(daemon.pid_file)
    if pid is None or _program(pid) != "dockerd":
        daemon.pid_file.unlink(missing_ok=True)
    try:
        if stat.S_ISDIR(daemon.socket.lstat().st_mode):
            # `docker run -v /var/run/docker.sock:...` while no engine runs makes a folder where the socket belongs.
            daemon.socket.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LabError(
            f"a folder is in the place of Docker Engine's socket {daemon.socket}",
            hint=f"look into it, then `rm -r {daemon.socket}`",
        ) from error


def _orphaned_containerds(daemon: Daemon) -> list[int]:
    """Processes that are this daemon's ``containerd`` while the daemon is gone."""
    configuration = os.path.realpath(daemon.containerd_configuration)
    found = []
    for pid in _all_pids():
        if _program(pid) != "containerd":
            continue
        arguments = _arguments_of(pid)
        named = any(
            flag == "--config" and os.path.realpath(value) == configuration for flag, value in itertools.pairwise(arguments)
        )
        if named and _program(_parent_of(pid)) != "dockerd":
            found.append(pid)
    return found


def _end(pid: int, program: str) -> None:
    """Ends ``pid`` if it is ``program``: asked first, then killed.

    Raises:
        LabError: It is still there afterwards.
    """
    for number, timeout_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
        if _program(pid) != program:
            return
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if _await(lambda: _program(pid) != program, timeout_s):
            return
    raise LabError(
        f"{program} (pid {pid}) cannot be ended",
        hint="the kernel holds it, probably in a device or a network file system; a reboot helps",
    )


def _await(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


# --- processes --------------------------------------------------------------------------------------------------------


def _read_pid(path: Path) -> int | None:
    try:
        pid = int(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None
    return pid if pid > 0 else None


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat_of(pid: int) -> tuple[str, str, int] | None:
    """Name, state letter and parent of a process; ``None`` when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself hold spaces and parentheses.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1])


def _program(pid: int) -> str | None:
    """What runs under ``pid``; ``None`` for nothing, and for a zombie, which only waits to be buried by its parent."""
    found = _stat_of(pid)
    return None if found is None or found[1] in "ZX" else found[0]


def _parent_of(pid: int) -> int:
    found = _stat_of(pid)
    return 0 if found is None else found[2]


def _arguments_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def _environment_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


# --- logs -------------------------------------------------------------------------------------------------------------


def _tail(path: Path, start: int, limit_bytes: int = 64 * 1024) -> str:
    try:
        with path.open("rb") as stream:
            _seek(stream, start, limit_bytes)
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _seek(stream: IO[bytes], start: int, limit_bytes: int) -> None:
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(start, end - limit_bytes, 0))


def _complaint(log: str) -> str:
    """The line of dockerd's log that says why it gave up, without the log's own syntax; empty when there is none."""
    for line in reversed(log.splitlines()):
        match = re.search(r'level=(?:fatal|error) msg="((?:[^"\\]|\\.)*)"', line)
        if match:
            return match[1].replace('\\"', '"')
        if line.startswith(("failed to ", "unable to ")):
            return line.strip()
    return ""


def _log_hint(daemon: Daemon) -> str:
    return f"dockerd's log is {daemon.log_file}"
