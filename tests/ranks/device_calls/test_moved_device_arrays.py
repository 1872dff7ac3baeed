# SPDX-License-Identifier: Apache-2.0
"""Bound calls on devices whose array has got other memory: an error before it is read.

The array is a foreign library's: it has an array interface, and what that says changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt import Block, Cyclic, Layout
from commrt.devices import DeviceArray
from commrt.errors import RefusedError, UsageError

LENGTH = 600
PLACE = r"an array that this call is bound to has other memory .* plan the call again"


class Moves:
    """An array of a foreign library; ``held`` is what it has at that moment."""

    def __init__(self, held: DeviceArray) -> None:
        self.held = held

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.held.__cuda_array_interface__


def redistributed(rank: Rank, cart: Any, x: Any) -> Any:
    whole = (LENGTH * cart.size,)
    blocks = Layout(whole, (cart.size,), (Block(0),))
    dealt = Layout(whole, (cart.size,), (Cyclic(0, 7),))
    out = rank.array(np.zeros(dealt.local_shape(cart.rank), "f4"))
    return cart.plan.redistribute(x, blocks, dealt, out=out)


def zeros(rank: Rank) -> DeviceArray:
    return rank.array(np.zeros(LENGTH, "f4"))


COLLECTIVE: dict[str, Callable[[Rank, Any, Any], Any]] = {
    "allreduce": lambda rank, cart, x: cart.plan.allreduce(x),
    "compressed": lambda rank, cart, x: cart.plan.allreduce(x, compress="bfloat16"),
    "halo_exchange": lambda rank, cart, x: cart.plan.halo_exchange(x, 1),
    "halo_reduce": lambda rank, cart, x: cart.plan.halo_reduce(x, 1),
    "redistribute": redistributed,
    "neighbor_alltoall": lambda rank, cart, x: cart.plan.neighbor_alltoall(
        x, out=zeros(rank)
    ),
}
MESSAGES: dict[str, Callable[[Rank, Any, Any], Any]] = {
    "send": lambda rank, cart, x: cart.plan.send(x, 0),
    "recv": lambda rank, cart, x: cart.plan.recv(x, 0),
    "sendrecv": lambda rank, cart, x: cart.plan.sendrecv(x, 0, zeros(rank), 0),
    "multi_sendrecv": lambda rank, cart, x: cart.plan.multi_sendrecv(
        sends=[(x, 0)], recvs=[(zeros(rank), 0)]
    ),
}


def ring(rank: Rank) -> Any:
    """Return the ranks in a ring."""
    cart = rank.comm.cart((rank.comm.size,), periodic=True)
    cart.timeout_s = 300
    return cart


@pytest.mark.parametrize("name", [*COLLECTIVE, *MESSAGES])
def test_a_bound_call_looks_where_its_arrays_are(name: str) -> None:
    def main(rank: Rank) -> None:
        x = Moves(zeros(rank))
        bound = {**COLLECTIVE, **MESSAGES}[name](rank, ring(rank), x)
        if name in COLLECTIVE:
            bound()
            rank.stream.synchronize()
        first, x.held = x.held, zeros(rank)
        for run in (bound, bound.start):
            with pytest.raises(UsageError, match=PLACE):
                run()
        assert first.address != x.held.address

    on_threads(1, main, survives=False)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", sorted({*COLLECTIVE} - {"compressed"}))
def test_the_other_ranks_hear_of_it(name: str, size: int) -> None:
    """All ranks are in step: that rank makes a stand-in of the call."""

    def main(rank: Rank) -> list[float]:
        cart = ring(rank)
        x = Moves(zeros(rank))
        bound = COLLECTIVE[name](rank, cart, x)
        bound()
        rank.stream.synchronize()
        found = []
        for _ in range(2):
            if rank.rank == 0:
                first, x.held = x.held, zeros(rank)
                with pytest.raises(UsageError, match=PLACE):
                    bound()
                x.held = first
                cart.allreduce(np.ones(1))
            else:
                request = bound.start()
                with pytest.raises(RefusedError, match="rank 0 has refused its call"):
                    request.synchronize()
                cart.allreduce(np.ones(1))
            bound.start().synchronize()
            found.append(float(cart.allreduce(np.ones(1))[0]))
        rank.stream.synchronize()
        return found

    assert on_threads(size, main) == [[float(size)] * 2] * size


def test_a_freed_array_is_not_used() -> None:
    def main(rank: Rank) -> None:
        x = zeros(rank)
        bound = rank.comm.plan.allreduce(x)
        bound()
        rank.stream.synchronize()
        x.free()
        rank.arrays.remove(x)
        with pytest.raises(UsageError, match="was freed"):
            bound()

    on_threads(1, main, survives=False)
