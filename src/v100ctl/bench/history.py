"""What was measured when: one file a measurement, by host and instance, on the controller."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from v100ctl.bench.report import SCHEMA
from v100ctl.errors import V100ctlError
from v100ctl.paths import state_dir

#: An instance's measurements beyond this number go, the oldest first.
KEPT = 200


def folder_of(host: str, instance: str) -> Path:
    """Where an instance's measurements lie."""
    return state_dir() / "bench" / folder_name(host) / folder_name(instance)


def folder_name(name: str) -> str:
    """The name of a host or an instance as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"


def save(document: dict[str, Any]) -> Path:
    """Write a report aside and rename it in; returns where it lies."""
    folder = folder_of(document["host"], document["instance"])
    folder.mkdir(parents=True, exist_ok=True)
    stem = document["measured_at"].replace(":", "").replace("-", "")
    path = folder / f"{stem}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    for old in entries(document["host"], document["instance"])[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def entries(host: str, instance: str) -> list[Path]:
    """All measurements of an instance, the oldest first."""
    folder = folder_of(host, instance)
    found = folder.glob("*.json") if folder.is_dir() else []
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[str, int]:
    """By time, then by number where several ended in one second."""
    time, _, number = path.stem.partition("-")
    return time, int(number) if number.isdigit() else 1


def load(path: Path) -> dict[str, Any]:
    """Read one report.

    Raises:
        V100ctlError: it cannot be read, or is no such report.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise V100ctlError(f"{path}: {error.strerror}", hint="`v100ctl bench HOST/NAME --history` lists what there is") from error
    except ValueError as error:
        raise V100ctlError(f"{path} is no report of `v100ctl bench`: not JSON") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise V100ctlError(f"{path} is no report of `v100ctl bench`: its schema is not {SCHEMA}")
    return document


def find(text: str, host: str | None, instance: str | None) -> dict[str, Any]:
    """One report by what a person calls it: a file, or, of an instance, `last`, `-2` (the one before) or a time as listed.

    Raises:
        V100ctlError: there is none.
    """
    if Path(text).is_file():
        return load(Path(text))
    if host is None or instance is None:
        raise V100ctlError(
            f"there is no file {text}", hint="name a report's file, or the instance (`v100ctl bench HOST/NAME ...`)"
        )
    listed = entries(host, instance)
    place = -1 if text == "last" else int(text) if re.fullmatch(r"-\d+", text) else None
    if place is not None and 0 < -place <= len(listed):
        return load(listed[place])
    named = next((path for path in listed if path.stem == text), None)
    if named is None:
        raise V100ctlError(
            f"{host}/{instance} has no measurement {text}",
            hint=f"`v100ctl bench {host}/{instance} --history` lists {len(listed)} of them",
        )
    return load(named)
