"""Model folders: config.json, safetensors headers, GPTQ and AWQ configurations, and what is meant to harm."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models import making
from tests.unit.models.making import BytesSource, safetensors, safetensors_raw
from v100ctl.models.local import read_local
from v100ctl.models.safetensors import read_safetensors
from v100ctl.models.source import Budget, ModelHeaderError, ModelMissingError
from v100ctl.models.types import ModelHeader, Tensor


def test_a_folder_with_an_index_is_read(tmp_path: Path) -> None:
    header = read_local(making.folder(tmp_path / "model"))
    assert (header.format, header.architecture, header.parts, header.expected_parts) == ("safetensors", "Qwen2ForCausalLM", 2, 2)
    assert header.tensors == (
        Tensor("a.qweight", "I32", (8, 64), 2048),
        Tensor("a.scales", "F16", (1, 64), 128),
        Tensor("b.weight", "BF16", (64,), 128),
    )
    assert header.metadata["hidden_size"] == 64
    assert header.file_bytes == sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))


def test_a_folder_without_an_index_is_read_as_vllm_does(tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "consolidated.safetensors").write_bytes(safetensors({"other": ("F16", [4], 8)}))
    assert {item.name for item in read_local(folder).tensors} == {"a.qweight", "a.scales", "b.weight"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "quant_method": "gptq"}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True}),
    ],
)
def test_the_quantisation_has_a_file_of_its_own(name: str, content: dict[str, Any], tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / name).write_text(json.dumps(content))
    assert read_local(folder).metadata["quantization_config"] == content
    making.folder(folder, {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert read_local(folder).metadata["quantization_config"] == {"quant_method": "awq", "bits": 4}


def test_infinity_in_a_config_is_no_fault(tmp_path: Path) -> None:
    header = read_local(making.folder(tmp_path / "model", {"time_step_limit": [0.0, math.inf]}))
    assert ModelHeader.model_validate(json.loads(json.dumps(header.model_dump(mode="json")))) == header


def test_empty_tensors_and_half_bytes_are_read() -> None:
    found = read_safetensors(BytesSource(safetensors({"a": ("F4", [3, 2], 3), "b": ("F16", [0, 4], 0), "c": ("U8", [], 1)})))
    assert found["tensors"] == [("a", "F4", (3, 2), 3), ("b", "F16", (0, 4), 0), ("c", "U8", (), 1)]


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelMissingError, match=r"1 of 2 files missing: `model-00002-of-00002\.safetensors`"):
        read_local(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelMissingError, match=r"has no `config\.json`"):
        read_local(folder)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"architectures": ["X"]}')
    with pytest.raises(ModelMissingError, match="has no safetensors files"):
        read_local(tmp_path / "bare")


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ("", "is no JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "does not say its architecture"),
        ('{"architectures": []}', "does not say its architecture"),
        ('{"architectures": [1]}', "does not say its architecture"),
        ('{"architectures": "X"}', "does not say its architecture"),
        ('{"a": ' + "[" * 100000 + "]" * 100000 + "}", "nested"),
        ('{"architectures": ["X"], "a": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32 deep"),
        ('{"a": ' + "9" * 100000 + "}", "more than 30 digits"),
        ('{"architectures": ["\\ud800"]}', "lone surrogate"),
        ('{"a": [' + "1," * 1_500_001 + "1]}", "more than 1500000 values"),
    ],
)
def test_a_config_that_is_none(config: str, pattern: str, tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelHeaderError, match=pattern) as caught:
        read_local(folder)
    assert "config.json" in caught.value.message


def test_a_config_in_another_encoding_or_of_many_megabytes(tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelHeaderError, match=r"is not UTF-8 \(at offset 7\)"):
        read_local(folder)
    (folder / "config.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(ModelHeaderError, match="4194304 are the most"):
        read_local(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "config.json", "a\0.safetensors"])
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelHeaderError, match="is no safetensors file of the folder"):
        read_local(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": ["a"]}])
def test_an_index_that_is_none(index: dict[str, Any], tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelHeaderError, match=r"`model\.safetensors\.index\.json`"):
        read_local(folder)


def test_files_of_different_models_are_refused(tmp_path: Path) -> None:
    folder = making.folder(tmp_path / "model")
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(safetensors({"a.scales": ("F16", [64], 128)}))
    with pytest.raises(ModelHeaderError, match=r"tensor `a\.scales` is in two files"):
        read_local(folder)
    second.write_bytes(safetensors({"c.weight": ("F16", [64], 128)}))
    with pytest.raises(ModelHeaderError, match=r"names 1 tensors that no file holds, `b\.weight` the first"):
        read_local(folder)


GOOD = {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}
CASES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is cut off: the header's length needs 8 bytes"),
    "length": (struct.pack("<Q", 2**64 - 1), "its header would have 18446744073709551615 bytes"),
    "beyond the library": (struct.pack("<Q", 100_000_001), "its header would have 100000001 bytes"),
    "beyond the file": (struct.pack("<Q", 100) + b"{}", "cut off: the header needs 100 bytes.*offset 8"),
    "no JSON": (safetensors_raw(b"{]"), r"is no JSON: .* \(at offset 9\)"),
    "no object": (safetensors_raw(b"[]"), "holds no JSON object"),
    "twice": (safetensors_raw(b'{"a": ' + json.dumps(GOOD).encode() + b', "a": ' + json.dumps(GOOD).encode() + b"}", 8), "twice"),
    "no entry": (safetensors({}, a=1), "needs `dtype`, `shape` and `data_offsets`"),
    "no shape": (safetensors({}, a={"dtype": "F16", "data_offsets": [0, 0]}), "needs `dtype`"),
    "type": (safetensors({}, a={**GOOD, "dtype": "Q4"}), "has the type 'Q4', which is not known"),
    "type of type": (safetensors({}, a={**GOOD, "dtype": [1]}), "which is not known"),
    "negative": (safetensors({}, a={**GOOD, "shape": [-4]}), "`shape` must be whole numbers"),
    "fraction": (safetensors({}, a={**GOOD, "shape": [4.0]}), "`shape` must be whole numbers"),
    "truth": (safetensors({}, a={**GOOD, "shape": [True]}), "`shape` must be whole numbers"),
    "offsets": (safetensors({}, a={**GOOD, "data_offsets": [0]}), "has 1 offsets"),
    "size": (safetensors({"a": ("F16", [4], 9)}), r"9 bytes of data, and F16 \[4\] takes 8"),
    "half a byte": (safetensors({"a": ("F4", [3], 1)}), r"1 bytes of data, and F4 \[3\] takes 1.5"),
    "backwards": (safetensors({}, a={**GOOD, "shape": [0], "data_offsets": [8, 0]}), "-8 bytes of data"),
    "overflow": (safetensors({}, a={**GOOD, "shape": [2**62] * 60}), "absurdly large"),
    "hole": (safetensors({}, a={**GOOD, "data_offsets": [8, 16]}), "begins at 8 of the data, not at 0"),
    "cut off": (safetensors({"a": ("F16", [4], 8)})[:-1], "is cut off: its tensors reach to byte"),
    "too long": (safetensors({"a": ("F16", [4], 8)}) + b"\0", "is too long"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_true_is_refused(name: str) -> None:
    content, pattern = CASES[name]
    with pytest.raises(ModelHeaderError, match=pattern) as caught:
        read_safetensors(BytesSource(content))
    assert caught.value.hint and caught.value.message.startswith("`memory`")


VALID = safetensors({"a.qweight": ("I32", [8, 64], 2048), "a.scales": ("F16", [1, 64], 128), "b": ("F8_E4M3", [3], 3)})


def check(content: bytes) -> None:
    reader = BytesSource(content)
    try:
        found = read_safetensors(reader)
    except ModelHeaderError as error:
        assert error.message and "\n" not in error.message
    else:
        assert found["file_bytes"] == len(content)
    assert reader.read_bytes <= len(content)


@settings(max_examples=300)
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=5), length=st.integers(0, 4000))
def test_damage_never_crashes(changes: list[tuple[int, int]], length: int) -> None:
    content = bytearray(VALID)
    for at, value in changes:
        content[at % len(content)] = value
    check(bytes(content))
    check(VALID[:length])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(header=st.dictionaries(st.text(max_size=5), values | st.fixed_dictionaries({name: values for name in GOOD}), max_size=4))
def test_any_json_never_crashes(header: dict[str, Any]) -> None:
    check(safetensors_raw(json.dumps(header).encode(), 16))


@pytest.mark.parametrize("filling", [b"[", b"{", b'{"a":', b"[0,", b'"a":{},', b"9"])
def test_hostile_headers_take_bounded_memory(filling: bytes) -> None:
    content = safetensors_raw(b'{"a":' + filling * ((8 << 20) // len(filling)))
    tracemalloc.start()
    try:
        with pytest.raises(ModelHeaderError):
            read_safetensors(BytesSource(content))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 160 << 20


def test_many_shards_share_one_budget() -> None:
    budget = Budget()
    content = safetensors({f"a{number}": ("U8", [1], 1) for number in range(1000)})
    with pytest.raises(ModelHeaderError, match="more than 150000 tensors"):
        for _ in range(151):
            read_safetensors(BytesSource(content), budget)
