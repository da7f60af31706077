"""The measurements beside the predictions, as the table of docs/measurements/vram.md.

python3 -m tests.device.table_vram tests/unit/fixtures/vram/h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.unit.test_vram import header, launch_of, measured_cards, printed
from v100ctl.plan import vram

MIB = 1 << 20


def main() -> None:
    """Print a row for every run and card."""
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("| shape | arguments | weights | KV | state | compute | load | peak | predicted peak | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for run in document["runs"]:
        cards = measured_cards(run)
        estimate = vram.estimate(header(run["model"]), launch_of(run["args"]), cards)
        for number, card in enumerate(cards):
            device = str(run["devices"][number])
            parts = [f"{sum(printed(run, card.uuid, kind)):.2f}" for kind in ("model", "KV", "RS", "compute")]
            highest = run["highest_mib"][device]
            peak = estimate.budgets[card.uuid].peak_bytes / MIB
            name = run["model"] + (", eager" if run.get("eager") else "") + (f", card {number}" if len(cards) > 1 else "")
            row = [name, f"`{run['args']}`", *parts, str(run["loaded_mib"][device]), str(highest)]
            print("| " + " | ".join([*row, f"{peak:.0f}", f"{100 * (peak / highest - 1):+.2f} %"]) + " |")


if __name__ == "__main__":
    main()
