# SPDX-License-Identifier: Apache-2.0
"""Ranks train the same model out of core, each on data of its own."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from out_of_core_cases import ENOUGH, MODES, Ticks, blocks_of, made, same_bits
from torch import nn

import commrt.trace
from commrt.errors import CommError, RefusedError, UsageError
from commrt.layers.data.reducer import GradientReducer
from commrt.layers.out_of_core import OutOfCore, ThrottledCopy
from commrt.local import run

NEAR = 1e-12

SHARED = nn.Linear(6, 6).double()


class Tied(nn.Module):
    """A block that shares its layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


DRAWN = {kind: blocks_of(kind) for kind in ("mlp", "cnn")}
"""Drawn once: ranks are threads, which share torch's generator."""


def drawn(kind: str = "mlp") -> nn.Sequential:
    """Return blocks, equal ones each time."""
    return copy.deepcopy(DRAWN[kind][0])


def batch(rank: int, kind: str = "mlp") -> torch.Tensor:
    """Return a rank's images, of another number on each."""
    x = DRAWN[kind][1]
    draws = torch.Generator().manual_seed(rank)
    shape = (2 + rank, *x.shape[1:])
    return torch.randn(shape, generator=draws, dtype=x.dtype)


def sample(size: int, kind: str = "mlp") -> torch.Tensor:
    return batch(size, kind)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("policy", [*MODES, "auto"])
def test_ranks_train_the_model_of_one_process(ranks: int, policy: str) -> None:
    plain = drawn()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(ranks):
            (plain(batch(rank)).square().sum() / ranks).backward()
        optimizer.step()

    def main(comm: Any) -> list[torch.Tensor]:
        blocks = drawn()
        model = made(blocks, sample(ranks), comm=comm, policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model.backward(model(batch(comm.rank)).square().sum())
            optimizer.step()
        assert model.near_nbytes == 0
        model.close()
        model._far.close()
        return [x.detach() for x in model.parameters()]

    every = run(ranks, main)
    for found in every:
        assert same_bits(found, every[0])
        for one, other in zip(found, plain.parameters(), strict=True):
            assert (one - other).abs().max() < NEAR


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("policy", [("swap", "recompute", "swap", "keep"), "swap"])
def test_ranks_have_the_bits_of_training_in_core(ranks: int, policy: Any) -> None:
    def main(comm: Any) -> bool:
        found = []
        for modes in ("keep", policy):
            x = sample(ranks, "cnn")
            model = made(drawn("cnn"), x, comm=comm, policy=modes)
            model.backward(model(batch(comm.rank, "cnn")).exp().sum())
            found.append([x.grad for x in model.parameters()])
            found[-1] += [x.clone() for x in model.buffers()]
            model.close()
            model._far.close()
        return same_bits(*found)

    assert run(ranks, main) == [True] * ranks


def test_means_are_those_of_a_plain_reducer_to_the_bit() -> None:
    def main(comm: Any) -> bool:
        blocks = drawn()
        model = made(blocks, sample(3), comm=comm, policy="swap", bucket_nbytes=64)
        model.backward(model(batch(comm.rank)).square().sum())
        plain = drawn()
        plain(batch(comm.rank)).square().sum().backward()
        gradients = [x.grad for x in plain.parameters()]
        with GradientReducer(comm, gradients, bucket_nbytes=64) as reducer:
            right = reducer(gradients)
        found = [x.grad for x in model.parameters()]
        model.close()
        model._far.close()
        return same_bits(found, right)

    assert run(3, main) == [True] * 3


def test_gradients_leave_before_earlier_blocks_are_back() -> None:
    """Sums of block i start before block i - 1 is recomputed or used."""

    def main(comm: Any) -> Any:
        blocks = drawn()
        modes = ("swap", "recompute", "swap", "recompute")
        model = made(blocks, sample(2), comm=comm, policy=modes, bucket_nbytes=1)
        started: list[Any] = []
        allreduce = type(model._sums._reducer._comm).allreduce

        def seen(own: Any, array: Any, **arguments: Any) -> Any:
            if array.dtype == torch.float64:
                started.append([*model.step.events])
            return allreduce(own, array, **arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model._sums._reducer._comm), "allreduce", seen)
            model.backward(model(batch(comm.rank)).square().sum())
        model.close()
        model._far.close()
        return model.step.events, started

    for events, started in run(2, main):
        for block in (3, 2, 1):
            given = events.index(("gradient", block))
            assert given < events.index(("backward", block - 1))
        assert events.index(("gradient", 2)) < events.index(("recompute", 1))
        # Two sums of block 3 have started before block 2 begins; and so on.
        before = [len(each) for each in started]
        for block in (3, 2, 1):
            begin = events.index(("backward", block - 1))
            assert sum(count <= begin for count in before) >= 2 * (4 - block)


def test_gradients_add_up_without_sums() -> None:
    def main(comm: Any) -> bool:
        blocks = drawn()
        model = made(blocks, sample(2), comm=comm, policy="swap")
        x = batch(comm.rank)
        model.backward(model(x).sum(), sync=False)
        own = [p.grad.clone() for p in model.parameters()]
        model.backward(model(2 * x).sum())
        plain = drawn()
        for rank in range(2):
            (plain(batch(rank)).sum() / 2).backward()
            (plain(2 * batch(rank)).sum() / 2).backward()
        off = [
            (p.grad - q.grad).abs().max() < NEAR
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        ]
        different = [
            not torch.equal(p.grad, g)
            for p, g in zip(model.parameters(), own, strict=True)
        ]
        model.close()
        model._far.close()
        return all(off) and all(different)

    assert run(2, main) == [True] * 2


def test_a_rank_whose_loss_reaches_fewer_parameters() -> None:
    """Its gradients of the others count as zero."""

    def main(comm: Any) -> Any:
        blocks = drawn()
        model = made(blocks, sample(2), comm=comm, policy="swap")
        y = model(batch(comm.rank))
        few = (y.detach() * model.blocks[3][0].bias).sum()
        model.backward(y.sum() if comm.rank else few)
        gradients = [p.grad.clone() for p in model.parameters()]
        model.close()
        model._far.close()
        return gradients

    one, other = run(2, main)
    assert same_bits(one, other)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_making_and_stepping_send_the_bytes_of_the_page(ranks: int) -> None:
    """Beside the sums: 88 + 72 n bytes of each rank, and 8 in each pass."""

    def main(comm: Any) -> None:
        blocks = drawn()
        for each in blocks.parameters():
            each.requires_grad_(False)
        blocks[3][0].bias.requires_grad_(True)
        comm.barrier()
        model = made(blocks, sample(ranks), comm=comm, bucket_nbytes=1)
        comm.barrier()
        y = model(batch(comm.rank))
        comm.barrier()
        model.backward(y.sum(), sync=False)
        comm.barrier()
        with torch.no_grad():
            model(batch(comm.rank))
        comm.barrier()
        model.backward(model(batch(comm.rank)).sum())
        comm.barrier()
        model.close()
        model._far.close()

    with commrt.trace.record() as recording:
        run(ranks, main)
    for log in recording.logs():
        making, forward, alone, without, step = sections(log)
        if ranks == 1:
            assert not any((making, forward, alone, without, step))
            continue
        numbers = 40  # the reducer compares five numbers of its parameters
        assert making["allgather"] == (88 + 72 * 4 + numbers) * ranks
        assert forward == {"allgather": 8 * ranks}
        assert alone == {"allgather": 8 * ranks}
        assert without == {}
        sums = {"allreduce": 5 * 8 + 1}  # a gradient, and a byte that says it is there
        assert step == {"allgather": 16 * ranks, **sums}


def sections(log: Any) -> list[Counter[str]]:
    """Return the bytes of each operation between a rank's barriers."""
    found: list[Counter[str]] = []
    for call in log.operations:
        if call.op == "barrier":
            found.append(Counter())
        elif found and call.nbytes:
            found[-1][call.op] += call.nbytes
    return found[:-1]


# -- errors ----------------------------------------------------------------------


def caught(act: Any) -> str:
    with pytest.raises(CommError) as raised:
        act()
    return type(raised.value).__name__


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_an_error_on_one_rank_ends_the_pass_on_all(policy: str) -> None:
    class Falls(nn.Module):
        kind = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind == "forward":
                raise UsageError("falls")
            y = x.sin()
            if self.kind == "backward":
                y.register_hook(falls)
            return y

    def falls(_: Any) -> None:
        raise UsageError("falls")

    def main(comm: Any) -> Any:
        blocks = drawn()
        broken = Falls()
        both = nn.Sequential(*blocks[:2], broken, *blocks[2:])
        model = made(both, sample(3), comm=comm, policy=policy)
        said = []
        x = batch(comm.rank)
        for kind in ("forward", "backward"):
            model.blocks[2].kind = kind if comm.rank == 1 else ""
            said.append(caught(lambda: model.backward(model(x).sum())))
            assert model.near_nbytes == 0
            model.zero_grad()
        model.blocks[2].kind = ""
        model.backward(model(x).square().sum())
        gradients = [p.grad.clone() for p in model.parameters()]
        model.close()
        model._far.close()
        return said, gradients

    found = run(3, main)
    assert [said for said, _ in found] == [
        ["RefusedError"] * 2,
        ["UsageError"] * 2,
        ["RefusedError"] * 2,
    ]
    plain = drawn()
    both = nn.Sequential(*plain[:2], Falls(), *plain[2:])
    for rank in range(3):
        (both(batch(rank)).square().sum() / 3).backward()
    for _, gradients in found:
        for one, other in zip(gradients, both.parameters(), strict=True):
            assert (one - other.grad).abs().max() < NEAR


@pytest.mark.parametrize("call", ["store", "load"])
def test_far_memory_that_fails_on_one_rank(call: str) -> None:
    class Falls(ThrottledCopy):
        is_on = False

    def fail(*_: Any) -> Any:
        raise RuntimeError("torn")

    def main(comm: Any) -> str:
        blocks = drawn()
        ticks = Ticks()
        far = Falls(1e12, clock=ticks)
        model = made(blocks, sample(2), comm=comm, policy="swap", far=far)
        x = batch(comm.rank)
        if comm.rank == 1:
            setattr(far, call, fail)

        def step() -> None:
            y = model(x)
            ticks.at += 1.0
            model._near.poll()
            model.backward(y.sum())

        said = caught(step)
        if comm.rank == 1:
            delattr(far, call)
        model.zero_grad()
        step()
        model.close()
        far.close()
        return said

    assert run(2, main) == ["RefusedError", "BackendError"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"budget_bytes": 9}, ["UsageError", "UsageError"]),
        ({"budget_bytes": -1}, ["RefusedError", "UsageError"]),
        ({"bucket_nbytes": 64}, ["UsageError", "UsageError"]),
        ({"policy": "swap"}, ["UsageError", "UsageError"]),
        ({"policy": "both"}, ["RefusedError", "UsageError"]),
        ({"x": 3}, ["RefusedError", "UsageError"]),
        ({"x": torch.ones(2, 99).double()}, ["RefusedError", "RuntimeError"]),
        ({"blocks": drawn()[:3]}, ["UsageError", "UsageError"]),
        ({"blocks": drawn().requires_grad_(False)}, ["UsageError", "UsageError"]),
        ({"blocks": drawn().float()}, ["UsageError", "UsageError"]),
    ],
)
def test_arguments_that_differ_are_refused_on_all(given: Any, expected: Any) -> None:
    def main(comm: Any) -> str:
        arguments = {"blocks": drawn(), "x": sample(2)}
        arguments |= {"budget_bytes": ENOUGH, "policy": "keep"}
        if comm.rank == 1:
            arguments |= copy.deepcopy(given)
        with (
            ThrottledCopy(1e9) as far,
            pytest.raises((CommError, RuntimeError)) as raised,
        ):
            made(comm=comm, far=far, **arguments)
        return type(raised.value).__name__

    assert run(2, main) == expected


def frozen() -> nn.Sequential:
    blocks = drawn()
    blocks[1].requires_grad_(False)
    return blocks


@pytest.mark.parametrize("change", ["melts", "replaced"])
def test_parameters_that_nobody_would_sum_are_refused_on_all(change: str) -> None:
    """On rank 1 alone."""

    def main(comm: Any) -> str:
        model = made(frozen(), sample(2), comm=comm, policy="swap")
        y = model(batch(comm.rank))
        if comm.rank == 1 and change == "melts":
            model.blocks[1].requires_grad_(True)
        elif comm.rank == 1:
            model.blocks[0][0].bias = nn.Parameter(torch.zeros(9).double())
        said = caught(lambda: model.backward(y.sum()))
        assert model.near_nbytes == 0
        model.close()
        model._far.close()
        return said

    assert run(2, main) == ["RefusedError", "UsageError"]


def test_a_gradient_that_cannot_be_summed_is_refused_on_all() -> None:
    """Rank 1 has a sparse one from before, of a parameter that its loss leaves out."""

    def main(comm: Any) -> str:
        model = made(drawn(), sample(2), comm=comm, policy="swap")
        loss = model(batch(comm.rank)).sum()
        if comm.rank == 1:
            model.blocks[0][0].bias.grad = torch.zeros(9).double().to_sparse()
            loss = model.blocks[3][0].bias.sum()
        said = caught(lambda: model.backward(loss))
        model.zero_grad()
        model.backward(model(batch(comm.rank)).sum())
        model.close()
        model._far.close()
        return said

    assert run(2, main) == ["RefusedError", "UsageError"]


def test_a_shared_weight_is_summed_after_its_first_block() -> None:
    def main(comm: Any) -> Any:
        torch_linear = copy.deepcopy(SHARED)
        blocks = nn.Sequential(*(Tied(torch_linear) for _ in range(3)))
        x = batch(comm.rank)
        model = made(blocks, sample(2), comm=comm, policy="swap", bucket_nbytes=1)
        model.backward(model(x).sum())
        events = model.step.events
        gradients = [p.grad for p in model.parameters()]
        model.close()
        model._far.close()
        return events, gradients

    plain = nn.Sequential(*(Tied(SHARED) for _ in range(3)))
    for rank in range(2):
        (plain(batch(rank)).sum() / 2).backward()
    for events, gradients in run(2, main):
        given = [at for at, each in enumerate(events) if each == ("gradient", 0)]
        assert len(given) == 2
        assert given[0] > events.index(("backward", 0))
        for one, other in zip(gradients, plain.parameters(), strict=True):
            assert (one - other.grad).abs().max() < NEAR


def test_budgets_below_a_block_are_refused_on_all_ranks() -> None:
    """One rank's sample alone is too large."""

    def main(comm: Any) -> str:
        blocks = drawn()
        x = sample(50 if comm.rank else 2)
        with (
            ThrottledCopy(1e9) as far,
            pytest.raises(UsageError, match="needs alone") as raised,
        ):
            made(blocks, x, comm=comm, far=far, budget_bytes=2000)
        return str(raised.value)

    one, other = run(2, main)
    assert one == other


def test_the_plan_follows_from_the_slowest_rank() -> None:
    def main(comm: Any) -> Any:
        blocks = drawn()
        with ThrottledCopy(1e6 / (1 + comm.rank)) as far:
            model = made(blocks, sample(comm.rank + 1), comm=comm, far=far)
            model.close()
            return model.plan

    one, other = run(2, main)
    assert one == other
    assert one.link.out_bytes_per_s == pytest.approx(5e5)
    assert one.costs[0].output_nbytes == len(sample(2)) * 9 * 8


def test_backward_of_torch_alone_is_refused_with_ranks() -> None:
    def main(comm: Any) -> None:
        blocks = drawn()
        model = made(blocks, sample(2), comm=comm)
        loss = model(batch(comm.rank)).sum()
        with pytest.raises(UsageError, match="knows nothing of other ranks"):
            loss.backward()
        model.close()
        model._far.close()

    run(2, main)


def test_a_close_frees_its_communicators() -> None:
    def main(comm: Any) -> bool:
        blocks = drawn()
        model = made(blocks, sample(2), comm=comm)
        model.close()
        model.close()
        model._far.close()
        assert isinstance(model, OutOfCore)
        return RefusedError.on_all_ranks and not any(
            p._post_accumulate_grad_hooks for p in model.parameters()
        )

    assert run(2, main) == [True, True]
