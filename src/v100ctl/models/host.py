"""Model headers from hosts: the parsers are sent there over one SSH exec, and one JSON document comes back."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import v100ctl.errors
from v100ctl.errors import ProbeError, V100ctlError
from v100ctl.models import gguf, host_script, safetensors, source
from v100ctl.models.local import to_header
from v100ctl.models.source import ModelFormatError, ModelHeaderError, ModelIncompleteError, ModelMissingError
from v100ctl.models.types import ModelHeader
from v100ctl.probe.run import run_python, shell_safe_json
from v100ctl.probe.session import DEFAULT_TIMEOUT_S, Session
from v100ctl.probe.text import printable

#: In the order in which they import each other.
_MODULES: tuple[ModuleType, ...] = (v100ctl.errors, source, gguf, safetensors, host_script)

# Also read by Pythons that are too old: they are to say so. The exit code is that of the probe for the same reason.
_START = """\
import sys
if sys.version_info < (3, 8):
    sys.stderr.write("v100ctl: Python %d.%d.%d is too old, 3.8 or newer is needed\\n" % sys.version_info[:3])
    sys.exit(78)
import types
for name, text in MODULES:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, "<" + name + ">", "exec"), module.__dict__)
module.main()
"""


@functools.cache
def script() -> bytes:
    """The parsers and :mod:`v100ctl.models.host_script` as one Python script."""
    texts = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in _MODULES]
    return f"MODULES = {texts!a}\n{_START}".encode("ascii")


def read_from_host(
    session: Session, paths: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[str, ModelHeader | V100ctlError]:
    """The headers of models on a host, by path. One that cannot be read has its error and takes no other with it.

    Args:
        session: The way in.
        paths: GGUF files (the first part, where one is split), or folders with ``config.json``.
        timeout_s: For all together.

    Raises:
        UnreachableError: no root, or no answer in time.
        ProbeError: the host has no usable Python, or what came back is no such document.
    """
    wanted = list(dict.fromkeys(paths))
    if not wanted:
        return {}
    # Several slow ones are still to be told from a host that does not answer at all.
    limit_s = max(1.0, min(host_script.DEFAULT_LIMIT_S, 0.8 * timeout_s / len(wanted)))
    request = shell_safe_json({"paths": wanted, "limit_s": limit_s})
    answer = run_python(session, script(), request, what="the model header reader", timeout_s=timeout_s)
    return read_answer(answer, wanted, host=session.connection.host)


def read_answer(answer: str | bytes, paths: Sequence[str], *, host: str = "the host") -> dict[str, ModelHeader | V100ctlError]:
    """What :func:`script` printed on a host, by path.

    Raises:
        ProbeError: it is no such document.
    """
    try:
        document = json.loads(answer)
        headers = document["headers"] if document["schema"] == host_script.SCHEMA else None
    except (ValueError, TypeError, KeyError, RecursionError):
        headers = None
    if not isinstance(headers, dict):
        raise ProbeError(
            f"{host}: the model header reader did not return a usable document: {printable(answer)}",
            hint="something on the host may print into every login (`~/.bashrc`), or is not what it says it is",
        )
    return {path: _outcome(host, path, headers.get(path)) for path in paths}


_KINDS: dict[str, type[ModelHeaderError]] = {
    "missing": ModelMissingError,
    "incomplete": ModelIncompleteError,
    "format": ModelFormatError,
}


def _outcome(host: str, path: str, answer: Any) -> ModelHeader | V100ctlError:
    if isinstance(answer, dict) and isinstance(error := answer.get("error"), dict):
        kind = _KINDS.get(str(error.get("kind")), ModelHeaderError)
        hint = error.get("hint")
        return kind(f"{host}: {printable(str(error.get('message')), 1000)}", hint=printable(str(hint), 1000) if hint else None)
    if isinstance(answer, dict) and isinstance(answer.get("header"), dict):
        try:
            return to_header(answer["header"])
        except ModelHeaderError as error:
            return ModelHeaderError(f"{host}: `{printable(path)}`: {error.message}", hint=error.hint)
    return ModelHeaderError(f"{host}: `{printable(path)}`: the host did not say anything about it")
