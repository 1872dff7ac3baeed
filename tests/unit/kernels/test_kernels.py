# SPDX-License-Identifier: Apache-2.0
"""The reduction kernels: right, and the same on every instruction set."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.errors import UsageError
from commrt.vocabulary.dtypes import (
    DTYPES,
    DType,
    ReduceOp,
    check_reduction,
    dtype_by_name,
)

ml_dtypes = pytest.importorskip("ml_dtypes")
kernels = _native.kernels

Array = np.ndarray[Any, Any]

HALVES = ("float16", "bfloat16")
SUMS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
LENGTHS = (0, 1, 2, 5, 16, 33, 63, 129, 1027, 700)
GUARD = 0xA5


def is_defined(dtype: DType, op: ReduceOp) -> bool:
    try:
        check_reduction(op, dtype)
    except UsageError:
        return False
    return True


PAIRS = [(d, op) for d in DTYPES for op in ReduceOp if is_defined(d, op)]
PAIR_IDS = [f"{d.name}-{op.name.lower()}" for d, op in PAIRS]
FLOATS = [d for d in DTYPES if d.kind == "float"]
NAMES = [d.name for d in DTYPES]


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    assert kernels.use_isa(kernels.isas()[-1])


def np_dtype(dtype: DType) -> np.dtype[Any]:
    owner = ml_dtypes if dtype.needs_ml_dtypes else np
    return np.dtype(getattr(owner, dtype.name))


def random_array(dtype: DType, n: int, seed: int) -> Array:
    """Any finite bit pattern for short floats, any value for integers, some zeros."""
    rng = np.random.default_rng([seed, n, dtype.code])
    if dtype.kind == "bool":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind in ("int", "uint"):
        values = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
        values = values.view(np_dtype(dtype))
    elif dtype.itemsize == 1:
        infinity = 0x7F if dtype.name == "float8_e4m3fn" else 0x7C
        finite = [code for code in range(256) if code & 0x7F < infinity]
        values = rng.choice(np.array(finite, np.uint8), n).view(np_dtype(dtype))
    elif dtype.name in HALVES:
        bits = rng.integers(0, 1 << 16, n).astype(np.uint16)
        exponent, lowest = (
            (0x7C00, 0x0400) if dtype.name == "float16" else (0x7F80, 0x0080)
        )
        bits[bits & exponent == exponent] ^= lowest
        values = bits.view(np_dtype(dtype))
    else:
        parts = 2 if dtype.kind == "complex" else 1
        real = np.float32 if dtype.name in ("float32", "complex64") else np.float64
        scale = 10.0 ** rng.integers(-20, 20, n * parts)
        values = (rng.standard_normal(n * parts) * scale).astype(real)
        values = values.view(np_dtype(dtype))
    return np.where(rng.integers(0, 5, n) == 0, values.dtype.type(0), values)


def multiply_complex(x: Array, y: Array) -> Array:
    out = np.empty_like(x)
    out.real = x.real * y.real - x.imag * y.imag
    out.imag = x.real * y.imag + x.imag * y.real
    return out


def least(x: Array, y: Array) -> Array:
    """The minimum, with -0 less than +0, which numpy leaves to the order of inputs."""
    return np.where((x == y) & np.signbit(x), x, np.where(x == y, y, np.minimum(x, y)))


def greatest(x: Array, y: Array) -> Array:
    return np.where((x == y) & ~np.signbit(x), x, np.where(x == y, y, np.maximum(x, y)))


LOGICAL = {
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
}
PLAIN = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: least,
    ReduceOp.MAX: greatest,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def reference(
    dtype: DType, op: ReduceOp, inputs: list[Array], mask: int = 0, factor: float = 1.0
) -> Array:
    """The reduction from left to right in numpy: short floats in float32."""
    if len(inputs) == 1 and not mask:
        return inputs[0].copy()
    with np.errstate(all="ignore"):
        if op in LOGICAL:
            return functools.reduce(LOGICAL[op], inputs).astype(inputs[0].dtype)
        if op is ReduceOp.PROD and dtype.kind == "complex":
            return functools.reduce(multiply_complex, inputs)
        if dtype.is_short_float:
            inputs = [x.astype(np.float32) for x in inputs]
        real = inputs[0].real.dtype.type
        inputs = [
            x * real(factor) if mask >> k & 1 else x for k, x in enumerate(inputs)
        ]
        return functools.reduce(PLAIN[op], inputs).astype(np_dtype(dtype))


class Buffer:
    """An array at any byte offset, between guard bytes."""

    def __init__(self, values: Array, offset: int) -> None:
        raw = np.full(values.nbytes + 256, GUARD, np.uint8)
        self.start = -raw.ctypes.data % 64 + 64 + offset
        self.raw, self.dtype = raw, values.dtype
        self.bytes = raw[self.start : self.start + values.nbytes]
        self.bytes[:] = np.frombuffer(values.tobytes(), np.uint8)

    def values(self) -> Array:
        return np.frombuffer(self.bytes.tobytes(), self.dtype)

    def guards_intact(self) -> bool:
        end = self.start + self.bytes.size
        outside = np.concatenate([self.raw[: self.start], self.raw[end:]])
        return bool((outside == GUARD).all())


def combine(
    dtype: DType,
    op: ReduceOp,
    inputs: list[Array],
    *,
    offsets: tuple[int, ...] = (0,),
    alias: int | None = None,
    two: bool = False,
    store: int = 0,
    mask: int = 0,
    factor: float = 1.0,
) -> Array:
    """Run the kernel on buffers at ``offsets`` (cycled); check guards and dst2."""
    srcs = [Buffer(x, offsets[k % len(offsets)]) for k, x in enumerate(inputs)]
    blank = np.zeros_like(inputs[0])
    dst = Buffer(blank, offsets[-1]) if alias is None else srcs[alias]
    dst2 = Buffer(blank, offsets[0]) if two else None
    kernels.combine(
        dtype.code,
        int(op),
        dst.bytes,
        [s.bytes for s in srcs],
        scaled=[k for k in range(len(srcs)) if mask >> k & 1],
        factor=factor,
        dst2=dst2.bytes if dst2 else None,
        store=store,
    )
    for buffer in (*srcs, dst, dst2):
        assert buffer is None or buffer.guards_intact()
    for k, src in enumerate(srcs):
        assert k == alias or src.bytes.tobytes() == inputs[k].tobytes()
    if dst2 is not None:
        assert dst2.bytes.tobytes() == dst.bytes.tobytes()
    return dst.values()


def same_bits(x: Array, y: Array) -> bool:
    """Bitwise equality; a NaN equals every NaN."""
    if x.dtype.kind in "biu":
        return x.dtype == y.dtype and x.tobytes() == y.tobytes()
    parts = [(x.real, y.real), (x.imag, y.imag)] if x.dtype.kind == "c" else [(x, y)]
    with np.errstate(all="ignore"):
        return x.dtype == y.dtype and all(
            bool((same_value(a, b) | (a != a) & (b != b)).all()) for a, b in parts
        )


def same_value(a: Array, b: Array) -> Array:
    return (a == b) & (np.signbit(a) == np.signbit(b))


def test_codes_and_item_sizes_are_those_of_dtypes_py() -> None:
    assert [kernels.item_size(d.code) for d in DTYPES] == [d.itemsize for d in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_defined_reductions_are_those_of_check_reduction(dtype: DType) -> None:
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        native = {op for op in ReduceOp if kernels.defined(dtype.code, int(op))}
        assert native == {op for op in ReduceOp if is_defined(dtype, op)}


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=PAIR_IDS)
def test_equals_numpy_for_any_count_length_and_alignment(
    dtype: DType, op: ReduceOp
) -> None:
    for nsrc in range(1, 10):
        for n in LENGTHS[nsrc % 2 :: 2]:
            inputs = [random_array(dtype, n, seed) for seed in range(nsrc)]
            expected = reference(dtype, op, inputs)
            for isa in kernels.isas():
                assert kernels.use_isa(isa)
                offsets = ((0,), (dtype.itemsize, 3, 1))[nsrc // 2 % 2]
                got = combine(dtype, op, inputs, offsets=offsets)
                assert same_bits(got, expected), (isa, nsrc, n)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=PAIR_IDS)
def test_in_place_streamed_and_doubled_stores_change_nothing(
    dtype: DType, op: ReduceOp
) -> None:
    nsrc = 3
    for n in (7, 1027):
        inputs = [random_array(dtype, n, seed) for seed in range(nsrc)]
        expected = reference(dtype, op, inputs)
        for isa in kernels.isas():
            assert kernels.use_isa(isa)
            for case in range(16):
                got = combine(
                    dtype,
                    op,
                    inputs,
                    offsets=((0,), (dtype.itemsize,), (0, 5), (16, 48))[case // 4],
                    alias=(None, 0, 1, 2)[(case + case // 4) % 4],
                    two=case % 3 != 0,
                    store=case % 4,
                )
                assert same_bits(got, expected), (isa, n, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_one_input_is_copied_bit_for_bit(dtype: DType) -> None:
    rng = np.random.default_rng(dtype.code)
    bits = rng.integers(0, 256, 517 * dtype.itemsize, dtype=np.uint8)
    x = (bits & 1).view(bool) if dtype.kind == "bool" else bits.view(np_dtype(dtype))
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        for store in range(4):
            for alias, two in ((None, False), (None, True), (0, False), (0, True)):
                got = combine(
                    dtype, ReduceOp.LOR, [x], alias=alias, two=two, store=store
                )
                assert got.tobytes() == x.tobytes()


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d.kind in ("float", "complex")], ids=lambda d: d.name
)
def test_chosen_inputs_are_scaled_first(dtype: DType, op: ReduceOp) -> None:
    for nsrc in (1, 2, 3, 5):
        for n in (1, 37, 300):
            inputs = [random_array(dtype, n, seed) for seed in range(nsrc)]
            for mask in (1, (1 << nsrc) - 1, 1 << (nsrc - 1)):
                expected = reference(dtype, op, inputs, mask, 1 / 3)
                for isa in kernels.isas():
                    assert kernels.use_isa(isa)
                    got = combine(dtype, op, inputs, mask=mask, factor=1 / 3, two=True)
                    assert same_bits(got, expected), (isa, nsrc, n, mask)


INTEGERS = [d for d in DTYPES if d.kind in ("int", "uint")]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
def test_integers_are_multiplied_in_their_own_type(dtype: DType) -> None:
    limits = np.iinfo(dtype.name)
    for factor in (3, limits.max, limits.min):
        signed = (factor + 2**63) % 2**64 - 2**63
        for nsrc, n in ((1, 37), (2, 300), (3, 5)):
            inputs = [random_array(dtype, n, seed) for seed in range(nsrc)]
            with np.errstate(over="ignore"):
                first = inputs[0] * inputs[0].dtype.type(factor)
                expected = functools.reduce(np.add, [first, *inputs[1:]])
            for isa in kernels.isas():
                assert kernels.use_isa(isa)
                dst = np.zeros_like(expected)
                kernels.combine(
                    dtype.code,
                    int(ReduceOp.PREMUL_SUM),
                    dst.view(np.uint8),
                    [x.view(np.uint8) for x in inputs],
                    scaled=[0],
                    factor=0.5,
                    integer_factor=signed,
                )
                assert dst.tobytes() == expected.tobytes(), (isa, factor, nsrc)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
def test_integers_are_compared_right_at_their_ends(dtype: DType) -> None:
    limits = np.iinfo(dtype.name)
    ends = [limits.min, limits.min + 1, limits.max - 1, limits.max, limits.max // 2]
    values = np.array([*ends, 0, 1, 2, limits.max // 2 + 1], dtype.name)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    for op, expected in ((ReduceOp.MIN, np.minimum), (ReduceOp.MAX, np.maximum)):
        for isa in kernels.isas():
            assert kernels.use_isa(isa)
            got = combine(dtype, op, [x, y])
            assert got.tobytes() == expected(x, y).tobytes(), (isa, op)


@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_every_pair_of_bytes_is_multiplied_modulo_256(name: str) -> None:
    values = np.arange(256, dtype=np.uint8).view(name)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        got = combine(dtype_by_name(name), ReduceOp.PROD, [x, y])
        assert got.tobytes() == (x * y).tobytes(), isa


@pytest.mark.parametrize("places", [(0, 63), (64,), (3, 65, 69)])
def test_any_of_many_inputs_can_be_scaled(places: tuple[int, ...]) -> None:
    dtype = dtype_by_name("float64")
    inputs = [np.full(9, float(1 << k % 40)) for k in range(70)]
    mask = sum(1 << k for k in places)
    got = combine(dtype, ReduceOp.AVG, inputs, mask=mask, factor=0.5)
    expected = sum(x * (0.5 if k in places else 1) for k, x in enumerate(inputs))
    assert (got == expected).all()


@pytest.mark.parametrize("name", HALVES)
def test_every_half_survives_widening_and_rounds_to_nearest_even(name: str) -> None:
    dtype = dtype_by_name(name)
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np_dtype(dtype))
    minus_zero = np.full_like(every, -0.0)
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        got = combine(dtype, ReduceOp.SUM, [every, minus_zero])
        assert same_bits(got, every), isa
        for factor in (0.3, 1000.0, 2.0**-13, 2.0**-20):
            got = combine(dtype, ReduceOp.AVG, [every], mask=1, factor=factor)
            expected = reference(dtype, ReduceOp.AVG, [every], 1, factor)
            assert same_bits(got, expected), (isa, factor)


@pytest.mark.parametrize("name", HALVES)
def test_sums_in_and_beside_the_middle_of_two_halves_are_rounded_right(
    name: str,
) -> None:
    dtype = dtype_by_name(name)
    half = np_dtype(dtype)
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(half)
    every = every[np.isfinite(every.astype(np.float32))]
    digits = 11 if name == "float16" else 8
    exponent = np.frexp(every.astype(np.float64))[1]
    middle = np.ldexp(1.0, exponent - digits - 1)
    for towards in (1, -1):
        for inputs in (
            [every, (middle * towards).astype(half)],
            [every, (middle * towards).astype(half), (middle / 64).astype(half)],
            [every, (middle * towards).astype(half), (middle / -64).astype(half)],
        ):
            expected = reference(dtype, ReduceOp.SUM, inputs)
            for isa in kernels.isas():
                assert kernels.use_isa(isa)
                for offsets in ((0,), (2,)):
                    got = combine(dtype, ReduceOp.SUM, inputs, offsets=offsets)
                    assert same_bits(got, expected), (isa, towards, len(inputs))


@pytest.mark.parametrize("name", HALVES)
def test_halves_are_rounded_once_for_all_inputs(name: str) -> None:
    dtype = dtype_by_name(name)
    tiny = np.finfo(np.float16).eps if name == "float16" else 2.0**-7
    ones = np.full(100, 1.0).astype(np_dtype(dtype))
    quarter = np.full(100, tiny / 4).astype(np_dtype(dtype))
    got = combine(dtype, ReduceOp.SUM, [ones, quarter, quarter, quarter, quarter])
    assert (got.astype(np.float64) == 1 + tiny).all()


@pytest.mark.parametrize("name", HALVES)
def test_one_nan_changes_no_other_half(name: str) -> None:
    dtype = dtype_by_name(name)
    x = random_array(dtype, 700, 1)
    y = random_array(dtype, 700, 2)
    for at in (0, 130, 699):
        x[at] = np.nan
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        got = combine(dtype, ReduceOp.SUM, [x, y])
        assert same_bits(got, reference(dtype, ReduceOp.SUM, [x, y])), isa


@pytest.mark.parametrize("name", HALVES)
def test_every_half_is_ordered_as_the_number_it_is(name: str) -> None:
    dtype = dtype_by_name(name)
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np_dtype(dtype))
    tiny = np.array(1, np.uint16).view(np_dtype(dtype))[()]
    for value in (0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, tiny, -tiny, np.nan):
        pivot = np.full_like(every, value)
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            expected = reference(dtype, op, [every, pivot])
            for isa in kernels.isas():
                assert kernels.use_isa(isa)
                for inputs in ([every, pivot], [pivot, every], [pivot, every, pivot]):
                    got = combine(dtype, op, inputs)
                    assert same_bits(got, expected), (isa, value, op)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_minimum_and_maximum_propagate_one_nan(dtype: DType) -> None:
    x = np.linspace(-3, 3, 71).astype(np_dtype(dtype))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    strange = x.copy()
    strange.view(unsigned)[:] |= ~unsigned.type(0) >> unsigned.type(1)
    strange.view(unsigned)[::2] |= unsigned.type(1 << (8 * dtype.itemsize - 1))
    assert np.isnan(strange).all()
    canonical = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}
    canonical |= {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}
    quiet = canonical.get(dtype.name, 0x7FF8000000000000)
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            for at in range(3):
                inputs = [x, x, x]
                inputs[at] = strange
                got = combine(dtype, op, inputs)
                assert (got.view(unsigned) == quiet).all(), (isa, op, at)
        assert np.isnan(combine(dtype, ReduceOp.SUM, [x, strange])).all()
        assert np.isnan(combine(dtype, ReduceOp.PROD, [strange, x, x])).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_minus_zero_is_less_than_zero_in_any_order(dtype: DType) -> None:
    plus = np.zeros(41, np_dtype(dtype))
    minus = np.full_like(plus, -0.0)
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        for inputs in ([plus, minus], [minus, plus], [plus, minus, plus]):
            assert np.signbit(combine(dtype, ReduceOp.MIN, inputs)).all()
            assert not np.signbit(combine(dtype, ReduceOp.MAX, inputs)).any()


@pytest.mark.parametrize("name", [d.name for d in FLOATS] + ["complex64", "complex128"])
def test_minus_zero_is_false_and_nan_is_true(name: str) -> None:
    dtype = dtype_by_name(name)
    x = np.array([0.0, -0.0, np.nan, 1e-7, -2.0] * 9).astype(np_dtype(dtype))
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        for op in LOGICAL:
            expected = reference(dtype, op, [x, np.roll(x, 1), np.roll(x, 2)])
            got = combine(dtype, op, [x, np.roll(x, 1), np.roll(x, 2)])
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_infinities_and_overflow(dtype: DType) -> None:
    big = float(ml_dtypes.finfo(np_dtype(dtype)).max)
    x = np.array([np.inf, -np.inf, np.inf, big, -big] * 13).astype(np_dtype(dtype))
    y = np.array([1.0, -np.inf, -np.inf, big, -big] * 13).astype(np_dtype(dtype))
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        got = combine(dtype, ReduceOp.SUM, [x, y])
        assert same_bits(got, reference(dtype, ReduceOp.SUM, [x, y]))


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "int8"])
def test_cutting_a_vector_anywhere_changes_no_bit(name: str) -> None:
    dtype, n = dtype_by_name(name), 700
    inputs = [random_array(dtype, n, seed) for seed in range(5)]
    rng = np.random.default_rng(dtype.code)
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        whole = combine(dtype, ReduceOp.SUM, inputs)
        for _ in range(5):
            cuts = [0, *sorted(int(c) for c in rng.integers(0, n, 6)), n]
            pieces = [
                combine(dtype, ReduceOp.SUM, [x[a:b] for x in inputs], store=a % 4)
                for a, b in itertools.pairwise(cuts)
            ]
            assert np.concatenate(pieces).tobytes() == whole.tobytes()


def test_copy_moves_every_byte_and_no_other() -> None:
    for isa in kernels.isas():
        assert kernels.use_isa(isa)
        for n in (0, 1, 63, 64, 65, 511, 4099):
            values = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
            for store in range(2):
                for offset in (0, 1, 32):
                    src = Buffer(values, 7)
                    dst = Buffer(np.zeros_like(values), offset)
                    kernels.copy(dst.bytes, src.bytes, store)
                    assert dst.bytes.tobytes() == values.tobytes()
                    assert dst.guards_intact()


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d.kind in ("int", "uint")], ids=lambda d: d.name
)
def test_integers_divide_toward_zero(dtype: DType) -> None:
    info = np.iinfo(np_dtype(dtype))
    values = [info.min, info.min + 1, info.max, 0, 1, 7, 100]
    values += [-1, -7, -100] if dtype.kind == "int" else []
    for divisor in (1, 2, 3, 64, 128, 255, 1000):
        x = np.array(values, np_dtype(dtype))
        kernels.divide_inplace(dtype.code, x.view(np.uint8), divisor)
        expected = [abs(v) // divisor * (-1 if v < 0 else 1) for v in values]
        assert x.tolist() == expected, divisor


def test_wrong_calls_are_refused() -> None:
    x = np.zeros(8, np.uint8)
    f32, f64 = dtype_by_name("float32").code, dtype_by_name("float64").code
    with pytest.raises(ValueError, match="not defined"):
        kernels.combine(f32, int(ReduceOp.BAND), x, [x])
    with pytest.raises(ValueError, match="at least one input"):
        kernels.combine(f32, int(ReduceOp.SUM), x, [])
    with pytest.raises(ValueError, match="differ in length"):
        kernels.combine(f32, int(ReduceOp.SUM), x, [x, x[:4]])
    with pytest.raises(ValueError, match="whole number"):
        kernels.combine(f64, int(ReduceOp.SUM), x[:5], [x[:5]])
    assert not kernels.use_isa("no such set")
