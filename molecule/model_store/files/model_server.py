"""Serves models over HTTP, by ranges, and as they must not come.

`/cut` stops in the middle, `/large` does not fit a small disk. `/hub/...`
answers as a model hub does: it wants a token and redirects to `/storage/...`, which refuses one.
"""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_forTheHubAlone"  # noqa: S105 - made up, for this server
BODIES = {
    "/whole": b"whole",
    "/cut": b"cut",
    "/large": bytes(4 << 20),
    "/storage/model": b"from the hub",
    "/first": b"1",
    "/second": b"2",
}
asked: "dict[str, int]" = {}


class Handler(BaseHTTPRequestHandler):
    """`GET` only."""

    def do_GET(self) -> None:
        """Send what the path names."""
        asked[self.path] = asked.get(self.path, 0) + 1
        if self.path.startswith("/hub/"):
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.send_error(401)
                return
            storage = self.path.replace("/hub/", "/storage/")
            self.send_response(302)
            # Another name of this machine: another server, as far as a token goes.
            self.send_header("Location", f"http://localhost:8099{storage}")
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(BODIES[storage]).hexdigest()}"')
            self.end_headers()
            return
        if self.path.startswith("/storage/") and "Authorization" in self.headers:
            self.send_error(400)
            return
        body = BODIES[self.path]
        span = self.headers.get("Range")
        if span:
            first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
            last = min(last, len(body) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            body = body[first : last + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1] if self.path == "/cut" and len(body) > 1 else b"" if self.path == "/cut" else body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8099), Handler).serve_forever()
