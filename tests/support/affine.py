# SPDX-License-Identifier: Apache-2.0
"""A reduction that is associative and not commutative, in Python and in C.

An element is a map x -> scale * x + shift, modulo 2^64; the reduction does the maps of
lower ranks first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

import commrt
from commrt import _native
from commrt.vocabulary.operations import OPERATIONS, operation

Array = np.ndarray[Any, Any]
AFFINE = np.dtype([("scale", "u8"), ("shift", "u8")])
FORMS = ("blocking", "nonblocking", "persistent", "in place")
REDUCING = tuple(
    spec.name for spec in OPERATIONS if spec.reduces and not spec.count_arguments
)


def compose(a: Array, b: Array) -> Array:
    """Return the maps that do ``a`` first."""
    both = np.empty_like(a)
    both["scale"] = a["scale"] * b["scale"]
    both["shift"] = a["shift"] * b["scale"] + b["shift"]
    return both


def in_c() -> Any:
    """Return the same as a C function."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return kind(_native.kernels.compose_address())


def reductions() -> dict[str, Any]:
    """Return the reduction in both languages."""
    return {
        "python": commrt.reduction(compose),
        "c": commrt.reduction(in_c(), name="compose", dtype=AFFINE),
    }


def maps(rank: int, count: int) -> Array:
    """Return the maps of a rank."""
    rng = np.random.default_rng([rank, count])
    found = np.empty(count, AFFINE)
    found["scale"] = rng.integers(1, 1 << 62, count, dtype=np.uint64)
    found["shift"] = rng.integers(0, 1 << 62, count, dtype=np.uint64)
    return found


def wanted(coll: str, rank: int, xs: Sequence[Array], root: int) -> Array | None:
    """Return what a rank must get; None if nothing is promised."""
    if coll == "reduce" and rank != root:
        return None
    contributors = operation(coll).contributors(rank, len(xs))
    if not contributors:
        return None
    total = reduce(compose, [xs[one] for one in contributors])
    if coll != "reduce_scatter":
        return total
    block = total.size // len(xs)
    return total[rank * block : (rank + 1) * block]


def run_all(comm: Any, counts: Sequence[int], ways: Any) -> list[str]:
    """Run every operation, form, language and algorithm; return what is wrong.

    ``ways(comm, coll, op)`` returns keyword arguments that name an algorithm.
    """
    wrong = []
    for coll in REDUCING:
        for language, op in reductions().items():
            for way in ways(comm, coll, op):
                for count in counts:
                    for form in FORMS:
                        what = f"{coll} {language} {way} {count} {form}"
                        if not _is_right(comm, coll, op, way, count, form):
                            wrong.append(f"rank {comm.rank}: {what}")
    return wrong


def _is_right(comm: Any, coll: str, op: Any, way: Any, count: int, form: str) -> bool:
    length = count * comm.size if coll == "reduce_scatter" else count
    xs = [maps(rank, length) for rank in range(comm.size)]
    x = xs[comm.rank].copy()
    root = comm.size - 1
    arguments = {"op": op, **way}
    if coll == "reduce":
        arguments["root"] = root
    if form != "in place":
        arguments["out"] = np.zeros(count, AFFINE)
    if form == "persistent":
        call = getattr(comm.plan, coll)(x, **arguments)
        first = call()
        kept = None if first is None else first.copy()
        got = call.start().wait()
        if kept is not None and kept.tobytes() != got.tobytes():
            return False
    elif form == "nonblocking":
        got = getattr(comm, coll)(x, nonblocking=True, **arguments).wait()
    else:
        got = getattr(comm, coll)(x, **arguments)
    want = wanted(coll, comm.rank, xs, root)
    return want is None or got.tobytes() == want.tobytes()
