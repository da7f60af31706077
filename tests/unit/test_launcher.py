"""The launcher, run by dash on small made-up checkouts with a Python that only pretends to make environments."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "v100ctl"

# Stands for a system Python: answers the launcher's questions about itself, and lets the real one do what takes Python.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*realpath*) [ -z "${FAKE_OLD-}" ] && echo "$0" ;;
*'import ensurepip, venv'*) [ -z "${FAKE_NO_VENV-}" ] ;;
*'%d.%d'*) echo 3.11 ;;
'-m venv '*)
    echo venv >>"$FAKE_LOG"
    mkdir -p "$3/bin" "$3/lib"
    cp "$FAKE_ENVIRONMENT_PYTHON" "$3/bin/python"
    ;;
*) exec "$REAL_PYTHON" "$@" ;;
esac
"""

# Stands for the Python inside an environment. Dependencies come in many small pieces, so that a kill lands between them,
# and v100ctl starts only when all pieces and the package are there.
FAKE_ENVIRONMENT_PYTHON = """#!/bin/sh
lib=${0%/bin/python}/lib
case "$*" in
*--require-hashes*)
    [ -z "${FAKE_PIP_FAILS-}" ] || exit 1
    echo begin >>"$FAKE_LOG"
    for piece in 1 2 3 4 5 6 7 8; do
        [ ! -e "$lib/$piece" ] || exit 99
        sleep "${FAKE_PAUSE-0}"
        : >"$lib/$piece"
    done
    echo end >>"$FAKE_LOG"
    ;;
*--editable*)
    echo package >>"$FAKE_LOG"
    : >"$lib/package"
    ;;
'-P -m v100ctl'*)
    for piece in 1 2 3 4 5 6 7 8 package; do
        [ -e "$lib/$piece" ] || exit 98
    done
    shift 3
    printf '<%s>\\n' "$PWD" "$@"
    ;;
esac
"""


@dataclass
class Checkout:
    """A made-up checkout, and how its launcher is called."""

    folder: Path
    log: Path
    environment: dict[str, str]

    @property
    def launcher(self) -> Path:
        return self.folder / "v100ctl"

    def start(self, *arguments: str, command: Sequence[str] = (), cwd: Path | None = None, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*(command or ("dash", str(self.launcher))), *arguments],
            env={**self.environment, **extra},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *arguments: str, command: Sequence[str] = (), cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, command=command, cwd=cwd, **extra)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def steps(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    # A space and a quote: paths are not to be split or evaluated.
    folder = tmp_path / "a check'out"
    folder.mkdir()
    shutil.copy(LAUNCHER, folder)
    (folder / "requirements.lock").write_text("one==1 --hash=sha256:00\n")
    (folder / "pyproject.toml").write_text("[project]\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(programs / "python3.12", FAKE_PYTHON)
    write_program(tmp_path / "environment-python", FAKE_ENVIRONMENT_PYTHON)
    for name in ("cat", "cmp", "cp", "dash", "id", "mkdir", "mv", "readlink", "rm", "rmdir", "sh", "sleep", "uname"):
        found = shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    return Checkout(
        folder,
        tmp_path / "log",
        {
            "PATH": str(programs),
            "REAL_PYTHON": sys.executable,
            "FAKE_LOG": str(tmp_path / "log"),
            "FAKE_ENVIRONMENT_PYTHON": str(tmp_path / "environment-python"),
        },
    )


FIRST_RUN = ["venv", "begin", "end", "package"]


def test_syntax_is_posix() -> None:
    subprocess.run(["dash", "-n", str(LAUNCHER)], check=True)


def test_first_run_prepares_and_later_runs_are_silent(checkout: Checkout) -> None:
    first = checkout.run("plan")
    assert (first.returncode, first.stdout) == (0, f"<{checkout.folder}>\n<plan>\n")
    assert "installing the pinned dependencies" in first.stderr
    assert checkout.steps() == FIRST_RUN
    second = checkout.run("plan")
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert checkout.steps() == FIRST_RUN


def test_arguments_pass_through_untouched(checkout: Checkout) -> None:
    arguments = ["", "a b", "*", "$HOME", "`id`", 'quo"te', "it's", "--yes", "--", "-x", "back\\slash", "two\nlines"]
    result = checkout.run(*arguments)
    assert result.stdout == "".join(f"<{argument}>\n" for argument in [str(checkout.folder), *arguments])


def test_exit_code_is_the_tools(checkout: Checkout) -> None:
    checkout.run()
    (checkout.folder / ".venv/lib/1").unlink()
    assert checkout.run().returncode == 98


@pytest.mark.parametrize("how", ["absolute", "relative", "PATH", "symlink", "symlink to a symlink", "sh in its folder"])
def test_starts_from_anywhere(checkout: Checkout, tmp_path: Path, how: str) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    environment: dict[str, str] = {}
    cwd = elsewhere
    command = [str(checkout.launcher)]
    if how == "relative":
        command = [os.path.relpath(checkout.launcher, elsewhere)]
    elif how == "PATH":
        command = ["v100ctl"]
        environment["PATH"] = f"{checkout.folder}:{checkout.environment['PATH']}"
    elif how == "symlink":
        (elsewhere / "tool").symlink_to(os.path.relpath(checkout.launcher, elsewhere))
        command = ["./tool"]
    elif how == "symlink to a symlink":
        (elsewhere / "second").symlink_to(checkout.launcher)
        (elsewhere / "tool").symlink_to("second")
        command = ["dash", "tool"]
    elif how == "sh in its folder":
        cwd = checkout.folder
        command = ["dash", "v100ctl"]
    # Popen looks a bare name up in its own PATH.
    command = ["sh", "-c", '"$@"', "sh", *command]
    result = checkout.run("x", command=command, cwd=cwd, **environment)
    assert (result.returncode, result.stdout) == (0, f"<{cwd}>\n<x>\n")
    assert (checkout.folder / ".venv/v100ctl.ready").is_file()


def test_environment_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    for venv in (str(tmp_path / "new folder/venv"), "relative/venv/"):
        assert checkout.run(V100CTL_VENV=venv, cwd=tmp_path).returncode == 0
        assert (tmp_path / venv / "v100ctl.ready").is_file()
    assert not (checkout.folder / ".venv").exists()


def test_variables_of_another_python_stay_out(checkout: Checkout, tmp_path: Path) -> None:
    write_program(tmp_path / "environment-python", FAKE_ENVIRONMENT_PYTHON + 'echo "${PYTHONHOME-unset} ${PYTHONPATH-unset}"\n')
    assert checkout.run(PYTHONHOME="/nowhere", PYTHONPATH="/nowhere").stdout.endswith("unset unset\n")


# --- Upgrades and other changes ---------------------------------------------------------------------------------------


def test_changed_lock_makes_the_environment_anew(checkout: Checkout) -> None:
    checkout.run()
    (checkout.folder / ".venv/lib/left-behind").touch()
    (checkout.folder / "requirements.lock").write_text("one==2 --hash=sha256:00\n")
    assert checkout.run().returncode == 0
    assert checkout.steps() == FIRST_RUN * 2
    assert not (checkout.folder / ".venv/lib/left-behind").exists()


def test_changed_package_definition_installs_only_the_package(checkout: Checkout) -> None:
    checkout.run()
    (checkout.folder / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert checkout.run().returncode == 0
    assert checkout.steps() == [*FIRST_RUN, "package"]


def test_changes_are_seen_without_cmp(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "programs/cmp").unlink()
    checkout.run()
    assert (checkout.run().stderr, checkout.steps()) == ("", FIRST_RUN)
    (checkout.folder / "requirements.lock").write_text("one==2 --hash=sha256:00\n")
    assert checkout.run().returncode == 0
    assert checkout.steps() == FIRST_RUN * 2


def test_moved_checkout_makes_the_environment_anew(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    checkout.folder = checkout.folder.rename(tmp_path / "moved")
    assert checkout.run().returncode == 0
    assert checkout.steps() == FIRST_RUN * 2


def test_python_that_went_away_makes_the_environment_anew(checkout: Checkout) -> None:
    checkout.run()
    python = checkout.folder / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3.10")
    assert checkout.run().returncode == 0
    assert checkout.steps() == FIRST_RUN * 2


def test_somebody_elses_environment_is_left_alone(checkout: Checkout) -> None:
    own = checkout.folder / ".venv/bin/tool"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    result = checkout.run()
    assert result.returncode == 1
    assert "was not made by v100ctl" in result.stderr
    assert "V100CTL_VENV" in result.stderr
    assert own.read_text() == "mine"
    assert checkout.steps() == []


def test_empty_folder_is_taken(checkout: Checkout) -> None:
    (checkout.folder / ".venv").mkdir()
    assert checkout.run().returncode == 0


# --- Two at once, and killed ------------------------------------------------------------------------------------------


def test_two_at_once_prepare_once(checkout: Checkout) -> None:
    processes = [checkout.start(str(number), FAKE_PAUSE="0.05") for number in range(4)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert [stdout for stdout, _ in outputs] == [f"<{checkout.folder}>\n<{number}>\n" for number in range(4)]
    assert checkout.steps() == FIRST_RUN
    assert sum("waiting for another run" in stderr for _, stderr in outputs) == 3


def test_what_a_killed_run_left_at_work_is_waited_for(checkout: Checkout) -> None:
    # Only the shell dies: the pip it started goes on.
    process = checkout.start(FAKE_PAUSE="0.1")
    while "begin" not in checkout.steps():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    result = checkout.run()
    assert result.returncode == 0
    assert "waiting for another run" in result.stderr
    # No second installation began before the first one was over.
    assert checkout.steps() == ["venv", "begin", "end", *FIRST_RUN]


def test_killed_at_any_time_the_next_run_completes(checkout: Checkout) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(12):
        process = checkout.start(FAKE_PAUSE="0.01")
        time.sleep(generator.uniform(0, 0.25))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        if generator.random() < 0.3:
            # Killed during an upgrade too.
            (checkout.folder / "requirements.lock").write_text(f"one=={generator.random()}\n")
    result = checkout.run("x")
    assert (result.returncode, result.stdout) == (0, f"<{checkout.folder}>\n<x>\n")
    assert checkout.run().stderr == ""


def test_failed_installation_is_not_used_and_is_tried_again(checkout: Checkout) -> None:
    failed = checkout.run(FAKE_PIP_FAILS="1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "error: pip could not install the dependencies" in failed.stderr
    assert "hint: " in failed.stderr
    assert checkout.run().returncode == 0


def test_unwritable_checkout(checkout: Checkout, tmp_path: Path) -> None:
    # A folder cannot be made below a file, whoever asks; permissions would not stop root.
    (tmp_path / "file").touch()
    result = checkout.run(V100CTL_VENV=str(tmp_path / "file/venv"))
    assert result.returncode == 1
    assert f"error: cannot write to {tmp_path}/file" in result.stderr
    assert "V100CTL_VENV" in result.stderr


def test_ready_environment_needs_no_writing(checkout: Checkout) -> None:
    checkout.run()
    (checkout.folder / ".venv.lock").unlink()
    assert checkout.run().returncode == 0
    assert not (checkout.folder / ".venv.lock").exists()


def test_half_a_checkout(checkout: Checkout) -> None:
    (checkout.folder / "requirements.lock").unlink()
    result = checkout.run()
    assert result.returncode == 1
    assert "is not a whole checkout" in result.stderr


# --- A missing Python -------------------------------------------------------------------------------------------------


def test_old_python_is_not_used(checkout: Checkout) -> None:
    result = checkout.run(FAKE_OLD="1")
    assert result.returncode == 1
    assert "error: no Python 3.11 or newer was found" in result.stderr
    assert "hint: " in result.stderr
    assert not (checkout.folder / ".venv").exists()


def test_python_without_venv_is_passed_over_for_one_with_it(checkout: Checkout, tmp_path: Path) -> None:
    write_program(tmp_path / "programs/python3.14", FAKE_PYTHON.replace('[ -z "${FAKE_NO_VENV-}" ]', "false"))
    result = checkout.run()
    assert result.returncode == 0
    assert f"with {tmp_path}/programs/python3.12" in result.stderr


def test_python_without_venv_is_named(checkout: Checkout, tmp_path: Path) -> None:
    result = checkout.run(FAKE_NO_VENV="1")
    assert result.returncode == 1
    assert f"error: {tmp_path}/programs/python3.12 has no venv module" in result.stderr


def test_named_python_is_used_or_nothing(checkout: Checkout, tmp_path: Path) -> None:
    write_program(tmp_path / "mine", FAKE_PYTHON)
    assert f"with {tmp_path}/mine" in checkout.run(V100CTL_PYTHON=str(tmp_path / "mine")).stderr
    (checkout.folder / "requirements.lock").write_text("")
    result = checkout.run(V100CTL_PYTHON=str(tmp_path / "absent"))
    assert result.returncode == 1
    assert "absent` (from V100CTL_PYTHON) is not a Python 3.11 or newer" in result.stderr


def test_yes_is_no_wish_of_the_tools_arguments(checkout: Checkout) -> None:
    # After `--` it belongs to whatever the tool passes on.
    result = checkout.run("--", "--yes", FAKE_OLD="1")
    assert result.returncode == 1
    assert "running `" not in result.stderr


def package_command(ids: str, version_id: str, code_name: str, python: str = "") -> str:
    """What the launcher's own function of that name says."""
    text = LAUNCHER.read_text()
    begin = text.index("package_command() {")
    function = text[begin : text.index("\n}\n", begin) + 3]
    result = subprocess.run(
        ["dash", "-euc", f'{function}\npackage_command "$@"', "dash", ids, version_id, code_name, python],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    return result.stdout.removesuffix("\n")


@pytest.mark.parametrize(
    ("ids", "version_id", "code_name", "expected"),
    [
        ("debian ", "12", "bookworm", "apt-get update && apt-get install -y python3 python3-venv"),
        ("debian ", "13", "trixie", "apt-get update && apt-get install -y python3 python3-venv"),
        ("debian ", "11", "bullseye", ""),
        ("ubuntu debian", "20.04", "focal", ""),
        ("ubuntu debian", "22.04", "jammy", "apt-get update && apt-get install -y python3.11 python3.11-venv"),
        ("ubuntu debian", "24.04", "noble", "apt-get update && apt-get install -y python3 python3-venv"),
        ("linuxmint ubuntu debian", "21.3", "jammy", "apt-get update && apt-get install -y python3.11 python3.11-venv"),
        ("raspbian debian", "12", "bookworm", "apt-get update && apt-get install -y python3 python3-venv"),
        ("rhel fedora", "7.9", "", ""),
        ("rhel fedora", "8.10", "", "dnf install -y python3.11"),
        ("rhel fedora", "9.4", "", "dnf install -y python3.11"),
        ("rhel fedora", "10.0", "", "dnf install -y python3"),
        ("rocky rhel centos fedora", "9.3", "", "dnf install -y python3.11"),
        ("almalinux rhel centos fedora", "10.0", "", "dnf install -y python3"),
        ("centos rhel fedora", "9", "", "dnf install -y python3.11"),
        ("ol fedora", "8.9", "", "dnf install -y python3.11"),
        ("fedora ", "42", "", "dnf install -y python3"),
        ("amzn fedora", "2023", "", "dnf install -y python3.11"),
        ("amzn centos rhel fedora", "2", "", ""),
        ("opensuse-leap suse opensuse", "15.6", "", "zypper --non-interactive install python311"),
        ("opensuse-leap suse opensuse", "16.0", "", "zypper --non-interactive install python313"),
        ("opensuse-tumbleweed opensuse suse", "20260101", "", "zypper --non-interactive install python313"),
        ("sles suse", "15.6", "", "zypper --non-interactive install python311"),
        ("arch ", "", "", "pacman -S --needed --noconfirm python"),
        ("manjaro arch", "", "", "pacman -S --needed --noconfirm python"),
        ("alpine ", "3.20.1", "", "apk add python3"),
        ("plan9 ", "4", "", ""),
    ],
)
def test_package_command(ids: str, version_id: str, code_name: str, expected: str) -> None:
    assert package_command(ids, version_id, code_name) == expected


def test_package_command_for_the_venv_module_alone() -> None:
    expected = "apt-get update && apt-get install -y python3.11-venv"
    assert package_command("debian ", "12", "bookworm", "3.11") == expected
    # Also where the distribution's own Python is too old: this one came from elsewhere.
    assert package_command("ubuntu debian", "20.04", "focal", "3.11") == expected
