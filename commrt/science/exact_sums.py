# SPDX-License-Identifier: Apache-2.0
"""Sums over all ranks with the same bits, however the terms lie on ranks.

Each term is cut into integers: multiples of 2^-30, 2^-60 and 2^-90 of a power of two
that is larger than all terms. What is smaller is dropped, from each term by itself.
Sums of integers are exact in any order, so the result is that of one process.

Source: pre-rounding in Demmel and Nguyen, "Fast reproducible floating-point summation"
(2013), with integers in place of floating-point bins.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from commrt.comm import Communicator
from commrt.science.rows import Floats, Ints

__all__ = ["exact_sum"]

_BITS, _LIMBS = 30, 3
"""Sums of 2^33 terms fit into 63 bits."""
_NOT_FINITE = float(np.finfo(np.float64).max)
"""Stands for NaN and infinity."""


def exact_sum(terms: Floats, comm: Communicator) -> Floats:
    """Return the sum over the rows of all ranks, for each column; collective.

    Args:
        terms: (rows, columns), this rank's; ranks may have different numbers of rows.
        comm: the ranks.

    It is exact but for what lies below 2^-90 of the largest term, and rounded once. A
    column with NaN or infinity on any rank is NaN. Bytes, for q columns: an
    ``allreduce`` of 8 q and one of 24 q.
    """
    largest = np.max(np.abs(terms), axis=0, initial=0.0)
    # No infinity is sent: communicators may check for it.
    largest[~np.isfinite(largest)] = _NOT_FINITE
    if comm.size > 1:
        comm.allreduce(largest, "max")
    is_finite = largest < _NOT_FINITE
    _, exponents = np.frexp(np.where(is_finite, largest, 0.0))
    limbs = _cut(np.where(is_finite, terms, 0.0), exponents)
    if comm.size > 1:
        comm.allreduce(limbs)
    return np.array(
        [
            _joined(limbs[:, column].tolist(), int(exponents[column]))
            if is_finite[column]
            else math.nan
            for column in range(terms.shape[1])
        ]
    )


def _cut(terms: Floats, exponents: npt.NDArray[np.int32]) -> Ints:
    """Return the sums (limbs, columns) of the integers that terms are cut into."""
    rest = np.ldexp(terms, -exponents)  # within -1 and 1
    limbs = np.zeros((_LIMBS, terms.shape[1]), np.int64)
    for limb in limbs:
        rest = np.ldexp(rest, _BITS)
        whole = np.trunc(rest)
        rest -= whole
        limb[:] = whole.astype(np.int64).sum(axis=0)
    return limbs


def _joined(limbs: list[int], exponent: int) -> float:
    total = 0
    for limb in limbs:
        total = (total << _BITS) + limb
    return math.ldexp(float(total), exponent - _BITS * _LIMBS)
