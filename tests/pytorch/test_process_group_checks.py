# SPDX-License-Identifier: Apache-2.0
"""Check mode of process groups: the same error on every rank, with tensors and lines.

The odd one out is the last rank; each case is called on one line, which the error has.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_groups import job
from torch.distributed import ReduceOp

import commrt.torch
from commrt.calls import check_mode
from commrt.errors import MismatchError, TimeoutError_, UsageError
from commrt.torch.described import DESCRIBED

DEADLINE_S = 300.0
HERE = "test_process_group_checks.py"
Call = Callable[[int], Any]
Z, ONES = torch.zeros, torch.ones


def rows(size: int, *shape: int) -> list[torch.Tensor]:
    return [Z(shape) for _ in range(size)]


def many(at: int, odd: torch.Tensor) -> list[torch.Tensor]:
    return [odd if i == at else Z(3) for i in range(50)]


def whole(method: str) -> Any:
    return getattr(dist.group.WORLD, method)


# fmt: off
CASES: dict[str, tuple[Call, Call, list[str]]] = {
    "shape": (
        lambda n: dist.all_reduce(Z(2, 3)),
        lambda n: dist.all_reduce(Z(6)),
        ["disagree on shapes", "tensor=float32[2, 3]", "tensor=float32[6]", "op=SUM"],
    ),
    "elements": (
        lambda n: dist.all_reduce(Z(5), async_op=True),
        lambda n: dist.all_reduce(Z(0), async_op=True),
        ["disagree on shapes", "float32[5]", "float32[0]"],
    ),
    "type": (
        lambda n: dist.all_reduce(Z(3)),
        lambda n: dist.all_reduce(Z(3).int()),
        ["disagree on dtype", "tensor=float32[3]", "tensor=int32[3]"],
    ),
    "reduction": (
        lambda n: dist.all_reduce(Z(3), ReduceOp.MAX),
        lambda n: dist.all_reduce(Z(3), ReduceOp.AVG),
        ["disagree on op", "op=MAX", "op=AVG"],
    ),
    "operation": (
        lambda n: dist.all_reduce(Z(3)),
        lambda n: dist.barrier(),
        ["collective #", "disagree on operation", "all_reduce(tensor", "barrier()"],
    ),
    "sparse": (
        lambda n: dist.all_reduce(Z(3, 4).to_sparse()),
        lambda n: dist.all_reduce(Z(3, 4).to_sparse(1)),
        ["disagree on shapes", "sparse_coo of 2 dim", "sparse_coo of 1 dim"],
    ),
    "sparse and dense": (
        lambda n: dist.all_reduce(Z(3, 4).to_sparse()),
        lambda n: dist.all_reduce(Z(3, 4)),
        ["disagree on shapes", "sparse_coo", "float32[3, 4], op"],
    ),
    "root": (
        lambda n: dist.broadcast(Z(3), 0),
        lambda n: dist.broadcast(Z(3), 1),
        ["broadcast #", "disagree on root", "root=0", "root=1"],
    ),
    "broadcast's shape": (
        lambda n: dist.broadcast(Z(2, 3), 0),
        lambda n: dist.broadcast(Z(6), 0),
        ["disagree on shapes", "float32[2, 3]", "float32[6]"],
    ),
    "reduce": (
        lambda n: dist.reduce(Z(2), 0, ReduceOp.MAX),
        lambda n: dist.reduce(Z(2), 1, ReduceOp.SUM),
        ["disagree on op, root", "op=MAX, root=0", "op=SUM, root=1"],
    ),
    "gathered tensors": (
        lambda n: dist.all_gather(rows(n, 2), Z(2)),
        lambda n: dist.all_gather(rows(n, 3), Z(3)),
        ["all_gather #", "tensor_list[1]=float32[2]", "tensor=float32[3]"],
    ),
    "gathered lists": (
        lambda n: dist.all_gather([Z(i) for i in range(n)], Z(0)),
        lambda n: dist.all_gather([Z(2 * i) for i in range(n)], Z(2 * n - 2)),
        ["on shapes", "tensor_list[1]=float32[1]", "tensor_list[1]=float32[2]"],
    ),
    "all_gather_single": (
        lambda n: dist.all_gather_single(Z(n * 4), Z(4)),
        lambda n: dist.all_gather_single(Z(n * 4), Z(2, 2)),
        ["disagree on shapes", "input=float32[4]", "input=float32[2, 2]"],
    ),
    "gather_single": (
        lambda n: whole("gather_single")(Z(n * 4), Z(4)),
        lambda n: whole("gather_single")(Z(0), Z(2, 2)),
        ["disagree on shapes", "tensor=float32[4]", "tensor=float32[2, 2]"],
    ),
    "list and tensor": (
        lambda n: dist.all_gather_single(Z(n * 4), Z(4)),
        lambda n: dist.all_gather(rows(n, 4), Z(4)),
        ["disagree on operation", "all_gather_single(output", "all_gather(tensor_"],
    ),
    "reduce_scatter": (
        lambda n: dist.reduce_scatter(Z(2), rows(n, 2)),
        lambda n: dist.reduce_scatter(Z(3), rows(n, 3)),
        ["reduce_scatter #", "output=float32[2]", "input_list[0]=float32[3]"],
    ),
    "reduce_scatter_single": (
        lambda n: dist.reduce_scatter_single(Z(2), Z(2 * n)),
        lambda n: dist.reduce_scatter_single(Z(2), Z(2, n)),
        ["reduce_scatter_single #", "output=float32[2]", "disagree on shapes"],
    ),
    "gather": (
        lambda n: dist.gather(Z(2), rows(n, 2) if dist.get_rank() == 0 else None),
        lambda n: dist.gather(Z(2).int(), None),
        ["gather #", "disagree on dtype", "gather_list[0]=float32[2]", "int32[2]"],
    ),
    "scatter": (
        lambda n: dist.scatter(Z(2), rows(n, 2) if dist.get_rank() == 0 else None),
        lambda n: dist.scatter(Z(1, 2), None),
        ["scatter #", "disagree on shapes", "scatter_list[1]=float32[2]", "[1, 2]"],
    ),
    "all_to_all_single's type": (
        lambda n: dist.all_to_all_single(Z(n), Z(n)),
        lambda n: dist.all_to_all_single(Z(n).long(), Z(n).long()),
        ["all_to_all_single #", "disagree on dtype", "input=int64", "input=float32"],
    ),
    "all_to_all_single's parts": (
        lambda n: dist.all_to_all_single(Z(2 * n), Z(2 * n)),
        lambda n: dist.all_to_all_single(Z(n), Z(n)),
        ["alltoall #", "disagree on elements", "all_to_all_single(output"],
    ),
    "all_to_all_single's splits": (
        lambda n: dist.all_to_all_single(Z(n), Z(n), [1] * n, [1] * n),
        lambda n: dist.all_to_all_single(Z(n), Z(n)),
        ["disagree on splits", "output_splits=[1, 1", "splits=none"],
    ),
    "all_to_all_single's rows": (
        lambda n: dist.all_to_all_single(Z(n), Z(n), [1] * n, [1] * n),
        lambda n: dist.all_to_all_single(Z(2 * n - 1), Z(2 * n - 1), [2] * (n - 1) + [1], [2] * (n - 1) + [1]),  # noqa: E501
        ["sends 2 elements to rank 0", "which expects 1", "input_splits=[2, "],
    ),
    "all_to_all": (
        lambda n: dist.all_to_all(rows(n, 2), rows(n, 2)),
        lambda n: dist.all_to_all([*rows(n - 1, 3), Z(2)], [*rows(n - 1, 3), Z(2)]),
        ["sends 3 elements to rank 0", "which expects 2", "tensor_list[0]=float32[3]"],
    ),
    "coalesced all_reduce": (
        lambda n: whole("allreduce_coalesced")(many(0, Z(3))),
        lambda n: whole("allreduce_coalesced")(many(17, Z(1, 3))),
        ["(..., tensors[17]=float32[3], ...)", "(..., tensors[17]=float32[1, 3], ...)"],
    ),
    "coalesced lists": (
        lambda n: whole("allgather_coalesced")([[Z(2)] for _ in range(n)], [Z(2)]),
        lambda n: whole("allgather_coalesced")([[Z(4)] for _ in range(n)], [Z(4)]),
        ["all_gather_coalesced #", "input_tensors[0]=float32[2]"],
    ),
    "coalesced tensors": (
        lambda n: whole("all_gather_single_coalesced")([Z(n)], [Z(1)]),
        lambda n: whole("all_gather_single_coalesced")([Z(n), Z(n)], [Z(1), Z(1)]),
        ["all_gather_single_coalesced #", "inputs[1]=float32[1]"],
    ),
    "coalesced reduce_scatter": (
        lambda n: whole("reduce_scatter_single_coalesced")([Z(1)], [Z(n)]),
        lambda n: whole("reduce_scatter_single_coalesced")([Z(2)], [Z(2 * n)]),
        ["reduce_scatter_single_coalesced #", "outputs[0]=float32[2]"],
    ),
}
# fmt: on


def compared() -> dict[str, list[str]]:
    """Run each case; return its text, and the lines that are to be in it."""
    found = {}
    with job(name="compared") as rank:
        size = dist.get_world_size()
        for name, (usual, odd, _) in CASES.items():
            with pytest.raises(MismatchError) as raised:
                (odd if rank == size - 1 else usual)(size)
            assert isinstance(raised.value, dist.DistBackendError)
            lines = [call.__code__.co_firstlineno for call in (usual, odd)]
            found[name] = [str(raised.value), *(f"at {HERE}:{line}" for line in lines)]
            # Nothing was sent: the group is as good as new.
            x = ONES(2)
            dist.all_reduce(x)
            assert x.tolist() == [size] * 2
    return found


def check_compared(got: list[dict[str, list[str]]]) -> None:
    assert all(each == got[0] for each in got)
    for name, (text, *lines) in got[0].items():
        for part in [*CASES[name][2], *lines, "nothing was sent"]:
            assert part in text, f"{name}: {part!r} is not in: {text}"
        alike = "rank 0:" if len(got) == 2 else "ranks 0, 1:"
        differ = name in ("gather", "scatter") and len(got) == 3
        assert (alike in text) != differ, text


@pytest.mark.full
def test_every_rank_names_tensors_and_lines(torchrun: Any) -> None:
    env = {"COMMRT_DEBUG": "check"}
    check_compared(torchrun(3, compared, env=env, deadline_s=DEADLINE_S))


# -- what is right stays so ----------------------------------------------------------


def allowed() -> list[Any]:
    """What differs across ranks and may: lines, lists, parts, splits, layouts."""
    with job(name="allowed") as rank:
        size = dist.get_world_size()
        outs = [Z(r + 1) for r in range(size)]
        if rank:
            dist.all_gather(outs, ONES(rank + 1) * rank)
        else:
            dist.all_gather(outs, ONES(1))
        x = ONES(2, 3).t() if rank else ONES(3, 2)
        dist.all_reduce(x)
        given, got = [ONES(r + 1) for r in range(size)], [Z(rank + 1) for _ in outs]
        dist.all_to_all(got, given)
        sums = torch.eye(3).to_sparse() if rank else Z(3, 3).to_sparse()
        dist.all_reduce(sums)
        work = dist.all_reduce(y := ONES(4), async_op=True)
        work.wait()
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(a := ONES(2))
            dist.all_reduce(b := ONES(3))
        manager.wait()
        box: list[Any] = [None] * size
        dist.all_gather_object(box, {"rank": rank})
        return [
            *([o.tolist() for o in outs], x[0, 0].item(), [len(g) for g in got]),
            *(sums.to_dense()[0].tolist(), y[0].item(), a[0].item(), b[0].item()),
            [one["rank"] for one in box],
        ]


def check_allowed(results: list[Any]) -> None:
    for rank, (lists, *rest) in enumerate(results):
        assert lists == [[1.0], [1.0, 1.0]]
        assert rest == [2.0, [rank + 1] * 2, [1.0, 0.0, 0.0], 2.0, 2.0, 2.0, [0, 1]]


# -- calls that came before ----------------------------------------------------------

# fmt: off
REPEATED: dict[str, tuple[str, Call, Call, str, str]] = {
    "shape": (
        "allreduce",
        lambda n: dist.all_reduce(Z(2, 3)),
        lambda n: dist.all_reduce(Z(3, 2)),
        "all_reduce #", "shapes",
    ),
    "type": (
        "broadcast",
        lambda n: dist.broadcast(Z(3), 0),
        lambda n: dist.broadcast(Z(3).int(), 0),
        "broadcast #", "dtype",
    ),
    "layout": (
        "allreduce",
        lambda n: dist.all_reduce(Z(3, 4).to_sparse()),
        lambda n: dist.all_reduce(Z(3, 4)),
        "all_reduce #", "shapes",
    ),
    "reduction": (
        "reduce",
        lambda n: dist.reduce(Z(2), 0, ReduceOp.MAX),
        lambda n: dist.reduce(Z(2), 0, ReduceOp.MIN),
        "reduce #", "op",
    ),
    "factor": (
        "allreduce",
        lambda n: dist.all_reduce(Z(2), dist._make_nccl_premul_sum(0.5)),
        lambda n: dist.all_reduce(Z(2)),
        "all_reduce #", "op",
    ),
    "root": (
        "broadcast",
        lambda n: dist.broadcast(Z(3), 0),
        lambda n: dist.broadcast(Z(3), 1),
        "broadcast #", "root",
    ),
    "order of a list": (
        "allreduce_coalesced",
        lambda n: whole("allreduce_coalesced")([Z(2), Z(3)]),
        lambda n: whole("allreduce_coalesced")([Z(3), Z(2)]),
        "all_reduce_coalesced #", "shapes",
    ),
    "splits": (
        "alltoall_base",
        lambda n: dist.all_to_all_single(Z(n), Z(n), [1] * n, [1] * n),
        lambda n: dist.all_to_all_single(Z(n), Z(n)),
        "all_to_all_single #", "splits",
    ),
    "operation": (
        "barrier",
        lambda n: dist.barrier(),
        lambda n: dist.all_reduce(Z(3)),
        "collective #", "operation",
    ),
}
# fmt: on


def repeated() -> list[Any]:
    """Calls that all ranks have made before: each by itself, then one beside another.

    Return how often calls were described or written as JSON, and the errors.
    """
    found: list[Any] = []
    with job(name="repeated") as rank:
        size = dist.get_world_size()
        for name, (method, usual, odd, *_) in REPEATED.items():
            usual(size)
            odd(size)
            described = mock.Mock(wraps=DESCRIBED[method])
            dumped = mock.Mock(wraps=json.dumps)
            with (
                mock.patch.dict(DESCRIBED, {method: described}),
                mock.patch.object(check_mode.json, "dumps", dumped),
            ):
                usual(size)
                odd(size)
            counts = described.call_count, dumped.call_count
            with pytest.raises(MismatchError) as raised:
                (odd if rank == size - 1 else usual)(size)
            usual(size)
            found.append([name, *counts, str(raised.value)])
    return found


def check_repeated(got: list[list[Any]]) -> None:
    assert got[0] == got[1]
    for name, described, dumped, text in got[0]:
        *_, first, field = REPEATED[name]
        own = 1 if name == "layout" else 0  # of the sparse sum, which compares itself
        assert (described, dumped) == (0, own), name
        assert text.startswith(first)
        assert re.search(rf"disagree on {field}\b", text)


# -- errors of one rank --------------------------------------------------------------

# fmt: off
WRONG: list[tuple[Call, Call, str]] = [
    (
        lambda n: dist.all_gather(rows(n, 2), Z(2)),
        lambda n: dist.all_gather([Z(2)], Z(2)),
        "outputs has 1 tensors",
    ),
    (
        lambda n: dist.all_gather_single(Z(2 * n), Z(2)),
        lambda n: dist.all_gather_single(Z(3), Z(2)),
        "out has 3 elements",
    ),
    (
        lambda n: dist.all_reduce(Z(2)),
        lambda n: whole("allreduce")([Z(2), Z(2)]),
        "2 tensors in one call",
    ),
    (
        lambda n: dist.reduce_scatter_single(Z(1), Z(n)),
        lambda n: whole("reduce_scatter_single")(Z(1), Z(n), ReduceOp.PREMUL_SUM),
        "PREMUL_SUM needs a factor",
    ),
]
# fmt: on


def one_wrong() -> list[str]:
    """Arguments that one rank alone has wrong are told to all."""
    said = []
    with job(name="wrong") as rank:
        for right, wrong, _ in WRONG:
            with pytest.raises(UsageError) as raised:
                (wrong if rank == 1 else right)(dist.get_world_size())
            said.append(str(raised.value))
        x = ONES(2)
        dist.all_reduce(x)
        assert x.tolist() == [dist.get_world_size()] * 2
    return said


def check_wrong(got: list[list[str]]) -> None:
    assert got[0] == got[1]
    for text, (*_, part) in zip(got[0], WRONG, strict=True):
        assert part in text
        assert text.startswith("rank 1: ")
        assert f"(at {HERE}:" in text


# -- messages ------------------------------------------------------------------------

SENT = [ONES(3), ONES(5), Z(0), ONES(40_000), ONES(2, 3)]
INTO = [Z(3).int(), Z(3), Z(3), Z(4), Z(6)]


def received(source: int | None) -> list[Any]:
    """Messages of other types and lengths; the right one after them arrives."""
    said: list[Any] = []
    with job(name=f"from {source}") as rank:
        works = [dist.isend(x, 1) for x in SENT] if rank == 0 else []
        for x in INTO if rank == 1 else ():
            work = dist.irecv(x, source)
            if x.shape == INTO[-1].shape:
                work.wait()
                said.append([work.source_rank(), x.tolist()])
                continue
            with pytest.raises(MismatchError) as raised:
                work.wait()
            said.append(str(raised.value))
        for work in works:
            work.wait()
        dist.barrier()
    return said


def check_received(got: list[list[Any]]) -> None:
    nothing, said = got
    assert nothing == []
    sent = ["float32[3]", "float32[5]", "float32[0]", "float32[40000]"]
    into = ["int32[3]", "float32[3]", "float32[3]", "float32[4]"]
    *texts, right = said
    for text, x, out in zip(texts, sent, into, strict=True):
        assert f"rank 0 sends {x} with tag 0 (at {HERE}:" in text
        assert f"received into {out} (at {HERE}:" in text
    # Of a message the form is each end's own, as with NCCL.
    assert right == [0, [1.0] * 6]


# -- who does not come, and who is not asked -----------------------------------------


def not_coming() -> str:
    said = ""
    with job(name="late", timeout=timedelta(seconds=1)) as rank:
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            with pytest.raises(TimeoutError_) as raised:
                dist.all_reduce(Z(2))
            said = str(raised.value)
        store.set(f"ended{rank}", "1")
        store.get("ended0")
        store.get("ended1")
    return said


def check_not_coming(got: list[str]) -> None:
    assert got[0].startswith("all_reduce #1 on torch group 0, rank 0: not complete")
    assert "rank 1 on this node has not started it" in got[0]


def asked_for() -> list[list[str]]:
    """Who is in check mode: by torch's variable, by commrt's, by a group's own."""
    from commrt.torch.process_group import CheckedProcessGroup

    found = []
    given = os.environ.pop("COMMRT_DEBUG")
    for level in ("DETAIL", "INFO"):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
        dist.set_debug_level_from_env()
        with job(name=level):
            groups: list[Any] = [dist.group.WORLD, dist.new_group()]
            for check in (True, False):
                options = commrt.torch.Options(check=check)
                groups.append(dist.new_group(pg_options=options))
            checks = [isinstance(each, CheckedProcessGroup) for each in groups]
            found.append(checks)
    os.environ["COMMRT_DEBUG"] = given
    return found


def check_asked_for(got: list[Any]) -> None:
    detail, info = [True, True, True, False], [False, False, True, False]
    assert got == [[detail, info]] * 2


def everything() -> dict[str, Any]:
    return {
        "compared": compared(),
        "allowed": allowed(),
        "repeated": repeated(),
        "one_wrong": one_wrong(),
        "named": received(0),
        "anyone": received(None),
        "not_coming": not_coming(),
        "asked_for": asked_for(),
    }


def test_check_mode_of_two_ranks(torchrun: Any) -> None:
    """In one launch, which takes longer than all of it."""
    env = {"COMMRT_DEBUG": "check"}
    got = torchrun(2, everything, env=env, deadline_s=DEADLINE_S)
    by_name = {name: [each[name] for each in got] for name in got[0]}
    check_compared(by_name["compared"])
    check_allowed(by_name["allowed"])
    check_repeated(by_name["repeated"])
    check_wrong(by_name["one_wrong"])
    check_received(by_name["named"])
    check_received(by_name["anyone"])
    check_not_coming(by_name["not_coming"])
    check_asked_for(by_name["asked_for"])
