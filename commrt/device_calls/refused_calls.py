# SPDX-License-Identifier: Apache-2.0
"""Calls that a rank refuses, and that others may have given to their devices.

A device gives no call back. So the rank asks the others, raises its error, and a thread
waits for their answers. Where they have given the call to devices, the thread makes it
as well, with memory of its own: a stand-in. Their requests raise RefusedError, and all
ranks are in step (``engine/device_refusals.hpp``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from commrt import _native
from commrt.arrays.device import seems_on_device
from commrt.arrays.host import HostView, view_anywhere
from commrt.calls.arguments import Bound, Call
from commrt.calls.channel import Channel
from commrt.devices.arrays import DeviceArray, DeviceStream
from commrt.errors import CommError, RefusedError
from commrt.select.facts import Candidate
from commrt.vocabulary.dtypes import DType, ReduceOp
from commrt.vocabulary.limits import deadline_after
from commrt.vocabulary.operations import OpSpec, operation

__all__ = ["RefusedCalls", "words_of", "zeros"]

_UNHEARD, _GIVEN, _ELSEWHERE = 0, 2, 3
"""Answers of a rank, as the engine has them."""
_SLICE_S = 0.05
"""A thread that waits looks so often whether it is to end."""
_ZEROS_NBYTES = 1 << 20
"""Zeros that are copied from the host at once."""
_COLLECTIVE = "collective"
"""The kind of words that are of a collective."""


def words_of(call: Call, bound: Bound, candidate: Candidate) -> str:
    """Return the words by which a rank that has refused such a call makes it."""
    dtype = bound.dtype
    return json.dumps(
        [
            _COLLECTIVE,
            call.spec.name,
            bound.num_elements,
            [dtype.name, dtype.code, dtype.itemsize, dtype.kind],
            int(call.reduction),
            call.factor is not None,
            call.root,
            bound.counts,
            [candidate.backend, candidate.algorithm, dict(candidate.params)],
        ]
    )


@dataclass(frozen=True)
class _StandIn:
    """A call of others, as a rank makes it that has refused it."""

    spec: OpSpec
    elements: int
    dtype: DType
    reduction: ReduceOp
    has_factor: bool
    root: int
    counts: tuple[tuple[int, ...], ...]
    candidate: Candidate

    @classmethod
    def of(cls, said: Mapping[int, str], rank: int, size: int) -> _StandIn:
        """Return this rank's, from what the others say by rank."""
        first = json.loads(next(iter(said.values())))
        name, elements, dtype, reduction, has_factor, root, counts, runs = first[1:]
        mine = tuple(tuple(each) for each in counts)
        if len(mine) == 2:  # each rank says what goes to and fro
            pairs = {other: json.loads(text)[7] for other, text in said.items()}
            sent = [pairs[r][1][rank] if r in pairs else 0 for r in range(size)]
            received = [pairs[r][0][rank] if r in pairs else 0 for r in range(size)]
            mine, elements = (tuple(sent), tuple(received)), sum(sent)
        backend, algorithm, params = runs
        return cls(
            operation(name),
            elements,
            DType(*dtype),
            ReduceOp(reduction),
            has_factor,
            root,
            mine,
            Candidate(backend, algorithm, params),
        )

    def lengths(self, rank: int, size: int) -> tuple[int | None, int | None]:
        """Return the elements of input and output; None: this rank has none."""
        spec, all_of_them, counts = self.spec, self.elements, self.counts
        gathers = spec.out_count == "times_size"
        if spec.is_empty:
            return None, None
        if len(counts) == 2:
            return sum(counts[0]), sum(counts[1])
        if counts:
            whole, part = sum(counts[0]), counts[0][rank]
        else:
            whole, part = all_of_them, all_of_them // size
        given = part if gathers else whole
        taken = part if spec.out_count == "div_size" else whole
        is_root = rank == self.root
        return (
            given if is_root or spec.input_on == "all" else None,
            taken if is_root or spec.output_on != "root" else None,
        )

    def call(self, stream: DeviceStream) -> Call:
        """Return the call, which a stream orders."""
        return Call(
            spec=self.spec,
            x=None,
            out=None,
            reduction=self.reduction,
            factor=1 if self.has_factor else None,
            root=self.root,
            nonblocking=True,
            timeout_s=None,
            algorithm=self.candidate.algorithm,
            backend=self.candidate.backend,
            params=self.candidate.params,
            name=None,
            counts=self.counts,
            stream=stream,
        )


def zeros(device: Any, nbytes: int, stream: DeviceStream) -> DeviceArray:
    """Return so many bytes of a device, which a stream fills: others get them."""
    made = DeviceArray(device, nbytes, "uint8")
    some = min(nbytes, _ZEROS_NBYTES)
    source = DeviceArray(device, some, "uint8").put(
        np.zeros(some, "uint8"), stream=stream.handle
    )
    for at in range(0, nbytes, _ZEROS_NBYTES):
        count = min(_ZEROS_NBYTES, nbytes - at)
        device.memcpy_async(made.address + at, source.address, count, stream.handle)
    stream.synchronize()
    return made


class Devices(Protocol):
    """The communicator's collectives on devices."""

    def plan(self, call: Call, bound: Bound, *, is_checked: bool = False) -> Any:
        """Return the plan of a call."""

    def start(self, call: Call, bound: Bound, plan: Any) -> Any:
        """Give a call to the device; return its request."""


Maker = Callable[[Any, DeviceStream, Mapping[int, str]], Any]
"""Starts a call on a device, ordered by a stream, by what ranks say of theirs; returns
its request."""


class RefusedCalls:
    """Refuses calls of one communicator that others may have given to devices.

    Args:
        comm: the ranks.
        devices: makes stand-ins.
    """

    def __init__(self, comm: Channel, devices: Devices) -> None:
        self._comm, self._devices = comm, devices
        self._device: Any = None
        self._threads: list[threading.Thread] = []
        self._settled = threading.Event()
        """The last question's: set unless that is open. Its thread may go on then."""
        self._settled.set()
        self._is_over = False
        self.makers: dict[str, Maker] = {_COLLECTIVE: self._collective}
        """Make a call that others describe, by the kind of their words."""

    @property
    def may_concern(self) -> bool:
        """True if other ranks may make calls on devices.

        Not on simulated ones: what ranks tell each other is no event of the simulation.
        """
        device = self._device
        is_known = device is not None and device.kind != "simulated"
        return is_known and self._comm.size > 1

    def know(self, device: Any) -> None:
        """Take note of a device that the program makes calls on."""
        self._device = device

    def notice(self, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        """Take note of the device of a call that is refused, if it has one."""
        given = [*args[:1], *map(arguments.get, ("x", "out"))]
        for each in filter(seems_on_device, given):
            with suppress(Exception):  # of an object that is not ours
                self.know(view_anywhere(each, "x").on)

    def refuse(self, error: Exception, take_place: Callable[[Exception], None]) -> None:
        """Refuse the next call: of a device, or in its place as any other.

        ``take_place`` does the latter.
        """
        self.settle()
        comm = self._comm
        if comm.is_over or comm.failure:
            return
        why = str(error).encode(errors="backslashreplace").decode()
        self._settled = settled = threading.Event()
        thread = threading.Thread(
            target=self._finish,
            args=(error, why, take_place, settled),
            name=f"{comm.name} refused",
            daemon=True,
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        _native.ask_of_device(comm, why)
        comm.look_at_calls(always=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: that may end the communicator
            self._settle(settled)
            take_place(error)

    def settle(self) -> None:
        """Wait until this rank's next call has its place in the order."""
        if self._settled.is_set() or threading.current_thread() in self._threads:
            return
        while not self._settled.wait(_SLICE_S):  # a signal may come
            pass

    def raise_untold(self, number: int, made: Any = None) -> None:
        """Raise RefusedError where a call has failed by that, and nobody looked.

        ``number`` is the first one that this rank's last call can have; ``made`` is the
        request or the output of that.
        """
        untold: dict[int, str] = _native.take_untold(self._comm)
        if not untold:
            return
        error = RefusedError("; ".join(untold.values()))
        if max(untold) < number:
            error = RefusedError(
                f"{error}. The call that raises this has been made: all ranks are in "
                f"step"
            )
            error.made = made
        raise error

    def close(self) -> None:
        """Ask nothing any more."""
        self._is_over = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self.makers.clear()  # which refer to this

    # -- in the thread ---------------------------------------------------------------

    def _finish(
        self,
        error: Exception,
        why: str,
        take_place: Callable[[Exception], None],
        settled: threading.Event,
    ) -> None:
        comm = self._comm
        try:
            said = self._answers()
            if said is None:
                return
            _native.end_question(comm)
            parts = [part for part, _ in said]
            given = {
                rank: words for rank, (part, words) in enumerate(said) if part == _GIVEN
            }
            if _ELSEWHERE in parts or not all(given.values()):
                take_place(error)
            elif given:
                self._stand_in(given, settled)
            else:  # all have refused it
                comm.own_refusals[comm.next_seq] = why
                comm.pass_over()
        except Exception as failure:  # noqa: BLE001  no rank may wait for it
            comm.end_on_all_ranks(
                f"rank {comm.rank} could not make a call that it had refused, and that "
                f"others had given to their devices: {failure}"
            )
        finally:
            self._settle(settled)

    def _settle(self, settled: threading.Event) -> None:
        """Let this rank's next call begin; idempotent."""
        if settled.is_set():
            return
        comm = self._comm
        if comm.closed is None:
            _native.end_question(comm)
            comm.look_at_calls(always=False)
        settled.set()

    def _answers(self) -> Sequence[tuple[int, str]] | None:
        """Return what the ranks say; None where the communicator has ended."""
        comm = self._comm
        engine = comm.world.engine
        backoff = _native.Backoff(engine)
        deadline = deadline_after(comm.timeout_s)
        while not self._is_over and comm.closed is None and not comm.failure:
            said: Sequence[tuple[int, str]] = _native.said_of_device(comm)
            parts = [part for part, _ in said]
            if _ELSEWHERE in parts or _UNHEARD not in parts:
                return said
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                comm.set_failure(
                    "other ranks have yet to make calls that this rank has refused"
                )
                return None
            if not engine.step():
                backoff.pause(min(left_s, _SLICE_S))
        return None

    def _stand_in(self, said: Mapping[int, str], settled: threading.Event) -> None:
        """Make the call that others describe, with memory that nobody reads."""
        kind = json.loads(next(iter(said.values())))[0]
        stream = DeviceStream(self._device)
        request = self.makers[kind](self._device, stream, said)
        self._settle(settled)
        with suppress(CommError):  # a later fault tells of itself
            request.synchronize()
            stream.destroy()

    def _collective(
        self, device: Any, stream: DeviceStream, said: Mapping[int, str]
    ) -> Any:
        comm = self._comm
        what = _StandIn.of(said, comm.rank, comm.size)
        given, taken = what.lengths(comm.rank, comm.size)
        x = None if given is None else self._view(what.dtype, given, stream)
        out = x
        if taken != given or not what.spec.in_place:
            out = None if taken is None else self._view(what.dtype, taken, stream)
        call = what.call(stream)
        bound = Bound(x, out, out, what.dtype, what.elements, what.counts)
        plan = self._devices.plan(call, bound, is_checked=True)
        return self._devices.start(call, bound, plan)

    def _view(self, dtype: DType, count: int, stream: DeviceStream) -> HostView:
        made = zeros(self._device, count * dtype.itemsize, stream)
        number = getattr(self._device, "ordinal", 0)
        return HostView(
            *(made, made, made.address, count, dtype, (count,), True, number),
            on=self._device,
        )
