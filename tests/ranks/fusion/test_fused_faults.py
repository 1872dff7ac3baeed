# SPDX-License-Identifier: Apache-2.0
"""fused() where ranks disagree, leave, or fail: typed errors, and no hang."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from started_operations import num_started

import commrt
from commrt.comm import core_of
from commrt.errors import CommError, MismatchError, RevokedError, UsageError
from commrt.local import run

F = np.float32

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


class Stop(Exception):  # noqa: N818
    """Leaves a context."""


@pytest.mark.parametrize("limit", [None, 60.0])
def test_an_exception_sends_what_was_called(limit: float | None) -> None:
    def rank_main(comm: Any) -> list[float]:
        requests = []
        try:
            with comm.fused(time_limit_s=limit):
                for i in range(5):
                    requests.append(
                        comm.allreduce(np.full(2, float(i)), nonblocking=True)
                    )
                raise Stop
        except Stop:
            pass
        results = [each[0] for each in commrt.wait_all(requests)]
        # As good as new.
        return [*results, comm.allreduce(np.ones(1))[0]]

    assert run(3, rank_main) == [[0, 3, 6, 9, 12, 3]] * 3


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("limit", [None, 0.001, 60.0])
def test_a_rank_that_leaves_early_gives_errors(early: int, limit: float | None) -> None:
    def rank_main(comm: Any) -> str:
        comm.timeout_s = 300
        requests = []
        try:
            with comm.fused(time_limit_s=limit):
                for i in range(4):
                    if i == 2 and comm.rank == early:
                        break
                    x = np.ones(1000)
                    requests.append(comm.allreduce(x, nonblocking=True))
            commrt.wait_all(requests)
            comm.allreduce(np.ones(7))
        except CommError as error:
            for request in requests:
                try:
                    result = request.wait()
                except CommError:
                    continue
                # A short limit may have summed these before the rank left.
                assert limit == 0.001
                np.testing.assert_array_equal(result, np.full(1000, 2.0))
            return type(error).__name__
        return "nothing"

    kinds = run(2, rank_main, timeout_s=300)
    allowed = {"MismatchError", "RevokedError", "RequestErrors"}
    assert set(kinds) <= allowed, kinds


@pytest.mark.parametrize("how", ["length", "type", "reduction"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_with_a_time_limit_any_difference_is_found(how: str, odd: int) -> None:
    def rank_main(comm: Any) -> str:
        comm.timeout_s = 300
        other = comm.rank == odd
        x = np.ones(12 if how == "length" and other else 16, F)
        if how == "type" and other:
            x = x.astype(np.int32)
        op = "max" if how == "reduction" and other else "sum"
        requests = []
        try:
            with comm.fused(time_limit_s=60):
                for i in range(3):
                    each = x if i == 1 else np.ones(4, F)
                    kwargs = {"op": op if i == 1 else "sum"}
                    requests.append(
                        comm.allreduce(each.copy(), nonblocking=True, **kwargs)
                    )
            commrt.wait_all(requests)
        except CommError as error:
            for request in requests:
                with pytest.raises(CommError):
                    request.wait()
            return f"{type(error).__name__}: {error}"
        return "nothing"

    said = run(3, rank_main, timeout_s=300)
    found = [text for text in said if text.startswith("MismatchError")]
    assert found
    assert all("equal calls within the context" in text for text in found)
    assert "nothing" not in said


def test_without_a_time_limit_waits_at_other_places_give_errors() -> None:
    def rank_main(comm: Any) -> str:
        comm.timeout_s = 300
        requests = []
        try:
            with comm.fused():
                for i in range(3):
                    x = np.ones(100)
                    requests.append(comm.allreduce(x, nonblocking=True))
                    if comm.rank == i:
                        requests[0].wait()
            commrt.wait_all(requests)
        except CommError as error:
            for request in requests:
                with pytest.raises(CommError):
                    request.wait()
            return type(error).__name__
        return "nothing"

    kinds = set(run(2, rank_main, timeout_s=300))
    assert kinds <= {"MismatchError", "RevokedError", "RequestErrors"}


def test_check_mode_compares_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> str:
        with comm.fused():
            first = comm.allreduce(np.ones(4), nonblocking=True)
            with pytest.raises(MismatchError) as raised:
                comm.allreduce(np.ones(3 + comm.rank), nonblocking=True)
            last = comm.allreduce(np.ones(2), nonblocking=True)
        assert commrt.wait_all([first, last])[1].tolist() == [2, 2]
        assert first.seq == last.seq
        return str(raised.value)

    texts = run(2, rank_main)
    assert texts[0] == texts[1]
    assert "elements=3" in texts[0]
    assert "test_fused_faults.py" in texts[0]


def test_a_broken_communicator_ends_the_context() -> None:
    def rank_main(comm: Any) -> None:
        with comm.fused():
            request = comm.allreduce(np.ones(3), nonblocking=True)
            core_of(comm).give_up("enough")
            with pytest.raises(RevokedError, match="enough"):
                comm.allreduce(np.ones(3), nonblocking=True)
        for _ in range(2):
            with pytest.raises(RevokedError, match="enough"):
                request.wait()
        with pytest.raises(RevokedError):
            comm.fused()

    run(2, rank_main)


def test_what_nothing_can_run_is_refused_in_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_ALGORITHM", "allreduce:local/nonsense")

    def rank_main(comm: Any) -> int:
        with (
            comm.fused(),
            pytest.raises(UsageError, match="'local/nonsense', which does not exist"),
        ):
            comm.allreduce(np.ones(3), nonblocking=True)
        return int(num_started(comm))

    assert run(2, rank_main) == [0, 0]
