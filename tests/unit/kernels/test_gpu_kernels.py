# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels' text computes what the host's kernels do, bit for bit.

Without a GPU: ``kernels_on_cpu`` compiles the text as C++ and runs its threads in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernels_on_cpu import Buffer, OnCpu

from commrt import _native
from commrt.devices import SimWorld
from commrt.kernels.source import modules, reductions
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp, dtype_by_name

Array = np.ndarray[Any, Any]

PAIRS = [(dtype, op) for dtype in DTYPES for op in reductions(dtype)]
PAIR_IDS = [f"{dtype.name}-{op.name.lower()}" for dtype, op in PAIRS]
NAMES = [dtype.name for dtype in DTYPES]
SCALED = [dtype for dtype in DTYPES if dtype.kind != "bool"]
INTEGERS = [dtype for dtype in DTYPES if dtype.kind in ("int", "uint")]
ROUNDS_NANS = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
"""The sign and the other bits of their NaNs are not promised."""
COUNTS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 511, 1031)


@pytest.fixture(scope="module")
def library() -> OnCpu:
    return OnCpu()


@pytest.fixture
def on_cpu(library: OnCpu, capfd: pytest.CaptureFixture[str]) -> Iterator[OnCpu]:
    yield library
    said = capfd.readouterr().err
    assert "runtime error" not in said, said


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    owner: Any = ml_dtypes if dtype.needs_ml_dtypes else np
    return np.dtype(getattr(owner, dtype.name))


def any_bits(dtype: DType, count: int, seed: int) -> Array:
    """Items of any bits: NaNs of all kinds, infinities, subnormals; a third equal."""
    rng = np.random.default_rng([seed, count, dtype.code])
    if dtype.kind == "bool":
        return rng.integers(0, 2, count).astype(np.uint8).view(np.uint8)
    raw = rng.integers(0, 256, (count, dtype.itemsize), dtype=np.uint8)
    special = specials(dtype).view(np.uint8).reshape(-1, dtype.itemsize)
    chosen = rng.integers(0, len(special), count)
    raw = np.where(rng.integers(0, 3, (count, 1)) == 0, special[chosen], raw)
    return np.ascontiguousarray(raw).reshape(-1)


def specials(dtype: DType) -> Array:
    """Zeros of both signs, ones, ends of ranges, NaNs: what goes wrong first."""
    kind = numpy_dtype(dtype)
    if dtype.kind in ("int", "uint"):
        ends = np.iinfo(dtype.name)
        return np.array([0, 1, ends.min, ends.max, ends.max // 2 + 1], kind)
    real = np.array([0.0, -0.0, 1.0, -1.0, 1.5, np.nan, -np.nan, 1e30, -1e30])
    with np.errstate(all="ignore"):
        if dtype.kind != "complex":
            return real.astype(kind)
        pairs = np.array(list(itertools.product(real, real)))
        return np.ascontiguousarray(pairs).view(np.complex128).ravel().astype(kind)


def on_host(
    dtype: DType,
    op: ReduceOp,
    x: Array,
    y: Array,
    scaled: tuple[int, ...] = (),
    factor: tuple[float, int] = (1.0, 1),
) -> Array:
    """Return what the engine's kernels make of the bytes of two inputs."""
    dst = np.zeros_like(x)
    _native.kernels.combine(
        dtype.code,
        int(op),
        dst,
        [x, y],
        scaled=list(scaled),
        factor=factor[0],
        integer_factor=factor[1],
    )
    return dst


def check(dtype: DType, got: Array, expected: Array, nans_differ: bool) -> None:
    """Compare bit by bit; where it is allowed, a NaN equals every NaN."""
    differ = got != expected
    if nans_differ and dtype.kind in ("float", "complex"):
        parts = 2 if dtype.kind == "complex" else 1
        kind = numpy_dtype(dtype) if parts == 1 else np.dtype(f"f{dtype.itemsize // 2}")
        with np.errstate(all="ignore"):
            both = np.isnan(got.view(kind)) & np.isnan(expected.view(kind))
        differ &= ~np.repeat(both, kind.itemsize)
    differ = differ.reshape(-1, dtype.itemsize).any(axis=1)
    where = np.flatnonzero(differ)
    assert where.size == 0, (
        where[:5],
        got.reshape(-1, dtype.itemsize)[where[:5]],
        expected.reshape(-1, dtype.itemsize)[where[:5]],
    )


def reduce_here(
    on_cpu: OnCpu,
    op: ReduceOp,
    dtype: DType,
    x: Array,
    y: Array,
    away: tuple[int, int] = (0, 0),
    blocks: int = 1,
) -> Array:
    dst, src = Buffer(x, away[0]), Buffer(y, away[1])
    on_cpu.reduce(op.name.lower(), dtype, dst, src, blocks)
    dst.check_guards()
    src.check_guards()
    assert (src.bytes == y).all(), "the source was written"
    return dst.bytes.copy()


def test_every_defined_reduction_has_a_kernel_and_no_other_has() -> None:
    named = [name for module in modules() for name in module.kernels]
    assert len(named) == len(set(named))
    reducing = {f"commrt_{op.name.lower()}_{dtype.name}" for dtype, op in PAIRS}
    assert reducing <= set(named)
    others = set(named) - reducing
    kinds = ("boxes_", "scaled_sum_", "divide_", "copy", "pack", "unpack")
    assert all(name.removeprefix("commrt_").startswith(kinds) for name in others)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=PAIR_IDS)
def test_equals_the_host_for_any_count_and_alignment(
    dtype: DType, op: ReduceOp, on_cpu: OnCpu, seed: int
) -> None:
    """Both at the start of a line, both equally behind it, apart, and within items."""
    item = dtype.itemsize
    places = ((0, 0), (item, item), (16 - item, 0), (1, 1), (3, 8), (item, 0))
    for count, away in itertools.product(COUNTS, places):
        x, y = any_bits(dtype, count, seed), any_bits(dtype, count, seed + 1)
        got = reduce_here(on_cpu, op, dtype, x, y, away, blocks=1 + count % 2)
        check(dtype, got, on_host(dtype, op, x, y), op in ROUNDS_NANS)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=PAIR_IDS)
def test_equals_the_host_where_threads_take_many_turns(
    dtype: DType, op: ReduceOp, on_cpu: OnCpu, seed: int
) -> None:
    """And for specials with specials, which random bits seldom bring together."""
    special = specials(dtype).view(np.uint8) if dtype.kind != "bool" else None
    count = 20_011
    x, y = any_bits(dtype, count, seed), any_bits(dtype, count, seed + 1)
    if special is not None:
        rows = special.reshape(-1, dtype.itemsize)
        first = np.repeat(rows, len(rows), axis=0).ravel()
        second = np.tile(rows, (len(rows), 1)).ravel()
        x, y = np.concatenate([x, first]), np.concatenate([y, second])
    got = reduce_here(on_cpu, op, dtype, x, y, blocks=3)
    check(dtype, got, on_host(dtype, op, x, y), op in ROUNDS_NANS)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(d, op) for d, op in PAIRS if d.itemsize == 1 and d.kind != "bool"],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_every_pair_of_8_bit_items(dtype: DType, op: ReduceOp, on_cpu: OnCpu) -> None:
    every = np.arange(256, dtype=np.uint8)
    x, y = np.repeat(every, 256), np.tile(every, 256)
    got = reduce_here(on_cpu, op, dtype, x, y)
    check(dtype, got, on_host(dtype, op, x, y), op in ROUNDS_NANS)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX])
def test_every_16_bit_float(name: str, op: ReduceOp, on_cpu: OnCpu, seed: int) -> None:
    dtype = dtype_by_name(name)
    every = np.arange(1 << 16, dtype=np.uint16)
    partners = np.random.default_rng(seed).permutation(every)
    for other in (partners, np.zeros_like(every), np.full_like(every, 0x3C00)):
        x, y = every.view(np.uint8), other.view(np.uint8)
        got = reduce_here(on_cpu, op, dtype, x, y)
        check(dtype, got, on_host(dtype, op, x, y), op in ROUNDS_NANS)


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d.is_short_float], ids=lambda dtype: dtype.name
)
def test_float32s_are_rounded_as_elsewhere(
    dtype: DType, on_cpu: OnCpu, seed: int
) -> None:
    """Also the NaN that GPUs make, all ones, which rounding up would make a zero."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    near_one = rng.integers(0x33000000, 0x48000000, 100_000).astype(np.uint32)
    ends = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0, 1], np.uint32)
    bits = np.concatenate([bits, near_one, near_one & 0xFFFFF000, ends])
    with np.errstate(all="ignore"):
        expected = bits.view(np.float32).astype(numpy_dtype(dtype))
    got = on_cpu.narrow(dtype, bits).view(np.uint8)
    check(dtype, got, expected.view(np.uint8), nans_differ=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_the_two_may_be_the_same(dtype: DType, on_cpu: OnCpu, seed: int) -> None:
    for op in reductions(dtype):
        x = any_bits(dtype, 513, seed)
        both = Buffer(x, dtype.itemsize)
        on_cpu.reduce(op.name.lower(), dtype, both, both)
        check(dtype, both.bytes, on_host(dtype, op, x, x), op in ROUNDS_NANS)


@pytest.mark.parametrize("dtype", SCALED, ids=lambda dtype: dtype.name)
def test_scaled_sums_equal_the_host(dtype: DType, on_cpu: OnCpu, seed: int) -> None:
    """The first, the second, or both are multiplied; or the second alone is taken."""
    for factor, count in itertools.product(((1 / 3, 7), (-2.5, -(2**63))), (1, 700)):
        x, y = any_bits(dtype, count, seed), any_bits(dtype, count, seed + 1)
        for which in (0, 1, 2, 3):
            dst, src = Buffer(x, 16), Buffer(y)
            on_cpu.scaled_sum(dtype, dst, src, which, factor)
            scaled = tuple(k for k in (0, 1) if which >> k & 1)
            op = ReduceOp.PREMUL_SUM
            expected = on_host(dtype, op, x, y, scaled, factor)
            check(dtype, dst.bytes, expected, nans_differ=True)
        dst, src = Buffer(np.zeros_like(x), 5), Buffer(y, 3)
        on_cpu.scaled_sum(dtype, dst, src, 6, factor)
        expected = np.zeros_like(y)
        _native.kernels.combine(
            dtype.code,
            int(ReduceOp.PREMUL_SUM),
            expected,
            [y],
            scaled=[0],
            factor=factor[0],
            integer_factor=factor[1],
        )
        check(dtype, dst.bytes, expected, nans_differ=True)
        dst.check_guards()


@pytest.mark.parametrize("dtype", SCALED, ids=lambda dtype: dtype.name)
def test_launches_of_other_devices_compute_what_the_kernels_do(
    dtype: DType, on_cpu: OnCpu, seed: int
) -> None:
    count, factor = 37, (-2.5, -7)
    with SimWorld(seed=seed) as world:
        device = world.device("gpu")
        x, y = any_bits(dtype, count, seed), any_bits(dtype, count, seed + 1)
        to, source = device.pinned_alloc(x.nbytes), device.pinned_alloc(x.nbytes)
        for which in range(8):
            device.write(to, x.tobytes())
            device.write(source, y.tobytes())
            code, real, integer = dtype.code, *factor
            device.launch_scaled_sum(code, to, source, count, which, real, integer, 0)
            device.stream_synchronize(0)
            dst, src = Buffer(x), Buffer(y)
            on_cpu.scaled_sum(dtype, dst, src, which, factor)
            got = np.frombuffer(device.read(to, x.nbytes), np.uint8)
            check(dtype, got, dst.bytes, nans_differ=True)
            if dtype in INTEGERS:
                device.launch_divide(code, to, count, 3, 0)
                device.stream_synchronize(0)
                on_cpu.divide(dtype, dst, 3)
                assert device.read(to, x.nbytes) == dst.bytes.tobytes()


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.name)
def test_division_equals_the_host(dtype: DType, on_cpu: OnCpu, seed: int) -> None:
    for divisor, away in itertools.product((1, 3, 128, 70_000), (0, 1)):
        x = any_bits(dtype, 777, seed)
        got, expected = Buffer(x, away), x.copy()
        on_cpu.divide(dtype, got, divisor)
        _native.kernels.divide_inplace(dtype.code, expected, divisor)
        assert (got.bytes == expected).all()
        got.check_guards()


def test_copies_of_any_length_between_any_addresses(on_cpu: OnCpu, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for to, source in itertools.product((0, 1, 2, 4, 8, 12, 16), repeat=2):
        for nbytes in (0, 1, 3, 7, 8, 15, 16, 17, 100, 4099):
            content = rng.integers(0, 256, nbytes, dtype=np.uint8)
            dst, src = Buffer(np.zeros_like(content), to), Buffer(content, source)
            on_cpu.copy(dst, src, blocks=1)
            assert (dst.bytes == content).all(), (to, source, nbytes)
            dst.check_guards()


def test_a_load_that_a_gpu_would_refuse_is_noticed(
    library: OnCpu, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sanitizer is what finds wrong alignment here, where nothing would fault."""
    held = Buffer(np.arange(64, dtype=np.uint8))
    assert library.load_word(held.address + 4) == 0x07060504
    assert capfd.readouterr().err == ""
    library.load_word(held.address + 1)
    assert "misaligned address" in capfd.readouterr().err
