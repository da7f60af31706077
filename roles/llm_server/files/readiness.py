# Managed by v100ctl. Changes are overwritten.
"""Says in one JSON object whether a unit serves. Runs on the host with its own Python (3.8 or later); changes nothing.

``state`` is ``done`` (the unit is active and its health path answers 200), ``failed`` (waiting longer is useless) or ``running``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

#: After so many restarts by systemd since it was started, a server will not come up by itself.
RESTARTS_THAT_MEAN_FAILURE = 2
HEALTH_TIMEOUT_S = 5
SYSTEMCTL_TIMEOUT_S = 15
PROPERTIES = ("ActiveState", "SubState", "Result", "NRestarts", "ExecMainStatus")


def unit_properties(unit: str) -> dict[str, str]:
    """The properties of ``unit`` that :func:`judge` needs, by name; empty where systemd does not answer in time."""
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property", ",".join(PROPERTIES), "--", unit],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SYSTEMCTL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}
    pairs = (line.split("=", 1) for line in shown.stdout.decode("utf-8", "replace").splitlines() if "=" in line)
    return {pair[0]: pair[1] for pair in pairs}


def first_key(path: str) -> str:
    """The key that opens the server, of a file with one a line; empty where it asks for none."""
    return Path(path).read_text(encoding="ascii").split("\n")[0] if path else ""


def health(url: str, key: str = "") -> tuple[int | None, str]:
    """The HTTP status that ``url`` answers with and ``""``, or ``None`` and the reason why there is none."""
    # No proxy: the address is this host's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    shown = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        asked = urllib.request.Request(url, headers=shown)  # noqa: S310 - the plan's own address of a server on this host
        with opener.open(asked, timeout=HEALTH_TIMEOUT_S) as response:
            return int(response.status), ""
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError) as error:
        return None, str(getattr(error, "reason", error))


def judge(unit: str, properties: dict[str, str], status: int | None, reason: str, restarts_before: int) -> dict[str, Any]:
    """Whether ``unit`` serves, as the document that is printed."""
    active = properties.get("ActiveState", "")
    restarts = int(properties.get("NRestarts") or 0) - restarts_before
    document: dict[str, Any] = {
        "unit": unit,
        "phase": "load",
        "active_state": active,
        "sub_state": properties.get("SubState", ""),
        "restarts_count": restarts,
        "health_status": status,
    }
    how = f"last exit status {properties.get('ExecMainStatus', 'unknown')}, result {properties.get('Result', 'unknown')}"
    if active == "active" and status == 200:
        return dict(document, state="done", message="it is healthy")
    if active in ("failed", "inactive"):
        return dict(document, state="failed", message=f"it is {active} ({how})")
    if restarts >= RESTARTS_THAT_MEAN_FAILURE:
        return dict(document, state="failed", message=f"it keeps exiting: {restarts} restarts ({how})")
    answer = f"answers with HTTP status {status}" if status is not None else f"does not answer ({reason})"
    return dict(document, state="running", message=f"it is {active or 'unknown'}, but its health path {answer}")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", required=True, help="the systemd unit")
    parser.add_argument("--url", required=True, help="its health path, as seen on this host")
    parser.add_argument("--keys-file", default="", help="the file of its API keys, where it asks for one")
    parser.add_argument("--restarts-before", type=int, default=0, help="restarts by systemd that do not count")
    options = parser.parse_args(arguments)
    status, reason = health(options.url, first_key(options.keys_file))
    document = judge(options.unit, unit_properties(options.unit), status, reason, options.restarts_before)
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
