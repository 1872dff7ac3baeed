# SPDX-License-Identifier: Apache-2.0
"""A sharded optimizer sends the bytes of its formula, and has a part of the state."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from recorded import logs_of
from science_cases import sent_between_barriers
from sharded_update_cases import (
    SHAPES,
    give_gradients,
    made_parameters,
    on_ranks,
    trained_alone,
    trained_together,
)

import commrt.trace
from commrt.errors import RefusedError, RevokedError, UsageError
from commrt.layers.sharded_update import GradScaler, ShardedOptimizer, bucket
from commrt.layers.sharded_update.layout import ALIGNMENT, cut_evenly, owners

NUM = len(SHAPES)
E = 8
"""Bytes of an element."""


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("gradients", ["own", "summed"])
@pytest.mark.parametrize("nbytes", [1, 4000])
def test_a_step_sends_the_bytes_of_its_formula(
    nbytes: int, gradients: str, ranks: int
) -> None:
    def main(comm: Any) -> Any:
        parameters = made_parameters()
        with ShardedOptimizer(
            parameters,
            comm,
            torch.optim.AdamW,
            gradients=gradients,
            bucket_nbytes=nbytes,
        ) as optimizer:
            give_gradients(parameters, [0], 0, lambda rank, step, at: at == 5)
            comm.barrier()
            optimizer.step()
            comm.barrier()
            counts = [each.layout.of([n != 5 for n in each.numbers]).counts
                      for each in optimizer.buckets]  # fmt: skip
            return sum(own[comm.rank] for own in counts)

    with commrt.trace.record() as recording:
        owned = on_ranks(ranks, main)
    psi = sum(each.nbytes for at, each in enumerate(made_parameters()) if at != 5)
    assert sum(owned) * E == psi
    for log in logs_of(recording):
        right: Counter[str] = Counter()
        if ranks > 1:
            right["allreduce"] = 17 + NUM + 1
            right["allgatherv"] = psi
            if gradients == "own":
                right["reduce_scatterv"] = psi
        assert sent_between_barriers(log) == +right


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_rank_has_its_part_of_the_state(ranks: int) -> None:
    """Two numbers for each element, and one in float32 for each piece."""
    _, plain = trained_alone("adamw", ranks, 1)
    whole = sum(
        value.nbytes
        for state in plain.state_dict()["state"].values()
        for name, value in state.items()
        if name != "step"
    )

    def main(comm: Any) -> Any:
        _, optimizer = trained_together(comm, "adamw", 1, bucket_nbytes=1 << 20)
        with optimizer:
            own = [
                piece
                for each in optimizer.buckets
                for piece in each.layout.pieces[comm.rank]
            ]
            elements = sum(piece.count for piece in own)
            assert optimizer.state_nbytes() == 2 * elements * E + 4 * len(own)
            return 2 * elements * E

    held = on_ranks(ranks, main)
    assert sum(held) == whole
    assert max(held) <= whole / ranks + 2 * E * (ALIGNMENT + 1)


@pytest.mark.parametrize("root", [0, 2, None])
def test_a_whole_state_travels_once(root: int | None) -> None:
    def main(comm: Any) -> None:
        _, optimizer = trained_together(comm, "adamw", 1)
        comm.barrier()
        optimizer.whole_state_dict(root)
        comm.barrier()
        optimizer.close()

    with commrt.trace.record() as recording:
        on_ranks(3, main)
    axes = [each for each in made_parameters() if each.dim()]
    op = "allgatherv" if root is None else "gatherv"
    right = {op: 2 * sum(each.nbytes for each in axes), "allreduce": 17 + 17}
    for log in logs_of(recording):
        assert sent_between_barriers(log) == right


def test_a_bucket_travels_while_another_one_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of the next one, and new values of the one before."""
    events: list[str] = []

    def noted(name: str) -> Any:
        right = getattr(bucket.Bucket, name)

        def method(self: Any, *args: Any, **more: Any) -> Any:
            if self._rank == 0:
                events.append(f"{name} {self.numbers[0]}")
            return right(self, *args, **more)

        return method

    for name in ("start_sum", "finish_sum", "update", "start_gather", "finish_gather"):
        monkeypatch.setattr(bucket.Bucket, name, noted(name))
    monkeypatch.setattr(bucket.Bucket, "is_on_host", False)
    shapes = ((200,),) * 4

    def main(comm: Any) -> None:
        parameters = made_parameters(shapes)
        with ShardedOptimizer(
            parameters, comm, torch.optim.AdamW, bucket_nbytes=1
        ) as optimizer:
            give_gradients(parameters, [comm.rank], 0)
            optimizer.step()

    on_ranks(2, main)
    for at in range(4):
        update = events.index(f"update {at}")
        if at < 3:
            start = events.index(f"start_sum {at + 1}")
            assert start < update < events.index(f"finish_sum {at + 1}")
        if at:
            before = events.index(f"start_gather {at - 1}")
            assert before < update < events.index(f"finish_gather {at - 1}")
    gathered = [each for each in events if each.startswith("finish_gather")]
    assert gathered == [f"finish_gather {at}" for at in range(4)]


def test_layouts_are_even_and_whole() -> None:
    counts = (1000, 0, 3, 64, 777)
    for ranks in (1, 2, 3, 7, 40):
        layout = cut_evenly(counts, ranks)
        pieces = [piece for own in layout.pieces for piece in own if piece.count]
        assert pieces == sorted(pieces)
        for index, count in enumerate(counts):
            own = [piece for piece in pieces if piece.index == index]
            ends = [0, *(piece.high for piece in own)] if own else [0]
            assert [piece.low for piece in own] == ends[:-1]
            assert ends[-1] == count
            assert all(end % ALIGNMENT == 0 or end == count for end in ends)
        assert max(layout.counts) <= sum(counts) / ranks + ALIGNMENT + 1
    loads = [0, 0, 0]
    assert owners([10, 70, 30, 40, 20], loads) == [1, 0, 2, 1, 2]
    assert loads == [70, 50, 50]


class Failing(torch.optim.SGD):
    """An optimizer whose step fails where a gradient is negative."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and bool((each.grad < 0).any()):
                    raise RuntimeError("a negative gradient")
        return super().step(closure)


def sparse(parameters: Any) -> None:
    parameters[0].grad = torch.zeros_like(parameters[0]).to_sparse()


def failing_closure(parameters: Any) -> None:
    raise OSError("no more data")


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (sparse, UsageError, "stored as torch.sparse_coo"),
        (failing_closure, OSError, "no more data"),
    ],
)
def test_an_error_of_one_rank_ends_the_step_of_all(
    fault: Any, kind: type[Exception], says: str
) -> None:
    def main(comm: Any) -> None:
        parameters = made_parameters()
        right = [each.detach().clone() for each in parameters]
        with ShardedOptimizer(parameters, comm, torch.optim.AdamW) as optimizer:
            give_gradients(parameters, [comm.rank], 0)

            def closure() -> None:
                if comm.rank == 1:
                    fault(parameters)

            expected = (kind, says) if comm.rank == 1 else (RefusedError, "another")
            with pytest.raises(expected[0], match=expected[1]):
                optimizer.step(closure)
            for mine, before in zip(parameters, right, strict=True):
                assert torch.equal(mine, before)
            give_gradients(parameters, [comm.rank], 0)
            optimizer.step()
            assert not torch.equal(parameters[0], right[0])

    on_ranks(3, main)


def test_an_error_within_the_optimizer_of_one_rank_is_told_to_all() -> None:
    def main(comm: Any) -> None:
        parameters = made_parameters(((256,),))
        with ShardedOptimizer(
            parameters, comm, Failing, lr=0.1, cut="elements"
        ) as optimizer:
            parameters[0].grad = torch.ones(256, dtype=torch.float64)
            parameters[0].grad[200:] = -1  # the second rank's part
            kind = RuntimeError if comm.rank == 1 else RefusedError
            with pytest.raises(kind, match=r"negative|optimizer of another rank"):
                optimizer.step()
            parameters[0].grad = torch.ones(256, dtype=torch.float64)
            optimizer.step()
            assert len({*parameters[0].detach()[128:].tolist()}) == 128

    on_ranks(2, main)


def test_ranks_that_differ_are_refused_alike() -> None:
    def main(comm: Any) -> None:
        rank = comm.rank
        adam = torch.optim.AdamW
        for shapes, more in (
            (((300 + rank,),), {}),
            (((300,),), {"lr": 0.1 + rank}),
            (((300,),), {"op": "sum" if rank else "avg"}),
            (((300,),), {"bucket_nbytes": 100 + rank}),
        ):
            with pytest.raises(UsageError, match=r"rank 1 has .* rank 0 has"):
                ShardedOptimizer(made_parameters(shapes), comm, adam, **more)
        op = "avg" if rank else "mean"
        with pytest.raises(UsageError, match=r"refused its arguments|must be 'avg'"):
            ShardedOptimizer(made_parameters(), comm, adam, op=op)
        parameters = made_parameters()
        with ShardedOptimizer(parameters, comm, adam, lr=0.1) as optimizer:
            give_gradients(parameters, [rank], 0)
            optimizer.param_groups[0]["lr"] = 0.1 + rank
            with pytest.raises(UsageError, match=r"rank 1 has .* rank 0 has"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
            with pytest.raises(UsageError, match=r"rank 1 has .* rank 0 has"):
                optimizer.whole_state_dict(rank)
            with pytest.raises(UsageError, match=r"rank 1 has .* rank 0 has"):
                optimizer.add_param_group({"params": made_parameters(((3 + rank,),))})
            assert len(optimizer.param_groups) == 1
            optimizer.step()

    on_ranks(2, main)


def test_wrong_arguments_and_uses() -> None:
    def main(comm: Any) -> None:
        x = torch.nn.Parameter(torch.ones(4, 6))
        adam = torch.optim.AdamW
        wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
            ([x], torch.optim.LBFGS, {}, "LBFGS cannot be divided"),
            ([x], torch.optim.SparseAdam, {}, "SparseAdam cannot be divided"),
            ([x], lambda groups: 3, {}, "factory returned 3"),
            ([x], 3, {}, "factory=3"),
            ([x], adam, {"cut": "rows"}, "cut='rows'"),
            ([x], adam, {"bucket_nbytes": 0}, "bucket_nbytes=0"),
            ([x], adam, {"gradients": "mean"}, "gradients='mean'"),
            ([x, torch.nn.Parameter(x.detach()[1])], adam, {}, "share memory"),
            ([torch.nn.Parameter(torch.ones(4, 6)[:, 1:3])], adam, {}, "run of memory"),
            ([torch.nn.Parameter(torch.ones(1).expand(5))], adam, {}, "run of memory"),
        ]
        for params, factory, more, says in wrong:
            with pytest.raises(UsageError, match=says):
                ShardedOptimizer(params, comm, factory, **more)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            ShardedOptimizer([x], comm, adam, lr=-1.0)
        with pytest.raises(UsageError, match="must be a communicator"):
            ShardedOptimizer([x], None, adam)  # type: ignore[arg-type]
        optimizer = ShardedOptimizer([x], comm, adam)
        with pytest.raises(UsageError, match="whole_state_dict"):
            optimizer.state_dict()
        with pytest.raises(UsageError, match="cannot be copied"):
            optimizer.__getstate__()
        with pytest.raises(UsageError, match="must be a rank"):
            optimizer.whole_state_dict(comm.size)
        with pytest.raises(UsageError, match=r"groups of \[2\] parameters"):
            optimizer.load_state_dict(
                {"state": {}, "param_groups": [{"params": [0, 1]}]}
            )
        with pytest.raises(UsageError, match="must have 'state'"):
            optimizer.load_state_dict({})
        odd = {0: {"exp_avg": torch.ones(3)}}
        with pytest.raises(UsageError, match=r"has the shape \(3,\)"):
            optimizer.load_state_dict({"state": odd, "param_groups": [{"params": [0]}]})
        with pytest.raises(UsageError, match="above 0"):
            optimizer.clip_grad_norm_(0.0)
        optimizer.close()
        optimizer.close()
        with pytest.raises(UsageError, match="is closed"):
            optimizer.step()

    on_ranks(1, main)
    on_ranks(2, main)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its group."""

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
        return super().step(closure)


@pytest.mark.parametrize("shapes", [((5,), (300,)), ((3,),), ((300,), (2,))])
def test_settings_that_an_optimizer_changes_are_equal_on_all_ranks(
    shapes: Any,
) -> None:
    """Also on ranks that have no piece of the first bucket, or none at all."""

    def main(comm: Any) -> None:
        parameters = made_parameters(shapes)
        with ShardedOptimizer(
            parameters, comm, Counting, lr=0.1, bucket_nbytes=1
        ) as optimizer:
            for step in range(3):
                give_gradients(parameters, [comm.rank], step)
                optimizer.step()
                assert optimizer.param_groups[0]["k"] == step + 1

    on_ranks(3, main)


def test_an_extra_group_and_another_order_of_names_are_refused() -> None:
    def main(comm: Any) -> None:
        adam = torch.optim.AdamW
        groups = [{"params": [each]} for each in made_parameters(((4,), (4,)))]
        with pytest.raises(UsageError, match=r"rank 1 has nothing more|nothing more"):
            ShardedOptimizer(groups[: 2 - comm.rank], comm, adam)
        one, two = made_parameters(((4,), (4,)))
        named = [("one", one), ("two", two)]
        if comm.rank:
            named.reverse()
        with pytest.raises(UsageError, match=r"'two', 'one'"):
            ShardedOptimizer(named, comm, adam)

    on_ranks(2, main)


def test_calls_of_the_given_communicator_may_wait_during_a_step() -> None:
    """The optimizer sends on a communicator of its own, also its buckets."""

    def main(comm: Any) -> None:
        parameters = made_parameters()
        x = torch.ones(3)
        with ShardedOptimizer(parameters, comm, torch.optim.AdamW) as optimizer:
            give_gradients(parameters, [comm.rank], 0)
            if comm.rank:
                optimizer.step()
            request = comm.allreduce(x, nonblocking=True)
            if not comm.rank:
                optimizer.step()
            request.wait()
        assert x.tolist() == [2, 2, 2]

    on_ranks(2, main)


@pytest.mark.parametrize("on_host", [True, False])
def test_old_graphs_are_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    monkeypatch.setattr(bucket.Bucket, "is_on_host", on_host)

    def main(comm: Any) -> None:
        parameters = made_parameters(((3,), (500,)))
        with ShardedOptimizer(
            parameters, comm, torch.optim.SGD, lr=0.1, bucket_nbytes=1
        ) as optimizer:
            for _ in range(2):  # in the second round in other memory
                losses = [each.square().sum() for each in parameters]
                give_gradients(parameters, [comm.rank], 0)
                optimizer.step()
                for loss in losses:
                    with pytest.raises(RuntimeError, match="inplace operation"):
                        loss.backward()
                for each in parameters:
                    each.data = each.data.clone()

    on_ranks(3, main)


def test_a_parameter_of_another_type_is_refused_again_and_after_sums() -> None:
    def main(comm: Any) -> None:
        parameters = made_parameters()
        with ShardedOptimizer(parameters, comm, torch.optim.SGD, lr=1.0) as optimizer:
            give_gradients(parameters, [comm.rank], 0)
            optimizer.reduce_gradients()
            kept = parameters[0].data
            parameters[0].grad = None
            parameters[0].data = kept.float()
            for _ in range(2):
                with pytest.raises(UsageError, match="float32"):
                    optimizer.step()
            parameters[0].data = kept.clone()  # moved between the sums and the step
            optimizer.step()
            assert not torch.equal(parameters[0], kept)

    on_ranks(2, main)


def test_a_failed_step_leaves_no_scale() -> None:
    def main(comm: Any) -> None:
        parameter = torch.nn.Parameter(torch.ones(300))
        with ShardedOptimizer([parameter], comm, torch.optim.SGD, lr=0.5) as optimizer:
            parameter.grad = torch.ones(300)
            torchs = torch.amp.GradScaler("cpu", init_scale=4.0)
            torchs.scale(torch.ones(()))
            with pytest.raises(UsageError, match="each rank by itself"):
                torchs.step(optimizer)
            assert not {"grad_scale", "found_inf"} & {*vars(optimizer)}
            optimizer.zero_grad()
            parameter.grad = torch.ones(300)
            optimizer.step()
            assert torch.equal(parameter, torch.full((300,), 0.5))

    on_ranks(2, main)


def test_float16_gradients_are_refused_on_ranks_without_pieces_too() -> None:
    def main(comm: Any) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        with ShardedOptimizer([parameter], comm, torch.optim.SGD) as optimizer:
            scaler = GradScaler(comm)
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(3, dtype=torch.float16)
            with pytest.raises((ValueError, RefusedError), match=r"FP16|another rank"):
                scaler.unscale_(optimizer)

    on_ranks(2, main)


def test_a_rank_that_fails_between_buckets_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = bucket.Bucket.start_gather

    def failing(self: Any) -> None:
        if self._rank == 1 and self.numbers[0] == 3:
            raise MemoryError("none left")
        right(self)

    monkeypatch.setattr(bucket.Bucket, "start_gather", failing)

    def main(comm: Any) -> None:
        parameters = made_parameters(((200,),) * 5)
        optimizer = ShardedOptimizer(parameters, comm, torch.optim.SGD, bucket_nbytes=1)
        give_gradients(parameters, [comm.rank], 0)
        with pytest.raises((MemoryError, RevokedError), match=r"none left"):
            optimizer.step()

    on_ranks(3, main)
