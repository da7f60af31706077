"""``docs/profiles.md``, made from the shipped profiles: ``python -m v100ctl.catalog.profiles_page > docs/profiles.md``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

import yaml

from v100ctl.catalog.profiles import ExternalEngine, Profile, ProfileModel, load_profiles

_INTRODUCTION = """\
<!-- Made by `python -m v100ctl.catalog.profiles_page > docs/profiles.md`. Change src/v100ctl/catalog/profiles/ instead. -->
# Profiles

A profile is a set of settings that somebody tuned on a V100, under a name. `profile: NAME` in an instance takes it; whatever the
instance says itself wins, key by key. The settings are what is *meant*: each build's own spelling is found by the plan, and
`v100ctl render HOST` shows it.

The model of a profile is a recommendation that fits its card. An instance always names its own, with its SHA-256:

```yaml
llm_server_instances:
  chat:
    profile: llama-16gb-latency
    model:
      url: {url}
      sha256: "{sha256}"
      size_bytes: {size_bytes}
    settings:
      context_length: 4096       # the profile says 8192
```

The speeds are the reports' own, on their machines. None of them was measured by this project.
"""

_EXTERNAL_EXAMPLE = """\
external_engine_definitions:
  mine:
    source: {{from_controller: "{{{{ inventory_dir }}}}/files/engine.tar.gz", sha256: "...", kind: archive, strip_components: 1}}
llm_server_instances:
  long:
    profile: {profile}
    external: mine
    model: {{path: /srv/models/model.gguf, sha256: "..."}}"""

_WIDTH = 130


def markdown() -> str:
    """``docs/profiles.md``, from the shipped profiles."""
    profiles = load_profiles()
    model = profiles["llama-16gb-latency"].model
    file = model.files[0]
    introduction = _INTRODUCTION.format(url=model.url(file), sha256=file.sha256, size_bytes=file.size_bytes)
    table = ["| profile | engine | card | for |", "| --- | --- | --- | --- |"]
    table += [f"| [`{row.id}`](#{row.id}) | {row.engine} | {row.card} | {row.title} |" for row in profiles.values()]
    parts = [introduction, "\n".join(table) + "\n", *("\n".join(_section(row)) for row in profiles.values())]
    return "\n".join(parts)


def _section(profile: Profile) -> Iterator[str]:
    yield f"## {profile.id}\n"
    yield f"{profile.title}. {_filled(profile.for_whom)}\n"
    yield f"Made for: {profile.card}. Engine: `{profile.engine}`. Source: {profile.source}.\n"
    yield "```yaml"
    yield yaml.safe_dump({"settings": profile.values}, sort_keys=False, width=_WIDTH).rstrip()
    yield "```\n"
    yield from _model(profile.model)
    if profile.external:
        yield from _external(profile.id, profile.external)
    yield "What the report measured:\n"
    for claim in profile.claims:
        yield _item(f"{claim.speed}: {claim.where}")
    yield ""
    yield "What differs from the report, and why:\n"
    yield "| the report | a pinned engine | the profile |"
    yield "| --- | --- | --- |"
    for row in profile.differs:
        yield f"| {_cell(row.report)} | {_cell(row.engine)} | {_cell(row.profile)} |"
    yield ""
    for note in profile.notes:
        yield _item(note)
    if profile.notes:
        yield ""


def _model(model: ProfileModel) -> Iterator[str]:
    at = f" at revision `{model.revision}`" if model.revision else ""
    repository = f"[{model.repository}](https://huggingface.co/{model.repository}){at}"
    yield f"Model: {model.name}, {repository} (`{model.architecture}`, {model.licence}).\n"
    yield "| file | bytes | SHA-256 |"
    yield "| --- | --- | --- |"
    for file in model.files:
        yield f"| {file.name} | {f'{file.size_bytes:,}' if file.size_bytes else 'not known'} | `{file.sha256 or 'not known'}` |"
    yield ""
    yield _filled(f"{model.note + ' ' if model.note else ''}Looked up: {model.source}.") + "\n"


def _external(profile_id: str, external: ExternalEngine) -> Iterator[str]:
    yield _filled(
        f"Engine that you bring: {external.release}, driver {external.driver_min} or newer, glibc {external.glibc_min} or newer,"
        f" CUDA {external.cuda_runtime} at run time, health at `{external.health_path}`. {external.note or ''}"
    )
    yield ""
    yield _filled(
        "It is defined once, with its archive (docs/engines.md says how), and named by the instance; what the definition does not"
        " say is taken from here:"
    )
    yield ""
    yield "```yaml"
    yield from _EXTERNAL_EXAMPLE.format(profile=profile_id).splitlines()
    yield "```\n"
    yield "It is started so:\n"
    yield "```text"
    yield from textwrap.wrap(" ".join(external.argv), _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield "```\n"
    yield _filled(f"Looked up: {external.source}.") + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.stdout.write(markdown())
