"""``ansible-playbook`` as a child that does not outlive the program that started it.

Run as ``python -P playbook_process.py --parent PID --pid-file PATH -- ARGUMENTS OF ANSIBLE-PLAYBOOK``. It is a script of its own
because what it arranges has to be arranged inside the child: ansible-runner starts Ansible in a session of its own, with SIGHUP
ignored, so neither a Ctrl-C nor a vanished terminal would reach it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: How long Ansible may take to end its workers and their connections after its parent has died.
GRACE_S = 60.0


def main() -> None:
    parent, pid_file, arguments = int(sys.argv[2]), sys.argv[4], sys.argv[6:]
    # A shell starts background jobs with SIGINT ignored, and Python would leave it so; Ansible is stopped by SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        # SIGINT is how Ansible ends its workers and their connections too; SIGKILL would leave them running.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        watch(parent)
    if os.getppid() != parent:
        # The parent died before the lines above: no signal will come.
        sys.exit(1)
    descriptor = os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.close(descriptor)

    sys.argv = ["ansible-playbook", *arguments]
    from ansible.cli.playbook import main as ansible_playbook

    ansible_playbook()


def watch(parent: int) -> None:
    """Leave a process behind that kills this one and all below it where SIGINT, which comes only once, did not do.

    Ansible waits for workers that do not end, and a KeyboardInterrupt may be lost where Python ignores exceptions.
    """
    ansible = os.getpid()
    try:
        pidfds = os.pidfd_open(parent), os.pidfd_open(ansible)
    except OSError:
        # The parent is gone, which the caller sees; or a kernel before 5.3, and then there is the signal alone.
        return
    if os.fork():
        for descriptor in pidfds:
            os.close(descriptor)
        return
    try:
        # Nobody may wait for this process: neither at the end of a pipe nor of a terminal.
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        _wait_and_kill(*pidfds, ansible)
    finally:
        os._exit(0)


def _wait_and_kill(parent_pidfd: int, ansible_pidfd: int, ansible: int) -> None:
    poller = select.poll()
    poller.register(ansible_pidfd, select.POLLIN)
    both = select.poll()
    for descriptor in (parent_pidfd, ansible_pidfd):
        both.register(descriptor, select.POLLIN)
    both.poll()
    if poller.poll(GRACE_S * 1000):
        return
    # Whoever is stopped first cannot start another one that is not in the list.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (ansible, *_below(ansible)):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)


def _below(ancestor: int) -> list[int]:
    """The processes that descend from this one, by ``/proc``."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before it may hold spaces and parentheses.
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


if __name__ == "__main__":
    main()
