"""Measure what llama-server takes of a card, per model shape and setting, and write it as JSON.

    python3 -m tests.device.measure_vram --server BUILD/bin/llama-server --out vram.json [--resume] [--devices 0,1]

Each run starts a real server on a file of :mod:`shapes` with everything on the card, reads the buffers it prints, and asks
`nvidia-smi` for the card's use before the load, after it, and all along a prompt that fills the context. It only reads: no
setting of the card is touched. Nothing else may run on the cards meanwhile. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tests.device import shapes

LOAD_TIMEOUT_S = 90.0
REQUEST_TIMEOUT_S = 90.0

#: A model's shape, the server's settings, and how many tokens the prompt has; `streams`: as many prompts at once; `eager`: every
#: kernel is loaded at the start, as CUDA did before 12.2.
CASES: tuple[dict[str, Any], ...] = (
    {"model": "smallest", "args": "-c 512 -np 1 -fa on", "prompt": 256},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa on", "prompt": 32000},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa on -ctk q8_0 -ctv q8_0", "prompt": 32000},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa on -ctk q4_0 -ctv q4_0 -ub 256", "prompt": 32000},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa off", "prompt": 32000},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa on -b 2048 -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 32000},
    {"model": "qwen3-8b", "args": "-c 32768 -np 4 -kvu -fa on", "prompt": 7000, "streams": 4},
    {"model": "qwen3-8b", "args": "-c 32768 -np 4 -no-kvu -fa on", "prompt": 7000, "streams": 4},
    {"model": "qwen3-8b", "args": "-c 32768 -np 4 -no-kvu -fa on -ctk q8_0 -ctv q8_0", "prompt": 7000, "streams": 4},
    {"model": "qwen3-14b", "args": "-c 16384 -np 1 -fa on -ctk q8_0 -ctv q8_0 -b 512 -ub 256", "prompt": 16000},
    {"model": "qwen3-32b", "args": "-c 16384 -np 1 -fa on", "prompt": 16000},
    {"model": "qwen3-32b", "args": "-c 16384 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 16000},
    {"model": "llama-8b", "args": "-c 16384 -np 1 -fa on", "prompt": 16000},
    {"model": "llama-8b", "args": "-c 16384 -np 1 -fa off -ub 2048", "prompt": 16000},
    {"model": "qwen2-7b", "args": "-c 16384 -np 2 -no-kvu -fa on -ctk q8_0 -ctv q8_0", "prompt": 7000, "streams": 2},
    {"model": "gemma3-27b", "args": "-c 32768 -np 1 -fa on", "prompt": 16000},
    {"model": "gemma3-27b", "args": "-c 32768 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 32000},
    {"model": "gemma3-12b", "args": "-c 16384 -np 1 -fa off", "prompt": 16000},
    {"model": "qwen35-27b", "args": "-c 32768 -np 1 -fa on", "prompt": 16000},
    {"model": "qwen35-27b", "args": "-c 65536 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 32000},
    {"model": "qwen35-27b", "args": "-c 16384 -np 4 -kvu -fa off", "prompt": 4000, "streams": 4},
    {"model": "qwen35-27b-q6", "args": "-c 163840 -np 1 -fa on -ub 1024", "prompt": 8192},
    {"model": "qwen35-27b-mtp", "args": "-c 32768 -np 1 -fa on --spec-type draft-mtp --spec-draft-n-max 3", "prompt": 16000},
    {
        "model": "qwen35-27b-mtp",
        "args": "-c 32768 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0 --spec-type draft-mtp --spec-draft-n-max 3",
        "prompt": 16000,
    },
    {"model": "qwen3-30b-a3b", "args": "-c 16384 -np 1 -fa on", "prompt": 16000},
    {"model": "qwen3-30b-a3b", "args": "-c 16384 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 16000},
    {"model": "qwen35-35b-a3b", "args": "-c 32768 -np 1 -fa on", "prompt": 16000},
    {"model": "deepseek2-lite", "args": "-c 16384 -np 1 -fa on", "prompt": 16000},
    {"model": "deepseek2-lite", "args": "-c 16384 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 16000},
    {"model": "deepseek2-lite", "args": "-c 16384 -np 1 -fa off", "prompt": 16000},
    {"model": "gpt-oss-20b", "args": "-c 32768 -np 1 -fa on", "prompt": 16000},
    {"model": "gpt-oss-20b", "args": "-c 32768 -np 1 -fa on -ub 2048", "prompt": 16000},
    {"model": "gemma2-27b", "args": "-c 8192 -np 1 -fa on", "prompt": 8000},
    {"model": "gemma2-27b", "args": "-c 8192 -np 1 -fa off -ub 1024", "prompt": 8000},
    {"model": "gemma4-31b", "args": "-c 32768 -np 1 -fa on", "prompt": 32000},
    {"model": "gemma4-31b", "args": "-c 32768 -np 1 -fa on -ub 2048 -ctk q8_0 -ctv q8_0", "prompt": 32000},
    {"model": "gemma4-26b-a4b", "args": "-c 32768 -np 1 -fa on", "prompt": 32000},
    {"model": "qwen3next-80b-a3b", "args": "-c 32768 -np 1 -fa on", "prompt": 32000},
    {"model": "llama-8b-f16", "args": "-c 16384 -np 1 -fa on", "prompt": 16000},
    {"model": "smallest", "args": "-c 512 -np 1 -fa on", "prompt": 256, "eager": True},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa on", "prompt": 32000, "eager": True},
    {"model": "qwen3-30b-a3b", "args": "-c 16384 -np 1 -fa on", "prompt": 16000, "eager": True},
    {"model": "qwen3-14b", "args": "-c 16384 -np 1 -fa on -md {qwen3-small} --spec-type draft-simple -ngld 99", "prompt": 16000},
    {"model": "qwen3-8b", "args": "-c 32768 -np 1 -fa on -sm layer", "prompt": 32000, "cards": 2},
    {"model": "qwen3-14b", "args": "-c 16384 -np 1 -fa on -ub 2048 -sm layer -ctk q8_0 -ctv q8_0", "prompt": 16000, "cards": 2},
    {"model": "qwen35-27b", "args": "-c 32768 -np 2 -no-kvu -fa on -sm layer", "prompt": 12000, "cards": 2, "streams": 2},
    {"model": "gemma3-27b", "args": "-c 32768 -np 1 -fa off -sm layer", "prompt": 16000, "cards": 2},
)

#: `0.01 I load_tensors:        CUDA0 model buffer size =  4403.48 MiB`
_BUFFER = re.compile(r"(\w+):\s+(\S+)\s+(model|KV|RS|output|compute) buffer size = +([\d.]+) MiB")


def buffers(log: str) -> list[list[Any]]:
    """Every buffer that a server's log names: who printed it, where it lies, what it is for, MiB."""
    return [[where, device, kind, float(mib)] for where, device, kind, mib in _BUFFER.findall(log)]


class UsePoll:
    """Follows `memory.used` of the cards until it is stopped; the highest value of each, in MiB."""

    def __init__(self, devices: list[int]) -> None:
        query = [
            "nvidia-smi",
            "-i",
            ",".join(map(str, devices)),
            "--query-gpu=index,memory.used",
            "--format=csv,noheader,nounits",
        ]
        self._process = subprocess.Popen([*query, "-lms", "50"], stdout=subprocess.PIPE, text=True)
        self.last: dict[int, int] = {}
        self.highest: dict[int, int] = {}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            index, used = (int(word) for word in line.split(","))
            self.last[index] = used
            self.highest[index] = max(used, self.highest.get(index, 0))

    def settled(self) -> dict[int, int]:
        """The use now, a moment after whatever was last done."""
        time.sleep(0.4)
        return dict(self.last)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()


def post(port: int, prompt: list[int]) -> dict[str, Any]:
    """One completion of a token or two over a prompt given as token ids."""
    body = json.dumps({"prompt": prompt, "n_predict": 4, "cache_prompt": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:  # noqa: S310 - the scheme is written above
        return dict(json.load(answer)["timings"])


def measure(case: dict[str, Any], server: Path, folder: Path, devices: list[int], port: int) -> dict[str, Any]:
    """One run: the printed buffers and the cards' use."""

    def model(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            made = folder / f"{name}.{port}.part"
            shapes.write(shapes.MODELS[name](), made, tokens=True)
            made.rename(path)
        return path

    arguments = re.sub(r"\{(.*?)\}", lambda match: str(model(match[1])), case["args"]).split()
    fixed = [
        "--no-warmup",
        "--fit",
        "off",
        "-lv",
        "4",
        "-ngl",
        "99",
        "--cache-ram",
        "0",
        "--port",
        str(port),
        "--no-ui",
        "--offline",
    ]
    argv = [str(server), "-m", str(model(case["model"])), *arguments, *fixed, "--port", str(port)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if case.get("eager"):
        environment["CUDA_MODULE_LOADING"] = "EAGER"
    result: dict[str, Any] = {**case, "devices": devices}
    poll = UsePoll(devices)
    log_path = folder / f"{port}.log"
    try:
        result["before_mib"] = poll.settled()
        with log_path.open("w") as log:
            process = subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                start = time.monotonic()
                while True:
                    if process.poll() is not None or time.monotonic() - start > LOAD_TIMEOUT_S:
                        raise RuntimeError("did not start")
                    try:
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                        break
                    except (urllib.error.URLError, OSError):
                        time.sleep(0.2)
                result["load_s"] = round(time.monotonic() - start, 1)
                result["loaded_mib"] = poll.settled()
                prompts = [[(7 * i + 13 * s) % 900 + 10 for i in range(case["prompt"])] for s in range(case.get("streams", 1))]
                with ThreadPoolExecutor(len(prompts)) as pool:
                    result["timings"] = list(pool.map(lambda prompt: post(port, prompt), prompts))
                result["after_mib"] = poll.settled()
            finally:
                process.terminate()
                process.wait()
        result["highest_mib"] = dict(poll.highest)
    except (RuntimeError, OSError, KeyError, ValueError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        poll.stop()
    text = log_path.read_text(errors="replace")
    result["buffers"] = buffers(text)
    if "error" in result:
        result["log_end"] = text[-3000:]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out has already")
    parser.add_argument("--devices", default="0")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    devices = [int(device) for device in options.devices.split(",")]
    query = ["nvidia-smi", "-i", str(devices[0]), "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    document: dict[str, Any] = {
        "card": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "runs": [],
    }
    if options.resume and options.out.exists():
        document = json.loads(options.out.read_text())

    def key(case: dict[str, Any]) -> tuple[Any, ...]:
        return case["model"], case["args"], case.get("eager")

    done = {key(run) for run in document["runs"] if "error" not in run}
    lock = threading.Lock()

    def lane(folder: Path, queue: SimpleQueue[dict[str, Any]], cards: list[int]) -> None:
        while time.monotonic() < deadline:
            try:
                case = queue.get_nowait()
            except Empty:
                return
            result = measure(case, options.server, folder, cards, 8500 + cards[0])
            with lock:
                document["runs"].append(result)
                runs = ",\n".join(json.dumps(run) for run in document["runs"])
                head = json.dumps({**document, "runs": []})
                options.out.write_text(f"{head[:-2]}\n{runs}\n]}}\n")
                print(result["model"], result["args"], result.get("highest_mib"), result.get("error", ""), flush=True)

    with tempfile.TemporaryDirectory() as name:
        # One card: as many runs at a time as there are cards. Several: one at a time, over all of them.
        for several in (False, True):
            queue: SimpleQueue[dict[str, Any]] = SimpleQueue()
            for case in CASES:
                cards = case.get("cards", 1)
                if (cards > 1) == several and cards <= len(devices) and key(case) not in done:
                    queue.put(case)
            lanes = [devices] if several else [[device] for device in devices]
            threads = [threading.Thread(target=lane, args=(Path(name), queue, cards)) for cards in lanes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
