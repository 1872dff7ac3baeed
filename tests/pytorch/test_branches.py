# SPDX-License-Identifier: Apache-2.0
"""Branches on different ranks compute and learn what one process does."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from branch_cases import (
    FEATURES,
    Network,
    compare,
    makers,
    product,
    serial_of,
)
from recorded import logs_of
from science_cases import sent_between_barriers
from tensor3d_cases import NEAR, drawn_in
from torch import nn

import commrt.trace
from commrt.errors import RefusedError, UsageError
from commrt.layers.branches import (
    Branches,
    load_state_dict,
    shares,
    state_dict,
    sync_gradients,
)
from commrt.layers.branches.placement import place
from commrt.local import run

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("samples", ["own", "all"])
@pytest.mark.parametrize("join", ["sum", "concat", product])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", RANKS)
def test_branches_are_those_of_one_process(
    ranks: int, number: int, join: Any, samples: str
) -> None:
    found = compare(ranks, number, samples=samples, join=join)
    assert max(found.values()) < NEAR, found


@pytest.mark.parametrize(
    ("sizes", "costs"), [([1, 2, 5], None), ([6, 1, 1], None), (None, [1, 9.5, 2])]
)
def test_three_branches_on_eight_ranks(sizes: Any, costs: Any) -> None:
    found = compare(8, 3, sizes=sizes, costs=costs)
    assert max(found.values()) < NEAR, found


@pytest.mark.parametrize("counts", [(0, 0, 4), (0, 0, 0), (1, 0, 0), (7, 1, 0)])
def test_ranks_without_samples_serve_the_others(counts: tuple[int, ...]) -> None:
    for more in ({}, {"sizes": [1, 2]}):
        found = compare(3, 2, counts=counts, **more)
        assert max(found.values()) < NEAR, found


def test_where_branches_lie() -> None:
    assert shares([1, 1, 1], 8) == [3, 3, 2]
    assert shares([1, 9.5, 2], 8) == [1, 5, 2]
    assert place([1, 5, 2, 2], None, 2).ranks == ((1,), (0,), (1,), (1,))
    assert place([1, 1], [1, 3], 4).ranks == ((0,), (1, 2, 3))
    assert place([1, 1], [1, 3], 4).samples(10, 4) == [(0, 10), (0, 3), (3, 6), (6, 10)]


def test_one_rank_has_the_bits_of_the_plain_module() -> None:
    serial = serial_of(3)
    x = drawn_in(1, 6, FEATURES)

    def main(comm: Any) -> None:
        model = Network(Branches(makers(3), comm))
        model.load_state_dict(serial.state_dict())
        assert torch.equal(model(x), serial(x))

    run(1, main)


class Ignores(nn.Module):
    """A branch whose output does not depend on its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ones."""
        return torch.ones(len(x), 4, dtype=x.dtype)


def test_branches_may_ignore_their_input_be_frozen_or_have_deeper_outputs() -> None:
    def main(comm: Any) -> None:
        made: dict[str, Any] = {
            "linear": lambda: nn.Linear(FEATURES, 4).double().requires_grad_(False),
            "ignores": Ignores,
        }
        layer = Branches(made, comm, sizes=[2, 1])
        x = drawn_in(comm.rank, 3, FEATURES).requires_grad_()
        layer(x).sum().backward()
        sync_gradients(layer)
        assert x.grad.abs().sum() > 0
        plain = x.detach()  # no gradient is sent for it
        layer(plain).sum().backward()
        layer.close()
        deep = {
            "a": nn.Unflatten(1, (1, FEATURES)),
            "b": nn.Unflatten(1, (1, FEATURES)),
        }
        with torch.no_grad():
            wide = Branches(deep, comm, join="concat", dim=1)
            y = wide(x)
        assert torch.equal(y, torch.stack([x, x], 1))
        assert not y.requires_grad

    run(3, main)


def test_means_of_losses_and_gradients_that_are_summed_once() -> None:
    serial = serial_of(2)
    x = drawn_in(9, 8, FEATURES)
    serial(x).square().mean().backward()
    right = dict(serial.named_parameters())

    def main(comm: Any) -> None:
        model = Network(Branches(makers(2), comm, sizes=[1, 3]))
        load_state_dict(model, serial.state_dict())
        own = x[2 * comm.rank : 2 * comm.rank + 2]
        model(own).square().mean().backward()
        sync_gradients(model)
        for name, parameter in model.named_parameters():
            assert (parameter.grad - right[name].grad).abs().max() < NEAR
        with pytest.raises(UsageError, match=r"summed|another rank"):
            sync_gradients(model)
        with pytest.raises(UsageError, match="0 Branches"):
            sync_gradients(nn.Linear(2, 2))

    run(4, main)


@pytest.mark.parametrize(("ranks", "after"), [(1, 4), (4, 2), (3, 1), (2, 8)])
def test_states_are_those_of_the_serial_module(ranks: int, after: int) -> None:
    def save(comm: Any) -> Any:
        torch.manual_seed(comm.rank)
        model = Network(Branches(makers(3), comm))
        return state_dict(model)

    states = run(ranks, save)
    names = {*serial_of(3).state_dict()}
    for state in states:
        assert {*state} == names
        for name in names - {"first.weight", "first.bias"}:
            assert torch.equal(state[name], states[0][name])
    serial = serial_of(3)
    serial.load_state_dict(states[0])
    x = drawn_in(2, 4, FEATURES)

    def load(comm: Any) -> None:
        model = Network(Branches(makers(3), comm))
        load_state_dict(model, states[0])
        assert torch.allclose(model(x), serial(x), rtol=NEAR, atol=NEAR)
        model.load_state_dict(states[0])
        with pytest.raises(UsageError, match=r"the model has no branches\.b9"):
            load_state_dict(model, {**states[0], "branches.b9": x})
        with pytest.raises(RuntimeError, match=r"branches\.c"):
            model.load_state_dict({**states[0], "branches.c.weight": x})

    run(after, load)


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("samples", ["own", "all"])
@pytest.mark.parametrize(
    ("ranks", "number", "sizes"), [(2, 2, None), (4, 2, [1, 3]), (3, 5, None)]
)
def test_a_call_sends_the_bytes_of_its_formula(
    ranks: int, number: int, sizes: Any, samples: str
) -> None:
    given = [4, 0, 3, 5][:ranks] if samples == "own" else [6] * ranks

    def main(comm: Any) -> Any:
        layer = Branches(makers(number, "concat"), comm, sizes=sizes, join="concat",
                         samples=samples)  # fmt: skip
        x = drawn_in(comm.rank, given[comm.rank], FEATURES).requires_grad_()
        layer(x).sum().backward()  # forms are known from then on
        comm.barrier()
        layer(x).sum().backward()
        comm.barrier()
        return layer.placement

    with commrt.trace.record() as recording:
        (placement, *_) = run(ranks, main)
    num = sum(given) if samples == "own" else given[0]
    computed = placement.samples(num, ranks)
    start = 0
    for rank, log in enumerate(logs_of(recording)):
        own = start, start + given[rank]
        start = own[1]
        width = sum(4 + at % 3 for at in placement.of(rank)) * 8
        low, high = computed[rank]
        back = (high - low) * width
        each = FEATURES * 8
        right: Counter[str] = Counter({"allgather": 24 * ranks + 16 * ranks})
        if samples == "own":
            leaving = sum(max(0, min(own[1], b) - max(own[0], a)) for a, b in computed)
            coming = sum(
                max(0, min(own[1], b) - max(own[0], a))
                * sum(4 + at % 3 for at in placement.of(other))
                * 8
                for other, (a, b) in enumerate(computed)
            )
            right["alltoallv"] = leaving * each + back + coming + (high - low) * each
        else:
            right["allgatherv"] = sum(
                (b - a) * sum(4 + at % 3 for at in placement.of(other)) * 8
                for other, (a, b) in enumerate(computed)
            )
            right["allreduce"] = num * each
        assert sent_between_barriers(log) == +right


class Failing(nn.Module):
    """A branch that fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raise an error."""
        raise ArithmeticError("no such number")


def test_an_error_of_a_branch_ends_all_ranks_with_its_name() -> None:
    def main(comm: Any) -> None:
        made: dict[str, Any] = {"good": lambda: nn.Identity(), "bad": Failing}
        layer = Branches(made, comm, sizes=[2, 1])
        x = torch.ones(2, FEATURES)
        kind = ArithmeticError if comm.rank == 2 else RefusedError
        says = "no such number" if comm.rank == 2 else r"rank 2 branch 'bad': Arith"
        with pytest.raises(kind, match=says):
            layer(x)
        fits = {"a": nn.Identity(), "b": nn.Identity()}
        other = Branches(fits, comm)
        assert torch.equal(other(x), 2 * x)
        with pytest.raises(UsageError, match=r"rank 1 has .*rank 0 has"):
            other(torch.ones(2, FEATURES + comm.rank))
        with pytest.raises(UsageError, match=r"refused its arguments|must be a tensor"):
            other(x if comm.rank else 3)

    run(3, main)


def test_arguments_that_do_not_fit() -> None:
    def main(comm: Any) -> None:
        two: dict[str, Any] = {"a": nn.Identity(), "b": nn.Identity()}
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ({}, {}, "at least 1"),
            ({"a.b": nn.Identity()}, {}, "without dots"),
            ({"forward": nn.Identity()}, {}, "no attribute"),
            ({"a": 3}, {}, "branch 'a' is 3"),
            ({"a": lambda: 3}, {}, "returned 3|refused"),
            (two, {"sizes": [1, 2]}, "with the sum 2"),
            (two, {"costs": [1]}, "2 numbers above 0"),
            (two, {"costs": [1, -1]}, "2 numbers above 0"),
            (two, {"join": "max"}, "join='max'"),
            (two, {"dim": 0}, "dim=0"),
            (two, {"samples": "some"}, "samples='some'"),
        ]
        for branches, more, says in wrong:
            with pytest.raises(UsageError, match=says):
                Branches(branches, comm, **more)
        with pytest.raises(UsageError, match="must be a communicator"):
            Branches(two, None)  # type: ignore[arg-type]
        short = {"a": nn.Flatten(0), "b": nn.Flatten(0)}
        with pytest.raises(UsageError, match="first dimension is that of the samples"):
            Branches(short, comm)(torch.ones(2, 3))

    run(2, main)


@pytest.mark.parametrize(
    "name", ["samples", "names", "training", "placement", "branch_comm", "grid", "_dim"]
)
def test_names_of_a_modules_own_attributes_are_refused_on_all_ranks(name: str) -> None:
    def main(comm: Any) -> None:
        made = {"a": nn.Identity(), name: nn.Linear(2, 2)}
        with pytest.raises(UsageError, match="no attribute"):
            Branches(made, comm)
        Branches({"a": nn.Identity(), "b": nn.Identity()}, comm).close()

    run(2, main)


def test_branches_that_share_tensors_are_refused() -> None:
    def main(comm: Any) -> None:
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        with pytest.raises(UsageError, match=r"'a' and 'b' share"):
            Branches({"a": one, "b": one}, comm)
        other.weight = one.weight
        with pytest.raises(UsageError, match=r"'a' and 'b' share"):
            Branches({"a": one, "b": other}, comm)
        other.weight = nn.Parameter(one.weight.detach().T)
        with pytest.raises(UsageError, match=r"'a' and 'b' share"):
            Branches({"a": one, "b": other}, comm)
        alone: Any = {"a": lambda: one, "b": lambda: one, "c": nn.Identity()}
        if comm.size == 1:
            with pytest.raises(UsageError, match=r"'a' and 'b' share"):
                Branches(alone, comm)

    run(1, main)
    run(2, main)


def test_a_parameter_of_two_branches_layers_is_refused_on_all_ranks() -> None:
    def main(comm: Any) -> None:
        shared = nn.Linear(3, 3)
        made = [
            Branches({"a": shared, "b": nn.Linear(3, 3)}, comm),
            Branches({"c": nn.Linear(3, 3), "d": shared}, comm, sizes=[1, 2]),
        ]
        with pytest.raises((UsageError, RefusedError), match=r"share|another rank"):
            sync_gradients(nn.Sequential(*made))

    run(3, main)


def test_ranks_of_a_branch_have_equal_modules() -> None:
    def main(comm: Any) -> None:
        def made(of: Any) -> dict[str, Any]:
            return {"a": lambda: nn.Identity(), "b": lambda: of(comm.rank == 2)}

        for of in (
            lambda odd: nn.Linear(3, 4 if odd else 3),
            lambda odd: nn.Linear(3, 3, bias=not odd),
            lambda odd: nn.Linear(3, 3).requires_grad_(not odd),
            lambda odd: nn.Linear(3, 3).to(torch.float64 if odd else torch.float32),
            lambda odd: (
                nn.Sequential(nn.Identity(), *[nn.Linear(3, 3)] * (1 + odd))
                if not odd
                else nn.Sequential(nn.Linear(3, 3))
            ),
        ):
            with pytest.raises(UsageError, match=r"branch 'b' rank 2 has .* rank 1"):
                Branches(made(of), comm, sizes=[1, 2])
        with pytest.raises(UsageError, match=r"lazy|refused"):
            Branches(made(lambda odd: nn.LazyLinear(3)), comm, sizes=[1, 2])
        layer = Branches(made(lambda odd: nn.Linear(3, 3)), comm, sizes=[1, 2])
        layer(torch.ones(4, 3)).sum().backward()
        if comm.rank == 2:
            layer.b.bias.requires_grad_(False)
        kind = RefusedError if comm.rank == 0 else UsageError
        with pytest.raises(kind):
            sync_gradients(layer)
        if comm.rank == 2:
            layer.b.bias.requires_grad_(True)
        sync_gradients(layer)

    run(3, main)


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_that_do_not_join_are_refused_whatever_the_number_of_samples(
    ranks: int,
) -> None:
    def main(comm: Any) -> None:
        flat = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        column, wide, deep = nn.Linear(3, 1), nn.Linear(3, 3), nn.Unflatten(1, (1, 3))
        wrong: list[tuple[Any, Any, dict[str, Any]]] = [
            (flat, copy.deepcopy(flat), {"join": "concat"}),
            (wide, flat, {}),
            (wide, deep, {}),
            (wide, nn.Linear(3, 2), {}),
            (wide, deep, {"join": "concat"}),
            (column, copy.deepcopy(wide), {"join": "concat", "dim": 2}),
            (column, copy.deepcopy(wide), {"join": "concat", "dim": -2}),
        ]
        for one, other, more in wrong:
            layer = Branches({"a": one, "b": other}, comm, **more)
            for count in (3, 1 + 2 * comm.rank):
                with pytest.raises(UsageError, match="does not fit outputs"):
                    layer(torch.ones(count, 3))
        fits = Branches({"a": column, "b": wide}, comm)
        assert fits(torch.ones(2, 3)).shape == (2, 3)
        with pytest.raises((UsageError, RefusedError), match="first dimension"):
            Branches({"a": wide, "b": Total()}, comm)(torch.ones(2, 3))

    run(ranks, main)


class Total(nn.Module):
    """A branch whose output has no dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x.sum()
