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
        (["provision", "--backend", "cpu"], "--backend: only with --model"),
        (["provision", "h", "--port", "8000", "--set", "x=1"], "--port, --set: only with --model"),
        (["provision", "h", "--model", "/x", "--limit", "h"], "--limit"),
        (["completion", "tcsh"], "tcsh"),
        (["rollout", "--batch", "half"], "write it as a number of hosts or as a share"),
        (["rollout", "--batch", "0%"], "write it as a number of hosts or as a share"),
        (["rollout", "--batch", "9" * 5000], "write it as a number of hosts or as a share"),
        (["rollout", "--min-speed", "90"], "write it as `90%` or 0.9"),
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
    facts.write_text('{"schema": "v100ctl/facts/9"}')
    capsys.readouterr()
    assert run(["plan", *inventory, "--offline", "--facts", str(facts)]) == 64
    assert "v100ctl/facts/9" in capsys.readouterr().err
    facts.write_text('{"machine": ["\\u001b[31m"]}')
    assert run(["plan", *inventory, "--offline", "--facts", str(facts)]) == 64
    assert "valid string at machine)" in capsys.readouterr().err


def test_a_report_never_replaces_a_device_or_a_link(tmp_path: Path) -> None:
    from v100ctl.cli.options import write_output
    from v100ctl.errors import V100ctlError

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output("text", pipe)
    assert os.read(reader, 100) == b"text\n"
    os.close(reader)
    assert pipe.is_fifo()
    (tmp_path / "link").symlink_to("target")
    write_output("trailing blanks stay  \n", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "trailing blanks stay  \n"
    with pytest.raises(V100ctlError, match="cannot be written: No such file"):
        write_output("text", tmp_path / "missing/report")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_a_report_in_a_file_has_no_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from v100ctl.cli.show import console

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = console(output=tmp_path / "report")
    with out.capture() as captured:
        out.print("[bold red]x[/]", "y" * 200)
    assert captured.get() == f"x {'y' * 200}\n"


def test_names_of_hosts_and_files_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from v100ctl.cli.show import console, print_host, settings_table
    from v100ctl.errors import UnreachableError
    from v100ctl.examine import Examined, decide
    from v100ctl.fleet import FleetHost

    from .factory import AS_OF, make_config, make_facts

    config = make_config({"model": {"url": None, "path": "/srv/[red]x[/y].gguf"}})
    out = console()
    print_host(out, Examined(FleetHost("[/gpu1]", {}, config), error=UnreachableError("said \x1b[31m[/b]", hint="\x07look")), "x")
    out.print(settings_table(decide(FleetHost("h1", {}, config), None, make_facts(), as_of=AS_OF)))
    text = capsys.readouterr().out
    assert text.startswith("[/gpu1]  x\n  error: said [/b]\n  hint: look\n")
    assert "/srv/[red]x[/y].gguf" in text


def test_a_plan_counts_on_the_ansible_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from v100ctl import examine
    from v100ctl.examine import decide
    from v100ctl.fleet import FleetHost

    from .factory import AS_OF, make_config, make_facts

    facts = make_facts(python={"version": "3.8.10", "executable": "/usr/bin/python3"})
    # It is read once in a process.
    monkeypatch.setattr(examine, "_ansible_core", examine._ansible_core.__wrapped__)
    for version, refused in (("2.19.14", False), ("2.21.5", True)):
        monkeypatch.setattr(importlib.metadata, "version", {"ansible-core": version}.__getitem__)
        plan = decide(FleetHost("h1", {}, make_config()), None, facts, as_of=AS_OF).plan
        assert plan is not None
        assert ("ansible-core-too-new" in {rule.id for rule in plan.rules}) == refused


def test_what_a_host_said_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import v100ctl.cli.options as options
    from v100ctl.errors import V100ctlError

    def failing(self: options.HostOptions) -> None:
        raise V100ctlError("it said \x1b]0;owned\x07hello", hint="\x1b[2Jlook")

    monkeypatch.setattr(options.HostOptions, "fleet", failing)
    assert run(["plan"]) == 1
    assert capsys.readouterr().err == "error: it said hello\nhint: look\n"


def test_hashing_gets_more_time_than_looking() -> None:
    import dataclasses

    from v100ctl.cli.options import HostOptions

    options = HostOptions((), None, (), False, False, False, True, 1, None)
    assert options.access().timeout_s == 60
    assert options.access(deep=True).timeout_s > 3600, "the probe's own budget for hashing"
    assert dataclasses.replace(options, timeout_s=5).access(deep=True).timeout_s == 5


def test_init_where_nothing_can_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["init", str(tmp_path / "file/fleet")]) == 1
    assert "cannot be made: " in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_error() -> None:
    code = "import sys; from v100ctl.cli import main; sys.stdin.read(); sys.argv = ['v100ctl', 'completion', 'bash']; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(b"")
    assert (process.returncode, err) == (0, b"")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Usage:")


@pytest.mark.parametrize("value", ["2020-13-45", "9" * 5000, "[" * 5000, "["])
def test_a_setting_that_yaml_cannot_read_is_wrong_usage(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["provision", "h1", "--model", "/m.gguf", "--model-sha256", "0" * 64, "--set", f"threads={value}"]
    assert run(arguments) == 64
    assert "the value is not YAML" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "0"])
def test_a_time_limit_is_a_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--timeout", value]) == 64
    assert "--timeout" in capsys.readouterr().err


def test_a_rollout_finds_out_first_that_its_report_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = ["rollout", "-i", str(tmp_path / "no-inventory")]
    assert run([*inventory, "-o", str(tmp_path / "missing/report.json")]) == 1
    assert "report.json cannot be written: No such file or directory" in capsys.readouterr().err
    for target in ("-", "/dev/null", str(tmp_path / "report.json")):
        assert run([*inventory, "-o", target]) == 1
        assert "no-inventory does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--drain-limit", "--settle", "--return-limit"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_waiting_has_an_end(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollout", option, value]) == 64
    assert option in capsys.readouterr().err


def test_wrong_settings_of_ansible_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text("[defaults\n")
    done = subprocess.run(
        [sys.executable, "-m", "v100ctl", "plan", "-i", "h1,"],
        env=os.environ | {"ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: Ansible's own settings are wrong")
    assert "Traceback" not in done.stderr


def test_an_output_that_takes_nothing_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "v100ctl", "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: the output: No space left")


def test_a_closed_output_loses_what_is_written_and_nothing_else() -> None:
    code = "import sys; sys.stdout = sys.stderr = None; sys.argv[1:] = ['plan', '--help']; from v100ctl.cli import main; main()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = code.replace("--help", "--facts")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 64


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from v100ctl.cli.options import write_output

    monkeypatch.chdir(tmp_path)
    write_output("text", Path("-"))
    assert capsys.readouterr().out == "text\n"
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import v100ctl.cli.options as options

    def interrupted(self: options.HostOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options.HostOptions, "fleet", interrupted)
    assert run(["plan"]) == 130
    assert "interrupted" in capsys.readouterr().err
