"""A time limit that stands still while a person is being asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Deadline:
    """So many seconds from now, not counting the time inside :meth:`paused`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._end_s = time.monotonic() + timeout_s
        self._paused_since_s: float | None = None

    def remaining_s(self) -> float:
        """What is left, never below zero."""
        with self._lock:
            return max(0.0, self._left_s())

    def overdue_s(self) -> float:
        """How long nothing has been left, never below zero."""
        with self._lock:
            return max(0.0, -self._left_s())

    def _left_s(self) -> float:
        return self._end_s - (time.monotonic() if self._paused_since_s is None else self._paused_since_s)

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining_s() <= 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the time stand still; not to be nested."""
        since_s = time.monotonic()
        with self._lock:
            self._paused_since_s = since_s
        try:
            yield
        finally:
            with self._lock:
                self._end_s += time.monotonic() - since_s
                self._paused_since_s = None
