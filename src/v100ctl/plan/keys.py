"""API keys: which instance has them, the files that carry them, and what is wrong with them.

No key is in a command line, in a unit, in ``host.json`` or in a message. The files that hold keys are ``secret``: their bytes
are shown nowhere, and whether the host has the same is told by :func:`v100ctl.compare.keyed_digest`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from v100ctl.catalog.vllm import VllmRow
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.render import MANAGED_HEADER
from v100ctl.plan.types import Account, HostPlan, ManagedFile, Rule

INSTANCES_DIR = "/etc/v100ctl/instances"
#: Carries to the process which keys it was started with; the probe tells no value of it, only whether it is of the file now.
DIGEST_VARIABLE = "V100CTL_KEYS_SHA256"
#: A key of fewer characters can be guessed over the network.
SHORT_KEY = 16
_ROLE = "llm_server"


def keys_path(instance: str) -> str:
    """The file of an instance's keys, one a line; helpers on the host present the first."""
    return f"{INSTANCES_DIR}/{instance}.keys"


def environment_path(instance: str) -> str:
    """The file of an instance's secret environment."""
    return f"{INSTANCES_DIR}/{instance}.env"


def key_files(name: str, spec: InstanceSpec) -> tuple[ManagedFile, ...]:
    """The files that hold the keys of one instance; none where it has no keys."""
    if not spec.keys:
        return ()
    lines = spec.keys
    if spec.engine == "llama_cpp" and len(lines) == 1:
        # Of a single key llama-server logs the last four characters, of several how many there are
        # (server_http_context::init, tools/server/server-http.cpp).
        lines = (*lines, *lines)
    # No header: b9093 takes a line that starts with `#` for a key (common/arg.cpp).
    content = "".join(f"{key}\n" for key in lines)
    environment = [f"# {MANAGED_HEADER}", f"{DIGEST_VARIABLE}={hashlib.sha256(content.encode()).hexdigest()}"]
    if spec.engine == "vllm":
        environment.append(f"VLLM_API_KEY={_quoted(spec.keys[0])}")
    group = Account().group
    return tuple(
        ManagedFile(path, text, _ROLE, mode="0640", group=group, instance=name, secret=True)
        for path, text in ((keys_path(name), content), (environment_path(name), "\n".join(environment) + "\n"))
    )


def _quoted(value: str) -> str:
    """``value`` as systemd reads it in an ``EnvironmentFile=`` (systemd.exec(5)): as a shell would between double quotes."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def leftover_files(facts: Facts, planned: Collection[str]) -> tuple[str, ...]:
    """Files of keys and environments that no instance has any more."""
    return tuple(
        path
        for path, file in sorted(facts.files.items())
        if PurePosixPath(path).parent == PurePosixPath(INSTANCES_DIR)
        and path.endswith((".keys", ".env"))
        and file.kind == "file"
        and path not in planned
    )


def first_keys(plan: HostPlan) -> Mapping[str, str]:
    """The key that a client of this toolkit presents to each instance that asks for one. Secret."""
    files = {file.path: file.content for file in plan.files if file.secret}
    wanted = {instance.name: instance.api_keys_file for instance in plan.instances if instance.api_keys_file}
    return {name: files[path].splitlines()[0] for name, path in wanted.items() if path in files}


def key_rules(name: str, spec: InstanceSpec, config: HostConfig, row: VllmRow | None) -> Iterator[Rule]:
    """Rules about the keys of one instance, as the inventory has it.

    Args:
        name: The instance's name.
        spec: The instance, with its public address.
        config: What the inventory asks for.
        row: The version of vLLM, where that is the engine.
    """
    for number, key in enumerate(spec.keys, 1):
        problem = _problem(key)
        if problem is not None:
            yield Rule(
                "api-key-unusable",
                "refuse",
                f"key {number} of `api_keys` {problem}",
                "letters, digits and `-._~+/=`, such as `openssl rand -hex 32` makes",
                instance=name,
            )
        elif len(key) < SHORT_KEY:
            yield Rule(
                "api-key-short",
                "warn",
                f"key {number} of `api_keys` has {len(key)} characters: whoever can reach the server can try them all",
                "`openssl rand -hex 32`",
                instance=name,
            )
        if key in spec.keys[: number - 1]:
            yield Rule(
                "api-key-twice",
                "refuse",
                f"key {number} of `api_keys` is the same as key {spec.keys.index(key) + 1}",
                "each client's own key, or one less",
                instance=name,
            )
    if not spec.keys:
        return
    gateway = config.gateway_placement == "host"
    if spec.engine == "vllm" and row is not None:
        yield from _vllm_rules(name, spec, config, row, gateway=gateway)


def _problem(key: str) -> str | None:
    if not key:
        return "is empty"
    if re.search(r"\s", key):
        return "holds a blank or a line break, which no header can carry as part of it"
    if not all("!" <= character <= "~" for character in key):
        return "holds a character that is not plain ASCII, which clients and servers encode differently"
    if key.startswith("#"):
        return "starts with `#`: engine and gateway take such a line of a file for a comment"
    return None


def is_loopback(listen: str) -> bool:
    """Whether only the host itself can reach what listens there."""
    return listen == "::1" or listen.startswith("127.")


def _vllm_rules(name: str, spec: InstanceSpec, config: HostConfig, row: VllmRow, *, gateway: bool) -> Iterator[Rule]:
    if len(spec.keys) > 1 and not gateway:
        yield Rule(
            "api-keys-several",
            "refuse",
            f"vLLM {row.version} knows one key, and `api_keys` has {len(spec.keys)}",
            "one key, or `gateway_placement: host`, whose HAProxy knows any number",
            instance=name,
        )
    open_to_all = not is_loopback(spec.listen) and not gateway and not config.llm_server_allow_unauthenticated
    if open_to_all and row.keyless_paths:
        listed = ", ".join(f"`{path}`" for path in row.keyless_paths)
        completes = "/invocations" in row.keyless_paths
        yield Rule(
            "api-keys-partial",
            "refuse" if completes else "warn",
            f"vLLM {row.version} asks for its key below `/v1` only: {listed} answer anyone on that network"
            + (", and `/invocations` completes prompts" if completes else ""),
            "`gateway_placement: host`, whose HAProxy asks for it everywhere, or `listen: 127.0.0.1`",
            instance=name,
        )


def keyless_engine_rule(name: str, engine: str, *, gateway: bool) -> Rule:
    """An engine that the user brings is not told its keys."""
    if gateway:
        return Rule(
            "api-keys-untold",
            "warn",
            f"nothing in `argv` or `env` of `{engine}` says `{{api_keys_file}}`: the gateway asks for a key, and on the host "
            "itself the engine answers without one",
            "`{api_keys_file}` in `argv` or `env`, where the engine can read keys from a file",
            instance=name,
        )
    return Rule(
        "api-keys-untold",
        "refuse",
        f"nothing in `argv` or `env` of `{engine}` says `{{api_keys_file}}`, so that the engine would answer without a key",
        "`gateway_placement: host`, whose HAProxy asks for it, or `{api_keys_file}` in `argv` or `env`",
        instance=name,
    )
