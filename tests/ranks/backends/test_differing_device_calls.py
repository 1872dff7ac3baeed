# SPDX-License-Identifier: Apache-2.0
"""Calls on devices by NCCL, or over memory of peers, that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from ipc_ranks import ipc_here, on_ipc_threads
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, forget_ranks

from commrt.comm import core_of
from commrt.errors import MismatchError

EVERY, AT, TURNS = 8, 21, 60
KINDS = ["operation", "reduction", "type", "root", "length", "order", "algorithm"]

ON: dict[str, Callable[..., Any]] = {"nccl": on_nccl_threads, "ipc": on_ipc_threads}
HERE: dict[str, Callable[..., AbstractContextManager[Any]]] = {
    "nccl": nccl_here,
    "ipc": ipc_here,
}


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def call(comm: Any, kind: str, turn: int, arrays: dict[str, Any], backend: str) -> Any:
    """Start the call of a turn; the last rank makes one otherwise."""
    is_last = comm.rank == comm.size - 1
    wrong = turn == AT and is_last
    how: dict[str, Any] = {"nonblocking": True, "backend": backend}
    x = arrays["int32"]
    if kind == "operation" and wrong:
        return comm.bcast(x, root=0, **how)
    if kind == "reduction":
        return comm.allreduce(x, op="max" if wrong else "sum", **how)
    if kind == "type" and wrong:
        return comm.allreduce(arrays["float32"], **how)
    if kind == "root":
        return comm.bcast(x, root=1 if wrong else 0, **how)
    if kind == "length" and wrong:
        return comm.allreduce(arrays["short"], **how)
    if kind == "order":
        swaps = turn in (AT, AT + 1) and is_last
        return comm.allreduce(x, op="max" if bool(turn % 2) != swaps else "sum", **how)
    if kind == "algorithm":
        how["algorithm"] = "recursive_doubling" if wrong else "ring"
    return comm.allreduce(x, **how)


def differ(rank: Rank, kind: str, backend: str, waits: bool, turns: int) -> list[Any]:
    """Make calls until one is refused; return where that was, and its words."""
    comm = rank.comm.dup()
    core_of(comm).compare_every = EVERY
    arrays = {
        "int32": rank.array(np.ones(8, np.int32)),
        "float32": rank.array(np.ones(8, np.float32)),
        "short": rank.array(np.ones(6, np.int32)),
    }
    for turn in range(turns):
        try:
            request = call(comm, kind, turn, arrays, backend)
            request.be_quiet()
            if waits or turn == turns - 1:
                request.synchronize(timeout_s=300)
        except MismatchError as error:
            said = str(error)
            break
    else:
        return [turns, ""]
    with pytest.raises(MismatchError) as again:
        comm.barrier()
    assert said in str(again.value)
    return [turn, said]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
@pytest.mark.full(sample=12)
def test_all_ranks_raise_the_same(
    backend: str, size: int, kind: str, waits: bool
) -> None:
    with HERE[backend](is_clean=False):
        found = ON[backend](
            size, lambda rank: differ(rank, kind, backend, waits, TURNS)
        )
    texts = {text for _, text in found}
    assert len(texts) == 1, found
    (text,) = texts
    number = AT + 2  # the ranks met before the first call, and joined
    assert "made different calls" in text or f"as operation #{number}" in text
    # The slowest rank has made at most so many calls behind it; others may be ahead.
    first = min(turn for turn, _ in found)
    assert first <= AT + EVERY, found
    # It may have to see the ends of two calls before it; of all, where it never waited.
    assert first >= AT - 2 or not waits, found


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["reduction", "root", "order", "algorithm"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
@pytest.mark.full(sample=8)
def test_equal_calls_are_no_error(
    backend: str, size: int, kind: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "AT", -9)
    with HERE[backend]():
        found = ON[backend](size, lambda rank: differ(rank, kind, backend, waits, 40))
    assert found == [[40, ""]] * size
