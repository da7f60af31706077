"""Writes what ``engine_on_a_card.sh`` needs: the plan's own build document and command line for a machine with another card.

    python -m tests.device.engine_inputs DIR [ARCHITECTURE CUDA]      (default: 90 and 13.0, an H200)

The facts are those that the probe brought from an H200; architecture and toolkit are the inventory variables that differ from a
V100's. DIR gets ``spec.json``, ``instance.json``, ``source.tar.gz`` (from the controller's cache, fetched where it lacks) and the
script.
"""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from v100ctl.artifacts.cache import Cache
from v100ctl.artifacts.fetch import fetch_source
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import plan
from v100ctl.plan.types import plain_data

HERE = Path(__file__).parent
FACTS = HERE.parent / "unit/plan/hosts/h200-container-driver-580.json"


def main(folder: Path, architecture: str = "90", cuda: str = "13.0") -> None:
    """Writes the files into ``folder``."""
    instance = {
        "model": {"path": "/srv/model.gguf", "sha256": "0" * 64},
        "settings": {"context_length": 4096, "parallel": 1, "flash_attention": "on", "metrics": True},
    }
    config = parse_config(
        "h1",
        {
            "llama_cpp_backend": "cuda",
            "llama_cpp_cuda_architectures": architecture,
            "cuda_toolkit_version": cuda,
            "nvidia_driver_branch": "580",
            "llm_server_instances": {"chat": instance},
        },
    )
    facts = Facts.model_validate_json(FACTS.read_text(encoding="utf-8"))
    decided = plan("h1", config, facts, as_of=datetime.now(UTC).date())
    build = plain_data(decided.releases[0].build)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(build, indent=1), encoding="utf-8")
    (folder / "instance.json").write_text(json.dumps(plain_data(decided.instances[0]), indent=1), encoding="utf-8")
    shutil.copyfile(fetch_source(build, cache=Cache()), folder / "source.tar.gz")
    shutil.copyfile(HERE / "engine_on_a_card.sh", folder / "engine_on_a_card.sh")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
