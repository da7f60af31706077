"""``python -m v100ctl.artifacts VERB --json JSON``: the cache for roles, delegated to the controller.

Prints one JSON object. An error goes to stderr with its hint, and the exit status is 1.

``build-release`` a build specification, compiled in a container -> ``{"path", "size_bytes", "notes"}``
``fetch-engine``  a specification of an engine that the user brings -> ``{"path", "size_bytes", "notes"}``
``fetch-source``  a build specification -> ``{"path", "sha256", "size_bytes", "notes"}``
``fetch-model``   a planned model -> ``{"path", "size_bytes", "notes"}``
``bring-model``   a planned model with ``host`` -> ``{"path", "size_bytes", "incoming", "notes"}``: where it lies, and where
                  a slice of it may be put
``model-slice``   ``{"path", "host"}`` -> ``{"incoming"}``
``find-release``  ``{"build_id", "host"}`` -> ``{"found", "path", "sha256", "size_bytes", "incoming", "notes"}``
``store-release`` ``{"build_id", "archive", "sha256"}`` -> ``{"path", "sha256", "size_bytes", "notes"}``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from v100ctl.artifacts.cache import Cache, sha256_file
from v100ctl.artifacts.fetch import fetch_engine, fetch_model, fetch_source
from v100ctl.errors import EXIT_ERROR, EXIT_OK, V100ctlError


def answer(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Does what ``verb`` says and returns what is printed.

    Raises:
        V100ctlError: It cannot be done.
    """
    cache = Cache()
    notes: list[str] = []
    if verb == "fetch-model":
        path = fetch_model(given, note=notes.append, cache=cache)
        return {"path": str(path), "size_bytes": path.stat().st_size, "notes": notes}
    if verb == "fetch-engine":
        path = fetch_engine(given, note=notes.append, cache=cache)
        return {"path": str(path), "size_bytes": path.stat().st_size, "notes": notes}
    if verb == "build-release":
        from v100ctl.artifacts.container import build_in_container

        patches = given["source"].get("patches")
        path = build_in_container(given, patches=Path(patches).expanduser() if patches else None, note=notes.append, cache=cache)
        return {"path": str(path), "size_bytes": path.stat().st_size, "notes": notes}
    if verb == "bring-model":
        path = fetch_model(given, note=notes.append, cache=cache)
        incoming = cache.slice_path(given["path"], given["host"])
        return {"path": str(path), "size_bytes": path.stat().st_size, "incoming": str(incoming), "notes": notes}
    if verb == "model-slice":
        return {"incoming": str(cache.slice_path(given["path"], given["host"]))}
    if verb == "fetch-source":
        path = fetch_source(given, note=notes.append, cache=cache)
        return {"path": str(path), "sha256": sha256_file(path), "size_bytes": path.stat().st_size, "notes": notes}
    if verb == "store-release":
        path = cache.store_release(given["build_id"], Path(given["archive"]), given["sha256"])
        return {"path": str(path), "sha256": given["sha256"], "size_bytes": path.stat().st_size, "notes": notes}
    found = cache.find_release(given["build_id"], notes.append)
    incoming = cache.incoming_path(given["build_id"], given["host"])
    path, sha256 = found or (cache.release_path(given["build_id"]), "")
    return {
        "found": found is not None,
        "path": str(path),
        "sha256": sha256,
        "size_bytes": path.stat().st_size if found else 0,
        "incoming": str(incoming),
        "notes": notes,
    }


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m v100ctl.artifacts", description="The controller's cache, for roles")
    verbs = ["build-release", "fetch-engine", "fetch-source", "fetch-model", "find-release", "store-release"]
    parser.add_argument("verb", choices=[*verbs, "bring-model", "model-slice"])
    parser.add_argument("--json", required=True, type=json.loads, help="what is asked for, as a JSON object")
    given = parser.parse_args(arguments)
    try:
        print(json.dumps(answer(given.verb, given.json), sort_keys=True))
    except V100ctlError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return EXIT_ERROR
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
