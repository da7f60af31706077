#!/usr/bin/env python3
"""Stands in for Docker: `dockerd` notes when it started and with which settings, `docker info` tells of live-restore."""

import json
import sys
import time
from pathlib import Path

CONFIG = Path("/etc/docker/daemon.json")
RUNNING = Path("/run/stand-in-docker.json")


def main(arguments):
    """The program; returns its exit code."""
    if arguments[:1] == ["info"]:
        print(str(bool(json.loads(RUNNING.read_text(encoding="utf-8")).get("live-restore"))).lower())
        return 0
    RUNNING.write_text(CONFIG.read_text(encoding="utf-8") if CONFIG.exists() else "{}", encoding="utf-8")
    Path("/run/docker.pid").write_text("1", encoding="utf-8")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
