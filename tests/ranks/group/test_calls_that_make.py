# SPDX-License-Identifier: Apache-2.0
"""Calls in which ranks make something together end where one of them gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import commrt
from commrt import local
from commrt.comm import Communicator
from commrt.errors import CommError, RefusedError, RevokedError, UsageError

MAKERS: dict[str, Callable[[Communicator], Any]] = {
    "dup": lambda comm: comm.dup(),
    "split": lambda comm: comm.split(0),
    "cart": lambda comm: comm.cart((0,)),
    "graph": lambda comm: comm.graph([], []),
    "create_group": lambda comm: comm.create_group(range(comm.size)),
    "empty": lambda comm: comm.empty(100),
    "objects": lambda comm: comm.allgather_object(1),
    "sparse": lambda comm: comm.sparse_allreduce(_sparse()),
    "compressed": lambda comm: comm.allreduce(np.ones(9), compress="float16"),
    "recv": lambda comm: comm.recv(np.empty(3)),
    "probe": lambda comm: comm.probe(),
}
WITH_LIMIT: dict[str, Callable[[Any], Any]] = {
    "bcast_object": lambda comm: comm.bcast_object(1, timeout_s=_limit(comm)),
    "sparse_allreduce": lambda comm: comm.sparse_allreduce(
        _sparse(), timeout_s=_limit(comm)
    ),
    "topk_allreduce": lambda comm: comm.topk_allreduce(
        np.ones(9), 2, timeout_s=_limit(comm)
    ),
    "halo_exchange": lambda comm: comm.halo_exchange(
        np.ones(9), 1, timeout_s=_limit(comm)
    ),
    "neighbor_allgather": lambda comm: comm.neighbor_allgather(
        np.ones(9), timeout_s=_limit(comm)
    ),
}


def _until_it_fails(comm: Communicator, request: Any) -> None:
    request.wait()
    comm.barrier()


def _sparse() -> commrt.SparseVector:
    return commrt.SparseVector(np.array([1]), np.ones(1), shape=9)


def _limit(comm: Communicator) -> float:
    return -1.0 if comm.rank == 1 else 300.0


@pytest.mark.parametrize("name", MAKERS)
def test_they_end_where_a_rank_revokes(name: str) -> None:
    def main(comm: Communicator) -> int:
        comm.timeout_s = 300
        if comm.rank == 1:
            comm.revoke("a rank says so")
        else:
            with pytest.raises(RevokedError, match=r"a rank says so|shrink"):
                MAKERS[name](comm)
        return int(comm.shrink().allreduce(np.ones(1))[0])

    assert local.run(3, main) == [3, 3, 3]


@pytest.mark.parametrize("name", WITH_LIMIT)
def test_a_wrong_limit_of_one_rank_is_told_to_the_others(name: str) -> None:
    def main(comm: Communicator) -> list[str]:
        comm.timeout_s = 300
        cart = comm.cart((comm.size,))
        kinds = []
        for _ in range(2):  # the first time and later
            try:
                WITH_LIMIT[name](cart)
            except CommError as error:
                kinds.append(type(error).__name__)
        kinds.append(str(cart.allreduce(np.ones(1))[0]))
        return kinds

    own, told = UsageError.__name__, RefusedError.__name__
    first, second, third = local.run(3, main)
    assert first == third == [told, told, "3.0"]
    assert second == [own, own, "3.0"]


def test_a_part_of_the_ranks_is_made_after_another_rank_has_revoked() -> None:
    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        made = comm.split(comm.rank // 2)
        if comm.rank == 3:
            comm.revoke("it is of the other part")
        return float(made.allreduce(np.ones(1))[0]) if comm.rank < 2 else 2.0

    assert local.run(4, main) == [2.0] * 4


def test_a_rank_that_raises_ends_what_it_has_in_flight() -> None:
    ended: list[CommError] = []

    def main(comm: Communicator) -> None:
        comm.timeout_s = 300
        request = comm.allreduce(np.ones(100_000), nonblocking=True)
        if comm.rank == 1:
            raise KeyError("of the program")
        with pytest.raises(CommError, match="rank 1") as raised:
            _until_it_fails(comm, request)
        ended.append(raised.value)

    with pytest.raises(KeyError):
        local.run(3, main)
    assert len(ended) == 2
