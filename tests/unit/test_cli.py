"""The command line: help, exit codes, errors, completion."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from v100ctl.cli import COMMANDS, run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_help_that_the_list_shows(name: str) -> None:
    module, short_help = COMMANDS[name]
    command = importlib.import_module(module).command
    assert isinstance(command, click.Command)
    assert command.short_help == short_help
    assert command.name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert "Usage: v100ctl" in capsys.readouterr().out
    command = importlib.import_module(COMMANDS[name][0]).command
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} has no help"


def test_help_imports_no_command() -> None:
    """`--help` and completion must stay fast: nothing heavy may be imported for them."""
    code = (
        "import sys; from v100ctl.cli import run; run(['--help']);"
        "print([name for name in ('pydantic', 'paramiko', 'ansible', 'rich', 'docker', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plna"], "Did you mean `plan`?"),
        (["zzz"], "`v100ctl --help` lists them"),
        (["plan", "--no-such-option"], "--no-such-option"),
        (["plan", "--offline"], "belong together"),
        (["render"], "HOST"),
        (["provision", "--model", "/x"], "name one"),
        (["provision", "h", "--model", "/x"], "--model-sha256"),
        (["provision", "h", "--model", "/x", "--model-sha256", "a" * 64, "--set", "x"], "KEY=VALUE"),
        (["provision", "-f", "0"], "forks"),
        (["completion", "tcsh"], "tcsh"),
    ],
)
def test_wrong_usage_is_64(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "error: " in captured.err


def test_an_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("V100CTL_INVENTORY", raising=False)
    assert run(["plan"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: no inventory" in captured.err
    assert "hint: " in captured.err


def test_a_host_without_an_inventory_needs_to_be_told_what_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("V100CTL_INVENTORY", raising=False)
    assert run(["provision", "admin@gpu1"]) == 1
    assert "--model PATH" in capsys.readouterr().err
    run(["init", str(tmp_path / "fleet")])
    monkeypatch.chdir(tmp_path / "fleet")
    capsys.readouterr()
    assert run(["provision", "admin@gpu1"]) == 1
    assert "has no host admin@gpu1" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_V100CTL_COMPLETE" in capsys.readouterr().out


def test_completion_completes() -> None:
    environment = {**os.environ, "_V100CTL_COMPLETE": "bash_complete", "COMP_WORDS": "v100ctl pro", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "v100ctl"], env=environment, capture_output=True, text=True, check=True)
    assert "provision" in done.stdout


def test_init_makes_a_fleet_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from v100ctl.fleet import load_fleet

    folder = tmp_path / "fleet"
    assert run(["init", str(folder)]) == 0
    fleet = load_fleet([folder / "inventory/hosts.yml"])
    assert list(fleet.hosts) == ["gpu1", "gpu2"]
    assert fleet.hosts["gpu2"].config.llm_server_instances["chat"].settings.context_length == 16384
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fleet"], "nothing is left beside it"
    capsys.readouterr()
    assert run(["init", str(folder)]) == 1
    assert "nothing in it is overwritten" in capsys.readouterr().err


def test_plan_offline_needs_no_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from .factory import make_facts

    folder = tmp_path / "fleet"
    run(["init", str(folder)])
    inventory = ["-i", str(folder / "inventory/hosts.yml"), "-l", "gpu1"]
    facts = tmp_path / "facts.json"
    facts.write_text(
        make_facts(models={"/srv/models/model.gguf": {"exists": True, "size_bytes": 1}}).model_dump_json(by_alias=True)
    )
    capsys.readouterr()
    assert run(["plan", *inventory, "--offline", "--facts", str(facts), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["hosts"]["gpu1"]["verdict"] == "ok"
    assert run(["plan", *inventory, "--offline", "--facts", str(facts)]) == 2
    assert "llama_cpp" in capsys.readouterr().out
    output = tmp_path / "plan.json"
    assert run(["plan", *inventory, "--offline", "--facts", str(facts), "--json", "-o", str(output)]) == 2
    assert json.loads(output.read_text()) == document
    facts.write_text("{")
    assert run(["plan", *inventory, "--offline", "--facts", str(facts)]) == 64


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import v100ctl.cli.options as options

    def interrupted(self: options.HostOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options.HostOptions, "fleet", interrupted)
    assert run(["plan"]) == 130
    assert "interrupted" in capsys.readouterr().err
