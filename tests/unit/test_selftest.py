"""``v100ctl test`` on made-up checkouts: what is found, what is selected, what comes out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from v100ctl import selftest
from v100ctl.errors import UsageError, V100ctlError
from v100ctl.selftest import Part, Step, describe, find_parts, install_tools, run_program, run_tests, select

#: Asked of every pytest, so that slow tests are seen.
DURATIONS = "--durations=15 --durations-min=5"

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for file in (
        ".ci/run",
        "molecule/alpha/molecule.yml",
        "molecule/beta/molecule.yml",
        "molecule/shared/create.yml",
        "playbooks/provision.yml",
        "roles/alpha/files/helper.sh",
        "tests/contract/test_schema.py",
        "tests/integration/test_beta.py",
        "tests/integration/test_engine.py",
        "tests/unit/test_beta.py",
        "tests/unit/test_plan.py",
        "v100ctl",
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def names(parts: list[Part]) -> list[str]:
    return [part.name for part in parts]


ALL = ["unit", "lint", "integration", "molecule/alpha", "molecule/beta"]


def test_parts_are_found_in_order(checkout: Path) -> None:
    parts = find_parts(checkout)
    assert names(parts) == ALL
    assert [part.name for part in parts if part.needs_docker] == ["integration", "molecule/alpha", "molecule/beta"]


def test_absent_folders_are_no_parts(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "tests/unit").mkdir(parents=True)
    assert names(find_parts(tmp_path)) == ["lint"]


def test_shell_scripts_are_linted_wherever_they_are(checkout: Path) -> None:
    (argv,) = [step.argv for step in selftest.lint_steps(checkout) if step.name == "shellcheck"]
    assert {"v100ctl", ".ci/run", "roles/alpha/files/helper.sh"} <= set(argv)


def test_this_checkout_has_every_kind_of_part() -> None:
    found = names(find_parts(ROOT))
    # The integration tests take longest of those that run at the same time, and compile what the last scenario needs.
    assert (found[:3], found[-1]) == (["unit", "lint", "integration"], "molecule/llama_cpp")
    lint = {step.name for step in selftest.lint_steps(ROOT)}
    assert lint == {"ruff", "ruff-format", "mypy", "yamllint", "shellcheck", "ansible-lint"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([], ALL),
        (["unit"], ["unit"]),
        (["lint"], ["lint"]),
        (["molecule"], ["molecule/alpha", "molecule/beta"]),
        (["alpha"], ["molecule/alpha"]),
        (["molecule/alpha"], ["molecule/alpha"]),
        # A role's scenario and the test files of its name are all meant.
        (["beta"], ["tests/integration/test_beta.py", "tests/unit/test_beta.py", "molecule/beta"]),
        (["tests/unit/test_beta.py"], ["tests/unit/test_beta.py"]),
        (["test_plan"], ["tests/unit/test_plan.py"]),
        (["test_plan.py"], ["tests/unit/test_plan.py"]),
        (["plan"], ["tests/unit/test_plan.py"]),
        (["ruff"], ["ruff"]),
        (["mypy", "unit", "mypy"], ["mypy", "unit"]),
        # The usual order, whatever the order of the arguments.
        (["molecule", "unit"], ["unit", "molecule/alpha", "molecule/beta"]),
    ],
)
def test_select(checkout: Path, asked: list[str], expected: list[str]) -> None:
    assert names(select(find_parts(checkout), asked, checkout)) == expected


def test_selected_test_file_needs_docker_as_its_folder_does(checkout: Path) -> None:
    found = select(find_parts(checkout), ["beta"], checkout)
    assert [part.needs_docker for part in found] == [True, False, True]


@pytest.mark.parametrize("asked", ["nothing", "shared", "", "unit/", "tests/integration/test_plan.py", "../x"])
def test_unknown_name_says_what_there_is(checkout: Path, asked: str) -> None:
    with pytest.raises(UsageError) as caught:
        select(find_parts(checkout), ["unit", asked], checkout)
    assert f"`{asked}`" in caught.value.message
    assert caught.value.hint is not None
    for known in (*ALL, "ruff", "alpha", "molecule"):
        assert known in caught.value.hint
    assert caught.value.exit_code == 64


def test_list_prints_and_runs_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "checkout_dir", lambda: checkout)
    assert run_tests([], slow=False, keep=False, list_only=True) == 0
    assert capsys.readouterr().out.splitlines() == list(describe(find_parts(checkout)))


def test_installed_package_says_that_it_has_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "checkout_dir", lambda: None)
    with pytest.raises(V100ctlError, match="needs a checkout"):
        run_tests([], slow=False, keep=False, list_only=False)


# --- Running ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str], str]]:
    """Runs made-up parts; returns the exit code, the lines of stdout and stderr."""

    def run_parts(
        parts: list[Part], extra: list[str] | None = None, jobs: int = 1, **options: bool
    ) -> tuple[int, list[str], str]:
        monkeypatch.setattr(selftest, "checkout_dir", lambda: checkout)
        monkeypatch.setattr(selftest, "find_parts", lambda root: parts)
        monkeypatch.setattr(selftest, "install_tools", lambda lock: None)
        asked = {"slow": False, "keep": False, "list_only": False, **options}
        code = run_tests([], extra=extra or [], jobs=jobs, **asked)
        captured = capfd.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run_parts


def shell(name: str, script: str, *, is_pytest: bool = False) -> Step:
    # `sh` gets what is added to the arguments as $0, $1, ...
    return Step(name, ("sh", "-c", script), is_pytest)


Run = Callable[..., tuple[int, list[str], str]]


def test_all_pass(run: Run) -> None:
    code, lines, _ = run([Part("a", "first", (shell("a", "echo out"),)), Part("b", "second", (shell("b", "pwd"),))])
    assert code == 0
    assert lines[-1] == "2 passed, 0 failed"
    assert lines.index("=== first ===") < lines.index("out") < lines.index("=== second ===") < lines.index("=== summary ===")


def test_failure_stops_neither_the_part_nor_the_rest(run: Run) -> None:
    first = Part("a", "first", (shell("one", "exit 3"), shell("two", "echo still")))
    code, lines, _ = run([first, Part("b", "second", (shell("b", "echo too"),))])
    assert code == 1
    assert {"still", "too"} <= set(lines)
    assert lines[-1] == "1 passed, 1 failed"
    (summary,) = [line for line in lines if line.startswith("a ")]
    assert "failed" in summary
    assert summary.endswith("(one)")


REPORT = """<testsuites><testsuite><testcase classname="tests.a" name="test_x">
<failure message="m">def test_x():
&gt;       assert 1 == 2
E       assert 1 == 2

tests/a.py:3: AssertionError</failure></testcase><testcase classname="tests.a" name="test_y"/></testsuite></testsuites>"""


def test_what_failed_is_said_again_at_the_end(run: Run, tmp_path: Path) -> None:
    (tmp_path / "report").write_text(REPORT)
    test = shell("t", f'for last; do :; done; cp {tmp_path}/report "${{last#--junit-xml=}}"; exit 1', is_pytest=True)
    lint = shell("l", "echo fine; echo 'a.py:1: too long'; exit 1")
    code, lines, _ = run([Part("unit", "first", (test,)), Part("lint", "second", (lint, shell("m", "echo quiet")))])
    assert code == 1
    again = lines[lines.index("=== what failed ===") : lines.index("=== summary ===")]
    assert again[1:] == [
        "--- unit",
        "tests.a::test_x",
        "    E       assert 1 == 2",
        "--- lint",
        "fine",
        "a.py:1: too long",
        "",
    ]


def test_nothing_is_said_again_when_all_passed(run: Run) -> None:
    assert "=== what failed ===" not in run([Part("a", "first", (shell("a", "echo E  out"),))])[1]


def test_of_ansibles_output_its_errors_are_said_again(run: Run) -> None:
    lines_of_play = "TASK [x]\nfatal: [h]: FAILED! =&gt; y\nPLAY RECAP".replace("&gt;", ">")
    parts = [Part(f"molecule/{name}", name, (shell(name, f"printf '{lines_of_play}\n'; exit 2"),), shares=True) for name in "ab"]
    code, lines, _ = run(parts, jobs=2)
    assert code == 1
    again = lines[lines.index("=== what failed ===") : lines.index("=== summary ===")]
    assert again.count("fatal: [h]: FAILED! => y") == 2
    assert "PLAY RECAP" not in again


def test_the_files_that_took_long_are_named(run: Run, tmp_path: Path) -> None:
    cases = [("tests.integration.test_a", 20.5), ("tests.integration.test_a.TestKilled", 20.5), ("tests.b", 100), ("tests.c", 1)]
    each = "".join(f'<testcase classname="{name}" name="test_{number}" time="{s}"/>' for number, (name, s) in enumerate(cases))
    (tmp_path / "report").write_text(f"<testsuites><testsuite>{each}</testsuite></testsuites>")
    test = shell("t", f'for last; do :; done; cp {tmp_path}/report "${{last#--junit-xml=}}"', is_pytest=True)
    lines = run([Part("integration", "first", (test,))])[1]
    again = lines[lines.index("=== what took long ===") : lines.index("=== summary ===")]
    assert again[1:] == ["  100.0 s  tests/b.py", "   41.0 s  tests/integration/test_a.py", ""]


def test_report_that_is_cut_short_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "report").write_text(REPORT[:100])
    assert selftest.failed_tests(tmp_path / "report") == []
    assert selftest.failed_tests(tmp_path / "none") == []
    assert selftest.seconds_by_file(tmp_path / "report") == {}


def test_program_that_is_not_there_fails(run: Run) -> None:
    code, lines, stderr = run([Part("a", "first", (Step("a", ("no-such-program",)),))])
    assert (code, lines[-1]) == (1, "0 passed, 1 failed")
    assert "`no-such-program` does not start" in stderr


def test_slow_tests_are_asked_for(run: Run) -> None:
    part = Part("a", "first", (shell("a", 'echo "$0 ${*% --junit-xml=*}"', is_pytest=True),))
    assert f"{DURATIONS} -m not slow" in run([part])[1]
    assert DURATIONS in run([part], slow=True)[1]


def test_hosts_are_kept_by_pytest_and_molecule(run: Run, tmp_path: Path) -> None:
    tests = Part("a", "first", (shell("a", 'echo "$0 ${*% --junit-xml=*}"', is_pytest=True),))
    assert f"{DURATIONS} -m not slow --lab-keep" in run([tests], keep=True)[1]
    scenario = Part("b", "second", (Step("b", ("molecule", "test")),))
    (step,) = selftest._with_arguments(scenario, [], keep=True).steps
    assert step.argv == ("molecule", "test", "--destroy=never")


def test_expression_runs_only_tests_and_may_match_in_one_part_alone(run: Run) -> None:
    matching = Part("a", "first", (shell("a", 'echo "$0 ${*% --junit-xml=*}"', is_pytest=True),))
    empty = Part("b", "second", (shell("b", "exit 5", is_pytest=True),))
    lint = Part("lint", "lints", (shell("c", "echo linted"),))
    code, lines, _ = run([matching, empty, lint], extra=["-k", "x y"])
    assert (code, lines[-1]) == (0, "1 passed, 0 failed")
    assert f"{DURATIONS} -k x y -m not slow" in lines
    assert "linted" not in lines


def test_expression_that_matches_nothing_fails(run: Run) -> None:
    code, lines, stderr = run([Part("b", "second", (shell("b", "exit 5", is_pytest=True),))], extra=["-k", "x"])
    assert code == 1
    assert "no test matches" in stderr
    assert not any("passed, " in line for line in lines)


def test_no_tests_at_all_is_a_failure(run: Run) -> None:
    code, lines, _ = run([Part("b", "second", (shell("b", "exit 5", is_pytest=True),))])
    assert (code, lines[-1]) == (1, "0 passed, 1 failed")


def test_only_pytest_may_say_five(run: Run) -> None:
    assert run([Part("b", "second", (shell("b", "exit 5"),))])[1][-1] == "0 passed, 1 failed"


def test_without_docker_that_part_fails_and_the_rest_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_docker() -> None:
        raise V100ctlError("no Docker Engine", hint="get one")

    monkeypatch.setattr(selftest, "_ready_docker", no_docker)
    code, lines, stderr = run([Part("a", "first", (shell("a", "echo ran"),), True), Part("b", "second", (shell("b", "true"),))])
    assert (code, lines[-1]) == (1, "1 passed, 1 failed")
    assert "ran" not in lines
    assert "error: no Docker Engine\nhint: get one\n" in stderr


def test_tools_of_the_environment_come_first() -> None:
    environment = selftest._environment({"PATH": "/usr/bin", "X": "1"}, Path("/venv"))
    assert environment["PATH"] == "/venv/bin:/usr/bin"
    assert environment["X"] == "1"


def test_exit_code_of_a_signal(tmp_path: Path) -> None:
    assert run_program(["sh", "-c", "kill -TERM $$"], tmp_path, os.environ) == 128 + signal.SIGTERM


def test_interrupt_waits_for_the_program_to_clean_up(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, pathlib, signal, sys
        from v100ctl.selftest import run_program
        # A test in the background has it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        program = 'trap "sleep 0.3; echo cleaned >cleaned; exit 1" INT; touch started; while :; do sleep 0.05; done'
        try:
            run_program(["sh", "-c", program], pathlib.Path.cwd(), os.environ)
        except KeyboardInterrupt:
            sys.exit(130 if os.path.exists("cleaned") else 1)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130


# --- Installing the tools ---------------------------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment whose pip only notes how it was called, and fails when told to."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ ! -e {tmp_path}/fail ]\n')
    python.chmod(0o755)
    return tmp_path / "venv"


def calls(prefix: Path) -> list[str]:
    file = prefix.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "lock").write_text("one==1 --hash=sha256:00\n")
    return tmp_path / "lock"


def test_tools_are_installed_once_with_hashes(prefix: Path, lock: Path) -> None:
    for _ in range(2):
        install_tools(lock, prefix)
    (call,) = calls(prefix)
    assert f"--require-hashes -r {lock}" in call
    assert "--ignore-installed" not in call


def test_changed_lock_installs_again(prefix: Path, lock: Path) -> None:
    install_tools(lock, prefix)
    lock.write_text("one==2 --hash=sha256:00\n")
    install_tools(lock, prefix)
    assert len(calls(prefix)) == 2


def test_failed_installation_is_told_and_done_again_from_the_ground(prefix: Path, lock: Path) -> None:
    (prefix.parent / "fail").touch()
    with pytest.raises(V100ctlError, match="could not install the test tools"):
        install_tools(lock, prefix)
    (prefix.parent / "fail").unlink()
    install_tools(lock, prefix)
    assert "--ignore-installed" in calls(prefix)[1]
    install_tools(lock, prefix)
    assert len(calls(prefix)) == 2


def test_tools_need_a_virtual_environment(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(V100ctlError, match="only in a virtual environment"):
        install_tools(lock)


def scenario(name: str, script: str) -> Part:
    return Part(f"molecule/{name}", f"molecule scenario {name}", (shell(f"molecule {name}", script),), True, shares=True)


@pytest.fixture
def with_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_ready_docker", lambda: None)


def test_scenarios_run_at_the_same_time(run: Run, with_docker: None) -> None:
    # Each goes on only when it sees the other.
    meet = "touch {0}; for try in $(seq 400); do [ -e {1} ] && echo met && exit 0; sleep 0.05; done; exit 1"
    code, lines, _ = run([scenario("a", meet.format("a.here", "b.here")), scenario("b", meet.format("b.here", "a.here"))], jobs=2)
    assert (code, lines[-1]) == (0, "2 passed, 0 failed")
    assert {"a | met", "b | met"} <= set(lines)


def test_a_scenario_that_fails_stops_no_other(run: Run, with_docker: None) -> None:
    parts = [
        scenario("a", "echo no end of line | tr -d '\\n'; exit 3"),
        scenario("b", "kill -TERM $$"),
        scenario("c", "echo ran >&2"),
    ]
    code, lines, _ = run([*parts, Part("last", "last", (shell("last", "echo alone"),))], jobs=2)
    assert (code, lines[-1]) == (1, "2 passed, 2 failed")
    assert {"a | no end of line", "c | ran", "alone"} <= set(lines)
    assert lines.index("alone") < lines.index("c | ran"), "what runs alone comes first"
    assert any(line.startswith("molecule/b ") and "failed" in line for line in lines)


def test_the_integration_tests_run_beside_scenarios_and_say_what_failed(run: Run, with_docker: None, tmp_path: Path) -> None:
    (tmp_path / "report").write_text(REPORT)
    script = 'for last; do :; done; cp {}/report "${{last#--junit-xml=}}"; touch here; for try in $(seq 400); do {} done; exit {}'
    waits = "[ -e there ] && break; sleep 0.05;"
    test = shell("integration", script.format(tmp_path, waits, 1), is_pytest=True)
    other = scenario("a", "touch there; for try in $(seq 400); do [ -e here ] && echo met && exit 0; sleep 0.05; done; exit 1")
    code, lines, _ = run([Part("integration", "tests", (test,), True, shares=True), other], jobs=2)
    assert (code, lines[-1]) == (1, "1 passed, 1 failed")
    assert "a | met" in lines
    again = lines[lines.index("=== what failed ===") : lines.index("=== summary ===")]
    assert "tests.a::test_x" in again


@pytest.mark.parametrize(("extra", "verdict"), [(["-k", "x"], "1 passed, 0 failed"), ([], "1 passed, 1 failed")])
def test_no_integration_test_matches_beside_a_scenario(run: Run, with_docker: None, extra: list[str], verdict: str) -> None:
    none = Part("integration", "tests", (shell("integration", "exit 5", is_pytest=True),), True, shares=True)
    other = Part("other", "others", (shell("other", "exit 0", is_pytest=True),), True, shares=True)
    _, lines, _ = run([none, other], extra, jobs=2)
    assert lines[-1] == verdict


def test_one_at_a_time_when_asked(run: Run, with_docker: None) -> None:
    first = scenario("a", "echo $$ >pid; sleep 0.2; rm pid")
    code, lines, _ = run([first, scenario("b", "[ ! -e pid ] && echo after")], jobs=1)
    assert (code, lines[-1]) == (0, "2 passed, 0 failed")
    assert "after" in lines


def test_interrupt_waits_for_scenarios_to_clean_up(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, pathlib, signal, sys
        from v100ctl import selftest
        from v100ctl.selftest import Part, Step
        signal.signal(signal.SIGINT, signal.default_int_handler)
        selftest._ready_docker = lambda: None
        program = 'trap "sleep 0.3; touch cleaned-$0; exit 1" INT; touch started-$0; while :; do sleep 0.05; done'
        parts = [Part(name, name, (Step(name, ("sh", "-c", program, name)),)) for name in ("a", "b", "c")]
        try:
            selftest._run_together(parts, pathlib.Path.cwd(), 2)
        except KeyboardInterrupt:
            sys.exit(130 if os.path.exists("cleaned-a") and os.path.exists("cleaned-b") else 1)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, start_new_session=True)
    while not ((tmp_path / "started-a").exists() and (tmp_path / "started-b").exists()):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not (tmp_path / "started-c").exists()


def test_jobs_follow_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, jobs in ((1, 1), (2, 2), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert selftest.default_jobs() == jobs


def test_unit_tests_are_spread_and_tests_with_hosts_are_not() -> None:
    unit = Part("unit", "unit tests", (Step("unit", ("pytest", "tests/unit"), True),))
    (step,) = selftest._with_arguments(unit, ["-x"], keep=False, jobs=2).steps
    assert step.argv == ("pytest", "tests/unit", "-n", "2", "--dist", "worksteal", "-x")
    (step,) = selftest._with_arguments(unit, ["-x"], keep=False, jobs=1).steps
    assert step.argv == ("pytest", "tests/unit", "-x")
    hosts = Part("integration", "integration tests", (Step("integration", ("pytest", "tests/integration"), True),), True)
    (step,) = selftest._with_arguments(hosts, ["-x"], keep=False, jobs=2).steps
    assert step.argv == ("pytest", "tests/integration", "-x")
