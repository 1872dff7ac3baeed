# SPDX-License-Identifier: Apache-2.0
"""torch's ``_time_estimator``: it says how long calls would take, and runs none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch_ranks import TorchRun

from commrt.errors import UsageError

CPU = torch.device("cpu")
RANKS = 3
LIMIT_S = 240.0


def calls_of(count: int) -> dict[str, Callable[[], Any]]:
    """Return calls of collectives on tensors of a rank; an output is full of -1."""
    x, wide = torch.full((count,), 2.0), torch.full((RANKS * count,), -1.0)
    many = [*wide.clone().chunk(RANKS)]
    strided = torch.full((count, 2), 2.0)[:, 0]
    root = dist.get_rank() == 0
    return {
        "all_reduce": lambda: (dist.all_reduce(x), x),
        "strided": lambda: (dist.all_reduce(strided), strided),
        "asynchronous": lambda: (dist.all_reduce(x, async_op=True).wait(), x),
        "broadcast": lambda: (dist.broadcast(x, 0), x),
        "reduce": lambda: (dist.reduce(x, 1), x),
        "all_gather": lambda: (dist.all_gather(many, x), *many),
        "all_gather_into_tensor": lambda: (dist.all_gather_into_tensor(wide, x), wide),
        "reduce_scatter_tensor": lambda: (
            dist.reduce_scatter_tensor(many[0], wide),
            many[0],
        ),
        "all_to_all_single": lambda: (
            dist.all_to_all_single(wide, torch.zeros_like(wide)),
            wide,
        ),
        "gather": lambda: (dist.gather(x, many if root else None, 0), *many),
        "scatter": lambda: (dist.scatter(x, many if root else None, 0), x),
        "functional": lambda: (
            functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),
            x,
        ),
    }


def estimated(call: Callable[[], Any]) -> tuple[float, Any]:
    with dist._time_estimator(device=CPU) as estimate:
        found = call()
    return estimate.estimated_time, found


def alone() -> dict[str, Any]:
    """Estimate on one rank, while the others wait for its next real call."""
    dist.init_process_group("commrt")
    found: dict[str, Any] = {"rank": dist.get_rank()}
    if dist.get_rank() == 0:
        for name in calls_of(1):
            short, (_, *outputs) = estimated(calls_of(16)[name])
            assert all({*each.tolist()} <= {2.0, -1.0} for each in outputs), name
            long, _ = estimated(calls_of(1 << 20)[name])
            assert 0 < short < long, (name, short, long)
        one, _ = estimated(calls_of(64)["all_reduce"])
        two, _ = estimated(lambda: [calls_of(64)["all_reduce"]() for _ in range(2)])
        assert two == pytest.approx(2 * one)
        assert estimated(lambda: None)[0] == 0.0
    x = torch.ones(5)
    dist.all_reduce(x)
    found["sum"] = x.tolist()
    dist.destroy_process_group()
    return found


def test_one_rank_estimates_alone_and_nothing_runs(torchrun: TorchRun) -> None:
    found = torchrun(RANKS, alone)
    assert found == [{"rank": rank, "sum": [3.0] * 5} for rank in range(RANKS)]


def not_estimated(x: torch.Tensor) -> list[Callable[[], Any]]:
    group = dist.distributed_c10d._get_default_group()
    message = dist.P2POp(dist.isend, x, 1)
    return [
        lambda: dist.send(x, 1),
        lambda: dist.isend(x, 1),
        lambda: dist.recv(x, 1),
        lambda: dist.recv(x),
        lambda: dist.batch_isend_irecv([message]),
        lambda: dist.all_reduce(x.to_sparse()),
        lambda: group.monitored_barrier(),
    ]


def with_errors() -> list[str]:
    """Leave blocks by exceptions; calls and messages run again after each of them."""
    dist.init_process_group("commrt")
    sums, x = [], torch.ones(4)

    def works() -> None:
        y = torch.ones(2)
        dist.all_reduce(y)
        sums.append(y.tolist())

    if dist.get_rank() == 0:

        def fail() -> None:
            dist.all_reduce(x)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), dist._time_estimator(device=CPU):
            fail()
    works()
    if dist.get_rank() == 0:
        # The other rank hears of none of these.
        with pytest.raises(UsageError, match="root"), dist._time_estimator(device=CPU):
            dist.distributed_c10d._get_default_group().broadcast([x], 7).wait()
        for call in not_estimated(x):
            with pytest.raises(UsageError), dist._time_estimator(device=CPU):
                call()
    works()
    if dist.get_rank() == 0:
        dist.send(torch.full((3,), 7.0), 1)
    else:
        dist.recv(y := torch.zeros(3), 0)
        assert y.tolist() == [7.0] * 3
    with dist._time_estimator(device=CPU) as estimate:
        dist.all_reduce(x)
        with pytest.raises(UsageError, match="another one of this group is open"):
            dist._time_estimator(device=CPU).__enter__()
    assert estimate.estimated_time > 0
    works()
    dist.destroy_process_group()
    assert x.tolist() == [1.0] * 4
    return [str(each) for each in sums]


def test_a_block_that_an_exception_leaves_is_over(torchrun: TorchRun) -> None:
    assert torchrun(2, with_errors) == [["[2.0, 2.0]"] * 3] * 2


def of_two_threads() -> list[float]:
    """Let another thread call, while this one's calls are estimated."""
    dist.init_process_group("commrt")
    strided, y = torch.ones(4, 2)[:, 0], torch.ones(2)
    begun = dist.all_reduce(strided, async_op=True)
    with dist._time_estimator(device=CPU) as estimate:
        dist.all_reduce(torch.zeros(1000))
        other = threading.Thread(target=dist.all_reduce, args=(y,))
        other.start()
        other.join(LIMIT_S)
        begun.wait()
        dist.all_reduce(y)
    assert estimate.estimated_time > 0
    dist.destroy_process_group()
    return [*y.tolist(), *strided.tolist()]


def test_calls_of_other_threads_and_earlier_ones_run(torchrun: TorchRun) -> None:
    assert torchrun(2, of_two_threads) == [[2.0] * 6] * 2


def checked() -> str:
    dist.init_process_group("commrt")
    with pytest.raises(NotImplementedError), dist._time_estimator(device=CPU):
        raise AssertionError("it must not begin")
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return str(x.tolist())


def test_ranks_that_compare_their_calls_estimate_none(
    torchrun: TorchRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")
    assert torchrun(2, checked) == ["[2.0, 2.0]"] * 2
