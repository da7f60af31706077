"""The script with which the role nvidia_driver checks a repository's key."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/nvidia_driver/files/openpgp_fingerprints.py"
#: A key that GnuPG 2.2 made for this test, and what it said of it.
FINGERPRINT = "7E46A370A8ED65386F9BA996A9B36769B66734DF"
BODY = """\
mDMEawygjRYJKwYBBAHaRw8BAQdAjfsrVqYvwxdNqs+FG0ug/2KMX7IE1FugwA15
AchfYje0HnRlc3Qga2V5IDxrZXlAZXhhbXBsZS5pbnZhbGlkPoiQBBMWCAA4FiEE
fkajcKjtZThvm6mWqbNnabZnNN8FAmsMoI0CGwMFCwkIBwIGFQoJCAsCBBYCAwEC
HgECF4AACgkQqbNnabZnNN8OLAEA0GdeX56XVb8TqVVus6iyYMxKcUimeGXEDJ6a
Ffx1cnsBAO7KAYJm/1LoogMfAF2+mlYx1qZikDDuCv0BMVkV6g0H
"""
BEGIN, END = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n", "=muTB\n-----END PGP PUBLIC KEY BLOCK-----\n"
BINARY = base64.b64decode(BODY)


def told(*paths: Path) -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, str(SCRIPT), *map(str, paths)], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BEGIN}\n{BODY}{END}".encode(), [FINGERPRINT]),
        (f"{BEGIN}Version: GnuPG v2.0.22\n\n{BODY}{END}".replace("\n", "\r\n").encode(), [FINGERPRINT]),
        (f"{BEGIN}\n{BODY}{END}{BEGIN}\n{BODY}{END}".encode(), [FINGERPRINT, FINGERPRINT]),
        (BINARY, [FINGERPRINT]),
        (BINARY + BINARY, [FINGERPRINT, FINGERPRINT]),
        # The same first packet with a header of the new form.
        (b"\xc6\x33" + BINARY[2:], [FINGERPRINT]),
        (b"", []),
        (b"<html>not found</html>", []),
        (b"\x99", []),
        (f"{BEGIN}\n!!!\n{END}".encode(), []),
    ],
)
def test_files(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    assert told(path) == {str(path): expected}


def test_a_changed_key_has_another_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(BINARY[:30] + bytes([BINARY[30] ^ 1]) + BINARY[31:])
    assert told(path)[str(path)] != [FINGERPRINT]


def test_folders_are_read_and_what_is_missing_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "trusted.gpg.d"
    folder.mkdir()
    (folder / "a.gpg").write_bytes(BINARY)
    (folder / "b.asc").write_text("nothing")
    missing = tmp_path / "none"
    assert told(folder, missing) == {str(folder / "a.gpg"): [FINGERPRINT], str(folder / "b.asc"): [], str(missing): []}
