"""The header of a GGUF file: metadata and tensor sizes, without the weights.

Strict about everything that llama.cpp is strict about (``ggml/src/gguf.cpp`` and ``src/llama-model-loader.cpp`` of b11434), so
that a header that is read here is one that the engine reads too, and bounded: a damaged or hostile file costs less than a second
and a few dozen MB (:class:`~v100ctl.models.source.Budget`). Arrays of strings have to be walked over to find their end; of them
and of long numeric arrays only the length is kept.

Standard library only, Python >= 3.8: this module is sent to hosts as it is.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from v100ctl.models.source import (
    Budget,
    ModelFormatError,
    ModelHeaderError,
    ModelIncompleteError,
    ModelMissingError,
    Opener,
    Source,
    shown,
)

MAGIC = b"GGUF"
#: Numeric arrays up to this length are kept; hyper-parameters by layer are.
MAX_KEPT_ARRAY = 4096
#: Longer text values (a whole `tokenizer.json`, say) are skipped and left out of the metadata.
MAX_KEPT_STRING_BYTES = 1 << 20
#: Usual are tens of keys, and about a dozen tensors a layer (all experts of a layer are one).
MAX_KEYS = 16384
MAX_TENSORS = 32768
#: The longest key that the GGUF specification allows (2^16 - 1 bytes).
MAX_KEY_BYTES = 65535
#: Where the weights begin at the latest.
MAX_HEADER_BYTES = 256 << 20
#: Split models: the largest published ones have fewer than 200 parts.
MAX_PARTS = 4096
#: `GGML_MAX_NAME` and `GGML_MAX_DIMS` (ggml/include/ggml.h): llama.cpp refuses longer names and more dimensions.
MAX_NAME_BYTES = 63
MAX_DIMENSIONS = 4
#: `GGUF_DEFAULT_ALIGNMENT` (ggml/include/gguf.h).
DEFAULT_ALIGNMENT = 32
_INT64_MAX = 2**63 - 1

#: ggml type number -> (name as ggml prints it, elements in a block, bytes in a block). Numbers: `enum ggml_type`
#: (ggml/include/ggml.h); names and blocks: `type_traits` (ggml/src/ggml.c) and the static asserts in ggml/src/ggml-common.h; all
#: of b11434.
GGML_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}
#: Types that ggml had once (comments in the same `enum`); the engine refuses them.
REMOVED_GGML_TYPES = {
    4: "q4_2",
    5: "q4_3",
    31: "q4_0_4_4",
    32: "q4_0_4_8",
    33: "q4_0_8_8",
    36: "iq4_nl_4_4",
    37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: `enum gguf_type` (ggml/include/gguf.h) -> struct code.
_NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_UINT32 = 4
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

#: First bytes of what people take for a GGUF file.
_OTHER_FORMATS = (
    (b"lmgg", "a GGML file of 2023, from before GGUF", "convert it anew; no current llama.cpp reads it"),
    (b"tjgg", "a GGJT file of 2023, from before GGUF", "convert it anew; no current llama.cpp reads it"),
    (b"fmgg", "a GGMF file of 2023, from before GGUF", "convert it anew; no current llama.cpp reads it"),
    (b"algg", "a GGLA adapter of 2023, from before GGUF", "convert it anew; no current llama.cpp reads it"),
    (b"FUGG", "written backwards", "fetch it again, made for little endian"),
    (b"vers", "perhaps a Git LFS pointer instead of the file", "run `git lfs pull` where it came from"),
    (b"PK\x03\x04", "a ZIP archive or a PyTorch file", "convert it to GGUF, or unpack it"),
    (b"<!DO", "a web page", "use the address of the file itself, not of the page that describes it"),
    (b"<htm", "a web page", "use the address of the file itself, not of the page that describes it"),
)
_SPLIT_NAME = re.compile(r"^(.+)-([0-9]{5})-of-([0-9]{5})\.gguf$", re.DOTALL)


class _Cursor:
    """Goes forward through a source, reading ahead by chunks."""

    def __init__(self, source: Source, budget: Budget) -> None:
        self.source = source
        self.budget = budget
        self._buffer = b""
        self._buffer_offset = 0
        self._at = 0
        self._chunk_bytes = source.first_chunk_bytes

    @property
    def offset(self) -> int:
        """Where the next byte is in the file."""
        return self._buffer_offset + self._at

    def error(self, text: str, *, offset: int | None = None, hint: str | None = None) -> ModelHeaderError:
        """An error at this place (or at ``offset``) of the file."""
        return ModelFormatError(
            f"{self.source.name}: {text} (at offset {self.offset if offset is None else offset})",
            hint=hint or "the file is damaged: fetch it again and check its sha256",
        )

    def _cut_off(self, what: str, size: int) -> ModelHeaderError:
        ends = "" if self.source.size_bytes is None else f" at {self.source.size_bytes}"
        return self.error(
            f"cut off: {what} needs {size} bytes, and the file ends{ends}",
            hint="the file is incomplete or damaged: fetch it again and check its sha256",
        )

    def need(self, size: int, what: str) -> None:
        """Have ``size`` bytes in the buffer."""
        missing = size - (len(self._buffer) - self._at)
        if missing <= 0:
            return
        end = self._buffer_offset + len(self._buffer)
        want = max(missing, self._chunk_bytes)
        self._check_end(size, what)
        if self.source.size_bytes is not None:
            want = min(want, self.source.size_bytes - end)
        self.budget.use(self.source.name, "read_bytes", want)
        data = self.source.read(end, want)
        if len(data) < missing:
            raise self._cut_off(what, size)
        self._buffer = self._buffer[self._at :] + data
        self._buffer_offset = self._buffer_offset + self._at
        self._at = 0
        self._chunk_bytes = self.source.chunk_bytes

    def _check_end(self, size: int, what: str) -> None:
        """That ``size`` more bytes lie within the file and within what a header may take."""
        if self.source.size_bytes is not None and self.offset + size > self.source.size_bytes:
            raise self._cut_off(what, size)
        if self.offset + size > MAX_HEADER_BYTES:
            raise self.error(f"{what} would end beyond {MAX_HEADER_BYTES} bytes, where no header reaches")

    def take(self, size: int, what: str) -> bytes:
        """The next ``size`` bytes."""
        self.need(size, what)
        self._at += size
        return self._buffer[self._at - size : self._at]

    def u32(self, what: str) -> int:
        """The next 4 bytes as a number."""
        self.need(4, what)
        self._at += 4
        number: int = _U32.unpack_from(self._buffer, self._at - 4)[0]
        return number

    def u64(self, what: str) -> int:
        """The next 8 bytes as a number."""
        self.need(8, what)
        self._at += 8
        number: int = _U64.unpack_from(self._buffer, self._at - 8)[0]
        return number

    def skip(self, size: int, what: str) -> None:
        """Go on by ``size`` bytes, not reading those that are not in the buffer."""
        if size > len(self._buffer) - self._at:
            self._check_end(size, what)
            self._buffer_offset += self._at + size
            self._buffer, self._at = b"", 0
        else:
            self._at += size

    def skip_strings(self, count: int, what: str) -> None:
        """Go on by ``count`` strings."""
        self.budget.use(self.source.name, "strings", count)
        # The one hot loop: a large vocabulary and its merges are half a million strings.
        length_at = _U64.unpack_from
        while count:
            self.need(8, what)
            buffer, at, number = self._buffer, self._at, 0
            try:
                for number in range(count):  # noqa: B007 - how far it came is used below
                    at += 8 + length_at(buffer, at)[0]
            except (struct.error, OverflowError):
                # The next length is not in the buffer, or nowhere.
                count -= number
            else:
                count = 0
            self.skip(at - self._at, what)

    def text(self, size: int, what: str) -> str:
        """The next ``size`` bytes, which are kept, as text."""
        offset = self.offset
        self.budget.use(self.source.name, "text_bytes", size)
        raw = self.take(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}", offset=offset) from None


def read_gguf(source: Source, budget: Budget | None = None) -> dict[str, Any]:
    """One GGUF file's header.

    Args:
        source: The file.
        budget: What may still be used up; a full one by default.

    Returns:
        ``version``, ``metadata`` (scalars, numeric arrays of at most :data:`MAX_KEPT_ARRAY` entries), ``array_lengths`` (of every
        array), ``tensors`` as ``(name, type, shape, size_bytes)`` with the contiguous dimension first, ``data_offset``,
        ``file_bytes``.

    Raises:
        ModelHeaderError: It is no GGUF file that llama.cpp reads, or is cut off, damaged or absurdly large.
    """
    cursor = _Cursor(source, budget or Budget())
    tensor_count, key_count, version = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    array_lengths: dict[str, int] = {}
    alignment = DEFAULT_ALIGNMENT
    seen = set()
    for number in range(key_count):
        start = cursor.offset
        what = f"the name of key {number}"
        size = cursor.u64(what)
        if not 0 < size <= MAX_KEY_BYTES:
            raise cursor.error(f"{what} has {size} bytes; 1 to {MAX_KEY_BYTES} are allowed", offset=start)
        key = cursor.text(size, what)
        if key in seen:
            raise cursor.error(f"key `{shown(key)}` is there twice", offset=start)
        seen.add(key)
        kind = _read_value(cursor, key, metadata, array_lengths)
        if key == "general.alignment":
            alignment = metadata.get(key, 0) if kind == _UINT32 else 0
            if alignment <= 0 or alignment & (alignment - 1):
                raise cursor.error("`general.alignment` must be a power of two (as uint32)", offset=start)
    tensors, data_offset, file_bytes = _read_tensors(cursor, tensor_count, alignment)
    return {
        "version": version,
        "metadata": metadata,
        "array_lengths": array_lengths,
        "tensors": tensors,
        "data_offset": data_offset,
        "file_bytes": file_bytes if source.size_bytes is None else source.size_bytes,
    }


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Magic, version and counts: how many tensors, how many keys, which version."""
    name = cursor.source.name
    if cursor.source.size_bytes == 0:
        raise ModelFormatError(name + " is empty", hint="fetch it again")
    magic = cursor.take(4, "the magic number")
    if magic != MAGIC:
        for beginning, what, hint in _OTHER_FORMATS:
            if magic == beginning:
                raise ModelFormatError(f"{name} is no GGUF file, but {what}", hint=hint)
        raise ModelFormatError(
            f"{name} is no GGUF file: it begins with {magic!r}, not with {MAGIC!r} (at offset 0)",
            hint="name a `.gguf` file, or for vLLM a folder with `config.json`",
        )
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise ModelFormatError(name + " is a big-endian GGUF file (at offset 4)", hint="use a little-endian one: GPU hosts are")
    if version not in (2, 3):
        raise ModelFormatError(
            f"{name} is GGUF version {version}; llama.cpp reads versions 2 and 3 (at offset 4)",
            hint="convert it anew with a current llama.cpp" if version < 2 else "it needs a newer v100ctl and a newer llama.cpp",
        )
    tensor_count = cursor.u64("the number of tensors")
    if tensor_count > MAX_TENSORS:
        raise cursor.error(f"it claims to hold {tensor_count} tensors; more than {MAX_TENSORS} are not believed", offset=8)
    key_count = cursor.u64("the number of keys")
    if key_count > MAX_KEYS:
        raise cursor.error(f"it claims to hold {key_count} keys; more than {MAX_KEYS} are not believed", offset=16)
    return tensor_count, key_count, version


def _read_value(cursor: _Cursor, key: str, metadata: dict[str, Any], array_lengths: dict[str, int]) -> int:
    """Take a key's value, into ``metadata`` where it is kept. Returns its type's number."""
    what = f"the value of `{shown(key, 80)}`"
    start = cursor.offset
    kind = cursor.u32(what)
    if kind == _STRING:
        size = cursor.u64(what)
        if size > MAX_KEPT_STRING_BYTES:
            cursor.skip(size, what)
        else:
            metadata[key] = cursor.text(size, what)
        return kind
    if kind in _NUMBER_CODES:
        code = struct.Struct("<" + _NUMBER_CODES[kind])
        value = code.unpack(cursor.take(code.size, what))[0]
        metadata[key] = bool(value) if kind == _BOOL else value
        return kind
    if kind != _ARRAY:
        raise cursor.error(f"{what} has the unknown type {kind}", offset=start)
    entry_kind = cursor.u32(what)
    length = cursor.u64(what)
    if entry_kind == _STRING:
        cursor.skip_strings(length, what)
    elif entry_kind in _NUMBER_CODES:
        code = struct.Struct("<" + _NUMBER_CODES[entry_kind])
        if length > MAX_KEPT_ARRAY:
            cursor.skip(length * code.size, what)
        else:
            cursor.budget.use(cursor.source.name, "numbers", length)
            raw = cursor.take(length * code.size, what)
            values = struct.unpack(f"<{length}{_NUMBER_CODES[entry_kind]}", raw)
            metadata[key] = [bool(value) for value in values] if entry_kind == _BOOL else list(values)
    else:
        nested = "an array of arrays, which llama.cpp does not read" if entry_kind == _ARRAY else "of unknown type"
        raise cursor.error(f"{what} is an array whose entries are {nested} ({entry_kind})", offset=start)
    array_lengths[key] = length
    return kind


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[list[tuple[str, str, tuple[int, ...], int]], int, int]:
    """The tensors, where their data begins, and where it ends."""
    tensors = []
    seen = set()
    cursor.budget.use(cursor.source.name, "tensors", count)
    data_bytes = end_bytes = 0
    for number in range(count):
        start = cursor.offset
        what = f"tensor {number}"
        size = cursor.u64(what)
        if size > MAX_NAME_BYTES:
            raise cursor.error(f"the name of {what} has {size} bytes; llama.cpp takes {MAX_NAME_BYTES}", offset=start)
        name = cursor.text(size, "the name of " + what)
        what = f"tensor `{shown(name)}`"
        if name in seen:
            raise cursor.error(what + " is there twice", offset=start)
        seen.add(name)
        dimensions = cursor.u32(what)
        if dimensions > MAX_DIMENSIONS:
            raise cursor.error(f"{what} has {dimensions} dimensions; ggml knows {MAX_DIMENSIONS}", offset=start)
        fields = struct.unpack(f"<{dimensions}QIQ", cursor.take(8 * dimensions + 12, what))
        # A tensor without dimensions is one number.
        shape, type_number, offset = fields[:-2] or (1,), fields[-2], fields[-1]
        type_name, size_bytes = _tensor_size(cursor, what, shape, type_number, start)
        # llama.cpp takes tensors that lie one behind the other, each padded, in the order of the header, and no others.
        if offset != data_bytes:
            raise cursor.error(f"{what} begins at {offset} of the data, not at {data_bytes}", offset=start)
        end_bytes = offset + size_bytes
        data_bytes = -(-end_bytes // alignment) * alignment
        tensors.append((name, type_name, shape, size_bytes))
    data_offset = -(-cursor.offset // alignment) * alignment if count else cursor.offset
    file_bytes = cursor.source.size_bytes
    needed_bytes = data_offset + end_bytes
    if file_bytes is not None and needed_bytes > file_bytes:
        raise ModelFormatError(
            f"{cursor.source.name} is cut off: its tensors reach to byte {needed_bytes}, and the file ends at {file_bytes} "
            f"({100 * file_bytes // needed_bytes}% of it)",
            hint="the file is incomplete: fetch it again and check its sha256",
        )
    return tensors, data_offset, needed_bytes


def _tensor_size(cursor: _Cursor, what: str, shape: tuple[int, ...], type_number: int, start: int) -> tuple[str, int]:
    """A tensor's type by name, and its bytes: elements / block elements * block bytes."""
    elements = 1
    for length in shape:
        if not 0 < length <= _INT64_MAX:
            raise cursor.error(f"{what} has a dimension of {length}: {list(shape)}", offset=start)
        elements *= length
    if type_number not in GGML_TYPES:
        removed = REMOVED_GGML_TYPES.get(type_number)
        raise cursor.error(
            "{} has the type {}, which {}".format(
                what,
                type_number,
                f"was {removed} and has been removed from ggml" if removed else "is not known here",
            ),
            offset=start,
            hint="quantise the model anew" if removed else "the file is damaged, or newer than what is known here",
        )
    name, block_elements, block_bytes = GGML_TYPES[type_number]
    if shape[0] % block_elements:
        raise cursor.error(
            f"{what} has rows of {shape[0]} elements, which {name} cannot hold (blocks of {block_elements})",
            offset=start,
        )
    size_bytes = elements // block_elements * block_bytes
    if elements > _INT64_MAX or size_bytes > _INT64_MAX:
        raise cursor.error(f"{what} is absurdly large: {list(shape)}", offset=start)
    return name, size_bytes


def part_names(name: str, count: int) -> list[str] | None:
    """The names of all parts of a split model, given that of the first (``llama_split_path`` in src/llama.cpp).

    ``None`` where ``name`` is not ``PREFIX-00001-of-COUNT.gguf``.
    """
    found = _SPLIT_NAME.match(name)
    if found is None or int(found.group(2)) != 1 or int(found.group(3)) != count:
        return None
    return [f"{found.group(1)}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def read_gguf_model(opener: Opener, name: str) -> dict[str, Any]:
    """A model of one GGUF file, or of several parts (``NAME-00001-of-00003.gguf``).

    Args:
        opener: Opens a part by name.
        name: The first or only part.

    Returns:
        The fields of :class:`v100ctl.models.types.ModelHeader`.

    Raises:
        ModelHeaderError: See :func:`read_gguf`; or parts are missing (they are named) or do not belong together.
    """
    budget = Budget()
    first = opener(name)
    try:
        header = read_gguf(first, budget)
    finally:
        first.close()
    metadata = header["metadata"]
    architecture = metadata.get("general.architecture")
    count = _whole(metadata.get("split.count"), 1) or 1
    number = _whole(metadata.get("split.no"), 0)
    if count > 1 and number != 0:
        raise ModelFormatError(
            f"{first.name} is part {number + 1} of {count}",
            hint=f"name the first part, `...-00001-of-{count:05d}.gguf`; llama.cpp finds the others from it",
        )
    if not isinstance(architecture, str) or not architecture:
        raise ModelFormatError(
            first.name + " does not say its architecture (`general.architecture`)",
            hint="it is no model: llama.cpp refuses it too",
        )
    tensors = list(header["tensors"])
    file_bytes = header["file_bytes"]
    if count > 1:
        for part in _other_parts(opener, first.name, name, count, budget):
            file_bytes += part["file_bytes"]
            tensors += part["tensors"]
        _check_together(first.name, tensors, metadata)
    return {
        "format": "gguf",
        "architecture": architecture,
        "metadata": metadata,
        "array_lengths": header["array_lengths"],
        "tensors": tensors,
        "file_bytes": file_bytes,
        "parts": count,
        "expected_parts": count,
    }


def _other_parts(opener: Opener, shown_name: str, name: str, count: int, budget: Budget) -> list[dict[str, Any]]:
    if count > MAX_PARTS:
        raise ModelFormatError(f"{shown_name} claims to be one of {count} parts; more than {MAX_PARTS} are not believed")
    names = part_names(name, count)
    if names is None:
        raise ModelFormatError(
            f"{shown_name} is the first of {count} parts, and its name does not end in `-00001-of-{count:05d}.gguf`",
            hint="give the parts their names back: llama.cpp finds the others by them",
        )
    parts = []
    missing = []
    for number, part_name in enumerate(names[1:], start=1):
        try:
            source = opener(part_name)
        except ModelMissingError:
            missing.append(part_name)
            continue
        try:
            part = {} if missing else read_gguf(source, budget)
        finally:
            source.close()
        if missing:
            continue
        if _whole(part["metadata"].get("split.no"), -1) != number:
            raise ModelFormatError(
                "{} says that it is part {}, not part {}".format(
                    source.name, _whole(part["metadata"].get("split.no"), -1) + 1, number + 1
                ),
                hint="it belongs to another model, or was renamed: fetch it again",
            )
        parts.append(part)
    if missing:
        listed = ", ".join("`{}`".format(shown(item.rpartition("/")[2])) for item in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelIncompleteError(
            f"{shown_name}: {len(missing)} of {count} parts missing: {listed}{more}",
            hint="put all parts into one folder",
        )
    return parts


def _check_together(shown_name: str, tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, Any]) -> None:
    names = set()
    for tensor in tensors:
        if tensor[0] in names:
            raise ModelFormatError(
                f"{shown_name}: tensor `{shown(tensor[0])}` is in two parts",
                hint="the parts are of different models: fetch them again",
            )
        names.add(tensor[0])
    expected = _whole(metadata.get("split.tensors.count"), len(tensors))
    if expected != len(tensors):
        raise ModelFormatError(
            f"{shown_name}: its parts hold {len(tensors)} tensors, and {expected} are expected",
            hint="the parts are of different models: fetch them again",
        )


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
