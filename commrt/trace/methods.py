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
    Group,
    Kind,
    Record,
    Recorder,
    now,
    recorder,
)
from commrt.trace.requests import TracedRequest, end_all

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["algorithm_of", "follow_communicator", "group_of_communicator"]

_OTHERS = ("sparse_allreduce", "topk_allreduce", "redistribute")
_PAIR = {"send": ("dest", "tag"), "recv": ("source", "tag")}
_NOTHING: Any = object()
_SAID = ("op", "root", "algorithm", "backend", "compress")
"""Arguments of a collective that make another kind of it."""
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
KeyOf = Callable[[tuple[Any, ...], dict[str, Any]], Hashable]
Look = Callable[["Communicator", tuple[Any, ...], dict[str, Any]], Kind]
LookAtAll = Callable[["Communicator", tuple[Any, ...], dict[str, Any]], list[Kind]]


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

    world = comm._world
    members = ",".join(map(str, comm._ranks))
    key = f"commrt/{world.job}/{name}/{comm._identity}/{members}"
    return Group(*(key, "commrt", comm._ranks, comm.rank, world.job, world.size, names))


def _attach(to: Recorder, comm: Communicator) -> Group:
    group = to.group(group_of_communicator(comm))
    for name in COLLECTIVES:
        counts = operation(name).count_arguments
        keys = _keys_of(name, counts)
        _replace_one(to, comm, group, name, _collective(group, name), keys)
    for name in _OTHERS:
        _replace_one(to, comm, group, name, _other(group, name), _keys_of(name))
    for name in ("send", "recv"):
        _replace_one(
            to, comm, group, name, _message(group, name), _key_of_message(name)
        )
    _replace_several(to, comm, "sendrecv", _two_messages(group))
    _replace_several(to, comm, "multi_sendrecv", _many_messages(group))
    return group


def _runner(comm: Communicator, name: str) -> Run:
    """Return what runs a method as it was before."""
    held = vars(comm).get(name)  # such as one that shows ranges to a profiler
    function = getattr(type(comm), name)
    # Not the communicator itself, which would then outlive its last user.
    this = weakref.ref(comm)
    if held is None:
        return lambda args, more: function(this(), *args, **more)
    return lambda args, more: held(*args, **more)


def _replace_one(
    to: Recorder,
    comm: Communicator,
    group: Group,
    name: str,
    look: Look,
    key_of: KeyOf,
) -> None:
    """Record calls that are one operation each.

    What of it can be is in one function: a call of Python's costs as much as a record.
    """
    run, this, known = _runner(comm, name), weakref.ref(comm), to.sites.known
    held, function = vars(comm).get(name), getattr(type(comm), name)
    append, of_caller, getframe = to.ring.append, to.sites.of_caller, sys._getframe
    kinds, clock, identity = group.kinds, now, id

    def traced(x: Any = _NOTHING, *rest: Any, **more: Any) -> Any:
        frame = getframe(1)
        site = known.get((identity(frame.f_code), frame.f_lasti)) or of_caller(frame)
        if site is CORE:
            return run(() if x is _NOTHING else (x, *rest), more)
        try:
            if x is _NOTHING or x is None:
                kind = kinds[key_of((), more)]
            elif len(more) == ("out" in more) + ("nonblocking" in more):
                kind = kinds[name, x.nbytes, x.dtype]
            else:
                kind = kinds[key_of((x,), more)]
        except (AttributeError, KeyError, TypeError):
            args = () if x is _NOTHING else (x,)
            kind = _looked_at(this(), group, look, key_of, args, more)
        counter = kind.counter
        seq = counter[0]
        counter[0] = seq + 1
        record = [kind, site, seq, clock(), 0]
        append(record)
        try:
            if held is not None or rest or x is _NOTHING:
                result = run(() if x is _NOTHING else (x, *rest), more)
            elif more:
                result = function(this(), x, **more)
            else:
                result = function(this(), x)
        except (UsageError, TypeError):  # of this rank's arguments
            to.taken_back(record)
            raise
        except BaseException as error:
            to.failed(record, error)
            raise
        if more and more.get("nonblocking"):
            return TracedRequest(result, (record,))
        record[4] = clock()
        return result

    traced.__name__ = name
    to.replace(comm, name, traced)


def _looked_at(
    comm: Communicator | None,
    group: Group,
    look: Look,
    key_of: KeyOf,
    args: tuple[Any, ...],
    more: dict[str, Any],
) -> Kind:
    """Return the kind of a call that was not met before; the next one is found."""
    assert comm is not None, "its method is called, so somebody has it"
    kind = look(comm, args, more)
    with suppress(AttributeError, IndexError, TypeError):  # of which the call speaks
        return group.keep(key_of(args, more), kind)
    return kind


def _replace_several(
    to: Recorder, comm: Communicator, name: str, look: LookAtAll
) -> None:
    """Record calls that are any number of messages."""
    run, this = _runner(comm, name), weakref.ref(comm)

    def traced(*args: Any, **more: Any) -> Any:
        site = to.sites.of_caller(sys._getframe(1))
        comm = this()
        assert comm is not None, "its method is called, so somebody has it"
        if site is CORE:
            return run(args, more)
        records: list[Record] = []
        begin = now()
        for kind in look(comm, args, more):
            records.append([kind, site, kind.counter[0], begin, 0])
            kind.counter[0] += 1
        to.ring.extend(records)
        try:
            result = run(args, more)
        except (UsageError, TypeError):  # of this rank's arguments
            for record in reversed(records):
                to.taken_back(record)
            raise
        except BaseException as error:
            for record in records:
                to.failed(record, error)
            raise
        if more.get("nonblocking"):
            return TracedRequest(result, records)
        end_all(records)
        return result

    traced.__name__ = name
    to.replace(comm, name, traced)


# -- what a call is --------------------------------------------------------------


def _keys_of(name: str, counts: tuple[str, ...] = ()) -> KeyOf:
    """Return what reads off a call's arguments what tells it from others."""

    def key_of(args: tuple[Any, ...], more: dict[str, Any]) -> Hashable:
        x: Any = args[0] if args else more.get("x")
        if x is not None and len(more) == ("out" in more) + ("nonblocking" in more):
            return name, x.nbytes, x.dtype
        like: Any = more.get("out") if x is None else x
        said = tuple(map(more.get, _SAID))
        if counts:
            said = (*said, *(tuple(more.get(each) or ()) for each in counts))
        if like is None:
            return name, said
        return name, like.nbytes, like.dtype, x is None, said

    return key_of


def _collective(group: Group, name: str) -> Look:
    spec = operation(name)

    def look(comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]) -> Kind:
        return _kind_of_collective(
            comm, spec, group, args[0] if args else more.get("x"), more
        )

    return look


def _kind_of_collective(
    comm: Communicator, spec: OpSpec, group: Group, x: Any, more: dict[str, Any]
) -> Kind:
    out = more.get("out")
    like = out if x is None else x
    dtype, itemsize = element_of(like)
    nbytes = _nbytes_of_collective(comm, spec, x, out, more, itemsize)
    asked = more.get("backend") or "", more.get("algorithm") or ""
    on_device = _is_on_device(like)
    algorithm = "/".join(map(str, asked))
    if not any(asked):
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


def _other(group: Group, name: str) -> Look:
    def look(comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]) -> Kind:
        x = args[0] if args else more.get("x")
        dtype, itemsize = element_of(x)
        return Kind(
            *(group, name, nbytes_of(x)),
            dtype=dtype,
            itemsize=itemsize,
            on_device=_is_on_device(x),
        )

    return look


def _key_of_message(name: str) -> KeyOf:
    peer, tag = _PAIR[name]

    def key_of(args: tuple[Any, ...], more: dict[str, Any]) -> Hashable:
        x: Any = args[0] if args else more.get("x", more.get("out"))
        return name, x.nbytes, x.dtype, more.get(peer), more.get(tag, 0)

    return key_of


def _message(group: Group, name: str) -> Look:
    peer, tag = _PAIR[name]

    def look(comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]) -> Kind:
        x = args[0] if args else more.get("x", more.get("out"))
        where = more.get(peer), more.get(tag, 0)
        return _kind_of_message(comm, group, name, x, *where)

    return look


def _two_messages(group: Group) -> LookAtAll:
    def look(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        x = args[0] if args else more.get("x")
        dest, source = more.get("dest"), more.get("source")
        sendtag, recvtag = more.get("sendtag", 0), more.get("recvtag", 0)
        return [
            _kind_of_message(comm, group, "send", x, dest, sendtag),
            _kind_of_message(comm, group, "recv", more.get("out"), source, recvtag),
        ]

    return look


def _many_messages(group: Group) -> LookAtAll:
    def look(
        comm: Communicator, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Kind]:
        found = []
        for name, argument in (("send", "sends"), ("recv", "recvs")):
            with suppress(TypeError, ValueError):  # of which the call will speak
                for x, peer, *tag in more.get(argument, ()):
                    of = tag[0] if tag else 0
                    found.append(_kind_of_message(comm, group, name, x, peer, of))
        return found

    return look


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
    from commrt.arrays.device import is_on_device

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
