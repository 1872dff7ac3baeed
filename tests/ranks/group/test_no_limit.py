# SPDX-License-Identifier: Apache-2.0
"""Calls take limits that mean "no limit", and refuse wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.local import run
from commrt.sparse.vector import SparseVector

FOR_EVER = (math.inf, 1e300, 10**400, 2**31, 300 * 365.25 * 86400, np.float64(np.inf))
WRONG = (math.nan, -1, -math.inf, 0, "10", True, [])


def x_of(number: int = 4) -> Any:
    return np.ones(number)


def p2p(comm: Communicator, limit: Any) -> None:
    peer = 1 - comm.rank
    request = comm.recv(np.zeros(4), source=peer, nonblocking=True, timeout_s=limit)
    comm.send(x_of(), dest=peer, timeout_s=limit)
    request.wait(timeout_s=limit)
    comm.sendrecv(x_of(), dest=peer, out=np.zeros(4), source=peer, timeout_s=limit)


def sparse(comm: Communicator, limit: Any) -> None:
    vector = SparseVector(np.array([comm.rank]), np.ones(1), (4,))
    comm.sparse_allreduce(vector, timeout_s=limit)
    request = comm.sparse_allreduce(vector, nonblocking=True, timeout_s=limit)
    request.wait(timeout_s=limit)


def several(comm: Communicator, limit: Any) -> None:
    started = [comm.allreduce(x_of(), nonblocking=True) for _ in range(3)]
    commrt.wait_any(started, timeout_s=limit)
    commrt.wait_all(started, timeout_s=limit)


def default(comm: Communicator, limit: Any) -> None:
    own = comm.dup()
    own.timeout_s = limit
    own.allreduce(x_of())
    own.allreduce(x_of(100_000), nonblocking=True).wait()
    own.free()


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "allreduce": lambda comm, limit: comm.allreduce(x_of(), timeout_s=limit),
    "compressed": lambda comm, limit: comm.allreduce(
        np.ones(4096, np.float32), compress="bfloat16", timeout_s=limit
    ),
    "alltoallv": lambda comm, limit: comm.alltoallv(
        x_of(), send_counts=[2, 2], timeout_s=limit
    ),
    "barrier": lambda comm, limit: comm.barrier(timeout_s=limit),
    "synchronize": lambda comm, limit: comm.allreduce(
        x_of(), nonblocking=True
    ).synchronize(timeout_s=limit),
    "messages": p2p,
    "sparse": sparse,
    "several": several,
    "default": default,
}


@pytest.mark.parametrize("call", CALLS)
def test_no_limit(call: str) -> None:
    def main(comm: Communicator) -> None:
        for limit in FOR_EVER:
            CALLS[call](comm, limit)

    run(2, main, timeout_s=math.inf)


@pytest.mark.parametrize(
    "call", sorted({*CALLS} - {"synchronize", "several", "default"})
)
def test_a_wrong_limit_of_a_call_is_a_usage_error(call: str) -> None:
    def main(comm: Communicator) -> None:
        for limit in WRONG:
            with pytest.raises(UsageError, match="timeout_s="):
                CALLS[call](comm, limit)

    run(2, main)


def test_a_wrong_limit_of_a_wait_is_a_usage_error() -> None:
    def main(comm: Communicator) -> None:
        request = comm.allreduce(x_of(), nonblocking=True)
        waits: tuple[Callable[[Any], Any], ...] = (
            lambda limit: request.wait(timeout_s=limit),
            lambda limit: request.synchronize(timeout_s=limit),
            lambda limit: commrt.wait_any([request], timeout_s=limit),
            lambda limit: commrt.wait_all([request], timeout_s=limit),
            lambda limit: setattr(comm, "timeout_s", limit),
        )
        for wait in waits:
            for limit in WRONG:
                with pytest.raises(UsageError, match="timeout_s="):
                    wait(limit)
        request.wait()

    run(2, main)


def test_none_is_no_limit_as_the_default_of_a_communicator() -> None:
    def main(comm: Communicator) -> float:
        comm.timeout_s = None
        comm.allreduce(x_of())
        return comm.timeout_s

    assert run(2, main) == [1e9, 1e9]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_limit_of_local_ranks(wrong: Any) -> None:
    with pytest.raises(UsageError, match="timeout_s="):
        run(1, lambda comm: None, timeout_s=wrong)
