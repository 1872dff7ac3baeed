# SPDX-License-Identifier: Apache-2.0
"""Communicators that are made, used and freed, and what is left then."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import commrt
from commrt.comm import Communicator

__all__ = [
    "FREED",
    "NUM_ROUNDS",
    "NUM_WINDOWS",
    "ROUNDS",
    "count",
    "garbage_of",
    "heap_nbytes",
    "left_by_each_window",
    "left_in_a_process",
]

NUM_WINDOWS, NUM_ROUNDS = 5, 12
"""What grows once, as a table does, does not grow in each window."""

Round = Callable[[Communicator], Any]


class _MallInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena a b c hblkhd d e uordblks f g".split()  # noqa: SIM905
    ]


def heap_nbytes() -> int:
    """Return the bytes that C and C++ have allocated; 0 where glibc does not say."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _MallInfo
    found = ask()
    return int(found.uordblks + found.hblkhd)


def _mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def _use(made: Communicator) -> None:
    """Use a communicator in several ways, and free it."""
    x = np.ones(300, np.float32)
    made.allreduce(x)
    plan = made.plan.allreduce(x, out=np.ones(300, np.float32))
    plan()
    requests = [made.bcast(x, nonblocking=True), made.barrier(nonblocking=True)]
    for request in requests:
        request.wait()
    peer = (made.rank + 1) % made.size
    made.sendrecv(x, dest=peer, out=np.ones(300, np.float32), source=peer)
    made.free()


def _empty(comm: Communicator) -> None:
    made = comm.dup()
    x = made.empty(5000, np.float32)
    x[:] = 1
    made.allreduce(x)
    del x
    made.free()


def _fused(comm: Communicator) -> None:
    made = comm.dup()
    with made.fused():
        requests = [made.allreduce(np.ones(9), nonblocking=True) for _ in range(3)]
        for request in requests:
            request.wait()
    made.free()


def _sparse(comm: Communicator) -> None:
    made = comm.dup()
    made.sparse_allreduce(commrt.SparseVector(np.arange(5), np.ones(5), (100,)))
    made.free()


def _compressed(comm: Communicator) -> None:
    made = comm.dup()
    made.allreduce(np.ones(3000, np.float32), compress="int8")
    made.free()


def _halo(comm: Communicator) -> None:
    made = comm.cart((0,), periodic=True)
    made.halo_exchange(np.ones(12), width=1)
    made.plan.halo_exchange(np.ones(12), width=1)()
    made.free()


def _dropped(comm: Communicator) -> None:
    made = comm.dup()
    made.allreduce(np.ones(3))


def _parent_and_child(comm: Communicator) -> None:
    parent = comm.dup()
    child = parent.split(color=comm.rank)
    child.free()
    parent.free()


ROUNDS: dict[str, Round] = {
    "dup": lambda comm: comm.dup().free(),
    "split": lambda comm: comm.split(color=0).free(),
    "create_group": lambda comm: comm.create_group([0, 1]).free(),
    "cart": lambda comm: comm.cart((0,), periodic=True).free(),
    "graph": lambda comm: comm.graph([1 - comm.rank], [1 - comm.rank]).free(),
    "a child of a child": _parent_and_child,
    "calls and plans": lambda comm: _use(comm.dup()),
    "symmetric memory": _empty,
    "fused": _fused,
    "sparse": _sparse,
    "compressed": _compressed,
    "halo": _halo,
    "dropped": _dropped,
}


FREED = [kind for kind in ROUNDS if kind != "dropped"]
"""Kinds of rounds whose communicators are freed, and need no garbage collector."""


def garbage_of(kinds: list[str]) -> dict[str, int]:
    """Return how many objects only the collector finds after a round of each kind."""
    comm = commrt.init()
    found = {}
    for kind in kinds:
        ROUNDS[kind](comm)  # makes what is made once
        gc.collect()
        gc.disable()
        try:
            ROUNDS[kind](comm)
            found[kind] = gc.collect()
        finally:
            gc.enable()
    return found


def _let_go() -> None:
    """Collect circles, and empty CPython's cache of attributes of types.

    The cache's 4,096 entries keep names, for instance of a communicator's paths. It
    fills over thousands of rounds, which looks like a leak and is none.
    """
    newer = getattr(sys, "_clear_internal_caches", None)  # Python 3.13 on
    (newer or sys._clear_type_cache)()
    gc.collect()


def count(**more: int) -> dict[str, int]:
    """Return what there is now."""
    _let_go()
    return {
        "objects of Python": len(gc.get_objects()),
        "mappings": _mappings(),
        **more,
    }


def left_by_each_window(counts: list[dict[str, int]]) -> dict[str, int]:
    """Return what grew in every window by more than counting itself keeps."""
    grown = [
        {key: after[key] - before[key] for key in after}
        for before, after in pairwise(counts)
    ]
    least = {key: min(each[key] for each in grown) for key in grown[0]}
    # Tables and caches fill more and more slowly. Three blocks a round are a leak.
    allowed = dict.fromkeys(least, NUM_ROUNDS)
    allowed |= {"blocks": 2 * NUM_ROUNDS, "nbytes_of_c": 100 * NUM_ROUNDS}
    return {key: n for key, n in least.items() if n >= allowed[key]}


def left_in_a_process(kinds: list[str]) -> dict[str, dict[str, int]]:
    """Return what the rounds of each kind leave; on every rank."""
    comm = commrt.init()
    found = {}
    for kind in kinds:
        counts = []
        for _ in range(NUM_WINDOWS + 1):
            for _ in range(NUM_ROUNDS):
                ROUNDS[kind](comm)
            _let_go()
            blocks = sys.getallocatedblocks()
            counts.append(count(blocks=blocks, nbytes_of_c=heap_nbytes()))
        found[kind] = left_by_each_window(counts)
    return found


if __name__ == "__main__":
    left = left_in_a_process(sys.argv[1:] or [*ROUNDS])
    if commrt.init().rank == 0:
        sys.stdout.write(json.dumps(left))
