"""The units of all profiles, byte for byte."""

from __future__ import annotations

from v100ctl.plan.render import render
from v100ctl.plan.units import DEVICES_UNIT

from .golden import GOLDEN, units


def test_units_are_as_they_were_read_last() -> None:
    rendered = {f"{name}.service": content for name, content in units().items()}
    assert rendered, "no profile is planned"
    rendered[DEVICES_UNIT] = render("systemd/devices.service.j2")
    assert rendered == {path.name: path.read_text(encoding="utf-8") for path in sorted(GOLDEN.glob("*.service"))}, (
        "read the difference; if it is meant, run `python -m tests.unit.plan.golden`"
    )
