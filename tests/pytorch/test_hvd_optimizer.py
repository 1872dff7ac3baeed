# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer of commrt.hvd trains as one process does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hvd_cases import NEAR, on_ranks, raised_by
from tensor3d_cases import drawn_in
from torch import nn
from torch.nn import functional

import commrt.hvd as hvd
from commrt.errors import MismatchError, RefusedError, UsageError

ROWS = 6
MAKERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def model_of(seed: int = 0) -> Any:
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
    model.append(nn.Linear(7, 3))
    model = model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn_in(100 * seed + number, *parameter.shape) / 2)
    return model


def loss_of(model: Any, step: int, ranks: range) -> Any:
    """Return the mean loss over the batches of some ranks."""
    x = torch.cat([drawn_in(50 * step + rank, ROWS, 4) for rank in ranks])
    return model(x).square().mean()


def one_process(make: Callable[[Any], Any], size: int, steps: int = 4) -> Any:
    model = model_of()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, range(size)).backward()
        optimizer.step()
    return model


def check_equal(model: Any, right: Any, near: float = NEAR) -> None:
    for own, other in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=near, atol=near)


FORMS: dict[str, Any] = {
    "plain": lambda model: {},
    "named": lambda model: {"named_parameters": model.named_parameters()},
    "two groups": lambda model: {"groups": 2},
    "lists": lambda model: {"groups": [[*model[0].parameters()], [model[4].bias]]},
    "predivide": lambda model: {"gradient_predivide_factor": 3.0},
}


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MAKERS)
def test_it_trains_as_one_process(kind: str, form: str, size: int) -> None:
    right = one_process(MAKERS[kind], size)

    def main() -> None:
        model = model_of(hvd.rank())
        hvd.broadcast_parameters(model.state_dict())
        optimizer = MAKERS[kind](model.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, **FORMS[form](model))
        assert isinstance(optimizer, type(MAKERS[kind](model.parameters())))
        for step in range(4):
            optimizer.zero_grad()
            rank = hvd.rank()
            loss_of(model, step, range(rank, rank + 1)).backward()
            optimizer.step()
        check_equal(model, right)
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(hvd.broadcast(mine, 0), mine)

    on_ranks(size, main, fusion_nbytes=256)


@pytest.mark.parametrize("passes", [2, 3])
def test_gradients_of_several_passes_are_added(passes: int) -> None:
    def main() -> None:
        rank, size = hvd.rank(), hvd.size()
        model, serial = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["sgd"](model.parameters()), backward_passes_per_step=passes
        )
        plain = MAKERS["sgd"](serial.parameters())
        for step in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            for number in range(passes):
                seed = passes * step + number
                loss_of(model, seed, range(rank, rank + 1)).backward()
                loss_of(serial, seed, range(size)).backward()
            optimizer.step()
            plain.step()
        check_equal(model, serial)
        for _ in range(passes):
            loss_of(model, 0, range(1)).backward()
        with pytest.raises(UsageError, match=f"per_step={passes} times before step"):
            loss_of(model, 0, range(1)).backward()

    on_ranks(2, main)


def test_gradients_are_clipped_between_synchronize_and_step() -> None:
    def main() -> None:
        rank = hvd.rank()
        model, serial = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
        plain = MAKERS["sgd"](serial.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, range(rank, rank + 1)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
            plain.zero_grad()
            loss_of(serial, step, range(2)).backward()
            nn.utils.clip_grad_norm_(serial.parameters(), 0.05)
            plain.step()
        check_equal(model, serial)
        optimizer.zero_grad()
        loss_of(model, 0, range(1)).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()

    on_ranks(2, main)


def test_gradients_under_way_are_guarded() -> None:
    def main() -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
        loss_of(model, 0, range(1)).backward()
        with pytest.raises(UsageError, match="gradients are under way"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 0, range(1)).backward()
        state = optimizer.state_dict()
        optimizer.synchronize()
        optimizer.load_state_dict(state)
        optimizer.zero_grad()

    on_ranks(2, main)


def test_parameters_without_a_gradient_count_as_zeros() -> None:
    """Ranks may use different parts of a model, and all take the same step."""

    def main() -> None:
        rank = hvd.rank()
        layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
        with torch.no_grad():
            for layer in layers:
                layer.weight.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), lr=1.0)
        )
        layers[rank](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert [layer.weight.tolist() for layer in layers] == [
            [[0.5, 0.5]],
            [[0.5, 0.5]],
            [[1.0, 1.0]],
        ]

    on_ranks(2, main)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_reduced(as_dense: bool) -> None:
    def main() -> None:
        rank = hvd.rank()
        tables = [nn.Embedding(6, 2, sparse=True).double() for _ in range(2)]
        for table in tables:
            with torch.no_grad():
                table.weight.copy_(drawn_in(3, 6, 2))
        words = [torch.tensor([0, r, r + 2]) for r in range(2)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(tables[0].parameters(), lr=0.5), sparse_as_dense=as_dense
        )
        plain = torch.optim.SGD(tables[1].parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            tables[0](words[rank]).square().sum().backward()
            optimizer.step()
            assert tables[0].weight.grad.is_sparse
            plain.zero_grad()
            (tables[1](torch.cat(words)).square().sum() / 2).backward()
            plain.step()
        check_equal(*tables)

    on_ranks(2, main)


def test_compressed_gradients_are_near() -> None:
    def main() -> None:
        rank = hvd.rank()
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            compression=hvd.Compression.fp16,
        )
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, range(rank, rank + 1)).backward()
            optimizer.step()
        right = one_process(lambda p: torch.optim.SGD(p, lr=0.1), 2)
        check_equal(model, right, near=1e-3)
        first = next(model.parameters()), next(right.parameters())
        assert not torch.equal(*first)

    on_ranks(2, main)


def test_a_closure_is_reduced_each_time() -> None:
    def main() -> None:
        rank = hvd.rank()
        model, serial = model_of(), model_of()
        options: dict[str, Any] = {"lr": 0.1, "max_iter": 3}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), **options)
        )
        plain = torch.optim.LBFGS(serial.parameters(), **options)

        def closure(which: Any, of: Any, ranks: range) -> Callable[[], Any]:
            def compute() -> Any:
                of.zero_grad()
                loss = loss_of(which, 0, ranks)
                loss.backward()
                return hvd.allreduce(loss.detach()) if of is optimizer else loss

            return compute

        for _ in range(2):
            optimizer.step(closure(model, optimizer, range(rank, rank + 1)))
            plain.step(closure(serial, plain, range(2)))
        check_equal(model, serial, near=1e-9)

    on_ranks(2, main)


def test_a_scheduler_and_hooks_see_the_optimizer() -> None:
    def main() -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        seen: list[str] = []
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, 0, range(1)).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        assert seen == ["step", "step"]

    on_ranks(2, main)


def test_a_set_of_ranks_trains_alone() -> None:
    def main() -> None:
        rank = hvd.rank()
        pair = hvd.add_process_set([0, 2])
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["sgd"](model.parameters()), process_set=pair
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, range(rank, rank + 1)).backward()
            optimizer.step()
        serial = model_of()
        plain = MAKERS["sgd"](serial.parameters())
        mine = [0, 2] if pair.included() else [1]
        for step in range(3):
            plain.zero_grad()
            losses = [loss_of(serial, step, range(r, r + 1)) for r in mine]
            (sum(losses) / len(losses)).backward()
            plain.step()
        check_equal(model, serial)

    on_ranks(3, main)


def test_adasum_adds_the_ranks_changes() -> None:
    def main() -> None:
        rank = hvd.rank()
        model = model_of()
        alone = [model_of() for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum
        )
        assert optimizer.backward_passes_per_step == 1
        for step in range(3):
            for other, r in zip(alone, range(2), strict=True):
                other.load_state_dict(copy.deepcopy(model.state_dict()))
                plain = torch.optim.SGD(other.parameters(), lr=0.1)
                loss_of(other, step, range(r, r + 1)).backward()
                plain.step()
            starts = [each.detach().clone() for each in model.parameters()]
            optimizer.zero_grad()
            loss_of(model, step, range(rank, rank + 1)).backward()
            optimizer.synchronize()
            optimizer.step()
            every = zip(
                *(model.parameters(), starts, *(m.parameters() for m in alone)),
                strict=True,
            )
            for own, start, *others in every:
                a, b = (each.detach() - start for each in others)
                dot = (a * b).sum()
                of_a = 1 - dot / (2 * a.square().sum())
                of_b = 1 - dot / (2 * b.square().sum())
                right = start + of_a * a + of_b * b
                torch.testing.assert_close(own.detach(), right, rtol=NEAR, atol=NEAR)
            for other in alone:
                other.zero_grad()
        with pytest.raises(UsageError, match="its step adds"):
            optimizer.skip_synchronize()

    on_ranks(2, main)


def test_wrong_arguments_are_refused() -> None:
    def main() -> None:
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs = [*model.named_parameters()]
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"named_parameters": [p for _, p in pairs]}, "must have pairs"),
            ({"named_parameters": [("a", p) for _, p in pairs]}, "more than once: a;"),
            ({"named_parameters": pairs[1:]}, "lacks 1 parameters"),
            ({"backward_passes_per_step": 0}, "must be a whole number above 0"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=hvd.Average alone"),
            ({"op": "sum"}, "must be such as"),
            ({"groups": -1}, "groups=-1 must be"),
            ({"groups": [[pairs[0][1]], [pairs[0][1]]]}, "each once"),
        ]
        for arguments, match in wrong:
            with pytest.raises(UsageError, match=match):
                hvd.DistributedOptimizer(plain, **arguments)
        with pytest.raises(UsageError, match="is no optimizer"):
            hvd.DistributedOptimizer(model)
        with pytest.warns(DeprecationWarning, match="old name of groups"):
            hvd.DistributedOptimizer(plain, num_groups=2)

    on_ranks(1, main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_are_normalized_over_all_ranks(size: int) -> None:
    def batch(rank: int) -> Any:
        return drawn_in(rank, 1 + rank, 3, 2)

    def main() -> None:
        rank = hvd.rank()
        norm, plain = hvd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
        x = batch(rank).requires_grad_()
        whole = torch.cat([batch(r) for r in range(size)]).requires_grad_()
        y, right = norm(x), plain(whole)
        functional.silu(y).sum().backward()
        functional.silu(right).sum().backward()
        begin = sum(1 + r for r in range(rank))
        own = slice(begin, begin + 1 + rank)
        near: dict[str, float] = {"rtol": NEAR, "atol": NEAR}
        torch.testing.assert_close(y, right[own], **near)
        torch.testing.assert_close(x.grad, whole.grad[own], **near)
        torch.testing.assert_close(norm.running_mean, plain.running_mean, **near)
        torch.testing.assert_close(norm.running_var, plain.running_var, **near)
        summed = hvd.allreduce(norm.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(summed, plain.weight.grad, **near)
        assert int(norm.num_batches_tracked) == 1
        torch.testing.assert_close(norm.eval()(x), plain.eval()(whole)[own], **near)
        with pytest.raises(UsageError, match="a batch and channels"):
            norm(torch.ones(3).double())

    on_ranks(size, main)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_scheduler_of_the_given_optimizer_goes_on(op: hvd.ReduceOp) -> None:
    """Its step, which it puts into the optimizer's fields, hides no reduction."""

    def trained(early: bool) -> Any:
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = None
        if early:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, op=op)
        if not early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, range(hvd.rank(), hvd.rank() + 1)).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
        return model

    def main() -> None:
        early, late = trained(True), trained(False)
        check_equal(early, late)
        mine = torch.cat([p.detach().flatten() for p in early.parameters()])
        assert torch.equal(hvd.broadcast(mine, 0), mine)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler's, of a wrong order
        on_ranks(2, main)


def test_hooks_run_once_after_a_state_was_loaded() -> None:
    def main() -> None:
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model_of().parameters()))
        seen: list[str] = []
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert seen == ["step"]

    on_ranks(1, main)


def test_an_optimizer_needs_a_session_and_a_set_of_it() -> None:
    plain = MAKERS["sgd"](model_of().parameters())
    with pytest.raises(UsageError, match=r"call hvd\.init\(\) first"):
        hvd.DistributedOptimizer(plain)

    def main() -> None:
        for wrong, match in (
            (hvd.ProcessSet([0]), "was not added"),
            ([0], "must be a ProcessSet"),
        ):
            with pytest.raises(UsageError, match=match):
                hvd.DistributedOptimizer(plain, process_set=wrong)  # type: ignore[arg-type]

    on_ranks(1, main)


def test_a_rank_without_a_sparse_gradient_needs_dense_ones() -> None:
    def trained(as_dense: bool) -> tuple[Any, Any]:
        table = nn.Embedding(6, 2, sparse=True).double()
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense
        )
        if hvd.rank() == 0:
            table(torch.tensor([2])).sum().backward()
        return table, optimizer

    def main() -> None:
        _, optimizer = trained(False)
        with pytest.raises(MismatchError, match=r"(?s)gradient.*sparse_as_dense"):
            optimizer.step()
        optimizer.zero_grad()
        table, optimizer = trained(True)
        optimizer.step()
        right = torch.ones(6, 2, dtype=torch.float64)
        right[2] = 0.5
        assert torch.equal(table.weight.detach(), right)

    on_ranks(2, main, limit_s=240)


@pytest.mark.parametrize("what", ["load_state_dict", "set_backward_passes_per_step"])
def test_no_gradient_under_way_is_forgotten(what: str) -> None:
    def main() -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
        given = optimizer.state_dict() if what == "load_state_dict" else 1
        loss_of(model, 0, range(1)).backward()
        with pytest.raises(UsageError, match=rf"{what}\(\) came after backward"):
            getattr(optimizer, what)(given)
        optimizer.step()
        getattr(optimizer, what)(given)
        loss_of(model, 0, range(1)).backward()
        optimizer.step()

    on_ranks(2, main)


class Failing(hvd.Compression.none):
    """A compression of a program's that fails on rank 1, where a flag says so."""

    fails_at = ""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        cls.fail("compress")
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:  # type: ignore[override]
        cls.fail("decompress")
        return tensor

    @classmethod
    def fail(cls, at: str) -> None:
        if cls.fails_at == at and hvd.rank() == 1:
            raise ValueError(f"cannot {at}")


@pytest.mark.parametrize("at", ["compress", "decompress"])
def test_an_optimizer_goes_on_after_an_error(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "fails_at", at)

    def main() -> None:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["sgd"](model.parameters()), compression=Failing
        )
        error = raised_by(optimizer.step)
        if hvd.rank() == 1:
            assert isinstance(error, ValueError)
            Failing.fails_at = ""
        elif at == "compress":
            assert isinstance(error, RefusedError)
            assert "cannot compress" in str(error)
        optimizer.zero_grad()
        loss_of(model, 0, range(1)).backward()
        optimizer.step()

    on_ranks(2, main, limit_s=240)


def test_a_closure_may_follow_a_part_of_a_backward_pass() -> None:
    """Also where one rank alone has sent gradients."""

    def main() -> None:
        rank = hvd.rank()
        model, serial = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
        plain = MAKERS["sgd"](serial.parameters())
        if rank == 0:
            model[4].bias.sum().backward()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0, range(rank, rank + 1))
            loss.backward()
            return loss

        optimizer.step(closure)
        loss_of(serial, 0, range(2)).backward()
        plain.step()
        check_equal(model, serial)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    on_ranks(2, main, limit_s=240)


def test_normalization_meets_ranks_that_wait_for_something_else() -> None:
    def main() -> None:
        norm = hvd.SyncBatchNorm(3).double()
        x = drawn_in(hvd.rank(), 2, 3).requires_grad_()

        def both(first: Callable[[], Any], handle: Any, then: bool) -> Any:
            if then:
                hvd.synchronize(handle)
            found = first()
            hvd.synchronize(handle)
            return found

        for step in range(2):
            handle = hvd.allreduce_async(torch.ones(2), name="x")
            y = both(lambda: norm(x), handle, hvd.rank() == step)
            handle = hvd.allreduce_async(torch.ones(2), name="x")
            both(functional.silu(y).sum().backward, handle, hvd.rank() == step)
        if hvd.rank() == 1:
            with pytest.raises(MismatchError, match=r"rank 0 called join\(\)"):
                norm(x)
        hvd.join()

    on_ranks(2, main, limit_s=240)
