# SPDX-License-Identifier: Apache-2.0
"""A communicator's methods while somebody records.

What a call is, is read off its first array and its arguments: the same key, the same
kind. Only the first call of a kind is looked at in full. Calls that commrt makes for
itself within one of the user's are passed on as they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from commrt.errors import CommError, UsageError
from commrt.operations import COLLECTIVES, OpSpec, operation, rule_nbytes
from commrt.trace.call_sites import CORE
from commrt.trace.folder import begin_where_asked
from commrt.trace.recorder import (
    END,
    Group,
    Kind,
    Record,
    Recorder,
    now,
    recorder,
)
from commrt.trace.requests import TracedRequest

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["algorithm_of", "follow_communicator", "group_of_communicator"]

_OTHERS = ("sparse_allreduce", "topk_allreduce", "redistribute")
_PAIR = {"send": ("dest", "tag"), "recv": ("source", "tag")}
_SAID = ("op", "root", "algorithm", "backend", "compress")
"""Arguments of a collective that make another kind of it."""
Find = Callable[["Communicator", tuple[Any, ...], dict[str, Any]], list[Kind]]


def follow_communicator(comm: Communicator, *, is_users: bool = True) -> None:
    """Record a communicator's calls while somebody records, if it is the user's."""
    if is_users:
        begin_where_asked()
        recorder().follow(comm, _attach)


def group_of_communicator(comm: Communicator) -> Group:
    """Return what stands for a communicator in the log."""
    name = comm.name

    def names() -> tuple[str, str, str]:
        return name, "", ""

    key = f"{name}/{comm._identity}/{','.join(map(str, comm._ranks))}"
    world = comm._world
    return Group(*(key, "commrt", comm._ranks, comm.rank, world.job, world.size, names))


def _attach(to: Recorder, comm: Communicator) -> Group:
    group = to.group(group_of_communicator(comm))
    for name in COLLECTIVES:
        _replace(to, comm, group, name, _collective(operation(name), group))
    for name in _OTHERS:
        _replace(to, comm, group, name, _other(name, group))
    for name in ("send", "recv"):
        _replace(to, comm, group, name, _message(name, group))
    _replace(to, comm, group, "sendrecv", _two_messages(group))
    _replace(to, comm, group, "multi_sendrecv", _many_messages(group))
    return group


def _replace(
    to: Recorder, comm: Communicator, group: Group, name: str, find: Find
) -> None:
    held = vars(comm).get(name)  # such as one that shows ranges to a profiler
    function = getattr(type(comm), name)
    # Not the communicator itself, which would then outlive its last user.
    this = weakref.ref(comm)
    append, of_caller, getframe = to.ring.append, to.sites.of_caller, sys._getframe

    def run(comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        return function(comm, *args, **more) if held is None else held(*args, **more)

    def traced(*args: Any, **more: Any) -> Any:
        site = of_caller(getframe(1))
        comm = this()
        assert comm is not None, "its method is called, so somebody has it"
        if site is CORE:
            return run(comm, args, more)
        records: list[Record] = []
        for kind in find(comm, args, more):
            counter = kind.counter
            seq = counter[0]
            counter[0] = seq + 1
            record = [kind, site, seq, 0, 0]
            append(record)
            records.append(record)
        begin = now()
        for record in records:
            record[3] = begin
        try:
            result = run(comm, args, more)
        except UsageError:
            for record in records:
                to.taken_back(record)
            raise
        except BaseException as error:
            for record in records:
                to.failed(record, error)
            raise
        if more and more.get("nonblocking"):
            return TracedRequest(result, records, to)
        ended = now()
        for record in records:
            record[END] = ended
        return result

    traced.__name__ = name
    to.replace(comm, name, traced)


# -- what a call is --------------------------------------------------------------


def _collective(spec: OpSpec, group: Group) -> Find:
    kinds, name, counts = group.kinds, spec.name, spec.count_arguments

    def find(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        x = args[0] if args else more.get("x")
        key: Hashable
        try:
            like = more.get("out") if x is None and more else x
            key = (name, like.nbytes, like.dtype) if like is not None else (name,)
            if more:
                key = (*key, x is None, *map(more.get, _SAID))
                if counts:
                    key = (*key, *(tuple(more.get(each) or ()) for each in counts))
            kind = kinds.get(key)
        except (AttributeError, TypeError):  # of which the call may speak
            key, kind = (name, repr(type(x))), None
        if kind is None:
            made = _kind_of_collective(comm, spec, group, x, more)
            kind = group.keep(key, made)
        return [kind]

    return find


def _kind_of_collective(
    comm: Communicator, spec: OpSpec, group: Group, x: Any, more: dict[str, Any]
) -> Kind:
    out = more.get("out")
    like = out if x is None else x
    dtype, itemsize = element_of(like)
    nbytes = _nbytes_of_collective(comm, spec, x, out, more, itemsize)
    asked = more.get("algorithm") or more.get("backend")
    on_device = _is_on_device(like)
    algorithm = str(asked) if asked is not None else ""
    if not algorithm:
        algorithm = algorithm_of(
            *(comm, spec.name, nbytes, dtype),
            op=more.get("op", "sum"),
            root=more.get("root", 0),
            on_device=on_device,
        )
    out_nbytes = None
    if spec.name == "alltoallv":
        out_nbytes = _sum(more.get("recv_counts")) * itemsize
    return Kind(
        *(group, spec.name, nbytes),
        dtype=dtype,
        itemsize=itemsize,
        out_nbytes=out_nbytes,
        root=_number(more.get("root", 0)) if spec.has_root else -1,
        algorithm=algorithm,
        on_device=on_device,
    )


def _nbytes_of_collective(
    comm: Communicator,
    spec: OpSpec,
    x: Any,
    out: Any,
    more: dict[str, Any],
    itemsize: int,
) -> int:
    """Return the bytes of the logical buffer."""
    if spec.x_count == "none":
        return 0
    counts = more.get(spec.count_arguments[0]) if spec.count_arguments else None
    if counts is not None:
        return _sum(counts) * itemsize
    if x is not None:
        return nbytes_of(x) * (comm.size if spec.out_count == "times_size" else 1)
    return nbytes_of(out) * (comm.size if spec.out_count == "div_size" else 1)


def _other(name: str, group: Group) -> Find:
    def find(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        x = args[0] if args else more.get("x")
        nbytes = nbytes_of(x)
        dtype, itemsize = element_of(x)
        key = (name, nbytes, dtype)
        kind = group.kinds.get(key)
        if kind is None:
            made = Kind(
                *(group, name, nbytes),
                dtype=dtype,
                itemsize=itemsize,
                on_device=_is_on_device(x),
            )
            kind = group.keep(key, made)
        return [kind]

    return find


def _message(name: str, group: Group) -> Find:
    peer_name, tag_name = _PAIR[name]

    def find(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        x = args[0] if args else more.get("x", more.get("out"))
        peer, tag = more.get(peer_name), more.get(tag_name, 0)
        return [_kind_of_message(comm, group, name, x, peer, tag)]

    return find


def _two_messages(group: Group) -> Find:
    def find(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        x = args[0] if args else more.get("x")
        dest, source = more.get("dest"), more.get("source")
        sendtag, recvtag = more.get("sendtag", 0), more.get("recvtag", 0)
        return [
            _kind_of_message(comm, group, "send", x, dest, sendtag),
            _kind_of_message(comm, group, "recv", more.get("out"), source, recvtag),
        ]

    return find


def _many_messages(group: Group) -> Find:
    def find(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        found = []
        for name, argument in (("send", "sends"), ("recv", "recvs")):
            with suppress(TypeError, ValueError):  # of which the call will speak
                for x, peer, *tag in more.get(argument, ()):
                    of = tag[0] if tag else 0
                    found.append(_kind_of_message(comm, group, name, x, peer, of))
        return found

    return find


def _kind_of_message(
    comm: Communicator, group: Group, name: str, x: Any, peer: Any, tag: Any
) -> Kind:
    key: Hashable
    try:
        key = (name, x.nbytes, x.dtype, peer, tag)
        kind = group.kinds.get(key)
    except (AttributeError, TypeError):
        key, kind = (name, repr(type(x)), repr(peer), repr(tag)), None
    if kind is None:
        dtype, itemsize = element_of(x)
        number = _number(peer)
        near = number >= 0 and number < comm.size and comm.shares_memory_with(number)
        made = Kind(
            *(group, name, nbytes_of(x)),
            dtype=dtype,
            itemsize=itemsize,
            peer=number,
            tag=_number(tag),
            algorithm="shm/message" if near else "mpi/message",
            on_device=_is_on_device(x),
        )
        kind = group.keep(key, made)
    return kind


def algorithm_of(
    comm: Communicator,
    coll: str,
    nbytes: int,
    dtype: str,
    *,
    op: Any = "sum",
    root: Any = 0,
    on_device: bool = False,
) -> str:
    """Return what runs such a call, as ``backend/algorithm``; "" if that is not known.

    It is asked of the policy that the call itself asks, once for a kind of calls.
    """
    spec = operation(coll)
    if comm.size == 1:
        return "single/none"
    with suppress(CommError):
        found = comm.explain(
            coll,
            rule_nbytes(coll, nbytes, comm.size),
            dtype=dtype or "uint8",
            **({"op": op} if spec.reduces else {}),
            root=root if spec.has_root else 0,
            device="cuda" if on_device else "host",
        )
        return str(found.choice.candidate)
    return ""


# -- arrays ----------------------------------------------------------------------


def nbytes_of(x: Any) -> int:
    """Return an array's bytes, whoever made it; of a sparse one, of what it stores."""
    if x is None:
        return 0
    found = getattr(x, "nbytes", None)
    if isinstance(found, int):
        return found
    if isinstance(x, tuple):
        return sum(nbytes_of(each) for each in x if hasattr(each, "dtype"))
    parts = getattr(x, "indices", None), getattr(x, "values", None)
    if any(callable(part) or part is None for part in parts):
        return 0
    return sum(map(nbytes_of, parts))


def element_of(x: Any) -> tuple[str, int]:
    """Return an array's element type, as commrt calls it, and its bytes."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return "", 1
    size = getattr(dtype, "itemsize", 1)
    return str(dtype).removeprefix("torch."), size if isinstance(size, int) else 1


def _is_on_device(x: Any) -> bool:
    from commrt.device_arrays import is_on_device

    with suppress(Exception):  # of which the call will speak
        return x is not None and bool(is_on_device(x))
    return False


def _sum(counts: Sequence[Any] | None) -> int:
    with suppress(TypeError, ValueError):
        return sum(int(count) for count in counts or ())
    return 0


def _number(value: Any) -> int:
    with suppress(TypeError, ValueError):
        return int(value)
    return -1
