"""Candidates as the plan sees them: what each changes in the inventory, what starts then, and what cannot work or fit. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from v100ctl.catalog import load_catalog
from v100ctl.errors import InventoryError, UsageError, V100ctlError
from v100ctl.examine import Examined, decide
from v100ctl.fleet import HostConfig, InstanceSpec, Settings, Speculative
from v100ctl.plan import Headers, HostPlan, profiles
from v100ctl.plan.cards import host_cards
from v100ctl.plan.types import Instance, Rule
from v100ctl.plan.units import DIGEST_VARIABLE
from v100ctl.tune.dimensions import BY_NAME, DIMENSIONS, Around, Path
from v100ctl.tune.objectives import Name
from v100ctl.tune.search import Candidate
from v100ctl.tune.space import Checked


class Planned:
    """One instance of a host that was looked at, with other settings.

    Args:
        state: The host.
        name: The instance.
        headers: What is known of its models.
        as_of: The day that plans are made for.

    Raises:
        V100ctlError: the instance does not run as the inventory says, so that nothing is known to compare with.
    """

    def __init__(self, state: Examined, name: str, *, headers: Headers | None, as_of: date) -> None:
        self._state, self._name, self._headers, self._as_of = state, name, headers, as_of
        self._plans: dict[str, HostPlan | str] = {}
        if state.facts is None or state.plan is None:
            raise V100ctlError(f"{state.host.name}: nothing is known of it", hint="`v100ctl plan` says more")
        self._facts = state.facts
        different = sorted({finding.id for finding in state.changes if finding.instance == name})
        if different:
            raise V100ctlError(
                f"{state.host.name}/{name} does not run as the inventory says: {', '.join(different)}",
                hint=f"`v100ctl provision {state.host.name}` first: a gain is told against what the inventory says",
            )
        plan = self._plan({})
        if not isinstance(plan, HostPlan) or self._instance(plan) is None:
            raise V100ctlError(f"{state.host.name} has no instance {name} in its plan", hint="`v100ctl plan` says why")
        self._live_plan = plan

    # --- what is asked for ----------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> InstanceSpec:
        """The live instance, with its profile's values."""
        return profiles.applied(self._name, self._state.host.config.llm_server_instances[self._name], load_catalog())[0]

    @property
    def live(self) -> Instance:
        """The instance as it runs."""
        found = self._instance(self._live_plan)
        assert found is not None  # noqa: S101 - the constructor has looked
        return found

    def around(self, *, allow_power: bool) -> Around:
        """What the values of dimensions depend on."""
        rows = [card.row for card in host_cards(self._facts, load_catalog()) if card.key in self.live.gpus]
        ranges = [(row.power_min_w, row.power_limit_w) for row in rows if row is not None]
        known = [(least, most) for least, most in ranges if least and most]
        power = None
        if allow_power and known and len(known) == len(self.live.gpus):
            power = (max(least for least, _ in known), min(most for _, most in known))
        return Around(self._state.host.config, self.spec, self._facts, self.live, power)

    def values(self, objective: Name, asked: Sequence[str], *, allow_power: bool) -> dict[str, list[str]]:
        """Dimension -> values in words.

        Args:
            objective: Whose dimensions are taken where none is asked for.
            asked: ``NAME`` or ``NAME=VALUE,VALUE`` each.
            allow_power: Whether power limits may be set.

        Raises:
            UsageError: there is no such dimension, it has no such value, or it has none here.
        """
        around = self.around(allow_power=allow_power)
        engine = around.spec.engine
        if not asked:
            chosen = {item.name: list(item.values(around)) for item in DIMENSIONS if objective in item.objectives}
            return {name: values for name, values in chosen.items() if values and engine in BY_NAME[name].engines}
        found: dict[str, list[str]] = {}
        for words in asked:
            name, _, given = words.partition("=")
            dimension = BY_NAME.get(name)
            if dimension is None:
                raise UsageError(f"there is no dimension {name!r}", hint=f"known: {', '.join(BY_NAME)}")
            if engine not in dimension.engines:
                raise UsageError(f"{name} is none of {engine}'s")
            if name == "power_limit" and not allow_power:
                raise UsageError("power limits are not touched without `--allow-power`")
            values = [value for value in given.split(",") if value] or list(dimension.values(around))
            if not values and name != "context_length":
                raise UsageError(f"nobody knows which values of {name} to try here", hint=f"`--dimension {name}=VALUE,VALUE`")
            for value in values:
                try:
                    self.config({name: value})
                except (ValueError, InventoryError) as error:
                    raise UsageError(f"{name}={value}: {_said(error)}") from error
            found[name] = values
        return found

    def written(self, choices: Mapping[str, str]) -> dict[Path, Any]:
        """What an inventory has to say for the choices: path of the host's variables -> value."""
        found: dict[Path, Any] = {}
        for path, value in self.changes(choices).items():
            if path[2:3] == ("extra_args",):
                spec = self.config(choices).llm_server_instances[self._name]
                found[path[:3]] = spec.extra_args
            else:
                found[path] = value
        return found

    # --- what that means ------------------------------------------------------------------------------------------------------

    def changes(self, choices: Mapping[str, str]) -> dict[Path, Any]:
        """What the inventory says then: path -> value, without what it says already."""
        found: dict[Path, Any] = {}
        for name, word in choices.items():
            found |= BY_NAME[name].set(word)
        named = {tuple(self._name if part == "INSTANCE" else part for part in path): value for path, value in found.items()}
        prefix = ("llm_server_instances", self._name, "settings")
        settings = self.spec.settings
        row = load_catalog().llama_cpp_build(self._state.host.config.llama_cpp_build)
        defaults = row.defaults if row else None
        batch = named.get((*prefix, "batch_size"), settings.batch_size or (defaults.batch_size if defaults else None))
        ubatch = named.get((*prefix, "ubatch_size"), settings.ubatch_size or (defaults.ubatch_size if defaults else None))
        touched = (*prefix, "batch_size") in named or (*prefix, "ubatch_size") in named
        if touched and batch is not None and ubatch is not None and ubatch > batch:
            # The engine would cut ubatch down to batch without a word; what was chosen is kept, the other follows.
            if (*prefix, "ubatch_size") in named:
                named[(*prefix, "batch_size")] = ubatch
            else:
                named[(*prefix, "ubatch_size")] = batch
        return named

    def config(self, choices: Mapping[str, str]) -> HostConfig:
        """The host's configuration with the choices."""
        config = self._state.host.config
        spec = config.llm_server_instances[self._name]
        hosts: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        speculative: dict[str, Any] = {}
        instance: dict[str, Any] = {}
        for path, value in self.changes(choices).items():
            if path[0] != "llm_server_instances":
                hosts[path[0]] = value
            elif path[2] == "extra_args":
                instance["extra_args"] = with_flag(instance.get("extra_args", spec.extra_args), path[3].strip("[]"), value)
            elif path[2:4] == ("settings", "speculative"):
                speculative[path[4]] = value
            elif path[2] == "settings":
                settings[path[3]] = value
            else:
                instance[path[2]] = value
        if speculative:
            now = self.spec.settings.speculative
            if now is not None and now.kind == speculative["kind"]:
                # The draft model, with what a hub said of it.
                settings["speculative"] = now.model_copy(update=speculative)
            else:
                settings["speculative"] = Speculative.model_validate(speculative)
        checked = Settings.model_validate({name: value for name, value in settings.items() if name != "speculative"})
        update = {name: settings[name] if name == "speculative" else getattr(checked, name) for name in settings}
        instance["settings"] = spec.settings.model_copy(update=update)
        instances = {**config.llm_server_instances, self._name: spec.model_copy(update=instance)}
        return config.model_copy(update={"llm_server_instances": instances, **hosts})

    def _plan(self, choices: Mapping[str, str]) -> HostPlan | str:
        """The host's plan with the choices, or what is wrong with them."""
        key = Candidate(choices).id
        if key not in self._plans:
            try:
                host = dataclasses.replace(self._state.host, config=self.config(choices))
            except (ValueError, InventoryError) as error:
                self._plans[key] = _said(error)
            else:
                decided = decide(host, self._state.connection, self._facts, headers=self._headers, as_of=self._as_of)
                assert decided.plan is not None  # noqa: S101 - `decide` always plans
                self._plans[key] = decided.plan
        return self._plans[key]

    def _instance(self, plan: HostPlan) -> Instance | None:
        return next((item for item in plan.instances if item.name == self._name), None)

    def instance(self, candidate: Candidate) -> Instance:
        """The planned instance of a candidate that works."""
        plan = self._plan(candidate.choices)
        found = self._instance(plan) if isinstance(plan, HostPlan) else None
        if found is None:
            raise V100ctlError(f"{candidate.id} has no plan")
        return found

    def power_w(self, candidate: Candidate) -> float | None:
        """The power limit that a candidate sets."""
        word = candidate.choices.get("power_limit")
        return None if word is None else float(word)

    def guarded(self, candidate: Candidate) -> bool:
        """Whether it may change what the model says."""
        return any(BY_NAME[name].quality for name in candidate.choices)

    def check(self, choices: Mapping[str, str]) -> Checked:
        """What is known of choices before they are tried; for :class:`v100ctl.tune.space.Space`."""
        plan = self._plan(choices)
        if isinstance(plan, str):
            return Checked(Candidate(choices).id, "inventory", plan)
        known = {(rule.id, rule.instance, rule.reason) for rule in self._live_plan.rules if rule.severity == "refuse"}
        wrong = [rule for rule in plan.rules if rule.severity == "refuse" and (rule.id, rule.instance, rule.reason) not in known]
        instance = self._instance(plan)
        if wrong or instance is None:
            rule = next((item for item in wrong if item.instance == self._name), wrong[0] if wrong else None)
            return Checked(Candidate(choices).id, *(_words(rule) if rule else ("no-command-line", "the plan makes none of it")))
        release = self._facts.release(instance.release_path)
        if instance.release_path != self.live.release_path and (release is None or release.problem):
            host = self._state.host.name
            reason = f"{instance.release_path} is not on {host}: provision it once with these build options, then back"
            return Checked(Candidate(choices).id, "release-not-built", reason)
        environment = {name: value for name, value in instance.environment.items() if name != DIGEST_VARIABLE}
        placement = instance.placement and dataclasses.asdict(instance.placement)
        key = [instance.argv, environment, placement, choices.get("power_limit")]
        return Checked(json.dumps(key, sort_keys=True))


def with_flag(extra_args: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """``extra_args`` with a flag's value set."""
    words = list(extra_args)
    if flag in words and words.index(flag) + 1 < len(words):
        words[words.index(flag) + 1] = value
        return tuple(words)
    return (*words, flag, value)


def _words(rule: Rule) -> tuple[str, str]:
    return rule.id, rule.reason


def _said(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors):
        return "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in errors())
    return str(error)
