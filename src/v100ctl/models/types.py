"""A model's header as plain frozen data, whichever file format it came from. It round-trips through JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Tensor(NamedTuple):
    """One tensor of a model file.

    GGUF: ``type`` as ggml prints it (``f16``, ``q4_K``, ``iq3_xxs``), ``shape`` in ggml's order (``ne[0]``, the contiguous one,
    first). safetensors: both as the file's header has them (``F16``; rows first).
    """

    name: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int


class ModelHeader(BaseModel):
    """Everything about a model that can be known without its weights.

    ``metadata`` holds a GGUF's scalars and its numeric arrays of at most 4096 entries, or a ``config.json`` as it is.
    ``array_lengths`` has the length of every array of a GGUF, the long ones (``tokenizer.ggml.tokens``) included.
    """

    # Some `config.json` hold `Infinity`, which would come back as null.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    format: Literal["gguf", "safetensors"]
    architecture: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    array_lengths: dict[str, int] = Field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    file_bytes: int = 0
    parts: int = 1
    expected_parts: int = 1

    @property
    def tensor_bytes(self) -> int:
        """The weights alone, in bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class NotAModel:
    """What lies where the model should is certainly none; ``reason`` says what was found."""

    reason: str


class HubFile(BaseModel):
    """One file of a model: ``name`` below the model's folder, ``path`` in its repository where that is another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str
    size_bytes: int | None = None
    path: str = ""


class HubListing(BaseModel):
    """What a model hub said of the files of a repository at a commit; ``problem`` says why it said nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str = ""
    files: tuple[HubFile, ...] = ()
    problem: str = ""


#: What is known of one model: its header, that it is none, or (a text) why nobody knows.
Known = ModelHeader | NotAModel | str
