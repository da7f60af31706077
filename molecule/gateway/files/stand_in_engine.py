"""A small streaming HTTP server in an engine's place: the gateway's own tests need none that computes.

`GET /stream?until=FILE` sends a number every tenth of a second, until there is such a file, and then `end`. `/headers` answers
with the headers that say who asks.
"""

import itertools
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class Handler(BaseHTTPRequestHandler):
    """`GET /health`, `GET /stream` and `/headers`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """One answer, whole or in pieces."""
        url = urlsplit(self.path)
        if url.path == "/health":
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if url.path == "/headers":
            self._say_who_asks()
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        last = Path(parse_qs(url.query)["until"][0])
        for number in itertools.count():
            word = b"end" if last.exists() else b"%d" % number
            self.wfile.write(b"%x\r\n%s\n\r\n" % (len(word) + 1, word))
            self.wfile.flush()
            if word == b"end":
                break
            time.sleep(0.1)
        self.wfile.write(b"0\r\n\r\n")

    def do_POST(self) -> None:
        """The headers, whatever is sent."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say_who_asks()

    do_OPTIONS = do_GET

    def _say_who_asks(self) -> None:
        body = json.dumps({name: self.headers.get_all(name, []) for name in ("Authorization", "x-api-key")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
