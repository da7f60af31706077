"""Fill a model of :mod:`shapes` with random weights: valid blocks of the size that real weights have.

    python3 -m tests.device.made_weights NAME FILE

A card reads zeros with less power than numbers, and a model of zeros answers with one token for ever, which a proof of service
refuses. The same file each time. Standard library alone.
"""

from __future__ import annotations

import math
import random
import struct
import sys
from pathlib import Path

from tests.device import shapes

#: What weights of a matrix are like; scales are set so that they come out at about this deviation.
DEVIATION = 0.02
_PIECE_BLOCKS = 65536


def blocks(kind: str, count: int) -> bytes:
    """``count`` blocks of a type with random contents and a sensible scale."""
    size = shapes.TYPES[kind][2]
    data = bytearray(random.Random(kind).randbytes(size * count))
    if kind == "q4_K":
        # d, dmin, scales (12), quants (128): w = d * scale * quant - dmin * minimum; six bits of scale, four of quant.
        head = struct.pack("<ee", DEVIATION / 250, 7.5 * DEVIATION / 250)
        for start in range(0, len(data), size):
            data[start : start + 4] = head
    elif kind == "q6_K":
        # quants (192), scales (16), d: w = d * scale * (quant - 32); eight bits of scale with a sign.
        tail = struct.pack("<e", DEVIATION / 1300)
        for start in range(size - 2, len(data), size):
            data[start : start + 2] = tail
    elif kind == "q8_0":
        # d, quants (32): w = d * quant; eight bits with a sign, whose deviation is 74.
        head = struct.pack("<e", DEVIATION / 74)
        for start in range(0, len(data), size):
            data[start : start + 2] = head
    else:
        raise ValueError(f"no blocks of {kind} are known")
    return bytes(data)


def numbers(name: str, count: int) -> bytes:
    """Single-precision values of a small tensor: norms near one, decays below zero, the rest small."""
    dice = random.Random(name)
    middle, spread = (1.0, 0.05) if "norm" in name else (-0.5, 0.1) if name.endswith("ssm_a") else (0.0, DEVIATION)
    return struct.pack(f"<{count}f", *(dice.gauss(middle, spread) for _ in range(count)))


def fill(shape: shapes.Shape, path: Path) -> int:
    """Write the model, weights and all; its size in bytes."""
    total = shapes.write(shape, path, tokens=True)
    sizes = [shapes.tensor_bytes(kind, dimensions) for _, kind, dimensions in shape.tensors]
    padded = [-(-size // shapes.ALIGNMENT) * shapes.ALIGNMENT for size in sizes]
    pieces = {kind: blocks(kind, _PIECE_BLOCKS) for kind in {kind for _, kind, _ in shape.tensors} if kind != "f32"}
    with path.open("r+b") as file:
        place = total - sum(padded)
        for (name, kind, dimensions), size, room in zip(shape.tensors, sizes, padded, strict=True):
            file.seek(place)
            if kind == "f32":
                file.write(numbers(name, math.prod(dimensions)))
            else:
                piece = memoryview(pieces[kind])
                for start in range(0, size, len(piece)):
                    file.write(piece[: min(len(piece), size - start)])
            place += room
    return total


if __name__ == "__main__":
    print(fill(shapes.MODELS[sys.argv[1]](), Path(sys.argv[2])))
