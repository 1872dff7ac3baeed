# SPDX-License-Identifier: Apache-2.0
"""A device backend of another package: found by its entry point, used like others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads
from third_party_backend import MAGIC, AttachedTheirs, TheirRunner

from commrt import _native, backends
from commrt.backends.catalog import check_candidate, offered
from commrt.comm import core_of
from commrt.errors import BackendError, MismatchError, UsageError
from commrt.select.facts import Candidate

LENGTH = 1000
SIZE = 3


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the package be installed, as its entry point says."""
    entry = EntryPoint("theirs", "third_party_backend:Theirs", "commrt.backends")
    monkeypatch.setattr(backends, "entry_points", lambda group: [entry])
    backends.all_backends.cache_clear()
    yield
    backends.all_backends.cache_clear()


def mine(rank: int) -> Any:
    return np.arange(LENGTH, dtype=np.float32) + rank


SUM = sum(mine(rank) for rank in range(SIZE))
LARGEST = mine(SIZE - 1)


def theirs(rank: Rank) -> AttachedTheirs:
    found = core_of(rank.comm).attached["theirs"]
    assert isinstance(found, AttachedTheirs)
    return found


def num_started(rank: Rank) -> int:
    """Return how many calls the backend's own runner has started."""
    found = theirs(rank).runners.values()
    assert all(isinstance(each, TheirRunner) for each in found)
    return sum(each.num_started for each in found)


def test_a_call_that_names_it_is_run_by_it() -> None:
    def main(rank: Rank) -> AttachedTheirs:
        comm = rank.comm
        for number in range(1, 4):  # again, and in the same way
            x = rank.array(mine(rank.rank))
            assert comm.allreduce(x, backend="theirs") is x
            values = rank.fetch(x)
            rank.stream.synchronize()
            assert np.array_equal(values(), SUM)
            assert num_started(rank) == number
        x, out = rank.array(mine(rank.rank)), rank.array(np.zeros(LENGTH, np.float32))
        request = comm.allreduce(
            x, out=out, op="max", algorithm="theirs/magic{piece=64}", nonblocking=True
        )
        assert request.wait() is out
        values = rank.fetch(out)
        rank.stream.synchronize()
        assert np.array_equal(values(), LARGEST)
        assert num_started(rank) == 4
        bound = comm.plan.allreduce(x, backend="theirs")
        assert bound.label == "theirs/magic"
        bound()
        bound.start().wait()
        rank.stream.synchronize()
        assert num_started(rank) == 6
        assert not theirs(rank).is_closed
        return theirs(rank)

    assert all(each.is_closed for each in on_threads(SIZE, main))


def test_calls_that_name_no_backend_go_as_ever() -> None:
    def main(rank: Rank) -> None:
        for _ in range(3):
            x = rank.array(mine(rank.rank))
            rank.comm.allreduce(x)
        assert num_started(rank) == 0
        assert _native.num_cached_device_calls(core_of(rank.comm)) == 1
        plans = core_of(rank.comm).devices.plans
        assert {plan.backend for plan in plans} == {"staged"}

    on_threads(SIZE, main)


def test_explain_shows_it_and_why_it_does_not_run() -> None:
    def main(rank: Rank) -> None:
        comm, on_device = rank.comm, {"device": "cuda"}
        said = comm.explain("allreduce", 4096, backend="theirs", **on_device)
        assert said.choice.candidate == MAGIC
        assert MAGIC in comm.candidates("allreduce", 4096, **on_device)
        assert MAGIC not in comm.candidates("allreduce", 4096)
        unasked = str(comm.explain("allreduce", 4096, **on_device))
        assert ": staged/" in unasked.splitlines()[0]
        assert "not    theirs/magic: theirs runs where it is asked for" in unasked
        refused = str(comm.explain("allreduce", 4096, dtype="float64", **on_device))
        assert "not    theirs/magic: it knows sum and max of float32 alone" in refused
        assert "theirs" not in str(comm.explain("allreduce", 4096))

    on_threads(SIZE, main)


def test_a_call_that_it_cannot_run_is_refused_with_its_reason() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        x = rank.array(mine(rank.rank).astype(np.float64))
        words = "the call asks for theirs/magic, .*: it knows sum and max of float32"
        with pytest.raises(BackendError, match=words):
            comm.allreduce(x, backend="theirs")
        with pytest.raises(BackendError, match=r"theirs/magic, .*: it has no bcast"):
            comm.bcast(x, backend="theirs")
        with pytest.raises(
            UsageError, match="'theirs', which does not exist or cannot"
        ):
            comm.allreduce(mine(rank.rank), backend="theirs")
        x = rank.array(mine(rank.rank))
        comm.allreduce(x, backend="theirs")
        assert num_started(rank) == 1

    on_threads(SIZE, main)


def test_where_the_ranks_disagree_all_of_them_say_so() -> None:
    def main(rank: Rank) -> None:
        rank.device.version_of_theirs = 1 + (rank.rank == 1)
        x = rank.array(mine(rank.rank))
        with pytest.raises(BackendError, match=r"the ranks have versions \[1, 2, 1\]"):
            rank.comm.allreduce(x, backend="theirs")
        rank.comm.allreduce(x)
        assert num_started(rank) == 0

    on_threads(SIZE, main)


def test_with_a_precedence_it_runs_what_it_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AttachedTheirs, "precedence", 30)

    def main(rank: Rank) -> None:
        comm = rank.comm
        for number in range(1, 3):
            x = rank.array(mine(rank.rank))
            comm.allreduce(x)
            values = rank.fetch(x)
            rank.stream.synchronize()
            assert np.array_equal(values(), SUM)
            assert num_started(rank) == number
        comm.bcast(x)
        assert num_started(rank) == 2
        said = str(comm.explain("allreduce", 4096, device="cuda"))
        assert ": theirs/magic" in said.splitlines()[0]
        assert "theirs runs this unless a table, COMMRT_ALGORITHM or the call" in said

    on_threads(SIZE, main)


def test_the_variable_may_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_ALGORITHM", "allreduce:theirs/magic")

    def main(rank: Rank) -> None:
        rank.comm.allreduce(rank.array(mine(rank.rank)))
        assert num_started(rank) == 1
        # It speaks of devices alone.
        assert np.array_equal(rank.comm.allreduce(mine(rank.rank)), SUM)

    on_threads(SIZE, main)


def test_check_mode_compares_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        x = rank.array(mine(rank.rank))
        rank.comm.allreduce(x, backend="theirs")
        with pytest.raises(MismatchError):
            rank.comm.allreduce(
                x, op=("sum", "max", "sum")[rank.rank], backend="theirs"
            )
        assert num_started(rank) == 1

    on_threads(SIZE, main, survives=False)


def test_it_learns_that_its_communicator_failed() -> None:
    def main(rank: Rank) -> str:
        rank.comm.allreduce(rank.array(mine(rank.rank)), backend="theirs")
        rank.stream.synchronize()
        core_of(rank.comm).give_up("a test says so")
        return theirs(rank).given_up

    assert on_threads(SIZE, main, survives=False) == ["a test says so"] * SIZE


def test_tables_may_name_it_and_its_parameters() -> None:
    assert offered("theirs", "allreduce") == {"magic"}
    check_candidate("allreduce", Candidate("theirs", "magic", {"piece": 64}))
    with pytest.raises(UsageError, match="64 or 4096"):
        check_candidate("allreduce", Candidate("theirs", "magic", {"piece": 5}))
    with pytest.raises(UsageError, match="unknown parameter 'pice'; did you mean"):
        check_candidate("allreduce", Candidate("theirs", "magic", {"pice": 64}))
    rows = {each.name: each.reason for each in backends.available()}
    assert rows["theirs"] == "an example"
