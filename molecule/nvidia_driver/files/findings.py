"""The ids of what differs between plan and host, of the role nvidia_driver: variables and facts in on stdin, JSON out."""

import json
import sys
from datetime import date

from v100ctl.compare import compare
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import plan

given = json.load(sys.stdin)
facts = Facts.model_validate(given["facts"])
decided = plan("lab", parse_config("lab", given["variables"]), facts, as_of=date(2026, 11, 29))
print(json.dumps(sorted(finding.id for finding in compare(decided, facts) if finding.role == "nvidia_driver")))
