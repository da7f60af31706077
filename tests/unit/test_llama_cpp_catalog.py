"""What the catalog says of llama.cpp's builds, held against what each build's own source takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.catalog import LlamaCppBuild, LlamaCppParser, extract_llama_cpp, load_catalog
from v100ctl.fleet import KvCacheType, RopeScaling, Sampling, Settings
from v100ctl.plan import llama_cpp

from .factory import make_config, make_facts, make_plan

CATALOG = load_catalog()
BUILDS = [row.build for row in CATALOG.llama_cpp]
PINNED = 11434


def parser_of(build: int) -> LlamaCppParser:
    parser = CATALOG.llama_cpp_parser(build)
    assert parser is not None
    return parser


def row_of(build: int) -> LlamaCppBuild:
    row = CATALOG.llama_cpp_build(build)
    assert row is not None
    return row


def argv_of(build: int, settings: dict[str, Any], *, backend: str = "cpu", extra_args: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The rendered command line of an instance with these settings."""
    config = make_config({"settings": settings, "extra_args": list(extra_args)}, llama_cpp_build=build, llama_cpp_backend=backend)
    return llama_cpp.argv(
        config,
        config.llm_server_instances["chat"],
        row_of(build),
        make_facts(),
        release_path="/opt/x",
        model_path="/srv/models/m.gguf",
        alias="chat",
        draft_model_path="/srv/models/d.gguf",
    )


#: Every setting that llama.cpp knows, with values that differ from what is said where nothing is asked.
SETTINGS: list[dict[str, Any]] = [
    {"context_length": 8192, "parallel": 2},
    *({"kv_unified": value} for value in (True, False)),
    {"batch_size": 512, "ubatch_size": 256},
    *(
        {"kv_cache_type_k": name, "kv_cache_type_v": name}
        for name in get_args(KvCacheType)
        if not llama_cpp.meaningless_settings(Settings(kv_cache_type_k=name))
    ),
    *({"flash_attention": value} for value in ("on", "off", "auto")),
    {"gpu_layers": 12, "split_mode": "layer"},
    {"gpu_layers": 0, "split_mode": "none"},
    {"threads": 4, "threads_batch": 8},
    *({"load_mode": value} for value in ("auto", "none", "mmap", "mmap+mlock", "dio")),
    {"speculative": {"kind": "none"}},
    {"speculative": {"kind": "mtp", "depth": 3}},
    {"speculative": {"kind": "ngram", "depth": 16}},
    {"speculative": {"kind": "draft", "depth": 4, "model": {"path": "/srv/models/d.gguf", "sha256": "cd" * 32}}},
    *({"rope_scaling": {"kind": kind}} for kind in ("none", "linear")),
    {
        "rope_scaling": {
            "kind": "yarn",
            "factor": 4,
            "original_context_length": 32768,
            "base_frequency": 1e6,
            "extension_factor": 1,
            "attention_factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
    {"sampling": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repeat_penalty": 1.1, "presence_penalty": -0.5}},
    {"served_model_name": "a model: with words"},
    {"mmproj": "/srv/models/mmproj.gguf"},
    {"chat_template": "/srv/models/chat.jinja"},
    *({"log_requests": value} for value in (True, False)),
    *({"metrics": value} for value in (True, False)),
    *(profile.values for profile in CATALOG.profiles.values() if profile.engine == "llama_cpp"),
]


@pytest.mark.parametrize("build", BUILDS)
def test_every_spelling_is_an_argument_of_that_build(build: int) -> None:
    row, parser = row_of(build), parser_of(build)
    for setting, spelling in row.flags.spellings.items():
        if isinstance(spelling, str):
            flag = parser.flag(spelling)
            assert flag is not None, (setting, spelling)
            assert flag.arity == 1, (setting, spelling)
            # What follows can be any value of the setting, so a restricted argument has to be spelled value by value.
            assert flag.choices is None or flag.or_integer, (setting, spelling)
            assert not (flag.removed or flag.deprecated), (setting, spelling)
        else:
            for words in spelling.values():
                assert llama_cpp.check_argv(("llama-server", *words), parser) == [], (setting, words)
    for words in row.flags.always:
        assert llama_cpp.check_argv(("llama-server", *words), parser) == []


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda value: "-".join(value))
def test_the_parser_takes_what_a_setting_becomes(build: int, backend: str, settings: dict[str, Any]) -> None:
    assert llama_cpp.check_argv(argv_of(build, settings, backend=backend), parser_of(build)) == []


@pytest.mark.parametrize("build", BUILDS)
def test_what_is_asked_for_both_ways_is_said_both_ways(build: int) -> None:
    for setting in ("kv_unified", "log_requests", "metrics"):
        assert argv_of(build, {setting: True}) != argv_of(build, {setting: False}), setting


@pytest.mark.parametrize("build", BUILDS)
def test_no_setting_is_passed_over(build: int) -> None:
    spelled = set(row_of(build).flags.spellings)
    nested = {"sampling": set(Sampling.model_fields), "rope_scaling": set(RopeScaling.model_fields)}
    for name in Settings.model_fields:
        if name in nested:
            assert {f"{name}.{key}" for key in nested[name]} <= spelled
        elif name == "speculative":
            assert {f"speculative.{key}" for key in ("kind", "model", "depth.mtp", "depth.draft", "depth.ngram")} <= spelled
        else:
            assert (name in spelled) != (name in llama_cpp._MEANINGLESS), name


def test_settings_of_another_engine_are_known_as_such() -> None:
    given_all = Settings(
        dtype="half",
        quantization="gptq",
        gpu_memory_utilization=0.9,
        swap_space_gib=0,
        enforce_eager=False,
        chunked_prefill=False,
        prefix_caching=True,
        kv_cache_type_k="fp8",
        kv_cache_type_v="auto",
        context_length=1,
    )
    assert set(llama_cpp.meaningless_settings(given_all)) == set(given_all.model_dump(exclude_none=True)) - {"context_length"}
    assert llama_cpp.meaningless_settings(Settings(kv_cache_type_k="q8_0", context_length=1, metrics=True)) == {}


@pytest.mark.parametrize("build", BUILDS)
def test_a_secret_flag_is_known_in_all_its_spellings(build: int) -> None:
    row, parser = row_of(build), parser_of(build)
    for word in row.secret_flags:
        flag = parser.flag(word)
        assert flag is not None
        assert set(flag.words) <= set(row.secret_flags)


@pytest.mark.parametrize("build", BUILDS)
def test_short_and_negated_spellings_are_settings_too(build: int) -> None:
    settings = llama_cpp.settings_by_flag(row_of(build), CATALOG.llama_cpp_parser(build))
    assert (settings["-c"], settings["-np"], settings["-ngl"]) == ("context_length", "parallel", "gpu_layers")
    assert settings["-no-kvu"] == settings["--kv-unified"] == "kv_unified"
    assert settings["-md"] == "speculative.model"
    # The verbosity says more than whether requests are logged.
    assert "-lv" not in settings
    assert "--cache-ram" not in settings


@pytest.mark.parametrize("build", BUILDS)
def test_build_options_are_options_of_that_build(build: int) -> None:
    row, parser = row_of(build), parser_of(build)
    for name in {**row.cmake_options.common, **row.cmake_options.cuda, "GGML_CUDA_FORCE_MMQ": ""}:
        assert name.startswith("CMAKE_") or name in parser.cmake_options, name
    for old, removed in parser.cmake_removed.items():
        assert old not in parser.cmake_options
        assert removed.instead is None or removed.instead in parser.cmake_options


@pytest.mark.parametrize("build", BUILDS)
def test_compiled_cache_pairs_are_those_of_the_option(build: int) -> None:
    known = row_of(build).cuda_flash_attention
    option = parser_of(build).cuda_flash_attention
    if option.option == "GGML_CUDA_FA_QUANTS":
        assert set(option.default.split(";")) <= set(known.pairs)
    else:
        assert option.default == "OFF"
        assert known.convertible == ()
    for pair in known.pairs:
        assert set(pair.split("-")) <= set(parser_of(build).kv_cache_types)
    assert known.kernel("q8_0", "q8_0") == "compiled"
    assert known.kernel("q8_0", "q4_0") == ("converted" if build > 11000 else "cpu")
    assert known.kernel("iq4_nl", "iq4_nl") == "cpu"


@pytest.mark.parametrize("build", BUILDS)
def test_former_flags_are_gone_and_have_a_successor(build: int) -> None:
    parser = parser_of(build)
    for old, new in parser.former_flags.items():
        assert parser.flag(old) is None
        assert llama_cpp.check_argv(("llama-server", *new.split()), parser) == []
        (problem,) = llama_cpp.check_argv(("llama-server", old), parser)
        assert (problem.kind, problem.meant) == ("unknown", new)


def test_the_release_in_caches_keeps_its_name() -> None:
    assert make_plan().releases[0].build_id == "b11434-cpu-bedc408a44d6"


def test_a_value_that_a_build_cannot_say_names_the_builds_that_can() -> None:
    with pytest.raises(llama_cpp.UnspelledSettingError) as caught:
        argv_of(10121, {"load_mode": "mlock"})
    assert caught.value.args == ("load_mode",)
    assert caught.value.builds(CATALOG.llama_cpp) == (9851, 11053, 11434)


def test_a_draft_model_has_to_have_a_path() -> None:
    config = make_config({"settings": {"speculative": {"kind": "draft", "model": {"path": "/d.gguf", "sha256": "cd" * 32}}}})
    spec = config.llm_server_instances["chat"]
    with pytest.raises(ValueError, match="draft model"):
        llama_cpp.argv(config, spec, row_of(PINNED), make_facts(), release_path="/r", model_path="/m", alias="a")


@pytest.mark.parametrize("build", CATALOG.llama_cpp_parser_builds)
def test_a_parser_file_is_what_the_extraction_writes(build: int) -> None:
    path = extract_llama_cpp.OUTPUT / f"{build}.yml"
    text = path.read_text(encoding="utf-8")
    assert extract_llama_cpp.dump(yaml.safe_load(text)) == text
    parser = parser_of(build)
    words = [word for flag in parser.flags for word in flag.words]
    assert len(words) == len(set(words)), "no word names two arguments"
    assert not set(words) & parser.other_programs
    assert {"llama", "qwen3", "gemma3"} <= parser.architectures


def test_builds_differ_where_their_sources_do() -> None:
    assert parser_of(9851).flag("--no-mmap") is not None
    assert parser_of(10121).flag("--no-mmap").deprecated is not None  # type: ignore[union-attr] # known there
    assert parser_of(11434).flag("--no-mmap") is None
    assert "qwen35" in parser_of(9851).architectures
    assert parser_of(9851).architectures < parser_of(11434).architectures


class TestCheckArgv:
    """Each kind of problem, and what is none."""

    @pytest.mark.parametrize(
        ("words", "kind", "meant"),
        [
            (("--ctx-sise", "1"), "unknown", "--ctx-size"),
            (("--no-flash-attn",), "unknown", "--flash-attn off"),
            (("--no-mmap",), "unknown", "--load-mode none"),
            (("--ctx-size=4096",), "unknown", "--ctx-size 4096"),
            (("--metrics=true",), "unknown", "--metrics"),
            (("--prompt-cache", "x"), "unknown", None),
            (("model.gguf",), "unknown", None),
            (("--flash-attn", "--cache-type-k", "q8_0"), "value", "--flash-attn on"),
            (("-fa", "yes"), "value", None),
            (("-ctk", "q9_0"), "value", "-ctk q8_0"),
            (("-ctk", "fp8"), "value", None),
            (("-ngl", "everything"), "value", None),
            (("-c", "lots"), "value", None),
            (("-c", "99999999999"), "value", None),
            (("-np", "0"), "value", None),
            (("--spec-ngram-mod-n-max", "5000"), "value", None),
            (("--temp", "warm"), "value", None),
            (("--spec-type", "ngram-mod,nonsense"), "value", None),
            (("-c",), "missing-value", None),
            (("--control-vector-layer-range", "1"), "missing-value", None),
            (("--draft-max", "3"), "refused", "--spec-draft-n-max"),
            (("--rpc", "a:1"), "refused", None),
            (("--version",), "refused", None),
            (("--defrag-thold", "0.1"), "deprecated", None),
            (("-c", "8k"), "deprecated", "-c 8"),
        ],
    )
    def test_finds(self, words: tuple[str, ...], kind: str, meant: str | None) -> None:
        problem = llama_cpp.check_argv(("llama-server", *words), parser_of(PINNED))[0]
        assert (problem.word, problem.kind) == (words[0], kind)
        if meant is not None:
            assert problem.meant == meant
        assert problem.fatal == (kind != "deprecated")

    @pytest.mark.parametrize(
        "words",
        [
            (),
            ("--ctx_size", "4096"),
            ("-fa", "1", "-ngl", "all", "-ngl", "99", "--spec-type", "none,draft-mtp"),
            ("--control-vector-layer-range", "1", "2"),
            ("--temp", ".5e-1", "--top-p", "1.", "-c", " +4096"),
            # A text may look like a flag: it is taken as it stands.
            ("--alias", "--metrics"),
            ("--reasoning-budget", "-1", "--numa", "numactl"),
        ],
    )
    def test_passes(self, words: tuple[str, ...]) -> None:
        assert llama_cpp.check_argv(("llama-server", *words), parser_of(PINNED)) == []

    def test_finds_all_at_once(self) -> None:
        argv = ("llama-server", "--nope", "-fa", "maybe", "-c", "1", "--also-no")
        assert [problem.word for problem in llama_cpp.check_argv(argv, parser_of(PINNED))] == ["--nope", "-fa", "--also-no"]

    @given(st.lists(st.one_of(st.sampled_from(sorted(parser_of(PINNED).words)), st.text(max_size=6)), max_size=12))
    def test_loses_no_word(self, words: list[str]) -> None:
        parser = parser_of(PINNED)
        cut = list(llama_cpp.split_argv(words, parser))
        assert [part for word, _, values in cut for part in (word, *values)] == words
        for problem in llama_cpp.check_argv(("llama-server", *words), parser):
            assert problem.word in words
            assert problem.message


SOURCE = r"""
// A comment with "a string" and an add_opt(
static const char * not_this = "add_opt(common_arg(";
const std::vector<ggml_type> kv_cache_types = { GGML_TYPE_F16, GGML_TYPE_IQ4_NL };
static std::initializer_list<enum llama_example> eyes = { LLAMA_EXAMPLE_MTMD, LLAMA_EXAMPLE_SERVER };
bool common_arg_utils::is_truthy(const std::string & value) { return value == "on"; }
bool common_arg_utils::is_falsey(const std::string & value) { return value == "off"; }
bool common_arg_utils::is_autoy(const std::string & value) { return value == "auto"; }
common_params_context common_params_parser_init(common_params & params, llama_example ex, void(*print_usage)(int, char **)) {
    auto add_opt = [&](common_arg arg) {
        if (arg.in_example(ex)) { ctx_arg.options.push_back(std::move(arg)); }
    };
    add_opt(common_arg({"-x", "--ex"}, "N", string_format("(%d) ',' \"quoted\"", params.x),
        [](common_params & params, int value) {
            if (value < 2 || value > 9) { throw std::invalid_argument("no"); }
            params.x = value;
        }
    ).set_env("LLAMA_ARG_X"));
    add_opt(common_arg({"--both"}, {"-no-b", "--no-both"}, "text", [](common_params & params, bool value) { params.b = value; }
    ).set_examples(eyes));
    add_opt(common_arg({"--mood"}, "[on|off]", "text", [](common_params & params, const std::string & value) {
        if (is_truthy(value)) { params.m = 1; }
        else if (is_falsey(value)) { params.m = 0; }
        else { throw std::runtime_error("bad"); }
    }));
    add_opt(common_arg({"--two"}, "A", "B", "text",
        [](common_params & params, const std::string & a, const std::string & b) { params.two = a + b; }));
    add_opt(common_arg({"--others"}, "text", [](common_params &) { }).set_examples({LLAMA_EXAMPLE_PERPLEXITY}));
    add_opt(common_arg({"--not-here"}, "text", [](common_params &) { }).set_excludes({LLAMA_EXAMPLE_SERVER}));
    if (ex == LLAMA_EXAMPLE_SERVER) {
        add_opt(common_arg({"--slots"}, "N", "text", [](common_params & p, int value) { p.s = value; }));
    } else {
        add_opt(common_arg({"--slots"}, "text", [](common_params & p) { p.s = 1; }));
    }
    add_opt(common_arg({"--old"}, "N", "text", [](common_params &, int) { arg_removed("use --ex or --b*h"); }));
    return ctx_arg;
}
"""


class TestExtraction:
    """The reader of the engine's C++, on a source that has one of each."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        files = {
            "common/arg.cpp": SOURCE,
            "common/chat.cpp": 'format common_reasoning_format_from_name(const std::string & f) { if (f == "n") {} }',
            "common/speculative.cpp": 'const std::map<std::string, int> common_speculative_type_from_name_map = { {"none", 0} };',
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    def test_reads_each_form(self, tree: Path) -> None:
        rows, others, types = extract_llama_cpp.flags(tree)
        found = {row["names"][-1]: row for row in rows}
        assert set(found) == {"--ex", "--both", "--mood", "--two", "--slots", "--old"}
        assert found["--ex"] == {
            "names": ["-x", "--ex"],
            "arity": 1,
            "type": "int",
            "hint": "N",
            "minimum": 2,
            "maximum": 9,
            "env": "LLAMA_ARG_X",
            "programs": ["common"],
        }
        assert found["--both"]["negated"] == ["-no-b", "--no-both"]
        assert found["--both"]["programs"] == ["mtmd", "server"]
        assert found["--mood"]["choices"] == ["off", "on"]
        assert found["--two"]["arity"] == 2
        assert found["--slots"]["arity"] == 1, "the server's, not that of the other programs"
        assert found["--old"]["instead"] == ["--ex", "--both"]
        assert others == ["--not-here", "--others"]
        assert types == ["f16", "iq4_nl"]

    def test_says_what_it_cannot_read(self, tree: Path) -> None:
        path = tree / "common/arg.cpp"
        path.write_text(SOURCE.replace('common_arg({"--two"}', 'make_arg({"--two"}'), encoding="utf-8")
        with pytest.raises(extract_llama_cpp.ExtractError, match="no common_arg"):
            extract_llama_cpp.flags(tree)


def test_the_plan_says_how_the_engine_itself_is_asked() -> None:
    (instance,) = make_plan().instances
    assert instance.parser_argv == (*instance.argv, "--help")
    assert make_plan().to_role_variables()["instances"][0]["parser_argv"] == list(instance.parser_argv)


def test_flags_that_move_memory_or_load_another_model_are_flags_of_each_build() -> None:
    catalog = load_catalog()
    for row in catalog.llama_cpp:
        parser = catalog.llama_cpp_parser(row.build)
        assert parser is not None
        assert [word for word in (*row.flags.moves_memory, *row.flags.loads_model) if parser.flag(word) is None] == []
        assert llama_cpp.moves_memory(["--log-prefix", "-ts", "3,1"], row, parser) == "-ts"
        assert llama_cpp.moves_memory(["--chat-template", "-ts"], row, parser) is None, "a value is no flag"
