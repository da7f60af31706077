"""Runs a playbook through ansible-runner and turns its events into progress, failures and results."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast

import yaml

from v100ctl.apply.hints import hint_for
from v100ctl.apply.process import Interruption, ansible_environment, close_ssh_masters
from v100ctl.apply.reporter import Reporter, Status, Unit, clean, clean_line
from v100ctl.errors import V100ctlError
from v100ctl.paths import content_dir, log_dir

#: How many log files are kept.
LOGS_KEPT = 50

_LOG_NAME = re.compile(r"\d{8}T\d{6}Z-[a-z0-9_-]+(?:\.\d+)?\.log")
_PRIVATE_DIR_PREFIX = "v100ctl-apply-"
_CHILD_SCRIPT = Path(__file__).with_name("playbook_process.py")
# What ansible-runner answers prompts with; the time between two looks for a Ctrl-C.
_POLL_S = 0.25
_MESSAGE_LINES = 12
_MESSAGE_CHARACTERS = 4000
_STDERR_LINES = 8
_ITEMS_SHOWN = 3
_MAX_CHANGES = 10000

#: Inventory paths as Ansible's ``-i`` takes them, or an inventory document for hosts that are in no file.
Inventory = Sequence[str | Path] | Mapping[str, Any]


class ApplyError(V100ctlError):
    """Ansible did not get as far as running tasks on hosts, or was killed while it did."""


@dataclass(frozen=True)
class Secrets:
    """Passwords that Ansible asks for. They reach it through its terminal: never as an argument, in a file, or in a log."""

    connection_password: str | None = field(default=None, repr=False)
    become_password: str | None = field(default=None, repr=False)
    vault_password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Failure:
    """One task that failed for good on one host."""

    host: str
    role: str | None
    task: str
    message: str
    hint: str | None


@dataclass(frozen=True)
class TaskChange:
    """One task that changed something on a host, or would with ``check``. ``diff`` is as Ansible tells it, cut to a length."""

    host: str
    role: str | None
    task: str
    diff: str = ""


@dataclass(frozen=True)
class HostResult:
    """How many tasks ended how on one host, as Ansible counts them."""

    status: Status
    ok: int
    changed: int
    failed: int
    unreachable: int
    skipped: int
    rescued: int
    ignored: int


@dataclass(frozen=True)
class ApplyResult:
    """What a playbook did.

    Attributes:
        hosts: Every host that a play ran on, by name.
        failures: In the order in which they happened.
        results: The module results of the tasks named in ``capture``, as ``results[task][host]``; the last one of each.
        log_path: Ansible's full output.
    """

    hosts: Mapping[str, HostResult]
    failures: tuple[Failure, ...]
    results: Mapping[str, Mapping[str, Mapping[str, Any]]]
    log_path: Path
    #: What changed, or with ``check`` would change, in the order in which it did.
    changes: tuple[TaskChange, ...] = ()

    @property
    def succeeded(self) -> bool:
        return all(host.status == "ok" for host in self.hosts.values())

    @property
    def changed(self) -> int:
        """How many tasks changed something, over all hosts."""
        return sum(host.changed for host in self.hosts.values())


def run_playbook(
    name: str,
    inventory: Inventory,
    hosts: Sequence[str] | None,
    *,
    reporter: Reporter,
    check: bool = False,
    diff: bool = False,
    extra_vars: Mapping[str, Any] | None = None,
    passwords: Secrets | None = None,
    vault_arguments: Sequence[str] = (),
    verbosity: int = 0,
    forks: int | None = None,
    capture: Collection[str] = (),
    title: str | None = None,
) -> ApplyResult:
    """Runs ``playbooks/NAME.yml`` (or the playbook at an absolute path) on ``hosts`` of ``inventory``.

    Args:
        name: Also names the log file.
        inventory: Paths, so that ``group_vars`` and ``host_vars`` beside them count, or a document that is written down for
            this run alone.
        hosts: Limits the run to these; ``None`` leaves it to the playbook.
        reporter: Told of every step. A failed task is reported as :class:`Failure` once it is certain that no ``rescue``
            handles it, which is at the end.
        check: Changes nothing (``--check``).
        diff: Tells in which lines files change (``--diff``); never of a secret.
        extra_vars: Data, no secrets: they are in a file that only this account can read while the playbook runs.
        passwords: Answers to what Ansible asks for.
        vault_arguments: ``--vault-password-file PATH``, ``--vault-id LABEL@PATH``, or ``--ask-vault-password``.
        verbosity: How many ``-v`` Ansible gets; they go to the log.
        forks: Hosts at once.
        capture: Names of tasks whose results are wanted.
        title: What the phase is called.

    Raises:
        ApplyError: No task could run: the playbook, inventory or vault cannot be read, or no host matches.
        KeyboardInterrupt: After Ctrl-C, when Ansible has stopped.
    """
    playbook = Path(name) if Path(name).is_absolute() else content_dir() / "playbooks" / f"{name}.yml"
    try:
        with _private_dir() as private, _log(playbook.stem) as log, reporter.phase(title or _title(playbook, hosts)) as phase:
            try:
                arguments, prompts = _arguments(private, playbook, hosts, check, passwords or Secrets(), vault_arguments)
                arguments += ["--diff"] if diff else []
                _write_private(private / "env" / "extravars", json.dumps(dict(extra_vars or {})))
                log.write(f"# {shlex.join(['ansible-playbook', *arguments])}\n")
                events = _Events(reporter, log, frozenset(capture))
                return_code = _run_ansible(private, arguments, prompts, inventory, events, verbosity=verbosity, forks=forks)
                result = events.result(return_code)
                phase.end(succeeded=result.succeeded)
            finally:
                reporter.note(f"log: {log.path}")
    except _Interrupted as interrupted:
        if interrupted.number != signal.SIGINT:
            # End as if the signal had not been caught, with the terminal as it was.
            reporter.close()
            os.kill(os.getpid(), interrupted.number)
        raise KeyboardInterrupt from None
    return result


class _Interrupted(BaseException):
    """A signal came, and Ansible has stopped. Not an :class:`Exception`, so that nothing on the way takes it for a failure."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


def _run_ansible(
    private: Path,
    arguments: Sequence[str],
    prompts: Mapping[str, str],
    inventory: Inventory,
    events: _Events,
    *,
    verbosity: int,
    forks: int | None,
) -> int | None:
    """Runs ``ansible-playbook`` with ``arguments`` and returns its exit code, ``None`` where a signal ended it."""
    # Half a second of imports that `--help` must not pay for.
    import ansible_runner

    control_path_dir = private / "cp"
    pid_file = private / "pid"
    # ansible-runner takes settings from this file only.
    settings = {"pexpect_timeout": _POLL_S, "suppress_ansible_output": True, "suppress_output_file": True}
    _write_private(private / "env" / "settings", json.dumps(settings))
    child = ["-P", str(_CHILD_SCRIPT), "--parent", str(os.getpid()), "--pid-file", str(pid_file), "--"]
    interruption = Interruption(pid_file, events.stopping)
    events.stop = interruption.stop
    try:
        with interruption.caught():
            run = ansible_runner.run(
                private_data_dir=str(private),
                # The folder Ansible runs in: relative paths in an inventory mean what they mean to `ansible-playbook`.
                project_dir=str(Path.cwd()),
                binary=sys.executable,
                cmdline=shlex.join([*child, *arguments]),
                inventory=_inventory_arguments(inventory, private),
                envvars=ansible_environment(os.environ, control_path_dir),
                passwords=dict(prompts),
                verbosity=verbosity,
                forks=forks,
                # Facts are not kept between runs, and passwords never reach a file.
                fact_cache_type="",
                suppress_env_files=True,
                quiet=True,
                event_handler=events.handle,
                cancel_callback=interruption.cancel,
            )
    finally:
        close_ssh_masters(control_path_dir)
    if events.error is not None:
        raise events.error
    if interruption.signal_number is not None:
        raise _Interrupted(interruption.signal_number)
    return cast(int | None, run.rc)


def _arguments(
    private: Path,
    playbook: Path,
    hosts: Sequence[str] | None,
    check: bool,
    secrets: Secrets,
    vault_arguments: Sequence[str],
) -> tuple[list[str], dict[str, str]]:
    """The command line of ``ansible-playbook``, and pattern -> answer for what it asks on its terminal."""
    arguments = [str(playbook), *vault_arguments]
    if check:
        arguments.append("--check")
    if hosts is not None:
        # Read from a file it has no limit of length.
        _write_private(private / "limit", "".join(f"{host}\n" for host in hosts))
        arguments += ["--limit", f"@{private / 'limit'}"]
    prompts: dict[str, str] = {}
    if secrets.connection_password is not None:
        arguments.append("--ask-pass")
        prompts[r"^SSH password:\s*?$"] = secrets.connection_password
    if secrets.become_password is not None:
        arguments.append("--ask-become-pass")
        prompts[r"^[A-Z]+ password(?:\[defaults to SSH password\])?:\s*?$"] = secrets.become_password
    if any(argument.startswith("--ask-vault-pass") for argument in vault_arguments):
        if secrets.vault_password is None:
            raise ApplyError("Ansible would ask for a vault password that was not given", hint="give `--vault-password-file`")
        prompts[r"^Vault password:\s*?$"] = secrets.vault_password
    return arguments, prompts


def _title(playbook: Path, hosts: Sequence[str] | None) -> str:
    title = playbook.stem.replace("_", " ").capitalize()
    if hosts is None:
        return title
    return f"{title} {hosts[0]}" if len(hosts) == 1 else f"{title} {len(hosts)} hosts"


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _inventory_arguments(inventory: Inventory, private: Path) -> list[str]:
    if isinstance(inventory, Mapping):
        path = private / "hosts.yml"
        _write_private(path, yaml.safe_dump(dict(inventory), sort_keys=False))
        return [str(path)]
    # A list such as `host1,host2` is Ansible's own way of naming hosts without a file.
    return [str(source) if "," in str(source) else str(Path(source).absolute()) for source in inventory]


@contextlib.contextmanager
def _private_dir() -> Iterator[Path]:
    """A folder for one run that only this account can read; those of runs that were killed are removed."""
    base = Path(tempfile.gettempdir())
    for stale in base.glob(_PRIVATE_DIR_PREFIX + "*"):
        with contextlib.suppress(OSError):
            _remove_if_stale(stale)
    path = Path(tempfile.mkdtemp(prefix=_PRIVATE_DIR_PREFIX))
    try:
        with (path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_if_stale(path: Path) -> None:
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        return
    with (path / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(path, ignore_errors=True)


class _Log:
    """Ansible's output as it comes. A full disk ends the log, not the run."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._file: TextIO | None = file

    def write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(clean(text))
            self._file.flush()
        except OSError:
            self._file = None


@contextlib.contextmanager
def _log(name: str) -> Iterator[_Log]:
    folder = log_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = sorted(path for path in folder.iterdir() if _LOG_NAME.fullmatch(path.name))
        for path in old[: max(len(old) - LOGS_KEPT + 1, 0)]:
            path.unlink(missing_ok=True)
        stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{re.sub(r'[^a-z0-9_-]', '-', name.lower())}"
        path, file = _create_log(folder, stem)
    except OSError as error:
        raise ApplyError(
            f"the log folder {folder} cannot be written: {error.strerror or error}",
            hint="make it writable, free space there, or set `XDG_STATE_HOME` to another folder",
        ) from error
    with file:
        yield _Log(path, file)


def _create_log(folder: Path, stem: str) -> tuple[Path, TextIO]:
    number = 0
    while True:
        path = folder / (f"{stem}.{number}.log" if number else f"{stem}.log")
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            return path, os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
        number += 1


class _Events:
    """Follows the events of one run."""

    def __init__(self, reporter: Reporter, log: _Log, capture: frozenset[str]) -> None:
        self._reporter = reporter
        self._log = log
        self._capture = capture
        #: Stops Ansible.
        self.stop: Callable[[], None] = lambda: None
        self._stats: dict[str, dict[str, int]] | None = None
        self._failed: list[Failure] = []
        self._unreachable: list[Failure] = []
        self._results: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._changes: list[TaskChange] = []
        # What Ansible said outside tasks, for when there are none.
        self._said: deque[str] = deque(maxlen=40)
        #: What went wrong in here; Ansible is stopped then.
        self.error: Exception | None = None

    def stopping(self) -> None:
        """Ansible is being stopped."""
        if self.error is None:
            self._reporter.note("stopping Ansible; Ctrl-C again kills it")

    def handle(self, event: Mapping[str, Any]) -> bool:
        """Takes one event; ``False`` tells ansible-runner not to keep it in a file."""
        if self.error is None:
            # An exception would leave ansible-runner's loop at once, and Ansible running.
            try:
                self._handle(event)
            except Exception as error:
                self.error = error
                self.stop()
        return False

    def _handle(self, event: Mapping[str, Any]) -> None:
        text = event.get("stdout") or ""
        if text:
            self._log.write(text if text.endswith("\n") else text + "\n")
        kind = event.get("event", "")
        data = event.get("event_data") or {}
        host, task, role = data.get("host"), data.get("task") or "", data.get("role")
        if kind == "playbook_on_stats":
            self._stats = {key: data.get(key) or {} for key in _STATS}
        elif host is None:
            if kind in ("error", "verbose"):
                self._said.extend(clean(text).splitlines())
        elif kind == "runner_on_start":
            self._reporter.host_step(host, role, task)
        elif kind == "runner_retry":
            label, done, total, unit = retry_progress(task, data.get("res") or {})
            self._reporter.host_progress(host, label, done, total, unit)
        elif kind in ("runner_on_failed", "runner_on_unreachable"):
            if kind == "runner_on_failed" and data.get("ignore_errors"):
                self._reporter.host_idle(host)
                return
            message = failure_message(data.get("res") or {}, text)
            failure = Failure(clean_line(host), role and clean_line(role), clean_line(task), message, hint_for(message))
            (self._failed if kind == "runner_on_failed" else self._unreachable).append(failure)
            self._reporter.host_idle(host)
        elif kind in ("runner_on_ok", "runner_on_skipped"):
            self._reporter.host_idle(host)
            if kind == "runner_on_ok" and task in self._capture:
                self._results.setdefault(task, {})[host] = data.get("res") or {}
            result = data.get("res") or {}
            if kind == "runner_on_ok" and result.get("changed") and len(self._changes) < _MAX_CHANGES:
                self._changes.append(
                    TaskChange(clean_line(host), role and clean_line(role), clean_line(task), _diff_text(result.get("diff")))
                )

    def result(self, return_code: int | None) -> ApplyResult:
        """Reports what failed and how each host ended, once Ansible has."""
        if self._stats is None:
            raise self._startup_error(return_code)
        stats = self._stats
        names = sorted({host for counts in stats.values() for host in counts})
        if not names:
            raise ApplyError(
                "the playbook ran on no host: none of the inventory's hosts is asked for and meant by it",
                hint="check `--limit`, and that the hosts are not in the group `builders`",
            )
        failures: list[Failure] = []
        hosts: dict[str, HostResult] = {}
        for host in names:
            counts = {key: stats[key].get(host, 0) for key in _STATS}
            failed, dark = counts["failures"], counts["dark"]
            # A `rescue` makes up for what failed before it, so it is the last ones that were not made up for.
            failures += [failure for failure in self._failed if failure.host == host][-failed:] if failed else []
            failures += [failure for failure in self._unreachable if failure.host == host][-dark:] if dark else []
            status: Status = "unreachable" if dark else "failed" if failed else "ok"
            hosts[host] = HostResult(
                status=status,
                ok=counts["ok"],
                changed=counts["changed"],
                failed=failed,
                unreachable=dark,
                skipped=counts["skipped"],
                rescued=counts["rescued"],
                ignored=counts["ignored"],
            )
            for failure in failures:
                if failure.host == host:
                    where = f"{failure.role}: {failure.task}" if failure.role else failure.task
                    self._reporter.failure(host, where, failure.message, failure.hint)
            self._reporter.host_done(host, status, counts["changed"])
        return ApplyResult(
            hosts=hosts,
            failures=tuple(failures),
            results=self._results,
            log_path=self._log.path,
            changes=tuple(self._changes),
        )

    def _startup_error(self, return_code: int | None) -> ApplyError:
        said = [line for line in self._said if line.strip()]
        # Ansible marks its errors; what stands before the first one is its usual chatter.
        first = next((index for index, line in enumerate(said) if re.match(r"\[?ERROR\b", line)), None)
        text = "\n".join(said[first:] if first is not None else said[-_STDERR_LINES:])
        text = re.sub(r"\A\[?ERROR[\]:!]*:? *", "", text)
        if not text:
            text = "it was killed" if return_code is None or return_code < 0 else f"it ended with exit code {return_code}"
        return ApplyError(
            f"Ansible could not go on: {_bounded(text)}",
            hint=hint_for(text) or f"its full output is in `{self._log.path}`; it is safe to run again",
        )


def _diff_text(diff: object) -> str:
    """What Ansible says of a change, as lines: headers, then what was and what comes."""
    pieces = diff if isinstance(diff, list) else [diff]
    lines: list[str] = []
    for piece in pieces:
        if not isinstance(piece, Mapping):
            continue
        if isinstance(piece.get("prepared"), str):
            lines += piece["prepared"].splitlines()
            continue
        before, after = (
            value if isinstance(value, str) else json.dumps(value) for value in (piece.get("before"), piece.get("after"))
        )
        lines += list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    return clean("\n".join(lines))[:_MESSAGE_CHARACTERS]


_STATS = ("ok", "changed", "failures", "dark", "skipped", "rescued", "ignored", "processed")


def retry_progress(task: str, result: Mapping[str, Any]) -> tuple[str, int, int | None, Unit]:
    """What an ``until`` loop waits for, as ``(label, done, total, unit)`` for :meth:`Reporter.host_progress`.

    A command that prints ``{"phase", "done", "total"}`` (``"unit": "bytes"`` for transfers) is followed as it counts, one that
    prints ``{"package_locks": [{"pid", "command", "path"}]}`` says who holds a lock; anything else shows the attempt's number.
    """
    document = _json_object(result.get("stdout"))
    locks = document.get("package_locks")
    if isinstance(locks, list) and locks and isinstance(locks[0], Mapping):
        holder = locks[0]
        return f"waiting for apt: held by {holder.get('command') or 'a process'} (pid {holder.get('pid', '?')})", 0, 0, "steps"
    phase, done, total = document.get("phase"), document.get("done"), document.get("total")
    if isinstance(phase, str) and phase:
        unit: Unit = "bytes" if document.get("unit") == "bytes" else "steps"
        return phase, _count(done) or 0, _count(total), unit
    return f"{task}, attempt", _count(result.get("attempts")) or 0, None, "steps"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _json_object(text: object) -> Mapping[str, Any]:
    if isinstance(text, str) and text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            document = json.loads(text)
            if isinstance(document, dict):
                return cast(Mapping[str, Any], document)
    return {}


# Who failed is said beside the message: host, role and task.
_PREFIX = re.compile(r"\A(?:(?:Task|Action|Module) failed: )+")
# Messages that say that something failed, but not what.
_GENERIC = re.compile(r"\A(?:non-zero return code|MODULE FAILURE|Module result deserialization failed|\Z)")
_LOOP_FAILED = re.compile(r"\A(?:One or more items failed|All items completed)\.?\Z")
# How Ansible shows a failure: with the causes that the result leaves out.
_SHOWN = re.compile(r"\A\s*\[ERROR\]: (.*?)\n(?:Origin: |fatal: |failed: )", re.DOTALL)
# The frame of ssh's warning about a changed key.
_BANNER = re.compile(r"@{10,}\s*")


def failure_message(result: Mapping[str, Any], shown: str = "") -> str:
    """What a failed task's ``result`` says, for a person: the module's message, failing items, the end of stderr.

    ``shown`` is what Ansible printed about it. A result that ``no_log`` censored stays so.
    """
    if "censored" in result:
        return "its output is hidden by `no_log`"
    message = _PREFIX.sub("", _BANNER.sub("", _text(result.get("msg"))))
    match = _SHOWN.match(clean(shown))
    if match:
        whole = _PREFIX.sub("", match[1].strip())
        if message and whole.startswith(message.rstrip(".") + ": "):
            message = whole
    parts: list[str] = []
    items = [item for item in result.get("results") or [] if isinstance(item, Mapping)]
    failed_items = [item for item in items if item.get("failed") or item.get("unreachable")]
    if failed_items and (not message or _LOOP_FAILED.match(message)):
        for item in failed_items[:_ITEMS_SHOWN]:
            label = _item_label(item)
            text = failure_message({key: value for key, value in item.items() if key != "results"})
            parts.append(f"{label}: {text}" if label else text)
        if len(failed_items) > _ITEMS_SHOWN:
            parts.append(f"and {len(failed_items) - _ITEMS_SHOWN} more of {len(items)} items")
    else:
        parts.append(message or "it failed without a message")
        if _GENERIC.match(message):
            parts.append(_output_tail(result))
        elif message == "Request failed":
            parts += [_text(result.get("response")), _text(result.get("url"))]
    delegated = result.get("_ansible_delegated_vars")
    if isinstance(delegated, Mapping) and delegated.get("ansible_delegated_host"):
        parts[0] = f"on {_text(delegated['ansible_delegated_host'])}: {parts[0]}"
    return _bounded("\n".join(part for part in parts if part))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value).strip()
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return clean("\n".join(value)).strip()
    return clean(json.dumps(value, ensure_ascii=False, default=str))


def _output_tail(result: Mapping[str, Any]) -> str:
    for key in ("stderr", "module_stderr", "stdout", "module_stdout"):
        lines = [line.rstrip() for line in _text(result.get(key)).splitlines() if line.strip()]
        if lines:
            return "\n".join(lines[-_STDERR_LINES:])
    code = result.get("rc")
    return f"exit code {code}" if isinstance(code, int) else ""


def _item_label(result: Mapping[str, Any]) -> str:
    label = result.get("_ansible_item_label", result.get("item"))
    if isinstance(label, Mapping):
        # The whole item may be long or hold a file's content; what names it is enough.
        label = next((label[key] for key in ("name", "path", "dest", "host") if isinstance(label.get(key), str)), None)
    return clean_line(str(label)) if isinstance(label, str | int | float) else ""


def _bounded(text: str) -> str:
    lines = text.splitlines()
    if len(lines) > _MESSAGE_LINES:
        # The end says what went wrong, the first line what was tried.
        lines = [lines[0], "...", *lines[-(_MESSAGE_LINES - 2) :]]
    text = "\n".join(lines)
    return text if len(text) <= _MESSAGE_CHARACTERS else text[: _MESSAGE_CHARACTERS - 3] + "..."
