"""A rollout as people get to see it: a table on the terminal, or a page with each host's timeline."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import Any

from v100ctl.apply.reporter import clean, format_duration
from v100ctl.cli.show import Out
from v100ctl.rollout.state import Rollout

_STYLES = {"done": "green", "returned": "yellow", "untouched": "yellow", "waiting": "yellow"}


def print_plan(out: Out, rollout: Rollout) -> None:
    """What would change on which host, and in which order."""
    from rich.text import Text

    for number, batch in enumerate(rollout.batches, 1):
        canary = rollout.options.canary > 0 and number == 1
        out.print(Text(f"batch {number}{' (canary)' if canary else ''}: {', '.join(batch)}", "bold"))
        for name in batch:
            host = rollout.hosts[name]
            what = f"restarts {', '.join(host.restarts)}" if host.restarts else "restarts nothing"
            if host.starts:
                what += f", starts {', '.join(host.starts)}"
            if host.reboots:
                what += ", changes the driver and may reboot"
            out.print(Text(f"  {name}: {what}; roles {', '.join(host.roles)}"))
            for change in host.changes[:8]:
                out.print(Text(f"    {clean(change)}"))
            if len(host.changes) > 8:
                out.print(Text(f"    and {len(host.changes) - 8} more"))


def print_report(out: Out, rollout: Rollout) -> None:
    """How each host ended, with its timeline."""
    from rich.text import Text

    duration = _duration_s(rollout)
    out.print(Text(f"rollout {rollout.status}" + (f" after {format_duration(duration)}" if duration is not None else ""), "bold"))
    for host in rollout.hosts.values():
        out.print(Text.assemble((f"{host.name}  ", "bold"), (host.phase, _STYLES.get(host.phase, "bold red"))))
        if host.events:
            steps = ", ".join(
                f"{event.step}{' FAILED' if event.problem else ''} {event.elapsed_s:.1f} s" for event in host.events
            )
            out.print(Text(f"  {steps}"))
        for name, before in sorted((host.before or {}).items()):
            after = (host.after or {}).get(name)
            speed = f"{after:.1f}" if after is not None else "not measured"
            out.print(Text(f"  {name}: {before:.1f} tokens/s before, {speed} after"))
        if host.problem:
            out.print(Text(f"  {clean(host.problem)}", "red"))


def page(rollout: Rollout) -> str:
    """The report as one HTML page that needs nothing else."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    text: str = environment.get_template("page.html.j2").render(
        rollout=rollout, lines=_lines(rollout), duration=format_duration(_duration_s(rollout) or 0.0)
    )
    return text


def _seconds(at: str) -> float:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(at).timestamp()
    return 0.0


def _duration_s(rollout: Rollout) -> float | None:
    return _seconds(rollout.ended) - _seconds(rollout.started) if rollout.ended else None


def _lines(rollout: Rollout) -> dict[str, list[dict[str, Any]]]:
    """Each step's place on its host's line, in percent of the whole."""
    begun = _seconds(rollout.started)
    ends = [_seconds(event.at) + event.elapsed_s for host in rollout.hosts.values() for event in host.events]
    whole_s = max([end - begun for end in ends], default=0.0) or 1.0
    return {
        name: [
            {
                "step": event.step,
                "elapsed_s": event.elapsed_s,
                "problem": event.problem,
                "left": round(100 * max(0.0, _seconds(event.at) - begun) / whole_s, 2),
                "width": round(100 * event.elapsed_s / whole_s, 2),
            }
            for event in host.events
        ]
        for name, host in rollout.hosts.items()
    }
