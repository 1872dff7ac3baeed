# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices: products on every instruction set, cuts, permutations, bad input."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import digits_neighbours, karate, power_law, sparse_tensor, undirected

from commrt import _native
from commrt.errors import UsageError
from commrt.layers.graphs import (
    CsrMatrix,
    DoublePermutation,
    as_csr,
    double_permutation,
    imbalance,
    row_normalized,
    symmetrically_normalized,
)
from commrt.layers.graphs.device_products import times_on_device

kernels = _native.kernels


@pytest.fixture(params=kernels.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with each instruction set of this machine."""
    before = kernels.isa()
    assert kernels.use_isa(request.param)
    yield request.param
    assert kernels.use_isa(before)


def drawn(
    rng: random.Random, rows: int, columns: int, value: Any, index: Any
) -> CsrMatrix:
    """Return a matrix with unsorted rows, empty ones, and places that repeat."""
    draws = np.random.default_rng(rng.randrange(1 << 30))
    lengths = draws.integers(0, 6, rows) * (draws.random(rows) < 0.7)
    if not columns:
        lengths[:] = 0
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
    indices = draws.integers(0, max(columns, 1), indptr[-1]).astype(index)
    data = draws.standard_normal(indptr[-1]).astype(value)
    return CsrMatrix(indptr, indices, data, (rows, columns))


def dense(a: CsrMatrix) -> Any:
    whole = np.zeros(a.shape, np.float64)
    np.add.at(whole, (a.rows(), a.indices), a.data)
    return whole


def one_by_one(a: CsrMatrix, x: Any) -> Any:
    """Return the product, entry by entry, each rounded."""
    out = np.zeros((a.shape[0], x.shape[1]), x.dtype)
    for row, column, value in zip(a.rows(), a.indices, a.data, strict=True):
        out[row] += value * x[column]
    return out


WIDTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200]


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("value", [np.float32, np.float64])
def test_products_have_the_bits_of_sums_in_order(
    value: Any, index: Any, isa: str, seed: int
) -> None:
    rng = random.Random(f"{seed} {value} {index}")
    for width in WIDTHS:
        rows, columns = rng.choice([(0, 3), (3, 0), (1, 1), (7, 5), (23, 40)])
        a = drawn(rng, rows, columns, value, index)
        draws = np.random.default_rng(rng.randrange(1 << 30))
        x = draws.standard_normal((columns, width)).astype(value)
        # Memory around the result shows writes beside it.
        around = np.full((rows + 2, width), 7, value)
        a.times(x, around[1:-1])
        assert np.array_equal(around[1:-1], one_by_one(a, x)), (isa, width)
        assert (around[[0, -1]] == 7).all()
        low = rng.randint(0, rows)
        high = rng.randint(low, rows)
        around[:] = 7
        a.times(x, around[1:-1], (low, high))
        expected = np.full_like(around, 7)
        expected[1 + low : 1 + high] = one_by_one(a, x)[low:high]
        assert np.array_equal(around, expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("value", [np.float32, np.float64])
def test_products_of_devices_are_those_of_the_kernel(
    value: Any, index: Any, seed: int
) -> None:
    rng = random.Random(f"{seed} {value} {index}")
    near = {np.float32: 1e-5, np.float64: 1e-13}[value]
    for width in (0, 1, 3, 17):
        for rows, columns in [(0, 3), (3, 0), (1, 1), (7, 5), (23, 40)]:
            a = drawn(rng, rows, columns, value, index)
            draws = np.random.default_rng(rng.randrange(1 << 30))
            x = draws.standard_normal((columns, width)).astype(value)
            low = rng.randint(0, rows)
            for part in (None, (low, rng.randint(low, rows))):
                expected = np.full((rows, width), 7, value)
                a.times(x, expected, part)
                out = torch.full((rows, width), 7, dtype=torch.from_numpy(x).dtype)
                times_on_device(a, torch.from_numpy(x), out, part)
                np.testing.assert_allclose(out.numpy(), expected, near, near)


def test_products_agree_with_torch() -> None:
    matrix = digits_neighbours().graph
    draws = np.random.default_rng(0)
    x = torch.from_numpy(draws.standard_normal((1797, 33)))
    out = torch.empty_like(x)
    matrix.times(x.numpy(), out.numpy())
    expected = torch.sparse.mm(sparse_tensor(matrix), x)
    assert torch.allclose(out, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (1, 1), (30, 17)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("value", [np.float32, np.float64])
def test_transposes_blocks_and_permutations_are_those_of_dense_matrices(
    shape: tuple[int, int], index: Any, value: Any, seed: int
) -> None:
    rng = random.Random(f"{seed} {shape}")
    a = drawn(rng, *shape, value, index)
    whole, rows, columns = dense(a), *shape
    turned = a.transposed()
    assert turned.shape == (columns, rows)
    assert np.allclose(dense(turned), whole.T, rtol=1e-15)
    same_row = np.diff(turned.rows()) == 0
    assert (np.diff(turned.indices)[same_row] >= 0).all()
    cuts = sorted(rng.randint(0, rows) for _ in range(2))
    others = sorted(rng.randint(0, columns) for _ in range(2))
    block = a.block((cuts[0], cuts[1]), (others[0], others[1]))
    expected = whole[cuts[0] : cuts[1], others[0] : others[1]]
    assert np.array_equal(dense(block), expected)
    draws = np.random.default_rng(rng.randrange(1 << 30))
    order, other = draws.permutation(rows), draws.permutation(columns)
    moved = dense(a.permuted(order, other))
    assert np.array_equal(moved, whole[order][:, other])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_matrices_come_from_arrays_tensors_and_objects() -> None:
    indptr, indices, data = [0, 2, 2], [1, 0], [1.5, 2.5]
    expected = np.array([[2.5, 1.5], [0, 0]])

    class Held:
        def __init__(self) -> None:
            self.indptr, self.indices = np.array(indptr), np.array(indices)
            self.data, self.shape = np.array(data), (2, 2)

    tensor = torch.sparse_csr_tensor(
        torch.tensor(indptr),
        torch.tensor([0, 1]),
        torch.tensor([2.5, 1.5]),
        (2, 2),
        check_invariants=True,
    )
    for given in ((indptr, indices, data), (indptr, indices, data, (2, 2)), Held()):
        assert np.array_equal(dense(as_csr(given)), expected)
    assert np.array_equal(dense(as_csr(tensor)), expected)
    held = Held()
    mine = as_csr(held)
    held.indices[0] = 77  # the matrix has its own
    assert mine.indices.tolist() == indices
    with pytest.raises(ValueError, match="read-only"):
        mine.indices[0] = 77


WRONG = [
    (([0, 1], [1], [1.0]), "columns from 1 to 1"),
    (([0, 1], [-1], [1.0]), "columns from -1"),
    (([0, 2], [0], [1.0]), "end at 2"),
    (([1, 1], [0], [1.0]), "begin at 1"),
    (([0, 2, 1], [0], [1.0]), "row 1 ends before it begins"),
    (([0, 1], [0], [1.0, 2.0]), "2 values"),
    (([0, 1], [0], [1]), "expected float32 or float64"),
    (([0.0, 1.0], [0], [1.0]), "expected integers"),
    (([0, 1], [[0]], [1.0]), "one dimension each"),
    (([], [], np.zeros(0)), "0 row ends|expected integers"),
    (([0, 1], [0], [1.0], (2, 1)), "expected 3 row ends"),
    ("a graph", "no matrix in compressed rows"),
    ((1, 2), "no matrix in compressed rows"),
]


@pytest.mark.parametrize(("given", "says"), WRONG)
def test_arrays_that_are_no_matrix_are_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        as_csr(given, "graph")


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_tensors_of_other_layouts_are_refused() -> None:
    with pytest.raises(UsageError, match="to_sparse_csr"):
        as_csr(torch.eye(2).to_sparse_csc())
    with pytest.raises(UsageError, match="to_sparse_csr"):
        as_csr(torch.eye(2))


def test_arrays_of_two_types_or_with_gaps_make_no_matrix() -> None:
    indptr, data = np.array([0, 1]), np.ones(1)
    with pytest.raises(UsageError, match="int32 or int64 for both"):
        CsrMatrix(indptr, np.zeros(1, np.int32), data, (1, 1))
    with pytest.raises(UsageError, match="without gaps"):
        CsrMatrix(np.zeros(4, np.int64)[::2], np.zeros(0, np.int64), data[:0], (1, 1))


def test_products_of_other_arrays_are_refused() -> None:
    a = karate().graph
    x, out = np.ones((34, 3)), np.ones((34, 3))
    with pytest.raises(UsageError, match="x is a float32"):
        a.times(x.astype(np.float32), out)
    with pytest.raises(UsageError, match="34 rows"):
        a.times(x[1:], out)
    with pytest.raises(UsageError, match="out is a float64 array of shape"):
        a.times(x, out[:, :2])
    with pytest.raises(UsageError, match="without gaps"):
        a.times(np.ones((34, 6))[:, ::2], out)
    with pytest.raises(UsageError, match="cannot be written"):
        a.times(x, out, (3, 35))
    with pytest.raises(UsageError, match="cannot be written"):
        a.times(x, np.broadcast_to(out[:1], (34, 3)).copy()[:], (4, 3))


def test_the_kernels_know_two_types_and_two_widths() -> None:
    for index, code in ((2, 11), (4, 3)):
        with pytest.raises(ValueError, match="expected float32 or float64"):
            _native.csr.multiply(index, code, 0, 0, 0, 0, 0, 0, 0, 0)


# -- matrices of layers ----------------------------------------------------------------


def test_normalizations_are_those_of_the_papers() -> None:
    a = undirected([(0, 1), (1, 2), (3, 3)], 5)
    whole = dense(a)
    loops = whole + np.eye(5)
    scale = np.diag(1 / np.sqrt(loops.sum(1)))
    assert np.allclose(dense(symmetrically_normalized(a)), scale @ loops @ scale)
    plain = dense(symmetrically_normalized(a, self_loops=False))
    assert (plain[4] == 0).all()
    assert np.allclose(plain[0, 1], 1 / np.sqrt(2))
    means = dense(row_normalized(a))
    assert np.allclose(means.sum(1), [1, 1, 1, 1, 0])
    assert np.allclose(means[1], [0.5, 0, 0.5, 0, 0])


def test_float32_stays_float32() -> None:
    a = as_csr((np.array([0, 1, 2]), np.array([1, 0]), np.ones(2, np.float32)))
    assert symmetrically_normalized(a).data.dtype == np.float32
    assert row_normalized(a).data.dtype == np.float32


def test_matrices_that_cannot_be_normalized_are_refused() -> None:
    negative = as_csr(([0, 1], [0], [-2.0]))
    with pytest.raises(UsageError, match="row sum of node 0 is -1"):
        symmetrically_normalized(negative)
    wide = as_csr(([0, 1], [1], [1.0], (1, 2)))
    with pytest.raises(UsageError, match="square"):
        row_normalized(wide)


# -- permutations ----------------------------------------------------------------------

GRIDS = [(2, 2), (4, 2), (2, 4), (8, 1), (1, 8), (3, 3), (2, 1)]


@pytest.mark.parametrize("name", ["digits", "power law"])
def test_two_permutations_balance_the_blocks(name: str) -> None:
    case = digits_neighbours() if name == "digits" else power_law()
    matrix = symmetrically_normalized(case.graph)
    before = max(imbalance(matrix, *grid) for grid in GRIDS)
    assert before > 1.5
    orders = double_permutation(matrix, 0)
    for layer in (0, 1):
        permuted = orders.matrix(matrix, layer)
        assert max(imbalance(permuted, *grid) for grid in GRIDS) < 1.05


def test_one_permutation_leaves_loops_on_the_diagonal() -> None:
    matrix = symmetrically_normalized(undirected([], 1000))
    order = np.random.default_rng(0).permutation(1000)
    single = DoublePermutation(order, order)
    assert imbalance(single.matrix(matrix, 0), 4, 4) > 3.9
    double = double_permutation(matrix, 0)
    assert imbalance(double.matrix(matrix, 0), 4, 4) < 1.5


def test_imbalance_counts_the_fullest_block() -> None:
    a = as_csr(([0, 3, 4, 4], [0, 1, 2, 0], np.ones(4)))
    assert imbalance(a, 1, 1) == 1.0
    assert imbalance(a, 3, 1) == 3 / (4 / 3)
    assert imbalance(a, 1, 3) == 2 / (4 / 3)
    assert imbalance(undirected([], 3), 1, 1) == 1.0


def test_permutations_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match=r"numbers 0\.\.2 once"):
        DoublePermutation(np.array([0, 0, 1]), np.arange(3))
    with pytest.raises(UsageError, match="number from 0"):
        double_permutation(karate().graph, -1)


def test_a_matrix_of_views_is_not_what_others_write() -> None:
    columns = np.array([0, 1], np.int32)
    matrix = CsrMatrix(np.array([0, 1, 2], np.int32), columns[:], np.ones(2), (2, 2))
    columns[0] = 3
    assert matrix.indices.tolist() == [0, 1]


def test_lists_without_entries_are_a_matrix() -> None:
    assert as_csr(([0, 0, 0], [], [])).shape == (2, 2)
