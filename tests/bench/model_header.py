#!/usr/bin/env python3
"""Reading the header of a sparse 20 GB GGUF file with 250,000 tokens and 400,000 merges, for `bench.py model-header`.

model_header.py --make FILE     write the file (some 14 MB of disk)
model_header.py FILE            read its header
model_header.py --http FILE     the same from a web server in this process; says how much was sent in how many answers
model_header.py --gguf FILE     the same by the `gguf` package's reader
"""

from __future__ import annotations

import http.server
import os
import re
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

FILE_BYTES = 20 * 10**9


def make(path: Path) -> None:
    """Write the file."""
    import struct

    from tests.unit.models.making import ARCHITECTURE, ARRAY, STRING, by_hand, key, tensor, text

    keys = [ARCHITECTURE]
    for name, count in (("tokens", 250_000), ("merges", 400_000)):
        strings = b"".join(text(f"token{number} x") for number in range(count))
        keys.append(key(f"tokenizer.ggml.{name}", ARRAY, struct.pack("<IQ", STRING, count) + strings))
    rows = FILE_BYTES // 500 // 4096 // 2
    entries = [tensor(f"blk.{number}.weight", [4096, rows], 1, number * rows * 4096 * 2) for number in range(500)]
    content = by_hand(keys, entries)
    path.write_bytes(content)
    os.truncate(path, len(content) + 500 * rows * 4096 * 2)


def over_http(path: Path) -> None:
    """Serve the file with ranges, and read it from there."""
    from v100ctl.models.http import read_url

    sent: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert wanted is not None
            begin, end = int(wanted[1]), int(wanted[2])
            with path.open("rb") as stream:
                stream.seek(begin)
                data = stream.read(end + 1 - begin)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end}/{path.stat().st_size}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            sent.append(len(data))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        header = read_url(f"http://127.0.0.1:{server.server_port}/{path.name}")
        server.shutdown()
    print(f"{len(header.tensors)} tensors, {sum(sent) / 1e6:.1f} MB in {len(sent)} answers")


def main() -> None:
    """Do as the arguments say."""
    *options, name = sys.argv[1:]
    path = Path(name)
    if options == ["--make"]:
        make(path)
    elif options == ["--http"]:
        over_http(path)
    elif options == ["--gguf"]:
        import gguf

        print(f"{len(gguf.GGUFReader(path).tensors)} tensors")
    else:
        from v100ctl.models.local import read_local

        print(f"{len(read_local(path).tensors)} tensors")


if __name__ == "__main__":
    main()
