"""Model headers over HTTP: ranges, servers without them, redirects, and connections that break, drip or lie."""

from __future__ import annotations

import contextlib
import http.server
import re
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.unit.models import making
from tests.unit.models.making import ARCHITECTURE, ARRAY, STRING, U32, by_hand, key, tensor, text
from v100ctl.models.http import read_url, shown_url
from v100ctl.models.local import read_local
from v100ctl.models.source import Budget, ModelHeaderError, ModelMissingError


@dataclass
class Site:
    """What a server does; changed by tests while it runs."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    length: bool = True
    redirect_to: str = ""
    status: int = 0
    broken_answers: int = 0
    drip_s: float = 0.0
    other_range: bool = False
    encoding: str = ""
    #: Zeros that follow a file's content.
    more_bytes: int = 0
    sent_bytes: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0].lstrip("/")
            made.requests.append((path, self.headers.get("Range", "")))
            if made.redirect_to and path.startswith("old/"):
                self.send_response(302)
                self.send_header("Location", made.redirect_to + path.removeprefix("old/"))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if made.status or path not in made.files:
                self.send_response(made.status or 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = made.files[path]
            size = len(content) + made.more_bytes
            begin, end = 0, size - 1
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted and made.ranges:
                begin, end = int(wanted[1]) + made.other_range, min(int(wanted[2]), size - 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
            else:
                self.send_response(200)
            if made.encoding:
                self.send_header("Content-Encoding", made.encoding)
            if made.length:
                self.send_header("Content-Length", str(end + 1 - begin))
            else:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            if made.broken_answers:
                made.broken_answers -= 1
                self.wfile.write(content[begin : begin + 1000])
                self.close_connection = True
                return
            while begin <= end:
                block = content[begin : min(begin + (1 if made.drip_s else 65536), end + 1)] or bytes(min(65536, end + 1 - begin))
                self.wfile.write(block)
                self.wfile.flush()
                made.sent_bytes += len(block)
                begin += len(block)
                time.sleep(made.drip_s)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        made.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture(scope="module")
def vocabulary() -> bytes:
    """A header of about 6 MB: 200,000 tokens and as many merges, then one tensor of 20 GB."""
    tokens = struct.pack("<IQ", STRING, 200_000) + b"".join(text(f"tok{number}") for number in range(200_000))
    keys = [ARCHITECTURE, *(key(f"tokenizer.ggml.{name}", ARRAY, tokens) for name in ("tokens", "merges"))]
    return by_hand(keys, [tensor("a", [4096, 1_220_703], 0, 0)])


WEIGHTS_BYTES = 4096 * 1_220_703 * 4


def test_a_file_of_20_gb_takes_a_few_mb_and_round_trips(site: Site, vocabulary: bytes) -> None:
    site.files["m.gguf"] = vocabulary
    site.more_bytes = WEIGHTS_BYTES
    header = read_url(site.url("m.gguf"))
    assert header.array_lengths == {"tokenizer.ggml.tokens": 200_000, "tokenizer.ggml.merges": 200_000}
    assert header.file_bytes == len(vocabulary) + WEIGHTS_BYTES
    assert len(site.requests) <= 4
    assert site.sent_bytes <= len(vocabulary) + (4 << 20)


def test_a_small_file_takes_one_request(site: Site, tmp_path: Path) -> None:
    making.dense(tmp_path / "tiny.gguf")
    site.files["tiny.gguf"] = (tmp_path / "tiny.gguf").read_bytes()
    assert read_url(site.url("tiny.gguf?download=true")) == read_local(tmp_path / "tiny.gguf")
    assert site.requests == [("tiny.gguf", "bytes=0-1048575")]


@pytest.mark.parametrize("length", [True, False])
def test_a_server_without_ranges_is_read_from_the_beginning(site: Site, vocabulary: bytes, length: bool) -> None:
    site.files["m.gguf"] = vocabulary
    site.ranges, site.length, site.more_bytes = False, length, WEIGHTS_BYTES
    header = read_url(site.url("m.gguf"))
    assert header.array_lengths["tokenizer.ggml.merges"] == 200_000
    assert header.file_bytes == len(vocabulary) + WEIGHTS_BYTES
    assert len(site.requests) == 1


def test_a_server_without_ranges_does_not_send_everything(site: Site) -> None:
    long_array = key("x", ARRAY, struct.pack("<IQ", U32, 30 << 20))
    site.files["m.gguf"] = by_hand([ARCHITECTURE, long_array], key_count=3)
    site.ranges, site.more_bytes = False, 20 << 30
    with pytest.raises(ModelHeaderError, match="cannot be read by parts, and its header needs more than 64 MiB") as caught:
        read_url(site.url("m.gguf"))
    assert "from_controller" in (caught.value.hint or "")
    assert site.sent_bytes < Budget.MAX_READ_BYTES


def test_redirects_are_followed_once(site: Site, vocabulary: bytes) -> None:
    site.files["new/m.gguf"] = vocabulary
    site.redirect_to, site.more_bytes = site.url("new/"), WEIGHTS_BYTES
    read_url(site.url("old/m.gguf"))
    assert [path for path, _ in site.requests].count("old/m.gguf") == 1


def test_parts_are_found_beside_the_first(site: Site, tmp_path: Path) -> None:
    first = making.split(tmp_path)
    site.files |= {f"models/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    assert read_url(site.url(f"models/{first.name}?download=true")) == read_local(first)
    del site.files["models/split-00003-of-00003.gguf"]
    with pytest.raises(ModelMissingError, match="1 of 3 parts missing: `split-00003"):
        read_url(site.url(f"models/{first.name}"))


@pytest.mark.parametrize(
    "address", ["org/Qwen2.5-7B/resolve/main", "org/Qwen2.5-7B", "org/Qwen2.5-7B/", "org/Qwen2.5-7B/config.json"]
)
def test_a_folder_is_found_by_any_address(address: str, site: Site, tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    base = address.removesuffix("config.json").rstrip("/")
    site.files |= {f"{base}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    assert read_url(site.url(address)) == read_local(folder)


def test_a_connection_that_breaks_is_tried_again(site: Site, vocabulary: bytes) -> None:
    site.files["m.gguf"] = vocabulary
    site.broken_answers, site.more_bytes = 2, WEIGHTS_BYTES
    assert read_url(site.url("m.gguf")).array_lengths["tokenizer.ggml.tokens"] == 200_000
    site.broken_answers = 100
    with pytest.raises(ModelHeaderError, match="was cut off: the answer ended too early"):
        read_url(site.url("m.gguf"))


def test_a_server_that_drips_is_given_up(site: Site, vocabulary: bytes) -> None:
    site.files["m.gguf"] = vocabulary
    site.drip_s = 0.05
    with pytest.raises(ModelHeaderError, match=r"did not come within 0\.5 s"):
        read_url(site.url("m.gguf"), timeout_s=0.5)


@pytest.mark.parametrize(
    ("status", "pattern"),
    [
        (401, "the server answered 401"),
        (403, "the server answered 403"),
        (404, "does not exist: the server answered 404"),
        (416, "is empty"),
        (500, "was cut off: the server answered 500"),
    ],
)
def test_refusals_are_said(site: Site, status: int, pattern: str) -> None:
    site.status = status
    with pytest.raises(ModelHeaderError, match=pattern):
        read_url(site.url("m.gguf"))


def test_a_server_that_sends_another_part_is_refused(site: Site, vocabulary: bytes) -> None:
    site.files["m.gguf"] = vocabulary
    site.other_range = True
    with pytest.raises(ModelHeaderError, match="sent another part"):
        read_url(site.url("m.gguf"))
    site.other_range, site.encoding = False, "gzip"
    with pytest.raises(ModelHeaderError, match="comes compressed"):
        read_url(site.url("m.gguf"))


def test_a_page_instead_of_a_model_is_refused(site: Site) -> None:
    site.files["m.gguf"] = b"<!DOCTYPE html><html></html>"
    with pytest.raises(ModelHeaderError, match="a web page"):
        read_url(site.url("m.gguf"))


def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(ModelHeaderError, match="refused"):
        read_url("http://127.0.0.1:1/m.gguf")


def test_secrets_in_an_address_are_not_shown() -> None:
    assert shown_url("https://me:secret@models.example/a/m.gguf?token=secret") == "https://models.example/a/m.gguf"
