# SPDX-License-Identifier: Apache-2.0
"""Times of pairs of ranks say whether TCP or MPI carries messages between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from commrt.tcp.beside_mpi import _Talk, verdict_of

if TYPE_CHECKING:
    from commrt.bootstrap.mpi import MpiBootstrap

TCP_IS_QUICKER = {"tcp short": 20.0, "tcp long": 900.0, "mpi short": 30.0}


@pytest.mark.parametrize(
    ("told", "is_tcp"),
    [
        ([{**TCP_IS_QUICKER, "mpi long": 900.0}], True),
        ([{**TCP_IS_QUICKER, "mpi long": 601.0}], True),
        ([{**TCP_IS_QUICKER, "mpi long": 599.0}], False),
        ([{**TCP_IS_QUICKER, "mpi long": 600.0}], False),
    ],
)
def test_the_product_of_a_short_and_a_long_message_decides(
    told: list[dict[str, float]], is_tcp: bool
) -> None:
    assert verdict_of(told).is_tcp is is_tcp


def test_the_slowest_pair_decides_and_ranks_that_timed_nothing_do_not() -> None:
    quick = {**TCP_IS_QUICKER, "mpi long": 900.0}
    slow = {**quick, "tcp long": 1800.0}
    assert verdict_of([quick, {}, quick]).is_tcp
    found = verdict_of([quick, {}, slow])
    assert not found.is_tcp
    assert found.why == (
        "8 B and 64 KiB, to and fro, take 20 and 1800 us by TCP, 30 and 900 us by MPI"
    )


class _NobodyLost:
    """A bootstrap of one rank, which is asked for no message."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gone(self, rank: int) -> str:
        return ""

    def idle(self) -> None:
        """Do nothing between looks."""


@pytest.mark.parametrize("nodes", range(1, 8))
def test_each_leader_talks_and_each_talk_has_two_ends(nodes: int) -> None:
    leaders = [2 * node for node in range(nodes)]
    talks = {
        rank: _Talk.all_of(cast("MpiBootstrap", _NobodyLost(rank)), leaders, 1.0)
        for rank in range(2 * nodes)
    }
    assert [rank for rank in talks if talks[rank]] == (leaders if nodes > 1 else [])
    ends = [(rank, each.peer, each.leads) for rank in talks for each in talks[rank]]
    assert sorted(ends) == sorted((peer, rank, not leads) for rank, peer, leads in ends)
    begun = [(rank, peer) for rank, peer, leads in ends if leads]
    assert len(begun) == (nodes + 1) // 2 if nodes > 1 else not begun
    # Who talks twice has ended with its own partner before.
    assert [talk.peer for talk in talks[0]] == [2, 2 * nodes - 2][: len(talks[0])]
