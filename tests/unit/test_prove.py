"""The script with which the role llm_server sees that an instance computes where it shall."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from v100ctl.catalog import load_catalog

SCRIPT = Path(__file__).resolve().parents[2] / "roles/llm_server/files/prove.py"
UUID = "GPU-00000000-0000-4000-8000-00000003b000"
OTHER = "GPU-00000000-0000-4000-8000-00000005e000"
GIB = 1024**3
MIB = 1024**2

# What b11434 prints with `--log-verbosity 4` while it loads: the lines are formatted by load_tensors in src/llama-model.cpp.
ALL_ON_CARDS = """\
0.00.312.120 I load_tensors: offloading output layer to GPU
0.00.312.121 I load_tensors: offloading 64 repeating layers to GPU
0.00.312.122 I load_tensors: offloaded 65/65 layers to GPU
0.00.312.125 I load_tensors:   CPU_Mapped model buffer size =   682.03 MiB
0.00.312.125 I load_tensors:        CUDA0 model buffer size = 15259.59 MiB
"""
SOME_ON_CARDS = ALL_ON_CARDS.replace("65/65", "60/65")
NO_GPU = "warning: no usable GPU found, --gpu-layers option will be ignored\n"
NO_CUDA = "0.00.012.120 E ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n"


@pytest.fixture(scope="module")
def prove() -> Any:
    spec = importlib.util.spec_from_file_location("prove", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts programs on the path that print what they are given, by name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(**outputs: str) -> None:
        for name, output in outputs.items():
            (folder / f"{name}.out").write_text(output)
            program = folder / name.replace("_", "-")
            program.write_text(f"#!/bin/sh\nexec cat {folder}/{name}.out\n")
            program.chmod(0o755)

    return put


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An address that answers questions, and other paths with an error."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/v1/chat/completions" else 500)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": f"{asked['model']} answers"}}]}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


@pytest.mark.parametrize("build", [9851, 10121, 11053, 11434])
@pytest.mark.parametrize(
    ("log", "missing", "bad"),
    [
        (ALL_ON_CARDS, False, False),
        (SOME_ON_CARDS, True, True),
        (NO_GPU, True, True),
        (NO_CUDA, True, True),
        ("", True, False),
        # A draft model of its own has lines of its own.
        (ALL_ON_CARDS + ALL_ON_CARDS.replace("65/65", "29/29"), False, False),
        (ALL_ON_CARDS + ALL_ON_CARDS.replace("65/65", "9/29"), False, True),
        (ALL_ON_CARDS.replace("65/65", "6/65"), True, True),
    ],
)
def test_log_of_llama_cpp(prove: Any, build: int, log: str, missing: bool, bad: bool) -> None:
    row = load_catalog().llama_cpp_build(build)
    assert row is not None
    must_not = [*row.proof.forbidden, row.proof.not_all_layers]
    found, forbidden = prove.judge_log(log.splitlines(), [row.proof.all_layers], must_not)
    assert (bool(found), bool(forbidden)) == (missing, bad)


@pytest.mark.parametrize(
    ("processes", "used_bytes", "held_bytes", "words"),
    [
        # Its own process holds the weights.
        ([(1, 9 * GIB)], 9 * GIB, 9 * GIB, ""),
        ([(1, 1 * GIB)], 9 * GIB, 1 * GIB, "it holds 1024 MiB of card"),
        # Somebody else has the card.
        ([(os.getpid(), 9 * GIB)], 9 * GIB, 0, "none of its processes is on card"),
        # In a container no process is told, or one of the host below.
        ([], 9 * GIB, 9 * GIB, ""),
        ([], 1 * MIB, 1 * MIB, "in use are 1 MiB"),
        ([(4194304 + 7, 9 * GIB)], 9 * GIB, 9 * GIB, ""),
        ([(1, None)], 9 * GIB, 9 * GIB, ""),
        ([(1, None)], None, None, "does not say"),
    ],
)
def test_memory_of_a_card(
    prove: Any, processes: list[tuple[int, int | None]], used_bytes: int | None, held_bytes: int | None, words: str
) -> None:
    seen, problem = prove.judge_card("v100-chat.service", UUID, 8 * GIB, {1}, processes, used_bytes)
    assert seen["held_bytes"] == held_bytes
    assert words in problem and bool(words) == bool(problem)


def test_card_of_which_nobody_knows_what_it_takes_needs_a_cuda_context(prove: Any) -> None:
    assert prove.judge_card("u", UUID, 0, {1}, [(1, 500 * MIB)], 500 * MIB)[1] == ""
    assert "are needed there" in prove.judge_card("u", UUID, 0, {1}, [], 4 * MIB)[1]


def test_cards_that_are_gone_or_not_known(prove: Any, programs: Callable[..., None]) -> None:
    programs(nvidia_smi=f"{OTHER}, 9000\n")
    assert (
        f"card {UUID} is gone; there are {OTHER}"
        in prove.card_problems("u", {"on_cards": True, "least_bytes": {UUID: 1}}, {})[1][0]
    )
    assert "does not know the UUID" in prove.card_problems("u", {"on_cards": True}, {})[1][0]
    assert prove.card_problems("u", {"on_cards": False}, {}) == ({}, [])


def test_driver_that_refuses(prove: Any, tmp_path: Path, programs: Callable[..., None]) -> None:
    programs(nvidia_smi="")
    (tmp_path / "bin/nvidia-smi").write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    _, problems = prove.card_problems("u", {"on_cards": True, "least_bytes": {UUID: 1}}, {})
    assert problems == ["`nvidia-smi` does not answer: Failed to initialize NVML: Driver/library version mismatch"]


PROPERTIES = {"InvocationID": "ab" * 16, "ExecMainStartTimestampMonotonic": "5000"}


@pytest.mark.parametrize(
    ("first_us", "expected"),
    [
        # The journal begins before the server did: what is not there was not said.
        (4000, "seen"),
        # What the server said at its start has been thrown away since.
        (6000, "lost"),
    ],
)
def test_log_that_is_kept_no_more_proves_nothing(
    prove: Any, programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch, first_us: int, expected: str
) -> None:
    monkeypatch.setattr(prove, "LOG_DELAY_S", 0.0)
    programs(journalctl=json.dumps({"__MONOTONIC_TIMESTAMP": str(first_us)}) + "\n")
    log, problems = prove.log_problems("v100-chat.service", {"must_log": ["offloaded"]}, PROPERTIES)
    assert log == expected
    assert bool(problems) == (expected == "seen")
    if problems:
        assert "nothing like `offloaded`" in problems[0]
        assert "journalctl -u v100-chat.service" in problems[-1]


def test_log_of_an_instance_without_cards_is_not_read(prove: Any) -> None:
    assert prove.log_problems("u", {}, {}) == ("none", [])


def test_whole_proof(prove: Any, server: str, tmp_path: Path, programs: Callable[..., None]) -> None:
    programs(
        systemctl="InvocationID=" + "ab" * 16 + f"\nMainPID={os.getpid()}\nControlGroup=/x\n",
        journalctl=ALL_ON_CARDS,
        nvidia_smi=f"{UUID}, {os.getpid()}, 9000\n",
    )
    baseline = tmp_path / "chat.json"
    request = {
        "unit": "v100-chat.service",
        "url": f"{server}/v1/chat/completions",
        "model": "m",
        "prompt": "?",
        "max_tokens": 8,
        "timeout_s": 10,
        "baseline": str(baseline),
        # The answer of the stand-in for `nvidia-smi` is the same for both questions: its second field is taken for MiB in use.
        "proof": {"on_cards": True, "must_log": [r"offloaded (\d+)/\1 layers"], "least_bytes": {UUID: 8 * GIB}},
    }
    seen = prove.prove(request)
    assert seen["problems"] == []
    assert seen["answer"]["body"]["choices"][0]["message"]["content"] == "m answers"
    assert seen["cards"] == {UUID: {"held_bytes": 9000 * MIB, "seen": "process"}}
    assert (seen["log"], seen["baseline_digest"]) == ("seen", "")
    baseline.write_text('{"digest": "abc"}')
    failed = prove.prove({**request, "url": f"{server}/elsewhere"})
    assert "does not answer a question (HTTP status 500" in failed["problems"][0]
    assert failed["baseline_digest"] == "abc"
    failed = prove.prove({**request, "url": "http://127.0.0.1:1/v1"})
    assert "Connection refused" in failed["problems"][0]
