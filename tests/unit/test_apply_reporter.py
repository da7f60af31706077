"""What reporters show: plain lines are few and complete, the live region fits, hosts cannot write to the terminal."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from v100ctl.apply import LiveReporter, PlainReporter, make_reporter
from v100ctl.apply.reporter import clean, clean_line, format_duration


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Screen:
    """A reporter with its clock and what it has written."""

    def __init__(self, *, live: bool = False, verbosity: int = 0, height: int = 24, width: int = 100) -> None:
        self.stream = io.StringIO()
        self.clock = Clock()
        console = Console(file=self.stream, force_terminal=live, width=width, height=height, color_system=None, markup=False)
        kind = LiveReporter if live else PlainReporter
        self.reporter = kind(console, verbosity=verbosity, clock=self.clock)
        self._width, self._height = width, height

    def lines(self) -> list[str]:
        return clean(self.stream.getvalue()).splitlines()

    def region(self) -> list[str]:
        """What the live region shows now."""
        assert isinstance(self.reporter, LiveReporter)
        console = Console(file=io.StringIO(), width=self._width, height=self._height, color_system=None)
        with console.capture() as capture:
            console.print(self.reporter)
        return capture.get().splitlines()


@pytest.fixture
def live() -> Iterator[Screen]:
    screen = Screen(live=True)
    yield screen
    screen.reporter.close()


# Texts from hosts


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\rb\x08c\x07", "abc"),
        ("one\r\ntwo\tthree", "one\ntwo\tthree"),
        ("\x9b2Jx\x90y", "xy"),
        ("abc\u202etxt.exe", "abctxt.exe"),
        ("größer als 5 µs ✓", "größer als 5 µs ✓"),
        ("[bold]no markup[/bold]", "[bold]no markup[/bold]"),
    ],
)
def test_clean(dirty: str, expected: str) -> None:
    assert clean(dirty) == expected


@given(st.text(alphabet=st.characters() | st.sampled_from("\x1b[]m;\x07\x9b\\P")))
def test_cleaned_text_holds_no_control_characters(text: str) -> None:
    cleaned = clean(text)

    assert all(unicodedata.category(character) != "Cc" or character in "\t\n" for character in cleaned)
    assert "\n" not in clean_line(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1m 00s"), (3599.4, "59m 59s"), (3600, "1h 00m")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("is_live", [False, True])
def test_markup_and_escapes_of_hosts_are_shown_as_text(is_live: bool) -> None:
    screen = Screen(live=is_live)
    with screen.reporter.phase("a [b]"):
        screen.reporter.failure("h[red]", "t[/]", "\x1b[2Jmessage [link=x]", "do [this]")
    screen.reporter.close()

    text = "\n".join(screen.lines())
    for part in ("a [b]", "h[red]: t[/] failed", "  message [link=x]", "hint: do [this]"):
        assert part in text
    assert "\x1b[2J" not in screen.stream.getvalue()


# Plain lines


def test_plain_phase_has_a_start_and_an_end() -> None:
    screen = Screen()
    with screen.reporter.phase("Compile"):
        screen.clock.now_s += 65

    assert screen.lines() == ["Compile ...", "Compile: done after 1m 05s"]


def test_plain_phase_says_that_it_failed() -> None:
    screen = Screen()
    with pytest.raises(ValueError, match="x"), screen.reporter.phase("Compile"):
        raise ValueError("x")

    assert screen.lines() == ["Compile ...", "Compile: failed after 0.0 s"]


def test_the_next_phase_ends_one_that_is_no_context_manager() -> None:
    screen = Screen()
    screen.reporter.phase("One")
    screen.reporter.phase("Two")
    screen.reporter.close()

    assert screen.lines() == ["One ...", "One: done after 0.0 s", "Two ...", "Two: failed after 0.0 s"]


def test_phases_nest_as_context_managers() -> None:
    screen = Screen()
    with screen.reporter.phase("Outer"), screen.reporter.phase("Inner"):
        pass

    assert screen.lines() == ["Outer ...", "Inner ...", "Inner: done after 0.0 s", "Outer: done after 0.0 s"]


def test_plain_steps_get_a_line_per_role_and_then_one_per_interval() -> None:
    screen = Screen()
    for role, task, passed_s in [("a", "1", 0), ("a", "2", 5), ("a", "3", 6), ("b", "4", 0.1), ("b", "5", 9), ("b", "6", 2)]:
        screen.clock.now_s += passed_s
        screen.reporter.host_step("h", role, task)

    assert screen.lines() == ["h: a: 1", "h: a: 3", "h: b: 4", "h: b: 6"]


def test_plain_steps_are_all_shown_when_verbose() -> None:
    screen = Screen(verbosity=1)
    for task in "123":
        screen.reporter.host_step("h", None, task)

    assert screen.lines() == ["h: 1", "h: 2", "h: 3"]


def test_plain_progress_is_shown_every_tenth_or_interval_and_at_the_end() -> None:
    screen = Screen()
    screen.reporter.host_step("h", "llama_cpp", "Build")
    for done in range(0, 201, 5):
        screen.reporter.host_progress("h", "compile", done, 200, "steps")

    assert screen.lines()[1:] == [f"h: compile {done}/200 ({done // 2}%)" for done in range(0, 201, 20)]


def test_slow_plain_progress_is_shown_every_interval() -> None:
    screen = Screen()
    for done in range(40):
        screen.clock.now_s += 1
        screen.reporter.host_progress("h", "compile", done, 10_000, "steps")

    assert screen.lines() == [f"h: compile {done}/10000 (0%)" for done in (0, 10, 20, 30)]


def test_plain_progress_in_bytes_of_unknown_size() -> None:
    screen = Screen()
    screen.reporter.host_progress("", "model", 1_000_000, None, "bytes")
    screen.clock.now_s += 10
    screen.reporter.host_progress("", "model", 21_000_000, None, "bytes")

    assert screen.lines() == ["model 1.0 MB", "model 21.0 MB, 2.0 MB/s"]


def test_hosts_end_with_a_line() -> None:
    screen = Screen()
    screen.reporter.host_done("a", "ok", 3)
    screen.reporter.host_done("b", "ok", 0)
    screen.reporter.host_done("c", "unreachable", 0)

    assert screen.lines() == ["a: done, 3 changed", "b: done, nothing changed", "c: unreachable"]


def test_long_lines_are_not_folded() -> None:
    screen = Screen(width=40)
    path = "/var/lib/" + "x" * 80
    screen.reporter.note(f"log: {path}")

    assert screen.lines() == [f"log: {path}"]


# The live region


def test_live_shows_step_time_bar_and_count(live: Screen) -> None:
    with live.reporter.phase("Provision 2 hosts"):
        live.reporter.host_step("gpu-1", "llama_cpp", "Wait for the build")
        live.reporter.host_step("gpu-2", "preflight", "Install packages")
        live.clock.now_s += 90
        live.reporter.host_progress("gpu-1", "compile", 107, 214, "steps")
        region = live.region()

    assert "Provision 2 hosts" in region[0] and region[0].endswith("1m 30s")
    assert region[1].split()[:3] == ["gpu-1", "llama_cpp:", "compile"] and "107/214" in region[1] and region[1].endswith("1m 30s")
    assert region[1].count("━") + region[1].count("╸") >= 9
    assert region[2].split()[:4] == ["gpu-2", "preflight:", "Install", "packages"]
    assert len(region) == 3
    assert live.region() == []


def test_live_shows_bytes_and_rate(live: Screen) -> None:
    live.reporter.host_step("h", "model_store", "Copy")
    live.reporter.host_progress("h", "model", 0, 98_362_432, "bytes")
    live.clock.now_s += 2
    live.reporter.host_progress("h", "model", 50_000_000, 98_362_432, "bytes")

    assert "50.0 MB of 98.4 MB, 25.0 MB/s" in live.region()[0]


@pytest.mark.parametrize("height", [5, 10, 24])
def test_live_fits_the_terminal_whatever_the_number_of_hosts(height: int) -> None:
    screen = Screen(live=True, height=height)
    with screen.reporter.phase("Provision 200 hosts"):
        for number in range(200):
            screen.reporter.host_step(f"gpu-{number:03d}", "preflight", "Check the plan")
        for number in range(50):
            screen.reporter.host_done(f"gpu-{number:03d}", "ok", 1)
        screen.reporter.host_done("gpu-050", "failed", 0)
        for number in range(60, 100):
            screen.reporter.host_idle(f"gpu-{number:03d}")
        screen.clock.now_s += 1
        screen.reporter.host_progress("gpu-199", "compile", 1, 2, "steps")
        region = screen.region()

    assert len(region) < height
    shown = [line for line in region if line.lstrip().startswith("gpu-")]
    assert any("gpu-199" in line for line in shown), "the host with progress is one to watch"
    assert region[-1].strip() == f"… {109 - len(shown)} more at work, 40 waiting, 50 done, 1 failed"


def test_rows_go_with_the_phase_in_which_they_came(live: Screen) -> None:
    with live.reporter.phase("Outer"):
        live.reporter.host_step("kept", None, "task")
        with live.reporter.phase("Inner"):
            live.reporter.host_step("gone", None, "task")
        region = "\n".join(live.region())

    assert "kept" in region
    assert "gone" not in region


def test_a_finished_download_leaves_the_region(live: Screen) -> None:
    with live.reporter.phase("Fetch"):
        live.reporter.host_progress("", "model", 5, 10, "bytes")
        assert "model" in live.region()[1]
        live.reporter.host_progress("", "model", 10, 10, "bytes")
        assert len(live.region()) == 1
        live.reporter.host_progress("", "source", 5, None, "bytes")
        live.reporter.host_idle("")
        assert len(live.region()) == 1


def test_live_gives_the_terminal_back_for_prompts_and_at_the_end(live: Screen) -> None:
    hide, show = "\x1b[?25l", "\x1b[?25h"
    with live.reporter.phase("Probe"):
        assert live.stream.getvalue().rfind(hide) > live.stream.getvalue().rfind(show)
        with live.reporter.suspended():
            assert live.stream.getvalue().rfind(show) > live.stream.getvalue().rfind(hide)
            live.reporter.host_step("h", None, "task")
            assert live.stream.getvalue().rfind(show) > live.stream.getvalue().rfind(hide)
        assert live.stream.getvalue().rfind(hide) > live.stream.getvalue().rfind(show)

    assert live.stream.getvalue().rfind(show) > live.stream.getvalue().rfind(hide)
    assert any(line.startswith("✓ Probe (") for line in live.lines())


def test_reporting_from_many_threads_ends(live: Screen) -> None:
    def work(number: int) -> None:
        for done in range(10):
            live.reporter.host_step(f"h{number}", "r", str(done))
            live.reporter.host_progress(f"h{number}", "p", done, 10, "steps")
            print("from elsewhere", file=sys.stderr)
        live.reporter.host_done(f"h{number}", "ok", 0)

    with live.reporter.phase("All"):
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)

    assert not any(thread.is_alive() for thread in threads)
    assert sum(": done, nothing changed" in line for line in live.lines()) == 8


# Which one


@pytest.fixture
def terminal() -> Iterator[int]:
    controller, user = pty.openpty()
    yield user
    os.close(controller)
    os.close(user)


def test_a_terminal_gets_the_live_reporter(terminal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(os.dup(terminal), "w") as stream:
        assert isinstance(make_reporter(stream=stream), LiveReporter)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(make_reporter(stream=stream), PlainReporter)


@pytest.mark.parametrize(
    ("color", "no_color", "coloured"),
    [(None, None, True), (None, "", True), (None, "1", False), (False, None, False), (True, "1", True)],
)
def test_colour_on_a_terminal(
    terminal: int, monkeypatch: pytest.MonkeyPatch, color: bool | None, no_color: str | None, coloured: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    with os.fdopen(os.dup(terminal), "w") as stream:
        reporter = make_reporter(color, stream=stream)
    assert isinstance(reporter, LiveReporter)
    assert reporter._console.no_color is not coloured


def test_a_file_gets_plain_lines_without_colour(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        reporter = make_reporter(stream=stream)
        reporter.warning("careful")

    assert isinstance(reporter, PlainReporter)
    assert (tmp_path / "out").read_text() == "warning: careful\n"
