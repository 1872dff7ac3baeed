# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a case give, and what each must get: all ranks at once, by numpy.

Contributions are slices of pools of numbers, each case's from another place, so that
no result can be what an earlier case has left. Sums and products of floats are mostly
of small integers: they are exact in any order, and are compared bit by bit. Others are
real numbers, whose results may round once per step.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import ml_dtypes
import numpy as np
from affine import AFFINE, compose, in_c
from cases import OF_BOOLS, OF_NUMBERS, Case, numpy_dtype
from rounding import product, scaled, telling

import commrt
from commrt.vocabulary.dtypes import DType, dtype_by_name
from commrt.vocabulary.operations import operation

Array = np.ndarray[Any, Any]

MESSAGES = ("sendrecv", "send")
"""Point-to-point, as an operation of all ranks: each sends ``root`` ranks further."""
KINDS = ("plain", "deterministic", "python", "c")
"""Whose reduction, and whether its order is fixed."""
_POOL = 65_521
"""A prime number of elements: where a slice goes round, blocks still differ."""
_WHOLE = {"float16": 100, "bfloat16": 15, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Sums of 16 such integers are exact; of float8_e5m2 those of 8."""


@lru_cache(maxsize=4)
def user_reduction(kind: str) -> Any:
    """Return the reduction of a kind, the same object each time; it is a plan's key."""
    if kind == "python":
        return commrt.reduction(compose)
    return commrt.reduction(in_c(), name="compose", dtype=AFFINE)


@dataclass(frozen=True)
class Drawn:
    """One draw of all ranks' contributions."""

    xs: Sequence[Array]
    wants: Sequence[Array | None]
    """What each rank must get, None where it gets nothing."""
    slack: Sequence[Array] | None = None
    """By how much each element may differ; None: by nothing at all."""


class Problem:
    """What a case and its variants in other forms and places have in common."""

    def __init__(self, case: Case, kind: str) -> None:
        self.case = case
        self.kind = kind
        self.coll, self.size = case.coll, case.size
        self.is_message = case.coll in MESSAGES
        self.reduces = not self.is_message and operation(case.coll).reduces
        self.dtype = AFFINE if kind in ("python", "c") else numpy_dtype(case.dtype)
        self.counts = case.counts()
        self.pairs = case.pairs() if case.coll == "alltoallv" else []
        self.x_counts = self._x_counts()
        self.out_counts = self._out_counts()
        self.arguments = [self._arguments(rank) for rank in range(self.size)]

    def _x_counts(self) -> list[int]:
        coll, size, count = self.coll, self.size, self.case.count
        if coll == "barrier":
            return [0] * size
        if self.pairs:
            return [sum(row) for row in self.pairs]
        if coll in ("allgatherv", "gatherv"):
            return self.counts
        if coll in ("reduce_scatterv", "scatterv"):
            return [sum(self.counts)] * size
        per_rank = coll in ("reduce_scatter", "alltoall", "scatter")
        return [count * size if per_rank else count] * size

    def _out_counts(self) -> list[int | None]:
        """Return the length of each rank's output, None where it has none."""
        coll, size, case = self.coll, self.size, self.case
        if coll == "barrier":
            return [None] * size
        if self.pairs:
            return [sum(column) for column in zip(*self.pairs, strict=True)]
        if coll in ("scatterv", "reduce_scatterv"):
            return list(self.counts)
        if coll in ("allgather", "allgatherv", "gather", "gatherv"):
            found: list[int | None] = [sum(self.x_counts)] * size
        elif coll in ("reduce_scatter", "scatter"):
            found = [case.count] * size
        else:
            found = list(self.x_counts)
        if coll in ("reduce", "gather", "gatherv"):
            return [n if rank == case.root else None for rank, n in enumerate(found)]
        return found

    def factor(self, rank: int) -> int | float:
        """Return what a rank's input is multiplied by in premul_sum."""
        return 1 / 3 if self.kind == "deterministic" else self.case.factor(rank)

    def _arguments(self, rank: int) -> dict[str, Any]:
        case = self.case
        if self.is_message:
            shift = case.root
            dest, source = (rank + shift) % self.size, (rank - shift) % self.size
            return {"dest": dest, "source": source}
        spec = operation(self.coll)
        found: dict[str, Any] = {}
        if self.kind in ("python", "c"):
            found["op"] = user_reduction(self.kind)
        elif spec.reduces:
            found["op"] = case.op
            if case.op == "premul_sum":
                found["factor"] = self.factor(rank)
        if spec.has_root:
            found["root"] = case.root
        if self.pairs:
            found["send_counts"] = tuple(self.pairs[rank])
            found["recv_counts"] = tuple(row[rank] for row in self.pairs)
        elif spec.count_arguments:
            found["counts"] = tuple(self.counts)
        if case.algorithm is not None:
            found["algorithm"] = case.algorithm
        if case.params:
            found["params"] = case.params
        return found

    @property
    def rounds(self) -> bool:
        """Whether it computes floats, whose zeros and NaNs have several forms."""
        if not self.reduces or self.dtype is AFFINE:
            return False
        return dtype_by_name(self.case.dtype).kind in ("float", "complex")

    def block_start(self, rank: int) -> int:
        """Return where the block of a rank begins in the vector of all blocks."""
        if operation(self.coll).count_arguments:
            return sum(self.counts[:rank])
        return rank * self.case.count

    # -- numbers -------------------------------------------------------------------

    def draw(self, rng: random.Random) -> Drawn:
        """Return contributions, and what must come of them."""
        flavour = self._flavour(rng)
        flat = _take(flavour, self._pool_name(), sum(self.x_counts), rng)
        if self.reduces:
            block = flat.reshape(self.size, self.x_counts[0])
            if (
                flavour == "whole"
                and self.case.dtype == "float8_e5m2"
                and self.size > 8
            ):
                block = _every_other(block)
            return self._reduced(block, flavour)
        edges = np.cumsum(self.x_counts)[:-1]
        xs = np.split(flat, edges)
        return Drawn(xs, self._moved(xs, flat))

    def _pool_name(self) -> str:
        return "affine" if self.dtype is AFFINE else self.case.dtype

    def _flavour(self, rng: random.Random) -> str:
        op = self.case.op
        if self.dtype is AFFINE:
            return "affine"
        kind = dtype_by_name(self.case.dtype).kind
        if self.kind == "deterministic":
            return "telling"
        if not self.reduces or kind == "bool":
            return "bits"
        if op in ("land", "lor", "lxor"):
            return "zeros"
        if kind in ("int", "uint"):
            return "bits"
        if op in ("min", "max"):
            return "extremes"
        if op in ("avg", "premul_sum") or rng.random() < 0.25:
            # The product of many may leave what a byte can hold.
            return "narrow" if op == "prod" and self.dtype.itemsize == 1 else "real"
        return "signs" if op == "prod" else "whole"

    def _moved(self, xs: Sequence[Array], flat: Array) -> list[Array | None]:
        """Return the outputs of operations that only move."""
        coll, size, root = self.coll, self.size, self.case.root
        if coll == "barrier":
            return [None] * size
        if self.is_message:
            return [xs[(rank - root) % size] for rank in range(size)]
        if coll == "bcast":
            return [xs[root]] * size
        if coll in ("allgather", "allgatherv"):
            return [flat] * size
        if coll in ("gather", "gatherv"):
            return [flat if rank == root else None for rank in range(size)]
        if coll in ("scatter", "scatterv"):
            return list(np.split(xs[root], np.cumsum(self.counts)[:-1]))
        if coll == "alltoall":
            block = flat.reshape(size, size, self.case.count).transpose(1, 0, 2)
            return list(block.reshape(size, -1))
        assert coll == "alltoallv"
        rows = [
            np.split(x, np.cumsum(sent)[:-1])
            for x, sent in zip(xs, self.pairs, strict=True)
        ]
        return [np.concatenate([row[rank] for row in rows]) for rank in range(size)]

    def _reduced(self, block: Array, flavour: str) -> Drawn:
        spec, ranks = operation(self.coll), range(self.size)
        if spec.combines_some:
            each = [spec.contributors(rank, self.size) for rank in ranks]
            found = [self._total(block, some, flavour) for some in each]
            slacks = [slack for _, slack in found]
            has_slack = any(slack is not None for slack in slacks)
            totals = [total for total, _ in found]
            return Drawn(list(block), totals, slacks if has_slack else None)
        total, slack = self._total(block, ranks, flavour)
        off = None if slack is None else self._spread_out(slack)
        return Drawn(list(block), self._spread_out(total), off)

    def _total(
        self, block: Array, ranks: range, flavour: str
    ) -> tuple[Array | None, Array | None]:
        """Return what these ranks' contributions make, and how far it may be off."""
        if not ranks:
            return None, None
        if self.dtype is AFFINE:
            return reduce(compose, block[ranks.start : ranks.stop]).copy(), None
        if self.kind == "deterministic":
            return self._from_the_left(block[ranks.start : ranks.stop]), None
        total = self._fold(block, ranks)
        if flavour in ("real", "narrow"):
            return total, self._slack(block, total, ranks)
        return total.astype(self.dtype, copy=False), None

    def _spread_out(self, totals: Array) -> list[Any]:
        """Return which part of the totals each rank gets."""
        coll, size = self.coll, self.size
        if coll == "reduce":
            return [totals if r == self.case.root else None for r in range(size)]
        if coll in ("reduce_scatter", "reduce_scatterv"):
            return list(np.split(totals, np.cumsum(self.counts)[:-1]))
        return [totals] * size

    def _fold(self, block: Array, ranks: range) -> Array:
        """Return the exact reduction over some ranks."""
        op, dtype = self.case.op, dtype_by_name(self.case.dtype)

        def over(combine: Any, values: Array) -> Array:
            some = values[ranks.start : ranks.stop]
            number: Array = combine.reduce(some, axis=0, dtype=values.dtype)
            return number

        if dtype.kind == "bool":
            return over(OF_BOOLS[op], block)
        if op in ("land", "lor", "lxor"):
            return over(OF_BOOLS[op], block != 0).astype(block.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            total = over(OF_NUMBERS[op], self._multiplied(block, dtype))
        if op != "avg":
            return total
        return (
            total / self.size
            if dtype.kind not in ("int", "uint")
            else (_toward_zero(total, self.size))
        )

    def _multiplied(self, block: Array, dtype: DType) -> Array:
        if dtype.kind in ("float", "complex"):
            wide = np.complex128 if dtype.kind == "complex" else np.float64
            block = block.astype(wide)
        if self.case.op != "premul_sum":
            return block
        factors = [self.factor(rank) for rank in range(self.size)]
        return block * np.array(factors).astype(block.dtype)[:, None]

    def _slack(self, block: Array, totals: Array, ranks: range) -> Array:
        """Every addition or product may round once; complex products four times."""
        dtype = dtype_by_name(self.case.dtype)
        finfo = ml_dtypes.finfo if dtype.needs_ml_dtypes else np.finfo
        steps = (self.size + 2) * (4 if dtype.kind == "complex" else 1)
        eps = float(finfo(self.dtype).eps) * steps
        if self.case.op == "prod":
            return np.abs(totals) * eps
        sizes = np.abs(self._multiplied(block, dtype))
        magnitude = np.add.reduce(sizes[ranks.start : ranks.stop], axis=0)
        return magnitude * (eps / self.size if self.case.op == "avg" else eps)

    def _from_the_left(self, block: Array) -> Array:
        """Return what deterministic=True promises."""
        kind, op = block.dtype, self.case.op
        wide = np.dtype(np.float32) if kind.itemsize < 4 else kind
        xs = list(block)
        with np.errstate(all="ignore"):
            if op in ("avg", "premul_sum"):
                by = 1 / self.size if op == "avg" else self.factor(0)
                xs = [scaled(x, by) for x in xs]
            total = xs[0].astype(wide)
            for x in xs[1:]:
                other = x.astype(wide)
                total = product(total, other) if op == "prod" else total + other
        return total.astype(kind)


def _toward_zero(total: Array, size: int) -> Array:
    quotient = total // size
    rest = total - quotient * size
    found: Array = (quotient + ((rest != 0) & (total < 0))).astype(total.dtype)
    return found


def _every_other(block: Array) -> Array:
    """Return it with half of the ranks' numbers zero, others in each element."""
    ranks, elements = np.indices(block.shape)
    return np.where((ranks + elements) % 2 == 0, block, block.dtype.type(0))


# -- pools --------------------------------------------------------------------------


def _take(flavour: str, name: str, number: int, rng: random.Random) -> Array:
    pool, start = _pool(flavour, name), rng.randrange(_POOL)
    if start + number <= _POOL:
        return pool[start : start + number]
    return pool.take(np.arange(start, start + number), mode="wrap")


@lru_cache(maxsize=128)
def _pool(flavour: str, name: str) -> Array:
    rng = np.random.default_rng(zlib.crc32(f"{flavour} {name}".encode()))
    if flavour == "affine":
        raw = rng.integers(1, 1 << 62, 2 * _POOL, dtype=np.uint64)
        return raw.view(AFFINE)
    if flavour == "telling":
        return telling(name, 3, _POOL)
    pool = _FLAVOURS[flavour](rng, numpy_dtype(name), dtype_by_name(name))
    assert len(pool) == _POOL
    pool.flags.writeable = False
    return pool


def _bits(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    if dtype.kind == "bool":
        return rng.random(_POOL) < 0.6
    return rng.integers(0, 256, _POOL * kind.itemsize, dtype=np.uint8).view(kind)


def _real(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    values = rng.uniform(0.5, 2.0, _POOL) * rng.choice([-1.0, 1.0], _POOL)
    if dtype.kind == "complex":
        return (values + 1j * rng.uniform(-1.0, 1.0, _POOL)).astype(kind)
    return values.astype(kind)


def _narrow(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    values = rng.uniform(0.75, 1.25, _POOL) * rng.choice([-1.0, 1.0], _POOL)
    return values.astype(kind)


def _zeros(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    numbers = dtype.kind in ("int", "uint")
    values = (_bits if numbers else _real)(rng, kind, dtype).copy()
    values[rng.random(_POOL) < 0.4] = 0
    return values


def _extremes(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    values = _real(rng, np.dtype(np.float64), dtype)
    values[rng.random(_POOL) < 0.04] = np.nan
    values[rng.random(_POOL) < 0.1] = np.inf
    values[rng.random(_POOL) < 0.1] = -np.inf
    return values.astype(kind)


def _whole(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    most = _WHOLE.get(dtype.name, 1000)
    values = rng.integers(-most, most, _POOL, endpoint=True).astype(np.float64)
    if dtype.kind == "complex":
        imaginary = rng.integers(-most, most, _POOL, endpoint=True)
        return (values + 1j * imaginary).astype(kind)
    return values.astype(kind)


def _signs(rng: np.random.Generator, kind: np.dtype[Any], dtype: DType) -> Array:
    choices: list[Any] = [1.0, -1.0]
    if dtype.kind == "complex":
        choices += [1j, -1j, 1 + 1j]
    elif dtype.itemsize >= 4:
        choices += [2.0, -2.0, 0.5, -0.5]
    return rng.choice(choices, _POOL).astype(kind)


_FLAVOURS = {
    "bits": _bits,
    "real": _real,
    "narrow": _narrow,
    "zeros": _zeros,
    "extremes": _extremes,
    "whole": _whole,
    "signs": _signs,
}
