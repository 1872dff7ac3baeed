# SPDX-License-Identifier: Apache-2.0
"""Counts above 32 bits: nothing in a call's way may cut them.

Arrays of many GiB are folded: one stretch of memory stands at every place but the last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from commrt.comm import core_of
from commrt.local import run

N = 2**32 + 5
STRETCH = 32 << 20
_FIXED = 0x10
_NORESERVE = 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(address: int | None, nbytes: int, flags: int, file: int) -> int:
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    found: int = _LIBC.mmap(address, nbytes, rights, flags, file, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return found


@contextmanager
def reserved(nbytes: int) -> Iterator[int]:
    """Give the address of memory that costs nothing until it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    address = _map(None, nbytes, flags, -1)
    try:
        yield address
    finally:
        _LIBC.munmap(address, nbytes)


def array_at(address: int, number: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * number).from_address(address), np.uint8)


@contextmanager
def folded(number: int) -> Iterator[Any]:
    """Give an array of bytes: zeros in one stretch at all places, and in the last."""
    stretches = -(-number // STRETCH)
    with reserved(stretches * STRETCH) as address:
        files = [os.memfd_create("fold"), os.memfd_create("last")]
        for file in files:
            os.ftruncate(file, STRETCH)
        for i in range(stretches):
            file = files[i == stretches - 1]
            _map(address + i * STRETCH, STRETCH, mmap.MAP_SHARED | _FIXED, file)
        for file in files:
            os.close(file)
        yield array_at(address, number)


@pytest.mark.parametrize("coll", ["allreduce", "bcast", "allgather", "alltoall"])
def test_plans_hold_every_bit_of_a_count(coll: str) -> None:
    number = 2**33 + 6

    def rank_main(comm: Any) -> None:
        with reserved(2 * number) as address, reserved(number) as given:
            times = 2 if coll == "allgather" else 1
            out = array_at(address, times * number)
            getattr(comm.plan, coll)(array_at(given, number), out=out)
            (plan,) = core_of(comm).kept_plans()
            assert plan.out_elems == times * number
            assert plan.in_elems == (0 if coll == "bcast" and comm.rank else number)
            # Pieces of a block of at least a half of it, none much above 256 KiB.
            assert plan.fragments >= number // 2 // 262144
            assert plan.slot_nbytes <= 264000 * 2

    run(2, rank_main)


def test_a_world_of_one_returns_any_length() -> None:
    def rank_main(comm: Any) -> None:
        with reserved(N) as address:
            x = array_at(address, N)
            assert comm.allreduce(x) is x
            assert comm.allreduce(x) is x

    run(1, rank_main)


@pytest.mark.full
def test_more_than_4_gib_arrive_whole() -> None:
    def fill(x: Any, value: int) -> None:
        x[:STRETCH] = value
        x[N // STRETCH * STRETCH :] = value + 1

    def ends(x: Any) -> list[int]:
        return [*{*x[:STRETCH].tolist()}, *{*x[N // STRETCH * STRETCH :].tolist()}]

    def rank_main(comm: Any) -> list[list[int]]:
        seen = []
        with folded(N) as x, folded(N) as out:
            fill(x, 3)
            comm.allreduce(x, out=out)
            seen.append(ends(out))
            fill(out, 0)
            comm.bcast(x if comm.rank == 0 else out)
            seen.append(ends(x if comm.rank == 0 else out))
            fill(out, 0)
            if comm.rank == 0:
                comm.send(x, dest=1)
            else:
                request = comm.recv(out, source=0, nonblocking=True)
                assert request.wait() is out
                assert request.received_nbytes == N
                seen.append(ends(out))
        return seen

    first, second = run(2, rank_main, timeout_s=800)
    assert first == [[6, 8], [3, 4]]
    assert second == [[6, 8], [3, 4], [3, 4]]
