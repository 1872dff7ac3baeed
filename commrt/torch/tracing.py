# SPDX-License-Identifier: Apache-2.0
"""A process group's methods while somebody records: torch's calls, as a log has them.

A call of torch's is one operation of the log, whatever commrt makes of it. Its bytes
are those of the tensors that torch passes, so what torch's layers ask for can be
compared with formulas. One that is not waited for ends in the log where its Work is
first seen complete; the engine's own request below the Work notes that by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from commrt.comm import core_of
from commrt.errors import TimeoutError_
from commrt.torch.operands import KNOWN
from commrt.torch.per_call import ASKED
from commrt.torch.work import CommrtWork
from commrt.trace.methods import algorithm_of, stream_of
from commrt.trace.recorder import Group, Kind, Recorder, recorder
from commrt.trace.volumes import MESSAGES
from commrt.vocabulary.operations import COLLECTIVES, SPARSE_OF_TORCH, operation

if TYPE_CHECKING:
    import torch

    from commrt.torch.process_group import CommrtProcessGroup

__all__ = ["TracedWork", "follow_group"]

Key = tuple[str, int, Any, int, int, int, int | None]
"""Operation, bytes, element type, bytes that come, root or peer, tag, stream."""
Read = Callable[[tuple[Any, ...], dict[str, Any]], Key]
_MESH = "mesh_"
"""Prefix that DeviceMesh puts before a dimension's name."""
_DIMENSIONS = {"default_pg": "world", "undefined": ""}


def follow_group(group: CommrtProcessGroup) -> None:
    """Record a group's calls while somebody records."""
    recorder().follow(group, _attach)


def _attach(to: Recorder, group: CommrtProcessGroup) -> Group:
    this = weakref.proxy(group)
    member = group.member
    ranks = list(member.ranks) or list(range(member.size))

    def names() -> tuple[str, str, str]:
        desc = this.getGroupDesc()
        return this.getGroupName(), desc, _DIMENSIONS.get(desc, desc[_after(desc) :])

    world = core_of(group.communicator).world
    key = f"torch/{world.job}/{member.name}/{','.join(map(str, ranks))}"
    logged = to.group(
        Group(key, "torch", ranks, member.rank, world.job, world.size, names)
    )
    for name, (op, read, reads) in _CALLS.items():
        _record_method(to, group, logged, name, read(op, member.size), reads)
    _record_batches(to, group, logged)
    return logged


def _after(desc: str) -> int:
    return len(_MESH) if desc.startswith(_MESH) else 0


def _record_method(
    to: Recorder,
    group: CommrtProcessGroup,
    logged: Group,
    name: str,
    read: Read,
    reads: str,
) -> None:
    this, pending = weakref.ref(group), logged.pending

    def look(args: tuple[Any, ...], more: dict[str, Any]) -> Sequence[Kind] | None:
        asked = ASKED.get()
        try:
            key = read(args, more)
            whole = key if asked is None else (key, repr(asked))
            kind = logged.kinds.get(whole)
            if kind is None:
                kind = logged.keep(whole, _kind(this(), logged, key, asked))
        except (AttributeError, TypeError, IndexError, KeyError, RuntimeError):
            return None  # what is wrong with it, the call will say
        return (kind,)

    def watch(work: CommrtWork | None, first: int, num: int) -> CommrtWork | None:
        if work is None:  # torch coalesces
            pending.append(first)
        else:
            _watch(work, (first,))
        return work

    to.replace(
        group,
        name,
        to.method(
            *(name, getattr(type(group), name), group, look),
            reads=reads,
            watch=watch,
            calls=group.calls,
            asked=ASKED,
        ),
    )


def _record_batches(to: Recorder, group: CommrtProcessGroup, logged: Group) -> None:
    """End the records of coalesced calls with their one Work."""
    this, pending = weakref.ref(group), logged.pending

    def traced(device: torch.device | None = None) -> CommrtWork:
        records = pending.copy()
        pending.clear()
        found = this()
        assert found is not None  # torch calls a method of it
        result = found.calls.end_batch()
        _watch(result, records)
        return result

    to.replace(group, "_end_coalescing", traced)


def _watch(work: CommrtWork, records: Sequence[int]) -> None:
    work.__class__ = TracedWork
    work.records = records


class TracedWork(CommrtWork):
    """A Work that notes its end in the log, as its request does not."""

    records: Sequence[int]
    """Numbers of its records."""

    def is_completed(self) -> bool:
        """Return the result of the Work's method."""
        done = super().is_completed()
        if done:
            ring = recorder().ring
            for number in self.records:
                ring.end(number)
        return done

    def _wait_for(self, request: Any, limit: float | None) -> None:
        try:
            super()._wait_for(request, limit)
        except TimeoutError_ as error:  # it stays in flight
            recorder().tell(error)
            raise

    def _settle(self, request: Any) -> None:
        super()._settle(request)
        ring = recorder().ring
        for number in self.records:
            kind = ring.kind_of(number)
            if self._error is not None:
                ring.fail(number, 1, self._error)
            elif kind is not None and not kind.on_device:
                ring.end(number)


def _kind(
    group: CommrtProcessGroup | None,
    logged: Group,
    key: Key,
    asked: Mapping[str, Any] | None,
) -> Kind:
    op, nbytes, dtype, out_nbytes, who, tag, stream = key
    assert group is not None
    comm = core_of(group.communicator)
    name = KNOWN.get(dtype, "uint8")
    is_message = op in MESSAGES
    if is_message:
        near = 0 <= who < comm.size and comm.shares_memory_with(who)
        algorithm = "shm/message" if near else "mpi/message"
    elif op not in COLLECTIVES:
        algorithm = ""
    else:
        algorithm = algorithm_of(
            *(comm, op, nbytes, name),
            root=max(who, 0),
            on_device=stream is not None,
            asked=asked,
        )
    return Kind(
        *(logged, op, nbytes),
        dtype="" if dtype is None else str(dtype).removeprefix("torch."),
        itemsize=1 if dtype is None else dtype.itemsize,
        out_nbytes=out_nbytes,
        peer=who if is_message else -1,
        tag=tag,
        root=-1 if is_message else who,
        algorithm=algorithm,
        stream=stream,
    )


# -- what a call is --------------------------------------------------------------


def _argument(args: tuple[Any, ...], more: dict[str, Any], at: int, *names: str) -> Any:
    if len(args) > at:
        return args[at]
    return next((more[name] for name in names if name in more), None)


def _first(tensors: Any) -> Any:
    """Return the tensor of a list of one, or of a list of one list, or itself."""
    while isinstance(tensors, list | tuple):
        tensors = tensors[0]
    return tensors


def _stream(x: Any) -> int | None:
    """Return the stream that orders a call on a tensor; None: it is on the host."""
    return None if x.is_cpu else stream_of(x, {})


def _total(tensors: Any) -> int:
    """Return the bytes of tensors in lists, or of one."""
    if isinstance(tensors, list | tuple):
        return sum(map(_total, tensors))
    return int(tensors.nbytes)


def _reduction(op: str, size: int) -> Read:
    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        tensors = args[0] if args else more["tensors"]
        x: torch.Tensor = tensors[0] if type(tensors) is list else tensors
        try:
            nbytes = x.nbytes
        except RuntimeError:  # torch does not say it of sparse ones
            stored = x._indices().nbytes + x._values().nbytes
            key = (SPARSE_OF_TORCH, stored, x.dtype, stored, -1, 0)
            return (*key, _stream(x))
        return (op, nbytes, x.dtype, nbytes, -1, 0, _stream(x))

    return read


def _several(op: str, size: int) -> Read:
    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        tensors = _argument(args, more, 0, "tensors")
        x, nbytes = _first(tensors), _total(tensors)
        return (op, nbytes, x.dtype, nbytes, -1, 0, _stream(x))

    return read


def _rooted(op: str, size: int) -> Read:
    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        x = _first(_argument(args, more, 0, "tensors"))
        root = _root(_argument(args, more, 1, "opts", "root"))
        return (op, x.nbytes, x.dtype, x.nbytes, root, 0, _stream(x))

    return read


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


def _from_input(op: str, size: int) -> Read:
    """Return a reader of calls whose logical buffer is a rank's input."""

    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        given = _argument(args, more, 1, "input", "inputs")
        got = _argument(args, more, 0, "output", "outputs")
        x = _first(given)
        return (op, _total(given), x.dtype, _total(got), -1, 0, _stream(x))

    return read


def _from_output(op: str, size: int) -> Read:
    """Return a reader of calls whose logical buffer is a rank's output."""

    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        got = _argument(args, more, 0, "output", "outputs")
        x, nbytes = _first(got), _total(got)
        return (op, nbytes, x.dtype, nbytes, -1, 0, _stream(x))

    return read


def _parts(op: str, size: int) -> Read:
    """Return a reader of calls whose logical buffer only the root has."""

    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        at = 1 if operation(op).output_on == "root" else 0
        x = _first(_argument(args, more, at, ("outputs", "inputs")[at]))
        root = _root(_argument(args, more, 2, "opts"))
        nbytes = x.nbytes * size
        return (op, nbytes, x.dtype, nbytes, root, 0, _stream(x))

    return read


def _nothing(op: str, size: int) -> Read:
    return lambda args, more: (op, 0, None, 0, -1, 0, None)


def _message(op: str, size: int) -> Read:
    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        x = _first(_argument(args, more, 0, "tensors"))
        peer = _argument(args, more, 1, "dst_rank", "src_rank")
        tag = _argument(args, more, 2, "tag") or 0
        return (op, x.nbytes, x.dtype, x.nbytes, peer, tag, _stream(x))

    return read


def _from_anyone(op: str, size: int) -> Read:
    def read(args: tuple[Any, ...], more: dict[str, Any]) -> Key:
        x = _first(_argument(args, more, 0, "tensors"))
        tag = _argument(args, more, 1, "tag") or 0
        return (op, x.nbytes, x.dtype, x.nbytes, -1, tag, _stream(x))

    return read


_CALLS: dict[str, tuple[str, Callable[[str, int], Read], str]] = {
    "allreduce": ("allreduce", _reduction, "a--"),
    "allreduce_coalesced": ("allreduce", _several, "a-"),
    "reduce": ("reduce", _rooted, "ar--"),
    "broadcast": ("bcast", _rooted, "ar-"),
    "reduce_scatter": ("reduce_scatter", _from_input, "aa--"),
    "reduce_scatter_single": ("reduce_scatter", _from_input, "aa-"),
    "_reduce_scatter_base": ("reduce_scatter", _from_input, "aa-"),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _from_input, "aa-"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _from_input, "aa-"),
    "allgather": ("allgather", _from_output, "a---"),
    "allgather_coalesced": ("allgather", _from_output, "a--"),
    "all_gather_single": ("allgather", _from_output, "a--"),
    "_allgather_base": ("allgather", _from_output, "a--"),
    "all_gather_single_coalesced": ("allgather", _from_output, "a--"),
    "allgather_into_tensor_coalesced": ("allgather", _from_output, "a--"),
    "gather": ("gather", _parts, "-ar-"),
    "gather_single": ("gather", _parts, "-ar"),
    "gather_into_tensor": ("gather", _parts, "-ar"),
    "scatter": ("scatter", _parts, "a-r-"),
    "all_to_all_single": ("alltoall", _from_input, "aa---"),
    "alltoall_base": ("alltoall", _from_input, "aa---"),
    "alltoall": ("alltoall", _from_input, "aa--"),
    "barrier": ("barrier", _nothing, "--"),
    "monitored_barrier": ("barrier", _nothing, "--"),
    "send": ("send", _message, "aii"),
    "recv": ("recv", _message, "aii"),
    "recv_anysource": ("recv", _from_anyone, "ai"),
}
"""torch's methods: the operation in the log, the reader of a call, and the code for how
C++ reads its arguments (native/calls/recorded_method.hpp)."""
