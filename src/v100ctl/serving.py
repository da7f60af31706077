"""Talk to a served model: one question, one judged answer. Used as the proof after a start and by ``try``."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from v100ctl.errors import V100ctlError

#: Short, and answerable by a model of any size; asked at temperature 0.
PROOF_PROMPT = "Reply with one short sentence: what is a GPU?"
PROOF_MAX_TOKENS = 24
#: A large model on a slow processor takes minutes to its first token.
PROOF_TIMEOUT_S = 300
#: Answers beyond this are cut: a server must not be able to fill the controller's memory.
_MAX_RESPONSE_BYTES = 4 * 1024 * 1024


class ServingError(V100ctlError):
    """A server did not answer, or its answer is not one."""


class TcpOpener(Protocol):
    """What reaches a port on the host's own loopback: a probe session."""

    def open_tcp(self, address: str, port: int) -> Any:
        """A connected, socket-like object."""


@dataclass(frozen=True)
class Completion:
    """One answer. ``tokens_per_second`` is the engine's own figure for decoding, ``elapsed_s`` the client's clock."""

    text: str
    tokens: int
    tokens_per_second: float | None
    elapsed_s: float


def judge_completion(response: Mapping[str, Any]) -> dict[str, Any]:
    """Is this response of ``/v1/chat/completions`` a real answer?

    A broken kernel or a bad quantisation still answers HTTP 200: with nothing, or with one character over and over.

    Args:
        response: The decoded JSON body.

    Returns:
        ``ok``, ``reason`` (empty when ok), ``text``, ``tokens`` and ``tokens_per_second`` (``None`` where the engine is silent).
    """
    text, tokens, speed = "", 0, None
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        message = choices[0].get("message")
        if isinstance(message, Mapping):
            # Reasoning models put their first tokens there, and a short proof may see nothing else.
            text = str(message.get("content") or message.get("reasoning_content") or "")
    usage = response.get("usage")
    if isinstance(usage, Mapping) and isinstance(usage.get("completion_tokens"), int):
        tokens = int(usage["completion_tokens"])
    timings = response.get("timings")
    if isinstance(timings, Mapping) and isinstance(timings.get("predicted_per_second"), int | float):
        speed = round(float(timings["predicted_per_second"]), 2)
    visible = "".join(text.split())
    reason = ""
    if "error" in response:
        error = response["error"]
        reason = f"the server answered with an error: {error.get('message') if isinstance(error, Mapping) else error}"
    elif not visible:
        reason = "the answer is empty"
    elif len(visible) >= 8 and len(set(visible)) == 1:
        reason = f"the answer is {visible[0]!r} repeated {len(visible)} times: the model's arithmetic is broken on this hardware"
    return {"ok": not reason, "reason": reason, "text": text, "tokens": tokens, "tokens_per_second": speed}


def ask(
    session: TcpOpener,
    instance: Mapping[str, Any],
    prompt: str,
    *,
    max_tokens: int = 128,
    timeout_s: float = PROOF_TIMEOUT_S,
    temperature: float = 0.0,
    api_key: str | None = None,
) -> Completion:
    """Ask an instance one question over the host's loopback.

    Args:
        session: An open session on the host.
        instance: The instance as in the plan: ``name``, ``unit``, ``completion_url`` and ``model_alias`` are used.
        prompt: The user's message.
        max_tokens: Most tokens of the answer.
        timeout_s: Most time without a word from the server.
        temperature: 0 is greedy and repeatable.
        api_key: What opens the instance, where it asks for a key (:func:`v100ctl.plan.keys.first_keys`).

    Raises:
        ServingError: no answer, not HTTP 200, or not a real answer (:func:`judge_completion`).
    """
    url = urlsplit(str(instance["completion_url"]))
    name = str(instance["name"])
    body = json.dumps(
        {
            "model": instance["model_alias"],
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": 1,
        }
    )
    started_s = time.monotonic()
    try:
        channel = session.open_tcp(url.hostname or "127.0.0.1", url.port or 80)
        channel.settimeout(timeout_s)
        connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port or 80, timeout=timeout_s)
        connection.sock = cast(socket.socket, channel)
        try:
            shown = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            connection.request("POST", url.path, body=body, headers={"Content-Type": "application/json", **shown})
            response = connection.getresponse()
            payload = response.read(_MAX_RESPONSE_BYTES)
            status = response.status
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, EOFError) as error:
        raise ServingError(
            f"{name} did not answer on {url.netloc}: {str(error) or type(error).__name__}",
            hint=f"`journalctl -u {instance['unit']}` on the host",
        ) from error
    elapsed_s = time.monotonic() - started_s
    try:
        document = json.loads(payload)
    except ValueError as error:
        raise ServingError(f"{name} answered HTTP {status} with something that is not JSON") from error
    verdict = judge_completion(document if isinstance(document, dict) else {})
    if status != 200 or not verdict["ok"]:
        raise ServingError(f"{name} answered HTTP {status}: {verdict['reason'] or payload[:200].decode(errors='replace')}")
    return Completion(str(verdict["text"]).strip(), int(verdict["tokens"]), verdict["tokens_per_second"], elapsed_s)
