# SPDX-License-Identifier: Apache-2.0
"""Tables that say by an earlier name which backend runs a schedule are followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from commrt.backends.offers import AttachedOffers
from commrt.backends.tcp.attached import AttachedTcp
from commrt.select.facts import Candidate, Query

QUERY = Query("allreduce", 1 << 20, op="sum")


@dataclass
class Attached:
    """A backend that offers what it is told to."""

    offered: Sequence[Candidate]
    stands_in_for: frozenset[str] = frozenset()
    precedence: int = 0

    def candidates(self, query: Query) -> Sequence[Candidate]:
        del query
        return self.offered


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(*name.split("/")) for name in names]


@pytest.mark.parametrize(
    ("gloo", "tcp", "asked", "runs"),
    [
        (["gloo/native"], ["tcp/ring"], "gloo/ring", "tcp/ring"),
        (["gloo/native"], ["tcp/ring"], "gloo/native", "gloo/native"),
        (["gloo/native"], ["tcp/direct"], "gloo/ring", "tcp/ring"),
        (["gloo/ring"], [], "gloo/ring", "gloo/ring"),
        ([], ["tcp/ring"], "mpi/ring", "tcp/ring"),
        (["mpi/native"], ["tcp/ring"], "mpi/native", "mpi/native"),
        ([], [], "gloo/ring", "gloo/ring"),
    ],
)
def test_an_earlier_name_means_the_backend_of_today(
    gloo: list[str], tcp: list[str], asked: str, runs: str
) -> None:
    """Where gloo carries messages itself, its name means that."""
    offers = AttachedOffers(
        {
            "gloo": Attached(candidates(*gloo)),
            "tcp": Attached(candidates(*tcp), AttachedTcp.stands_in_for),
        }  # type: ignore[arg-type]
    )
    (use,) = candidates(asked)
    assert str(offers.as_run_here(QUERY, use)) == runs
