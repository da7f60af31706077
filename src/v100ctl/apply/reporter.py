"""What a person sees while something long runs: phases, hosts and their steps, progress, failures.

Everything goes to stderr, so that stdout stays free for data. :func:`make_reporter` picks a :class:`LiveReporter` for a
terminal, which redraws a small region in place, and a :class:`PlainReporter` for anything else, which prints lines that read
well in a log. All methods may be called from several threads.

Texts may come from hosts, so they are never read as markup, and control characters are taken out before they reach a terminal.
"""

from __future__ import annotations

import abc
import atexit
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

Unit = Literal["steps", "bytes"]
Status = Literal["ok", "failed", "unreachable"]

# The escape sequences of ECMA-48 with their arguments: removing ESC alone would leave "[31m" behind as text.
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|\x1b[PX^_\]].*?(?:\x1b\\|\x07|\x9c|$)"  # DCS, SOS, PM, APC and OSC: window titles, clipboard, links
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|\x9b[0-?]*[ -/]*[@-~]",  # CSI as one C1 character
    re.DOTALL,
)
# C0 and C1 but for tab and newline, then the marks that reorder text on screen.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

#: Seconds between two plain lines about the same thing.
PLAIN_INTERVAL_S = 10.0
#: Into how many parts the whole is divided for plain progress: a line is due at each, even before the interval is over.
PLAIN_PARTS = 10


def clean(text: str) -> str:
    """``text`` without terminal control sequences; ``\\r\\n`` becomes ``\\n``, tabs and newlines stay."""
    return _CONTROL.sub("", _ESCAPE_SEQUENCE.sub("", text.replace("\r\n", "\n")))


def clean_line(text: str) -> str:
    """``text`` as one line without terminal control sequences."""
    return " ".join(clean(text).split())


def format_duration(seconds: float) -> str:
    """``seconds`` for people: ``0.4 s``, ``12 s``, ``3m 05s``, ``2h 07m``."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest_s:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


class Phase(AbstractContextManager["Phase"]):
    """One part of the work, from its call to :meth:`end`, to the end of its ``with`` block, or to the next phase."""

    def __init__(self, text: str, started_s: float, on_end: Callable[[Phase, bool], None]) -> None:
        self.text = text
        self.started_s = started_s
        self.entered = False
        self._on_end = on_end

    def __enter__(self) -> Phase:
        self.entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end(succeeded=error is None)

    def end(self, *, succeeded: bool = True) -> None:
        """Closes the phase and shows how long it took. A second call does nothing."""
        self._on_end(self, succeeded)


class Reporter(Protocol):
    """Tells a person what happens. Hosts are named as in the inventory; ``""`` stands for the controller itself."""

    def phase(self, text: str) -> Phase:
        """Starts a phase. Used as a context manager phases nest; else the next phase ends this one."""

    def host_step(self, host: str, role: str | None, task: str) -> None:
        """``host`` now works on ``task`` of ``role``."""

    def host_progress(self, host: str, label: str, done: int, total: int | None, unit: Unit) -> None:
        """``done`` of ``total`` (``None``: unknown, 0: nothing to count) ``unit`` of ``label`` are through on ``host``."""

    def host_idle(self, host: str) -> None:
        """``host`` has finished its step, and waits for other hosts or has nothing more to do."""

    def host_done(self, host: str, status: Status, changed: int) -> None:
        """``host`` needs nothing more; ``changed`` tasks changed something."""

    def failure(self, host: str, task: str, message: str, hint: str | None) -> None:
        """``task`` failed on ``host`` for good, with the module's ``message``. Empty where no task was involved."""

    def note(self, text: str) -> None:
        """Something worth knowing that needs no action."""

    def hint(self, text: str) -> None:
        """What to do next."""

    def warning(self, text: str) -> None:
        """Something that may need action, while the work goes on."""

    def suspended(self) -> AbstractContextManager[None]:
        """Leaves the terminal alone inside the ``with`` block, for prompts."""

    def close(self) -> None:
        """Ends open phases and gives the terminal back. May be called twice; a later call starts afresh."""


@dataclass
class _Progress:
    label: str
    done: int
    total: int | None
    unit: Unit
    #: (seconds, done) of the last moments, for a rate.
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def parts(self, of: int) -> int | None:
        """How many of ``of`` equal parts are done; ``None`` when the whole is unknown."""
        return min(self.done, self.total) * of // self.total if self.total else None

    def rate_per_s(self) -> float | None:
        if len(self.samples) < 2:
            return None
        (start_s, start), (end_s, end) = self.samples[0], self.samples[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s and end >= start else None

    def count_text(self) -> str:
        if self.unit == "bytes":
            text = f"{decimal(self.done)} of {decimal(self.total)}" if self.total else decimal(self.done)
            rate = self.rate_per_s()
            return f"{text}, {decimal(int(rate))}/s" if rate else text
        if self.total:
            return f"{self.done}/{self.total}"
        return str(self.done) if self.done else ""


@dataclass
class _Row:
    """What is known of one host while it is being worked on."""

    host: str
    since_s: float
    #: The phase in which it came up, and with which it goes.
    phase: Phase | None
    role: str = ""
    task: str = ""
    busy: bool = True
    progress: _Progress | None = None
    #: For plain lines: when the last line about this host was printed, what it showed, and of which role.
    printed_s: float = float("-inf")
    printed_parts: int = 0
    printed_label: str | None = None
    printed_role: str | None = None


class _BaseReporter(abc.ABC):
    """Keeps the phases and hosts; subclasses show them."""

    def __init__(self, console: Console, *, verbosity: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._verbosity = verbosity
        self._clock = clock
        self._lock = threading.RLock()
        self._phases: list[Phase] = []
        self._rows: dict[str, _Row] = {}
        self._done: dict[str, Status] = {}

    # What subclasses show.

    @abc.abstractmethod
    def _phase_started(self, phase: Phase) -> None:
        """Show it."""

    @abc.abstractmethod
    def _phase_ended(self, phase: Phase, succeeded: bool, elapsed_s: float) -> None:
        """Show it."""

    @abc.abstractmethod
    def _row_changed(self, row: _Row) -> None:
        """Show it."""

    @abc.abstractmethod
    def _state_changed(self) -> None:
        """Called after each change of phases or rows."""

    # The interface.

    def phase(self, text: str) -> Phase:
        with self._lock:
            if self._phases and not self._phases[-1].entered:
                self._end_phase(self._phases[-1], True)
            phase = Phase(clean_line(text), self._clock(), self._end_phase)
            self._phases.append(phase)
            self._phase_started(phase)
            self._state_changed()
            return phase

    def _end_phase(self, phase: Phase, succeeded: bool) -> None:
        with self._lock:
            if phase not in self._phases:
                return
            # Phases inside this one that nobody ended end with it.
            while self._phases:
                last = self._phases.pop()
                self._rows = {host: row for host, row in self._rows.items() if row.phase is not last}
                if not self._phases:
                    self._done.clear()
                self._phase_ended(last, succeeded, self._clock() - last.started_s)
                if last is phase:
                    break
            self._state_changed()

    def _row(self, host: str) -> _Row:
        host = clean_line(host)
        row = self._rows.get(host)
        if row is None:
            row = self._rows[host] = _Row(host, self._clock(), self._phases[-1] if self._phases else None)
            self._done.pop(host, None)
        return row

    def host_step(self, host: str, role: str | None, task: str) -> None:
        with self._lock:
            row = self._row(host)
            role, task = clean_line(role or ""), clean_line(task)
            if (role, task) != (row.role, row.task) or not row.busy:
                row.since_s = self._clock()
                row.progress = None
            row.role, row.task, row.busy = role, task, True
            self._row_changed(row)
            self._state_changed()

    def host_progress(self, host: str, label: str, done: int, total: int | None, unit: Unit) -> None:
        with self._lock:
            row = self._row(host)
            label = clean_line(label)
            progress = row.progress
            if progress is None or progress.label != label:
                if not row.task:
                    row.since_s = self._clock()
                progress = row.progress = _Progress(label, done, total, unit)
            progress.done, progress.total, progress.unit = done, total, unit
            progress.samples.append((self._clock(), done))
            row.busy = True
            self._row_changed(row)
            if not row.task and total and done >= total:
                # Progress outside any task (a download of the controller's) has no other end.
                del self._rows[row.host]
            self._state_changed()

    def host_idle(self, host: str) -> None:
        with self._lock:
            row = self._rows.get(clean_line(host))
            if row is None:
                return
            if not row.task:
                # Progress outside any task, of which nothing more will come.
                del self._rows[row.host]
            row.busy, row.progress = False, None
            self._state_changed()

    def host_done(self, host: str, status: Status, changed: int) -> None:
        with self._lock:
            host = clean_line(host)
            self._rows.pop(host, None)
            self._done[host] = status
            summary = {
                "ok": f"done, {changed} changed" if changed else "done, nothing changed",
                "failed": "failed",
                "unreachable": "unreachable",
            }[status]
            self._print(Text.assemble((f"{host}: {summary}", "green" if status == "ok" else "red")))
            self._state_changed()

    def failure(self, host: str, task: str, message: str, hint: str | None) -> None:
        with self._lock:
            text = Text.assemble(("error", "bold red"), f": {clean_line(host)}: ")
            lines = clean(message).strip("\n").splitlines()
            if task:
                text.append(clean_line(task), "bold").append(" failed")
            elif lines:
                text.append(lines.pop(0))
            for line in lines:
                text.append("\n  " + line)
            self._print(text)
            if hint:
                self.hint(hint)

    def note(self, text: str) -> None:
        self._print(Text(clean(text)))

    def hint(self, text: str) -> None:
        self._print(Text.assemble(("hint", "bold cyan"), ": " + clean(text)))

    def warning(self, text: str) -> None:
        self._print(Text.assemble(("warning", "bold yellow"), ": " + clean(text)))

    def _print(self, text: Text) -> None:
        with self._lock:
            # Soft wrap: a long line is the terminal's to fold, so that a path in it can be copied whole.
            self._console.print(text, soft_wrap=True, highlight=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        with self._lock:
            self._rows.clear()
            self._done.clear()
            if self._phases:
                self._end_phase(self._phases[0], False)


class PlainReporter(_BaseReporter):
    """Lines for logs and pipes.

    A host gets a line when it enters a role, and within one at most every :data:`PLAIN_INTERVAL_S` seconds (every task with
    ``verbosity`` of 1 or more); progress a line at its start, at its end, and every :data:`PLAIN_INTERVAL_S` seconds or
    at each of :data:`PLAIN_PARTS` parts of the whole.
    """

    def _state_changed(self) -> None:
        """Nothing: a line is printed where something happens."""

    def _phase_started(self, phase: Phase) -> None:
        self._print(Text.assemble((f"{phase.text} ...", "bold")))

    def _phase_ended(self, phase: Phase, succeeded: bool, elapsed_s: float) -> None:
        outcome, style = ("done", "green") if succeeded else ("failed", "red")
        self._print(Text(f"{phase.text}: {outcome} after {format_duration(elapsed_s)}", style=style))

    def _row_changed(self, row: _Row) -> None:
        now_s = self._clock()
        waited = now_s - row.printed_s >= PLAIN_INTERVAL_S
        progress = row.progress
        subject = f"{row.host}: " if row.host else ""
        if progress is None:
            if not (waited or row.role != row.printed_role or self._verbosity >= 1):
                return
            what = f"{row.role}: {row.task}" if row.role else row.task
            row.printed_role, row.printed_label = row.role, None
        else:
            parts, percent = progress.parts(PLAIN_PARTS), progress.parts(100)
            new = row.printed_label != progress.label
            if not (new or waited or (parts is not None and parts > row.printed_parts)):
                return
            what = " ".join(part for part in (progress.label, progress.count_text()) if part)
            if percent is not None:
                what += f" ({percent}%)"
            row.printed_parts = parts or 0
            row.printed_label = progress.label
        row.printed_s = now_s
        self._print(Text(subject + what))


class LiveReporter(_BaseReporter):
    """A region at the bottom of the terminal: open phases, busy hosts with step, time and bar, a count of the rest.

    It is there only while a phase or a host is at work. What should stay on the screen is printed above it.
    """

    REFRESH_PER_S = 6

    def __init__(self, console: Console, *, verbosity: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, verbosity=verbosity, clock=clock)
        self._live: Live | None = None
        self._suspended = 0
        self._stop_refreshing = threading.Event()
        # What the region is drawn from: replaced as a whole and read without the lock, since text that others write to stderr
        # is printed above the region under rich's lock, which a thread that holds ours may be waiting for.
        self._shown: tuple[tuple[Phase, ...], tuple[_Row, ...], tuple[Status, ...]] = ((), (), ())
        ascii_only = console.options.ascii_only
        self._spinner = Spinner("line" if ascii_only else "dots")
        self._marks = ("ok", "x", "...") if ascii_only else ("✓", "✗", "…")
        # A traceback that nobody catches must not leave a terminal without its cursor.
        atexit.register(self.close)

    def _phase_started(self, phase: Phase) -> None:
        """The region shows it."""

    def _phase_ended(self, phase: Phase, succeeded: bool, elapsed_s: float) -> None:
        mark, style = (self._marks[0], "green") if succeeded else (self._marks[1], "red")
        self._print(Text.assemble((mark, style), f" {phase.text} ", (f"({format_duration(elapsed_s)})", "dim")))

    def _row_changed(self, row: _Row) -> None:
        """The region shows it."""

    def _state_changed(self) -> None:
        self._shown = (tuple(self._phases), tuple(self._rows.values()), tuple(self._done.values()))
        wanted = bool(self._phases or self._rows) and not self._suspended
        if wanted and self._live is None:
            self._live = Live(
                self,
                console=self._console,
                # Rich's own refresh thread may draw between another thread's drawing and its writing: ours takes the lock.
                auto_refresh=False,
                transient=True,
                # stdout carries data and may be a file; what others write to stderr belongs above the region.
                redirect_stdout=False,
                redirect_stderr=True,
            )
            self._live.start()
            self._stop_refreshing = threading.Event()
            threading.Thread(target=self._refresh, args=(self._live, self._stop_refreshing), daemon=True).start()
        elif not wanted and self._live is not None:
            self._stop_refreshing.set()
            live, self._live = self._live, None
            live.stop()

    def _refresh(self, live: Live, stop: threading.Event) -> None:
        while not stop.wait(1 / self.REFRESH_PER_S):
            with self._lock:
                if not stop.is_set():
                    live.refresh()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        with self._lock:
            self._suspended += 1
            self._state_changed()
        try:
            yield
        finally:
            with self._lock:
                self._suspended -= 1
                self._state_changed()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        phases, rows, done = self._shown
        now_s = self._clock()
        for depth, phase in enumerate(phases):
            line = Table.grid(padding=(0, 1))
            lead = self._spinner if phase is phases[-1] else Text(" ")
            title = Text("  " * depth + phase.text, style="bold", no_wrap=True, overflow="ellipsis")
            line.add_row(lead, title, Text(format_duration(now_s - phase.started_s), style="dim"))
            yield line
        # Three lines are for the count, the cursor, and what was last printed above.
        room = max(options.size.height - len(phases) - 3, 1)
        busy = [row for row in rows if row.busy]
        # Those with something to watch first, then the longest at their step: these are what the rest waits for.
        shown = sorted(busy, key=lambda row: (row.progress is None, row.since_s))[:room]
        if shown:
            yield self._host_table(sorted(shown, key=lambda row: row.host), now_s, options.max_width)
        failed = sum(1 for status in done if status != "ok")
        counts = (
            (len(busy) - len(shown), "more at work"),
            (len(rows) - len(busy), "waiting"),
            (len(done) - failed, "done"),
            (failed, "failed"),
        )
        rest = ", ".join(f"{number} {what}" for number, what in counts if number)
        if rest:
            yield Text(f"  {self._marks[2]} {rest}", style="dim", no_wrap=True, overflow="ellipsis")

    def _host_table(self, rows: list[_Row], now_s: float, width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(width // 4, 8))
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=None)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, justify="right")
        for row in rows:
            progress = row.progress
            step = progress.label if progress is not None and progress.label else row.task
            if row.role:
                step = f"{row.role}: {step}"
            bar: Text | ProgressBar = Text("")
            count = ""
            if progress is not None:
                count = progress.count_text()
                if progress.total and width >= 70:
                    bar = ProgressBar(total=progress.total, completed=min(progress.done, progress.total), width=20)
            elapsed = Text(format_duration(now_s - row.since_s), style="dim")
            table.add_row(Text("  " + row.host, style="cyan"), Text(step), bar, Text(count), elapsed)
        return table


def make_reporter(color: bool | None = None, verbosity: int = 0, *, stream: TextIO | None = None) -> Reporter:
    """The reporter that fits where stderr goes.

    Args:
        color: ``True`` and ``False`` are the user's word; ``None`` uses colour on a terminal unless ``NO_COLOR`` is set.
        verbosity: How many ``-v`` were given.
        stream: Where to write instead of ``sys.stderr``.
    """
    stream = sys.stderr if stream is None else stream
    is_terminal = stream.isatty()
    # https://no-color.org: set and not empty.
    no_color = not color if color is not None else bool(os.environ.get("NO_COLOR")) or not is_terminal
    live = is_terminal and os.environ.get("TERM", "") not in ("", "dumb")
    console = Console(
        file=stream,
        force_terminal=live or not no_color,
        no_color=no_color,
        markup=False,
        emoji=False,
        highlight=False,
    )
    if live:
        return LiveReporter(console, verbosity=verbosity)
    return PlainReporter(console, verbosity=verbosity)
