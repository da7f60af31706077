"""``ansible-playbook`` as a child that does not outlive the program that started it.

Run as ``python -P playbook_process.py --parent PID --pid-file PATH -- ARGUMENTS OF ANSIBLE-PLAYBOOK``. It is a script of its own
because what it arranges has to be arranged inside the child: ansible-runner starts Ansible in a session of its own, with SIGHUP
ignored, so neither a Ctrl-C nor a vanished terminal would reach it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, pid_file, arguments = int(sys.argv[2]), sys.argv[4], sys.argv[6:]
    # A shell starts background jobs with SIGINT ignored, and Python would leave it so; Ansible is stopped by SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        # SIGINT is how Ansible ends its workers and their connections too; SIGKILL would leave them running.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the line above: no signal will come.
        sys.exit(1)
    descriptor = os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.close(descriptor)

    sys.argv = ["ansible-playbook", *arguments]
    from ansible.cli.playbook import main as ansible_playbook

    ansible_playbook()


if __name__ == "__main__":
    main()
