"""``known_hosts`` files: what sshd(8) says about their format, with the file and line of every entry.

paramiko reads these files too, but keeps neither line numbers nor markers, and a refusal has to name the line.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: Far more than anybody keeps; a larger file is not what it says it is.
MAX_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class KnownHost:
    """One line of a ``known_hosts`` file."""

    path: Path
    line: int
    marker: Literal["", "@revoked", "@cert-authority"]
    names: str
    key_type: str
    key: bytes

    @property
    def place(self) -> str:
        """``file:line``, for messages."""
        return f"{self.path}:{self.line}"

    def matches(self, name: str) -> bool:
        """Whether this line is about ``name`` (``host``, or ``[host]:port`` for another port than 22)."""
        if self.names.startswith("|1|"):
            return _matches_hash(self.names, name)
        found = False
        for pattern in self.names.lower().split(","):
            if _matches_pattern(pattern.removeprefix("!"), name.lower()):
                # One negated pattern that fits rules the whole line out.
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def _matches_pattern(pattern: str, name: str) -> bool:
    # Only `*` and `?` are wild; brackets are literal, so fnmatch does not do.
    wild = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in pattern)
    return bool(pattern) and re.fullmatch(wild, name, re.DOTALL) is not None


def _matches_hash(hashed: str, name: str) -> bool:
    try:
        _, _, salt, digest = hashed.split("|")
        expected = base64.b64decode(digest, validate=True)
        key = base64.b64decode(salt, validate=True)
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(expected, _digest(key, name))


def _digest(salt: bytes, name: str) -> bytes:
    return hmac.new(salt, name.lower().encode(), hashlib.sha1).digest()


def hash_name(name: str) -> str:
    """``name`` as ``HashKnownHosts yes`` writes it."""
    salt = secrets.token_bytes(20)
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(_digest(salt, name)).decode()}"


def lookup_name(host: str, port: int) -> str:
    """The name under which a host's key is kept."""
    return host if port == 22 else f"[{host}]:{port}"


def parse(text: str, path: Path) -> list[KnownHost]:
    """All lines that are entries; comments and what cannot be read are left out, as ``ssh`` does."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        marker: Literal["", "@revoked", "@cert-authority"] = ""
        if fields and fields[0] in ("@revoked", "@cert-authority"):
            marker = "@revoked" if fields[0] == "@revoked" else "@cert-authority"
            fields = fields[1:]
        if len(fields) < 3 or fields[0].startswith(("#", "@")):
            continue
        try:
            key = base64.b64decode(fields[2], validate=True)
        except (ValueError, binascii.Error):
            continue
        if key:
            entries.append(KnownHost(path, number, marker, fields[0], fields[1], key))
    return entries


def load(paths: Iterable[Path]) -> list[KnownHost]:
    """The entries of all files that can be read, in their order."""
    entries = []
    for path in paths:
        try:
            # A FIFO or device (`/dev/null` is a usual one) holds no entries, and opening it might wait for ever.
            if not path.is_file():
                continue
            with path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES)
        except OSError:
            continue
        entries += parse(raw.decode("utf-8", "replace"), path)
    return entries


def fingerprint(key: bytes) -> str:
    """``SHA256:...``, as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def append(path: Path, names: Sequence[str], key_type: str, key: bytes, *, hashed: bool = False) -> None:
    """Add a key in one write, so that several at once cannot mix; makes file (0600) and folder (0700) where they are missing.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    encoded = base64.b64encode(key).decode()
    lines = (
        [f"{hash_name(name)} {key_type} {encoded}\n" for name in names]
        if hashed
        else [f"{','.join(names)} {key_type} {encoded}\n"]
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size_bytes = os.fstat(descriptor).st_size
        # A last line without its end would swallow ours.
        unfinished = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
        data = ("\n" * unfinished + "".join(lines)).encode()
        if os.write(descriptor, data) != len(data):
            raise OSError("disk full")
    finally:
        os.close(descriptor)
