# SPDX-License-Identifier: Apache-2.0
"""Short payloads in the lines that announce them: every length around the bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from commrt.errors import CommError
from commrt.local import LocalRanks, run
from commrt.planning.host_plans import INLINE_NBYTES
from commrt.request import wait_all

LEAST, MOST = INLINE_NBYTES
LENGTHS = (
    *(1, 47, 48, 49, 63, 64, 65, 111, 112, 113, 255, 256, 257),
    *(559, 560, 561, 1071, 1072, 1073, 2095, 2096, 2097, 2300),
)
"""A line's payload, whole lines behind it, all of them, and their neighbours."""
LINES = 64


def numbers(rank: int, nbytes: int) -> Any:
    """Return bytes that tell ranks and places apart."""
    return (np.arange(nbytes) * 3 + 7 * rank).astype(np.uint8)


def test_the_lengths_are_those_of_the_engine() -> None:
    assert {LEAST, LEAST + 1, MOST, MOST + 1} <= set(LENGTHS)


@pytest.mark.parametrize("most", [LEAST, 100, MOST])
@pytest.mark.parametrize(
    ("size", "algorithm"),
    [(2, "direct"), (2, "recursive_doubling"), (4, "recursive_doubling"), (3, "ring")],
)
def test_sums_of_every_length_are_right(size: int, algorithm: str, most: int) -> None:
    way = f"local/{algorithm}{{inline={most}}}"

    def main(comm: Any) -> list[int]:
        wrong = []
        for nbytes in LENGTHS * 2:
            want = sum(numbers(rank, nbytes).astype(int) for rank in range(size))
            x = numbers(comm.rank, nbytes)
            got = comm.allreduce(x.copy(), out=np.empty_like(x), algorithm=way)
            later = comm.allreduce(x.copy(), algorithm=way, nonblocking=True)
            for found in (got, later.wait()):
                if not np.array_equal(found, want.astype(np.uint8)):
                    wrong.append(nbytes)
        return wrong

    assert run(size, main) == [[]] * size


@pytest.mark.parametrize("dtype", ["complex128", "float64", "float16"])
def test_elements_of_every_size_cross_whole(dtype: str) -> None:
    def main(comm: Any) -> float:
        worst = 0.0
        for count in range(1, 1 + MOST // 2):
            x = (np.arange(count) % 11).astype(dtype)
            got = comm.allreduce(x, out=np.empty_like(x), algorithm="direct")
            worst = max(worst, float(np.abs(got - 2 * x).max()))
        return worst

    assert run(2, main) == [0.0] * 2


@pytest.mark.parametrize("most", [LEAST, MOST])
def test_what_goes_to_several_ranks_is_right_with_either_kind_of_message(
    most: int,
) -> None:
    """A tree's root sends one value to two ranks, its inner ranks to one or none."""

    def main(comm: Any) -> list[int]:
        wrong = []
        for name in ("binomial", "direct", "chain"):
            for nbytes in LENGTHS:
                x = numbers(comm.rank, nbytes)
                comm.bcast(x, root=1, algorithm=f"local/{name}{{inline={most}}}")
                if not np.array_equal(x, numbers(1, nbytes)):
                    wrong.append(nbytes)
        return wrong

    assert run(4, main) == [[]] * 4


def test_more_messages_than_lines_wait_until_theirs_are_read() -> None:
    count = 3 * LINES + 5
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        options = {"root": 0, "algorithm": f"direct{{inline={MOST}}}"}

        def start(comm: Any, number: int, x: Any) -> Any:
            nbytes = LENGTHS[number % len(LENGTHS)]
            x = numbers(number, nbytes) if x is None else np.empty(nbytes, np.uint8)
            return comm.bcast(x, nonblocking=True, **options)

        sent = [start(first, number, None) for number in range(count)]
        assert not sent[-1].done
        taken = [start(second, number, ...) for number in range(count)]
        for _ in range(10_000):
            if all(request.done for request in (*sent, *taken)):
                break
            ranks.step(0)
            ranks.step(1)
        wait_all(sent)
        for number, x in enumerate(wait_all(taken)):
            assert np.array_equal(x, numbers(number, x.nbytes)), number


@pytest.mark.parametrize(("one", "other"), list(pairwise((40, 64, 100, 2096, 2200))))
def test_lengths_that_differ_are_noticed(one: int, other: int) -> None:
    with LocalRanks(2) as ranks:
        options = {"algorithm": f"direct{{inline={MOST}}}", "nonblocking": True}
        requests = [
            comm.allreduce(numbers(0, nbytes), **options)
            for comm, nbytes in zip(ranks.comms, (one, other), strict=True)
        ]
        with pytest.raises(CommError, match="sent a message of another length"):
            requests[1].wait()
        with pytest.raises(CommError):
            requests[0].wait()


def test_fragments_may_be_so_short_that_they_ride_in_lines() -> None:
    way = f"local/ring{{chunk=512,depth=4,inline={MOST},reuse=1}}"

    def main(comm: Any) -> bool:
        want = sum(np.arange(5003) * (rank + 1) for rank in range(3))
        got = comm.allreduce(np.arange(5003) * (comm.rank + 1), algorithm=way)
        return bool((got == want).all())

    assert run(3, main) == [True] * 3
