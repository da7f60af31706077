"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test judges how fast or how busy the machine is, so none fails where an example or its making takes long.
settings.register_profile("v100ctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("v100ctl")
