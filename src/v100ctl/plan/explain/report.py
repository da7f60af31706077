"""An explanation as the JSON document ``v100ctl/explain/1``, and as an exit code."""

from __future__ import annotations

from typing import Any

from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK
from v100ctl.plan.explain.types import Explanation
from v100ctl.plan.types import plain_data

EXPLAIN_SCHEMA = "v100ctl/explain/1"


def explain_document(explanation: Explanation) -> dict[str, Any]:
    """The whole document."""
    return {
        "schema": EXPLAIN_SCHEMA,
        "gpu": {
            "name": explanation.card.name,
            "compute_capability": explanation.card.compute_capability,
            "source": explanation.card.source,
        },
        "verdict": explanation.verdict,
        "commands": [
            {
                "program": command.program,
                "typed": command.typed,
                "line": command.line,
                "engine": command.engine,
                "version": command.version,
                "verdict": command.verdict,
                "findings": [plain_data(finding) for finding in command.findings],
                "inventory": command.inventory,
            }
            for command in explanation.commands
        ],
    }


def exit_code(explanation: Explanation) -> int:
    """1 where something is refused or cannot work, 2 where something is not what it looks like, else 0."""
    if explanation.verdict in ("refused", "fails"):
        return EXIT_ERROR
    return EXIT_OK if explanation.verdict == "ok" else EXIT_DIFFERENCES
