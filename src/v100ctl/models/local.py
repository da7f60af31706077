"""Model headers from files of this machine, and what all readers share: plain data made a :class:`ModelHeader`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from v100ctl.models.host_script import read_path
from v100ctl.models.source import ModelHeaderError, shown
from v100ctl.models.types import ModelHeader


def read_local(path: Path) -> ModelHeader:
    """The header of a GGUF file (the first part, where it is split) or of a folder with ``config.json``.

    Raises:
        ModelHeaderError: there is none, or it cannot be read or be true.
    """
    return to_header(read_path(str(path.expanduser())))


def to_header(fields: Mapping[str, Any]) -> ModelHeader:
    """What a parser returned, or a host sent, as a header.

    Raises:
        ModelHeaderError: it is no such document.
    """
    try:
        return ModelHeader.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        said = f"{problem['msg']} at {'.'.join(str(part) for part in problem['loc'])}"
    raise ModelHeaderError(f"this is no model header: {shown(said)}", hint="something on the host may not be what it says it is")
