"""Change a fleet host by host and lose no request: canary, batches, gates, and the way back.

:mod:`~v100ctl.rollout.state` is what is written down, :mod:`~v100ctl.rollout.machine` the order of steps, which knows no host,
:mod:`~v100ctl.rollout.claims` what keeps others off,
:mod:`~v100ctl.rollout.actions` what the steps do to real ones, :mod:`~v100ctl.rollout.report` what a person gets to see.
"""
