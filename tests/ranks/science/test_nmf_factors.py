# SPDX-License-Identifier: Apache-2.0
"""Factors are those of one process, and the objective never rises."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from science_cases import RANKS, cut_of, dense_factors, dense_objective

from commrt.errors import UsageError
from commrt.local import run
from commrt.science.nmf import (
    Factorization,
    GraphKernel,
    GraphNMF,
    factorization,
    updates,
)

Array = np.ndarray[Any, Any]
KERNELS = (GraphKernel(2), GraphKernel(4, 0.5), GraphKernel(3, 2.0))


def data_of(num: int, features: int, seed: int) -> Array:
    """Return rows of three kinds, and some zeros."""
    rng = np.random.default_rng([seed, num, features])
    kinds = rng.uniform(size=(3, features)) ** 3
    x = kinds[rng.integers(0, 3, num)] + 0.1 * rng.uniform(size=(num, features))
    return x * (rng.uniform(size=x.shape) < 0.9)


def factored(
    size: int,
    x: Array,
    *,
    seed: int = 0,
    kernels: tuple[GraphKernel, ...] = KERNELS,
    num_components: int = 4,
    graph_weight: float = 2.0,
    num_steps: int = 40,
    start: Factorization | None = None,
    tolerance: float = 0.0,
    **options: Any,
) -> tuple[Factorization, list[Factorization]]:
    """Return the factors with all rows of W, and each rank's."""
    pieces = cut_of(len(x), size, seed)

    def main(comm: Any) -> Factorization:
        own = pieces[comm.rank]
        model = GraphNMF(
            comm,
            num_components,
            kernels=kernels,
            graph_weight=graph_weight,
            **options,
        )
        begin = start
        if start is not None:
            rows = start.coefficients[own]
            begin = Factorization(rows, start.components, start.kernel_weights)
        return model.fit(x[own], num_steps=num_steps, start=begin, tolerance=tolerance)

    ranks = run(size, main)
    whole = np.concatenate([each.coefficients for each in ranks])
    first = ranks[0]
    return (
        Factorization(whole, first.components, first.kernel_weights, first.objectives),
        ranks,
    )


def assert_alike(one: Factorization, other: Factorization, rtol: float) -> None:
    for name in ("coefficients", "components", "kernel_weights", "objectives"):
        ours, theirs = (np.array(getattr(each, name)) for each in (one, other))
        atol = rtol * np.max(np.abs(theirs), initial=0.0)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("kernels", [KERNELS, KERNELS[:1], ()])
@pytest.mark.parametrize("power", [1.3, 2.0, 6.0])
def test_factors_are_those_of_plain_matrices(
    kernels: tuple[GraphKernel, ...], power: float, seed: int
) -> None:
    x = data_of(30, 5, seed)
    start, _ = factored(1, x, kernels=kernels, num_steps=0, power=power)
    right = dense_factors(x, start, kernels, 2.0, power, 15)
    for size in (1, 3):
        found, _ = factored(
            size, x, kernels=kernels, num_steps=15, power=power, seed=seed
        )
        assert_alike(found, right, 1e-10)


@pytest.mark.parametrize("size", RANKS[1:])
def test_the_number_of_ranks_changes_no_factor(size: int, seed: int) -> None:
    x = data_of(60, 6, seed)
    alone, _ = factored(1, x, num_steps=100)
    found, ranks = factored(size, x, num_steps=100, seed=seed)
    assert_alike(found, alone, 1e-10)
    for each in ranks:  # what all ranks have, they have to the bit
        np.testing.assert_array_equal(each.components, found.components)
        np.testing.assert_array_equal(each.kernel_weights, found.kernel_weights)
        assert each.objectives == found.objectives


def test_ranks_that_round_differently_have_one_h(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H, the kernels' weights and the objective are those of rank 0."""

    def rough(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            off = threading.current_thread().name == "rank1"
            return function(*arguments) * (1.0 + 1e-13 * off)

        return call

    for name in ("multiplied", "simplex_step", "effective_weights"):
        monkeypatch.setattr(factorization, name, rough(getattr(updates, name)))
    _, (first, second) = factored(2, data_of(40, 5, 0), num_steps=20)
    np.testing.assert_array_equal(first.components, second.components)
    np.testing.assert_array_equal(first.kernel_weights, second.kernel_weights)
    assert first.objectives == second.objectives


@pytest.mark.parametrize("size", [1, 3])
def test_a_kernel_without_weights_is_refused(size: int) -> None:
    """It would have no roughness, and so take all weight from the others."""
    kernels = (GraphKernel(5), GraphKernel(5, width=0.001))
    with pytest.raises(UsageError, match=r"width=0\.001.* no weight on any edge"):
        factored(size, data_of(40, 5, 0), kernels=kernels)


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("graph_weight", [0.0, 1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("power", [1.01, 2.0, 9.0, 1000.0])
@pytest.mark.parametrize("size", [1, 3])
def test_the_objective_never_rises(
    size: int, power: float, graph_weight: float, seed: int
) -> None:
    x = data_of(45, 5, seed)
    found, _ = factored(
        size, x, power=power, graph_weight=graph_weight, num_steps=150, seed=seed
    )
    objectives = np.array(found.objectives)
    assert len(objectives) == 151
    # The objective is a difference of terms as large as the square of X.
    room = 1e-13 * ((x**2).sum() + objectives[0])
    assert np.diff(objectives).max() <= room
    assert objectives[-1] < objectives[0]
    assert (found.coefficients >= 0).all()
    assert (found.components >= 0).all()
    assert found.kernel_weights.sum() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_the_objective_is_that_of_its_formula(size: int) -> None:
    x = data_of(30, 5, 1)
    for kernels, weight in ((KERNELS, 2.0), ((), 2.0), (KERNELS, 0.0)):
        found, _ = factored(size, x, kernels=kernels, graph_weight=weight, num_steps=9)
        right = dense_objective(x, found, kernels, weight, 2.0)
        assert found.objectives[-1] == pytest.approx(right, rel=1e-11)


def test_a_matrix_of_low_rank_is_found() -> None:
    rng = np.random.default_rng(2)
    x = rng.uniform(size=(50, 2)) @ rng.uniform(size=(2, 6))
    found, _ = factored(2, x, kernels=(), num_components=2, num_steps=3000)
    off = x - found.coefficients @ found.components
    assert (off**2).sum() < 1e-5 * (x**2).sum()


def test_a_graph_makes_near_rows_alike() -> None:
    x = data_of(60, 6, 0)
    rough, smooth = (
        factored(1, x, graph_weight=weight, kernels=KERNELS[:1], num_steps=300)[0]
        for weight in (0.0, 50.0)
    )
    ratios = []
    for found in (rough, smooth):
        scaled = found.coefficients * np.linalg.norm(found.components, axis=1)
        part = dense_objective(
            x,
            Factorization(scaled, np.zeros_like(found.components), np.ones(1)),
            KERNELS[:1],
            1.0,
            2.0,
        ) - float((x**2).sum())
        ratios.append(part / (scaled**2).sum())
    assert ratios[1] < 0.3 * ratios[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_going_on_takes_the_same_steps(size: int, seed: int) -> None:
    """Also on another number of ranks than before."""
    x = data_of(40, 5, seed)
    whole, _ = factored(1, x, num_steps=30)
    half, _ = factored(2, x, num_steps=12, seed=seed)
    found, _ = factored(size, x, num_steps=18, start=half, seed=seed)
    assert found.objectives[0] == pytest.approx(half.objectives[-1], rel=1e-12)
    assert found.objectives[-1] == pytest.approx(whole.objectives[-1], rel=1e-10)
    np.testing.assert_allclose(found.coefficients, whole.coefficients, rtol=1e-9)


@pytest.mark.parametrize("listed", [{0}, {0, 1}])
def test_a_start_may_be_lists(listed: set[int]) -> None:
    x = data_of(20, 5, 0)
    begun, _ = factored(2, x, num_steps=2)
    right, _ = factored(2, x, num_steps=3, start=begun)
    pieces = slice(0, 8), slice(8, 20)

    def main(comm: Any) -> Factorization:
        own = pieces[comm.rank]
        parts: list[Any] = [
            begun.coefficients[own],
            begun.components,
            begun.kernel_weights,
        ]
        if comm.rank in listed:
            parts = [part.tolist() for part in parts]
        model = GraphNMF(comm, 4, kernels=KERNELS, graph_weight=2.0)
        start = Factorization(*parts)
        return model.fit(x[own], num_steps=3, start=start)

    for found in run(2, main):
        np.testing.assert_allclose(found.components, right.components, rtol=1e-9)


def test_a_start_is_not_written_to() -> None:
    x = data_of(20, 5, 0)
    start, _ = factored(1, x, num_steps=2)
    kept = start.coefficients.copy(), start.components.copy()
    factored(1, x, num_steps=2, start=start)
    np.testing.assert_array_equal(start.coefficients, kept[0])
    np.testing.assert_array_equal(start.components, kept[1])


@pytest.mark.parametrize("size", [1, 3])
def test_a_tolerance_ends_the_fit_on_all_ranks(size: int) -> None:
    x = data_of(40, 5, 0)
    _, ranks = factored(size, x, num_steps=500, tolerance=1e-3)
    (steps,) = {len(each.objectives) for each in ranks}
    assert 2 < steps < 400
    before, after = ranks[0].objectives[-2:]
    assert before - after < 1e-3 * before
    previous = ranks[0].objectives[-3:-1]
    assert previous[0] - previous[1] >= 1e-3 * previous[0]


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_fewer_rows_than_ranks_and_components(num: int, size: int) -> None:
    x = data_of(num, 3, 1) + 0.1
    alone, _ = factored(1, x, num_steps=10)
    found, _ = factored(size, x, num_steps=10)
    assert_alike(found, alone, 1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_a_matrix_of_zeros_has_factors(size: int) -> None:
    found, _ = factored(size, np.zeros((8, 3)), num_steps=5)
    assert found.objectives == (0.0,) * 6
    assert not found.coefficients.any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_components": 0}, "num_components=0"),
        ({"num_components": 2.5}, "num_components=2.5"),
        ({"kernels": ("heat",)}, "must be GraphKernels"),
        ({"kernels": 3}, "must be GraphKernels"),
        ({"graph_weight": 10**400}, "graph_weight"),
        ({"power": 1001.0}, "at most 1000"),
        ({"graph_weight": -1.0}, "graph_weight=-1.0"),
        ({"graph_weight": "much"}, "graph_weight"),
        ({"power": 1.0}, "power=1.0"),
        ({"power": float("nan")}, "power"),
        ({"seed": -1}, "seed=-1"),
        ({"num_steps": -1}, "num_steps=-1"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_wrong_arguments_of_factors_are_refused(
    arguments: dict[str, Any], says: str
) -> None:
    options = {"seed": 0, **arguments}
    number = options.pop("seed")

    def main(comm: Any) -> None:
        fit = {n: options.pop(n) for n in ("num_steps", "tolerance") if n in options}
        components = options.pop("num_components", 2)
        GraphNMF(comm, components, seed=number, **options).fit(np.ones((3, 2)), **fit)

    with pytest.raises(UsageError, match=says):
        run(1, main)


def test_factors_need_a_communicator() -> None:
    with pytest.raises(UsageError, match="must be a communicator"):
        GraphNMF(None, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.array([[1.0, -1e-9]]), "negative"),
        (np.ones((1, 3)), "columns of x"),
        (np.array([[1.0, np.nan]]), "NaN"),
        ([[1.0], [1.0, 2.0]], "no array"),
    ],
)
def test_all_ranks_refuse_a_matrix_that_is_wrong_on_one(wrong: Any, says: str) -> None:
    def main(comm: Any) -> str:
        x = wrong if comm.rank == 1 else np.ones((2, 2))
        with pytest.raises(UsageError) as raised:
            GraphNMF(comm, 2).fit(x)
        comm.barrier()
        return str(raised.value)

    first, second = run(2, main)
    assert says in second
    assert "rank 1" in first


@pytest.mark.parametrize(
    "changed",
    [
        {"coefficients": np.ones((3, 2))},
        {"components": np.ones((2, 3))},
        {"components": -np.ones((2, 2))},
        {"coefficients": np.full((2, 2), np.nan)},
        {"coefficients": np.ones((2, 2), np.float32)},
        {"kernel_weights": np.ones(2)},
        {"kernel_weights": np.zeros(1)},
        {"kernel_weights": [0.5]},
        {"coefficients": [[1.0], [1.0, 2.0]]},
        {"components": None},
    ],
)
def test_a_wrong_start_on_one_rank_is_refused_by_all(changed: dict[str, Any]) -> None:
    right = {
        "coefficients": np.ones((2, 2)),
        "components": np.ones((2, 2)),
        "kernel_weights": np.ones(1),
    }

    def main(comm: Any) -> str:
        parts = {**right, **changed} if comm.rank == 0 else right
        with pytest.raises(UsageError) as raised:
            GraphNMF(comm, 2).fit(np.ones((2, 2)), start=Factorization(**parts))
        return str(raised.value)

    first, second = run(2, main)
    assert f"start.{next(iter(changed))}" in first
    assert "rank 0 refused" in second


@pytest.mark.parametrize("name", ["num_steps", "tolerance"])
def test_numbers_beyond_all_floats_on_one_rank_are_refused_by_all(name: str) -> None:
    def main(comm: Any) -> str:
        value = -(10**5000) if comm.rank == 1 else 0
        with pytest.raises(UsageError) as raised:
            GraphNMF(comm, 2).fit(np.ones((2, 2)), **{name: value})
        comm.barrier()
        return str(raised.value)

    first, second = run(2, main)
    assert "rank 1 refused" in first
    assert name in second


def test_equal_settings_of_factors_may_have_different_types() -> None:
    def main(comm: Any) -> int:
        options = [
            ({"graph_weight": 2, "seed": 3}, {"num_steps": 3, "tolerance": 0}),
            (
                {"graph_weight": np.float32(2), "seed": np.int64(3)},
                {"num_steps": np.int64(3), "tolerance": -0.0},
            ),
        ]
        made, fitted = options[comm.rank]
        model = GraphNMF(comm, 2, **made)  # type: ignore[arg-type]
        return len(model.fit(np.ones((2, 2)), **fitted).objectives)  # type: ignore[arg-type]

    assert run(2, main) == [4, 4]


def test_all_ranks_refuse_different_settings_of_factors() -> None:
    def main(comm: Any) -> None:
        GraphNMF(comm, 2, power=2.0 + comm.rank).fit(np.ones((2, 2)))

    with pytest.raises(UsageError, match="settings of rank 1"):
        run(2, main)


def test_no_rows_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one of each"):
        run(2, lambda comm: GraphNMF(comm, 2).fit(np.ones((0, 2))))
