"""A real ``llama-server`` on small models of every kind of cache, and what was predicted of it.

The models have no weights (``tests/device/shapes.py``), and the server allocates as for real ones: its log is the answer.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.device import shapes
from tests.device.measure_vram import buffers
from tests.unit.test_vram import header_of, launch_of
from v100ctl import paths
from v100ctl.models.types import ModelHeader
from v100ctl.plan import vram

from .hosts import Done

BUILD = 11434
MIB = 1 << 20
START_TIMEOUT_S = 90.0

MODELS: dict[str, Callable[[], shapes.Shape]] = {
    "llama": lambda: shapes.llama(n_layer=3, n_embd=1024, n_ff=2816, n_head=16, n_head_kv=4, n_vocab=4096),
    "llama-tied": lambda: shapes.llama(n_layer=2, n_embd=512, n_ff=1536, n_head=8, n_head_kv=2, n_vocab=8192, tied=True),
    "qwen2": lambda: shapes.qwen2(n_layer=3, n_embd=768, n_ff=2048, n_head=12, n_head_kv=2, n_vocab=4096),
    "qwen3": lambda: shapes.qwen3(n_layer=4, n_embd=1024, n_ff=3072, n_head=16, n_head_kv=8, n_vocab=4096),
    "qwen3moe": lambda: shapes.qwen3moe(n_layer=3, n_embd=512, n_ff=256, n_head=8, n_head_kv=2, n_expert=16, n_vocab=4096),
    "gemma3": lambda: shapes.gemma3(n_layer=8, n_embd=640, n_ff=2048, n_head=4, n_head_kv=2, head=256, window=512, n_vocab=8192),
    "qwen35": lambda: shapes.qwen35(
        n_layer=8, n_embd=1024, n_ff=3072, n_head=8, n_head_kv=2, value_heads=16, key_heads=8, nextn=1, n_vocab=4096
    ),
    "qwen35moe": lambda: shapes.qwen35(
        n_layer=8, n_embd=512, n_ff=256, n_head=4, n_head_kv=2, value_heads=8, key_heads=4, n_expert=16, n_expert_used=4,
        shared=256, n_vocab=4096,
    ),
    "gemma2": lambda: shapes.gemma2(n_layer=4, n_embd=768, n_ff=2048, n_head=4, n_head_kv=2, window=512, n_vocab=8192),
    "gemma4": lambda: shapes.gemma4(
        n_layer=12, n_embd=768, n_ff=2048, n_head=8, n_head_kv=4, n_head_kv_full=1, head=64, head_full=128, window=512,
        n_vocab=8192,
    ),
    "gemma4-experts": lambda: shapes.gemma4(
        n_layer=6, n_embd=768, n_ff=1024, n_head=8, n_head_kv=4, n_head_kv_full=1, head=64, head_full=128, window=512,
        n_vocab=8192, n_expert=16, n_expert_used=4, n_ff_expert=256,
    ),
    "qwen3next": lambda: shapes.qwen3next(n_layer=8, n_embd=512, n_ff=256, n_head=4, value_heads=8, key_heads=4, n_expert=16,
        n_expert_used=4, n_vocab=4096),
    "deepseek2": lambda: shapes.deepseek2(
        n_layer=4, n_embd=512, n_ff=1024, n_ff_expert=256, n_head=8, n_expert=16, n_expert_used=4, q_rank=256,
        n_vocab=4096,
    ),
    "gpt-oss": lambda: shapes.gpt_oss(n_layer=4, n_embd=768, n_ff=768, n_head=16, n_head_kv=2, n_expert=8, n_vocab=4096),
}  # fmt: skip

CASES = (
    ("llama", "-c 4096 -np 1 -fa on"),
    ("llama", "-c 4096 -np 1 -fa off -ub 256"),
    ("llama", "-c 5000 -np 3 -no-kvu -fa on -ctk q8_0 -ctv q8_0"),
    ("llama-tied", "-c 2048 -np 1 -fa on -b 64 -ub 64"),
    ("qwen2", "-c 8192 -np 2 -kvu -fa on -ctk q4_0 -ctv q4_0"),
    ("qwen2", "-c 300 -np 1 -fa off"),
    ("qwen3", "-c 16384 -np 1 -fa on -ub 2048"),
    ("qwen3", "-c 8192 -np 4 -no-kvu -fa off -ctk q8_0"),
    ("qwen3moe", "-c 4096 -np 1 -fa on"),
    ("qwen3moe", "-c 4096 -np 1 -fa off -ub 1024"),
    ("gemma3", "-c 8192 -np 1 -fa on"),
    ("gemma3", "-c 8192 -np 4 -kvu -fa on -ctk q8_0 -ctv q8_0 -ub 128"),
    ("gemma3", "-c 1024 -np 1 -fa off"),
    ("qwen35", "-c 8192 -np 1 -fa on"),
    ("qwen35", "-c 8192 -np 2 -no-kvu -fa off"),
    ("qwen35", "-c 4096 -np 1 -fa on --spec-type draft-mtp --spec-draft-n-max 2"),
    ("qwen35moe", "-c 4096 -np 1 -fa on -ctk q8_0 -ctv q8_0"),
    ("gemma2", "-c 4096 -np 1 -fa on"),
    ("gemma2", "-c 4096 -np 2 -kvu -fa off"),
    ("gemma4", "-c 4096 -np 1 -fa on"),
    ("gemma4", "-c 4096 -np 1 -fa off"),
    ("gemma4", "-c 8192 -np 2 -no-kvu -fa on -ctk q8_0 -ctv q8_0"),
    ("gemma4-experts", "-c 4096 -np 1 -fa on"),
    ("gemma4-experts", "-c 4096 -np 1 -fa off"),
    ("qwen3next", "-c 4096 -np 1 -fa on"),
    ("qwen3next", "-c 4096 -np 2 -no-kvu -fa off"),
    ("deepseek2", "-c 4096 -np 1 -fa on"),
    ("deepseek2", "-c 4096 -np 2 -no-kvu -fa off"),
    ("gpt-oss", "-c 4096 -np 1 -fa on"),
    ("gpt-oss", "-c 4096 -np 2 -kvu -fa off"),
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the server printed, in MiB by kind, a number for each buffer."""

    log: str

    def printed(self, kind: str) -> list[float]:
        """The buffers of a kind."""
        return [mib for _, _, what, mib in buffers(self.log) if what == kind]


class Engine:
    """The compiled server and its models."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.headers: dict[str, ModelHeader] = {}
        for name, make in MODELS.items():
            shape = make()
            shapes.write(shape, folder / f"{name}.gguf")
            self.headers[name] = header_of(shape)

    def ask(self, case: tuple[str, str]) -> Answer:
        """Start a server, read its log until it serves, stop it."""
        name, arguments = case
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log_path = self.folder / f"{port}.log"
        fixed = ["--no-warmup", "--fit", "off", "--no-repack", "-lv", "4", "--no-ui", "--offline", "--port", str(port), "-t", "1"]
        argv = [str(self.program), "-m", str(self.folder / f"{name}.gguf"), *arguments.split(), *fixed]
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        with log_path.open("w") as log:
            process = subprocess.Popen(argv, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                deadline = time.monotonic() + START_TIMEOUT_S
                while "listening on" not in (text := log_path.read_text(errors="replace")):
                    assert process.poll() is None, text[-3000:]
                    assert time.monotonic() < deadline, text[-3000:]
                    time.sleep(0.05)
            finally:
                process.kill()
                process.wait()
        return Answer(text)


@pytest.fixture(scope="module")
def engine(practiced: Done, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The release that ``v100ctl try`` has left in the cache."""
    assert practiced.code == 0, practiced.err
    folder = tmp_path_factory.mktemp("release")
    (archive,) = (paths.cache_dir() / "releases").glob(f"b{BUILD}-cpu-*.tar.gz")
    with tarfile.open(archive) as stream:
        stream.extractall(folder, filter="data")
    return Engine(folder / "bin" / "llama-server", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def answers(engine: Engine) -> dict[tuple[str, str], Answer]:
    """Every case, two servers at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(engine.ask, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_real_server_allocates_what_was_predicted(
    case: tuple[str, str], engine: Engine, answers: dict[tuple[str, str], Answer]
) -> None:
    name, arguments = case
    answer = answers[case]
    launch = dataclasses.replace(launch_of(arguments), backend="cpu")
    host = vram.estimate(engine.headers[name], launch, ()).host_bytes
    for kind, part in (("model", "weights"), ("KV", "kv"), ("RS", "state"), ("output", "output")):
        found = answer.printed(kind)
        assert abs(host[part] / MIB - sum(found)) <= 0.0051 * max(1, len(found)), (kind, host[part] / MIB, found)
    found = answer.printed("compute")
    if "draft-mtp" in arguments:
        # The context that drafts asks for its buffer a second time.
        found = found[:2]
    assert host["compute"] / MIB == pytest.approx(sum(found), rel=0.10)
    # It is closer than promised; this says how close, so that a change is noticed.
    assert abs(host["compute"] / MIB - sum(found)) <= 0.02 * len(found)


def test_the_log_is_read_in_full(answers: dict[tuple[str, str], Answer]) -> None:
    for (name, _), answer in answers.items():
        windowed = name.startswith(("gemma", "gpt-oss"))
        assert len(answer.printed("KV")) >= 1 + windowed
        assert len(answer.printed("RS")) == name.startswith(("qwen35", "qwen3next"))
        assert re.search(r"build|b11434", answer.log)
