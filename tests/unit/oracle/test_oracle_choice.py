# SPDX-License-Identifier: Apache-2.0
"""Recommendations: the fastest that fits, the reason, limits, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.oracle import AlphaBeta, Layer, LayerTable, Oracle
from commrt.oracle.layer_table import Piece, contiguous

CONV = Layer(
    *("conv", 3 * 64, 16 * 64, 450, 1e-4, 2e-4, 1e-6),
    channels=3,
    filters=16,
    extent=(8, 8),
    halo_rows=(1.0, 1.0),
)
LAST = Layer(
    *("last", 16 * 64, 10, 10_250, 1e-5, 2e-5, 1e-5), channels=1024, filters=10
)
SMALL = LayerTable("small", (CONV, LAST))
FAST = AlphaBeta(1e-6, 1e-10)


def oracle(**more: float) -> Oracle:
    return Oracle(SMALL, FAST, 1000, **more)  # type: ignore[arg-type]


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(12, 64))
def test_the_fastest_that_fits_is_recommended(ranks: int, batch: int) -> None:
    every = oracle().rank(ranks, batch=batch)
    limit = sorted(one.memory_nbytes for one in every)[len(every) // 2]
    found = oracle().recommend(ranks, batch=batch, memory_nbytes=limit)
    fit = [one for one in every if one.memory_nbytes <= limit]
    assert found.best.epoch_s == min(one.epoch_s for one in fit)
    assert {one.name for one in found.too_large} == {
        one.name for one in every if one.memory_nbytes > limit
    }
    assert found.best.name in found.reason
    assert all(one.ranks == ranks for one in every)


def test_a_faster_one_that_does_not_fit_is_told() -> None:
    names = ["data", "zero3"]
    adam = Oracle(SMALL, FAST, 1000, optimizer_elements=2)
    both = {one.strategy: one for one in adam.rank(4, batch=16, names=names)}
    limit = both["zero3"].memory_nbytes
    assert limit < both["data"].memory_nbytes
    slow = Oracle(SMALL, AlphaBeta(1e-3, 1e-9), 1000, optimizer_elements=2)
    found = slow.recommend(4, batch=16, memory_nbytes=limit, names=names)
    assert found.best.strategy == "zero3"
    assert "data 4 would be faster" in found.reason
    assert f"bytes of {limit:,}" in found.reason


def test_a_limit_that_is_reached_is_told() -> None:
    found = oracle().recommend(10, batch=10, names=["data"])
    assert "cannot grow: data to 10 by the batch of 10 samples" in found.reason


def test_what_does_not_fit_is_an_error_with_the_least() -> None:
    least = min(one.memory_nbytes for one in oracle().rank(4, batch=16))
    message = f"fits into 1,000 bytes of memory a rank; the least is {least:,} by"
    with pytest.raises(UsageError, match=message):
        oracle().recommend(4, batch=16, memory_nbytes=1000)


def test_a_number_of_ranks_that_none_can_use_is_an_error_with_limits() -> None:
    with pytest.raises(UsageError, match="data data 4 by the batch of 4 samples"):
        oracle().recommend(101, batch=4, names=["data", "filter"])


@pytest.mark.parametrize(
    ("name", "ways", "problem"),
    [
        ("data", 17, "17 ranks along data; expected at most 16, by the batch of 16"),
        ("filter", 11, "at most 10, by the 10 filters of last"),
        ("channel", 1025, "at most 1024, by the 1024 channels of last"),
        ("spatial", (9, 1), "at most 8, by the height of 8 in conv"),
        ("spatial", (1, 9), "at most 8, by the width of 8 in conv"),
        ("pipeline", 3, "at most 2, by the 2 layers of small"),
        ("expert", 2, "at most 1, by the table, in which no layer has experts"),
        ("data", (2, 2), "expected ranks along data"),
        ("serial", 2, "expected ranks along no axis"),
        ("data", 0, "expected ranks along data"),
        ("dta", 2, "unknown strategy 'dta'"),
    ],
)
def test_grids_that_do_not_fit_are_refused_with_the_reason(
    name: str, ways: int | tuple[int, ...], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        oracle().project(name, ways, batch=16)


@pytest.mark.parametrize(
    "numbers",
    [
        {"item_nbytes": 0},
        {"reuse": 0.0},
        {"reuse": 2.0},
        {"segments": -1},
        {"optimizer_elements": -1.0},
    ],
)
def test_numbers_without_sense_are_refused(numbers: dict[str, float]) -> None:
    wrong = oracle(**numbers)
    with pytest.raises(UsageError, match=next(iter(numbers))):
        wrong.project("data", 2, batch=16)


def test_explaining_names_the_limiting_term() -> None:
    said = oracle().project("data+filter", (2, 2), batch=16).explain()
    assert "data+filter 2x2 on 4 ranks, projected" in said
    assert "data: at most 16 ranks, by the batch of 16 samples" in said
    assert "filter: at most 10 ranks, by the 10 filters of last" in said


def test_a_mixed_strategy_is_not_another_ones_double() -> None:
    names = [one.name for one in oracle().rank(4, batch=16)]
    assert "data+filter 2x2" in names
    assert len({*names}) == len(names)
    assert not {"data+filter 4x1", "data+filter 1x4"} & {*names}


def test_the_nearest_ranks_lie_along_the_last_axis() -> None:
    one = oracle().project("data+filter", (4, 2), batch=16)
    forms = {
        (t.group.axis, t.group.ranks, t.group.stride, t.group.world)
        for t in one.transfers
    }
    assert forms == {("filter", 2, 1, 8), ("data", 4, 2, 8)}
    cut = oracle().project("data+spatial", (2, 2, 2), batch=16)
    forms = {(t.group.axis, t.group.ranks, t.group.stride) for t in cut.transfers}
    assert forms == {
        ("data*height*width", 8, 1),
        ("height", 2, 2),
        ("width", 2, 1),
    }


def test_measured_pieces_replace_parts() -> None:
    pieces = {("filter", 2): Piece(9e-4, 0.5)}
    slow = Layer(**{**vars(CONV), "pieces": pieces})
    table = LayerTable("one", (slow,))
    plain = Oracle(LayerTable("one", (CONV,)), FAST, 16)
    got = Oracle(table, FAST, 16).project("filter", 2, batch=16)
    assert got.compute_s == pytest.approx(16 * 9e-4 + 0.5 + 1e-6 / 2)
    assert plain.project("filter", 2, batch=16).compute_s == pytest.approx(
        16 * 3e-4 / 2 + 1e-6 / 2
    )
    # Four pieces were not measured.
    four = Oracle(table, FAST, 16).project("filter", 4, batch=16)
    assert four.compute_s == pytest.approx(16 * 3e-4 / 4 + 1e-6 / 4)


def test_calls_cost_what_they_do_without_samples() -> None:
    layer = Layer("a", 1, 1, forward_s=1.0, forward_call_s=10.0, backward_call_s=5.0)
    oracle = Oracle(LayerTable("one", (layer,)), FAST, 8)
    assert oracle.project("serial", batch=4).compute_s == 8 * 1 + 2 * 15
    assert oracle.project("data", 2, batch=4).compute_s == 8 / 2 + 2 * 15


def test_times_from_operations() -> None:
    table = LayerTable("one", (Layer("a", 1, 1, 50, flops=1000.0),))
    timed = table.with_flops_per_s(1e6)
    assert timed.layers[0].forward_s == 1e-3
    assert timed.layers[0].backward_s == 2e-3
    assert timed.layers[0].update_s == 1e-4
    with pytest.raises(UsageError, match="no layer has flops"):
        LayerTable("none", (Layer("a", 1, 1),)).with_flops_per_s(1e6)


def test_layers_without_times_are_cut_by_their_number() -> None:
    layers = [Layer(f"l{at}", 1, 1) for at in range(4)]
    runs = contiguous(layers, 2)
    assert [[layer.name for layer in run] for run in runs] == [
        ["l0", "l1"],
        ["l2", "l3"],
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"forward_s": float("nan")}, "forward_s is nan"),
        ({"weight_elements": -1}, "weight_elements is -1"),
        ({"extent": (4,), "halo_rows": (1.0, 1.0)}, "2 halo_rows for 1 spatial"),
        ({"extent": (0,)}, r"extent is \(0,\)"),
    ],
)
def test_layers_without_sense_are_refused(
    fields: dict[str, float], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        Layer("a", 1, 1, **fields)  # type: ignore[arg-type]


def test_a_table_without_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="empty: the table has no layers"):
        LayerTable("empty", ())
