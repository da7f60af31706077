"""A small HTTP server in an engine's place: the role's own tests need none that computes.

It speaks the two paths that the role uses, and with `--key-file` to nobody who does not present a key of that file. `--fail`
makes it complain and exit, as an engine does that cannot read its model; `--load` leaves it loading for ever.
"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """`GET /health` and `POST /v1/chat/completions`."""

    loading = False
    keys: frozenset[str] = frozenset()

    def _is_let_in(self) -> bool:
        allowed = not self.keys or self.headers.get("Authorization", "").removeprefix("Bearer ") in self.keys
        if not allowed:
            self.send_error(401)
        return allowed

    def _answer(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Healthy from the start, unless it shall go on loading."""
        if not self._is_let_in():
            return
        if self.path != "/health":
            self.send_error(404)
        elif self.loading:
            self.send_error(503)
        else:
            self._answer({"status": "ok"})

    def do_POST(self) -> None:
        """Every question has one answer, which names what was asked for."""
        if not self._is_let_in():
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": f"{asked['model']} is ready"}
        self._answer({"choices": [{"message": message}], "usage": {"completion_tokens": 3}})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key-file", type=Path)
    for flag in ("--fail", "--load"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.fail:
        sys.exit("error: failed to load model: it is not there")
    Handler.loading = options.load
    if options.key_file:
        Handler.keys = frozenset(options.key_file.read_text(encoding="ascii").split())
    HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
