"""What the header parsers read from, what they may use up, and how they fail.

This module, :mod:`~v100ctl.models.gguf` and :mod:`~v100ctl.models.safetensors` are also sent to hosts: standard library only,
Python >= 3.8.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Protocol

from v100ctl.errors import V100ctlError


class ModelHeaderError(V100ctlError):
    """A model's header cannot be read, or says what cannot be true. The message names the file, what, and the offset."""


class ModelFormatError(ModelHeaderError):
    """What is there is no model, or a damaged one: reading it again would say the same."""


class ModelMissingError(ModelHeaderError):
    """There is no such file or folder."""


class ModelIncompleteError(ModelMissingError, ModelFormatError):
    """Some of a model's files are there and others are not."""


class Budget:
    """What one model (all its parts together) may use up; beyond that its header is refused.

    The limits are several times what models have that such hosts can serve: a vocabulary of 262,144 tokens with its merges
    makes a GGUF header of 16 MB.
    """

    #: Bytes read, whatever for. Skipped ones do not count where they need not be read.
    MAX_READ_BYTES = 64 << 20
    #: Keys, names and text values that are kept.
    MAX_TEXT_BYTES = 16 << 20
    MAX_TENSORS = 150000
    #: Array entries that have to be walked over one by one.
    MAX_STRINGS = 2097152
    #: Entries of numeric arrays that are kept.
    MAX_NUMBERS = 262144

    def __init__(self) -> None:
        self.read_bytes = 0
        self.text_bytes = 0
        self.tensors = 0
        self.strings = 0
        self.numbers = 0

    def use(self, source_name: str, what: str, amount: int) -> None:
        """Take ``amount`` of ``what``: ``read_bytes``, ``text_bytes``, ``tensors``, ``strings`` or ``numbers``.

        Raises:
            ModelHeaderError: that is too much.
        """
        total = getattr(self, what) + amount
        limit = getattr(self, "MAX_" + what.upper())
        if total > limit:
            words = {
                "read_bytes": "more than {} bytes would have to be read",
                "text_bytes": "its keys, names and texts take more than {} bytes",
                "tensors": "more than {} tensors",
                "strings": "its arrays hold more than {} strings",
                "numbers": "its short arrays hold more than {} numbers",
            }[what]
            raise ModelHeaderError(
                f"{source_name}: the header is too large: {words.format(limit)}",
                hint="no published model comes near that: fetch the file again and check its sha256",
            )
        setattr(self, what, total)


class Source:
    """A file that can be read from anywhere in it."""

    #: For messages, in backticks already.
    name = ""
    #: The file's size, or ``None`` where it cannot be known.
    size_bytes: int | None = None
    #: How much to ask for at once: first, and later.
    first_chunk_bytes = 64 << 10
    chunk_bytes = 1 << 20

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``; fewer only at the end of the file.

        Raises:
            ModelHeaderError: it cannot be read.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of it; twice is fine."""


class Opener(Protocol):
    """Opens sources by name: a model's parts, or the files of a folder."""

    def __call__(self, name: str, /) -> Source:
        """The source of this name, closed by the caller.

        Raises:
            ModelMissingError: there is none.
            ModelHeaderError: it cannot be opened.
        """


class FileSource(Source):
    """A regular file of this machine. Neither a FIFO nor a device makes opening it hang."""

    def __init__(self, path: str) -> None:
        self.name = "`" + shown(path) + "`"
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            status = os.fstat(self._descriptor)
        except (OSError, ValueError) as error:
            self.close()
            raise cannot_open(self.name, error) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ModelHeaderError(self.name + " is no regular file", hint="name a GGUF file, or a folder with `config.json`")
        self.size_bytes = status.st_size

    def read(self, offset: int, size: int) -> bytes:
        """See :class:`Source`."""
        parts = []
        while size > 0:
            try:
                part = os.pread(self._descriptor, size, offset)
            except OSError as error:
                raise ModelHeaderError(f"{self.name} cannot be read at offset {offset}: {error.strerror or error}") from error
            if not part:
                break
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """See :class:`Source`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def cannot_open(name: str, error: Exception) -> ModelHeaderError:
    """The system's refusal to open a file, in our words."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOENT, errno.ENOTDIR):
        return ModelMissingError(name + " does not exist", hint="correct the model's path, or put the file there")
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    hint = "let the user who runs this read it" if number in (errno.EACCES, errno.EPERM) else None
    return ModelHeaderError(f"{name} cannot be opened: {said}", hint=hint)


def shown(text: str | bytes, limit: int = 200) -> str:
    """Text from a file or a path for a message: on one line, nothing in it that a terminal would obey, not endless."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "backslashreplace")
    if len(text) <= limit and text.isprintable():
        return text
    cut = text[:limit]
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in cut)
    return safe + ("..." if len(text) > limit else "")
