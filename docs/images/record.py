#!/usr/bin/env python3
"""Make a picture of a real run: docs/images/record.py OUT.svg COMMAND [ARG ...]

Runs the command in tmux (Debian's package `tmux`), takes what the screen shows at the end, and writes it as SVG.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 110, 60
SESSION = "v100ctl-picture"


def tmux(*arguments: str) -> str:
    """What one tmux command prints."""
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Record one command."""
    picture, command = Path(sys.argv[1]), shlex.join(sys.argv[2:])
    typed = f"clear; printf '$ %s\\n' {shlex.quote(command)}; {command}; tmux wait-for -S {SESSION}; sleep 30"
    tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(ROWS), "sh", "-c", typed)
    try:
        tmux("wait-for", SESSION)
        time.sleep(0.5)
        screen = tmux("capture-pane", "-e", "-p", "-t", SESSION).rstrip()
    finally:
        subprocess.run(["tmux", "kill-session", "-t", SESSION], check=False, capture_output=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen))
    picture.write_text(console.export_svg(title=command), encoding="utf-8")


if __name__ == "__main__":
    main()
