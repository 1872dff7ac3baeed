# SPDX-License-Identifier: Apache-2.0
"""A call of a kind that came before ends as the first one of its kind does.

The engine runs it without Python (``boxes/fronts.py``), and has to see all that Python
would see.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt import Block, Cyclic, Layout
from commrt.boxes import fronts
from commrt.comm import core_of
from commrt.local import run

Call = Callable[[Any], Any]
"""Makes a call on a communicator over a ring; returns what it gave."""


class Own(np.ndarray):
    """An array that only Python reads."""


def ramp(*shape: int, dtype: str = "float32", rank: int = 0) -> Any:
    """Return an array of different numbers, which small types have, too."""
    return (np.arange(np.prod(shape)).reshape(shape) % 50 + rank).astype(dtype)


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def halo(make: Callable[[int], Any], width: Any = 1, **options: Any) -> Call:
    """Exchange halos of the array that ``make`` returns for a rank."""

    def call(cart: Any) -> Any:
        fields = make(cart.rank)
        its_width = width(cart.rank) if callable(width) else width
        got = cart.halo_exchange(fields, its_width, axes=(0,), **options)
        if options.get("nonblocking"):
            got = got.wait()
        assert got is fields
        return got

    return call


def halo_sum(make: Callable[[int], Any], op: Callable[[int], str]) -> Call:
    """Sum halos up."""

    def call(cart: Any) -> Any:
        return cart.halo_reduce(make(cart.rank), 1, axes=(0,), op=op(cart.rank))

    return call


HALOS: dict[str, Call] = {
    "another length": halo(lambda rank: ramp(9, 5, rank=rank)),
    "another type": halo(lambda rank: ramp(9, 5, dtype="int16", rank=rank)),
    "columns first": halo(lambda rank: np.asfortranarray(ramp(7, 4, rank=rank))),
    "from its end": halo(lambda rank: ramp(7, 4, rank=rank)[::-1, ::-1]),
    "every second": halo(lambda rank: ramp(14, 8, rank=rank)[::2, ::2]),
    "three dimensions": halo(lambda rank: ramp(5, 2, 3, rank=rank)),
    "no columns": halo(lambda rank: ramp(5, 0, rank=rank)),
    "in the background": halo(lambda rank: ramp(8, 3, rank=rank), nonblocking=True),
    "two arrays": halo(lambda rank: [ramp(6, 2, rank=rank), ramp(5, 3, rank=rank)]),
    "a tuple": halo(lambda rank: (ramp(6, 2, rank=rank), ramp(6, 2, rank=rank))),
    "a subclass": halo(lambda rank: ramp(6, 4, rank=rank).view(Own)),
    "a subclass on one": halo(
        lambda rank: ramp(6, 4).view(Own) if rank else ramp(6, 4)
    ),
    "the other byte order": halo(lambda _: ramp(6, 4).astype(">f4")),
    "not aligned": halo(
        lambda _: np.zeros(6 * 4 * 4 + 1, np.uint8)[1:].view("f4").reshape(6, 4)
    ),
    "read-only on one": halo(
        lambda rank: ramp(6, 4) if rank else read_only(ramp(6, 4))
    ),
    "elements that share memory": halo(
        lambda _: np.lib.stride_tricks.as_strided(ramp(40), (6, 4), (8, 4))
    ),
    "arrays that overlap": halo(lambda _: [one := ramp(6, 4), one[:, ::-1]]),
    "one array twice": halo(lambda _: [ramp(6, 4)] * 2),
    "too short": halo(lambda _: ramp(2, 4)),
    "too short for its halo": halo(lambda _: ramp(1, 4)),
    "too short on one": halo(lambda rank: ramp(2 if rank else 7, 4)),
    "another dimension is longer on one": halo(lambda rank: ramp(6, 4 + (rank == 0))),
    "longer on one": halo(lambda rank: ramp(6 + (rank == 0), 4, rank=rank)),
    "another width on one": halo(lambda _: ramp(8, 4), lambda rank: 1 + (rank == 0)),
    "a width that is no integer": halo(lambda _: ramp(6, 4), 1.0),
    "a width that is True": halo(lambda _: ramp(6, 4), True),
    "no array": halo(lambda _: "field"),
    "no fields": halo(lambda _: []),
    "sums": halo_sum(lambda rank: ramp(7, 4, rank=rank), lambda _: "sum"),
    "sums in other words": halo_sum(
        lambda rank: ramp(7, 4, rank=rank), lambda _: "SUM"
    ),
    "other sums on one": halo_sum(
        lambda _: ramp(7, 4), lambda rank: "max" if rank else "sum"
    ),
    "other types on one": halo_sum(
        lambda rank: ramp(7, 4, dtype="int32" if rank else "float32"), lambda _: "sum"
    ),
    "a sum of truths": halo_sum(lambda _: ramp(7, 4, dtype="bool"), lambda _: "prod"),
}


def moved(
    rows: Callable[[int], int] = lambda _: 12,
    *,
    change: Callable[[int, dict[str, Any]], Any] = lambda *_: None,
) -> Call:
    """Redistribute an array of so many rows from rows to dealt columns."""

    def call(cart: Any) -> Any:
        rank, size = cart.rank, cart.size
        shape = rows(rank), 4
        source = Layout(shape, (size,), (Block(0), None))
        target = Layout(shape, (size,), (None, Cyclic(0)))
        more = {
            "x": ramp(*source.local_shape(rank), rank=10 * rank),
            "source": source,
            "target": target,
        }
        change(rank, more)
        got = cart.redistribute(**more)
        return got.wait() if more.get("nonblocking") else got

    return call


def out_of(rank: int, more: dict[str, Any], dtype: str = "float32") -> Any:
    return np.zeros(more["target"].local_shape(rank), dtype)


def cut(rows: int, size: int) -> dict[str, Any]:
    """Return a call by which each rank keeps a part of what all have."""
    whole, part = (Layout((rows,), (size,), (kind,)) for kind in (None, Block(0)))
    x = np.broadcast_to(np.float32(1), (rows,))
    return {"x": x, "source": whole, "target": part}


MOVED: dict[str, Call] = {
    "another length": moved(lambda _: 7),
    "no rows": moved(lambda _: 0),
    "into an array": moved(change=lambda r, m: m.update(out=out_of(r, m))),
    "in the background": moved(change=lambda _, m: m.update(nonblocking=True)),
    "of another type": moved(change=lambda _, m: m.update(x=m["x"].astype("int8"))),
    "of a subclass": moved(change=lambda _, m: m.update(x=m["x"].view(Own))),
    "of columns": moved(change=lambda _, m: m.update(x=np.asfortranarray(m["x"]))),
    "of a read-only array": moved(change=lambda _, m: read_only(m["x"])),
    "of a wrong shape": moved(change=lambda _, m: m.update(x=m["x"][:, :3])),
    "of a wrong shape on one": moved(
        change=lambda r, m: m.update(x=m["x"][: 1 if r else None])
    ),
    "of rows that differ": moved(lambda rank: 12 + (rank == 0)),
    "into another type": moved(
        change=lambda r, m: m.update(out=out_of(r, m, "float64"))
    ),
    "into a read-only array": moved(
        change=lambda r, m: m.update(out=read_only(out_of(r, m)))
    ),
    "onto itself": moved(lambda _: 4, change=lambda r, m: m.update(out=m["x"])),
    "to another shape": moved(
        change=lambda _, m: m.update(
            target=Layout((13, 4), m["target"].grid, m["target"].dims)
        )
    ),
    "to a layout of other ranks": moved(
        change=lambda _, m: m.update(target=Layout((12, 4), (7,), (Block(0), None)))
    ),
    "without memory for it on one": moved(
        change=lambda r, m: m.update(cut(10 if r else 2**50, m["target"].size))
    ),
    "to no layout": moved(change=lambda _, m: m.update(target="columns")),
}


def beside(name: str, x: Callable[[int], Any], **more: Callable[[int], Any]) -> Call:
    """Make a call among the neighbours on a ring."""

    def call(cart: Any) -> Any:
        its = {key: make(cart.rank) for key, make in more.items()}
        got = getattr(cart, name)(x(cart.rank), **its)
        return got.wait() if its.get("nonblocking") else got

    return call


BESIDE: dict[str, Call] = {
    "gathered": beside("neighbor_allgather", lambda r: ramp(5, rank=r)),
    "gathered, shaped": beside("neighbor_allgather", lambda r: ramp(2, 3, rank=r)),
    "gathered, nothing": beside("neighbor_allgather", lambda _: ramp(0)),
    "gathered into an array": beside(
        "neighbor_allgather", lambda r: ramp(4, rank=r), out=lambda _: ramp(2, 4)
    ),
    "gathered in the background": beside(
        "neighbor_allgather", lambda r: ramp(4, rank=r), nonblocking=lambda _: True
    ),
    "gathered, strided": beside("neighbor_allgather", lambda _: ramp(8)[::2]),
    "gathered, of a subclass": beside(
        "neighbor_allgather", lambda _: ramp(8).view(Own)
    ),
    "gathered, read-only": beside("neighbor_allgather", lambda _: read_only(ramp(8))),
    "gathered, the other byte order": beside(
        "neighbor_allgather", lambda _: ramp(8).astype(">f4")
    ),
    "gathered into too little": beside(
        "neighbor_allgather", lambda _: ramp(4), out=lambda r: ramp(8 - (r == 0))
    ),
    "gathered into another type": beside(
        "neighbor_allgather", lambda _: ramp(4), out=lambda _: ramp(8, dtype="f8")
    ),
    "gathered into a read-only array": beside(
        "neighbor_allgather", lambda _: ramp(4), out=lambda _: read_only(ramp(8))
    ),
    "gathered into a strided array": beside(
        "neighbor_allgather", lambda _: ramp(4), out=lambda _: ramp(16)[::2]
    ),
    "all to all": beside("neighbor_alltoall", lambda r: ramp(6, rank=r)),
    "all to all, shaped": beside("neighbor_alltoall", lambda r: ramp(2, 3, rank=r)),
    "all to all, uneven": beside("neighbor_alltoall", lambda _: ramp(7)),
    "of counts": beside(
        "neighbor_alltoallv",
        lambda r: ramp(5, rank=r),
        send_counts=lambda _: [2, 3],
        recv_counts=lambda _: (3, 2),
    ),
    "of counts that do not add up": beside(
        "neighbor_alltoallv",
        lambda _: ramp(6),
        send_counts=lambda _: [2, 3],
        recv_counts=lambda _: (3, 2),
    ),
    "of counts below 0": beside(
        "neighbor_alltoallv",
        lambda _: ramp(5),
        send_counts=lambda r: [-1, 6] if r else [2, 3],
        recv_counts=lambda _: (3, 2),
    ),
    "of counts that are no integers": beside(
        "neighbor_alltoallv",
        lambda _: ramp(5),
        send_counts=lambda _: [2.0, 3],
        recv_counts=lambda _: (3, 2),
    ),
    "of one count too many": beside(
        "neighbor_allgatherv", lambda _: ramp(5), recv_counts=lambda _: (5, 5, 5)
    ),
    "without memory for it on one": beside(
        "neighbor_allgatherv",
        lambda _: ramp(5),
        recv_counts=lambda r: (5, 5) if r else (2**50, 5),
    ),
    "gathered by counts": beside(
        "neighbor_allgatherv", lambda _: ramp(5), recv_counts=lambda _: (5, 5)
    ),
}

CALLS = {
    f"{kind}: {name}": call
    for kind, calls in (("halo", HALOS), ("moved", MOVED), ("beside", BESIDE))
    for name, call in calls.items()
}


def told(cart: Any, call: Call) -> Any:
    """Return what a call gives, or its error in words."""
    try:
        got = call(cart)
    except Exception as error:  # noqa: BLE001 - to be compared, whatever it is
        # The ranks meet in a sum, which has a name of its own in a first call.
        text = re.sub(r"\w+ #\d+ on", "call on", str(error))
        return type(error).__name__, text.replace(cart.name, "cart")
    arrays = got if isinstance(got, list | tuple) else [got]
    return [(type(one), one.dtype, one.shape, one.tolist()) for one in arrays]


def make_known(cart: Any) -> None:
    """Let all kinds of calls come once, with arrays of other lengths."""
    rank, size = cart.rank, cart.size
    for dtype in ("float32", "float64", "int16", "int32", "bool"):
        for shape in ((10, 6), (10, 6, 2)):
            cart.halo_exchange(ramp(*shape, dtype=dtype, rank=rank), 1, axes=(0,))
    for width in (1, 2):
        cart.halo_exchange(ramp(10, 6), width, axes=(0,))
    cart.halo_exchange([ramp(10, 6), ramp(11, 5)], 1, axes=(0,))
    for op in ("sum", "max", "SUM"):
        cart.halo_reduce(ramp(10, 6), 1, axes=(0,), op=op)
        cart.halo_reduce(ramp(10, 6, dtype="int32"), 1, axes=(0,), op=op)
    for rows in (20, 21):
        source = Layout((rows, 4), (size,), (Block(0), None))
        target = Layout((rows, 4), (size,), (None, Cyclic(0)))
        cart.redistribute(ramp(*source.local_shape(rank)), source, target)
    cart.redistribute(**cut(20, size))
    for x in (ramp(20), ramp(2, 10)):
        cart.neighbor_allgather(x)
        cart.neighbor_alltoall(x)
    cart.neighbor_alltoallv(ramp(20), send_counts=(8, 12), recv_counts=(12, 8))
    cart.neighbor_allgatherv(ramp(20), recv_counts=(20, 20))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_a_known_kind_ends_as_a_new_one(name: str, size: int) -> None:
    def rank_main(comm: Any) -> None:
        new, known = (comm.cart((size,), periodic=True) for _ in range(2))
        make_known(known)
        first = told(new, CALLS[name])
        assert told(known, CALLS[name]) == first
        assert told(known, CALLS[name]) == first
        # And both are in step.
        assert told(known, HALOS["another length"]) == told(
            new, HALOS["another length"]
        )

    run(size, rank_main)


class Counted:
    """Counts the calls that run without Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = 0
        find = fronts.Fronts.find

        def counting(its: Any, *given: Any) -> Any:
            found = find(its, *given)
            self.found += found is not None
            return found

        monkeypatch.setattr(fronts.Fronts, "find", counting)


@pytest.mark.parametrize(
    "name", ["halo: another length", "moved: another length", "beside: gathered"]
)
def test_known_kinds_run_without_python(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless something asks for more than the engine does by itself."""
    counted = Counted(monkeypatch)

    def rank_main(comm: Any) -> None:
        cart = comm.cart((1,), periodic=True)
        call = CALLS[name]
        call(cart)
        assert counted.found == 0
        call(cart)
        assert counted.found == 1
        core = core_of(cart)
        core.nan_check = True
        call(cart)
        core.nan_check = False
        assert counted.found == 2  # it was found, and gave way
        core.families.forget()  # as where their memory is wanted for others
        call(cart)
        call(cart)
        assert counted.found == 4
        cart.free()
        with pytest.raises(Exception, match="freed"):
            call(cart)

    run(1, rank_main)
