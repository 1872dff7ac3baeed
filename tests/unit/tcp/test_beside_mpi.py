# SPDX-License-Identifier: Apache-2.0
"""Times of pairs of ranks say whether TCP or MPI carries messages between nodes."""

from __future__ import annotations

import pytest

from commrt.tcp.beside_mpi import verdict_of

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
