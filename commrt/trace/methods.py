# SPDX-License-Identifier: Apache-2.0
"""A communicator's methods while somebody records.

C++ reads the facts of a call from its arrays and arguments. It asks this module at the
first call of a kind. Calls that commrt makes for itself, within one of the user's, are
passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast

from commrt.arrays.plain import array_of, is_plain
from commrt.errors import CommError
from commrt.trace.folder import begin_where_asked
from commrt.trace.recorder import Group, Kind, Recorder, recorder
from commrt.trace.requests import TracedRequest
from commrt.trace.traced import Traced, TracedNeighbors
from commrt.vocabulary.operations import (
    RECEIVED,
    ROWS,
    SENT,
    CallSpec,
    OpSpec,
    by_name,
    operation,
    other_call,
    rule_nbytes,
)
from commrt.vocabulary.wire_formats import EXACT

__all__ = [
    "algorithm_of",
    "follow_communicator",
    "group_of_communicator",
    "kinds_of",
    "named_behind_first",
    "stream_of",
]

_SAID = ("op", "root", "algorithm", "backend", "compress")
"""Arguments of a collective that make another kind of it."""
_WISHES = ("algorithm", "backend", "params")
[_SEND], [_RECV] = SENT, RECEIVED
Arguments: TypeAlias = tuple[Any, ...]
LookAt = Callable[["Traced", Arguments, dict[str, Any]], Sequence[Kind]]


def follow_communicator(held: object, comm: Traced) -> None:
    """Record the calls of a communicator of the user while somebody records.

    Args:
        held: what the program holds, and whose methods it calls.
        comm: the facts of that. It must not refer to what is held.
    """
    begin_where_asked()

    def attach(to: Recorder, target: Any) -> Group:
        return _attach(to, target, comm)

    recorder().follow(held, attach)


def group_of_communicator(comm: Traced) -> Group:
    """Return the log's entry for a communicator."""
    name = comm.name

    def names() -> tuple[str, str, str]:
        return name, "", ""

    world = comm.world
    members = ",".join(map(str, comm.world_ranks))
    key = f"commrt/{world.job}/{name}/{comm.identity}/{members}"
    return Group(
        *(key, "commrt", comm.world_ranks, comm.rank, world.job, world.size, names)
    )


def _attach(to: Recorder, held: object, comm: Traced) -> Group:
    group = to.group(group_of_communicator(comm))
    for name, (reads, make) in _METHODS.items():
        if hasattr(type(held), name):
            _record_method(to, held, comm, name, reads, make(group, name))
    return group


def kinds_of(
    comm: Traced,
    group: Group,
    name: str,
    args: Arguments,
    more: dict[str, Any],
) -> Sequence[Kind]:
    """Return what a call of a communicator's method is: one, or several messages."""
    _, make = _METHODS[name]
    return make(group, name)(comm, *named_behind_first(name, args, more))


def _record_method(
    to: Recorder, held: object, comm: Traced, name: str, reads: str, look: LookAt
) -> None:
    """Record a method's calls."""
    # As a bound method does, it keeps its communicator. The garbage collector knows.
    own = vars(held).get(name)  # such as one that shows ranges to a profiler
    function = getattr(type(held), name) if own is None else own

    def looked_at(args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        return look(comm, *named_behind_first(name, args, more))

    owner = held if own is None else None
    method = to.method(
        *(name, function, owner, looked_at), reads=reads, watch=TracedRequest
    )
    to.replace(held, name, method)


def named_behind_first(
    name: str, args: Arguments, more: dict[str, Any]
) -> tuple[Arguments, dict[str, Any]]:
    """Return a call's arguments with no more than the array by position.

    A number or a list is the array that is made of it.
    """
    row = _ROWS[name]
    if args and row.positional and is_plain(args[0]):
        with suppress(CommError):  # of which the call will speak
            args = (array_of(args[0], name), *args[1:])
    if len(args) > 1 and row.positional:
        with suppress(TypeError):  # of which the call will speak
            named = by_name(row, args, more)
            return (named.pop(row.positional[0]),), named
    return args, more


# -- what a call is --------------------------------------------------------------


def _key_of(
    name: str, args: Arguments, more: dict[str, Any], counts: tuple[str, ...]
) -> Hashable:
    """Return a key that tells a call from others; None if there is no such key."""
    x: Any = args[0] if args else more.get("x")
    like: Any = more.get("out") if x is None else x
    said = [more.get(each) for each in _SAID]
    with suppress(AttributeError, TypeError, ValueError):
        params = tuple(sorted((more.get("params") or {}).items()))
        lengths = [tuple(more.get(each) or ()) for each in counts]
        extent = () if like is None else (like.nbytes, like.dtype)
        stream = stream_of(like, more)
        key = (name, extent, x is None, *said, params, *lengths, stream)
        hash(key)
        return key
    return None


def _collective(group: Group, name: str) -> LookAt:
    spec = operation(name)

    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        key = _key_of(name, args, more, spec.count_arguments)
        kind = None if key is None else group.kinds.get(key)
        if kind is None:
            x = args[0] if args else more.get("x")
            kind = _kind_of_collective(comm, spec, group, x, more)
            if key is not None:
                group.keep(key, kind)
        return (kind,)

    return look


def _kind_of_collective(
    comm: Traced, spec: OpSpec, group: Group, x: Any, more: dict[str, Any]
) -> Kind:
    out = more.get("out")
    like = out if x is None else x
    dtype, itemsize = element_of(like)
    nbytes = _nbytes_of_collective(comm, spec, x, out, more, itemsize)
    stream = stream_of(like, more)
    algorithm = algorithm_of(
        *(comm, spec.name, nbytes, dtype),
        op=more.get("op", "sum"),
        root=more.get("root", 0),
        on_device=stream is not None,
        asked={name: more[name] for name in _WISHES if more.get(name) is not None},
    )
    wire = more.get("compress")
    if isinstance(wire, str) and wire != EXACT:
        algorithm = f"compressed/{wire}"
    out_nbytes = None
    if spec.rule_bytes == "any":
        out_nbytes = _sum(more.get("recv_counts")) * itemsize
    return Kind(
        *(group, spec.name, nbytes),
        dtype=dtype,
        itemsize=itemsize,
        out_nbytes=out_nbytes,
        root=_number(more.get("root", 0)) if spec.has_root else -1,
        algorithm=algorithm,
        stream=stream,
    )


def _nbytes_of_collective(
    comm: Traced,
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


def _other(group: Group, name: str) -> LookAt:
    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        x = args[0] if args else more.get("x")
        dtype, itemsize = element_of(x)
        kind = Kind(
            *(group, name, nbytes_of(x)),
            dtype=dtype,
            itemsize=itemsize,
            stream=stream_of(x, more),
        )
        return (kind,)

    return look


def _objects(group: Group, name: str) -> LookAt:
    """Return a reader of calls with objects, which nobody asks for anything."""

    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        return (Kind(group, name, 0),)

    return look


def _among_neighbors(group: Group, name: str) -> LookAt:
    """Return a reader of calls among neighbours: of what this rank sends."""

    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        x = args[0] if args else more.get("x", more.get("fields"))
        first = x[0] if isinstance(x, list | tuple) and x else x
        dtype, itemsize = element_of(first)
        stream = stream_of(first, more)
        nbytes = 0
        with suppress(CommError, TypeError):  # of which the call will speak
            nbytes = cast(TracedNeighbors, comm).sent_to_neighbors(name, args, more)
        kind = Kind(
            *(group, name, nbytes),
            dtype=dtype,
            itemsize=itemsize,
            algorithm="boxes/direct" if stream is None else "staged/boxes",
            stream=stream,
        )
        return (kind,)

    return look


def _one_message(group: Group, name: str) -> LookAt:
    peer = other_call(name).peer_argument

    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        x = args[0] if args else more.get("x", more.get("out"))
        where = more.get(peer), more.get("tag", 0)
        return (_kind_of_message(comm, group, name, x, *where, more),)

    return look


def _two_messages(group: Group, name: str) -> LookAt:
    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        x = args[0] if args else more.get("x")
        dest, source = more.get("dest"), more.get("source")
        sendtag, recvtag = more.get("sendtag", 0), more.get("recvtag", 0)
        out = more.get("out")
        return [
            _kind_of_message(comm, group, _SEND, x, dest, sendtag, more),
            _kind_of_message(comm, group, _RECV, out, source, recvtag, more),
        ]

    return look


def _many_messages(group: Group, name: str) -> LookAt:
    def look(comm: Traced, args: Arguments, more: dict[str, Any]) -> Sequence[Kind]:
        found = []
        for kind, argument in ((_SEND, "sends"), (_RECV, "recvs")):
            with suppress(TypeError, ValueError):  # of which the call will speak
                for x, peer, *tag in more.get(argument, ()):
                    where = peer, tag[0] if tag else 0
                    found.append(_kind_of_message(comm, group, kind, x, *where, more))
        return found

    return look


def _kind_of_message(
    comm: Traced,
    group: Group,
    name: str,
    x: Any,
    peer: Any,
    tag: Any,
    more: dict[str, Any],
) -> Kind:
    key: Hashable
    stream = stream_of(x, more)
    try:
        key = (name, x.nbytes, x.dtype, peer, tag, stream)
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
            stream=stream,
        )
        kind = group.keep(key, made)
    return kind


def algorithm_of(
    comm: Traced,
    coll: str,
    nbytes: int,
    dtype: str,
    *,
    op: Any = "sum",
    root: Any = 0,
    on_device: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> str:
    """Return what runs such a call, as ``backend/algorithm``; "" if that is not known.

    It is asked of the policy that the call itself asks, once for a kind of calls.
    ``asked`` are the wishes of the call itself.
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
            **(asked or {}),
        )
        return str(found.choice.candidate)
    return ""


Looks: TypeAlias = Callable[[Group, str], LookAt]
_BY_KIND: dict[str, Looks] = {
    "collective": _collective,
    "object": _objects,
    "sparse": _other,
    "boxes": _other,
    "neighbors": _among_neighbors,
}
_BY_ENDS: dict[str, Looks] = {
    "one": _one_message,
    "two": _two_messages,
    "lists": _many_messages,
}


def _looks_at(row: OpSpec | CallSpec) -> Looks:
    if isinstance(row, CallSpec) and row.kind == "message":
        return _BY_ENDS[row.ends]
    return _BY_KIND[row.kind]


_ROWS = {row.name: row for row in ROWS}
_METHODS = {row.name: (row.reads, _looks_at(row)) for row in ROWS}
"""A communicator's methods: the code for how C++ reads their arguments
(native/calls/recorded_method.hpp), and the look at the first call of a kind."""


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


def stream_of(x: Any, more: Mapping[str, Any]) -> int | None:
    """Return the stream that orders a call; None where its array is on the host.

    ``more`` are the arguments that have names.
    """
    from commrt.arrays.device import is_on_device, stream_that_orders

    asked = more.get("stream")
    found = None
    with suppress(Exception):  # of which the call will speak
        is_ordered = asked is not None if x is None else is_on_device(x)  # a barrier
        if is_ordered:
            found = 0
            found = stream_that_orders(x, asked)
    return found


def _sum(counts: Sequence[Any] | None) -> int:
    with suppress(TypeError, ValueError):
        return sum(int(count) for count in counts or ())
    return 0


def _number(value: Any) -> int:
    with suppress(TypeError, ValueError):
        return int(value)
    return -1
