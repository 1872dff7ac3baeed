# SPDX-License-Identifier: Apache-2.0
"""First calls of a service: no rank waits for another one to prepare them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from relay_ranks import RelayRanks
from stepped_calls import STEPPED_CALLS, Call, expected, total

from commrt import local
from commrt.bootstrap.base import poll_until
from commrt.comm import Communicator, core_of
from commrt.errors import CommError, RevokedError

NODES = [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]]
LIMIT_S = 240.0


BLOCKING: dict[str, Call] = {
    **{
        name: lambda c, call=call: call(c).wait()
        for name, call in STEPPED_CALLS.items()
    },
    "objects": lambda comm: comm.allgather_object(comm.rank),
}


@pytest.mark.parametrize("nodes", [*NODES, [[0, 1]], [[0, 1, 2, 3, 4]]])
@pytest.mark.parametrize("name", STEPPED_CALLS)
def test_first_calls_of_communicators_come_in_any_order(
    name: str, nodes: list[list[int]]
) -> None:
    size = sum(map(len, nodes))
    have_called = threading.Barrier(size)

    def main(comm: Communicator) -> list[float]:
        made = [comm.dup() for _ in range(3)]
        order = [(i + comm.rank) % 3 for i in range(3)]
        requests = {i: STEPPED_CALLS[name](made[i]) for i in order}
        have_called.wait(LIMIT_S)  # nobody has waited for anybody
        left = dict(requests)

        def all_over() -> bool:
            for i in [i for i, request in left.items() if request.test()]:
                del left[i]
            return not left

        # Ranks are threads here: one that asks without a pause keeps all from Python.
        assert poll_until(all_over, LIMIT_S)
        return [total(requests[i].wait()) for i in range(3)]

    with RelayRanks(nodes) as ranks:
        assert ranks.each(main) == [[expected(name, size)] * 3] * size


@pytest.mark.parametrize(
    ("ends", "nodes"),
    [*(("revoke", nodes) for nodes in NODES), ("give_up", NODES[0])],
)
@pytest.mark.parametrize("name", BLOCKING)
def test_a_rank_that_ends_all_before_its_first_call_is_heard(
    name: str, nodes: list[list[int]], ends: str
) -> None:
    """The others have come to theirs, and wait for it."""
    heard: list[int] = []

    def main(comm: Communicator) -> None:
        comm.timeout_s = LIMIT_S
        if comm.rank == 2:
            who = comm if ends == "revoke" else core_of(comm)
            getattr(who, ends)("step 17 hangs")
            while len(heard) < 2:
                core_of(comm).world.engine.step()
            return
        try:
            with pytest.raises(
                RevokedError, match=r"step 17 hangs|rank 2 .* has ended"
            ):
                BLOCKING[name](comm)
        finally:
            heard.append(comm.rank)

    with RelayRanks(nodes) as ranks:
        ranks.each(main)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", BLOCKING)
def test_a_revoke_after_calls_that_differed_is_heard(
    name: str, nodes: list[list[int]]
) -> None:
    """The others wait in their first call of a service; the last rank never comes."""
    heard: list[int] = []

    def main(comm: Communicator) -> None:
        comm.timeout_s = LIMIT_S
        if comm.rank == 2:
            with pytest.raises(CommError, match=r"differ|float"):
                comm.allreduce(np.ones(64, np.float32))
            comm.revoke("step 17 hangs")
            while len(heard) < 2:
                core_of(comm).world.engine.step()
            return
        request = comm.allreduce(np.ones(64), nonblocking=True)
        try:
            with pytest.raises(CommError):
                BLOCKING[name](comm)
            with pytest.raises(CommError):
                request.wait()
        finally:
            heard.append(comm.rank)

    with RelayRanks(nodes) as ranks:
        ranks.each(main)


@pytest.mark.parametrize("name", STEPPED_CALLS)
def test_a_communicator_that_has_ended_has_no_first_call(name: str) -> None:
    def main(comm: Communicator) -> None:
        part = comm.dup()
        part.free()
        with pytest.raises(CommError, match="freed"):
            STEPPED_CALLS[name](part)

    local.run(2, main)


def test_a_rank_that_ends_a_communicator_makes_no_channel_for_that() -> None:
    def main(comm: Communicator) -> int:
        part = comm.dup()
        part.revoke()
        made = len(core_of(part).privates)
        part.free()
        return made

    assert local.run(2, main) == [0, 0]


def test_first_calls_leave_nothing_behind() -> None:
    """The memory of a service goes with the communicator."""

    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    def main(comm: Communicator) -> list[int]:
        counts = []
        for _ in range(4):
            part = comm.dup()
            for call in BLOCKING.values():
                call(part)
            part.free()
            comm.barrier()
            counts.append(mapped())
            comm.barrier()
        return counts

    for counts in local.run(2, main):
        assert counts[-1] <= counts[1] + 2
