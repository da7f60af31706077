"""``docs/reference/rules.md``, made from the cases: ``python -m tests.unit.plan.rules_page`` writes it anew."""

from __future__ import annotations

from pathlib import Path

from tests.unit.plan.test_cases import CASES, decide
from v100ctl.plan.types import Rule

PAGE = Path(__file__).parents[3] / "docs/reference/rules.md"
_ORDER = ("refuse", "warn", "info")
_HEAD = """\
# Rules

What `v100ctl plan` may say about a host, by id. Ids are stable. *refuse*: nothing is changed on that host. *warn*: it works, and
you should know. *info*: it is worth a line. The examples are what a test case says; the numbers are that case's.

Made from the cases in `tests/unit/plan/cases/` by `python -m tests.unit.plan.rules_page`.

| rule | severity | example | nearest that works |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page's text."""
    severities: dict[str, set[str]] = {}
    examples: dict[str, Rule] = {}
    for folder in CASES:
        for rule in decide(folder).rules:
            severities.setdefault(rule.id, set()).add(rule.severity)
            shown = examples.get(rule.id)
            # The severest example is the one that people look for.
            if shown is None or _ORDER.index(rule.severity) < _ORDER.index(shown.severity):
                examples[rule.id] = rule
    rows = []
    for rule_id, rule in sorted(examples.items()):
        severity = ", ".join(sorted(severities[rule_id], key=_ORDER.index))
        rows.append(f"| `{rule_id}` | {severity} | {_cell(rule.reason)} | {_cell(rule.nearest)} |")
    return _HEAD + "\n".join(rows) + "\n"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
