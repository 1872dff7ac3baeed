# SPDX-License-Identifier: Apache-2.0
"""A backend of another package that keeps nothing for a communicator: two methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commrt import backends
from commrt.backends import Availability, Capabilities
from commrt.errors import UsageError
from commrt.local import run
from commrt.planning.spec import PlanSpec
from commrt.planning.templates import schedule_plan
from commrt.select.facts import Candidate, Query

AROUND = Candidate("plain", "around")


class Plain:
    """Allreduce of arrays in host memory, by a ring."""

    name = "plain"
    capabilities = Capabilities(schedules=False, algorithms=("around",))

    def availability(self) -> Availability:
        return Availability(self.name, True, "an example", self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        can = query.device == "host" and query.coll == "allreduce" and comm.size > 1
        return [AROUND] if can else []

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        ring = Candidate("plain", "ring", spec.candidate.params)
        return schedule_plan(comm, replace(spec, candidate=ring))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Entry:
        name, value = "plain", "a test"

        def load(self) -> type[Plain]:
            return Plain

    monkeypatch.setattr(backends, "entry_points", lambda group: [Entry()])
    backends.all_backends.cache_clear()
    yield
    backends.all_backends.cache_clear()


def test_two_methods_are_enough() -> None:
    def main(comm: Any) -> None:
        x = np.arange(100.0) + comm.rank
        found = comm.allreduce(x.copy(), backend="plain")
        assert np.array_equal(found, 2 * np.arange(100.0) + 1)
        assert AROUND in comm.candidates("allreduce", 800)
        chosen = comm.explain("allreduce", 800, algorithm="around").choice.candidate
        assert chosen == AROUND
        with pytest.raises(UsageError, match="'plain', which does not exist or cannot"):
            comm.bcast(x, backend="plain")

    run(2, main)
