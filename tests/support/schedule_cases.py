# SPDX-License-Identifier: Apache-2.0
"""Every scheduled algorithm with its schedules, and what numpy says they compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt import algorithms
from commrt.schedule.ir import Schedule, full_multiple
from commrt.vocabulary.operations import SCHEDULED, operation

__all__ = ["EVERY", "assert_equal", "expected", "inputs", "schedules"]

Array = npt.NDArray[Any]
EVERY = [(coll, name) for coll in SCHEDULED for name in algorithms.names(coll, 8)]
MANY_VALUES = 6


def schedules(
    coll: str, name: str, size: int, *, every: bool = False
) -> Iterator[Schedule]:
    """All parameters, and the first, a middle and the last root, where supported.

    Of a parameter with many values the first, the last, and one between.
    """
    if not algorithms.get(coll, name).supports(size):
        return
    roots = {0, size // 2, size - 1} if operation(coll).has_root else {0}
    choices = algorithms.param_choices(coll, name, size)
    for key, values in choices.items():
        if len(values) > MANY_VALUES and not every:
            choices[key] = (*values[:2], values[size % len(values)], values[-1])
    for root, values in itertools.product(roots, itertools.product(*choices.values())):
        params = dict(zip(choices, values, strict=True))
        yield algorithms.schedule(coll, name, size, root, params)


def expected(coll: str, root: int, xs: list[Array]) -> list[Array | None]:
    """Return each rank's output by definition."""
    size = len(xs)
    only_root = [rank == root for rank in range(size)]
    if coll == "barrier":
        return [None] * size
    if coll in ("allreduce", "reduce"):
        total = np.sum(xs, axis=0)
        return [
            total if coll == "allreduce" or is_root else None for is_root in only_root
        ]
    if operation(coll).combines_some:
        some = [operation(coll).contributors(rank, size) for rank in range(size)]
        return [sum(xs[one] for one in each) if each else None for each in some]
    if coll == "bcast":
        return [xs[root]] * size
    if coll in ("allgather", "gather"):
        whole = np.concatenate(xs)
        return [
            whole if coll == "allgather" or is_root else None for is_root in only_root
        ]
    if coll == "reduce_scatter":
        return list(np.split(np.sum(xs, axis=0), size))
    if coll == "scatter":
        return list(np.split(xs[root], size))
    return [
        np.concatenate([np.split(x, size)[rank] for x in xs]) for rank in range(size)
    ]


def inputs(coll: str, size: int, count: int) -> list[Array]:
    """Return arrays whose elements tell rank and place; lengths as ``coll`` needs."""
    gathers = operation(coll).out_count == "times_size"
    length = count if gathers else count * full_multiple(coll, size)
    return [1000 * (rank + 1) + np.arange(length) for rank in range(size)]


def assert_equal(found: list[Array | None], wanted: list[Array | None]) -> None:
    assert len(found) == len(wanted)
    for rank, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None:
            assert a is b, rank
        else:
            np.testing.assert_array_equal(a, b, err_msg=f"rank {rank}")
