"""The shipped profiles: complete, merged under an instance's own values, judged against the host, and documented."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.device import shapes
from v100ctl.catalog import Catalog, load_catalog
from v100ctl.catalog.profiles import Profile, ProfileModel, load_profiles
from v100ctl.catalog.profiles_page import markdown
from v100ctl.fleet import PLACEHOLDER, PLACEHOLDERS, InstanceSpec, Settings
from v100ctl.models.types import ModelHeader, Tensor
from v100ctl.plan import llama_cpp, vllm, vram
from v100ctl.plan.profiles import (
    ProfileEngineMismatchError,
    ProfileSettingsError,
    UnknownProfileError,
    applied,
    card_rules,
    resolve,
)

from .factory import MODEL, make_config, make_facts

ROOT = Path(__file__).parents[2]
NAMES = [
    "llama-16gb-latency",
    "llama-16gb-rescue",
    "llama-32gb-agents",
    "llama-32gb-concurrent",
    "llama-32gb-latency",
    "llama-32gb-mtp",
    "pxq-16gb-256k",
    "vllm-16gb-latency",
]
#: As `nvidia-smi` reports them.
V100_16GB_BYTES = 16160 * 1024**2
V100_32GB_BYTES = 32510 * 1024**2


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def instance(**values: Any) -> InstanceSpec:
    return InstanceSpec.model_validate({"model": MODEL, **values})


@dataclass(frozen=True)
class Card:
    name: str = "Tesla V100-PCIE-16GB"
    total_bytes: int | None = V100_16GB_BYTES


def test_the_profiles_have_their_fixed_names() -> None:
    assert list(load_profiles()) == NAMES
    files = (ROOT / "src/v100ctl/catalog/profiles").glob("*.yml")
    assert {path.stem: yaml.safe_load(path.read_text())["id"] for path in files} == {name: name for name in NAMES}


@pytest.mark.parametrize("profile", load_profiles().values(), ids=lambda profile: profile.id)
def test_a_profile_says_where_it_comes_from_and_what_it_changes(profile: Profile) -> None:
    assert profile.source
    assert profile.model.source
    assert profile.claims
    assert profile.differs
    assert all(file.sha256 for file in profile.model.files)
    # Settings that the profile sets come back from what an inventory would say.
    assert Settings.model_validate(profile.values) == profile.settings
    assert None not in profile.values.values()


@pytest.mark.parametrize("profile", load_profiles().values(), ids=lambda profile: profile.id)
def test_a_size_that_is_not_known_is_said_to_be_unknown(profile: Profile) -> None:
    if profile.model.size_bytes is None:
        assert "could not be looked up" in (profile.model.note or "")
    else:
        card = V100_16GB_BYTES if "16gb" in profile.id else V100_32GB_BYTES
        assert profile.model.size_bytes < profile.min_memory_bytes <= card


def test_the_profile_is_under_the_instance(catalog: Catalog) -> None:
    spec = resolve(instance(profile="llama-16gb-latency", settings={"context_length": 4096, "threads": None}), catalog)
    assert spec.settings.model_dump(exclude_none=True) == {
        "context_length": 4096,
        "parallel": 1,
        "batch_size": 512,
        "ubatch_size": 256,
        "kv_cache_type_k": "q8_0",
        "kv_cache_type_v": "q8_0",
        "flash_attention": "on",
        "threads_batch": 8,
    }
    assert spec.model.sha256 == MODEL["sha256"]
    assert resolve(spec, catalog) == spec


def test_the_engine_comes_from_the_profile_unless_it_is_said(catalog: Catalog) -> None:
    assert resolve(instance(profile="vllm-16gb-latency"), catalog).engine == "vllm"
    assert resolve(instance(profile="vllm-16gb-latency", engine="vllm"), catalog).engine == "vllm"
    assert resolve(instance(profile="pxq-16gb-256k"), catalog).engine == "external"
    with pytest.raises(ProfileEngineMismatchError, match="is for the engine vllm, and the instance says llama_cpp") as caught:
        resolve(instance(profile="vllm-16gb-latency", engine="llama_cpp"), catalog)
    assert "`engine: vllm`" in (caught.value.hint or "")
    assert "llama-16gb-latency" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("profile", "settings", "key", "merged"),
    [
        ("vllm-16gb-latency", {"sampling": {"top_k": 20}}, "sampling", {"temperature": 0.8, "top_p": 0.9, "top_k": 20}),
        ("vllm-16gb-latency", {"sampling": {"top_p": 1.0}}, "sampling", {"temperature": 0.8, "top_p": 1.0}),
        ("vllm-16gb-latency", {"sampling": None}, "sampling", None),
        ("llama-32gb-mtp", {"speculative": {"kind": "mtp", "depth": 2}}, "speculative", {"kind": "mtp", "depth": 2}),
        ("llama-32gb-mtp", {"speculative": {"kind": "mtp"}}, "speculative", {"kind": "mtp", "depth": 3}),
        # Another kind: the profile's depth is not meant for it.
        ("llama-32gb-mtp", {"speculative": {"kind": "ngram"}}, "speculative", {"kind": "ngram"}),
        ("llama-32gb-mtp", {"speculative": {"kind": "none"}}, "speculative", {"kind": "none"}),
        ("llama-16gb-latency", {"speculative": {"kind": "mtp"}}, "speculative", {"kind": "mtp"}),
    ],
)
def test_nested_settings_are_merged_key_by_key(
    catalog: Catalog, profile: str, settings: dict[str, Any], key: str, merged: dict[str, Any] | None
) -> None:
    spec = resolve(instance(profile=profile, settings=settings), catalog)
    assert spec.settings.model_dump(exclude_none=True).get(key) == merged


@given(
    st.sampled_from(NAMES),
    st.fixed_dictionaries(
        {},
        optional={
            "context_length": st.integers(1, 4096),
            "parallel": st.none() | st.integers(1, 8),
            "flash_attention": st.sampled_from(["on", "off", "auto"]),
            "threads": st.none() | st.integers(1, 64),
            "sampling": st.fixed_dictionaries({}, optional={"top_p": st.floats(0, 1), "top_k": st.none() | st.integers(0, 100)}),
            "metrics": st.booleans(),
        },
    ),
)
def test_what_the_instance_says_is_never_lost(name: str, settings: dict[str, Any]) -> None:
    catalog = load_catalog()
    spec = instance(profile=name, settings=settings)
    resolved = resolve(spec, catalog)
    assert resolve(resolved, catalog) == resolved
    said, under, merged = spec.settings.model_dump(), catalog.profiles[name].settings.model_dump(), resolved.settings.model_dump()
    for key in Settings.model_fields.keys() - {"sampling"}:
        assert merged[key] == (said[key] if key in settings else under[key])
    for key, value in settings.get("sampling", {}).items():
        assert merged["sampling"][key] == value


def test_an_instance_without_a_profile_stays_as_it_is(catalog: Catalog) -> None:
    spec = instance(settings={"threads": 4})
    assert applied("chat", spec, catalog) == (spec, ())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-16gb-latence", "did you mean `llama-16gb-latency`? known: llama-16gb-latency, "),
        ("x", "known: llama-16gb-latency, "),
    ],
)
def test_an_unknown_profile_is_met_with_the_nearest_and_the_list(catalog: Catalog, name: str, hint: str) -> None:
    with pytest.raises(UnknownProfileError, match=f"there is no profile `{name}`") as caught:
        resolve(instance(profile=name), catalog)
    assert (caught.value.hint or "").startswith(hint)
    assert (caught.value.hint or "").endswith(NAMES[-1])
    spec, (rule,) = applied("chat", instance(profile=name), catalog)
    assert spec == instance(profile=name)
    assert (rule.id, rule.severity, rule.instance) == ("profile-unknown", "refuse", "chat")
    assert rule.nearest == caught.value.hint


def test_values_that_do_not_go_together_are_a_refusal(catalog: Catalog) -> None:
    spec = instance(profile="llama-32gb-concurrent", settings={"context_length": 2**30})
    with pytest.raises(ProfileSettingsError, match="`context_length` times `parallel`"):
        resolve(spec, catalog)
    assert [rule.id for rule in applied("chat", spec, catalog)[1]] == ["profile-settings-conflict"]


@pytest.mark.parametrize(
    ("profile", "cards", "says"),
    [
        (
            "llama-32gb-mtp",
            [Card()],
            "made for 29.8 GiB or more (V100 32 GB (PCIe or SXM2) or V100S); Tesla V100-PCIE-16GB has 15.8 GiB",
        ),
        ("llama-32gb-mtp", [Card(total_bytes=V100_32GB_BYTES)], None),
        # With ECC some MiB are missing, and that is still the card that is meant.
        ("llama-32gb-mtp", [Card(total_bytes=V100_32GB_BYTES - 20 * 1024**2)], None),
        ("llama-16gb-latency", [Card()], None),
        ("llama-16gb-latency", [Card("Tesla P4", 8 * 1024**3)], "has 8.0 GiB"),
        # Two cards share one model layer by layer.
        ("llama-32gb-mtp", [Card(), Card()], None),
        ("llama-32gb-mtp", [Card(), Card("Tesla P4", 8 * 1024**3)], "the 2 cards have together 23.8 GiB"),
        # No card, or one that does not tell: nothing to say.
        ("llama-32gb-mtp", [], None),
        ("llama-32gb-mtp", [Card(total_bytes=None)], None),
        ("none-of-ours", [Card()], None),
    ],
)
def test_a_card_below_what_the_profile_is_made_for(catalog: Catalog, profile: str, cards: list[Card], says: str | None) -> None:
    rules = list(card_rules("chat", instance(profile=profile), cards, catalog))
    assert [(rule.id, rule.severity) for rule in rules] == ([("profile-card-too-small", "warn")] if says else [])
    if says:
        assert says in rules[0].reason
        assert rules[0].nearest


def test_the_template_of_an_external_engine_knows_its_words() -> None:
    external = load_profiles()["pxq-16gb-256k"].external
    assert external is not None
    names = {name for word in external.argv for name in PLACEHOLDER.findall(word)}
    assert {"release", "model", "listen", "port"} <= names <= set(PLACEHOLDERS)


ARGV = yaml.safe_load((Path(__file__).parent / "profile_argv.yml").read_text())


def test_every_profile_of_llama_cpp_has_its_words(catalog: Catalog) -> None:
    assert list(ARGV["profiles"]) == [row.id for row in catalog.profiles.values() if row.engine == "llama_cpp"]
    builds = [row.build for row in catalog.llama_cpp]
    assert {name: sorted(case["builds"]) for name, case in ARGV["profiles"].items()} == dict.fromkeys(ARGV["profiles"], builds)


@pytest.mark.parametrize(
    ("name", "build"), [(name, build) for name, case in ARGV["profiles"].items() for build in case["builds"]]
)
def test_a_profile_of_llama_cpp_in_the_words_of_a_build(catalog: Catalog, name: str, build: int) -> None:
    row = catalog.llama_cpp_build(build)
    parser = catalog.llama_cpp_parser(build)
    assert row is not None
    assert parser is not None
    config = make_config(llama_cpp_backend="cuda", llama_cpp_build=build)
    spec = resolve(instance(profile=name), catalog)
    argv = llama_cpp.argv(config, spec, row, make_facts(), release_path="/r", model_path="/m.gguf", alias="chat")
    first = "/r/bin/llama-server --model /m.gguf --alias chat --host 127.0.0.1 --port 8000"
    assert " ".join(argv) == f"{first} {ARGV['profiles'][name]['argv']} {ARGV['always']}"
    # And the build's own parser takes every word as it is meant.
    assert llama_cpp.check_argv(argv, parser) == []
    assert llama_cpp.meaningless_settings(spec.settings) == {}
    assert catalog.profiles[name].model.architecture in parser.architectures


def test_every_profile_of_vllm_has_its_words(catalog: Catalog) -> None:
    assert list(ARGV["vllm"]) == [row.id for row in catalog.profiles.values() if row.engine == "vllm"]
    assert {name: tuple(cases) for name, cases in ARGV["vllm"].items()} == dict.fromkeys(ARGV["vllm"], catalog.vllm_versions)


@pytest.mark.parametrize(("name", "version"), [(name, version) for name, cases in ARGV["vllm"].items() for version in cases])
def test_a_profile_of_vllm_in_the_words_of_a_version(catalog: Catalog, name: str, version: str) -> None:
    row = catalog.vllm(version)
    parser = catalog.vllm_parser(version)
    assert row is not None
    assert parser is not None
    case = ARGV["vllm"][name][version]
    spec = resolve(instance(profile=name), catalog)
    if "refused" in case:
        with pytest.raises(vllm.UnspelledSettingError) as caught:
            vllm.argv(spec, row, release_path="/r", model_path="/m", alias="chat")
        assert caught.value.setting == case["refused"]
        assert case["refused"] in vllm.meaningless_settings(spec.settings, row)
        spec = resolve(instance(profile=name, settings=dict.fromkeys(case["without"])), catalog)
    argv = vllm.argv(spec, row, release_path="/r", model_path="/m", alias="chat")
    first = f"/r/bin/python -m {vllm.MODULE} --model /m --served-model-name chat --host 127.0.0.1 --port 8000"
    assert " ".join(argv) == f"{first} {case['argv']}"
    assert vllm.check_argv(argv, parser) == []
    assert vllm.meaningless_settings(spec.settings, row) == {}
    assert catalog.profiles[name].model.architecture in parser.architectures


def header_of(model: ProfileModel, *, nextn: int) -> ModelHeader:
    """The shape of the model (all recommended GGUF files are of one), its weights scaled to the bytes of the real file."""
    shape = shapes.qwen35(nextn=nextn)
    assert shape.architecture == model.architecture
    size_bytes = model.size_bytes
    assert size_bytes is not None
    sizes = {name: shapes.tensor_bytes(kind, dimensions) for name, kind, dimensions in shape.tensors}
    plain = sum(sizes[name] for name, kind, _ in shape.tensors if kind == "f32")
    scale = (size_bytes - plain) / (sum(sizes.values()) - plain)
    tensors = [
        Tensor(name=name, type=kind, shape=dimensions, size_bytes=sizes[name] if kind == "f32" else int(sizes[name] * scale))
        for name, kind, dimensions in shape.tensors
    ]
    arrays = {key: len(value) for key, value in shape.metadata.items() if isinstance(value, list)}
    return ModelHeader(
        format="gguf",
        architecture=shape.architecture,
        metadata={key: value for key, value in shape.metadata.items() if arrays.get(key, 0) <= 4096},
        array_lengths=arrays,
        tensors=tuple(tensors),
        file_bytes=size_bytes,
        parts=1,
        expected_parts=1,
    )


@pytest.mark.parametrize(
    ("name", "spare_mib"),
    [
        # What is left of the card at the peak, at the least; 400 MiB are counted for the CUDA context.
        ("llama-16gb-latency", 900),
        ("llama-16gb-rescue", 3800),
        ("llama-32gb-agents", 3000),
        ("llama-32gb-concurrent", 14000),
        ("llama-32gb-latency", 14000),
        ("llama-32gb-mtp", 3000),
    ],
)
def test_a_recommended_model_fits_its_card_with_the_profiles_settings(catalog: Catalog, name: str, spare_mib: int) -> None:
    profile = catalog.profiles[name]
    settings = profile.settings
    drafts = settings.speculative is not None and settings.speculative.kind == "mtp"
    row = catalog.llama_cpp_build(11434)
    assert row is not None
    launch = vram.Launch(
        context_size=(settings.context_length or 0) * (settings.parallel or 1),
        parallel=settings.parallel or 1,
        batch_size=settings.batch_size or row.defaults.batch_size,
        ubatch_size=settings.ubatch_size or row.defaults.ubatch_size,
        kv_type_k=settings.kv_cache_type_k or "f16",
        kv_type_v=settings.kv_cache_type_v or "f16",
        speculative=vram.Speculative("mtp", settings.speculative.depth or 1) if drafts and settings.speculative else None,
    )
    total_bytes = V100_16GB_BYTES if "16gb" in name else V100_32GB_BYTES
    card = vram.Card("GPU-0", total_bytes, reserve_bytes=0, context_bytes=400 * 1024**2, bandwidth_bytes_per_s=900e9)
    header = header_of(profile.model, nextn=1 if drafts else 0)
    estimate = vram.estimate(header, launch, [card])
    assert estimate.budgets["GPU-0"].free_bytes >= spare_mib * 1024**2
    assert vram.largest_context(header, launch, [card]) >= (settings.context_length or 0)


@pytest.mark.parametrize(
    ("name", "card_mib"),
    [
        # A load of this very file put that on the card, says the deployment that the profile's `source` means.
        ("llama-16gb-rescue", 11254.73),
        # Listed as 13.703 GiB of VRAM beside other files of this model (sokann/Qwen3.6-27B-GGUF-4.256bpw).
        ("llama-16gb-latency", 13.703 * 1024),
    ],
)
def test_the_weights_on_the_card_are_what_others_saw(catalog: Catalog, name: str, card_mib: float) -> None:
    card = vram.Card("GPU-0", V100_32GB_BYTES, reserve_bytes=0, context_bytes=0, bandwidth_bytes_per_s=900e9)
    header = header_of(catalog.profiles[name].model, nextn=0)
    estimate = vram.estimate(header, vram.Launch(context_size=4096), [card])
    assert estimate.budgets["GPU-0"].weights_bytes == pytest.approx(card_mib * 1024**2, rel=0.002)


def test_the_page_is_in_step_with_the_profiles() -> None:
    assert (ROOT / "docs/profiles.md").read_text() == markdown(), (
        "run `python -m v100ctl.catalog.profiles_page > docs/profiles.md`"
    )
