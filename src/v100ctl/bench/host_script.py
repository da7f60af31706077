"""Measures a served model from beside it. Prints one JSON object; changes nothing on the host.

Runs on the host with its own Python (3.8 or later), so that the client's clock measures the server and no network. One call is
one phase: a list of requests, one after the other or several at once, with what the cards did meanwhile. What the numbers mean is
decided by who called; here they are only taken. Text is sent as token numbers where the server has a tokenizer to ask, so that a
prompt has exactly as many as was wanted.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import math
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterable
from urllib.parse import urlsplit

SMI_TIMEOUT_S = 30
#: What of a card is looked at; every branch from 470 on knows these.
CARD_FIELDS = (
    ("uuid", "uuid"),
    ("name", "name"),
    ("temperature_c", "temperature.gpu"),
    ("memory_temperature_c", "temperature.memory"),
    ("sm_clock_mhz", "clocks.sm"),
    ("max_sm_clock_mhz", "clocks.max.sm"),
    ("memory_clock_mhz", "clocks.mem"),
    ("power_w", "power.draw"),
    ("power_limit_w", "power.limit"),
    ("utilization_percent", "utilization.gpu"),
    ("memory_used_mib", "memory.used"),
    ("throttle_mask", "clocks_throttle_reasons.active"),
)
#: How often the cards are asked while requests run.
SAMPLE_EVERY_S = 1.0
#: How often and how long it is waited for a card to come to rest.
REST_LOOKS, REST_WAIT_S = 3, 1.5
CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
MAX_LINE_BYTES = 4 * 1024**2
MAX_BODY_BYTES = 64 * 1024**2
#: Four letters a token is usual for English; a prompt is cut to size after the tokenizer has answered.
LETTERS_PER_TOKEN = 8

_SUBJECTS = (
    "the night operator", "a careful engineer", "the older of the two pumps", "every rack in the second hall", "the survey team",
    "a clerk at the harbour", "the river below the dam", "our neighbour's orchard", "the last train of the day", "a teacher",
)  # fmt: skip
_VERBS = (
    "wrote down", "had forgotten", "compared", "slowly replaced", "kept asking about", "measured twice", "argued about", "drew",
    "could not find", "was proud of",
)  # fmt: skip
_OBJECTS = (
    "the temperature of the water", "three letters from the council", "how long the repair would take", "a list of spare parts",
    "the price of copper in that year", "what the visitors had said", "the shortest way to the station", "a map of the valley",
    "the reason for the delay", "the second half of the story",
)  # fmt: skip
_ENDS = (
    "before the shift ended", "although nobody had asked for it", "because the weather had turned", "and put the paper aside",
    "while the others were at lunch", "as the regulations demanded", "in a hand that was hard to read", "for the third time",
)  # fmt: skip

#: What a short prompt asks for: prose, code, a list and a table, since how well a draft guesses depends on the kind of text.
TASKS = (
    "Write a long and detailed article about how bridges are built, from the survey of the ground to the opening day.",
    "Write a Python module that reads a CSV file of temperatures and prints the mean, the median and the highest value a month.",
    "List fifty things that one should check before a long journey by car, each with one sentence that says why.",
    "Explain to a new colleague, step by step and in full sentences, how a computer adds two numbers.",
    "Tell the story of a lighthouse keeper who finds a letter in a bottle and decides to answer it.",
)


def passage(seed: int, letters: int) -> str:
    """Plain text of at least so many letters, always the same for a seed and different from its start on for another."""
    dice = random.Random(seed)  # noqa: S311 - prose, no secret
    parts, length, number = [], 0, 0
    while length < letters:
        number += 1
        pick = [dice.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)]
        sentence = " ".join(pick)
        parts.append(f"{dice.randrange(100, 1000) * 10 + number % 10}. {sentence[0].upper()}{sentence[1:]}.")
        length += len(parts[-1]) + 1
    return "\n".join(parts)


# --- the server ---------------------------------------------------------------------------------------------------------------


class Server:
    """What is measured. ``api``: ``llama_cpp``, ``vllm``, or ``openai`` for any other that has ``/v1/completions``."""

    def __init__(self, request: dict[str, Any], key: str) -> None:
        self.url = urlsplit(request["url"])
        self.api = request["api"]
        self.model = request["model"]
        self.timeout_s = float(request["timeout_s"])
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = "Bearer " + key

    def connect(self) -> http.client.HTTPConnection:
        """An open connection; opening one is no part of what is measured."""
        host, port = self.url.hostname or "127.0.0.1", self.url.port
        connection: http.client.HTTPConnection
        if self.url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port or 443, timeout=self.timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port or 80, timeout=self.timeout_s)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def path(self, end: str) -> str:
        """The path of an endpoint below the server's own."""
        return str(self.url.path).rstrip("/") + end

    def call(self, method: str, end: str, body: Any = None) -> tuple[int, Any]:
        """Status and decoded answer of a plain request; ``None`` for what is no JSON."""
        connection = self.connect()
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self.path(end), body=data, headers=self._headers)
            response = connection.getresponse()
            raw = response.read(MAX_BODY_BYTES)
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, None

    def tokenize(self, text: str) -> list[int] | None:
        """The text's token numbers; ``None`` where the server has nobody to ask."""
        if self.api == "llama_cpp":
            body: dict[str, Any] = {"content": text, "add_special": False}
        elif self.api == "vllm":
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        else:
            return None
        status, answer = self.call("POST", "/tokenize", body)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None

    def busy_slots(self) -> int | None:
        """How many requests the server works on; ``None`` where it does not say."""
        if self.api != "llama_cpp":
            return None
        try:
            status, answer = self.call("GET", "/slots")
        except (OSError, http.client.HTTPException):
            return None
        if status != 200 or not isinstance(answer, list):
            return None
        return sum(1 for slot in answer if isinstance(slot, dict) and slot.get("is_processing"))

    def ask(self, prompt: Any, tokens: int, seed: int, start: threading.Barrier | None = None) -> dict[str, Any]:
        """One streamed request at temperature 0, clocked; never raises for what the server does.

        Args:
            prompt: Token numbers, or text.
            tokens: How many shall come; where the server can be told so, exactly that many.
            seed: For what little is left to chance.
            start: Waited for after the connection is open, so that several start together.
        """
        sample: dict[str, Any] = {"error": "", "tokens": 0, "prompt_tokens": len(prompt) if isinstance(prompt, list) else None}
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "seed": seed, "stream": True}
        if self.api == "llama_cpp":
            end = "/completion"
            body.update(n_predict=tokens, ignore_eos=True, cache_prompt=False, return_tokens=True)
        else:
            end = "/v1/completions"
            body.update(model=self.model, max_tokens=tokens, stream_options={"include_usage": True})
            if self.api == "vllm":
                body.update(ignore_eos=True, min_tokens=tokens)
        data = json.dumps(body).encode()
        connection = None
        try:
            connection = self.connect()
            if start is not None:
                start.wait(self.timeout_s)
            sample["started_s"] = time.monotonic()
            connection.request("POST", self.path(end), body=data, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(400).decode("utf-8", "replace")
                sample["error"] = f"HTTP status {response.status}: {said.strip()}"
            else:
                self._listen(response, sample)
        except (OSError, http.client.HTTPException, ValueError, threading.BrokenBarrierError) as error:
            sample["error"] = str(error) or type(error).__name__
            if start is not None:
                start.abort()
        finally:
            if connection is not None:
                connection.close()
        sample["ended_s"] = time.monotonic()
        return sample

    def _listen(self, response: http.client.HTTPResponse, sample: dict[str, Any]) -> None:
        pieces: list[str] = []
        first_s = last_s = None
        counted = with_first = 0
        while True:
            line = response.readline(MAX_LINE_BYTES)
            if not line:
                break
            now_s = time.monotonic()
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                break
            event = json.loads(payload)
            if not isinstance(event, dict):
                continue
            if "error" in event:
                sample["error"] = str(event["error"])[:400]
                return
            text, count = self._piece(event)
            self._figures(event, sample)
            if not text and not count:
                continue
            if first_s is None:
                first_s, with_first = now_s, max(count, 1)
            last_s = now_s
            counted += max(count, 1)
            pieces.append(text)
        whole = "".join(pieces)
        sample["tokens"] = sample.pop("said_tokens", None) or counted
        sample["first_s"], sample["last_s"], sample["first_tokens"] = first_s, last_s, with_first
        sample["text"] = whole[:2000]
        sample["text_sha256"] = hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()

    def _piece(self, event: dict[str, Any]) -> tuple[str, int]:
        if self.api == "llama_cpp":
            tokens = event.get("tokens")
            # The last event may repeat all of them.
            count = len(tokens) if isinstance(tokens, list) and not event.get("stop") else 0
            return str(event.get("content") or ""), count
        choices = event.get("choices")
        text = choices[0].get("text") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
        return str(text or ""), 0

    @staticmethod
    def _figures(event: dict[str, Any], sample: dict[str, Any]) -> None:
        timings = event.get("timings")
        if isinstance(timings, dict):
            names = ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted")
            sample["engine"] = {name: timings[name] for name in names if isinstance(timings.get(name), (int, float))}
            sample["said_tokens"] = timings.get("predicted_n")
        if event.get("stop") and isinstance(event.get("tokens_evaluated"), int):
            sample["prompt_tokens"] = event["tokens_evaluated"]
        usage = event.get("usage")
        if isinstance(usage, dict):
            sample["said_tokens"] = usage.get("completion_tokens")
            sample["prompt_tokens"] = usage.get("prompt_tokens")

    def likely_next(self, prompt: Any, most: int) -> dict[str, float]:
        """The likeliest next tokens after a prompt, with the logarithm of their probability before any sampling.

        Raises:
            ValueError: the server does not tell them.
        """
        if self.api == "llama_cpp":
            body = {"prompt": prompt, "n_predict": 1, "n_probs": most, "temperature": 0, "cache_prompt": True, "seed": 1}
            status, answer = self.call("POST", "/completion", body)
            entries = answer.get("completion_probabilities") if isinstance(answer, dict) else None
            rows = entries[0].get("top_logprobs") if isinstance(entries, list) and entries else None
            if status == 200 and isinstance(rows, list) and rows:
                return {str(row["id"]): float(row["logprob"]) for row in rows}
        else:
            body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "logprobs": most, "temperature": 0}
            status, answer = self.call("POST", "/v1/completions", body)
            try:
                found = answer["choices"][0]["logprobs"]["top_logprobs"][0]
                return {str(token): float(value) for token, value in found.items()}
            except (KeyError, IndexError, TypeError, AttributeError):
                pass
        raise ValueError(f"the server gives no probabilities (HTTP status {status})")


class Prompts:
    """Prompts of a wanted length, always the same for a seed."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def of_length(self, seed: int, tokens: int) -> Any:
        """Token numbers, exactly so many; text of about that length where nobody tells numbers."""
        letters = tokens * LETTERS_PER_TOKEN
        text = passage(seed, letters)
        numbers = self._server.tokenize(text)
        if numbers is None:
            return text[: tokens * 4]
        while len(numbers) < tokens and numbers:
            numbers = numbers * 2
        return numbers[:tokens]

    def task(self, number: int) -> Any:
        """One of the short prompts."""
        text = TASKS[number % len(TASKS)] + "\n\n"
        return self._server.tokenize(text) or text


# --- the cards ----------------------------------------------------------------------------------------------------------------


def run(argv: list[str], timeout_s: float) -> str | None:
    """What a command prints; ``None`` where it is missing, fails or does not end in time."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _number(field: str) -> float | None:
    try:
        value = float(field)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def cards(wanted: Iterable[str]) -> list[dict[str, Any]]:
    """State of the wanted cards (all where none is named), by the names of ``CARD_FIELDS``; what is not told is ``None``."""
    names = ",".join(name for _, name in CARD_FIELDS)
    shown = run(["nvidia-smi", "--query-gpu=" + names, "--format=csv,noheader,nounits"], SMI_TIMEOUT_S)
    wanted = set(wanted)
    found = []
    for line in (shown or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(CARD_FIELDS) or (wanted and fields[0] not in wanted):
            continue
        state: dict[str, Any] = {}
        for (key, _), field in zip(CARD_FIELDS, fields):
            if key in ("uuid", "name"):
                state[key] = field
            elif key == "throttle_mask":
                state[key] = int(field, 16) if field.startswith("0x") else None
            else:
                state[key] = _number(field)
        found.append(state)
    return found


def await_rest(wanted: Iterable[str]) -> None:
    """Wait a moment for what has just ended: a card tells its use as a mean over the last second."""
    for _ in range(REST_LOOKS):
        if all((state["utilization_percent"] or 0) == 0 for state in cards(wanted)):
            return
        time.sleep(REST_WAIT_S)


def unit_pids(unit: str) -> set[int]:
    """The processes of the unit: those of its control group, in whichever hierarchy systemd keeps it."""
    shown = run(["systemctl", "show", "--property", "ControlGroup,MainPID", "--", unit], 15) or ""
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    main_pid = properties.get("MainPID", "")
    found = {int(main_pid)} if main_pid.isdigit() else set()
    group = properties.get("ControlGroup", "").lstrip("/")
    for root in CGROUP_ROOTS if group else ():
        for file in Path(root, group).glob("**/cgroup.procs"):
            try:
                found |= {int(line) for line in file.read_text(encoding="ascii").split()}
            except (OSError, ValueError):
                continue
    return found - {0}


def strangers(unit: str, wanted: Iterable[str]) -> list[str]:
    """Other programs that compute on the cards, as `PID NAME`."""
    shown = run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader,nounits"], SMI_TIMEOUT_S)
    own = unit_pids(unit) if unit else set()
    wanted = set(wanted)
    found = []
    for line in (shown or "").splitlines():
        fields = [field.strip() for field in line.split(",", 2)]
        if len(fields) < 3 or not fields[1].isdigit() or (wanted and fields[0] not in wanted):
            continue
        # Numbers of another namespace name nobody here.
        if int(fields[1]) not in own and Path("/proc", fields[1]).exists():
            found.append(f"{fields[1]} {fields[2]}")
    return found


class Sampler:
    """Looks at the cards while requests run."""

    def __init__(self, wanted: list[str], every_s: float = SAMPLE_EVERY_S) -> None:
        self._wanted, self._every_s = wanted, every_s
        self.samples: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            at_s = time.monotonic()
            for state in cards(self._wanted):
                state["at_s"] = at_s
                self.samples.append(state)

    def __enter__(self) -> Sampler:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join(SMI_TIMEOUT_S + 5)


# --- phases -------------------------------------------------------------------------------------------------------------------


def one_by_one(server: Server, prompts: list[Any], tokens: int, seed: int) -> list[dict[str, Any]]:
    """Requests one after the other; the first that fails is the last."""
    samples = []
    for number, prompt in enumerate(prompts):
        samples.append(server.ask(prompt, tokens, seed + number))
        if samples[-1]["error"]:
            break
    return samples


def together(server: Server, prompts: list[Any], tokens: int, seed: int) -> list[dict[str, Any]]:
    """Requests that start at the same moment."""
    start = threading.Barrier(len(prompts))
    samples: list[dict[str, Any]] = [{} for _ in prompts]

    def stream(number: int) -> None:
        samples[number] = server.ask(prompts[number], tokens, seed + number, start)

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples


def likely(server: Server, prompt: Any, every: int, most: int) -> list[dict[str, float]]:
    """The likeliest next tokens after each ``every`` tokens of a text."""
    size = len(prompt)
    return [server.likely_next(prompt[:end], most) for end in range(every, size + 1, every)]


def measure(request: dict[str, Any], key: str = "") -> dict[str, Any]:
    """One phase; see :mod:`v100ctl.bench.phases` for what is asked."""
    server = Server(request, key)
    prompts = Prompts(server)
    wanted = list(request["cards"])
    phase = request["phase"]
    kind, seed = phase["kind"], int(phase.get("seed", 1))
    if kind == "state" and wanted:
        await_rest(wanted)
    answer: dict[str, Any] = {"busy_slots": server.busy_slots(), "load_1m": os.getloadavg()[0], "cpus": os.cpu_count() or 1}
    answer["cards_before"] = cards(wanted) if wanted else []
    answer["strangers"] = strangers(request["unit"], wanted) if wanted else []
    samples: list[dict[str, Any]] = []
    if kind == "state":
        pass
    elif kind == "likely":
        text = prompts.of_length(seed, int(phase["prompt_tokens"]))
        answer["likely"] = likely(server, text, int(phase["every"]), int(phase["most"]))
    else:
        count = int(phase["requests"])
        if phase.get("prompt_tokens"):
            made = [prompts.of_length(seed + number, int(phase["prompt_tokens"])) for number in range(count)]
        else:
            made = [prompts.task(number) for number in range(count)]
        send: Callable[[Server, list[Any], int, int], list[dict[str, Any]]] = together if phase.get("together") else one_by_one
        with Sampler(wanted) as sampler:
            samples = send(server, made, int(phase["tokens"]), seed)
        answer["cards_during"] = sampler.samples
    answer["samples"] = samples
    answer["cards_after"] = cards(wanted) if wanted else []
    return answer


def first_key(path: str) -> str:
    """The first key of a file of keys, one a line; empty where there is no file."""
    try:
        with Path(path).open(encoding="utf-8") as lines:
            return next((line.strip() for line in lines if line.strip()), "")
    except OSError:
        return ""


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--request", required=True, help="what to measure, as JSON")
    options = parser.parse_args(arguments)
    request = json.loads(options.request)
    json.dump(measure(request, first_key(request.get("keys_file", ""))), sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
