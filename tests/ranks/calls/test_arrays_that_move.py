# SPDX-License-Identifier: Apache-2.0
"""Bound calls whose array has got other memory: an error before any of it is read."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt import Block, Cyclic, Layout
from commrt.comm import Communicator
from commrt.errors import RefusedError, UsageError
from commrt.local import run

LENGTH = 12_000
"""Elements: more than the allocator shrinks where they are."""
PLACE = r"an array that this call is bound to has other memory .* plan the call again"


Bind = Callable[[Any, Any], Any]
"""Binds a call to an array, on a ring of ranks."""


def ring(comm: Communicator) -> Any:
    """Return the ranks in a ring."""
    cart = comm.cart((comm.size,), periodic=True)
    cart.timeout_s = 300
    return cart


def swap(x: Any) -> None:
    """Give an array other memory, which has as much room for the call."""
    x.resize(1 << 20, refcheck=False)


def shorten(x: Any) -> None:
    """Shorten an array, which may stay where it is."""
    x.resize(1, refcheck=False)


def collective(name: str, which: str) -> Bind:
    """Return what binds a collective whose ``which`` array is the one given."""

    def bind(comm: Any, array: Any) -> Any:
        other = np.zeros(LENGTH, np.float64)
        x, out = (array, other) if which == "x" else (other, array)
        return getattr(comm.plan, name)(x, out=out)

    return bind


def halo(name: str) -> Bind:
    def bind(comm: Any, array: Any) -> Any:
        return getattr(comm.plan, name)([np.zeros(8), array], 1)

    return bind


def redistribution(which: str) -> Bind:
    """Return what binds a redistribution of or into blocks."""

    def bind(comm: Any, array: Any) -> Any:
        whole = (LENGTH * comm.size,)
        blocks = Layout(whole, (comm.size,), (Block(0),))
        dealt = Layout(whole, (comm.size,), (Cyclic(0, 7),))
        other = np.zeros(dealt.local_shape(comm.rank))
        if which == "x":
            return comm.plan.redistribute(array, blocks, dealt, out=other)
        return comm.plan.redistribute(other, dealt, blocks, out=array)

    return bind


def neighbors(which: str) -> Bind:
    def bind(comm: Any, array: Any) -> Any:
        x, out = (array, np.zeros(LENGTH)) if which == "x" else (np.ones(LENGTH), array)
        return comm.plan.neighbor_alltoall(x, out=out)

    return bind


def compressed(comm: Any, array: Any) -> Any:
    return comm.plan.allreduce(array, compress="bfloat16")


COLLECTIVE: dict[str, Bind] = {
    "allreduce of x": collective("allreduce", "x"),
    "alltoall into out": collective("alltoall", "out"),
    "halo_exchange": halo("halo_exchange"),
    "halo_reduce": halo("halo_reduce"),
    "redistribute x": redistribution("x"),
    "redistribute into out": redistribution("out"),
    "neighbor_alltoall of x": neighbors("x"),
    "neighbor_alltoall into out": neighbors("out"),
    "compressed allreduce": compressed,
}
MESSAGES: dict[str, Bind] = {
    "send": lambda comm, x: comm.plan.send(x, 0),
    "recv": lambda comm, x: comm.plan.recv(x, 0),
    "sendrecv of x": lambda comm, x: comm.plan.sendrecv(x, 0, np.ones(LENGTH), 0),
    "sendrecv into out": lambda comm, x: comm.plan.sendrecv(np.ones(LENGTH), 0, x, 0),
    "multi_sendrecv": lambda comm, x: comm.plan.multi_sendrecv(
        sends=[(np.ones(LENGTH), 0)], recvs=[(x, 0)]
    ),
}


def check_refused(bound: Any) -> None:
    """Check that neither way of running a bound call takes it up."""
    for run_it in (bound, bound.start):
        with pytest.raises(UsageError, match=PLACE) as caught:
            run_it()
        assert str(caught.value).startswith(f"{bound.operation}: ")


@pytest.mark.parametrize("change", [swap, shorten])
@pytest.mark.parametrize("name", [*COLLECTIVE, *MESSAGES])
def test_a_bound_call_looks_where_its_arrays_are(
    name: str, change: Callable[[Any], None]
) -> None:
    def main(comm: Communicator) -> None:
        x = np.zeros(LENGTH)
        bound = {**COLLECTIVE, **MESSAGES}[name](ring(comm), x)
        if name in COLLECTIVE:
            bound()
        change(x)
        check_refused(bound)

    run(1, main, timeout_s=300)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVE)
def test_the_other_ranks_hear_of_it(name: str, size: int) -> None:
    """They are told why at once, and all make their next call."""

    def main(comm: Communicator) -> None:
        cart = ring(comm)
        x = np.zeros(LENGTH)
        bound = COLLECTIVE[name](cart, x)
        bound()
        if comm.rank == 0:
            swap(x)
            with pytest.raises(UsageError, match=PLACE):
                bound()
        else:
            with pytest.raises(RefusedError, match=f"rank 0 has refused .*{PLACE}"):
                bound()
        COLLECTIVE[name](cart, np.zeros(LENGTH))()
        assert cart.allreduce(np.ones(1))[0] == cart.size

    run(size, main, timeout_s=300)


def test_a_view_of_a_subclass_is_looked_at() -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    def main(comm: Communicator) -> None:
        x = np.ndarray.__new__(Mine, LENGTH)
        bound = comm.plan.allreduce(x)
        swap(x)
        check_refused(bound)

    run(1, main, timeout_s=300)


class Moves:
    """An array of a foreign library, which exports what it has at that moment."""

    def __init__(self) -> None:
        self.held = np.ones(LENGTH)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **how: Any) -> Any:
        return self.held.__dlpack__(**how)


def test_an_array_that_changes_its_mind() -> None:
    def main(comm: Communicator) -> None:
        x = Moves()
        bound = comm.plan.allreduce(x)
        for _ in range(3):
            bound()
        x.held = np.ones(LENGTH)
        check_refused(bound)

    run(1, main, timeout_s=300)


def test_a_buffer_stays_where_it_is() -> None:
    """Its exporter does not let it go, so nobody has to look."""

    def main(comm: Communicator) -> None:
        given = mmap.mmap(-1, 4096)
        bound = comm.plan.allreduce(given, op="max")
        with pytest.raises(BufferError):
            given.close()
        bound()

    run(1, main, timeout_s=300)


def test_arrays_of_no_elements() -> None:
    def main(comm: Communicator) -> None:
        x = np.zeros(0)
        bound = comm.plan.allreduce(x)
        bound()
        x.resize(4, refcheck=False)
        check_refused(bound)

    run(2, main, timeout_s=300)


def test_new_values_are_no_other_memory() -> None:
    def main(comm: Communicator) -> list[float]:
        x = np.zeros((4, 3))
        bound = comm.plan.allreduce(x)
        found = []
        for value in range(3):
            x[...] = value
            x.shape = (3, 4) if value % 2 else (4, 3)
            bound()
            found.append(float(x[0, 0]))
        return found

    assert run(2, main, timeout_s=300) == [[0, 2, 4]] * 2
