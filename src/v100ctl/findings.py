"""One difference between a plan and a host, and what the host's own record of the applied plan is worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["drifted", "pending", "external"]
Layer = Literal["package", "driver", "file", "unit", "process", "hardware", "service"]
FindingSeverity = Literal["info", "warn", "error", "critical"]

#: What a role mends.
PROVISION = "`v100ctl provision`"
#: What mends that which only hashes, or Ansible's own check mode, tell.
DEEP_FIX = "`v100ctl audit --deep --fix`"
#: The key of ``host.json`` that holds the digest of all the rest of it.
SEAL = "digest"


@dataclass(frozen=True)
class Finding:
    """One difference.

    ``kind``: *drifted* when the host no longer is what was applied, *pending* when the plan has moved on since, *external* when
    it is not ours but harmful. Roles mend what is drifted or pending, and leave alone what is external. ``fix`` says what mends
    it. ``restarts`` names the instances that mending it restarts.
    """

    id: str
    kind: Kind
    layer: Layer
    role: str
    expected: str
    actual: str
    severity: FindingSeverity
    fix: str
    instance: str | None = None
    restarts: tuple[str, ...] = ()


def seal(document: Mapping[str, Any]) -> str:
    """The digest of a ``host.json`` without the digest itself, as 16 hexadecimal characters."""
    rest = {key: value for key, value in document.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Applied:
    """What ``host.json`` says was applied. Whoever changes a host can change that file too: it only decides what a difference is
    called, never whether there is one.

    ``edited``: it is not what a run has written, so that nothing in it is believed.
    """

    document: Mapping[str, Any]
    edited: bool = False

    @classmethod
    def read(cls, document: Mapping[str, Any] | None, problem: str) -> Applied:
        """From what the probe found: the document, or why it cannot be read (empty where there is none)."""
        if document is None:
            return cls({}, edited=bool(problem))
        # Runs of earlier versions have left no seal.
        if SEAL in document and document[SEAL] != seal(document):
            return cls({}, edited=True)
        return cls(document)

    def __bool__(self) -> bool:
        return self.edited or bool(self.document)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A part of the document that is a mapping; a damaged one is as good as none."""
        value = self.document.get(key)
        return value if isinstance(value, Mapping) else {}

    def names(self, key: str, field: str) -> set[str]:
        """The ``field`` of each entry of a list in the document."""
        entries = self.document.get(key)
        if not isinstance(entries, list):
            return set()
        return {str(entry[field]) for entry in entries if isinstance(entry, Mapping) and field in entry}

    def words(self, key: str) -> set[str]:
        """The texts of a list in the document."""
        entries = self.document.get(key)
        return {entry for entry in entries if isinstance(entry, str)} if isinstance(entries, list) else set()

    def instance(self, name: str) -> Mapping[str, Any]:
        """What was applied for an instance; empty where nothing was."""
        value = self.mapping("instances").get(name)
        return value if isinstance(value, Mapping) else {}

    def file(self, path: str) -> Mapping[str, Any]:
        """The recorded hash, mode and owner of a file; empty where it was not applied."""
        value = self.mapping("files").get(path)
        return value if isinstance(value, Mapping) else {}

    def kind(self, was_applied: bool) -> Kind:
        """What the lack of something is called that was applied, or that was not."""
        return "drifted" if was_applied or self.edited else "pending"
