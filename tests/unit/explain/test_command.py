"""``v100ctl plan --explain-command`` on the command line: versions, cards, streams, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.factory import BARE_FACTS, merge
from v100ctl.cli import run

GOOD = "CUDA_DEVICE_ORDER=PCI_BUS_ID llama-server -m /m -ngl 99 -c 8192 -np 1 -fa on\n"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to explain, in a folder without an inventory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("V100CTL_INVENTORY", raising=False)
    path = tmp_path / "text"
    path.write_text(GOOD, encoding="utf-8")
    return path


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


@pytest.mark.parametrize(
    ("content", "code"),
    [(GOOD, 0), (GOOD.replace("-np 1", "-ngl 0"), 2), (GOOD.replace("-fa on", "-fa"), 1), ("apt install cmake\n", 1)],
)
def test_the_exit_code_says_how_bad_it_is(text: Path, content: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_text(content, encoding="utf-8")
    assert run(["plan", "--explain-command", str(text)]) == code
    captured = capsys.readouterr()
    assert ("looked for" in captured.err) == ("apt" in content)


def test_the_text_may_come_from_stdin(text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + GOOD.encode() + b"\xff\xfe"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(["plan", "--explain-command", "-", "--json"]) == 0
    assert document(capsys)["commands"][0]["version"] == "11434"


def test_without_an_inventory_the_roles_own_pins_count(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_text(GOOD + "vllm serve m --dtype half --host ::1\n", encoding="utf-8")
    assert run(["plan", "--explain-command", str(text), "--json"]) == 0
    found = document(capsys)
    assert [command["version"] for command in found["commands"]] == ["11434", "0.8.5.post1"]
    assert found["gpu"] == {"name": None, "compute_capability": "7.0", "source": "default"}


def test_an_inventorys_pins_count(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = text.with_name("hosts.yml")
    inventory.write_text("all: {hosts: {h1: {llama_cpp_build: 9851}}}\n", encoding="utf-8")
    text.write_text(GOOD + "llama-server -m /m --no-mmap\n", encoding="utf-8")
    assert run(["plan", "-i", str(inventory), "--explain-command", str(text), "--json"]) == 0
    assert {command["version"] for command in document(capsys)["commands"]} == {"9851"}
    assert run(["plan", "-i", str(inventory), "--engine-version", "11434", "--explain-command", str(text)]) == 1


def test_hosts_with_different_pins_are_spoken_of(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = text.with_name("hosts.yml")
    inventory.write_text(
        "all: {hosts: {h1: {llama_cpp_build: 9851}, h2: {llama_cpp_build: 11434, vllm_version: 0.9.2}}}\n", encoding="utf-8"
    )
    assert run(["plan", "-i", str(inventory), "--explain-command", str(text)]) == 0
    assert "hosts differ in `llama_cpp_build`; read as 9851, not 11434" in capsys.readouterr().err
    text.write_text("vllm serve m --dtype half --host ::1\n", encoding="utf-8")
    assert run(["plan", "-i", str(inventory), "-l", "h2", "--explain-command", str(text)]) == 1
    assert "0.9.2, which the inventory pins" in capsys.readouterr().err


def test_both_engines_versions_can_be_asked_for(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_text(GOOD + "vllm serve m --dtype half --host ::1 --enable-chunked-prefill=False\n", encoding="utf-8")
    arguments = [
        "plan",
        "--explain-command",
        str(text),
        "--json",
        "--engine-version",
        "b10121",
        "--engine-version",
        "v0.6.3.post1",
    ]
    assert run(arguments) == 0
    assert [command["version"] for command in document(capsys)["commands"]] == ["10121", "0.6.3.post1"]


def test_the_card_comes_from_the_option_or_from_facts(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--explain-command", str(text), "--json", "--gpu", "v100-pcie-16gb"]) == 0
    assert document(capsys)["gpu"]["source"] == "asked"
    facts = text.with_name("facts.json")
    card = {"pci_address": "0000:3b:00.0", "pci_id": "10de:1db6"}
    facts.write_text(json.dumps(merge(BARE_FACTS, {"gpus": [card]})), encoding="utf-8")
    assert run(["plan", "--explain-command", str(text), "--json", "--facts", str(facts)]) == 0
    found = document(capsys)["gpu"]
    assert (found["source"], "PCIE-32GB" in found["name"]) == ("facts", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine-version", "11433"], "Did you mean 11434?"),
        (["--engine-version", "0.8.5"], "Did you mean 0.8.5.post1?"),
        (["--engine-version", "x"], "Known are llama.cpp 9093"),
        (["--gpu", "V100-SMX2-16GB"], "Did you mean V100-SXM2-16GB?"),
        (["--gpu", "H200"], "V100-PCIE-16GB"),
    ],
)
def test_what_is_not_known_is_wrong_usage(
    text: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--explain-command", str(text), *arguments]) == 64
    assert message in capsys.readouterr().err


def test_its_options_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--gpu", "V100-SXM2-16GB"]) == 64
    assert "belong to --explain-command" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--explain-command", str(text.with_name("none"))]) == 1
    assert "none cannot be read: No such file" in capsys.readouterr().err


def test_a_table_puts_the_worst_first_and_ends_in_what_can_be_pasted(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_text("llama-server -m /m --api-key sesame -fa --port 8080\x1b[31m\n", encoding="utf-8")
    first = text.with_name("first")
    assert run(["plan", "--explain-command", str(text), "-o", str(first)]) == 1
    assert run(["plan", "--explain-command", str(text)]) == 1
    out = capsys.readouterr().out
    assert out == first.read_text(encoding="utf-8")
    assert "\x1b" not in out and "sesame" not in out
    rows = [line.split()[0] for line in out.splitlines() if line[:1].isalpha()]
    assert rows.index("refused") < rows.index("unwise") < rows.index("ok")
    assert out.index("ok ") < out.index("The same as inventory:") < out.index("llm_server_instances:")


def test_a_narrow_terminal_gets_a_list(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut: every word of a table's cells is there, and no line but of the snippet is longer than the terminal."""
    import pty

    text.write_text(GOOD.replace("-fa on", "-fa --cache-type-k q8_0"), encoding="utf-8")
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("TERM", "xterm")
        assert run(["plan", "--explain-command", str(text), "--no-color"]) == 1
    shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(controller, 65536).decode().replace("\r\n", "\n"))
    os.close(controller)
    findings, _, snippet = shown.partition("The same as inventory:")
    assert max(map(len, findings.splitlines())) <= 60
    assert "took no value" in " ".join(findings.split())
    assert "context_length: 8192" in snippet
