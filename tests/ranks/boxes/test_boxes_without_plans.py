# SPDX-License-Identifier: Apache-2.0
"""Halo exchange and redistribution of device arrays without plans: they block no host,
and ranks that differ are told."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_ranks import nccl_here
from staged_ranks import Rank, forget_ranks, on_threads

from commrt import Block, Cyclic, Layout
from commrt.comm import core_of
from commrt.errors import CommError, MismatchError, TimeoutError_

WAIT_S = 300.0


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def ring(rank: Rank) -> Any:
    """Return a communicator of ranks in a ring."""
    return rank.comm.cart((rank.comm.size,), (True,))


def field(rank: Rank, cells: int = 4, width: int = 1, dtype: str = "f4") -> Any:
    """Return an array of this rank's number, with a halo that nobody has filled."""
    values = np.full(cells + 2 * width, -1, dtype)
    values[width : width + cells] = rank.rank
    return rank.array(values)


def filled(rank: Rank, size: int, cells: int = 4, width: int = 1) -> list[float]:
    """What it is behind an exchange."""
    before, after = (rank.rank - 1) % size, (rank.rank + 1) % size
    return [before] * width + [rank.rank] * cells + [after] * width


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_without_a_plan_are_right_whatever_was_passed_before(
    size: int, flags: bool
) -> None:
    """New shapes beside shapes that were passed before, on some ranks and on all."""

    def main(rank: Rank) -> None:
        cart = ring(rank)
        for turn in range(4):
            for width in (1, 2):
                # Where the first rank's arrays are laid out otherwise only it is new.
                x = field(rank, width=width)
                request = cart.halo_exchange(x, width, nonblocking=True)
                assert request.wait() is x
                assert x.get().tolist() == filled(rank, size, width=width), turn
            x = field(rank)
            assert cart.halo_exchange(x, 1) is x
            assert x.get().tolist() == filled(rank, size)
            x = field(rank, dtype="f8")
            cart.halo_reduce(x, 1, op="max")
        cart.free()

    on_threads(size, main, memory_flags=flags)


def test_a_rank_whose_layout_alone_is_new_plans_alone() -> None:
    """Its values lie otherwise: of no interest to others, who use their plans."""

    def main(rank: Rank) -> None:
        cart = ring(rank)
        x = field(rank)
        cart.halo_exchange(x, 1)
        planned = len(core_of(cart).box_plans.kept)
        both = rank.array(np.full((2, 6), -1, "f4"))
        for _ in range(2):
            y = x
            if rank.rank == 0:
                y = Strided(both, 6, 2)
            cart.halo_exchange(y, 1)
            rank.stream.synchronize()
        assert len(core_of(cart).box_plans.kept) == planned + (rank.rank == 0)
        cart.free()

    on_threads(2, main)


class Strided:
    """Every so many elements of an array."""

    def __init__(self, array: Any, count: int, step: int) -> None:
        self.array, self.count, self.step = array, count, step

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        item = self.array.dtype.itemsize
        return {
            **self.array.__cuda_array_interface__,
            "shape": (self.count,),
            "strides": (self.step * item,),
        }


def exchanged(rank: Rank, cart: Any) -> Callable[[], None]:
    x = field(rank)

    def call() -> None:
        cart.halo_exchange(x, 1)

    return call


def summed(rank: Rank, cart: Any) -> Callable[[], None]:
    x = field(rank)

    def call() -> None:
        cart.halo_reduce(x, 1)

    return call


def moved(rank: Rank, cart: Any) -> Callable[[], None]:
    x, out = rank.array(np.ones(4)), rank.array(np.zeros(4))
    layout = Layout((8,), (2,), (Block(0),))

    def call() -> None:
        cart.redistribute(x, layout, layout, out=out)

    return call


@pytest.mark.parametrize("make", [exchanged, summed, moved])
def test_a_call_returns_before_the_others_have_made_theirs(make: Any) -> None:
    returned = threading.Event()

    def main(rank: Rank) -> None:
        cart = ring(rank)
        call = make(rank, cart)
        call()  # the first one is compared
        rank.stream.synchronize()
        if rank.rank == 1:
            assert returned.wait(WAIT_S)
        call()
        if rank.rank == 0:
            returned.set()
        rank.stream.synchronize()
        cart.free()

    on_threads(2, main)


# --- ranks that differ ---


def width_of(rank: Rank, cart: Any) -> Any:
    return cart.halo_exchange(field(rank, 4, 2), 1 + rank.rank, nonblocking=True)


def extent_of(rank: Rank, cart: Any) -> Any:
    x = rank.array(np.zeros((6, 5 + rank.rank), "f4"))
    return cart.halo_exchange(x, 1, axes=(0,), nonblocking=True)


def type_of(rank: Rank, cart: Any) -> Any:
    x = field(rank, dtype=("f4", "i4")[rank.rank])
    return cart.halo_exchange(x, 1, nonblocking=True)


def op_of(rank: Rank, cart: Any) -> Any:
    op = ("sum", "max")[rank.rank]
    return cart.halo_reduce(field(rank), 1, op=op, nonblocking=True)


def target_of(rank: Rank, cart: Any) -> Any:
    source = Layout((8,), (2,), (Block(0),))
    target = Layout((8,), (2,), (Cyclic(0, 2),)) if rank.rank else source
    x, out = rank.array(np.ones(4)), rank.array(np.zeros(4))
    return cart.redistribute(x, source, target, out=out, nonblocking=True)


DIFFERENT = {
    "width": width_of,
    "cells": extent_of,
    "dtypes": type_of,
    "op": op_of,
    "target": target_of,
}


def alike(rank: Rank, cart: Any) -> None:
    """Calls of each operation that the ranks agree on."""
    for make in (exchanged, summed, moved):
        make(rank, cart)()
    rank.stream.synchronize()


def told(rank: Rank, make: Callable[[Rank, Any], Any]) -> str:
    """What a call says that the other rank makes with other arguments."""
    cart = ring(rank)
    alike(rank, cart)
    request = make(rank, cart)
    with suppress(CommError):  # it may have failed by now
        request.wait()
    rank.stream.synchronize()  # it is let go
    with pytest.raises(MismatchError) as failed:
        request.synchronize()
    with pytest.raises(CommError):
        cart.barrier()
    assert rank.comm.allreduce(np.ones(1))[0] == 2  # others go on
    cart.free()
    return str(failed.value)


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_get_the_same_error(what: str, flags: bool) -> None:
    said = on_threads(2, lambda rank: told(rank, DIFFERENT[what]), memory_flags=flags)
    for each in said:
        assert f"disagree on {what}" in each
        assert "nothing was sent" in each


def test_blocks_that_do_not_fit_at_one_place_are_told() -> None:
    """In one dimension of the grid each rank's block may be of its own length."""

    def main(rank: Rank) -> str:
        cart = rank.comm.cart((2, 2), (True, True))
        x = rank.array(np.zeros((5, 6), "f4"))
        cart.halo_exchange(x, 1)
        rank.stream.synchronize()
        extent = 6 + (rank.rank == 3)
        y = rank.array(np.zeros((5, extent), "f4"))
        request = cart.halo_exchange(y, 1, nonblocking=True)
        with suppress(CommError):
            request.wait()
        rank.stream.synchronize()
        with pytest.raises(MismatchError) as failed:
            request.synchronize()
        return str(failed.value)

    for each in on_threads(4, main):
        assert "disagree on cells at place 1 of dimension 1;" in each


def test_other_operations_are_told() -> None:
    def main(rank: Rank) -> None:
        cart = ring(rank)
        alike(rank, cart)
        x = field(rank)
        if rank.rank:
            request = cart.halo_exchange(x, 1, nonblocking=True)
        else:
            request = cart.halo_reduce(x, 1, nonblocking=True)
        with suppress(CommError):
            request.wait()
        rank.stream.synchronize()
        with pytest.raises(MismatchError, match="disagree on the operation"):
            request.synchronize()
        cart.free()

    on_threads(2, main)


@pytest.mark.parametrize("bug", ["unagreed", "agreement_unread"])
def test_a_planted_bug_lets_ranks_differ_unseen(bug: str) -> None:
    """So the tests above look at what they are to look at.

    The messages may tell the calls apart all the same, in other words.
    """

    def main(rank: Rank) -> str:
        cart = ring(rank)
        alike(rank, cart)
        core_of(cart).devices.stager(rank.device).plant(bug)
        try:
            request = op_of(rank, cart)
            request.wait()
            request.synchronize()
        except CommError as error:
            return str(error)
        return ""

    assert not any(
        "disagree on" in said for said in on_threads(2, main, survives=False)
    )


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    def main(rank: Rank) -> None:
        cart = ring(rank)
        alike(rank, cart)
        if rank.rank:
            return
        x = field(rank)
        request = cart.halo_exchange(x, 1, nonblocking=True, timeout_s=0.1)
        request.wait()
        rank.stream.synchronize()  # let go, when the time is over
        with pytest.raises(TimeoutError_, match=r"not complete within 0.1 s"):
            request.synchronize()
        with pytest.raises(CommError):
            cart.halo_exchange(x, 1)

    on_threads(2, main)


def test_check_mode_names_what_each_rank_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        cart = ring(rank)
        alike(rank, cart)
        with pytest.raises(MismatchError, match=r"width.*\n.*rank 0.*\n.*rank 1"):
            width_of(rank, cart)
        alike(rank, cart)  # nothing was lost
        cart.free()

    on_threads(2, main)


def test_by_nccl_calls_wait_for_nobody_either() -> None:
    returned = threading.Event()

    def main(rank: Rank) -> None:
        cart = ring(rank)
        call = exchanged(rank, cart)
        call()
        rank.stream.synchronize()
        if rank.rank == 1:
            assert returned.wait(WAIT_S)
        call()
        if rank.rank == 0:
            returned.set()
        rank.stream.synchronize()
        [boxes] = core_of(cart).box_plans.kept
        assert boxes.label.startswith("nccl/")
        cart.free()

    with nccl_here():
        on_threads(2, main)


_DROPPED = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from staged_ranks import on_threads

def main(rank):
    x = rank.array(np.zeros(6, "f4"))
    cart = rank.comm.cart((2,), (True,))
    step = cart.plan.halo_exchange(x, 1)
    for _ in range(50):
        step()
    rank.stream.synchronize()

on_threads(2, main)
print("end")
"""


def test_who_makes_progress_needs_no_python_to_end_a_call(tmp_path: Path) -> None:
    """Nobody but the engine has the calls; at the end of the process Python is gone.

    What a call kept of its plan went with Python's lock, in the thread that ended it.
    """
    for _ in range(3):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                _DROPPED,
                str(Path(__file__).parents[2] / "support"),
            ],
            cwd=tmp_path,  # not where sources lie; PYTHONPATH may name a sanitizer's
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
