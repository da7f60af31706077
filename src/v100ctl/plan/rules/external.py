"""Rules about engines that the user brings: whether they are described, and whether the host has what they need."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from v100ctl.catalog import Catalog
from v100ctl.catalog.rows import version_key
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec, names_a_secret
from v100ctl.plan.external import Engine, Needs, unused_settings
from v100ctl.plan.types import Release, Rule


def unknown_engine_rule(name: str, spec: InstanceSpec, config: HostConfig) -> Rule:
    """The instance names no engine, or one that is not defined."""
    known = list(config.external_engine_definitions)
    near = difflib.get_close_matches(spec.external or "", known, n=1) or known[:1]
    reason = (
        f"no engine `{spec.external}` is defined"
        if spec.external
        else "an engine of your own is asked for, and `external` does not say which"
    )
    return Rule(
        "external-engine-unknown",
        "refuse",
        reason,
        f"`external: {near[0]}`"
        if near
        else "an entry in `external_engine_definitions` (docs/engines.md), and its name as `external`",
        instance=name,
    )


def misplaced_engine_rule(name: str, spec: InstanceSpec) -> Rule:
    """``external`` at an instance of another engine."""
    return Rule(
        "external-engine-unused",
        "refuse",
        f"`external: {spec.external}` is given, and the instance's engine is {spec.engine}",
        "`engine: external`, or no `external`",
        instance=name,
    )


def argv_missing_rule(name: str, engine: Engine) -> Rule:
    """Nobody says how the engine is started."""
    return Rule(
        "external-engine-argv",
        "refuse",
        f"`external_engine_definitions.{engine.name}` does not say how the engine is started, and no profile does",
        '`argv` there, a list of words: `["{release}/bin/server", --model, "{model}", --host, "{listen}", --port, "{port}"]`',
        instance=name,
    )


def unset_placeholder_rule(name: str, placeholder: str) -> Rule:
    """A word names a setting that has no value."""
    if placeholder == "draft_model":
        nearest = "`speculative: {kind: draft, model: ...}` in `settings`, or a definition without that word"
    elif placeholder == "api_keys_file":
        nearest = "`api_keys` at the instance, or a definition without that word"
    else:
        nearest = f"`{placeholder.replace('.', ': {')}: ...{'}' if '.' in placeholder else ''}` in `settings`, or no such word"
    return Rule(
        "external-placeholder-unset",
        "refuse",
        f"the engine's command line or environment needs `{{{placeholder}}}`, and the instance does not say it",
        nearest,
        instance=name,
    )


def words_rules(name: str, engine: Engine, spec: InstanceSpec) -> Iterator[Rule]:
    """What the engine is not told, and what it would be told twice."""
    said = engine.names
    silent = [placeholder for placeholder in ("model", "listen", "port") if placeholder not in said]
    if silent:
        listed = ", ".join(f"`{{{placeholder}}}`" for placeholder in silent)
        yield Rule(
            "external-argv-silent",
            "warn",
            f"neither `argv` nor `env` of `{engine.name}` holds {listed}: the engine decides that itself",
            f"{listed} in `argv`",
            instance=name,
        )
    unused = unused_settings(engine, spec.settings)
    if unused:
        listed = ", ".join(f"`{setting}`" for setting in unused)
        yield Rule(
            "external-setting-unused",
            "warn",
            f"nothing in `argv` or `env` of `{engine.name}` says {listed}: the engine does not learn of it",
            f"`{{{unused[0]}}}` in `argv`, or no such setting",
            instance=name,
        )
    own = {word for word in engine.argv[1:] if word.startswith("-")}
    for word in spec.extra_args:
        flag = word.partition("=")[0]
        if flag.startswith("-") and names_a_secret(flag):
            yield Rule(
                "extra-args-secret",
                "refuse",
                f"`{flag}` in `extra_args` would show a secret to every user of the host, in reports and in the unit",
                "leave it out",
                instance=name,
            )
        elif flag in own:
            yield Rule(
                "extra-args-setting",
                "refuse",
                f"`{flag}` in `extra_args` would say again what `argv` of `{engine.name}` says",
                f"`{flag}` in `argv` alone",
                instance=name,
            )


def needs_rules(name: str, needs: Needs, *, driver: str, glibc: str, catalog: Catalog) -> Iterator[Rule]:
    """Whether the host has what the engine needs.

    Args:
        name: The instance's name.
        needs: What its engine needs.
        driver: The version or branch of the NVIDIA driver that the host has or gets; empty where it is not known.
        glibc: The version of the host's C library; empty where it is not known.
        catalog: What is known.
    """
    for_volta = [row for row in catalog.drivers if row.drives_volta]
    if driver and needs.driver and version_key(driver) < version_key(needs.driver):
        newest = for_volta[-1].branch
        nearest = f'`nvidia_driver_branch: "{newest}"`, the last branch that drives a V100'
        if version_key(newest) < version_key(needs.driver)[:1]:
            nearest = "an engine that needs less: no branch after " + newest + " drives a V100"
        elif needs.own_driver:
            nearest += "; or a lower `min_driver` of the engine, where it needs less"
        yield Rule(
            "external-engine-driver",
            "refuse",
            f"{needs.title} needs driver {needs.driver} or newer; the host has {driver}",
            nearest,
            instance=name,
        )
    row = catalog.driver(driver) if driver else None
    if row is not None and needs.cuda and version_key(row.cuda) < version_key(needs.cuda):
        fitting = [other.branch for other in for_volta if version_key(other.cuda) >= version_key(needs.cuda)]
        yield Rule(
            "external-engine-cuda",
            "refuse",
            f"{needs.title} needs a driver that knows CUDA {needs.cuda}; driver {driver} knows CUDA up to {row.cuda}",
            f'`nvidia_driver_branch: "{fitting[-1]}"`'
            if fitting
            else "an engine built for an older CUDA: no driver for a V100 does",
            instance=name,
        )
    if glibc and needs.glibc and version_key(glibc) < version_key(needs.glibc):
        yield Rule(
            "external-engine-glibc",
            "refuse",
            f"{needs.title} is linked with glibc {needs.glibc}; the host has {glibc}",
            f"a distribution with glibc {needs.glibc} or newer",
            instance=name,
        )


def label_rules(name: str, release: Release, facts: Facts) -> Iterator[Rule]:
    """Will systemd start its program where SELinux decides that by the labels of files?"""
    program = next(iter(release.build["programs"]), "")
    if facts.selinux == "enforcing" and program and "bin" not in program.split("/")[:-1]:
        yield Rule(
            "external-program-label",
            "warn",
            f"SELinux labels as programs what lies in a folder `bin`; `{program}` does not, so systemd may not start it",
            f"an archive with the program as `bin/{program.rpartition('/')[2]}`",
            instance=name,
        )


def memory_rule(name: str, engine: Engine) -> Rule:
    """How an engine that somebody else built uses a card's memory is not known."""
    return Rule(
        "memory-not-computed",
        "info",
        f"what {engine.needs.title} takes of the card is not computed: how it uses memory is not known",
        "`nvidia-smi` on the host, once it serves",
        instance=name,
    )
