"""A model folder as vLLM reads it: ``config.json`` and the headers of its safetensors files, without the weights.

As strict as the safetensors library (``safetensors/src/tensor.rs``: every byte of the data belongs to one tensor, sizes fit types
and shapes), and bounded like :mod:`v100ctl.models.gguf`.

Standard library only, Python >= 3.8: this module is sent to hosts as it is.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from v100ctl.models.source import (
    Budget,
    ModelFormatError,
    ModelIncompleteError,
    ModelMissingError,
    Opener,
    Source,
    shown,
)

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Where vLLM looks when `config.json` has no `quantization_config` (`get_config_filenames` of its gptq.py and awq.py).
QUANTIZATION_CONFIGS = ("quantize_config.json", "quant_config.json")
#: `MAX_HEADER_SIZE` of the library.
MAX_HEADER_BYTES = 100_000_000
#: What is read of that: it is the library's limit that no file comes near, and JSON takes ten times its size in memory.
MAX_READ_HEADER_BYTES = 24 << 20
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 24 << 20
MAX_SHARDS = 1024
MAX_DEPTH = 32
#: Values in one JSON document.
MAX_VALUES = 1_500_000
_MAX_DIGITS = 30

#: Bits an element (`Dtype::bitsize` in safetensors/src/tensor.rs; the FNUZ kinds from `_TYPES` in its torch.py, version 0.8.0).
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def read_safetensors(source: Source, budget: Budget | None = None) -> dict[str, Any]:
    """One safetensors file's header.

    Returns:
        ``tensors`` as ``(name, type, shape, size_bytes)``, by offset, and ``file_bytes``.

    Raises:
        ModelHeaderError: It is no safetensors file, or is cut off, damaged or absurdly large.
    """
    budget = budget or Budget()
    raw = _read(source, budget, 0, 8, "the header's length")
    (length,) = struct.unpack("<Q", raw)
    again = "the file is damaged: fetch it again and check its sha256"
    if length > MAX_HEADER_BYTES:
        raise ModelFormatError(
            f"{source.name} is no safetensors file: its header would have {length} bytes, and {MAX_HEADER_BYTES} are the most "
            "(at offset 0)",
            hint="name a folder with `config.json` and safetensors files; " + again,
        )
    if length > MAX_READ_HEADER_BYTES:
        raise ModelFormatError(
            f"{source.name}: a header of {length} bytes is not read; {MAX_READ_HEADER_BYTES} are the most (at offset 0)",
            hint=again,
        )
    document = _parse(_read(source, budget, 8, length, "the header"), source.name, 8, strict=True)
    document.pop("__metadata__", None)
    budget.use(source.name, "tensors", len(document))
    entries = []
    for name, entry in document.items():
        budget.use(source.name, "text_bytes", len(name))
        entries.append(_tensor(source.name, name, entry))
    entries.sort()
    end = 0
    for begin, stop, name, _, _ in entries:
        if begin != end:
            raise ModelFormatError(
                f"{source.name}: tensor `{shown(name)}` begins at {begin} of the data, not at {end}", hint=again
            )
        end = stop
    whole = 8 + length + end
    if source.size_bytes is not None and source.size_bytes != whole:
        cut = source.size_bytes < whole
        raise ModelFormatError(
            f"{source.name} {'is cut off' if cut else 'is too long'}: its tensors reach to byte {whole}, and the file ends at "
            f"{source.size_bytes}",
            hint=f"the file is {'incomplete' if cut else 'damaged'}: fetch it again and check its sha256",
        )
    tensors = [(name, dtype, shape, stop - begin) for begin, stop, name, dtype, shape in entries]
    return {"tensors": tensors, "file_bytes": whole}


def _tensor(source_name: str, name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    where = f"{source_name}: tensor `{shown(name)}`"
    again = "the file is damaged: fetch it again and check its sha256"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ModelFormatError(where + " needs `dtype`, `shape` and `data_offsets`", hint=again)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelFormatError(
            f"{where} has the type {shown(str(dtype), 40)!r}, which is not known here", hint="it may need a newer v100ctl"
        )
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(item) is int and 0 <= item < 2**63 for item in numbers):
            raise ModelFormatError(f"{where}: `{what}` must be whole numbers", hint=again)
    if len(offsets) != 2 or len(shape) > 64:
        raise ModelFormatError(f"{where} has {len(offsets)} offsets and {len(shape)} dimensions", hint=again)
    bits = DTYPE_BITS[dtype]
    for length in shape:
        bits *= length
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise ModelFormatError(
            f"{where}: {end - begin} bytes of data, and {dtype} {shape} takes {bits / 8:g}"
            if bits < 2**200
            else f"{where} is absurdly large",
            hint=again,
        )
    return begin, end, name, dtype, tuple(shape)


def read_folder(opener: Opener, name: str, listing: list[str] | None = None) -> dict[str, Any]:
    """A model folder's header.

    Args:
        opener: Opens a file of the folder by its name.
        name: The folder, for messages, in backticks.
        listing: Its safetensors files, where the place can list them; without an index they are all read, as vLLM does.

    Returns:
        The fields of :class:`v100ctl.models.types.ModelHeader`.

    Raises:
        ModelHeaderError: A file is missing (it is named), damaged, or absurdly large.
    """
    budget = Budget()
    config = _read_json(opener, CONFIG, MAX_CONFIG_BYTES, budget)
    if config is None:
        raise ModelMissingError(f"{name} has no `{CONFIG}`", hint="name a model's folder, or a GGUF file")
    _check_depth(config, f"`{CONFIG}` of {name}")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str) or not architectures[0]:
        raise ModelFormatError(
            f"`{CONFIG}` of {name} does not say its architecture (`architectures`)", hint="name a folder with a language model"
        )
    if config.get("quantization_config") is None:
        for file_name in QUANTIZATION_CONFIGS:
            found = _read_json(opener, file_name, MAX_CONFIG_BYTES, budget)
            if found is not None:
                _check_depth(found, f"`{file_name}` of {name}")
                config["quantization_config"] = found
                break
    names, indexed = _shard_names(opener, name, listing, budget)
    tensors: dict[str, tuple[str, str, tuple[int, ...], int]] = {}
    file_bytes = 0
    missing = []
    for file_name in names:
        try:
            source = opener(file_name)
        except ModelMissingError:
            missing.append(file_name)
            continue
        try:
            # Nothing comes of it any more; only the others that are missing are to be named.
            shard: dict[str, Any] = {} if missing else read_safetensors(source, budget)
        finally:
            source.close()
        if missing:
            continue
        file_bytes += shard["file_bytes"]
        for tensor in shard["tensors"]:
            if tensor[0] in tensors:
                raise ModelFormatError(
                    f"{name}: tensor `{shown(tensor[0])}` is in two files",
                    hint="the files are of different models: fetch them again",
                )
            tensors[tensor[0]] = tensor
    if missing:
        listed = ", ".join(f"`{shown(item)}`" for item in missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        said = f"{name}: {len(missing)} of {len(names)} files missing: {listed}"
        raise ModelIncompleteError(said, hint="fetch the whole folder")
    lost = [item for item in indexed if item not in tensors]
    if lost:
        raise ModelFormatError(
            f"{name}: `{INDEX}` names {len(lost)} tensors that no file holds, `{shown(lost[0])}` the first",
            hint="the files are of different models: fetch them again",
        )
    return {
        "format": "safetensors",
        "architecture": architectures[0],
        "metadata": config,
        "array_lengths": {},
        "tensors": list(tensors.values()),
        "file_bytes": file_bytes,
        "parts": len(names),
        "expected_parts": len(names),
    }


def _shard_names(opener: Opener, name: str, listing: list[str] | None, budget: Budget) -> tuple[list[str], list[str]]:
    """The safetensors files, and the tensors that the index promises."""
    index = _read_json(opener, INDEX, MAX_INDEX_BYTES, budget)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(item, str) for item in weight_map.values()):
            raise ModelFormatError(f"`{INDEX}` of {name} has no `weight_map` of file names", hint="fetch it again")
        names = sorted(set(weight_map.values()))
        if len(names) > MAX_SHARDS or not names:
            raise ModelFormatError(f"`{INDEX}` of {name} names {len(names)} files; 1 to {MAX_SHARDS} are read")
        for file_name in names:
            # The name is joined to the folder's, and nothing else is to be read through it.
            if "/" in file_name or "\\" in file_name or "\0" in file_name or not file_name.endswith(".safetensors"):
                raise ModelFormatError(
                    f"`{INDEX}` of {name} names `{shown(file_name)}`, which is no safetensors file of the folder",
                    hint="do not use this model: look at what it is",
                )
        return names, list(weight_map)
    if listing is None:
        return [SINGLE], []
    names = sorted(item for item in listing if item.endswith(".safetensors"))
    # Some models come twice, in their maker's own layout too.
    names = [item for item in names if not item.startswith("consolidated")] or names
    if not names:
        raise ModelIncompleteError(
            f"{name} has no safetensors files", hint="vLLM models are read as safetensors: convert the weights"
        )
    if len(names) > MAX_SHARDS:
        raise ModelFormatError(f"{name} has {len(names)} safetensors files; {MAX_SHARDS} are read at most")
    return names, []


def _read(source: Source, budget: Budget, offset: int, size: int, what: str) -> bytes:
    end = source.size_bytes
    if end is None or offset + size <= end:
        budget.use(source.name, "read_bytes", size)
        raw = source.read(offset, size)
        if len(raw) == size:
            return raw
        end = offset + len(raw)
    raise ModelFormatError(
        f"{source.name} is cut off: {what} needs {size} bytes, and the file ends at {end} (at offset {offset})",
        hint="the file is incomplete or no safetensors file: fetch it again and check its sha256",
    )


def _read_json(opener: Opener, name: str, limit_bytes: int, budget: Budget) -> dict[str, Any] | None:
    """A JSON file of the folder, or ``None`` where it has none."""
    try:
        source = opener(name)
    except ModelMissingError:
        return None
    try:
        # One byte more than may be there, so that a longer file shows where its size is not known.
        size = limit_bytes + 1 if source.size_bytes is None else source.size_bytes
        if size > limit_bytes and source.size_bytes is not None:
            raise ModelFormatError(f"{source.name} has {size} bytes; {limit_bytes} are the most", hint="it is no such file")
        raw = source.read(0, size)
        if len(raw) > limit_bytes:
            raise ModelFormatError(f"{source.name} has more than {limit_bytes} bytes", hint="it is no such file")
        budget.use(source.name, "read_bytes", len(raw))
        return _parse(raw, source.name, 0)
    finally:
        source.close()


def _whole_number(digits: str) -> int:
    # Older Pythons take hours to turn a million digits into a number.
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
    return int(digits)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"`{shown(key, 80)}` is there twice")
            seen.add(key)
    return document


def _parse(raw: bytes, name: str, offset: int, *, strict: bool = False) -> dict[str, Any]:
    """A JSON object, with its nesting, its values and its numbers bounded; ``strict``: no key twice."""
    if raw.count(b",") + raw.count(b"{") + raw.count(b"[") > MAX_VALUES:
        raise ModelFormatError(f"{name}: more than {MAX_VALUES} values", hint="it is damaged: fetch it again")
    try:
        text = raw.decode("utf-8")
        document = json.loads(text, parse_int=_whole_number, object_pairs_hook=_no_duplicates if strict else None)
        # A lone surrogate (`\ud800`) is valid JSON, and no text that could be written anywhere.
        if "\\u" in text or "\\U" in text:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{name} is not UTF-8 (at offset {offset + error.start})", hint="fetch it again") from None
    except UnicodeEncodeError:
        raise ModelFormatError(f"{name} holds a lone surrogate, which is no text", hint="fetch it again") from None
    except RecursionError:
        raise ModelFormatError(f"{name} is nested too deeply", hint="it is damaged: fetch it again") from None
    except ValueError as error:
        place = f" (at offset {offset + error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ModelFormatError(f"{name} is no JSON: {shown(said)}{place}", hint="it is damaged: fetch it again") from None
    if not isinstance(document, dict):
        raise ModelFormatError(f"{name} holds no JSON object", hint="it is damaged: fetch it again")
    return document


def _check_depth(document: dict[str, Any], what: str) -> None:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ModelFormatError(f"{what} is nested more than {MAX_DEPTH} deep", hint="it is damaged: fetch it again")
