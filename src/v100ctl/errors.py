"""What a user is told when something cannot be done.

Every error that is meant for a person is a :class:`V100ctlError`: one sentence that says what was wrong and where, and a
``hint`` that says what to do next. The CLI prints both and exits with ``exit_code``; anything else that escapes is a bug.
"""

from __future__ import annotations

#: Clean, done, or warnings alone.
EXIT_OK = 0
#: A refusal, an unreachable host, a failed gate, or any other error.
EXIT_ERROR = 1
#: Differences were found: something would change, or has drifted.
EXIT_DIFFERENCES = 2
#: Wrong usage of the command line (EX_USAGE of sysexits.h).
EXIT_USAGE = 64
#: Ctrl-C (128 + SIGINT).
EXIT_INTERRUPTED = 130


class V100ctlError(Exception):
    """An error whose text is written for the person who runs the tool.

    Args:
        message: What was wrong and where, without a full stop after a single line.
        hint: What to do next; may hold a command in backticks.
    """

    exit_code = EXIT_ERROR

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(V100ctlError):
    """The command line cannot be meant as it was typed."""

    exit_code = EXIT_USAGE


class InventoryError(V100ctlError):
    """The inventory does not say what it has to, or says it wrongly."""


class UnreachableError(V100ctlError):
    """A host could not be asked: network, SSH, host key, credentials, or sudo."""


class ProbeError(V100ctlError):
    """A host was reached, but the probe did not return a usable document."""


class ArtifactError(V100ctlError):
    """A source, release or model could not be fetched, or is not what its checksum says."""


class LabError(V100ctlError):
    """A test host, its image or the container engine could not be made ready."""
