# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call as memory: shapes, outputs, own blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.calls.arguments import bind, parse
from commrt.errors import UsageError
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.dtypes import ReduceOp
from commrt.vocabulary.limits import check_timeout
from commrt.vocabulary.operations import OPERATIONS, operation

SIZE = 4


def bound(coll: str, *args: Any, rank: int = 1, **kwargs: Any) -> Any:
    """Return what a call binds to on one of four ranks."""
    return bind(parse(operation(coll), args, kwargs), rank, SIZE)


X = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.mark.parametrize(
    ("coll", "shape", "num_elements"),
    [
        ("allgather", (4, 4, 2), 32),
        ("reduce_scatter", (1, 2), 8),
        ("scatter", (1, 2), 8),
    ],
)
def test_outputs_are_allocated_in_shape(
    coll: str, shape: tuple[int, ...], num_elements: int
) -> None:
    what = bound(coll, X)
    assert what.result.shape == shape
    assert what.result.dtype == X.dtype
    assert what.num_elements == num_elements


@pytest.mark.parametrize("coll", ["allreduce", "bcast", "alltoall"])
def test_without_out_the_array_itself_is_the_output(coll: str) -> None:
    assert bound(coll, X).result is X


@pytest.mark.parametrize("coll", ["reduce", "gather"])
def test_only_the_root_has_an_output(coll: str) -> None:
    assert bound(coll, X, root=2).result is None
    assert bound(coll, X, root=2).out is None
    assert bound(coll, X, root=1).result is not None


def test_a_block_that_cannot_be_cut_by_rows_is_flat() -> None:
    assert bound("reduce_scatter", np.zeros((2, 6))).result.shape == (3,)


def test_only_the_root_reads_x_of_bcast_and_scatter() -> None:
    assert bound("bcast", X, root=0).x is None
    assert bound("scatter", X, root=0).x is None
    assert bound("bcast", X, root=1).x is not None
    assert bound("scatter", X, root=1).x is not None
    out = np.zeros(3, np.float32)
    assert bound("scatter", None, out=out, root=0).num_elements == 12


def test_a_read_only_root_may_broadcast() -> None:
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    assert bound("bcast", frozen, root=1).result is frozen
    with pytest.raises(UsageError, match="read-only"):
        bound("bcast", frozen, root=0)


@pytest.mark.parametrize("coll", ["allgather", "gather"])
def test_own_block_of_the_output_stays_there_until_a_copy_is_asked_for(
    coll: str,
) -> None:
    out = np.arange(8.0)
    kwargs = {"root": 1} if coll == "gather" else {}
    what = bound(coll, out[2:4], out=out, **kwargs)
    assert what.result is out
    assert what.x_is_own_block
    assert what.x.address == out[2:4].ctypes.data
    apart = what.apart()
    assert not apart.x_is_own_block
    assert apart.out.address == out.ctypes.data
    assert apart.x.address != out[2:4].ctypes.data
    assert apart.x.copied_from == out[2:4].ctypes.data
    assert apart.x.owner.tobytes() == out[2:4].tobytes()
    assert apart.apart() is apart


@pytest.mark.parametrize("coll", ["reduce_scatter", "scatter"])
def test_own_block_of_the_input_is_received_beside_a_copy(coll: str) -> None:
    x = np.arange(8.0)
    kwargs = {"root": 1} if coll == "scatter" else {}
    what = bound(coll, x, out=x[2:4], **kwargs)
    assert what.out.address == x[2:4].ctypes.data
    assert what.x.owner.tobytes() == x.tobytes()


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_blocks_of_other_ranks_are_overlaps(rank: int) -> None:
    out = np.arange(8.0)
    with pytest.raises(UsageError, match="out overlaps x"):
        bound("allgather", out[2:4], out=out, rank=rank)


def test_empty_arrays_never_overlap() -> None:
    x = np.zeros(0)
    assert bound("allreduce", x, out=x[:0]).num_elements == 0
    assert bound("allgather", x, out=x[:0]).num_elements == 0


@pytest.mark.parametrize("spec", OPERATIONS, ids=lambda spec: spec.name)
def test_defaults(spec: Any) -> None:
    args = () if spec.x_count == "none" else (X,)
    call = parse(spec, args, {})
    assert (call.root, call.nonblocking, call.timeout_s) == (0, False, None)
    assert (call.algorithm, call.backend, call.params, call.name) == (None,) * 4
    assert call.reduction is ReduceOp.SUM


def test_x_may_be_given_by_name() -> None:
    assert parse(operation("bcast"), (), {"x": X}).x is X
    with pytest.raises(TypeError, match="got x twice"):
        parse(operation("bcast"), (X,), {"x": X})


def test_flags_and_times() -> None:
    assert check_flag("f", "a", np.True_) is True
    assert check_timeout("f", np.float32(0.5)) == 0.5
    assert check_timeout("f", 3) == 3.0
    for wrong in (1, "yes", None):
        with pytest.raises(UsageError, match=r"f: a=.* must be True or False"):
            check_flag("f", "a", wrong)
