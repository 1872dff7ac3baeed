# SPDX-License-Identifier: Apache-2.0
"""Every kind of tensor as every argument: the right result, or an error that names it.

In child processes: a call that reads memory which is not there ends its process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_kinds import CALLS, REFUSED, RIGHT
from torch._subclasses.fake_tensor import FakeTensorMode

import commrt
from commrt.arrays.host import view_anywhere
from commrt.errors import BufferError_, UsageError
from commrt.launch.mpiexec import child_environment
from commrt.torch.operands import check_one_device

LOOKED_AT_BY_TORCH = ("number", "array", "class", "uninitialized")
"""Kinds that P2POp refuses before a group is asked."""
NAMES = re.compile(r"[a-z_]+: [a-z_]+(\[\d+\])? ")
"""What a message begins with: the call and the argument."""
PROGRAM = Path(__file__).with_name("tensor_kinds.py")


def run(what: str, cases: list[list[str]]) -> list[Any]:
    """Run cases in a process of their own, and return what each of them said."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        env={**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    last = said[-1][1:3] if said else "none"
    assert done.returncode == 0, f"ended after {last}: {done.stderr[-2000:]}"
    return said


def test_the_result_is_that_of_an_ordinary_tensor() -> None:
    cases = [[kind, call] for kind in RIGHT for call in CALLS]
    said = run("right", cases)
    assert len(said) == 2 * len(cases)
    for rank, kind, call, (got, expected) in said:
        assert got == expected, (kind, call, rank)


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    cases = [
        [kind, call]
        for kind in REFUSED
        for call in CALLS
        if call != "batch" or kind not in LOOKED_AT_BY_TORCH
    ]
    said = run("refused", cases)
    assert len(said) == len(cases)
    for _, kind, call, (classes, text) in said:
        assert "UsageError" in classes, (kind, call, classes, text)
        assert "DistBackendError" in classes, (kind, call)
        argument = NAMES.match(text)
        assert argument is not None, (kind, call, text)


# -- the direct calls ----------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted({*REFUSED} - {"dtensor", "array"}))
def test_direct_calls_refuse_it_too(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what is a prototype or deprecated
        x = REFUSED[kind](0)
    with pytest.raises(BufferError_, match=r"^x (is|with shape) "):
        view_anywhere(x, "x")


@pytest.mark.parametrize("kind", ["subclass", "silent", "parameter", "lazy copy"])
def test_a_subclass_is_seen_as_torch_sees_it(kind: str) -> None:
    x = RIGHT[kind](0)
    seen = view_anywhere(x, "x")
    assert (seen.count, seen.dtype.name) == (4, "float32")
    assert seen.address == torch.Tensor.untyped_storage(x).data_ptr()


def test_a_plan_does_not_run_on_memory_that_is_gone() -> None:
    comm = commrt.init()
    x, y = torch.ones(4), torch.zeros(4)
    call = comm.plan.allreduce(x, out=y)
    call()
    y.data = torch.zeros(4)
    with pytest.raises(UsageError, match="other memory than when it was planned"):
        call()
    x, y = torch.ones(4), torch.zeros(4)
    call = comm.plan.allreduce(x, out=y)
    x.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match=r"allreduce: an array .* plan the"):
        call()


class Sub(torch.Tensor):
    """A tensor that the engine does not know at a glance."""


def bound_calls(cart: Any, x: Any, out: Any) -> list[Any]:
    """Return calls bound to two tensors of 64 numbers, of which none has begun."""
    line = commrt.Layout((64,), (1,), (commrt.Block(0),))
    return [
        cart.plan.allreduce(x, out=out),
        cart.plan.halo_exchange([x, out], 1),
        cart.plan.halo_reduce([x, out], 1),
        cart.plan.redistribute(x, line, line, out=out),
        cart.plan.neighbor_alltoall(x, out=out),
        cart.plan.send(x, 0),
        cart.plan.sendrecv(x, 0, out, 0),
        cart.plan.multi_sendrecv(sends=[(x, 0)], recvs=[(out, 0)]),
    ]


def other_data(x: Any) -> None:
    x.data = torch.zeros(64)


def freed(x: Any) -> None:
    x.untyped_storage().resize_(0)


def shortened(x: Any) -> None:
    """The second time, the storage may begin where it did at first."""
    for nbytes in (128, 64, 8):
        x.untyped_storage().resize_(nbytes)


@pytest.mark.parametrize("kind", [torch.Tensor, Sub], ids=["own", "subclass"])
@pytest.mark.parametrize("change", [other_data, freed, shortened])
@pytest.mark.parametrize("which", ["x", "out"])
def test_every_bound_call_looks_where_its_tensors_are(
    which: str, change: Any, kind: Any
) -> None:
    cart = commrt.init().cart((1,), periodic=True)
    x, out = (torch.zeros(64).as_subclass(kind) for _ in range(2))
    calls = bound_calls(cart, x, out)
    for call in calls[:5]:
        call()
    change(x if which == "x" else out)
    for call in calls:
        if call.operation == "send" and which == "out":
            continue
        with pytest.raises((UsageError, BufferError_), match=r"planned|its storage"):
            call()


def test_tensors_of_a_list_lie_on_one_device() -> None:
    """On a GPU a list of both was filled, by copies that nobody had asked for."""
    with FakeTensorMode():
        mixed = [torch.empty(3), torch.empty(3, device="cuda")]
    with pytest.raises(
        ValueError, match=r"list\[1\] is on cuda:0, and list\[0\] on cpu"
    ):
        check_one_device(mixed, "list")
    check_one_device(mixed[:1] * 2, "list")
