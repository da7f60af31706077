"""Send the probe to hosts and read what comes back."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from v100ctl.errors import ProbeError, UnreachableError, V100ctlError
from v100ctl.facts import Distribution, Facts, ProbeRequest
from v100ctl.probe import host_script
from v100ctl.probe.connection import Connection
from v100ctl.probe.deadline import Deadline
from v100ctl.probe.session import Result, Session, start_session
from v100ctl.probe.text import last_line, printable

DEFAULT_FORKS = 20
DEFAULT_TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 600.0
#: How long past its time limit a host may take to notice that it is over.
_GRACE_S = 2.0
#: After this long without an answer a host no longer counts among those that are asked at a time, up to so many of them.
_PATIENCE_S = 4.0
_MAX_THREADS = 256

HOST_SCRIPT = Path(host_script.__file__)

#: Isolated (nothing from the user's environment or folder is imported), without site, writing no bytecode.
_PYTHON_OPTIONS = ("-I", "-S", "-B")
#: Exit code of :func:`find_python_script` where none is there.
_NO_PYTHON = 127
_USUAL_PYTHONS = ("/usr/bin/python3", "python3", "/usr/libexec/platform-python")
#: Tried where the usual one is too old, newest first.
_NEWER_PYTHONS = tuple(f"python3.{minor}" for minor in range(15, 7, -1))


class PythonMissingError(ProbeError):
    """A host has no Python that the probe and Ansible could use. The hint holds the command that installs one."""


def python_bootstrap_command(distribution: Distribution | None) -> str:
    """The shell command that installs Python on a distribution, to be run as root.

    Args:
        distribution: The host's ``/etc/os-release``, or ``None`` where it is not known.
    """
    names = {distribution.id, *distribution.id_like} if distribution is not None else set()
    if names & {"debian", "ubuntu"}:
        return "apt-get update && apt-get install --yes --no-install-recommends python3"
    if names & {"rhel", "fedora", "centos", "rocky", "almalinux"}:
        # The default of version 8 is 3.6, which neither the probe nor Ansible can use.
        old = distribution is not None and distribution.id != "fedora" and distribution.version_id.split(".")[0] == "8"
        return f"dnf install --assumeyes {'python3.12' if old else 'python3'}"
    if names & {"suse", "opensuse", "sles"}:
        return "zypper --non-interactive install python3"
    return "apt-get install python3 || dnf install python3"


def install_python(session: Session, *, timeout_s: float = INSTALL_TIMEOUT_S) -> None:
    """Install Python on a host with its own package manager, as root.

    Raises:
        ProbeError: there is no package manager that we know, or it failed.
        UnreachableError: the connection broke, the time ran out, or `sudo` refused.
    """
    host = session.connection.host
    release = session.run("cat /etc/os-release 2>/dev/null || cat /usr/lib/os-release")
    distribution = Distribution.model_validate(host_script.parse_os_release(release.stdout.decode("utf-8", "replace")))
    command = python_bootstrap_command(distribution)
    if "||" in command:
        raise ProbeError(
            f"{host}: no way is known to install Python on {printable(distribution.name) or 'this system'}",
            hint="install Python 3.8 or newer there by hand",
        )
    # A host that was just made often runs its first updates now: wait for the lock instead of failing.
    script = f"DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND; {command}".replace(
        "apt-get install", "apt-get -o DPkg::Lock::Timeout=300 install"
    )
    done = session.run(script, timeout_s=timeout_s, become=True)
    if done.rc != 0:
        said = last_line(done.stderr) or last_line(done.stdout)
        raise ProbeError(f"{host}: Python could not be installed: {said}", hint=f"run there as root: `{command}`")


def probe_host(connection: Connection, request: ProbeRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Facts:
    """Look at one host.

    Args:
        connection: The way in.
        request: What to look at beside the usual.
        timeout_s: For everything together; time in which a person is asked does not count.

    Raises:
        UnreachableError: no way in, no root, or no answer in time.
        PythonMissingError: the host has no Python.
        ProbeError: what came back is no document.
    """
    return parse_facts(connection.host, _probe(connection, request, Deadline(timeout_s)))


def _probe(connection: Connection, request: ProbeRequest, deadline: Deadline) -> bytes:
    session = start_session(connection, deadline)
    try:
        return _ask(session, request, timeout_s=deadline.remaining_s())
    finally:
        session.close()


def _ask(session: Session, request: ProbeRequest, *, timeout_s: float) -> bytes:
    return run_python(session, HOST_SCRIPT.read_bytes(), encode_request(request), what="the probe", timeout_s=timeout_s)


def probe_session(session: Session, request: ProbeRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Facts:
    """Look at a host through an open session; see :func:`probe_host`."""
    return parse_facts(session.connection.host, _ask(session, request, timeout_s=timeout_s))


def run_python(session: Session, script: bytes, request: str, *, what: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
    """Run a script of ours with the host's Python, as root, and return what it printed.

    Args:
        session: The way in.
        script: The text; standard library only. With a Python that is too old it exits with ``host_script.EXIT_TOO_OLD``.
        request: What it is given as ``--request``; see :func:`shell_safe_json`.
        what: Its name in messages.
        timeout_s: For everything together.

    Raises:
        UnreachableError: no root, or no answer in time.
        PythonMissingError: the host has no Python.
        ProbeError: its Python is too old, or the script failed.
    """
    deadline = Deadline(timeout_s)
    connection = session.connection
    named = connection.python_interpreter
    done = _run_script(session, (named,) if named else _USUAL_PYTHONS, script, request, deadline)
    if done.rc == host_script.EXIT_TOO_OLD and not named:
        newer = _run_script(session, _NEWER_PYTHONS, script, request, deadline)
        done = newer if newer.rc != _NO_PYTHON else done
    if done.rc == _NO_PYTHON:
        raise _python_missing(connection, done)
    if done.rc == host_script.EXIT_TOO_OLD:
        said = last_line(done.stderr).removeprefix("v100ctl: ")
        raise ProbeError(
            f"{connection.host}: {said}", hint="install a newer Python there and name it as `ansible_python_interpreter`"
        )
    if done.rc != 0:
        raise ProbeError(
            f"{connection.host}: {what} failed with exit code {done.rc}: {last_line(done.stderr) or last_line(done.stdout)}"
        )
    return done.stdout


def _run_script(session: Session, pythons: Sequence[str], script: bytes, request: str, deadline: Deadline) -> Result:
    return session.run(
        ["/bin/sh", "-c", find_python_script(pythons), "sh", request],
        stdin=script,
        timeout_s=deadline.remaining_s(),
        become=True,
    )


def find_python_script(pythons: Sequence[str]) -> str:
    """A shell script, on one line, that runs the first of these interpreters with a script on stdin and the request as ``$1``.

    Where there is none it prints what the distribution is, which tells how to install one, and exits with 127.
    """
    options = " ".join(_PYTHON_OPTIONS)
    tries = []
    for python in pythons:
        # Ansible allows arguments here: `/usr/bin/env python3`.
        argv = shlex.split(python)
        quoted = shlex.join(argv)
        there = " && ".join(f"command -v {shlex.quote(program)} >/dev/null 2>&1" for program in (argv[0], argv[-1]))
        tries.append(f'if {there}; then exec {quoted} {options} - --request "$1"; fi')
    tries += [
        "head -c 4096 /etc/os-release 2>/dev/null || head -c 4096 /usr/lib/os-release 2>/dev/null",
        'echo "v100ctl: no python" >&2',
        f"exit {_NO_PYTHON}",
    ]
    return "; ".join(tries)


def encode_request(request: ProbeRequest) -> str:
    """The request as JSON for a command line; see :func:`shell_safe_json`."""
    return shell_safe_json(request.model_dump(mode="json"))


def shell_safe_json(document: object) -> str:
    """JSON without the characters that csh and fish obey inside quotes: ``'``, ``!``, doubled backslashes."""
    encoded = json.dumps(document)
    spared = re.sub(r"\\(.)", lambda found: "\\u005c" if found.group(1) == "\\" else found.group(0), encoded)
    return spared.replace("!", "\\u0021").replace("'", "\\u0027")


def parse_facts(host: str, document: bytes) -> Facts:
    """What the script printed, checked.

    Raises:
        ProbeError: it is not such a document; the message shows its beginning, escaped.
    """
    try:
        return Facts.model_validate_json(document)
    except ValidationError as error:
        reason = facts_problem(error)
    raise ProbeError(
        f"{host}: the probe did not return a usable document ({reason}): {printable(document)}",
        hint="something on the host may print into every login (`~/.bashrc`), or is not what it says it is",
    )


def facts_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a document, and where, on one line."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(printable(str(part), 60) for part in problem["loc"])
    return printable(problem["msg"], 120) + (f" at {place}" if place else "")


def _python_missing(connection: Connection, done: Result) -> PythonMissingError:
    release = host_script.parse_os_release(done.stdout[:4096].decode("utf-8", "replace"))
    distribution = Distribution.model_validate(release)
    command = python_bootstrap_command(distribution if distribution.id else None)
    if connection.python_interpreter:
        return PythonMissingError(
            f"{connection.host}: there is no {printable(connection.python_interpreter)}",
            hint=f"correct `ansible_python_interpreter`, or run there as root: `{command}`",
        )
    name = f" ({printable(distribution.name)})" if distribution.name else ""
    return PythonMissingError(f"{connection.host}: it has no Python{name}", hint=f"run there as root: `{command}`")


def probe_hosts(
    items: Mapping[str, tuple[Connection, ProbeRequest]],
    *,
    forks: int = DEFAULT_FORKS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_done: Callable[[str, Facts | V100ctlError], None] | None = None,
) -> dict[str, Facts | V100ctlError]:
    """Look at many hosts at once and keep what all of them say; see :func:`probe_each`.

    Args:
        items: Connection and request by host.
        forks: How many at a time.
        timeout_s: For each host.
        on_done: Called in this thread as each host is done.

    Returns:
        Facts or the error, by host, in the order of ``items``.
    """
    results: dict[str, Facts | V100ctlError] = {}
    for host, outcome in probe_each(items, forks=forks, timeout_s=timeout_s):
        results[host] = outcome
        if on_done is not None:
            on_done(host, outcome)
    return {host: results[host] for host in items}


def _read(host: str, answer: bytes | V100ctlError) -> Facts | V100ctlError:
    # Here and not where hosts are asked: a document takes many times its size while it is read, so one at a time.
    if isinstance(answer, V100ctlError):
        return answer
    try:
        return parse_facts(host, answer)
    except ProbeError as error:
        return error


def probe_each(
    items: Mapping[str, tuple[Connection, ProbeRequest]], *, forks: int = DEFAULT_FORKS, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[tuple[str, Facts | V100ctlError]]:
    """Look at many hosts at once; each comes as soon as it has answered, and nothing of it is kept here.

    A host that gives no answer within ``timeout_s`` is given up; if its thread is stuck, another takes its place. One that is
    silent for a few seconds does not keep the next from its turn, so that a rack without power delays none of the others.

    Args:
        items: Connection and request by host.
        forks: How many at a time.
        timeout_s: For each host.
    """
    waiting = deque(items)
    running: dict[str, Deadline] = {}
    answers: queue.SimpleQueue[tuple[str, bytes | BaseException]] = queue.SimpleQueue()

    def look(host: str, deadline: Deadline) -> None:
        try:
            answers.put((host, _probe(*items[host], deadline)))
        except BaseException as error:  # the caller's thread decides what it means
            answers.put((host, error))

    while waiting or running:
        silent = sum(timeout_s - deadline.remaining_s() > _PATIENCE_S for deadline in running.values())
        while waiting and len(running) - silent < max(1, forks) and len(running) < max(_MAX_THREADS, forks):
            host = waiting.popleft()
            running[host] = Deadline(timeout_s)
            # Not a pool: its threads are waited for at exit, and one may hang in a name lookup.
            threading.Thread(target=look, args=(host, running[host]), name=f"probe {host}", daemon=True).start()
        wait_s = min(deadline.remaining_s() for deadline in running.values()) + _GRACE_S
        with contextlib.suppress(queue.Empty):
            host, answer = answers.get(timeout=min(wait_s, 0.5) if waiting else wait_s)
            if isinstance(answer, BaseException) and not isinstance(answer, V100ctlError):
                raise answer
            # One that was given up may still answer: too late.
            if host in running:
                del running[host]
                yield host, _read(host, answer)
        # What has come by now is in time, also where reading another's answer took long.
        overdue = [host for host, deadline in running.items() if deadline.overdue_s() > _GRACE_S] if answers.empty() else []
        for host in overdue:
            del running[host]
            yield host, UnreachableError(f"{host}: no answer within {timeout_s:g} s", hint="look at it by hand")
