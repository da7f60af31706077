#!/usr/bin/env python3
"""Serve a folder over HTTP, and be a proxy to it as `mirror.example` and to the rest of the world. Runs on a lab host.

Each request's line is appended to a file, so that a test sees who came through the proxy.
"""

import http.server
import shutil
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

FOLDER, PORT, LOG = sys.argv[1], int(sys.argv[2]), sys.argv[3]
OWN = ("", "mirror.example", f"127.0.0.1:{PORT}")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of the folder for its own names; others are fetched from where they are."""

    def __init__(self, *arguments):
        super().__init__(*arguments, directory=FOLDER)

    def do_GET(self):
        """Answer one request."""
        with open(LOG, "a", encoding="utf-8") as log:  # noqa: PTH123  (the name came as a word)
            log.write(self.requestline + "\n")
        address = urlsplit(self.path)
        if address.netloc in OWN:
            self.path = address.path
            super().do_GET()
            return
        try:
            with urllib.request.urlopen(self.path, timeout=60) as answer:  # noqa: S310  (a proxy fetches what it is asked for)
                self.send_response(answer.status)
                self.send_header("Content-Length", answer.headers["Content-Length"])
                self.end_headers()
                shutil.copyfileobj(answer, self.wfile)
        except urllib.error.HTTPError as error:
            self.send_error(error.code)


http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
