"""Writes what ``bench_on_a_card.sh`` needs beside :mod:`engine_inputs`: the command lines to measure, as the plan renders them.

python -m tests.device.bench_inputs DIR
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.device import engine_inputs
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import plan

BASE: dict[str, Any] = {"context_length": 20480, "parallel": 1, "flash_attention": "on", "batch_size": 2048, "ubatch_size": 512}
#: Name, profile, settings; and how it is measured: ``whole`` is what `bench` measures, ``short`` fewer prompts and runs.
CONFIGURATIONS: tuple[tuple[str, str | None, dict[str, Any], str], ...] = (
    ("profile llama-16gb-latency", "llama-16gb-latency", {}, "whole"),
    ("profile llama-32gb-concurrent", "llama-32gb-concurrent", {}, "whole"),
    # Report A as far as the engine takes it: with flash attention off it refuses a quantised V cache.
    (
        "report A: flash attention off, f16 cache",
        None,
        {"context_length": 8192, "parallel": 1, "batch_size": 512, "ubatch_size": 256, "flash_attention": "off"},
        "short",
    ),
    ("base: flash attention, f16, ubatch 512", None, BASE, "short"),
    ("flash attention off", None, BASE | {"flash_attention": "off"}, "short"),
    ("q8_0 cache", None, BASE | {"kv_cache_type_k": "q8_0", "kv_cache_type_v": "q8_0"}, "short"),
    ("ubatch 2048", None, BASE | {"ubatch_size": 2048}, "short"),
    ("ubatch 256, batch 512", None, BASE | {"ubatch_size": 256, "batch_size": 512}, "short"),
    ("base again", None, BASE, "short"),
)


def command_line(profile: str | None, settings: dict[str, Any]) -> tuple[list[str], int, int]:
    """The plan's own words for a machine with an H200, its context for each request, and its slots."""
    instance: dict[str, Any] = {"model": {"path": "/srv/model.gguf", "sha256": "0" * 64}, "settings": settings}
    if profile is not None:
        instance["profile"] = profile
    config = parse_config(
        "h1",
        {
            "llama_cpp_backend": "cuda",
            "llama_cpp_cuda_architectures": "90",
            "cuda_toolkit_version": "13.0",
            "nvidia_driver_branch": "580",
            "llm_server_instances": {"chat": instance},
        },
    )
    facts = Facts.model_validate_json(engine_inputs.FACTS.read_text(encoding="utf-8"))
    (decided,) = plan("h1", config, facts, as_of=datetime.now(UTC).date()).instances
    return list(decided.argv), decided.context_length, decided.parallel


def main(folder: Path) -> None:
    """Writes the files into ``folder``."""
    engine_inputs.main(folder)
    found = []
    for name, profile, settings, how in CONFIGURATIONS:
        argv, context_length, parallel = command_line(profile, settings)
        found.append({"name": name, "argv": argv, "context_length": context_length, "parallel": parallel, "how": how})
    # What the engine does without being told anything.
    plain = {"name": "plain defaults", "argv": [found[0]["argv"][0], "--model", "/srv/model.gguf", "--port", "8000"]}
    found.insert(1, {**plain, "context_length": 20480, "parallel": 4, "how": "whole"})
    (folder / "configurations.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
