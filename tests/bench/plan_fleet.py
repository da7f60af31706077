"""A fleet to plan offline: many hosts with one card each, one profile, one model whose header is on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FACTS = ROOT / "tests/unit/plan/hosts/v100-pcie-16gb-debian-12-driver-535.json"


def make(folder: Path, hosts: int) -> tuple[Path, Path]:
    """Write inventory and facts of ``hosts`` hosts into ``folder``; their paths."""
    sys.path.insert(0, str(ROOT))
    from tests.device.shapes import MODELS, write

    model = folder / "model.gguf"
    write(MODELS["qwen35-27b"](), model)
    facts = folder / "facts"
    facts.mkdir()
    document = FACTS.read_bytes()
    names = [f"gpu{number:04}" for number in range(hosts)]
    for name in names:
        (facts / f"{name}.json").write_bytes(document)
    instance = {"profile": "llama-16gb-latency", "model": {"from_controller": str(model), "sha256": "ab" * 32}}
    variables = {"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": instance}}
    inventory = folder / "fleet.yml"
    inventory.write_text(yaml.safe_dump({"all": {"hosts": dict.fromkeys(names), "vars": variables}}), encoding="utf-8")
    return inventory, facts
