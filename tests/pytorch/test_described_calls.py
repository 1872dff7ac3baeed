# SPDX-License-Identifier: Apache-2.0
"""Keys of described calls: equal ones promise equal fields. No ranks are needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from commrt.torch.checked_calls import _binding
from commrt.torch.described import _FACTS, DESCRIBED, key_of
from commrt.torch.group_methods import Collectives

Z = torch.zeros
X = Z(2, 3)
TENSORS = {
    "tensor": X,
    "equal": torch.ones(2, 3),
    "other strides": Z(3, 2).t(),
    "same elements": Z(6),
    "other order of lengths": Z(3, 2),
    "shape": Z(2, 4),
    "no elements": Z(0),
    "no dimensions": Z(()),
    "type": Z(2, 3).double(),
    "another type as long": Z(2, 3).int(),
    "memory": Z(2, 3, device="meta"),
    "sparse": X.to_sparse(),
    "sparse of rows": X.to_sparse(1),
}
LISTS = {
    "one": [X],
    "two": [X, X],
    "order": [Z(2), X],
    "other order": [X, Z(2)],
    "other types": [Z(2), Z(2).int()],
    "types' other order": [Z(2).int(), Z(2)],
    "none": [],
    "lists": [[X, X]],
    "more lists": [[X], [X]],
    "wrong": [X, "x"],
}


def reduce_of(op: Any, root: int = 0) -> Any:
    opts = c10d.ReduceOptions()
    opts.reduceOp, opts.rootRank = op, root
    return opts


def other(kind: Any, **values: Any) -> Any:
    opts = kind()
    for name, value in values.items():
        setattr(opts, name, value)
    return opts


OPTIONS = {
    "none": None,
    "sum": other(c10d.AllreduceOptions, reduceOp=ReduceOp.SUM),
    "max": other(c10d.AllreduceOptions, reduceOp=ReduceOp.MAX),
    "a reduction": ReduceOp.MAX,
    "its kind": ReduceOp.RedOpType.MAX,
    "a factor": dist._make_nccl_premul_sum(0.5),
    "no factor": ReduceOp.PREMUL_SUM,
    "root 0": other(c10d.BroadcastOptions, rootRank=0),
    "root 1": other(c10d.BroadcastOptions, rootRank=1),
    "reduced at 0": reduce_of(ReduceOp.SUM),
    "reduced at 1": reduce_of(ReduceOp.SUM, 1),
    "largest at 1": reduce_of(ReduceOp.MAX, 1),
    "nothing": c10d.AllgatherOptions(),
    "0": 0,
    "1": 1,
    "1.0": 1.0,
    "true": True,
    "numpy": np.int64(1),
    "text": "sum",
}
SPLITS = {
    "none": None,
    "no numbers": [],
    "numbers": [1, 2],
    "others": [2, 1],
    "tuple": (1, 2),
    "array": np.array([1, 2]),
    "number": 1,
}
MANY = [*TENSORS.values(), *LISTS.values()]
VALUES: dict[str, list[Any]] = {
    "output": [*TENSORS.values()],
    "input": [*TENSORS.values()],
    "tensors": MANY,
    "outputs": MANY,
    "inputs": MANY,
    "opts": [*OPTIONS.values()],
    "root": [*OPTIONS.values()],
    "op": [*OPTIONS.values()],
    "output_splits": [*SPLITS.values()],
    "input_splits": [*SPLITS.values()],
}


def names_of(method: str) -> list[str]:
    return list(inspect.signature(getattr(Collectives, method)).parameters)[1:]


def variants(method: str) -> list[dict[str, Any]]:
    """Return calls that differ from a usual one in one argument each."""
    many = method in ("alltoall", "allreduce_coalesced") or "_single_c" in method
    usual: dict[str, Any] = {}
    for name in names_of(method):
        if name in ("output", "input"):
            usual[name] = X
        elif name in ("tensors", "outputs", "inputs"):
            usual[name] = [X, X] if many else [X]
    found = [usual, {**usual}]
    for name in names_of(method):
        found += [{**usual, name: value} for value in VALUES.get(name, ())]
    return found


def fields_of(method: str, call: dict[str, Any]) -> Any:
    try:
        return DESCRIBED[method](call).compared()
    except Exception as error:  # noqa: BLE001  # of whatever a wrong call raises
        return type(error), str(error)


@pytest.mark.parametrize("method", DESCRIBED)
def test_equal_keys_mean_equal_fields(method: str) -> None:
    calls = variants(method)
    rows = [(key_of(method, call), fields_of(method, call)) for call in calls]
    assert rows[0][0] is not None
    assert rows[0] == rows[1]
    for (key, fields), (another, differing) in combinations(rows, 2):
        if key is not None and key == another:
            assert fields == differing


@pytest.mark.parametrize("method", DESCRIBED)
def test_each_argument_is_in_the_key_or_means_nothing(method: str) -> None:
    assert {*names_of(method)} <= {*_FACTS, "timeout"}


def test_methods_have_keys_of_their_own() -> None:
    keys = {key_of(name, {"output": X, "input": X}) for name in DESCRIBED}
    assert len(keys) == len(DESCRIBED)


def test_values_and_timeouts_are_in_no_key() -> None:
    tensors: Any
    for tensors in ([X], X):
        ones = [torch.ones(2, 3)] if isinstance(tensors, list) else torch.ones(2, 3)
        late = {"tensors": ones, "timeout": 3}
        assert key_of("allreduce", {"tensors": tensors}) == key_of("allreduce", late)


def test_lengths_are_in_no_key_where_tokens_are_routed() -> None:
    keys = {
        key_of(
            "alltoall_base",
            {
                "output": Z(n),
                "input": Z(9 - n),
                "output_splits": [n, 0],
                "input_splits": [9 - n, 0],
            },
        )
        for n in range(1, 9)
    }
    assert len(keys) == 1
    assert None not in keys


@pytest.mark.parametrize("value", [[X] * 257, [X, None], [X, 3], None])
def test_unusual_tensors_have_no_key(value: Any) -> None:
    assert key_of("allreduce_coalesced", {"tensors": value}) is None


def test_arrays_of_splits_are_described_as_lists_are() -> None:
    call = {"output": Z(3), "input": Z(3), "input_splits": [1, 2]}
    array = {**call, "input_splits": np.array([1, 2])}
    described = [DESCRIBED["alltoall_base"](each) for each in (call, array)]
    assert described[0].call() == described[1].call()
    assert described[0].compared() == described[1].compared()


BINDINGS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, 3), {}),
    ((1, 2, 3, 4), {}),
    ((), {"tensors": 1}),
    ((1,), {"timeout": 2}),
    ((), {"timeout": 2, "tensors": 1}),
    ((1,), {"tensors": 1}),
    ((1,), {"unknown": 1}),
]


@pytest.mark.parametrize(("args", "more"), BINDINGS)
def test_arguments_are_bound_as_python_does(
    args: tuple[Any, ...], more: dict[str, Any]
) -> None:
    method = Collectives.allreduce
    expected = bound(lambda: inspect.signature(method).bind(None, *args, **more))
    assert bound(lambda: _binding(method)(None, args, more)) == expected


def bound(bind: Callable[[], Any]) -> Any:
    """Return names and arguments in their order, or what is wrong with them."""
    try:
        found = bind()
    except TypeError as error:
        return str(error)
    arguments = getattr(found, "arguments", found)
    return [(name, each) for name, each in arguments.items() if name != "self"]
