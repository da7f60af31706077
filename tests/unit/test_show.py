"""What people see of a plan."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.plan.test_cases import CASES, headers
from v100ctl.cli import run
from v100ctl.cli.show import bar
from v100ctl.plan.types import GpuBudget

GIB = 1024**3
Cli = Callable[..., tuple[int, str, str]]
CASE = {path.name: path for path in CASES}


def budget(weights_gib: float, kv_gib: float = 1, total_gib: float = 16) -> GpuBudget:
    return GpuBudget(int(total_gib * GIB), 0, int(weights_gib * GIB), int(kv_gib * GIB), 0, 0, 0, 0)


@pytest.mark.parametrize("weights_gib", [0, 0.01, 7.5, 14.9, 15, 40])
def test_a_bar_has_forty_cells_whatever_is_in_it(weights_gib: float) -> None:
    drawn = bar(budget(weights_gib)).plain
    assert len(drawn[: drawn.index("]") + 1]) == 42
    assert ("too much" in drawn) == (weights_gib + 1 > 16)


def test_a_bar_of_nothing_is_no_division_by_zero() -> None:
    assert bar(GpuBudget(0, 0, 0, 0, 0, 0, 0, 0)).plain.startswith("[")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line as a function: exit code, stdout, stderr. Its cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def plan_offline(cli: Cli, name: str, *options: str) -> tuple[int, str, str]:
    folder = CASE[name]
    return cli("plan", "-i", str(folder / "fleet.yml"), "--offline", "--facts", str(folder / "facts.json"), *options)


def test_a_refusal_comes_first_and_says_what_works(cli: Cli) -> None:
    code, out, _ = plan_offline(cli, "cuda-13-drops-volta")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("h1  refused")
    assert lines[1].lstrip().startswith("refuse:")
    assert 'nearest that works: `cuda_toolkit_version: "12.9"`' in out


def test_the_same_input_gives_the_same_bytes(cli: Cli) -> None:
    for options in ((), ("--json",)):
        assert plan_offline(cli, "dgx-2-with-its-fabric-manager", *options) == plan_offline(
            cli, "dgx-2-with-its-fabric-manager", *options
        )


def test_a_header_given_by_hand(cli: Cli, tmp_path: Path) -> None:
    from tests.device.shapes import MODELS, write

    write(MODELS["qwen35-27b-q6"](), tmp_path / "big.gguf")
    code, out, _ = plan_offline(cli, "driver-535-is-kept", "--model-header", str(tmp_path / "big.gguf"), "--json")
    host = json.loads(out)["hosts"]["h1"]
    assert code == 1
    assert "model-does-not-fit" in {rule["id"] for rule in host["rules"]}
    (card,) = host["instances"]["chat"]["gpus"].values()
    assert card["free_bytes"] < 0
    assert card["peak_bytes"] == sum(card[f"{part}_bytes"] for part in ("weights", "kv", "state", "compute", "output", "context"))
    code, out, _ = plan_offline(cli, "driver-535-is-kept", "--model-header", f"chat={tmp_path / 'big.gguf'}")
    assert "too much" in out
    code, _, err = plan_offline(cli, "driver-535-is-kept", "--model-header", f"chatt={tmp_path / 'big.gguf'}")
    assert (code, "there is no instance `chatt`" in err) == (64, True)


def test_facts_of_many_hosts_from_a_folder(cli: Cli, tmp_path: Path) -> None:
    import yaml

    folder = CASE["driver-535-is-kept"]
    inventory = yaml.safe_load((folder / "fleet.yml").read_text(encoding="utf-8"))
    variables = inventory["all"]["hosts"]["h1"]
    hosts = {f"h{number}": variables for number in range(3)}
    (tmp_path / "fleet.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}), encoding="utf-8")
    facts = tmp_path / "facts"
    facts.mkdir()
    for name in ("h0", "h1"):
        (facts / f"{name}.json").write_bytes((folder / "facts.json").read_bytes())
    arguments = ("plan", "-i", str(tmp_path / "fleet.yml"), "--offline", "--facts", str(facts), "--json")
    code, _, err = cli(*arguments)
    assert (code, "h2.json" in err) == (64, True)
    code, out, _ = cli(*arguments, "--limit", "h0,h1")
    assert code == 2
    assert list(json.loads(out)["hosts"]) == ["h0", "h1"]


def test_cases_name_headers_that_exist() -> None:
    assert all(isinstance(headers(folder), dict) for folder in CASES)


def test_no_width_cuts_a_reason() -> None:
    from tests.unit.plan.test_cases import decide
    from v100ctl.cli.show import print_rules
    from v100ctl.examine import Examined
    from v100ctl.facts import Facts
    from v100ctl.fleet import FleetHost, parse_config

    folder = CASE["secure-boot-before-an-installation"]
    plan = decide(folder)
    facts = Facts.model_validate_json((folder / "facts.json").read_bytes())
    stream = io.StringIO()
    print_rules(Console(file=stream, width=40), Examined(FleetHost("h1", {}, parse_config("h1", {})), None, facts, plan))
    assert "refuses them" in " ".join(stream.getvalue().split())
