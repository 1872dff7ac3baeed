# SPDX-License-Identifier: Apache-2.0
"""Kinds of tensors, and every argument of every call of torch.distributed for them.

Runs by itself, in a process of its own: ``python tensor_kinds.py right|refused``. What
each case gave is a line of JSON, written when the case has ended. So a case that kills
the process is the first one without a line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

warnings.simplefilter("ignore")  # torch's, of what is deprecated

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch._subclasses.functional_tensor import (  # noqa: E402
    FunctionalTensor,
    FunctionalTensorMode,
)
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import commrt.torch  # noqa: E402, F401

SIZE = 4
Make = Callable[[int], Any]


def values(rank: int) -> torch.Tensor:
    """Return the values of a rank, as the tensor that most kinds are made of."""
    return torch.arange(SIZE, dtype=torch.float32) + 1 + rank


class Marked(torch.Tensor):
    """A subclass with memory; it says wrong things of itself."""

    def data_ptr(self) -> int:
        """Return no address of anything."""
        return 4096

    def numel(self) -> int:
        """Return more elements than there are."""
        return 1 << 30


class Silent(torch.Tensor):
    """A subclass whose functions torch does not ask for."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Wrapper(torch.Tensor):
    """A subclass without memory that hands on what is inside, as torch's examples."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        """Wrap a tensor."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function with the tensors inside."""
        args, kwargs = tree_map_only(Wrapper, lambda x: x.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


class Closed(Wrapper):
    """A subclass without memory that takes part in nothing."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse."""
        raise NotImplementedError(f"closed to {function}")


class Endless(torch.Tensor):
    """A subclass without memory that asks itself for ever."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function with itself."""
        return function(*args, **(kwargs or {}))


def _reduced(rank: int) -> Any:
    return functional.all_reduce(values(rank) / 2, "sum", dist.group.WORLD)


def _dtensor(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(values(rank), mesh, [Replicate()], run_check=False)


def _local_result(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(values(rank), mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Replicate()], async_op=True).to_local()


def _freed(rank: int) -> torch.Tensor:
    x = values(rank)
    x.untyped_storage().resize_(0)
    return x


def _view_of_freed(rank: int) -> torch.Tensor:
    whole = torch.ones(100)
    part = whole[50 : 50 + SIZE]
    whole.untyped_storage().resize_(0)
    return part


def _shortened(rank: int) -> torch.Tensor:
    x = torch.ones(1 << 20)
    x.untyped_storage().resize_(8)
    return x.view(SIZE, -1)


def _fake(rank: int) -> Any:
    with FakeTensorMode():
        return torch.ones(SIZE)


def _functional(rank: int) -> Any:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(values(rank))


def _batched(rank: int) -> Any:
    pairs = torch.stack([values(rank)] * 2)
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        return torch._C._functorch._add_batch_dim(pairs, 0, level)
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def _quantized(rank: int) -> torch.Tensor:
    return torch.quantize_per_tensor(values(rank), 1.0, 0, torch.quint8)


def _masked(rank: int) -> Any:
    return torch.masked.masked_tensor(values(rank), torch.ones(SIZE).bool())


def _grown(rank: int) -> torch.Tensor:
    return torch.ones(SIZE, requires_grad=True) * values(rank)


def _inferred(rank: int) -> torch.Tensor:
    with torch.inference_mode():
        return values(rank)


def _strided(rank: int) -> torch.Tensor:
    return torch.stack([values(rank)] * 2, 1)[:, 0]


def _conjugate(rank: int) -> torch.Tensor:
    return torch.complex(values(rank), values(rank) + 1).conj()


RIGHT: dict[str, Make] = {
    "parameter": lambda rank: torch.nn.Parameter(values(rank)),
    "buffer": lambda rank: torch.nn.Buffer(values(rank)),
    "subclass": lambda rank: values(rank).as_subclass(Marked),
    "silent": lambda rank: values(rank).as_subclass(Silent),
    "functional result": _reduced,
    "to_local": _local_result,
    "wrapper": lambda rank: Wrapper(values(rank)),
    "nested wrapper": lambda rank: Wrapper(Wrapper(values(rank))),
    "strided wrapper": lambda rank: Wrapper(_strided(rank)),
    "negative": lambda rank: torch._neg_view(values(rank)),
    "imaginary part": lambda rank: _conjugate(rank).imag,
    "strided": _strided,
    "lazy copy": lambda rank: torch._lazy_clone(values(rank)),
    "inference": _inferred,
    "result with gradient": _grown,
}
REFUSED: dict[str, Make] = {
    "dtensor": _dtensor,
    "closed": lambda rank: Closed(values(rank)),
    "endless": lambda rank: torch.Tensor._make_wrapper_subclass(Endless, (SIZE,)),
    "two": lambda rank: TwoTensor(values(rank), values(rank)),
    "masked": _masked,
    "fake": _fake,
    "meta": lambda rank: torch.ones(SIZE, device="meta"),
    "functional": lambda rank: torch._to_functional_tensor(values(rank)),
    "functional in Python": _functional,
    "batched": _batched,
    "csr": lambda rank: values(rank).view(2, 2).to_sparse_csr(),
    "mkldnn": lambda rank: values(rank).to_mkldnn(),
    "quantized": _quantized,
    "nested": lambda rank: torch.nested.nested_tensor([values(rank)[:2]] * 2),
    "jagged": lambda rank: torch.nested.nested_tensor(
        [values(rank)[:1], values(rank)[1:]], layout=torch.jagged
    ),
    "zeros": lambda rank: torch._efficientzerotensor((SIZE,)),
    "freed": _freed,
    "view of freed": _view_of_freed,
    "shortened": _shortened,
    "uninitialized": lambda rank: torch.nn.UninitializedParameter(),
    "number": lambda rank: 5,
    "array": lambda rank: values(rank).numpy(),
    "class": lambda rank: torch.Tensor,
}


def empty(count: int = SIZE) -> torch.Tensor:
    """Return an ordinary output."""
    return torch.zeros(count)


# Each call takes the tensor, this rank and the number of ranks, and returns what other
# tensors it has filled. It goes past torch's own functions, which look at some
# arguments themselves, to the group that they ask.
Call = Callable[[Any, int, int], Any]


def _group() -> Any:
    return dist.group.WORLD


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


def _done(work: Any, *filled: Any) -> list[Any]:
    _end(work)
    return list(filled)


def _asynchronous(x: Any, rank: int, size: int) -> Any:
    opts = dist.AllreduceOptions()
    opts.asyncOp = True
    return _done(_group().allreduce([x], opts))


def _batch(x: Any, rank: int, size: int) -> Any:
    peer = (rank + 1) % size
    out = empty()
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


def _sent(x: Any, rank: int, size: int) -> Any:
    out = empty()
    sent = _group().send([x], (rank + 1) % size, 0)
    _end(_group().recv([out], (rank - 1) % size, 0))
    return _done(sent, out)


def _received(x: Any, rank: int, size: int) -> Any:
    received = _group().recv([x], (rank - 1) % size, 0)
    _end(_group().send([values(rank)], (rank + 1) % size, 0))
    return _done(received)


def _received_from_anyone(x: Any, rank: int, size: int) -> Any:
    received = _group().recv_anysource([x], 0)
    _end(_group().send([values(rank)], (rank + 1) % size, 0))
    return _done(received)


def _gathered(x: Any, rank: int, size: int) -> Any:
    out = [empty() for _ in range(size)] if rank == 0 else []
    return _done(_group().gather([out] if out else [], [x], dist.GatherOptions()), *out)


def _gathered_into(x: Any, rank: int, size: int) -> Any:
    others = [empty() for _ in range(size - 1)]
    into = [[x, *others]] if rank == 0 else []
    return _done(_group().gather(into, [values(rank)], dist.GatherOptions()), *others)


def _scattered(x: Any, rank: int, size: int) -> Any:
    out, rest = empty(), [values(9 + i) for i in range(size - 1)]
    parts = [[x, *rest]] if rank == 0 else []
    return _done(_group().scatter([out], parts, dist.ScatterOptions()), out)


def _scattered_into(x: Any, rank: int, size: int) -> Any:
    parts = [[values(i) for i in range(size)]] if rank == 0 else []
    return _done(_group().scatter([x], parts, dist.ScatterOptions()))


def _others(size: int) -> list[torch.Tensor]:
    return [empty() for _ in range(size - 1)]


def _into(call: Callable[..., Any]) -> Call:
    """Return a call whose other tensors are outputs, which it is given."""

    def filled(x: Any, rank: int, size: int) -> Any:
        out = _others(size)
        return _done(call(x, out, rank, size), *out)

    return filled


def _from(call: Callable[..., Any], count: Callable[[int], int]) -> Call:
    """Return a call with one more output of so many elements."""

    def filled(x: Any, rank: int, size: int) -> Any:
        out = empty(count(size))
        return _done(call(out, x, rank, size), out)

    return filled


CALLS: dict[str, Call] = {
    "allreduce": lambda x, rank, size: _done(_group().allreduce([x])),
    "allreduce, asynchronous": _asynchronous,
    "allreduce_coalesced": lambda x, rank, size: _done(
        _group().allreduce_coalesced([values(rank), x])
    ),
    "reduce": lambda x, rank, size: _done(_group().reduce([x], dist.ReduceOptions())),
    "broadcast": lambda x, rank, size: _done(_group().broadcast([x], 0)),
    "allgather, input": lambda x, rank, size: _done(
        _group().allgather([out := [empty() for _ in range(size)]], [x]), *out
    ),
    "allgather, outputs": _into(
        lambda x, out, rank, size: _group().allgather([[*out, x]], [values(rank)])
    ),
    "allgather_coalesced": lambda x, rank, size: _done(
        _group().allgather_coalesced([[empty()] for _ in range(size)], [x]),
    ),
    "all_gather_single, input": _from(
        lambda out, x, rank, size: _group().all_gather_single(out, x),
        lambda size: size * SIZE,
    ),
    "all_gather_single, output": lambda x, rank, size: _done(
        _group().all_gather_single(x, values(rank)[: SIZE // size].clone())
    ),
    "all_gather_single_coalesced": _from(
        lambda out, x, rank, size: _group().all_gather_single_coalesced([out], [x]),
        lambda size: size * SIZE,
    ),
    "reduce_scatter, inputs": _from(
        lambda out, x, rank, size: _group().reduce_scatter(
            [out], [[*_others(size), x]]
        ),
        lambda size: SIZE,
    ),
    "reduce_scatter, output": lambda x, rank, size: _done(
        _group().reduce_scatter([x], [[values(rank + i) for i in range(size)]])
    ),
    "reduce_scatter_single, input": _from(
        lambda out, x, rank, size: _group().reduce_scatter_single(out, x),
        lambda size: SIZE // size,
    ),
    "reduce_scatter_single, output": lambda x, rank, size: _done(
        _group().reduce_scatter_single(x, torch.cat([values(rank)] * size))
    ),
    "reduce_scatter_single_coalesced": _from(
        lambda out, x, rank, size: _group().reduce_scatter_single_coalesced([out], [x]),
        lambda size: SIZE // size,
    ),
    "all_to_all_single, input": _from(
        lambda out, x, rank, size: _group().all_to_all_single(out, x),
        lambda size: SIZE,
    ),
    "all_to_all_single, output": lambda x, rank, size: _done(
        _group().all_to_all_single(x, values(rank))
    ),
    "all_to_all_single, splits": _from(
        lambda out, x, rank, size: _group().all_to_all_single(
            out, x, [SIZE // size] * size, [SIZE // size] * size
        ),
        lambda size: SIZE,
    ),
    "alltoall, inputs": lambda x, rank, size: _done(
        _group().alltoall(
            out := [empty() for _ in range(size)],
            [*(values(rank) for _ in range(size - 1)), x],
        ),
        *out,
    ),
    "alltoall, outputs": _into(
        lambda x, out, rank, size: _group().alltoall(
            [x, *out], [values(rank) for _ in range(size)]
        )
    ),
    "gather, input": _gathered,
    "gather, outputs": _gathered_into,
    "scatter, inputs": _scattered,
    "scatter, output": _scattered_into,
    "send": _sent,
    "recv": _received,
    "recv, from anyone": _received_from_anyone,
    "batch": _batch,
}


def shown(value: Any) -> Any:
    """Return what a tensor of any right kind holds."""
    while isinstance(value, Wrapper):
        value = value.inner
    with torch.no_grad():
        return torch.Tensor.tolist(value.detach().clone().as_subclass(torch.Tensor))


def said_right(kind: str, call: str, rank: int, size: int) -> Any:
    """Return what a call gives for a kind, and for an ordinary tensor like it."""
    both = []
    for is_plain in (False, True):
        x = RIGHT[kind](rank)
        if is_plain:
            x = torch.tensor(shown(x))
        filled = CALLS[call](x, rank, size)
        both.append([shown(x), *(shown(each) for each in filled)])
    return both


def said_refused(kind: str, call: str) -> Any:
    """Return how a call of a group of one ends: the error's classes and text."""
    try:
        CALLS[call](REFUSED[kind](0), 0, 1)
    except Exception as error:  # noqa: BLE001  any of them is an answer
        return [[each.__name__ for each in type(error).__mro__], str(error)]
    return [[], ""]


def _run(what: str, rank: int, size: int, store: Any, cases: list[list[str]]) -> None:
    dist.init_process_group(
        "commrt",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
    )
    for kind, call in cases:
        if what == "right":
            found = said_right(kind, call, rank, size)
        else:
            found = said_refused(kind, call)
        sys.stdout.write(json.dumps([rank, kind, call, found]) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def main() -> None:
    """Run the cases that are named on the standard input, as a list in JSON."""
    what, cases = sys.argv[1], json.loads(sys.stdin.read())
    if what == "refused":
        _run(what, 0, 1, dist.HashStore(), cases)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "store")
        child = os.fork()  # nothing has started a thread so far, and imports take long
        store = dist.FileStore(file, 2)
        if child == 0:
            status = 1
            try:
                _run(what, 1, 2, store, cases)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        try:
            _run(what, 0, 2, store, cases)
        finally:
            _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"rank 1 ended with the status {status}")


if __name__ == "__main__":
    main()
