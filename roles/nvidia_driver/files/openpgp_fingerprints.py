"""Fingerprints of the OpenPGP keys in files, as JSON: path -> list. Needs nothing but Python 3.8; no GnuPG, no network.

A path may be a folder, whose files are read. A file that is missing or holds no key has an empty list. Reads armoured and binary
key files (RFC 4880, sections 4.2 packet headers, 6.2 armour, 12.2 fingerprints of version 4 keys); the keybox format of newer
GnuPG is not read, and apt does not either.
"""

import base64
import binascii
import hashlib
import json
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PUBLIC_KEY = 6
MAX_BYTES = 4 << 20


def dearmor(raw: bytes) -> bytes:
    """Binary key material of a file that may be armoured, all its blocks one after the other."""
    if b"-----BEGIN PGP PUBLIC KEY BLOCK-----" not in raw:
        return raw
    found = b""
    for block in raw.split(b"-----BEGIN PGP PUBLIC KEY BLOCK-----")[1:]:
        body = block.partition(b"-----END")[0].replace(b"\r", b"")
        # Headers end with an empty line, the checksum's line begins with an equals sign.
        lines = body.partition(b"\n\n")[2].split(b"\n")
        found += base64.b64decode(b"".join(line.strip() for line in lines if not line.startswith(b"=")))
    return found


def packets(data: bytes) -> "Iterator[tuple[int, bytes]]":
    """Tag and body of each packet."""
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            return
        at += 1
        if head & 0x40:
            tag, first = head & 0x3F, data[at]
            if first < 192:
                length, at = first, at + 1
            elif first < 224:
                length, at = ((first - 192) << 8) + data[at + 1] + 192, at + 2
            elif first == 255:
                length, at = int.from_bytes(data[at + 1 : at + 5], "big"), at + 5
            else:
                return
        else:
            tag, size = (head >> 2) & 0x0F, 1 << (head & 3)
            if size == 8:
                return
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        yield tag, data[at : at + length]
        at += length


def fingerprints(raw: bytes) -> "list[str]":
    """Those of the primary keys."""
    found = []
    try:
        for tag, body in packets(dearmor(raw)):
            if tag == PUBLIC_KEY and body[:1] == b"\x04":
                name = b"\x99" + len(body).to_bytes(2, "big") + body
                digest = hashlib.sha1(name)  # noqa: S324 - the standard fixes it; it names a key and secures nothing by itself
                found.append(digest.hexdigest().upper())
    except (IndexError, binascii.Error):
        return []
    return found


def main(paths: "list[str]") -> None:
    """Print what each file holds."""
    files = []
    for name in paths:
        files += sorted(Path(name).iterdir()) if Path(name).is_dir() else [Path(name)]
    found = {}
    for path in files:
        try:
            with path.open("rb") as file:
                found[str(path)] = fingerprints(file.read(MAX_BYTES))
        except OSError:
            found[str(path)] = []
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
