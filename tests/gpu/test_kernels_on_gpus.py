# SPDX-License-Identifier: Apache-2.0
"""The kernels on a GPU give the host's results, bit for bit where these are promised.

``tests/unit/kernels/test_gpu_kernels.py`` runs the same text on the CPU. What only a
GPU shows is the conversion of float16, for which there is an instruction, NVRTC's code,
and that modules load and launch.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.devices.cuda import CudaDevice, open_device, why_missing
from commrt.kernels.source import reductions
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp

Array = np.ndarray[Any, Any]

PAIRS = [(dtype, op) for dtype in DTYPES for op in reductions(dtype)]
PAIR_IDS = [f"{dtype.name}-{op.name.lower()}" for dtype, op in PAIRS]
MAY_BE_ANY_NAN = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
NBYTES = 1 << 22


class Gpu:
    """A device with a stream, and memory of both kinds for two operands."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.stream = device.stream_create()
        self.pinned = device.pinned_alloc(NBYTES)
        self.first, self.second = device.alloc(NBYTES), device.alloc(NBYTES)

    def close(self) -> None:
        self.device.stream_synchronize(self.stream)
        self.device.free(self.first)
        self.device.free(self.second)
        self.device.pinned_free(self.pinned)
        self.device.stream_destroy(self.stream)

    def put(self, address: int, content: Array) -> None:
        if content.nbytes:
            ctypes.memmove(self.pinned, content.ctypes.data, content.nbytes)
        self.device.memcpy_async(address, self.pinned, content.nbytes, self.stream)
        self.device.stream_synchronize(self.stream)

    def get(self, address: int, nbytes: int) -> Array:
        self.device.memcpy_async(self.pinned, address, nbytes, self.stream)
        self.device.stream_synchronize(self.stream)
        return np.frombuffer(self.device.read(self.pinned, nbytes), np.uint8)

    def reduce(
        self, op: ReduceOp, dtype: DType, x: Array, y: Array, away: tuple[int, int]
    ) -> Array:
        """Return x op y, with the two that far behind a line."""
        to, source = self.first + away[0], self.second + away[1]
        self.put(to, x)
        self.put(source, y)
        count = x.nbytes // dtype.itemsize
        self.device.launch_reduce(int(op), dtype.code, to, source, count, self.stream)
        return self.get(to, x.nbytes)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    reason = why_missing()
    if reason is not None:
        pytest.skip(reason)
    device = open_device()
    if device.why_no_kernels is not None:
        pytest.skip(device.why_no_kernels)
    gpu = Gpu(device)
    yield gpu
    gpu.close()


def same(dtype: DType, got: Array, expected: Array, any_nan: bool) -> bool:
    """Compare bits; where it is allowed, every NaN with every other."""
    differ = (got != expected).reshape(-1, dtype.itemsize).any(axis=1)
    if any_nan and dtype.kind in ("float", "complex"):
        both = is_nan(dtype, got) & is_nan(dtype, expected)
        return not (differ & ~both).any()
    return not differ.any()


def is_nan(dtype: DType, raw: Array) -> Array:
    """Return which items are NaN, or have a part that is; without ml_dtypes."""
    if dtype.is_short_float:
        # The most that a number has in front of its sign bit.
        infinity = {"float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3fn": 0x7E}
        bits = raw.view(f"u{dtype.itemsize}")
        most = infinity.get(dtype.name, 0x7C)
        found: Array = (bits & (np.iinfo(bits.dtype).max >> 1)) > most
        return found
    parts = 2 if dtype.kind == "complex" else 1
    values = raw.view(f"f{dtype.itemsize // parts}").reshape(-1, parts)
    return np.asarray(np.isnan(values).any(axis=1))


def random_bytes(dtype: DType, count: int, seed: int) -> Array:
    rng = np.random.default_rng([seed, dtype.code])
    raw = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return raw & 1 if dtype.kind == "bool" else raw


def on_host(dtype: DType, op: ReduceOp, x: Array, y: Array) -> Array:
    dst = np.zeros_like(x)
    _native.kernels.combine(dtype.code, int(op), dst, [x, y])
    return dst


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=PAIR_IDS)
def test_reductions_equal_the_host(
    dtype: DType, op: ReduceOp, gpu: Gpu, seed: int
) -> None:
    item = dtype.itemsize
    for count, away in itertools.product(
        (0, 1, 17, 1031, 60_001), ((0, 0), (item, item), (item, 0), (1, 3))
    ):
        x, y = (random_bytes(dtype, count, seed + k) for k in (0, 1))
        got = gpu.reduce(op, dtype, x, y, away)
        assert same(dtype, got, on_host(dtype, op, x, y), op in MAY_BE_ANY_NAN)


@pytest.mark.parametrize(
    "dtype",
    [d for d in DTYPES if d.itemsize <= 2 and d.kind == "float"],
    ids=lambda dtype: dtype.name,
)
def test_every_short_float(dtype: DType, gpu: Gpu, seed: int) -> None:
    """Widened and rounded: all of 8 bits with all, all of 16 bits with some."""
    rng = np.random.default_rng(seed)
    every = np.arange(1 << 16, dtype=np.uint16)
    if dtype.itemsize == 1:
        x = np.repeat(np.arange(256, dtype=np.uint8), 256)
        y = np.tile(np.arange(256, dtype=np.uint8), 256)
    else:
        x, y = every.view(np.uint8), rng.permutation(every).view(np.uint8)
    for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX):
        got = gpu.reduce(op, dtype, x, y, (0, 0))
        assert same(dtype, got, on_host(dtype, op, x, y), op in MAY_BE_ANY_NAN)


def test_copies_between_any_addresses(gpu: Gpu, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for to, source in itertools.product((0, 1, 4, 8, 12), repeat=2):
        for nbytes in (1, 15, 4099, 1_000_003):
            content = rng.integers(0, 256, nbytes, dtype=np.uint8)
            gpu.put(gpu.second + source, content)
            gpu.device.launch_copy(
                gpu.first + to, gpu.second + source, nbytes, gpu.stream
            )
            assert (gpu.get(gpu.first + to, nbytes) == content).all()
