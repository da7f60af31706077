"""A server that talks like llama.cpp's, with speeds and faults as a test wants them. It computes nothing; its clock is real."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """How the server behaves. ``words`` are said one a token, over and over."""

    api: str = "llama_cpp"
    prefill_tps: float = 200000.0
    decode_tps: float = 4000.0
    #: The engine's own figure, as a multiple of the truth.
    boast: float = 1.0
    key: str = ""
    words: tuple[str, ...] = ("a ", "small ", "boat ", "on ", "the ", "river ")
    stops_after: int | None = None
    status: int = 200
    busy: int = 0
    drafts: int = 0
    tokenizer: bool = True
    #: How far the next token's probabilities are from those of a stand-in with 0.
    skew: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


class StandIn:
    """The server, on a port of its own; use as a context manager."""

    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self.behaviour))
        self._server.daemon_threads = True
        # Sixteen clients come at once.
        self._server.socket.listen(128)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(how: Behaviour) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Tests speak for themselves."""

        def _answer(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> dict[str, Any]:
            document: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            return document

        def do_GET(self) -> None:
            slots = [{"id": number, "is_processing": number < how.busy} for number in range(4)]
            if self.path == "/health":
                self._answer(200, {"status": "ok"})
            else:
                self._answer(200 if self.path == "/slots" else 404, slots)

        def do_POST(self) -> None:
            body = self._body()
            how.keys.append(self.headers.get("Authorization", ""))
            if how.key and self.headers.get("Authorization") != f"Bearer {how.key}":
                self._answer(401, {"error": {"message": "Invalid API Key"}})
            elif self.path == "/tokenize":
                text = str(body.get("content", body.get("prompt", "")))
                known = {"tokens": [5 + ord(letter) for letter in text[::4]]}
                self._answer(200 if how.tokenizer else 404, known if how.tokenizer else {})
            elif how.status != 200:
                self._answer(how.status, {"error": {"message": "out of memory"}})
            elif body.get("n_probs"):
                rows = [{"id": number, "logprob": -1.0 - number * (1 + how.skew)} for number in range(8)]
                self._answer(200, {"completion_probabilities": [{"top_logprobs": rows}]})
            elif self.path == "/v1/chat/completions" and not body.get("stream"):
                message = {"role": "assistant", "content": "A small boat on the river."}
                self._answer(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 7}})
            else:
                how.asked.append(body)
                self._stream(body)

        def _say(self, event: Any) -> None:
            data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _stream(self, body: dict[str, Any]) -> None:
            prompt = body["prompt"]
            size = len(prompt) if isinstance(prompt, list) else len(prompt) // 4
            wanted = int(body.get("n_predict") or body.get("max_tokens"))
            count = min(wanted, how.stops_after or wanted)
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(size / how.prefill_tps)
            began_s = time.monotonic()
            for number in range(count):
                # To the moment at which the token is due, not from the last: waits must not add up.
                time.sleep(max(0.0, began_s + number / how.decode_tps - time.monotonic()))
                word = how.words[number % len(how.words)] if how.words else ""
                if how.api == "llama_cpp":
                    self._say({"content": word, "tokens": [number], "stop": False})
                else:
                    self._say({"choices": [{"text": word}]})
            spent_ms = (time.monotonic() - began_s) * 1000 / how.boast
            if how.api == "llama_cpp":
                timings: dict[str, Any] = {"prompt_n": size, "prompt_ms": size / how.prefill_tps * 1000}
                timings |= {"predicted_n": count, "predicted_ms": spent_ms}
                timings |= {"draft_n": how.drafts, "draft_n_accepted": how.drafts // 2} if how.drafts else {}
                self._say({"content": "", "tokens": [], "stop": True, "tokens_evaluated": size, "timings": timings})
            else:
                self._say({"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": count}})
                self._say(b"[DONE]")
            self.wfile.write(b"0\r\n\r\n")

    return Handler
