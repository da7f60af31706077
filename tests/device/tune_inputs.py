"""Writes what ``tune_on_a_card.sh`` needs beside :mod:`engine_inputs`: a space of settings, as the plan renders and prunes it.

python -m tests.device.tune_inputs DIR
"""

from __future__ import annotations

import itertools
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.device import engine_inputs
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import plan
from v100ctl.plan.types import HostPlan, describe, plain_data

#: What runs "now": report A of the profiles as far as the engine takes it, with four slots.
LIVE: dict[str, Any] = {
    "context_length": 4096,
    "parallel": 4,
    "flash_attention": "off",
    "kv_cache_type_k": "f16",
    "kv_cache_type_v": "f16",
    "batch_size": 512,
    "ubatch_size": 256,
}
#: Dimension -> value in words -> settings.
SPACE: dict[str, dict[str, dict[str, Any]]] = {
    "flash_attention": {"off": {"flash_attention": "off"}, "on": {"flash_attention": "on"}},
    "kv_cache_type": {name: {"kv_cache_type_k": name, "kv_cache_type_v": name} for name in ("f16", "q8_0")},
    "ubatch_size": {str(size): {"ubatch_size": size} for size in (256, 512, 1024, 2048)},
    "batch_size": {str(size): {"batch_size": size} for size in (512, 2048)},
}


def decided(settings: dict[str, Any], *, force_mmq: bool = True) -> HostPlan:
    """The plan of an H200 for one instance."""
    instance = {"model": {"path": "/srv/model.gguf", "sha256": "0" * 64}, "settings": settings}
    variables = {
        "llama_cpp_backend": "cuda",
        "llama_cpp_cuda_architectures": "90",
        "llama_cpp_force_mmq": force_mmq,
        "cuda_toolkit_version": "13.0",
        "nvidia_driver_branch": "580",
        "llm_server_instances": {"chat": instance},
    }
    facts = Facts.model_validate_json(engine_inputs.FACTS.read_text(encoding="utf-8"))
    return plan("h1", parse_config("h1", variables), facts, as_of=datetime.now(UTC).date())


def point(choices: dict[str, str]) -> dict[str, Any]:
    """One point of the grid: its choices beside the live settings, and its command line or why it has none."""
    settings = dict(LIVE)
    for name, value in choices.items():
        settings |= SPACE[name][value]
    # The engine would cut ubatch down to batch without a word.
    settings["batch_size"] = max(settings["batch_size"], settings["ubatch_size"])
    made = decided(settings)
    problems = [describe(rule) for rule in made.rules if rule.severity == "refuse" and rule.instance == "chat"]
    moved = {name: value for name, value in choices.items() if any(LIVE[key] != item for key, item in SPACE[name][value].items())}
    return {"choices": moved, "argv": list(made.instances[0].argv) if made.instances else [], "refused": problems}


def main(folder: Path) -> None:
    """Writes the files into ``folder``."""
    engine_inputs.main(folder)
    (folder / "spec-without-mmq.json").write_text(
        json.dumps(plain_data(decided(LIVE, force_mmq=False).releases[0].build), indent=1), encoding="utf-8"
    )
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    refused = []
    for values in itertools.product(*SPACE.values()):
        made = point(dict(zip(SPACE, values, strict=True)))
        if made["refused"] or not made["argv"]:
            refused.append(made)
        else:
            # Two ways to the same command line are one point; the one with fewer changes names it.
            known = found.get(tuple(made["argv"]))
            if known is None or len(made["choices"]) < len(known["choices"]):
                found[tuple(made["argv"])] = made
    document = {"live": point({})["argv"], "grid": list(found.values()), "refused": refused, "parallel": LIVE["parallel"]}
    document["context_length"] = LIVE["context_length"]
    (folder / "space.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"{len(found)} points, {len(refused)} refused: {sorted({words for item in refused for words in item['refused']})}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
