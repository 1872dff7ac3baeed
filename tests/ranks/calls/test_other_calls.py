# SPDX-License-Identifier: Apache-2.0
"""Ranks that make different calls with messages of equal length, without check mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt import Block, Cyclic, Layout, reduction
from commrt.errors import CommError, MismatchError, TimeoutError_
from commrt.local import run

F = np.float32
Made = Callable[[Any, int], Any]
"""Makes a call whose messages between two ranks of 2 have so many bytes."""


def reducing(operation: str, dtype: Any, op: str, **where: int) -> Made:
    """Return a reduction of whole arrays."""

    def made(comm: Any, nbytes: int) -> Any:
        x = np.ones(nbytes // np.dtype(dtype).itemsize, dtype)
        out = np.empty_like(x)
        return getattr(comm, operation)(x, out=out, op=op, **where)

    return made


def moving(operation: str, dtype: Any, factor: int = 1, **where: int) -> Made:
    """Return an operation on arrays ``factor`` times as long as its messages."""

    def made(comm: Any, nbytes: int) -> Any:
        x = np.ones(factor * nbytes // np.dtype(dtype).itemsize, dtype)
        out = {}
        if operation in ("allgather", "gather"):
            out["out"] = np.empty(comm.size * x.size, dtype)
        elif operation == "scatter":
            out["out"] = np.empty(x.size // comm.size, dtype)
        elif operation == "alltoall":
            out["out"] = np.empty_like(x)
        return getattr(comm, operation)(x, **out, **where)

    return made


CALLS: dict[str, Made] = {
    "allreduce sum": reducing("allreduce", F, "sum"),
    "allreduce max": reducing("allreduce", F, "max"),
    "allreduce avg": reducing("allreduce", F, "avg"),
    "allreduce int32": reducing("allreduce", np.int32, "sum"),
    "allreduce float64": reducing("allreduce", np.float64, "sum"),
    "reduce to 0": reducing("reduce", F, "sum", root=0),
    "reduce to 1": reducing("reduce", F, "sum", root=1),
    "reduce max to 0": reducing("reduce", F, "max", root=0),
    "scan": reducing("scan", F, "sum"),
    "exscan": reducing("exscan", F, "sum"),
    "bcast from 0": moving("bcast", F, root=0),
    "bcast from 1": moving("bcast", F, root=1),
    "bcast int32 from 0": moving("bcast", np.int32, root=0),
    "allgather": moving("allgather", F),
    "alltoall": moving("alltoall", F, 2),
    "gather to 0": moving("gather", F, root=0),
    "gather to 1": moving("gather", F, root=1),
    "scatter from 0": moving("scatter", F, 2, root=0),
    "scatter from 1": moving("scatter", F, 2, root=1),
}
ONLY_SENDS = {
    "reduce to 1": 0, "reduce to 0": 1, "reduce max to 0": 1, "scan": 0, "exscan": 0,
    "bcast from 0": 0, "bcast int32 from 0": 0, "bcast from 1": 1, "gather to 0": 1,
    "gather to 1": 0, "scatter from 0": 0, "scatter from 1": 1,
}  # fmt: skip
"""The rank that gets nothing from the other one, so that its result is right."""


def outcomes(names: tuple[str, str], nbytes: int) -> list[list[CommError | None]]:
    """Return what the two ranks raised in these calls, and then in a barrier."""

    def rank_main(comm: Any) -> list[CommError | None]:
        comm.timeout_s = 0.5
        found: list[CommError | None] = []
        for call in (lambda: CALLS[names[comm.rank]](comm, nbytes), comm.barrier):
            try:
                call()
                found.append(None)
            except CommError as error:
                found.append(error)
        return found

    return run(2, rank_main, timeout_s=300)


def check_pair(names: tuple[str, str], nbytes: int) -> None:
    """Check that nobody takes the one call's message for the other's."""
    found = outcomes(names, nbytes)
    for rank, (name, (error, _)) in enumerate(zip(names, found, strict=True)):
        if error is None:
            assert ONLY_SENDS.get(name) == rank, (names, nbytes, rank)
    errors = [each for of_rank in found for each in of_rank if each is not None]
    if not any(isinstance(each, MismatchError) for each in errors):
        # Both waited for the other one, and nobody had sent a message.
        assert all(isinstance(of[0], TimeoutError_) for of in found), (names, nbytes)


@pytest.mark.parametrize("nbytes", [8, 1000, 100_000])
@pytest.mark.parametrize("first", CALLS)
def test_no_call_takes_the_message_of_another(
    first: str, nbytes: int, seed: int, full: bool
) -> None:
    others = [name for name in CALLS if name != first]
    if not full:
        others = random.Random(f"{first} {nbytes} {seed}").sample(others, 4)
    for second in others:
        check_pair((first, second), nbytes)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("allreduce sum", "allreduce max"), ["op='sum'", "op='max'"]),
        (("allreduce sum", "allreduce int32"), ["of float32", "of int32"]),
        (("allreduce sum", "allgather"), ["allreduce of", "allgather of float32"]),
        (("scatter from 1", "bcast from 1"), ["scatter of float32, root=1", "bcast"]),
    ],
)
def test_message_names_both_calls(names: tuple[str, str], words: list[str]) -> None:
    for nbytes in (8, 100_000):
        errors = [error for error, _ in outcomes(names, nbytes)]
        (text, *_) = [str(each) for each in errors if isinstance(each, MismatchError)]
        assert all(word in text for word in (*words, "made another call")), text


def ring(comm: Any) -> Any:
    """Return the ranks in a ring, where nobody waits long."""
    cart = comm.cart((comm.size,), periodic=True)
    cart.timeout_s = 0.5
    return cart


def turned(cart: Any, dtype: Any, block: int) -> Any:
    """Return a bound redistribution; for any block its messages have equal lengths."""
    shape, grid = (8 * cart.size,), (cart.size,)
    dealt = Layout(shape, grid, (Cyclic(0, block),))
    blocks = Layout(shape, grid, (Block(0),))
    return cart.plan.redistribute(np.ones(8, dtype), dealt, blocks)


BOUND: dict[str, list[Callable[[Any], Any]]] = {
    # The messages of a pair have equal lengths.
    "halo_exchange: of float32": [
        lambda cart: cart.plan.halo_exchange(np.ones((6, 4), F), 1, axes=[0]),
        lambda cart: cart.plan.halo_exchange(np.ones((6, 4), np.int32), 1, axes=[0]),
    ],
    "halo_exchange: differ in width": [
        lambda cart: cart.plan.halo_exchange(np.ones((8, 4), F), 1, axes=[0]),
        lambda cart: cart.plan.halo_exchange(np.ones((8, 2), F), 2, axes=[0]),
    ],
    "halo_exchange: types of their fields": [
        lambda cart: cart.plan.halo_exchange([np.ones(8, F), np.ones(8, F)], 1),
        lambda cart: cart.plan.halo_exchange([np.ones(8, F), np.ones(8, np.int32)], 1),
    ],
    "halo_reduce: op='max'": [
        lambda cart: cart.plan.halo_reduce(np.ones(8, F), 1, op="max"),
        lambda cart: cart.plan.halo_reduce(np.ones(8, F), 1, op="sum"),
    ],
    "halo_reduce: halo_exchange": [
        lambda cart: cart.plan.halo_reduce(np.ones(8, F), 1),
        lambda cart: cart.plan.halo_exchange(np.ones(8, F), 1),
    ],
    "redistribute: of float32": [
        lambda cart: turned(cart, F, 1),
        lambda cart: turned(cart, np.int32, 1),
    ],
    "redistribute: differ in their layouts": [
        lambda cart: turned(cart, F, 1),
        lambda cart: turned(cart, F, 2),
    ],
    "neighbor_alltoall: of float32": [
        lambda cart: cart.plan.neighbor_alltoall(np.ones(8, F)),
        lambda cart: cart.plan.neighbor_alltoall(np.ones(8, np.int32)),
    ],
    "neighbor_allgather: neighbor_alltoall": [
        lambda cart: cart.plan.neighbor_allgather(np.ones(4, F)),
        lambda cart: cart.plan.neighbor_alltoall(np.ones(8, F)),
    ],
    "allreduce: differ in the algorithm": [
        lambda cart: cart.plan.allreduce(np.ones(8, F), algorithm="direct"),
        lambda cart: cart.plan.allreduce(np.ones(8, F), algorithm="ring"),
    ],
    "allreduce: its parameters": [
        lambda cart: cart.plan.allreduce(
            np.ones(8, F), algorithm="direct", params={"shots": 1}
        ),
        lambda cart: cart.plan.allreduce(
            np.ones(8, F), algorithm="direct", params={"shots": 2}
        ),
    ],
    "allreduce: the function of the reduction": [
        lambda cart: cart.plan.allreduce(np.ones(8, F), op=reduction(np.add, name="a")),
        lambda cart: cart.plan.allreduce(np.ones(8, F), op=reduction(np.add, name="b")),
    ],
}
"""Pairs of bound calls, by the first one's operation and by what is said of them."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", BOUND)
def test_a_bound_call_does_not_take_the_message_of_another(
    name: str, size: int
) -> None:
    """Rank 0 runs the one, the others run the other; then nobody has a wrong result."""

    def rank_main(comm: Any) -> list[str]:
        cart = ring(comm)
        calls = [make(cart) for make in BOUND[name]]
        for call in calls:
            call()
        assert calls[0].operation == name.partition(":")[0]
        found = []
        for call in (calls[cart.rank > 0], cart.barrier):
            try:
                call()
            except CommError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    said = [text for of in run(size, rank_main, timeout_s=300) for text in of]
    mismatches = [text for text in said if text.startswith("MismatchError")]
    assert mismatches, said
    words = name.partition(": ")[2]
    assert any(words in text for text in mismatches), said


@pytest.mark.parametrize("name", ["factors", "stores"])
def test_ranks_may_differ_in_what_no_other_rank_sees(name: str) -> None:
    def rank_main(comm: Any) -> float:
        x = np.ones(8, F)
        if name == "factors":
            comm.allreduce(x, op="premul_sum", factor=1.0 + comm.rank)
        else:
            store = ("plain", "stream", "auto")[comm.rank]
            comm.allreduce(x, algorithm="ring", params={"store": store})
        return float(x[0])

    assert run(3, rank_main, timeout_s=300) == [6.0 if name == "factors" else 3.0] * 3
