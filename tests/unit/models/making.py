"""Model files for tests: GGUF by the `gguf` package's own writer or by hand, and safetensors by hand.

Whole models of real shapes are made by :mod:`tests.device.shapes`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from v100ctl.models.source import Source

#: Types of GGUF values that tests write by hand.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


class BytesSource(Source):
    """Bytes in memory that count what is read of them."""

    name = "`memory`"

    def __init__(self, content: bytes, *, size_known: bool = True) -> None:
        self._content = content
        self.size_bytes = len(content) if size_known else None
        self.read_bytes = 0
        self.reads = 0

    def read(self, offset: int, size: int) -> bytes:
        part = self._content[offset : offset + size]
        self.read_bytes += len(part)
        self.reads += 1
        return part


def writer(path: Path, architecture: str = "qwen2", **options: Any) -> gguf.GGUFWriter:
    """The package's writer with a few keys that every model has."""
    made = gguf.GGUFWriter(path, architecture, **options)
    made.add_block_count(2)
    made.add_embedding_length(64)
    made.add_head_count(4)
    made.add_layer_norm_rms_eps(1e-6)
    made.add_name("tiny")
    return made


def finish(made: gguf.GGUFWriter) -> None:
    """Write everything."""
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def dense(path: Path, *, vocabulary: int = 300) -> dict[str, tuple[int, ...]]:
    """A dense model with a vocabulary, floats and quantised weights; the shapes, contiguous dimension first."""
    made = writer(path)
    made.add_tokenizer_model("gpt2")
    made.add_token_list([f"token {number}" for number in range(vocabulary)])
    made.add_token_scores([float(number) for number in range(vocabulary)])
    made.add_token_types([1] * vocabulary)
    made.add_token_merges([f"a{number} b" for number in range(vocabulary)])
    made.add_array("qwen2.attention.pattern", [True, False])
    made.add_array("qwen2.rope.dimension_sections", [11, 11, 10, 0])
    shapes: dict[str, tuple[int, ...]] = {}
    quantised = gguf.quants.quantize(np.zeros((32, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    made.add_tensor("token_embd.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    shapes["token_embd.weight"] = (64, 32)
    for number in range(2):
        made.add_tensor(f"blk.{number}.attn_q.weight", np.zeros((64, 64), dtype=np.float16))
        made.add_tensor(f"blk.{number}.attn_norm.weight", np.zeros(64, dtype=np.float32))
        shapes |= {f"blk.{number}.attn_q.weight": (64, 64), f"blk.{number}.attn_norm.weight": (64,)}
    finish(made)
    return shapes


def split(folder: Path, *, tensors: int = 7) -> Path:
    """A model in three parts, as `gguf-split` makes them; the first part's path."""
    made = writer(folder / "split.gguf", split_max_tensors=3)
    for number in range(tensors):
        made.add_tensor(f"blk.{number}.attn_q.weight", np.zeros((64, 64), dtype=np.float16))
    finish(made)
    return folder / "split-00001-of-00003.gguf"


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """A key with its value."""
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor's entry in the header."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def by_hand(
    keys: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    data_bytes: int = 0,
    key_count: int | None = None,
    tensor_count: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """A GGUF file as the test says, right or wrong."""
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + b"\0" * data_bytes


def safetensors(tensors: Mapping[str, tuple[str, Sequence[int], int]], **more: Any) -> bytes:
    """A safetensors file of zeros: name -> (type, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return safetensors_raw(json.dumps({**header, **more}).encode(), end)


def safetensors_raw(header: bytes, data_bytes: int = 0) -> bytes:
    """A safetensors file with this header."""
    return struct.pack("<Q", len(header)) + header + b"\0" * data_bytes


def folder(path: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A model folder with two shards."""
    path.mkdir(parents=True, exist_ok=True)
    given = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "torch_dtype": "float16", **(config or {})}
    (path / "config.json").write_text(json.dumps(given))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (path / names[0]).write_bytes(safetensors({"a.qweight": ("I32", [8, 64], 2048), "a.scales": ("F16", [1, 64], 128)}))
    (path / names[1]).write_bytes(safetensors({"b.weight": ("BF16", [64], 128)}))
    weight_map = {"a.qweight": names[0], "a.scales": names[0], "b.weight": names[1]}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
