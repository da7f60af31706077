"""An instance together with its profile: the instance's own values over the profile's.

Pure. :func:`applied` is what the plan calls for each instance before anything else looks at it; :func:`card_rules` judges the
profile against the host.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError

from v100ctl.catalog import Catalog
from v100ctl.errors import V100ctlError
from v100ctl.fleet import InstanceSpec, Settings
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import Rule

__all__ = [
    "ProfileEngineMismatchError",
    "ProfileError",
    "ProfileSettingsError",
    "SizedCard",
    "UnknownProfileError",
    "applied",
    "card_rules",
    "resolve",
]


class SizedCard(Protocol):
    """A card of a host, as far as a profile looks at it (:class:`v100ctl.plan.cards.HostCard`)."""

    @property
    def name(self) -> str:
        """Its name for people."""

    @property
    def total_bytes(self) -> int | None:
        """Its memory, ``None`` where that is not known."""


class ProfileError(V100ctlError):
    """A profile cannot be applied to an instance. ``rule_id`` is the rule that says so; the hint is the nearest that works."""

    rule_id: ClassVar[str]


class UnknownProfileError(ProfileError):
    """No profile has that name."""

    rule_id = "profile-unknown"


class ProfileEngineMismatchError(ProfileError):
    """The instance names another engine than its profile is made for."""

    rule_id = "profile-engine-mismatch"


class ProfileSettingsError(ProfileError):
    """The instance's values and the profile's are each right, and wrong together."""

    rule_id = "profile-settings-conflict"


def resolve(spec: InstanceSpec, catalog: Catalog) -> InstanceSpec:
    """``spec`` with the values of its profile under its own.

    Settings are merged key by key, and so are ``sampling``, ``speculative`` and ``rope_scaling``, except where the instance names
    another ``kind`` than the profile. A key that the instance sets to null is left to the engine. The engine is the profile's
    where the instance does not name one. The model is always the instance's.

    Resolving twice changes nothing more.

    Raises:
        UnknownProfileError: no profile has this name; the hint names the nearest, or all.
        ProfileEngineMismatchError: the instance names another engine than the profile.
        ProfileSettingsError: the values do not go together.
    """
    if spec.profile is None:
        return spec
    profile = catalog.profiles.get(spec.profile)
    if profile is None:
        raise UnknownProfileError(f"there is no profile `{spec.profile}`", hint=_known(spec.profile, catalog))
    if "engine" in spec.model_fields_set and spec.engine != profile.engine:
        same = [row.id for row in catalog.profiles.values() if row.engine == spec.engine]
        others = f", or a profile for {spec.engine}: {', '.join(same)}" if same else ""
        raise ProfileEngineMismatchError(
            f"the profile `{profile.id}` is for the engine {profile.engine}, and the instance says {spec.engine}",
            hint=f"`engine: {profile.engine}`{others}",
        )
    merged = _over(profile.values, spec.settings.model_dump(mode="json", exclude_unset=True))
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors(include_url=False))
        raise ProfileSettingsError(
            f"with the profile `{profile.id}` the settings do not go together: {reasons}",
            hint="set each of these keys in the instance",
        ) from error
    return spec.model_copy(update={"engine": profile.engine, "settings": settings})


def applied(name: str, spec: InstanceSpec, catalog: Catalog) -> tuple[InstanceSpec, tuple[Rule, ...]]:
    """:func:`resolve` for the plan: never raises, but returns ``spec`` as it was with the rule that refuses it.

    Args:
        name: The instance's name, for the rule.
        spec: The instance.
        catalog: What is known.
    """
    try:
        return resolve(spec, catalog), ()
    except ProfileError as error:
        return spec, (Rule(error.rule_id, "refuse", error.message, error.hint, instance=name),)


def card_rules(name: str, spec: InstanceSpec, cards: Sequence[SizedCard], catalog: Catalog) -> Iterator[Rule]:
    """Whether the cards that an instance gets have the memory that its profile is made for.

    Args:
        name: The instance's name.
        spec: The instance.
        cards: The cards it gets, one or several that share the model; none says nothing.
        catalog: What is known.
    """
    profile = catalog.profiles.get(spec.profile or "")
    sizes = [card.total_bytes for card in cards]
    if profile is None or not sizes or None in sizes:
        return
    total_bytes = sum(size for size in sizes if size is not None)
    if total_bytes >= profile.min_memory_bytes:
        return
    fitting = [
        row.id
        for row in catalog.profiles.values()
        if row.engine == profile.engine and row.min_memory_bytes <= total_bytes and row.id != profile.id
    ]
    wants = f"{gib(profile.min_memory_bytes)} or more ({profile.card})"
    has = f"{cards[0].name} has" if len(cards) == 1 else f"the {len(cards)} cards have together"
    yield Rule(
        "profile-card-too-small",
        "warn",
        f"the profile `{profile.id}` is made for {wants}; {has} {gib(total_bytes)}",
        f"a profile for a smaller card: {', '.join(fitting)}" if fitting else f"a card with {gib(profile.min_memory_bytes)}",
        instance=name,
    )


def _known(name: str, catalog: Catalog) -> str:
    near = difflib.get_close_matches(name, list(catalog.profiles), n=1)
    suggestion = f"did you mean `{near[0]}`? " if near else ""
    return f"{suggestion}known: {', '.join(catalog.profiles)}"


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        under = merged.get(key)
        merged[key] = value
        # Another kind of drafting or stretching is another thing: the profile's numbers do not belong to it.
        if isinstance(under, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, under.get("kind")):
            merged[key] = _over(under, value)
    return merged
