# SPDX-License-Identifier: Apache-2.0
"""Collectives on device arrays whose work is Python's, on the host.

Two kinds: compressed ones, as what goes over the wire is made there; and those with a
Python function as reduction, which only a thread of Python can call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from commrt.arrays.host import HostView, view_anywhere
from commrt.calls.channel import Channel
from commrt.calls.selection import Selection
from commrt.device_calls.host_thread import HostChannel, HostJobs, RefusedOnHost
from commrt.device_calls.host_work import HostCall
from commrt.errors import BackendError
from commrt.group.finite_values import check_finite_on_stream
from commrt.group.group import Group
from commrt.group.stepped import SteppedRequest, Steps
from commrt.vocabulary.reductions import Reduction
from commrt.vocabulary.wire_formats import EXACT, WireFormat

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call

__all__ = [
    "BoundHostCall",
    "Compressed",
    "host_part_of",
    "runs_on_host",
    "service_of",
    "would_run_on_host",
]


def runs_on_host(call: Call) -> bool:
    """Return whether a collective's work is Python's."""
    return _compresses(call.compress) or _is_python(call.user)


def service_of(compress: Any) -> str | None:
    """Return the service of the host's channel that such a collective uses."""
    return "compression" if _compresses(compress) else None


def would_run_on_host(args: tuple[Any, ...], arguments: Mapping[str, Any]) -> bool:
    """Return whether a collective of such arguments, which may be wrong, is Python's.

    Those behind the array, and those by name.
    """
    asked = [*args, arguments.get("op")]
    return _compresses(arguments.get("compress")) or any(map(_is_python, asked))


def _is_python(op: Any) -> bool:
    return isinstance(op, Reduction) and op.address is None


class Compressed(Protocol):
    """A compressed call, checked."""

    @property
    def wire(self) -> WireFormat:
        """The wire format of its parts."""


class Devices(Protocol):
    """The device calls of one communicator, whose work the host may do."""

    @property
    def comm(self) -> Channel:
        """The ranks."""

    def check(self, call: Call, bound: Bound) -> None:
        """Raise UsageError for what cannot be done on devices."""

    @property
    def selection(self) -> Selection:
        """Chooses among the backends' candidates."""

    @property
    def host_jobs(self) -> HostJobs:
        """Runs such calls."""

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any]:
        """Return what starts a call."""


def host_part_of(
    comm: Channel,
    compress: Callable[[Call, Bound], Compressed | None],
    call: Call,
    bound: Bound,
) -> HostCall:
    """Return the host's part of a collective; in check mode the ranks are compared."""
    if _compresses(call.compress):
        return _compressed(comm, compress, call, bound)
    return _reduced(comm, call, bound)


def _compresses(compress: Any) -> bool:
    return compress is not None and not (
        isinstance(compress, str) and compress == EXACT
    )


def _limit(comm: Group, call: Call) -> float:
    return comm.timeout_s if call.timeout_s is None else call.timeout_s


def _counts(call: Call) -> dict[str, Any]:
    counts = zip(call.spec.count_arguments, call.counts, strict=False)
    return {argument: value for argument, value in counts if value is not None}


def _compressed(
    comm: Group,
    compress: Callable[[Call, Bound], Compressed | None],
    call: Call,
    bound: Bound,
) -> HostCall:
    """Return the call that compresses; in check mode all ranks are compared."""
    name = call.spec.name
    compressed = compress(call, bound)
    assert compressed is not None
    x, out = bound.x, bound.out
    assert x is not None
    assert out is not None
    residual = None
    if call.residual is not None:
        residual = view_anywhere(call.residual, f"{name}: residual")
    limit = _limit(comm, call)
    arguments = {
        "nonblocking": True,
        "compress": compressed.wire.name,
        "timeout_s": limit,
        **_counts(call),
        **({"op": call.reduction.name.lower()} if call.spec.reduces else {}),
    }
    in_place = out.address == x.address

    def start(channel: HostChannel, copy_of: Callable[[Any], Any]) -> Any:
        return getattr(channel, name)(
            copy_of(x),
            out=None if in_place else copy_of(out),
            residual=None if residual is None else copy_of(residual),
            **arguments,
        )

    kept = [] if residual is None else [residual]
    reads, writes = [x, *kept], [out, *kept]
    service = service_of(call.compress)
    return HostCall(name, service, reads, writes, start, limit, bound.result)


def _reduced(comm: Channel, call: Call, bound: Bound) -> HostCall:
    """Return the call whose reduction is a Python function; it goes whole."""
    spec, user = call.spec, call.user
    assert user is not None
    if comm.checker is not None:
        comm.checker.check(call, bound)
    candidate = comm.selection.choose(call, bound)
    host = comm.attached[candidate.backend].host_part(candidate)
    if host is None:
        raise BackendError(
            f"{spec.name}: {candidate} was asked for, and the reduction {user.name} is "
            f"a Python function, which the host calls: take backend='staged', or a C "
            f"function"
        )
    limit = _limit(comm, call)
    arguments = {
        "op": user,
        "nonblocking": True,
        "timeout_s": limit,
        "algorithm": host.algorithm,
        "params": host.params or None,
        **_counts(call),
        **({"root": call.root} if spec.has_root else {}),
    }
    x, out = bound.x, bound.out
    assert x is not None
    in_place = out is not None and out.address == x.address and out.nbytes == x.nbytes
    held = [x] if out is None else [x, out]

    def steps(channel: HostChannel, copy_of: Callable[[HostView], Any]) -> Steps[Any]:
        given = None if out is None or in_place else copy_of(out)
        request = getattr(channel, spec.name)(copy_of(x), out=given, **arguments)
        yield [request]
        return request.wait()

    def start(
        channel: HostChannel, copy_of: Callable[[HostView], Any]
    ) -> SteppedRequest:
        what = f"{spec.name} (op={user.name}) on {comm.name}, rank {comm.rank}"
        made = steps(channel, copy_of)
        return SteppedRequest(made, what, spec.name, limit, lambda error: None)

    # The first rank's output keeps its content.
    untouched = spec.output_on == "all but rank 0" and comm.rank == 0
    reads, writes = (held, []) if untouched else ([x], held[1:])
    return HostCall(spec.name, None, reads, writes, start, limit, bound.result)


class BoundHostCall:
    """Such a collective bound to its arrays; call it, or ``start()`` it."""

    def __init__(self, devices: Devices, call: Call, bound: Bound) -> None:
        self._devices, self._bound = devices, bound
        self._calls = [replace(call, nonblocking=flag) for flag in (False, True)]
        self.operation = call.spec.name
        self._places = bound.places
        self.label = f"host/{call.compress}"
        if not _compresses(call.compress):
            devices.check(call, bound)
            self.label = str(devices.selection.choose(call, bound))

    def __call__(self) -> Any:
        """Run the operation; the current stream waits for it. Return its output."""
        return self._run(self._calls[0])

    def start(self) -> Any:
        """Start the operation and return its request."""
        return self._run(self._calls[1])

    def _run(self, call: Call) -> Any:
        comm, x = self._devices.comm, self._bound.x
        try:
            self._places.check(self.operation)
            check_finite_on_stream(comm, self.operation, x, call.stream)
        except Exception as error:
            carrier = RefusedOnHost(self._devices.host_jobs, service_of(call.compress))
            comm.comparison.refuse(self.operation, error, call.timeout_s, carrier)
            raise
        return self._devices.prepare(call, self._bound)()
