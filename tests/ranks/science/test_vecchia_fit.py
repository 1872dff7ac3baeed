# SPDX-License-Identifier: Apache-2.0
"""A fit finds which dimensions matter, and every number of ranks finds the same."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from science_cases import cut_of, dense_log_likelihood, points_of

from commrt.errors import UsageError
from commrt.local import run
from commrt.science.vecchia import Hyperparameters, ScaledBlockVecchia, VecchiaModel

Array = np.ndarray[Any, Any]


def fitted(
    size: int,
    x: Array,
    y: Array,
    *,
    block_size: int = 12,
    num_neighbors: int = 20,
    kernel: str = "matern52",
    seed: int = 0,
    **options: Any,
) -> list[VecchiaModel]:
    """Return the model of each rank, of an uneven cut."""
    pieces = cut_of(len(x), size, seed)

    def main(comm: Any) -> VecchiaModel:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(
            comm, block_size=block_size, num_neighbors=num_neighbors, kernel=kernel
        )
        return process.fit(x[own], y[own], **options)

    return run(size, main, timeout_s=300)


@pytest.mark.parametrize("size", [1, 3])
def test_length_scales_tell_which_of_ten_dimensions_matter(size: int) -> None:
    """Two do. The others' length scales are many times the width of the data."""
    x, y = points_of(500, 10, noise=0.05)
    new, _ = points_of(200, 10, seed=9)
    truth = np.sin(5.0 * new[:, 0]) + (new[:, 1] - 0.5) ** 2
    mine = cut_of(200, size)
    pieces = cut_of(500, size)

    def main(comm: Any) -> tuple[Hyperparameters, Array]:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, block_size=20, num_neighbors=30)
        model = process.fit(x[own], y[own])
        return model.hyperparameters, model.predict(new[mine[comm.rank]]).mean

    ranks = run(size, main, timeout_s=300)
    values = ranks[0][0]
    first, second, *others = values.length_scales.tolist()
    assert first < second < 6.0
    assert min(others) > 8.0 * second
    assert values.nugget == pytest.approx(0.05**2, rel=0.25)
    off = np.concatenate([mean for _, mean in ranks]) - truth
    assert np.sqrt((off**2).mean()) < 0.04 * truth.std()


def test_length_scales_of_a_gaussian_process_are_found() -> None:
    """Of a draw of the process itself; half a thousand points leave some doubt."""
    rng = np.random.default_rng(3)
    x = rng.uniform(size=(500, 2))
    truth = Hyperparameters([0.15, 0.6], 2.0, 0.01)
    scaled = x / truth.length_scales
    r = np.sqrt(3 * ((scaled[:, None] - scaled) ** 2).sum(-1))
    matrix = 2.0 * (1 + r) * np.exp(-r) + 0.01 * np.eye(500)
    y = np.linalg.cholesky(matrix) @ rng.standard_normal(500)
    (model,) = fitted(1, x, y, kernel="matern32", num_neighbors=40, mean=0.0)
    found = model.hyperparameters
    np.testing.assert_allclose(found.length_scales, truth.length_scales, rtol=0.35)
    assert found.variance == pytest.approx(2.0, rel=0.6)
    assert found.nugget == pytest.approx(0.01, rel=0.4)
    exact = dense_log_likelihood("matern32", x, y, found, 0.0)
    assert model.log_likelihood == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_number_of_ranks_takes_the_same_steps(size: int, seed: int) -> None:
    x, y = points_of(100, 3, seed)
    options = {"rounds": 2, "max_steps": 8}
    (alone,) = fitted(1, x, y, **options)
    for model in fitted(size, x, y, seed=seed, **options):
        np.testing.assert_allclose(
            model.hyperparameters.exact, alone.hyperparameters.exact, rtol=1e-10
        )
        assert model.log_likelihood == pytest.approx(alone.log_likelihood, rel=1e-10)
        assert model.num_evaluations == alone.num_evaluations


def test_ranks_that_round_differently_have_the_same_hyperparameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = points_of(60, 2)
    exp = np.exp

    def rough(*arguments: Any, **options: Any) -> Any:
        off = threading.current_thread().name == "rank1"
        return exp(*arguments, **options) * (1.0 + 1e-13 * off)

    monkeypatch.setattr(np, "exp", rough)
    first, second = fitted(2, x, y, rounds=2, max_steps=4)
    assert first.hyperparameters.exact == second.hyperparameters.exact
    assert first.log_likelihood == second.log_likelihood


@pytest.mark.parametrize("num", [2, 3, 6, 12, 49, 1000])
@pytest.mark.parametrize("value", [0.1, -1e9, 1e-30, 0.0])
def test_equal_numbers_have_no_spread(value: float, num: int) -> None:
    """Though their mean is rounded: of three times 0.1 it is not 0.1."""
    x = np.column_stack([np.arange(float(num)), np.full(num, value)])
    y = np.full(num, value)
    (model,) = fitted(1, x, y, rounds=1, max_steps=0, num_neighbors=2)
    found = model.hyperparameters
    assert found.length_scales[1] == pytest.approx(np.sqrt(2.0), rel=1e-12)
    assert found.variance == pytest.approx(1.0, rel=1e-12)


def test_small_spreads_are_those_of_the_data() -> None:
    x = np.column_stack([1.0 + 1e-12 * np.arange(20.0), np.arange(20.0)])
    (model,) = fitted(1, x, x[:, 0], rounds=1, max_steps=0)
    scales = model.hyperparameters.length_scales
    np.testing.assert_allclose(scales, np.sqrt(2.0) * x.std(axis=0), rtol=1e-9)


def test_a_fit_is_not_below_its_start() -> None:
    x, y = points_of(120, 3)
    start = Hyperparameters([1.0, 1.0, 1.0], 1.0, 0.1)
    (begun,) = fitted(1, x, y, start=start, max_steps=0, rounds=1)
    (ended,) = fitted(1, x, y, start=start, rounds=1)
    assert begun.hyperparameters.exact == pytest.approx(start.exact, rel=1e-14)
    assert not begun.has_converged
    assert ended.has_converged
    assert ended.log_likelihood > begun.log_likelihood + 50


@pytest.mark.parametrize("size", [1, 2])
def test_fixed_numbers_stay(size: int) -> None:
    x, y = points_of(80, 2)
    start = Hyperparameters([0.7, 0.9], 1.5, 0.0)
    for model in fitted(
        size, x, y, start=start, fixed=("nugget", "variance"), kernel="matern12"
    ):
        assert model.hyperparameters.nugget == 0.0
        assert model.hyperparameters.variance == 1.5
        assert (model.hyperparameters.length_scales != start.length_scales).all()


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.ones((20, 2)), np.arange(20.0)),  # all at one place
        (np.arange(40.0).reshape(20, 2), np.full(20, 3.0)),  # y is a constant
        (np.array([[1.0, 2.0]]), np.array([5.0])),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_data_without_spread_have_a_fit(x: Array, y: Array, size: int) -> None:
    for model in fitted(size, x, y, rounds=1, max_steps=5):
        assert np.isfinite(model.log_likelihood)
        assert np.isfinite(model.hyperparameters.exact).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"max_steps": -1}, "max_steps=-1"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"fixed": ("width",)}, "must be among length_scales, variance, nugget"),
        ({"fixed": ("nugget",)}, "needs start"),
        ({"fixed": "nugget"}, "must be among"),
        ({"fixed": None}, "must be among"),
        ({"fixed": [np.zeros(2)]}, "must be among"),
        ({"tolerance": 10**400}, "tolerance"),
        ({"mean": 10**400}, "mean="),
        ({"mean": "1"}, "mean="),
        ({"start": Hyperparameters([1.0], 1.0, 0.1)}, "1 length scales, and x has 2"),
        ({"start": Hyperparameters([1.0, 1.0], 1.0, 0.0)}, "nugget=0"),
        ({"start": (1.0, 1.0)}, "must be Hyperparameters"),
        ({"mean": "none"}, "mean="),
        ({"mean": float("inf")}, "mean="),
    ],
)
def test_wrong_arguments_of_a_fit_are_refused(
    options: dict[str, Any], says: str
) -> None:
    x, y = points_of(10, 2)
    with pytest.raises(UsageError, match=says):
        fitted(1, x, y, **options)


def test_all_ranks_refuse_what_one_refuses() -> None:
    x, y = points_of(10, 2)

    def main(comm: Any) -> str:
        process = ScaledBlockVecchia(comm)
        values = y[:-1] if comm.rank == 2 else y
        with pytest.raises(UsageError) as raised:
            process.fit(x, values)
        comm.barrier()
        return str(raised.value)

    first, second, third = run(3, main)
    assert first == second
    assert "rank 2 refused" in first
    assert "9 values, and x 10 rows" in third


@pytest.mark.parametrize("name", ["mean", "tolerance", "rounds", "fixed"])
def test_any_error_about_one_ranks_arguments_is_told_to_all(name: str) -> None:
    """10^5000 is beyond float64, and Python does not even write it."""
    x, y = points_of(10, 2)

    class Unwritable:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    def main(comm: Any) -> str:
        wrong = [Unwritable()] if name == "fixed" else -(10**5000)
        options = {name: wrong} if comm.rank == 1 else {}
        with pytest.raises(UsageError) as raised:
            ScaledBlockVecchia(comm).fit(x, y, **options)
        comm.barrier()
        return str(raised.value)

    first, second = run(2, main)
    assert "rank 1 refused" in first
    assert f"{name}=" in second


def test_none_is_no_hyperparameters() -> None:
    x, y = points_of(10, 2)

    def main(comm: Any) -> None:
        process = ScaledBlockVecchia(comm)
        with pytest.raises(UsageError, match="Hyperparameters, and got None"):
            process.condition(x, y, None)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="Hyperparameters"):
            process.log_likelihood(x, y, (1.0, 1.0))  # type: ignore[arg-type]
        comm.barrier()

    run(2, main)


def test_equal_settings_of_a_process_may_have_different_types() -> None:
    x, y = points_of(20, 2)
    start = [
        Hyperparameters([1.0, 1.0], 1.0, 0.0),
        Hyperparameters(np.ones(2, np.float32), 1, -0.0),
    ]

    def main(comm: Any) -> float:
        r = comm.rank
        kernel = ["matern32", np.str_("matern32")][r]
        process = ScaledBlockVecchia(comm, kernel=kernel, seed=[1, np.int64(1)][r])
        model = process.fit(
            x + r,
            y,
            start=start[r],
            mean=[1, np.float32(1)][r],  # type: ignore[arg-type]
            fixed=[{"nugget", "variance"}, ("variance", "nugget", "nugget")][r],  # type: ignore[arg-type]
            rounds=[1, np.int64(1)][r],
            max_steps=[2, np.int8(2)][r],
            tolerance=[0, -0.0][r],
        )
        model.predict(x, num_neighbors=[5, np.int64(5)][r])
        return model.log_likelihood

    first, second = run(2, main)
    assert first == second


@pytest.mark.parametrize("differing", ["seed", "start", "rounds", "mean"])
def test_all_ranks_refuse_different_settings_of_a_fit(differing: str) -> None:
    x, y = points_of(10, 2)

    def main(comm: Any) -> str:
        more = 1 + comm.rank
        process = ScaledBlockVecchia(comm, seed=more if differing == "seed" else 0)
        options = {
            "seed": {},
            "start": {"start": Hyperparameters([1.0, more], 1.0, 0.1)},
            "rounds": {"rounds": more},
            "mean": {"mean": float(more)},
        }[differing]
        with pytest.raises(UsageError, match="settings of rank 1") as raised:
            process.fit(x, y, **options)
        return str(raised.value)

    assert len({*run(2, main)}) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2.5}, "block_size=2.5"),
        ({"num_neighbors": -1}, "num_neighbors=-1"),
        ({"kernel": "matern42"}, "matern12, matern32"),
        ({"kernel": ["matern12"]}, "matern12, matern32"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_wrong_arguments_of_a_process_are_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        run(1, lambda comm: ScaledBlockVecchia(comm, **options))


def test_a_process_needs_a_communicator() -> None:
    with pytest.raises(UsageError, match="must be a communicator"):
        ScaledBlockVecchia("world")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_points_and_no_dimensions_are_refused(shape: tuple[int, int]) -> None:
    def main(comm: Any) -> None:
        ScaledBlockVecchia(comm).fit(np.zeros(shape), np.zeros(shape[0]))

    with pytest.raises(UsageError, match="at least one of each"):
        run(2, main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_process_sends_no_nan_and_no_infinity(size: int) -> None:
    """So it works where communicators check for them, also where it must refuse."""
    x, y = points_of(40, 2)
    twice = np.repeat(x[:10], 4, axis=0)
    pieces = cut_of(40, size)

    def main(comm: Any) -> int:
        comm.nan_check = True
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, block_size=3, num_neighbors=100)
        model = process.fit(x[own], y[own], rounds=2, max_steps=3)
        model.predict(x[own], num_neighbors=100)
        start = Hyperparameters([1.0, 1.0], 1.0, 0.0)
        with pytest.raises(UsageError, match="larger nugget"):
            process.fit(twice[own], y[own], start=start, fixed=("nugget",))
        return model.num_evaluations

    assert len({*run(size, main)}) == 1
