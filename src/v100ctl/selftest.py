"""What ``v100ctl test`` does: this toolkit's own tests, in parts, each with a heading, its own output as it comes, and a verdict.

The parts run in the order of :func:`find_parts`, cheap ones first, and all of them run even when one fails. Molecule scenarios,
each with a test host of its own, run several at once, their lines marked with the scenario's name. The tools come from
``requirements-test.lock``, which is installed into the running virtual environment on the first use.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from v100ctl.errors import EXIT_ERROR, EXIT_OK, UsageError, V100ctlError
from v100ctl.paths import checkout_dir

#: pytest's exit code when it found no test to run.
_PYTEST_NO_TESTS = 5
#: How long a test program may clean up after Ctrl-C before it is killed.
_INTERRUPT_GRACE_S = 90.0
#: How much of what failed is said again before the summary: where a log is cut, its end is kept.
_LAST_LINES = 12
_LAST_FAILURES = 12
_LAST_LINE_CHARACTERS = 300
#: Test files that took as long are named before the summary too, the longest first.
_LONG_S = 30.0
_LONGEST = 12
#: Folders of the checkout that hold nothing of this project's own.
_FOREIGN = frozenset({".ansible", ".cache", ".git", ".venv", "build", "dist"})


@dataclass(frozen=True)
class Step:
    """One program of a part.

    Attributes:
        name: What it is called in headings and on the command line.
        argv: The program, found in the virtual environment first.
        is_pytest: Takes pytest's arguments, and says by exit code 5 that it found no test.
        report: Where it leaves its results as JUnit's XML.
    """

    name: str
    argv: tuple[str, ...]
    is_pytest: bool = False
    report: Path | None = None


@dataclass(frozen=True)
class Part:
    """What gets one verdict.

    Attributes:
        name: Unique; what a user types.
        title: The heading.
        steps: All of them run, also after one that failed.
        needs_docker: A Docker Engine is made ready first.
        aliases: Other names that select this part.
        shares: Others that share may run at the same time.
    """

    name: str
    title: str
    steps: tuple[Step, ...]
    needs_docker: bool = False
    aliases: frozenset[str] = frozenset()
    shares: bool = False


@dataclass
class Outcome:
    """What became of one part: ``passed``, ``failed`` or ``no tests``, the last lines of what failed, and where time went."""

    name: str
    status: str
    seconds: float
    failed_steps: list[str] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)
    seconds_by_file: dict[str, float] = field(default_factory=dict)


def run_tests(
    names: Sequence[str], *, slow: bool, keep: bool, list_only: bool, jobs: int | None = None, extra: Sequence[str] = ()
) -> int:
    """Runs this toolkit's own tests.

    Args:
        names: Parts, lint programs, molecule scenarios or test files to run; empty for everything.
        slow: Runs tests marked ``slow`` too.
        keep: Leaves test hosts behind for a look.
        list_only: Prints the names that can be given, and runs nothing.
        jobs: How many of the integration tests and the molecule scenarios, and how many unit tests, run at once; by default one
            for each core, four at most.
        extra: Arguments for pytest, such as ``["-k", "launcher"]``. With some and without names, only pytest's parts run.
            A part where nothing matches them is not a failure as long as another one has a match.

    Returns:
        0 when every part passed, else 1.

    Raises:
        UsageError: A name that nothing here has.
        V100ctlError: There is no checkout, or the test tools cannot be installed.
    """
    root = checkout_dir()
    if root is None:
        raise V100ctlError(
            "`v100ctl test` needs a checkout of v100ctl: an installed package carries no tests",
            hint="clone the repository and run `./v100ctl test` there",
        )
    parts = find_parts(root)
    if list_only:
        print("\n".join(describe(parts)))
        return EXIT_OK
    selected = select(parts, names, root)
    if extra and not names:
        selected = [part for part in selected if any(step.is_pytest for step in part.steps)]
    install_tools(root / "requirements-test.lock")
    jobs = jobs or default_jobs()
    # The default run has a time budget: what takes long must be seen.
    pytest_arguments = ["--durations=15", "--durations-min=5", *extra]
    if not slow:
        pytest_arguments += ["-m", "not slow"]
    if keep:
        pytest_arguments.append("--lab-keep")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="v100ctl-test-") as reports:
        selected = [_with_arguments(part, pytest_arguments, keep=keep, jobs=jobs, reports=Path(reports)) for part in selected]
        for part in selected:
            if not part.shares or jobs == 1:
                outcomes.append(_run_part(part, root, may_be_empty=bool(extra)))
        together = [part for part in selected if part.shares and jobs > 1]
        if len(together) == 1:
            outcomes.append(_run_part(together[0], root, may_be_empty=bool(extra)))
        elif together:
            outcomes += _run_together(together, root, jobs, may_be_empty=bool(extra))
    return _summarise(outcomes)


def default_jobs() -> int:
    """How many tests run at once: one for each core that this process may use, and no more than the test hosts' memory allows."""
    return max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def find_parts(root: Path) -> list[Part]:
    """Everything that ``v100ctl test`` runs in the checkout at ``root``, in that order."""
    parts = []
    folders = [folder for folder in ("tests/unit", "tests/contract") if any((root / folder).glob("test_*.py"))]
    if folders:
        parts.append(Part("unit", "unit tests", (_pytest_step("unit", *folders),)))
    lint = lint_steps(root)
    parts.append(Part("lint", "lints", lint, aliases=frozenset(step.name for step in lint)))
    if any((root / "tests/integration").glob("test_*.py")):
        # First of those that share: it takes longest. Its tests share hosts, and so are one after another among themselves.
        step = _pytest_step("integration", "tests/integration")
        parts.append(Part("integration", "integration tests", (step,), needs_docker=True, shares=True))
    # Last the one that compiles the engine: the integration tests do so too, early, and it takes theirs from the cache by then.
    for file in sorted(root.glob("molecule/*/molecule.yml"), key=lambda file: (file.parent.name == "llama_cpp", file)):
        name = file.parent.name
        # Molecule finds this file by itself only below a `.git`, which a copy of the checkout may lack.
        base = ("--base-config", ".config/molecule/config.yml")
        step = Step(f"molecule {name}", ("molecule", *base, "test", "--scenario-name", name))
        parts.append(Part(f"molecule/{name}", f"molecule scenario {name}", (step,), True, frozenset({"molecule", name}), True))
    return parts


def lint_steps(root: Path) -> tuple[Step, ...]:
    """The programs that read the sources without running them."""
    scripts = ["v100ctl", *(f".ci/{file.name}" for file in sorted((root / ".ci").iterdir()))]
    for folder in ("molecule", "roles", "src", "templates", "tests"):
        scripts += [str(file.relative_to(root)) for file in sorted((root / folder).rglob("*.sh"))]
    steps = [
        Step("ruff", ("ruff", "check", ".")),
        Step("ruff-format", ("ruff", "format", "--check", ".")),
        Step("mypy", ("mypy", "--strict")),
        Step("yamllint", ("yamllint", "--strict", ".")),
        Step("shellcheck", ("shellcheck", "--external-sources", *scripts)),
    ]
    if any((root / "playbooks").glob("*.yml")):
        steps.append(Step("ansible-lint", ("ansible-lint", "--profile", "production")))
    return tuple(steps)


def describe(parts: Sequence[Part]) -> Iterator[str]:
    """One line for each part: its name and what it runs."""
    width = max(len(part.name) for part in parts)
    for part in parts:
        yield f"{part.name:<{width}}  {', '.join(shlex.join(step.argv) for step in part.steps)}"


def select(parts: Sequence[Part], names: Sequence[str], root: Path) -> list[Part]:
    """The parts that ``names`` mean, each once and in the usual order; all of them without names.

    A lint program or a test file selects that alone, as a part of its own.

    Raises:
        UsageError: Nothing has that name; the hint lists what there is.
    """
    if not names:
        return list(parts)
    chosen: dict[str, Part] = {}
    for name in names:
        found = [part for part in parts if name == part.name or (name in part.aliases and part.name != "lint")]
        for part in parts:
            found += [Part(step.name, step.name, (step,)) for step in part.steps if part.name == "lint" and step.name == name]
        found += _test_file_parts(name, root)
        if not found:
            known = sorted({part.name for part in parts} | {alias for part in parts for alias in part.aliases})
            raise UsageError(
                f"no part, role, scenario or test file is called `{name}`",
                hint=f"there are {', '.join(known)}, and the test files below tests/ (`launcher` means test_launcher.py)",
            )
        chosen.update((part.name, part) for part in found)
    order = {part.name: index for index, part in enumerate(parts)}
    return sorted(chosen.values(), key=lambda part: order.get(part.name, -1))


def _test_file_parts(name: str, root: Path) -> list[Part]:
    stem = Path(name).name.removesuffix(".py")
    stem = stem if stem.startswith("test_") else f"test_{stem}"
    found = []
    for file in sorted((root / "tests").rglob(f"{stem}.py")):
        path = str(file.relative_to(root))
        # A name with folders in it means that one file.
        if "/" in name and not (path == name or (root / name).resolve() == file.resolve()):
            continue
        found.append(Part(path, path, (_pytest_step(path, path),), needs_docker=path.startswith("tests/integration/")))
    return found


def _pytest_step(name: str, *paths: str) -> Step:
    return Step(name, ("pytest", *paths), is_pytest=True)


def _with_arguments(
    part: Part, pytest_arguments: Sequence[str], *, keep: bool, jobs: int = 1, reports: Path | None = None
) -> Part:
    steps = []
    for number, step in enumerate(part.steps):
        added: tuple[str, ...] = ()
        report = None
        if step.is_pytest:
            added = tuple(pytest_arguments)
            if reports is not None:
                report = reports / f"{part.name.replace('/', '.')}-{number}.xml"
                added = (*added, f"--junit-xml={report}")
            if part.name == "unit" and jobs > 1:
                # Tests with hosts share them, and so stay in one process.
                added = ("-n", str(jobs), "--dist", "worksteal", *added)
        elif keep and step.argv[0] == "molecule":
            added = ("--destroy=never",)
        steps.append(replace(step, argv=step.argv + added, report=report))
    return replace(part, steps=tuple(steps))


# --- The tools that tests need --------------------------------------------------------------------------------------------


def install_tools(lock: Path, prefix: Path | None = None) -> None:
    """Installs ``lock`` into the virtual environment at ``prefix`` (the running one), unless that was done before.

    Raises:
        V100ctlError: Not a virtual environment, or pip failed; pip has said why on stderr.
    """
    if prefix is None:
        if sys.prefix == sys.base_prefix:
            raise V100ctlError(
                "`v100ctl test` installs test tools and does that only in a virtual environment",
                hint="start it as `./v100ctl test` from the checkout",
            )
        prefix = Path(sys.prefix)
    wanted = lock.read_bytes()
    stamp = prefix / "v100ctl.tests"
    begun = prefix / "v100ctl.tests.begun"
    if _holds(stamp, wanted):
        return
    with _environment_lock(prefix):
        if _holds(stamp, wanted):
            return
        interrupted = begun.exists()
        begun.touch()
        stamp.unlink(missing_ok=True)
        print("installing the pinned test tools (about a minute)", file=sys.stderr, flush=True)
        command = [str(prefix / "bin" / "python"), "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["install", "--no-user", "--progress-bar", "off", "--require-hashes", "-r", str(lock)]
        if interrupted:
            # A killed pip leaves packages that look installed and are not whole, and that cannot be uninstalled either.
            command.append("--ignore-installed")
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode != 0:
            raise V100ctlError(
                "pip could not install the test tools, see above",
                hint="if a package index was not reached, set it in pip.conf or PIP_INDEX_URL; then run this again",
            )
        aside = stamp.with_name("v100ctl.tests.new")
        aside.write_bytes(wanted)
        aside.replace(stamp)
        begun.unlink()


def _holds(stamp: Path, wanted: bytes) -> bool:
    try:
        return stamp.read_bytes() == wanted
    except OSError:
        return False


@contextmanager
def _environment_lock(prefix: Path) -> Iterator[None]:
    """The launcher's own lock on its environment; the kernel drops it with its last holder."""
    import fcntl

    with prefix.with_name(f"{prefix.name}.lock").open("ab") as file:
        # pip inherits it: if this process is killed, the next one waits for what it left running.
        os.set_inheritable(file.fileno(), True)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Running --------------------------------------------------------------------------------------------------------------


def _run_part(part: Part, root: Path, *, may_be_empty: bool) -> Outcome:
    print(f"\n=== {part.title} ===", flush=True)
    started = time.monotonic()
    outcome = Outcome(part.name, "passed", 0.0)
    try:
        if part.needs_docker:
            _ready_docker()
    except V100ctlError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr, flush=True)
        outcome.status = "failed"
        outcome.failed_steps.append("Docker Engine")
    else:
        returncodes = {}
        for step in part.steps:
            returncodes[step], words = _run_step(step, root, heading=len(part.steps) > 1)
            outcome.last_words += words
        _judge(outcome, returncodes, may_be_empty=may_be_empty)
    outcome.seconds = time.monotonic() - started
    return outcome


def _judge(outcome: Outcome, returncodes: Mapping[Step, int], *, may_be_empty: bool) -> None:
    """Writes down what the exit codes of a part's steps mean, and what their reports say of the time."""
    empty = [step for step, code in returncodes.items() if step.is_pytest and code == _PYTEST_NO_TESTS]
    outcome.failed_steps = [step.name for step, code in returncodes.items() if code != 0 and step not in empty]
    if empty and not may_be_empty:
        # Nothing was left out by an expression of the user's, so tests are missing or all of them are slow ones.
        outcome.failed_steps += [f"{step.name}: no test to run without `--slow`" for step in empty]
    if outcome.failed_steps:
        outcome.status = "failed"
    elif len(empty) == len(returncodes):
        outcome.status = "no tests"
    for step in returncodes:
        if step.report is not None:
            outcome.seconds_by_file |= seconds_by_file(step.report)


def _run_together(parts: Sequence[Part], root: Path, jobs: int, *, may_be_empty: bool = False) -> list[Outcome]:
    """Runs parts of one step each, ``jobs`` at a time. On Ctrl-C each has time to take its test hosts down, as one alone has."""
    print(f"\n=== {', '.join(part.title for part in parts)}: {jobs} at a time ===", flush=True)
    started = time.monotonic()
    try:
        _ready_docker()
    except V100ctlError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr, flush=True)
        return [Outcome(part.name, "failed", time.monotonic() - started, ["Docker Engine"]) for part in parts]
    stopping = threading.Event()
    running: set[subprocess.Popen[str]] = set()
    guard = threading.Lock()
    environment = _environment(os.environ, Path(sys.prefix))
    environment.setdefault("NO_COLOR", "1")

    def run(part: Part) -> Outcome:
        (step,) = part.steps
        if stopping.is_set():
            return Outcome(part.name, "failed", 0.0, ["not started"])
        began = time.monotonic()
        label = part.name.rpartition("/")[2]
        lines: deque[str] = deque(maxlen=2000)
        returncode = _run_marked(step.argv, root, environment, f"{label} | ", guard, running, lines)
        outcome = Outcome(part.name, "passed", time.monotonic() - began)
        _judge(outcome, {step: returncode}, may_be_empty=may_be_empty)
        if step.report is not None:
            outcome.last_words = failed_tests(step.report)
        elif returncode:
            outcome.last_words = _last_words(lines)
        with guard:
            print(f"    {step.name} {outcome.status} in {outcome.seconds:.1f} s", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[Outcome]] = [pool.submit(run, part) for part in parts]
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            stopping.set()
            _end_all(running, guard)
            raise


def _run_marked(
    argv: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    label: str,
    guard: threading.Lock,
    running: set[subprocess.Popen[str]],
    lines: deque[str],
) -> int:
    """Runs ``argv`` with its lines marked with ``label`` and kept in ``lines``; the exit code as of :func:`run_program`."""
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        print(f"error: `{argv[0]}` does not start: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    with guard:
        running.add(process)
    with process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            with guard:
                print(f"{label}{line}", end="" if line.endswith("\n") else "\n", flush=True)
    with guard:
        running.discard(process)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end_all(running: set[subprocess.Popen[str]], guard: threading.Lock) -> None:
    """Waits for programs that have been told to stop, and kills those that take too long."""
    deadline = time.monotonic() + _INTERRUPT_GRACE_S
    with guard:
        processes = list(running)
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()


def _ready_docker() -> None:
    from v100ctl.apply.reporter import make_reporter
    from v100ctl.lab.engine import ensure_docker

    ensure_docker(make_reporter(), install=True).close()


def _last_words(lines: Sequence[str]) -> list[str]:
    """Of a program's output what a reader wants first: the lines that Ansible calls errors, else the last ones."""
    errors = [line for line in lines if line.startswith(("fatal:", "[ERROR]", "ERROR", "CRITICAL", "E  ", "FAILED"))]
    return [_short(line) for line in (errors or [line for line in lines if line.strip()])[-_LAST_LINES:]]


def _short(line: str) -> str:
    return line if len(line) <= _LAST_LINE_CHARACTERS else f"{line[:_LAST_LINE_CHARACTERS]}..."


def failed_tests(report: Path) -> list[str]:
    """The tests that failed, of a report in JUnit's XML, each with the last lines of its traceback. Empty without a report."""
    try:
        # Not untrusted: the file is that of a pytest which this process has just run.
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314
    except (OSError, ElementTree.ParseError):
        return []
    said = []
    broken = [(case, result) for case in cases for result in case if result.tag in ("failure", "error")]
    for case, result in broken[:_LAST_FAILURES]:
        said.append(f"{case.get('classname')}::{case.get('name')}")
        lines = [line for line in (result.text or result.get("message") or "").splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("E  ")] or lines
        said += [f"    {_short(line)}" for line in reasons[:_LAST_LINES]]
    if len(broken) > _LAST_FAILURES:
        said.append(f"and {len(broken) - _LAST_FAILURES} more")
    return said


def seconds_by_file(report: Path) -> dict[str, float]:
    """How long the tests of each file took, in seconds, of a report in JUnit's XML. Empty without a report."""
    found: dict[str, float] = {}
    try:
        # Not untrusted: the file is that of a pytest which this process has just run.
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
            # A test in a class has the class behind the module.
            file = "/".join(part for part in (case.get("classname") or "").split(".") if not part[:1].isupper())
            found[file] = found.get(file, 0.0) + float(case.get("time") or 0.0)
    except (OSError, ElementTree.ParseError):
        return {}
    return found


def _run_step(step: Step, root: Path, *, heading: bool) -> tuple[int, list[str]]:
    if heading:
        print(f"--- {step.name}", flush=True)
    started = time.monotonic()
    environment = _environment(os.environ, Path(sys.prefix))
    if not step.is_pytest and not sys.stdout.isatty():
        # Some lints colour and link their lines wherever these go.
        environment.setdefault("NO_COLOR", "1")
    words: list[str] = []
    if step.is_pytest or sys.stdout.isatty():
        returncode = run_program(step.argv, root, environment)
    else:
        lines: deque[str] = deque(maxlen=2000)
        returncode = _run_marked(step.argv, root, environment, "", threading.Lock(), set(), lines)
        words = _last_words(lines) if returncode else []
    if step.report is not None:
        words = failed_tests(step.report)
    if heading:
        verdict = "passed" if returncode == 0 else f"failed with exit code {returncode}"
        print(f"    {step.name} {verdict} in {time.monotonic() - started:.1f} s", flush=True)
    return returncode, words


def _environment(base: Mapping[str, str], prefix: Path) -> dict[str, str]:
    environment = dict(base)
    environment["PATH"] = f"{prefix / 'bin'}{os.pathsep}{base.get('PATH', os.defpath)}"
    environment["VIRTUAL_ENV"] = str(prefix)
    # A buffered program in the middle would hold its lines back until it ends.
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def run_program(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic
) -> int:
    """Runs ``argv`` with this process's own output, and returns its exit code (128 + N after signal N).

    On Ctrl-C the program, which got it too, has time to take its test hosts down before the interrupt goes on.
    """
    try:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"error: `{argv[0]}` does not start: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    try:
        returncode = process.wait()
    except KeyboardInterrupt:
        deadline = clock() + _INTERRUPT_GRACE_S
        while process.poll() is None and clock() < deadline:
            try:
                process.wait(timeout=max(0.0, deadline - clock()))
            except KeyboardInterrupt:
                # A second Ctrl-C: the user does not want to wait.
                break
            except subprocess.TimeoutExpired:
                break
        if process.poll() is None:
            process.kill()
            process.wait()
        raise
    return returncode if returncode >= 0 else 128 - returncode


def _summarise(outcomes: Sequence[Outcome]) -> int:
    """Prints again what failed, the files that took long, a line for each part and the closing counts; returns the exit code."""
    width = max(len(outcome.name) for outcome in outcomes)
    if any(outcome.last_words for outcome in outcomes):
        print("\n=== what failed ===")
        for outcome in outcomes:
            if outcome.last_words:
                print("\n".join([f"--- {outcome.name}", *outcome.last_words]))
    took = {file: seconds for outcome in outcomes for file, seconds in outcome.seconds_by_file.items() if seconds >= _LONG_S}
    if took:
        print("\n=== what took long ===")
        for file, seconds in sorted(took.items(), key=lambda item: -item[1])[:_LONGEST]:
            print(f"{seconds:7.1f} s  {file}.py")
    print("\n=== summary ===")
    for outcome in outcomes:
        failed = f"  ({', '.join(outcome.failed_steps)})" if outcome.failed_steps else ""
        print(f"{outcome.name:<{width}}  {outcome.status:<8}  {outcome.seconds:7.1f} s{failed}")
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    failed_count = sum(outcome.status == "failed" for outcome in outcomes)
    if not passed and not failed_count:
        print("error: no test matches", file=sys.stderr, flush=True)
        return EXIT_ERROR
    print(f"\n{passed} passed, {failed_count} failed", flush=True)
    return EXIT_ERROR if failed_count else EXIT_OK
