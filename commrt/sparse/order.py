# SPDX-License-Identifier: Apache-2.0
"""Sparse algorithms that combine from the left, for ``deterministic=True``.

``split`` and ``split_dense`` have the entries of all ranks for a range in one place,
and add them in the order of ranks. The others add sums to sums, in an order that
depends on who met whom. The order is not the only difference: a vector that became
dense on its way loses its zeros, and each algorithm decides that by the entries it has.
So integers, whose sums no order can change, keep all algorithms only if the result is
dense.
"""

from __future__ import annotations

from commrt.sparse.cost import ALGORITHMS
from commrt.vocabulary.dtypes import DType

__all__ = ["same_results", "why_refused"]

_IN_ORDER = ("split", "split_dense")


def same_results(deterministic: bool, dtype: DType, form: str) -> tuple[str, ...]:
    """Return the algorithms whose results must not differ, or all of them.

    Args:
        deterministic: whether results must not depend on the algorithm.
        dtype: type of the values.
        form: the wanted result: auto, sparse or dense.
    """
    if not deterministic:
        return ALGORITHMS
    if form != "dense":
        return _IN_ORDER[:1]
    return _IN_ORDER if dtype.kind in ("float", "complex") else ALGORITHMS


def why_refused(
    algorithm: str, deterministic: bool, dtype: DType, form: str
) -> str | None:
    """Return why an algorithm must not run, None if it may."""
    allowed = same_results(deterministic, dtype, form)
    if algorithm in allowed:
        return None
    needs = "one order of addition" if form == "dense" else "one order and one format"
    return (
        f"deterministic=True asks for {needs}, and with result={form!r} and "
        f"{dtype.name} values only {' and '.join(allowed)} "
        f"{'have' if len(allowed) > 1 else 'has'} it"
    )
