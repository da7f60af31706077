"""known_hosts: read, matched and written as OpenSSH does it."""

from __future__ import annotations

import base64
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.probe import known_hosts

KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519some key").decode()
OTHER = base64.b64encode(b"\0\0\0\x0bssh-ed25519another").decode()
FILE = Path("known_hosts")


def entry(names: str) -> known_hosts.KnownHost:
    (found,) = known_hosts.parse(f"{names} ssh-ed25519 {KEY}\n", FILE)
    return found


@pytest.mark.parametrize(
    ("names", "name", "matches"),
    [
        ("web1", "web1", True),
        ("web1", "WEB1", True),
        ("Web1", "web1", True),
        ("web1", "web10", False),
        ("web1,10.0.0.1", "10.0.0.1", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("web?", "web1", True),
        ("web?", "web12", False),
        ("*,!bad", "good", True),
        ("*,!bad", "bad", False),
        ("!bad,*", "bad", False),
        ("!bad", "good", False),
        ("[web1]:2222", "[web1]:2222", True),
        ("[web1]:2222", "web1", False),
        ("web1", "[web1]:2222", False),
        ("[web[12]]:22", "[web1]:22", False),
        ("::1", "::1", True),
    ],
)
def test_names(names: str, name: str, matches: bool) -> None:
    assert entry(names).matches(name) is matches


@given(st.from_regex(r"[A-Za-z0-9.:\[\]-]{1,40}", fullmatch=True), st.from_regex(r"[a-z0-9.-]{1,40}", fullmatch=True))
def test_hashed_names(name: str, other: str) -> None:
    hashed = entry(known_hosts.hash_name(name))
    assert hashed.matches(name)
    assert hashed.matches(name.upper())
    assert hashed.matches(other) is (name.lower() == other)


@pytest.mark.parametrize("names", ["|1|", "|1|x", "|1|!!|??", "|1|YQ==|YQ==|YQ==", "|2|YQ==|YQ=="])
def test_broken_hashes_match_nothing(names: str) -> None:
    assert not entry(names).matches("web1")


def test_lines_keep_their_numbers_and_markers() -> None:
    text = "\n".join(
        [
            "# comment",
            "",
            f"web1 ssh-ed25519 {KEY} a comment",
            f"@revoked * ssh-ed25519 {OTHER}",
            f"\t@cert-authority *.example.org ssh-ed25519 {KEY}",
            f"@unknown web1 ssh-ed25519 {KEY}",
            "web1 ssh-ed25519 not-base64!",
            "web1 ssh-ed25519",
            "@revoked",
        ]
    )
    found = [(entry.line, entry.marker, entry.names) for entry in known_hosts.parse(text, FILE)]
    assert found == [(3, "", "web1"), (4, "@revoked", "*"), (5, "@cert-authority", "*.example.org")]
    assert known_hosts.parse(text, FILE)[0].place == "known_hosts:3"


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    for found in known_hosts.parse(text, FILE):
        found.matches("web1")


def test_lookup_names() -> None:
    assert known_hosts.lookup_name("web1", 22) == "web1"
    assert known_hosts.lookup_name("web1", 2222) == "[web1]:2222"


def test_what_cannot_be_read_holds_no_entries(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text(f"web1 ssh-ed25519 {KEY}\n")
    assert known_hosts.load([tmp_path / "none", tmp_path, Path("/dev/null"), Path("/dev/zero")]) == []
    assert [found.names for found in known_hosts.load([tmp_path / "none", good])] == ["web1"]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("before", [None, "", f"old ssh-ed25519 {OTHER}\n", f"unfinished ssh-ed25519 {OTHER}"])
def test_a_key_that_was_appended_is_found_again(tmp_path: Path, before: str | None, hashed: bool) -> None:
    path = tmp_path / "new" / "known_hosts"
    if before is not None:
        path.parent.mkdir()
        path.write_text(before)
    known_hosts.append(path, ["[web1]:2222"], "ssh-ed25519", base64.b64decode(KEY), hashed=hashed)
    found = known_hosts.load([path])
    assert len(found) == (2 if before else 1)
    assert found[-1].matches("[web1]:2222")
    assert found[-1].key == base64.b64decode(KEY)
    assert path.read_text().endswith("\n")
    assert ("web1" in path.read_text()) is not hashed
    if before is None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_openssh_finds_what_was_written(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key_file)], check=True)
    key_type, encoded = (tmp_path / "key.pub").read_text().split()[:2]
    key = base64.b64decode(encoded)
    known_hosts.append(tmp_path / "kh", ["[web1]:2222"], key_type, key, hashed=True)
    known_hosts.append(tmp_path / "kh", ["web2"], key_type, key)
    for name in ("[web1]:2222", "web2"):
        subprocess.run(["ssh-keygen", "-F", name, "-f", str(tmp_path / "kh")], check=True, capture_output=True)
    shown = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], check=True, capture_output=True, text=True)
    assert known_hosts.fingerprint(key) in shown.stdout


def test_it_reads_what_openssh_has_hashed(tmp_path: Path) -> None:
    path = tmp_path / "kh"
    path.write_text(f"web1 ssh-ed25519 {KEY}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(path)], check=True, capture_output=True)
    (found,) = known_hosts.load([path])
    assert found.names.startswith("|1|")
    assert found.matches("web1")
    assert not found.matches("web2")
