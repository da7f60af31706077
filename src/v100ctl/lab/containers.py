"""What is done to one container without SSH."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping, Sequence

import requests
from docker.errors import APIError, NotFound
from docker.models.containers import Container

from v100ctl.errors import LabError

_REMOVAL_TIMEOUT_S = 60.0


def execute(
    container: Container, command: Sequence[str], *, environment: Mapping[str, str] | None = None, user: str = ""
) -> tuple[int | None, str]:
    """Runs a command inside. Returns its exit status and what it wrote to either stream."""
    result = container.exec_run(list(command), environment=dict(environment or {}), user=user)
    output = result.output if isinstance(result.output, bytes) else b"".join(result.output)
    return result.exit_code, output.decode("utf-8", "replace")


def put_file(container: Container, path: str, content: bytes, *, mode: int, uid: int = 0, gid: int = 0) -> None:
    """Writes one file into a container, running or not. Its folder has to exist.

    Not for paths on a tmpfs: what is written there is hidden under the mount.

    Raises:
        LabError: The engine did not take it.
    """
    folder, _, name = path.rpartition("/")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.uid, entry.gid, entry.mtime = len(content), mode, uid, gid, int(time.time())
        archive.addfile(entry, io.BytesIO(content))
    if not container.put_archive(folder or "/", buffer.getvalue()):
        raise LabError(f"Docker Engine did not take the file {path} for container {container.name}", hint="see the engine's log")


def remove_container(container: Container) -> None:
    """Kills and removes a container and waits until it is gone; one that is gone already is fine."""
    deadline_s = time.monotonic() + _REMOVAL_TIMEOUT_S
    while True:
        try:
            container.remove(force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            # Somebody else is removing it at this moment.
            if error.status_code != requests.codes.conflict or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return
