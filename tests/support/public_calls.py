# SPDX-License-Identifier: Apache-2.0
"""Every public call with arguments that are right, to make one of them wrong at a time.

The calls of communicators follow from the table of operations: a new row is here by
itself. Ranks come in pairs; messages go from a rank to itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

import commrt
from commrt import elastic, local, trace
from commrt.comm import CartCommunicator, Communicator, GraphCommunicator
from commrt.grids.mesh import Mesh
from commrt.grids.plans import CartPlans
from commrt.messages.point_to_point import Messages
from commrt.plans import Plans
from commrt.vocabulary.operations import COLLECTIVES, names_of
from commrt.vocabulary.signatures import Operations

__all__ = ["CALLS", "FUNCTIONS", "Place", "PublicCall", "used"]


@dataclass
class Place:
    """What one of two ranks makes its calls on."""

    comm: Communicator
    alone: Communicator
    """Of this rank only, for messages to itself."""
    cart: CartCommunicator
    graph: GraphCommunicator
    mesh: Mesh[Communicator]


@dataclass(frozen=True)
class PublicCall:
    """A call, and arguments for which it works."""

    name: str
    """``allreduce``, ``plan.allreduce``, ``cart.shift``, ``Layout``."""
    function: Callable[[Place], Callable[..., Any]]
    """Returns what is called."""
    signature: inspect.Signature
    valid: Callable[[str], dict[str, Any]]
    """Returns new arguments; all that are needed where the named one is given, too."""
    before: Callable[[Place, dict[str, Any]], None] = lambda place, given: None
    """Prepares the call: a receive needs a message."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of its arguments."""
        return tuple(self.signature.parameters)

    @property
    def is_rooted(self) -> bool:
        """True if only one rank looks at some of its arguments."""
        return "root" in self.signature.parameters

    @property
    def states_lengths(self) -> bool:
        """True if ranks say what others send, which may be more or less."""
        return any("counts" in name for name in self.arguments)

    def make(self, place: Place, argument: str, value: Any) -> Any:
        """Make the call with one argument replaced; return what it leads to."""
        given = {**self.valid(argument), argument: value}
        self.before(place, given)
        return used(self.function(place)(*self._positional(given), **given))

    def _positional(self, given: dict[str, Any]) -> list[Any]:
        """Take out of ``given`` what programs pass by position."""
        found = []
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY or name not in given:
                break
            found.append(given.pop(name))
        return found


def used(result: Any) -> Any:
    """Use what a call has returned, as a program does, and release it."""
    if isinstance(result, commrt.Request):
        return used(result.wait())
    if hasattr(result, "free"):
        result.free()
    elif isinstance(result, AbstractContextManager):
        with result:
            pass
    elif hasattr(result, "start") and hasattr(result, "operation"):
        return used(result())
    elif isinstance(result, commrt.SparseVector):
        assert result.nnz >= 0
        assert "nnz" in repr(result)
    return result


_F = np.float32
_ROWS = commrt.Layout((8,), (2,), (commrt.Block(0),))
_DEALT = commrt.Layout((8,), (2,), (commrt.Cyclic(0),))
_SPARSE = (np.array([1, 5]), np.ones(2, _F), (8,))
VALUES: dict[str, Callable[[], Any]] = {
    "x": lambda: np.ones(8, _F),
    "counts": lambda: [4, 4],
    "send_counts": lambda: [4, 4],
    "recv_counts": lambda: [4, 4],
    "color": lambda: 0,
    "ranks": lambda: [0, 1],
    "dims": lambda: (2,),
    "axes": lambda: {"data": 2},
    "sources": lambda: [0, 1],
    "destinations": lambda: [0, 1],
    "shape": lambda: (8,),
    "k": lambda: 2,
    "coll": lambda: "allreduce",
    "nbytes": lambda: 32,
    "fields": lambda: np.ones(8, _F),
    "width": lambda: 1,
    "dest": lambda: 0,
    "source": lambda: 0,
    "target": lambda: _DEALT,
    "out": lambda: np.ones(8, _F),
}
"""Arguments without a default, by their names."""
_SHORT = ("allgatherv", "gatherv", "neighbor_allgatherv")
"""Calls whose x has one rank's elements, and not those of both."""


def _needed(name: str, signature: inspect.Signature) -> Callable[[str], dict[str, Any]]:
    """Return what makes the arguments of a call: those that have no default."""

    def valid(argument: str) -> dict[str, Any]:
        given = {
            key: VALUES[key]()
            for key, parameter in signature.parameters.items()
            if parameter.default is parameter.empty
        }
        if name in _SHORT:
            given["x"] = np.ones(4, _F)
        elif name == "sparse_allreduce":
            given["x"] = _SPARSE
        elif name == "redistribute":
            given |= {"x": np.ones(4, _F), "source": _ROWS, "target": _DEALT}
        if argument == "factor":
            given["op"] = "premul_sum"
        elif argument == "residual" and "compress" in signature.parameters:
            given["compress"] = "bfloat16"
        elif name == "alltoallv":
            given["recv_counts"] = [4, 4]
        return given

    return valid


def _without_self(function: Any) -> inspect.Signature:
    found = inspect.signature(function)
    return found.replace(parameters=[*found.parameters.values()][1:])


def _method(
    name: str, owner: str, signed_by: Any, *path: str, **more: Any
) -> PublicCall:
    """Return a call of a method of the owner, one of the names of ``Place``."""
    signature = _without_self(getattr(signed_by, name))

    def function(place: Place) -> Callable[..., Any]:
        found: Any = getattr(place, owner)
        for each in (*path, name):
            found = getattr(found, each)
        method: Callable[..., Any] = found
        return method

    title = ".".join((*([] if owner in ("comm", "alone") else [owner]), *path, name))
    valid = more.pop("valid", None) or _needed(name, signature)
    return PublicCall(title, function, signature, valid, **more)


def _send_here(place: Place, given: dict[str, Any]) -> None:
    """Send the message that a receive waits for, with its tag where that can be."""
    tag = given.get("tag", 0)
    is_tag = type(tag) in (int, np.int64) and 0 <= tag < 2**31
    place.alone.send(np.ones(8, _F), dest=0, tag=tag if is_tag else 0)


def _message_calls() -> Iterator[PublicCall]:
    for name in names_of("message"):
        more = {"before": _send_here} if name == "recv" else {}
        yield _method(name, "alone", Messages, **more)


def _collective_calls() -> Iterator[PublicCall]:
    for name in COLLECTIVES:
        yield _method(name, "comm", Operations)
        plain = _without_self(getattr(Operations, name))
        kept = [
            each
            for key, each in plain.parameters.items()
            if key not in ("nonblocking", "timeout_s")
        ]
        call = _method(name, "comm", Operations, "plan")
        yield PublicCall(
            call.name, call.function, plain.replace(parameters=kept), call.valid
        )


def _other_calls() -> Iterator[PublicCall]:
    for name in (*names_of("sparse"), *names_of("boxes")):
        yield _method(name, "comm", Communicator)
        yield _method(name, "comm", Plans, "plan")
    for name in names_of("neighbors"):
        yield _method(name, "cart", CartCommunicator)
        yield _method(name, "cart", CartPlans, "plan")
        if not name.startswith("halo"):
            yield _method(name, "graph", GraphCommunicator)
    for name in ("split", "dup", "create_group", "cart", "graph", "mesh"):
        yield _method(name, "comm", Communicator)
    for name in ("empty", "fused", "candidates", "explain"):
        yield _method(name, "comm", Communicator)
    for name, valid in {
        "sub": {"dims": 0},
        "dup": {},
        "shift": {"dim": 0},
        "coords_of": {"rank": 0},
        "rank_at": {"coords": (0,)},
    }.items():
        yield _method(
            name, "cart", CartCommunicator, valid=lambda _, valid=valid: {**valid}
        )
    for name, valid in {
        "size": {"axis": "data"},
        "rank_at": {"coords": {"data": 0}},
        "__getitem__": {"axes": "data"},
    }.items():
        yield _method(name, "mesh", Mesh, valid=lambda _, valid=valid: {**valid})
    for name in ("wait", "synchronize"):
        yield PublicCall(
            f"request.{name}",
            lambda place, name=name: _on_request(place.comm, name),
            _without_self(getattr(commrt.Request, name)),
            lambda _: {},
        )
    yield PublicCall(
        "timeout_s",
        lambda place: lambda timeout_s: _set_timeout(place.alone, timeout_s),
        inspect.signature(_set_timeout).replace(
            parameters=[inspect.Parameter("timeout_s", inspect.Parameter.KEYWORD_ONLY)]
        ),
        lambda _: {"timeout_s": 1.0},
    )


def _recovery_calls() -> Iterator[PublicCall]:
    yield _method("agree", "comm", Communicator)
    yield _method("grow", "comm", Communicator)
    for name in ("revoke", "shrink"):
        yield PublicCall(
            name,
            lambda place, name=name: _on_copy(place.comm, name),
            _without_self(getattr(Communicator, name)),
            lambda _: {},
        )


def _on_copy(comm: Communicator, name: str) -> Callable[..., Any]:
    """Return a method of a copy, which ends by it."""
    copy = comm.dup()
    if name == "shrink":
        copy.revoke()
    found: Callable[..., Any] = getattr(copy, name)
    return found


def _on_request(comm: Communicator, name: str) -> Callable[..., Any]:
    """Return a method of a request, which is waited for however it ends."""
    request = comm.allreduce(np.ones(8, _F), nonblocking=True)

    def call(**given: Any) -> Any:
        try:
            return getattr(request, name)(**given)
        finally:
            request.wait()

    return call


def _set_timeout(comm: Communicator, timeout_s: Any) -> None:
    before = comm.timeout_s
    comm.timeout_s = timeout_s
    comm.timeout_s = before


CALLS: tuple[PublicCall, ...] = (
    *_collective_calls(),
    *_message_calls(),
    *_other_calls(),
    *_recovery_calls(),
)
"""Calls that communicators have."""


def _function(
    function: Any, valid: dict[str, Any], name: str = "", then: Any = None
) -> PublicCall:
    def called(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made if then is None else then(made)

    return PublicCall(
        name or function.__name__,
        lambda _: called,
        inspect.signature(function),
        lambda _: {**valid},
    )


def _decorated(register: Any) -> None:
    """Use no decorator: an algorithm stays registered."""
    assert callable(register)


def _run_nothing(size: Any, *, timeout_s: Any = 5.0) -> None:
    local.run(size, lambda comm: None, timeout_s=timeout_s)


class _EnoughError(Exception):
    """Ends a training."""


def _ends_the_training(comm: Communicator, number: int) -> None:
    raise _EnoughError


@functools.wraps(elastic.run)
def _one_step(*args: Any, **kwargs: Any) -> None:
    with suppress(_EnoughError):
        elastic.run(*args, **kwargs)


FUNCTIONS: tuple[PublicCall, ...] = (
    _function(commrt.Block, {"dim": 0}, then=lambda made: _layout_of(made)),
    _function(commrt.Cyclic, {"dim": 0}, then=lambda made: _layout_of(made)),
    _function(
        commrt.Layout,
        {"shape": (8,), "grid": (2,), "dims": (commrt.Block(0),)},
        then=lambda made: made.local_shape(1),
    ),
    _function(_ROWS.local_shape, {"rank": 0}, "Layout.local_shape"),
    _function(_ROWS.coords_of, {"rank": 0}, "Layout.coords_of"),
    _function(_ROWS.holder, {"rank": 0, "of": 1}, "Layout.holder"),
    _function(
        commrt.SparseVector,
        {"indices": np.array([1]), "values": np.ones(1, _F), "shape": (8,)},
        then=lambda made: (used(made), made.to_dense()),
    ),
    _function(
        commrt.reduction,
        {"fn": np.add},
        then=lambda made: made if callable(made) else None,
    ),
    _function(
        commrt.algorithm,
        {"coll": "allreduce", "name": "tried_by_a_test"},
        then=_decorated,
    ),
    _function(commrt.wait_all, {"requests": []}),
    _function(commrt.wait_any, {"requests": [1]}),
    _function(commrt.init, {}),
    _function(_run_nothing, {"size": 1}, "local.run"),
    _function(
        elastic.State, {"counter": np.zeros(1)}, then=lambda made: made.entries()
    ),
    _function(
        _one_step,
        {"step": _ends_the_training, "state": elastic.State(), "until": 1},
        "elastic.run",
    ),
    _function(trace.label, {"group": None, "dimension": "tp"}, "trace.label"),
)
"""Public functions and classes that need no communicator."""


def _layout_of(kind: Any) -> Any:
    return commrt.Layout((8,), (2,), (kind,)).local_shape(0)
