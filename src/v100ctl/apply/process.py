"""Starting and stopping Ansible: its environment, its signals, and what it may leave behind."""

from __future__ import annotations

import contextlib
import locale
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from v100ctl.paths import content_dir

#: How long Ansible may take to stop after a Ctrl-C before it is killed.
GRACE_S = 10.0
# `sockaddr_un` holds 104 bytes on some systems; ssh appends a hash, a dot and 16 random characters to the folder.
_CONTROL_PATH_LIMIT = 70


def _locale_is_utf8() -> bool:
    """Whether Ansible, which refuses anything else, could start in the locale of this environment."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "")
        return locale.nl_langinfo(locale.CODESET).upper().replace("-", "") == "UTF8"
    except locale.Error:
        return False
    finally:
        locale.setlocale(locale.LC_ALL, before)


def ansible_environment(environment: Mapping[str, str], control_path_dir: Path) -> dict[str, str]:
    """What is set on top of ``environment`` for Ansible.

    The user's own ``ANSIBLE_*`` variables win, but for those that the event stream and the checking of host keys rest on.
    """
    roles_path = str(content_dir() / "roles")
    added = {
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_FORCE_COLOR": "False",
        "ANSIBLE_NOCOLOR": "True",
        "ANSIBLE_NOCOWS": "True",
        "ANSIBLE_RETRY_FILES_ENABLED": "False",
        "ANSIBLE_ROLES_PATH": os.pathsep.join(filter(None, (roles_path, environment.get("ANSIBLE_ROLES_PATH")))),
        # So that what roles start by name is what belongs to this interpreter.
        "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), environment.get("PATH")))),
        # Taken by ansible-runner for numbers of its own; a CI system may use the same names.
        "JOB_ID": "",
        "PROJECT_UPDATE_ID": "",
    }
    defaults = {
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
    }
    config = content_dir() / "ansible.cfg"
    if config.is_file():
        defaults["ANSIBLE_CONFIG"] = str(config)
    if len(os.fsencode(control_path_dir)) <= _CONTROL_PATH_LIMIT:
        defaults["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(control_path_dir)
    added.update((name, value) for name, value in defaults.items() if name not in environment)
    if not _locale_is_utf8():
        added["LC_ALL"] = "C.UTF-8"
    return added


def close_ssh_masters(control_path_dir: Path) -> None:
    """Ends the ssh processes that keep connections open for the next task, which would stay for a minute."""
    if not control_path_dir.is_dir():
        return
    for socket in control_path_dir.iterdir():
        # The host name is not used, but ssh wants one; `-F none` since no configuration can matter.
        command = ["ssh", "-F", "none", "-o", f"ControlPath={socket}", "-O", "exit", "none"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False)


def _process_table() -> dict[int, tuple[int, str]]:
    """Process id -> (parent's id, start time) of every process."""
    table: dict[int, tuple[int, str]] = {}
    if sys.platform == "linux":
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                # proc(5): the name in brackets may hold anything, so count from the last bracket; state is field 3.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), fields[19])
        return table
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,lstart="], capture_output=True, text=True, check=False)
    for line in listing.stdout.splitlines():
        pid, parent, *start = line.split()
        table[int(pid)] = (int(parent), " ".join(start))
    return table


def _descendants(root: int) -> dict[int, str]:
    """Process id -> start time of ``root`` and all that descend from it."""
    table = _process_table()
    found = {root: table[root][1]} if root in table else {}
    grew = True
    while grew:
        grew = False
        for pid, (parent, start) in table.items():
            if parent in found and pid not in found:
                found[pid] = start
                grew = True
    return found


def _kill_all(processes: Mapping[int, str]) -> None:
    table = _process_table()
    for pid, start in processes.items():
        # The start time tells a process from a later one that was given the same id.
        if pid in table and table[pid][1] == start:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class Interruption:
    """Turns SIGINT, SIGTERM and SIGHUP into a clean stop of Ansible.

    The first one asks Ansible to stop, as Ctrl-C does; a second one, or :data:`GRACE_S` seconds, kill what is left of it.
    Only the main thread can catch signals: in another one nothing is caught, and :meth:`stop` is there for other reasons to stop.
    """

    def __init__(self, pid_file: Path, on_stop: Callable[[], None], grace_s: float = GRACE_S) -> None:
        self._pid_file = pid_file
        self._on_stop = on_stop
        self._grace_s = grace_s
        self._deadline_s: float | None = None
        self._asked: dict[int, str] | None = None
        self._announced = False
        #: The first signal that came.
        self.signal_number: signal.Signals | None = None

    @property
    def stopping(self) -> bool:
        return self._deadline_s is not None

    def stop(self) -> None:
        """Asks Ansible to stop."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._deadline_s is not None:
            self._deadline_s = time.monotonic()
            return
        self.signal_number = signal.Signals(number)
        self.stop()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catches signals inside the ``with`` block and kills what is left of Ansible at its end when it was to stop."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # What was ignored when this program started (nohup) stays ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.stopping and self._asked is not None:
                _kill_all(self._asked)

    def cancel(self) -> bool:
        """Called by ansible-runner a few times a second; ``True`` makes it kill Ansible."""
        if self._deadline_s is None:
            return False
        if not self._announced:
            self._announced = True
            self._on_stop()
        if self._asked is None:
            pid = self._pid()
            if pid is not None:
                # Its workers lead sessions of their own: once Ansible has gone nothing leads to them.
                self._asked = _descendants(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGINT)
        if time.monotonic() < self._deadline_s:
            return False
        pid = self._pid()
        if pid is not None:
            self._asked = {**(self._asked or {}), **_descendants(pid)}
            _kill_all(self._asked)
        return True

    def _pid(self) -> int | None:
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None
