"""What CUDA kernels take for themselves while they run: in no printed buffer, but in the peak.

A context's pool grows to the largest sum that one operation has in use and is never given back. Sources, llama.cpp b11434:
`ggml/src/ggml-cuda/ggml-cuda.cu` (`ggml_cuda_pool_vmm`, `ggml_cuda_mul_mat`, `ggml_cuda_mul_mat_cublas_impl`), `mmq.cu`,
`mmq.cuh` (`launch_mul_mat_q`), `mmvq.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from v100ctl.plan.vram.graph import Shape
from v100ctl.plan.vram.memory import pad
from v100ctl.plan.vram.model import BLOCKS

#: Memory is mapped in pieces of this size.
_GRANULARITY = 2 << 20
_ALIGNMENT = 128
#: `MATRIX_ROW_PADDING`, and the bytes that int8 activations take: blocks of 128 values in 144 bytes.
_ROW_PADDING = 512
_ACTIVATION = (144, 128)
#: The largest tile of the int8 kernels in either direction.
_TILE = 128
#: Products with at most so many columns use vector kernels (`MMVQ_MAX_BATCH_SIZE`, `MMVF_MAX_BATCH_SIZE`) or small matrix ones.
_VECTOR_COLUMNS = 8
_SMALL_COLUMNS = 16
#: From so many columns on, quantised weights are turned into f16 for cuBLAS where int8 kernels are not forced (Volta).
_CUBLAS_COLUMNS = 64
#: Below this compute capability there are no int8 tensor cores, and cuBLAS serves larger batches unless forced not to.
_TURING = (7, 5)
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Product:
    """A matrix product on one device: the left side (a weight, or a cache) by type and shape, the right side's shape.

    ``experts``: how many each token uses (0: no mixture). ``precise``: accumulated in f32 on purpose, as attention scores are.
    """

    device: str
    type: str
    left: Shape
    right: Shape
    experts: int = 0
    precise: bool = False


@dataclass(frozen=True)
class Needs:
    """What a device's products need: the pool's size, and whether cuBLAS has to be loaded."""

    pool_bytes: int
    cublas: bool


def needs(products: Iterable[Product], capability: str, multiprocessors: int, *, force_mmq: bool) -> Needs:
    """The most that any one product takes, and whether one needs cuBLAS."""
    version = _version(capability)
    most = 0
    cublas = False
    for product in products:
        size, library = _one(product, version, multiprocessors, force_mmq=force_mmq)
        most = max(most, size)
        cublas = cublas or library
    return Needs(pad(most, _GRANULARITY), cublas)


def _version(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


def _one(product: Product, version: tuple[int, int], multiprocessors: int, *, force_mmq: bool) -> tuple[int, bool]:
    left, right = (*product.left, 1, 1, 1)[:4], (*product.right, 1, 1, 1)[:4]
    columns = right[2] if product.experts else right[1]
    if columns <= _VECTOR_COLUMNS:
        return 0, False
    quantised = BLOCKS.get(product.type, (1, 0))[0] > 1
    if quantised and (force_mmq or version >= _TURING or columns < _CUBLAS_COLUMNS):
        return _int8(left, right, product.experts, multiprocessors), False
    f16 = BLOCKS.get(product.type, (1, 4))[1] == 2
    if columns <= _SMALL_COLUMNS and (version >= _AMPERE or (f16 and product.type == "f16")):
        return 0, False
    if product.experts:
        return _sorted_experts(left, right, product.experts), True
    return _cublas(product, left, right, version, quantised=quantised), True


def _int8(left: Shape, right: Shape, experts: int, multiprocessors: int) -> int:
    """Activations as int8 blocks, and partial tiles where the work does not divide evenly among multiprocessors."""
    size, values = _ACTIVATION
    rows = right[2] * experts if experts else math.prod(right[1:])
    total = pad(rows * pad(right[0], _ROW_PADDING) * size // values + _TILE * size, _ALIGNMENT)
    if experts:
        total += 2 * pad(4 * rows, _ALIGNMENT) + pad(4 * (left[2] + 1), _ALIGNMENT)
    columns = right[2] if experts else right[1]
    channels = left[2] if experts else right[2] * right[3]
    tiles = -(-left[1] // _TILE) * -(-columns // _TILE) * channels
    waves = -(-tiles // multiprocessors)
    blocks = tiles if 100 * tiles // (multiprocessors * waves) >= 90 else multiprocessors
    if tiles % blocks:
        total += 4 * blocks * _TILE * _TILE
    return total


def _cublas(product: Product, left: Shape, right: Shape, version: tuple[int, int], *, quantised: bool) -> int:
    """Copies of the operands in the type that is computed in, and of the result where that is not f32.

    Volta lets cuBLAS write f32 directly.
    """
    volta = version == (7, 0)
    bf16 = product.type == "bf16"
    single = product.precise or product.type == "f32" or (bf16 and version < _AMPERE)
    width = 4 if single else 2
    kept = product.type == "f32" if single else not quantised
    total = 0 if kept else pad(width * math.prod(left), _ALIGNMENT)
    if not single:
        total += pad(width * math.prod(right), _ALIGNMENT)
        if not volta and not bf16:
            total += pad(width * left[1] * math.prod(right[1:]), _ALIGNMENT)
    return total


def _sorted_experts(left: Shape, right: Shape, experts: int) -> int:
    """Without int8 kernels: activations and results sorted by expert, in f32."""
    rows = right[2] * experts
    return pad(4 * rows * right[0], _ALIGNMENT) + pad(4 * rows * left[1], _ALIGNMENT) + pad(8 * rows, _ALIGNMENT)
