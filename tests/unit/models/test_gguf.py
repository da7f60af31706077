"""GGUF headers: what the format's other implementation writes, what llama.cpp refuses, and what is meant to harm."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device import shapes
from tests.unit.models import making
from tests.unit.models.making import ARCHITECTURE, ARRAY, BOOL, F32, STRING, U8, U32, BytesSource, by_hand, key, tensor, text
from v100ctl.models import gguf, source
from v100ctl.models.gguf import GGML_TYPES, read_gguf, read_gguf_model
from v100ctl.models.local import read_local, to_header
from v100ctl.models.source import Budget, ModelHeaderError, ModelMissingError
from v100ctl.models.types import ModelHeader

#: What reading a header may take at most, whatever is in the file.
MEMORY_BYTES = 160 << 20


def read(content: bytes) -> ModelHeader:
    return to_header(read_gguf_model(lambda _: BytesSource(content), "memory.gguf"))


def refused(content: bytes) -> ModelHeaderError:
    with pytest.raises(ModelHeaderError) as caught:
        read(content)
    assert "`memory`" in caught.value.message
    return caught.value


def test_a_dense_model_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = making.dense(path)
    header = read_local(path)
    assert (header.format, header.architecture, header.parts, header.expected_parts) == ("gguf", "qwen2", 1, 1)
    assert header.file_bytes == path.stat().st_size
    assert {item.name: item.shape for item in header.tensors} == expected
    by_name = {item.name: item for item in header.tensors}
    assert (by_name["token_embd.weight"].type, by_name["token_embd.weight"].size_bytes) == ("q8_0", 32 * 2 * 34)
    assert (by_name["blk.1.attn_norm.weight"].type, by_name["blk.1.attn_norm.weight"].size_bytes) == ("f32", 256)
    assert header.metadata["qwen2.embedding_length"] == 64
    assert header.metadata["qwen2.attention.layer_norm_rms_epsilon"] == struct.unpack("<f", struct.pack("<f", 1e-6))[0]
    assert header.metadata["qwen2.attention.pattern"] == [True, False]
    assert header.metadata["qwen2.rope.dimension_sections"] == [11, 11, 10, 0]
    assert header.metadata["general.name"] == "tiny"


def test_of_string_arrays_only_the_length_is_kept(tmp_path: Path) -> None:
    making.dense(tmp_path / "tiny.gguf", vocabulary=5000)
    header = read_local(tmp_path / "tiny.gguf")
    lengths = {name: header.array_lengths[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "scores", "token_type")}
    assert set(lengths.values()) == {5000}
    assert not [name for name in header.metadata if name in header.array_lengths and name.startswith("tokenizer.")]


def test_short_numeric_arrays_are_kept_up_to_the_limit() -> None:
    def array(length: int) -> bytes:
        return key("x", ARRAY, struct.pack("<IQ", U8, length) + bytes(length))

    at, beyond = read(by_hand([ARCHITECTURE, array(4096)])), read(by_hand([ARCHITECTURE, array(4097)]))
    assert at.metadata["x"] == [0] * 4096 and at.array_lengths["x"] == 4096
    assert "x" not in beyond.metadata and beyond.array_lengths["x"] == 4097


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-30b-a3b", "gemma3-27b", "qwen35-27b", "deepseek2-lite", "gpt-oss-20b"])
def test_models_of_real_shapes_are_read(name: str, tmp_path: Path) -> None:
    shape = shapes.MODELS[name]()
    size_bytes = shapes.write(shape, tmp_path / "model.gguf")
    header = read_local(tmp_path / "model.gguf")
    assert header.architecture == shape.architecture
    assert header.file_bytes == size_bytes
    assert [(item.name, item.type, item.shape) for item in header.tensors] == list(shape.tensors)
    assert [item.size_bytes for item in header.tensors] == [shapes.tensor_bytes(kind, size) for _, kind, size in shape.tensors]


def test_a_header_round_trips_through_json(tmp_path: Path) -> None:
    making.dense(tmp_path / "tiny.gguf")
    header = read_local(tmp_path / "tiny.gguf")
    assert ModelHeader.model_validate(json.loads(json.dumps(header.model_dump(mode="json")))) == header


def test_version_2_is_read() -> None:
    content = by_hand(tensors=[tensor("a.weight", [64, 2], 8, 0)], version=2, data_bytes=136)
    assert read(content).tensors == (("a.weight", "q8_0", (64, 2), 136),)


def test_a_vocabulary_without_weights_is_read() -> None:
    assert read(by_hand()).tensors == ()


def test_a_tensor_without_dimensions_is_one_number() -> None:
    assert read(by_hand(tensors=[tensor("scale", [], 0, 0)], data_bytes=4)).tensors == (("scale", "f32", (1,), 4),)


def test_tensors_are_padded_to_the_alignment_that_the_file_says() -> None:
    keys = [ARCHITECTURE, key("general.alignment", U32, struct.pack("<I", 64))]
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + b"".join(keys)
    header += tensor("a", [8], 0, 0) + tensor("b", [8], 0, 64)
    header += b"\0" * (-len(header) % 64)
    assert len(read(header + bytes(64 + 32)).tensors) == 2
    assert "cut off" in refused(header + bytes(64 + 31)).message
    tighter = header.replace(keys[1], key("general.alignment", U32, struct.pack("<I", 32)))
    assert "begins at 64 of the data, not at 32" in refused(tighter + bytes(200)).message


def test_a_long_text_is_left_out() -> None:
    header = read(by_hand([key("long", STRING, text(b"a" * ((1 << 20) + 1))), ARCHITECTURE, key("short", STRING, text("b"))]))
    assert set(header.metadata) == {"general.architecture", "short"}


def test_a_bool_is_a_bool() -> None:
    assert read(by_hand([ARCHITECTURE, key("x", BOOL, b"\x02")])).metadata["x"] is True


def test_the_size_table_is_that_of_the_gguf_package() -> None:
    theirs = {kind.value: (kind.name.lower(), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    # The package counts 40 bytes, ggml 36 (two halves and 32 numbers, static_assert in ggml-common.h); no file has this type.
    assert theirs.pop(GGMLQuantizationType.Q8_1.value) == ("q8_1", 32, 40)
    ours = {number: (name.lower(), *sizes) for number, (name, *sizes) in GGML_TYPES.items()}
    assert ours.pop(9) == ("q8_1", 32, 36)
    # Newer than some releases of the package.
    if 42 not in theirs:
        assert ours.pop(42) == ("q2_0", 64, 18)
    assert ours == theirs


def test_parts_are_found_and_merged(tmp_path: Path) -> None:
    first = making.split(tmp_path)
    header = read_local(first)
    assert (header.parts, header.expected_parts, len(header.tensors)) == (3, 3, 7)
    assert header.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert header.tensor_bytes == 7 * 64 * 64 * 2
    assert header.metadata["general.name"] == "tiny"


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first = making.split(tmp_path)
    (tmp_path / "split-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelMissingError, match=r"1 of 3 parts missing: `split-00002-of-00003\.gguf`"):
        read_local(first)
    (tmp_path / "split-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelMissingError, match=r"2 of 3 parts missing: .*00002.*, .*00003"):
        read_local(first)


def test_the_first_part_is_wanted(tmp_path: Path) -> None:
    making.split(tmp_path)
    with pytest.raises(ModelHeaderError, match="is part 2 of 3") as caught:
        read_local(tmp_path / "split-00002-of-00003.gguf")
    assert "00001-of-00003" in (caught.value.hint or "")


def test_renamed_parts_are_refused(tmp_path: Path) -> None:
    first = making.split(tmp_path)
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelHeaderError, match="name does not end in `-00001-of-00003"):
        read_local(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(first)
    two, three = tmp_path / "split-00002-of-00003.gguf", tmp_path / "split-00003-of-00003.gguf"
    two.write_bytes(three.read_bytes())
    with pytest.raises(ModelHeaderError, match="says that it is part 3, not part 2"):
        read_local(first)


def test_parts_of_another_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first = making.split(tmp_path)
    making.split(tmp_path / "b", tensors=8)
    (tmp_path / "b" / "split-00003-of-00003.gguf").replace(tmp_path / "split-00003-of-00003.gguf")
    with pytest.raises(ModelHeaderError, match="its parts hold 8 tensors, and 7 are expected"):
        read_local(first)


HUGE = struct.pack("<Q", 2**64 - 1)
CASES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "magic": (by_hand(magic=b"abcd"), r"is no GGUF file: it begins with b'abcd'.*offset 0"),
    "ggml": (b"lmgg" + bytes(100), "GGML file of 2023"),
    "page": (b"<!DOCTYPE html>" + bytes(100), "a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "zip": (b"PK\x03\x04" + bytes(100), "ZIP archive"),
    "version 0": (by_hand(version=0), "is GGUF version 0"),
    "version 1": (by_hand(version=1), "is GGUF version 1"),
    "version 4": (by_hand(version=4), "is GGUF version 4"),
    "big endian": (by_hand(version=0x03000000), "big-endian"),
    "a million keys": (by_hand(key_count=1_000_000), "claims to hold 1000000 keys.*offset 16"),
    "keys": (by_hand(key_count=2**64 - 1), "claims to hold 18446744073709551615 keys"),
    "tensors": (by_hand(tensor_count=2**63), "claims to hold 9223372036854775808 tensors.*offset 8"),
    "key length": (by_hand([HUGE + b"abc"]), "the name of key 0 has 18446744073709551615 bytes.*offset 24"),
    "empty key": (by_hand([key("", U32, bytes(4))]), "the name of key 0 has 0 bytes"),
    "duplicate key": (by_hand([ARCHITECTURE, ARCHITECTURE]), "key `general.architecture` is there twice"),
    "key not UTF-8": (by_hand([key(b"\xff\xfe", U32, bytes(4))]), "the name of key 0 is not UTF-8.*offset 32"),
    "value not UTF-8": (by_hand([key("x", STRING, text(b"\xff"))]), "the value of `x` is not UTF-8"),
    "value type": (by_hand([key("x", 13, bytes(8))]), "the value of `x` has the unknown type 13"),
    "string length": (by_hand([key("x", STRING, HUGE)]), "cut off: the value of `x` needs 18446744073709551615 bytes"),
    "array length": (by_hand([key("x", ARRAY, struct.pack("<I", F32) + HUGE)]), "cut off: the value of `x` needs"),
    "strings": (by_hand([key("x", ARRAY, struct.pack("<I", STRING) + HUGE)]), "its arrays hold more than 2097152 strings"),
    "string in array": (by_hand([key("x", ARRAY, struct.pack("<IQ", STRING, 2) + HUGE)]), "cut off: the value of `x`"),
    "nested arrays": (by_hand([key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32))]), "an array of arrays"),
    "array type": (by_hand([key("x", ARRAY, struct.pack("<IQ", 77, 1) + bytes(32))]), r"of unknown type \(77\)"),
    "alignment 0": (by_hand([key("general.alignment", U32, bytes(4))]), "must be a power of two"),
    "alignment 3": (by_hand([key("general.alignment", U32, struct.pack("<I", 3))]), "must be a power of two"),
    "alignment text": (by_hand([key("general.alignment", STRING, text("32"))]), "must be a power of two"),
    "no architecture": (by_hand([]), "does not say its architecture"),
    "architecture number": (by_hand([key("general.architecture", U32, bytes(4))]), "does not say its architecture"),
    "tensor name": (by_hand(tensors=[tensor("a" * 64, [1], 0, 0)]), "the name of tensor 0 has 64 bytes; llama.cpp takes 63"),
    "duplicate tensor": (by_hand(tensors=[tensor("a", [8], 0, 0), tensor("a", [8], 0, 32)]), "tensor `a` is there twice"),
    "dimensions": (by_hand(tensors=[tensor("a", [1] * 5, 0, 0)]), "tensor `a` has 5 dimensions"),
    "dimension 0": (by_hand(tensors=[tensor("a", [4, 0], 0, 0)]), r"has a dimension of 0: \[4, 0\]"),
    "negative dimension": (by_hand(tensors=[tensor("a", [2**63], 0, 0)]), "has a dimension of 9223372036854775808"),
    "overflow": (by_hand(tensors=[tensor("a", [2**40, 2**40], 0, 0)]), "absurdly large"),
    "type": (by_hand(tensors=[tensor("a", [256], 99, 0)]), "tensor `a` has the type 99, which is not known here"),
    "removed type": (by_hand(tensors=[tensor("a", [256], 31, 0)]), "was q4_0_4_4 and has been removed"),
    "block": (by_hand(tensors=[tensor("a", [100], 12, 0)]), "rows of 100 elements, which q4_K cannot hold"),
    "offset": (by_hand(tensors=[tensor("a", [8], 0, 2**63)]), "begins at 9223372036854775808 of the data, not at 0"),
    "overlap": (by_hand(tensors=[tensor("a", [8], 0, 0), tensor("b", [8], 0, 0)], data_bytes=64), "`b` begins at 0 of the data"),
    "outside": (by_hand(tensors=[tensor("a", [1024], 0, 0)], data_bytes=4095), "is cut off: its tensors reach to byte"),
    "parts": (by_hand([ARCHITECTURE, key("split.count", U32, HUGE[:4])]), "more than 4096 are not believed"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_true_is_refused_with_the_place(name: str) -> None:
    content, pattern = CASES[name]
    with pytest.raises(ModelHeaderError, match=pattern) as caught:
        read(content)
    assert caught.value.hint or name == "parts"
    assert "\n" not in caught.value.message


def test_hostile_names_cannot_reach_the_terminal() -> None:
    error = refused(by_hand([key("\x1b[2J\u202e", 13, b"")]))
    assert "\x1b" not in error.message and "\u202e" not in error.message


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    making.dense(path, vocabulary=20)
    return path.read_bytes()


def test_every_truncation_is_an_error(valid: bytes) -> None:
    whole = read(valid)
    end = read_gguf(BytesSource(valid))["data_offset"] + sum(-(-item.size_bytes // 32) * 32 for item in whole.tensors)
    for length in [*range(0, 2000, 7), *range(len(valid) - 200, len(valid))]:
        try:
            read(valid[:length])
        except ModelHeaderError:
            continue
        # Only the padding behind the last tensor may be missing.
        assert length > end - 32


def check(content: bytes) -> None:
    """Only a header that holds together, or an error of ours; never more than so much memory, nor more reading than is there."""
    reader = BytesSource(content)
    try:
        header = to_header(read_gguf_model(lambda _: reader, "memory.gguf"))
    except ModelHeaderError as error:
        assert error.message and "\n" not in error.message
    else:
        assert header.file_bytes == len(content) and header.tensor_bytes <= len(content)
    # Each byte once at most, but for other parts, which here are the same file again.
    assert reader.read_bytes <= len(content) * gguf.MAX_PARTS


@settings(max_examples=400)
@given(changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_never_crash(valid: bytes, changes: list[tuple[int, int]]) -> None:
    content = bytearray(valid)
    for at, value in changes:
        content[at % len(content)] = value
    check(bytes(content))


@settings(max_examples=200)
@given(at=st.integers(0, 2992), number=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 8])))
def test_other_lengths_never_crash(valid: bytes, at: int, number: int) -> None:
    check(valid[:at] + struct.pack("<Q", number) + valid[at + 8 :])


@settings(max_examples=200)
@given(content=st.binary(max_size=300), counts=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_noise_never_crashes(content: bytes, counts: tuple[int, int]) -> None:
    check(b"GGUF" + struct.pack("<IQQ", 3, *counts) + content)


class EndlessSource(source.Source):
    """A file of 20 GB that is all the same after its beginning."""

    name = "`endless`"
    size_bytes = 20 << 30

    def __init__(self, beginning: bytes, filling: bytes) -> None:
        self._beginning = beginning
        self._filling = filling
        self.read_bytes = 0

    def read(self, offset: int, size: int) -> bytes:
        self.read_bytes += size
        period = len(self._filling)
        begin = offset - len(self._beginning)
        skip = begin % period if begin >= 0 else 0
        filling = (self._filling * (size // period + 2))[skip : skip + size]
        return (self._beginning[offset:] + filling)[:size] if begin < 0 else filling


def counted(keys: int, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


HOSTILE = {
    "empty strings": (counted(2) + key("x", ARRAY, struct.pack("<IQ", STRING, 200_000)), bytes(8)),
    "strings beyond every chunk": (
        counted(1) + key("x", ARRAY, struct.pack("<IQ", STRING, 2_000_000)),
        struct.pack("<Q", (1 << 20) + 64) + bytes((1 << 20) + 64),
    ),
    "large keys": (counted(65000), key("k" * 65000, U8, b"\0")),
    "texts": (counted(65000), key("k", STRING, text("a" * 1_000_000))),
    "short arrays": (counted(65000), key("k", ARRAY, struct.pack("<IQ", F32, 4096) + bytes(4 * 4096))),
    "a long array": (counted(1) + key("x", ARRAY, struct.pack("<IQ", F32, 4 << 30)), bytes(8)),
    "a long text": (counted(1) + key("x", STRING, struct.pack("<Q", 19 << 30)), bytes(8)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_take_bounded_memory_and_reading(name: str) -> None:
    beginning, filling = HOSTILE[name]
    reader = EndlessSource(beginning, filling)
    tracemalloc.start()
    try:
        with pytest.raises(ModelHeaderError):
            read_gguf_model(lambda _: reader, "endless.gguf")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < MEMORY_BYTES
    assert reader.read_bytes <= Budget.MAX_READ_BYTES


def test_many_keys_and_tensors_take_bounded_memory() -> None:
    # An eighth of what is allowed: tracing takes long.
    key_count, tensor_count = gguf.MAX_KEYS // 8, gguf.MAX_TENSORS // 8
    keys = [ARCHITECTURE, *(key(f"key.{number}", U32, bytes(4)) for number in range(key_count - 1))]
    entries = [tensor(f"blk.{number}.weight", [8, 1, 1, 1], 0, 32 * number) for number in range(tensor_count)]
    content = by_hand(keys, entries, data_bytes=32 * tensor_count)
    tracemalloc.start()
    try:
        fields = read_gguf_model(lambda _: BytesSource(content), "memory.gguf")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(fields["metadata"]), len(fields["tensors"])) == (key_count, tensor_count)
    assert peak_bytes < MEMORY_BYTES / 8


def test_a_file_of_20_gb_is_read_in_a_few_reads(tmp_path: Path) -> None:
    # As large as the vocabulary of a current model: 250,000 tokens and as many merges.
    tokens = b"".join(text(f"tok{number}") for number in range(250_000))
    keys = [ARCHITECTURE]
    keys += [key(f"tokenizer.ggml.{name}", ARRAY, struct.pack("<IQ", STRING, 250_000) + tokens) for name in ("tokens", "merges")]
    rows = 20 * 10**9 // 4096 // 4
    content = by_hand(keys, [tensor("a", [4096, rows], 0, 0)])
    path = tmp_path / "large.gguf"
    path.write_bytes(content)
    os.truncate(path, len(content) + 4096 * rows * 4)
    header = read_local(path)
    assert header.file_bytes > 19 * 10**9 and header.array_lengths["tokenizer.ggml.tokens"] == 250_000
    reader = BytesSource(content, size_known=False)
    read_gguf(reader)
    assert reader.read_bytes <= len(content) and reader.reads <= 2 + len(content) // reader.chunk_bytes


def test_a_pipe_and_a_device_are_no_models(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ModelHeaderError, match="no regular file"):
            read_local(path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match="does not exist"):
        read_local(tmp_path / "none.gguf")
    (tmp_path / "file").write_bytes(random.Random(1).randbytes(100))
    with pytest.raises(ModelMissingError, match="does not exist"):
        read_local(tmp_path / "file" / "below.gguf")
