"""Answers: what counts as one, and how a question travels."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from v100ctl.paths import content_dir
from v100ctl.serving import PROOF_MAX_TOKENS, PROOF_PROMPT, PROOF_TIMEOUT_S, ServingError, ask, judge_completion


def test_the_role_asks_what_the_cli_asks() -> None:
    defaults = yaml.safe_load((content_dir() / "roles/llm_server/defaults/main.yml").read_text(encoding="utf-8"))
    names = ("llm_server_proof_prompt", "llm_server_proof_max_tokens", "llm_server_proof_timeout_s")
    assert [defaults[name] for name in names] == [PROOF_PROMPT, PROOF_MAX_TOKENS, PROOF_TIMEOUT_S]


def answer(text: str | None, **extra: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"completion_tokens": 7}, **extra}


@pytest.mark.parametrize("text", ["ready", "A GPU is a processor.", "!!!", "はい", "a a b"])
def test_real_answers_are_accepted(text: str) -> None:
    verdict = judge_completion(answer(text, timings={"predicted_per_second": 31.256}))
    assert verdict == {"ok": True, "reason": "", "text": text, "tokens": 7, "tokens_per_second": 31.26}


def test_a_reasoning_model_may_answer_in_its_thoughts() -> None:
    response = {"choices": [{"message": {"content": "", "reasoning_content": "The user asks"}}]}
    assert judge_completion(response)["ok"]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (answer(""), "empty"),
        (answer(None), "empty"),
        (answer(" \n\t"), "empty"),
        (answer("!" * 16), "repeated 16 times"),
        (answer("! " * 16), "repeated 16 times"),
        ({}, "empty"),
        ({"choices": []}, "empty"),
        ({"choices": "x", "usage": 3, "timings": []}, "empty"),
        ({"error": {"message": "context full"}}, "context full"),
        ({"error": "boom"}, "boom"),
    ],
)
def test_what_is_no_answer_is_said(response: dict[str, Any], reason: str) -> None:
    verdict = judge_completion(response)
    assert not verdict["ok"]
    assert reason in verdict["reason"]


class _Server(http.server.BaseHTTPRequestHandler):
    reply: bytes = b""
    status = 200
    requests: list[dict[str, Any]] = []  # noqa: RUF012 - the handler class is the server's only state

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.requests.append(json.loads(self.rfile.read(length)))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.reply)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class _Loopback:
    def open_tcp(self, address: str, port: int) -> socket.socket:
        return socket.create_connection((address, port), timeout=5)


@pytest.fixture
def server() -> Iterator[tuple[type[_Server], dict[str, Any]]]:
    handler = type("Handler", (_Server,), {"requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}/v1/chat/completions"
        yield handler, {"name": "chat", "unit": "v100-chat.service", "completion_url": url, "model_alias": "tiny"}
        running.shutdown()


def test_a_question_is_asked_and_answered(server: tuple[type[_Server], dict[str, Any]]) -> None:
    handler, instance = server
    handler.reply = json.dumps(answer(" A processor. ", timings={"predicted_per_second": 50})).encode()
    completion = ask(_Loopback(), instance, "What is a GPU?", max_tokens=5)
    assert (completion.text, completion.tokens, completion.tokens_per_second) == ("A processor.", 7, 50.0)
    (request,) = handler.requests
    assert request["messages"] == [{"role": "user", "content": "What is a GPU?"}]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("tiny", 5, 0.0)


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (200, b"not json", "not JSON"),
        (503, b'{"error": {"message": "Loading model"}}', "HTTP 503: the server answered with an error: Loading model"),
        (200, json.dumps(answer("!!!!!!!!!!")).encode(), "repeated"),
        (200, b"[]", "empty"),
    ],
)
def test_a_bad_answer_is_an_error(server: tuple[type[_Server], dict[str, Any]], status: int, reply: bytes, message: str) -> None:
    handler, instance = server
    handler.status, handler.reply = status, reply
    with pytest.raises(ServingError, match=message):
        ask(_Loopback(), instance, "?")


def test_nobody_listening_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    instance = {"name": "chat", "unit": "v100-chat.service", "completion_url": f"http://127.0.0.1:{port}/v1", "model_alias": "x"}
    with pytest.raises(ServingError, match="did not answer") as caught:
        ask(_Loopback(), instance, "?")
    assert "journalctl -u v100-chat.service" in (caught.value.hint or "")
