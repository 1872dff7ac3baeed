# SPDX-License-Identifier: Apache-2.0
"""8-bit floats against ml_dtypes: every pair of values, bit by bit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name

ml_dtypes = pytest.importorskip("ml_dtypes")
kernels = _native.kernels
Array = np.ndarray[Any, Any]
NAMES = ("float8_e4m3fn", "float8_e5m2")
EVERY = np.arange(256, dtype=np.uint8)


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    assert kernels.use_isa(kernels.isas()[-1])


def values(name: str, codes: Array) -> Array:
    return np.ascontiguousarray(codes, np.uint8).view(getattr(ml_dtypes, name))


def combine(
    name: str, op: ReduceOp, *inputs: Array, factor: float | None = None
) -> Array:
    dst = np.zeros(inputs[0].size, np.uint8)
    kernels.combine(
        dtype_by_name(name).code,
        int(op),
        dst,
        [x.view(np.uint8) for x in inputs],
        scaled=[] if factor is None else list(range(len(inputs))),
        factor=1.0 if factor is None else factor,
    )
    return dst.view(inputs[0].dtype)


def assert_same_bits(got: Array, want: Array, *, nan_bits: bool = False) -> None:
    """Every bit is equal; of a NaN only where ``nan_bits`` says so."""
    differ = got.view(np.uint8) != want.view(np.uint8)
    if not nan_bits:
        differ &= ~(np.isnan(got) & np.isnan(want))
    at = np.flatnonzero(differ)
    assert at.size == 0, (at[:5], got[at[:5]], want[at[:5]])


def every_pair(name: str) -> tuple[Array, Array]:
    x, y = np.meshgrid(EVERY, EVERY, indexing="ij")
    return values(name, x.ravel()), values(name, y.ravel())


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("op", "reference"),
    [(ReduceOp.SUM, operator.add), (ReduceOp.PROD, operator.mul)],
    ids=["sum", "prod"],
)
def test_every_pair_is_added_and_multiplied_as_ml_dtypes_does(
    isa: str, name: str, op: ReduceOp, reference: Callable[[Any, Any], Any]
) -> None:
    assert kernels.use_isa(isa)
    x, y = every_pair(name)
    with np.errstate(all="ignore"):
        want = reference(x, y)
    assert want.dtype == x.dtype
    assert_same_bits(combine(name, op, x, y), want)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("least", [True, False], ids=["min", "max"])
def test_every_pair_is_ordered_as_the_numbers_are(
    isa: str, name: str, least: bool
) -> None:
    assert kernels.use_isa(isa)
    x, y = every_pair(name)
    a, b = x.astype(np.float64), y.astype(np.float64)
    # -0 is less than 0, whatever numpy's order of inputs.
    first = (
        (a < b) | ((a == b) & np.signbit(a))
        if least
        else (a > b) | ((a == b) & ~np.signbit(a))
    )
    want = np.where(first, x, y)
    quiet = values(name, np.array([0x7F if name == NAMES[0] else 0x7E]))[0]
    want[np.isnan(a) | np.isnan(b)] = quiet
    op = ReduceOp.MIN if least else ReduceOp.MAX
    assert_same_bits(combine(name, op, x, y), want, nan_bits=True)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", NAMES)
def test_every_float32_rounds_as_ml_dtypes_rounds_it(isa: str, name: str) -> None:
    """Float32 values between, at and beside all middles, and beyond the ends."""
    assert kernels.use_isa(isa)
    numbers = values(name, EVERY)
    finite = np.unique(np.abs(numbers[np.isfinite(numbers)].astype(np.float32)))
    middles = (finite[1:] + finite[:-1]) / 2
    top = np.array([464, 465, 480, 1e6, 61440, 65536, 7e4, 3e38], np.float32)
    around = [
        np.nextafter(each, np.float32(towards))
        for each in (finite, middles, top)
        for towards in (-np.inf, np.inf)
    ]
    targets = np.concatenate([finite, middles, top, *around])
    one = values(name, np.zeros(1))
    one[0] = 1
    for target in np.concatenate([targets, -targets]):
        # The product of 1 and the factor is the float32 to be rounded.
        got = combine(name, ReduceOp.AVG, one, factor=float(target))
        with np.errstate(all="ignore"):
            want = np.array([target], np.float32).astype(one.dtype)
        assert_same_bits(got, want)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_of_many_is_rounded_once(isa: str, name: str) -> None:
    assert kernels.use_isa(isa)
    rng = np.random.default_rng(5)
    finite = EVERY[np.isfinite(values(name, EVERY))]
    for num in (3, 4, 7):
        inputs = [values(name, rng.choice(finite, 5000)) for _ in range(num)]
        total = inputs[0].astype(np.float32)
        for x in inputs[1:]:
            total = total + x.astype(np.float32)
        with np.errstate(all="ignore"):
            want = total.astype(inputs[0].dtype)
        assert_same_bits(combine(name, ReduceOp.SUM, *inputs), want)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_is_true_or_false_as_the_numbers_are(isa: str, name: str) -> None:
    assert kernels.use_isa(isa)
    x, y = every_pair(name)
    a, b = x.astype(np.float32), y.astype(np.float32)
    for op, reference in (
        (ReduceOp.LAND, np.logical_and),
        (ReduceOp.LOR, np.logical_or),
        (ReduceOp.LXOR, np.logical_xor),
    ):
        want = reference(a, b).astype(x.dtype)
        assert_same_bits(combine(name, op, x, y), want, nan_bits=True)
