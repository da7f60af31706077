"""One instance as its unit file: the argv and the environment that start it, and the digest that tells when it is stale."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from v100ctl.fleet import InstanceSpec
from v100ctl.plan.render import render
from v100ctl.plan.types import Account, ManagedFile

#: What a unit asks for; where the kernel or a container allows less, systemd gives that.
LIMIT_NOFILE = 1048576
#: Loading a model from a slow disk takes minutes, and so does the first start after a reboot.
START_TIMEOUT_S = 600
#: How fast each instance was when it was proved: NAME.json. Measured, so no part of the plan.
BASELINES_DIR = "/var/lib/v100ctl/state/baselines"
#: The name under which a process carries the digest of the plan that started it.
DIGEST_VARIABLE = "V100CTL_INSTANCE_DIGEST"


def unit_name(instance: str) -> str:
    """The systemd unit of an instance."""
    return f"v100-{instance}.service"


def local_url(spec: InstanceSpec, path: str) -> str:
    """The URL at which an instance answers on its own host."""
    # A server that listens everywhere is asked on loopback: from the host itself that is always one of its addresses.
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.listen, spec.listen)  # noqa: S104 - compared, not bound
    return f"http://[{address}]:{spec.port}{path}" if ":" in address else f"http://{address}:{spec.port}{path}"


def render_unit(
    name: str,
    *,
    engine: str,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    release_path: str,
    model_sha256s: tuple[str, ...],
) -> tuple[ManagedFile, dict[str, str], str]:
    """The unit file, the environment of its process (with the digest), and the digest.

    The digest covers the whole unit and the models' bytes: whatever makes a running process stale.
    """
    values: dict[str, Any] = {
        "name": name,
        "engine": engine,
        "argv": argv,
        "release_path": release_path,
        "account": Account(),
        "limit_nofile": LIMIT_NOFILE,
        # Both are vLLM's: Triton's kernels, and PyTorch's process groups.
        "writes_cache": engine == "vllm",
        "lists_interfaces": engine == "vllm",
    }
    bare = render("systemd/llm_server.service.j2", **values, environment=dict(environment))
    models = "\n".join(model_sha256s)
    digest = hashlib.sha256(f"{models}\n{bare}".encode()).hexdigest()[:16]
    complete = {**environment, DIGEST_VARIABLE: digest}
    file = ManagedFile(
        path=f"/etc/systemd/system/{unit_name(name)}",
        content=render("systemd/llm_server.service.j2", **values, environment=complete),
        role="llm_server",
        instance=name,
    )
    return file, complete, digest
