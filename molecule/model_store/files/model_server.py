"""Serves a model file over HTTP, also as it must not come: `/cut` stops in the middle, `/large` does not fit a small disk."""

from http.server import BaseHTTPRequestHandler, HTTPServer

BODIES = {"/whole": b"whole", "/cut": b"cut", "/large": bytes(4 << 20)}


class Handler(BaseHTTPRequestHandler):
    """`GET` only."""

    def do_GET(self) -> None:
        """Send what the path names."""
        body = BODIES[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + (1000 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", 8099), Handler).serve_forever()
