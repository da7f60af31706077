"""One at a time, for programs that may be killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from v100ctl.errors import V100ctlError


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise V100ctlError(
            f"{error.filename or path} cannot be written: {error.strerror}",
            hint="set $HOME or $XDG_STATE_HOME to a folder that you may write",
        ) from error


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds ``path`` locked inside the ``with`` block; the kernel lets go of it however the program ends.

    Args:
        path: The lock file. It is made where needed and stays: removing it would let two programs hold two files of one name.
        on_wait: Called once when somebody else holds the lock, before waiting for them.

    Raises:
        V100ctlError: The lock file cannot be made.
    """
    descriptor = _opened(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Held(Exception):
    """Somebody else holds the lock. ``note`` is what they left in it."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        self.note = note


@contextmanager
def try_exclusive(path: Path, note: str) -> Iterator[None]:
    """Holds ``path`` locked inside the ``with`` block, or does not wait for who does.

    Args:
        path: The lock file, as of :func:`exclusive`.
        note: What others are told meanwhile.

    Raises:
        Held: somebody else holds it.
        V100ctlError: the lock file cannot be made.
    """
    descriptor = _opened(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(os.read(descriptor, 4096).decode("utf-8", "replace")) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, note.encode())
        yield
    finally:
        os.close(descriptor)
