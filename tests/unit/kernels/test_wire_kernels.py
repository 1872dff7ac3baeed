# SPDX-License-Identifier: Apache-2.0
"""The wire formats' kernels: right, bounded, and the same on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_reference import BLOCK, off_by, through_wire

from commrt import _native
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.wire_formats import WIRE_FORMATS, WireFormat

Array = np.ndarray[Any, Any]
wire = _native.wire
kernels = _native.kernels

FORMATS = {one.name: one for one in WIRE_FORMATS}
LENGTHS = (0, 1, 2, 31, 63, 64, 65, 127, 255, 256, 257, 511, 513, 1000, 4099)
DTYPES = ("float32", "float64")
GUARD = 0xA5


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    assert kernels.use_isa(kernels.isas()[-1])


def every_isa() -> Iterator[str]:
    for name in kernels.isas():
        assert kernels.use_isa(name)
        yield name


class Guarded:
    """An array at a place between guard bytes."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self.raw = np.full(nbytes + 256, GUARD, np.uint8)
        self.first = -self.raw.ctypes.data % 64 + 64 + offset
        self.bytes = self.raw[self.first : self.first + nbytes]

    @property
    def address(self) -> int:
        return self.raw.ctypes.data + self.first

    def is_intact(self) -> bool:
        end = self.first + self.bytes.size
        outside = np.concatenate([self.raw[: self.first], self.raw[end:]])
        return bool((outside == GUARD).all())


def code_of(x: Array) -> int:
    return dtype_by_name(x.dtype.name).code


def encoded(one: WireFormat, x: Array, residual: Array | None = None) -> Array:
    to = Guarded(wire.nbytes(one.code, x.size))
    owed = 0 if residual is None else residual.ctypes.data
    wire.encode(one.code, code_of(x), x.ctypes.data, owed, x.size, to.address)
    assert to.is_intact()
    return to.bytes


def decoded(one: WireFormat, said: Array, count: int, dtype: str, offset: int) -> Array:
    size = np.dtype(dtype).itemsize
    out = Guarded(count * size, offset * size)
    code = dtype_by_name(dtype).code
    wire.decode(one.code, code, said.ctypes.data, count, out.address)
    assert out.is_intact()
    return np.frombuffer(out.bytes.tobytes(), dtype)


def drawn(count: int, seed: int, dtype: str = "float32") -> Array:
    """Numbers of every magnitude that float16 has, zeros and subnormals among them."""
    rng = np.random.default_rng([seed, count])
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-26, 14, count)
    return np.where(rng.integers(0, 9, count) == 0, 0, x).astype(dtype)


def same(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and bool(np.array_equal(x, y, equal_nan=True))


@pytest.mark.parametrize("one", WIRE_FORMATS, ids=lambda one: one.name)
def test_the_formats_are_those_of_the_engine(one: WireFormat) -> None:
    assert one.block == wire.block(one.code) == BLOCK[one.name]
    scale_nbytes = 64 if one.name == "int8" else 0
    assert wire.nbytes(one.code, 0) == 0
    for count in (1, one.block):
        assert wire.nbytes(one.code, count) == scale_nbytes + one.block * one.itemsize
    assert wire.nbytes(2, 17 * 256) == 128 + 17 * 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_numpy_on_every_instruction_set(
    name: str, dtype: str
) -> None:
    one = FORMATS[name]
    for count in LENGTHS:
        x = drawn(count, 1, dtype)
        want = through_wire(name, x).astype(dtype)
        bits = set()
        for _ in every_isa():
            said = encoded(one, x)
            bits.add(said.tobytes() if name != "int8" else blocks_of(said, count))
            for offset in (0, 1):
                assert same(decoded(one, said, count, dtype, offset), want)
        assert len(bits) == 1


def blocks_of(said: Array, count: int) -> bytes:
    """Return what is on the wire without the room behind the scales."""
    num = -(-count // 256)
    return said[: 4 * num].tobytes() + said[said.size - 256 * num :].tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_no_ordinary_numbers(name: str) -> None:
    special = [np.nan, np.inf, -np.inf, -0.0, 65519.9, 65520.0, -7e4, 3.4e38, 1e-45]
    x = np.zeros(4 * 256, np.float32)
    x[: len(special)] = special
    x[256:512] = 1
    x[600] = np.inf
    for _ in every_isa():
        got = decoded(FORMATS[name], encoded(FORMATS[name], x), x.size, "float32", 0)
        assert same(got, through_wire(name, x))
        if name == "int8":
            assert np.isnan(got[:256]).all()
            assert np.isnan(got[512:768]).all()
            assert (got[768:] == 0).all()
        else:
            assert np.isnan(got[0])
            assert got[1:3].tolist() == [np.inf, -np.inf]
        assert np.allclose(got[256:512], 1)


def test_the_largest_float_stays_finite() -> None:
    largest = np.float32(np.finfo(np.float32).max)
    for x in (largest, np.nextafter(largest, np.float32(0)), -largest):
        values = np.full(3, x)
        for _ in every_isa():
            said = encoded(FORMATS["int8"], values)
            got = decoded(FORMATS["int8"], said, 3, "float32", 0)
            assert np.abs(got / x - 1).max() < 1e-6


magnitudes = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(x=st.lists(magnitudes, max_size=300), power=st.integers(-140, 0))
def test_an_element_is_off_by_no_more_than_is_stated(
    name: str, x: list[float], power: int
) -> None:
    with np.errstate(all="ignore"):
        values = (np.array(x, np.float64) * 2.0**power).astype(np.float32)
    if name == "float16":
        values = values[np.abs(values) < 65520]
    if name == "bfloat16":  # what rounds to infinity is out of its range
        values = values[np.abs(values) < 3.39e38]
    for _ in every_isa():
        said = encoded(FORMATS[name], values)
        got = decoded(FORMATS[name], said, values.size, "float32", 0)
        wrong = np.abs(got.astype(np.float64) - values)
        assert (wrong <= off_by(name, np.abs(values.astype(np.float64)))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_sums_are_added_in_rank_order_and_say_what_they_lose(
    name: str, dtype: str
) -> None:
    one, code = FORMATS[name], dtype_by_name(dtype).code
    for count in LENGTHS:
        inputs = [drawn(count, seed, dtype) for seed in range(3)]
        owed = (drawn(count, 9, dtype) / 64).astype(dtype)
        for own, divisor, keeps in ((1, 1, True), (0, 3, True), (2, 3, False)):
            total = np.zeros(count, np.float32)
            for rank, x in enumerate(inputs):
                mine = (x + owed).astype(np.float32)
                total += mine if rank == own else through_wire(name, x)
            want = through_wire(name, total / np.float32(divisor))
            want_lost = (total - want * np.float32(divisor)).astype(dtype)
            for _ in every_isa():
                parts = [encoded(one, x) for x in inputs]
                to = Guarded(wire.nbytes(one.code, count))
                lost = Guarded(count * np.dtype(dtype).itemsize)
                wire.sum(
                    *(one.code, code, [part.ctypes.data for part in parts], own),
                    *(inputs[own].ctypes.data, owed.ctypes.data, count, divisor),
                    *(to.address, lost.address if keeps else 0),
                )
                assert to.is_intact()
                assert lost.is_intact()
                assert same(decoded(one, to.bytes, count, "float32", 0), want)
                got = np.frombuffer(lost.bytes.tobytes(), dtype)
                if keeps:
                    assert same(got, want_lost)
                else:
                    assert (lost.bytes == GUARD).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_residual_is_what_did_not_go(name: str, dtype: str) -> None:
    one, code = FORMATS[name], dtype_by_name(dtype).code
    for count in LENGTHS:
        x, owed = drawn(count, 2, dtype), (drawn(count, 3, dtype) / 8).astype(dtype)
        went = through_wire(name, x + owed)
        for _ in every_isa():
            residual = owed.copy()
            said = encoded(one, x, residual)
            assert same(decoded(one, said, count, "float32", 0), went)
            wire.settle(
                *(one.code, code, said.ctypes.data, count),
                *(x.ctypes.data, residual.ctypes.data),
            )
            assert same(residual, x + owed - went.astype(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_a_residual_never_becomes_infinite_or_nan(name: str) -> None:
    one = FORMATS[name]
    x = np.array([np.nan, np.inf, 1e39, 0.3], np.float64)
    for _ in every_isa():
        residual = np.zeros(4)
        said = encoded(one, x, residual)
        places = said.ctypes.data, 4, x.ctypes.data, residual.ctypes.data
        wire.settle(one.code, code_of(x), *places)
        assert np.isfinite(residual).all()
        assert not residual[:3].any()


def test_wrong_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="wire format code 3 is unknown"):
        wire.nbytes(3, 1)
    with pytest.raises(ValueError, match="float32 or float64"):
        wire.decode(0, 3, 0, 0, 0)
