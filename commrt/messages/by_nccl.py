# SPDX-License-Identifier: Apache-2.0
"""A multi_sendrecv by NCCL: one group of messages, which all ranks call together.

An ordinary message meets whatever its peer gives, with tags and in any order, which
NCCL cannot keep. Where the caller says that all ranks make this call at the same place,
it need not: then each message's other end is in the same call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of, place_of
from commrt.arrays.places import places_of
from commrt.boxes.words import words_of_moves
from commrt.calls.bound_call import BoundCall
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.requests import DeviceRequest
from commrt.errors import BackendError, MismatchError, UsageError, shown
from commrt.group.compare import Comparison
from commrt.group.finite_values import check_finite_on_stream
from commrt.group.group import Group
from commrt.messages.lists import WHAT, Message
from commrt.schedule.boxes import Box, Move
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import other_call

__all__ = ["BACKEND", "NcclMessages", "check_backend"]

BACKEND = "nccl"
_CODE = other_call(WHAT).code
_BYTE = dtype_by_name("uint8")


def check_backend(what: str, backend: Any) -> bool:
    """Return whether messages go by NCCL; UsageError for what names no backend."""
    is_known = isinstance(backend, str) and backend == BACKEND
    if backend is not None and not is_known:
        raise UsageError(
            f"{what}: backend={shown(backend)} must be None, for ordinary messages, or "
            f"'nccl', where all ranks of the communicator make this call together"
        )
    return backend is not None


class NcclMessages:
    """Messages by NCCL that are one call, bound to their arrays."""

    label = "nccl/messages"
    operation = WHAT

    def __init__(
        self,
        group: Group,
        devices: DeviceCollectives,
        comparison: Comparison,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        stream: Any = None,
    ) -> None:
        """Check both lists; what is wrong on one rank is found before it calls NCCL."""
        self._group, self._stream = group, stream
        self._devices, self._comparison = devices, comparison
        self._here = f"{WHAT} on {group.name}, rank {group.rank}"
        self._sends, self._recvs = list(sends), list(recvs)
        self.arrays = [each for each, _, _ in (*sends, *recvs)]
        """All arrays, those that leave first."""
        self._on = place_of(self._here, self.arrays)
        if self.arrays and self._on is None:
            raise UsageError(
                f"{self._here}: backend='nccl' is for arrays on devices, and these "
                f"are in host memory; leave it out, on all ranks"
            )
        for name, messages in (("sends", sends), ("recvs", recvs)):
            tagged = [i for i, (_, _, tag) in enumerate(messages) if tag]
            if tagged:
                raise UsageError(
                    f"{self._here}: {name}[{tagged[0]}] has a tag, and NCCL has none: "
                    f"the k-th message to a rank meets the k-th receive from it there"
                )
        self._result = tuple(each.array for each, _, _ in recvs)
        self._plan = _native.nccl_phases_plan(WHAT, [self._own_phase()], coll=_CODE)
        self._plan.words = self._words()

    def _own_phase(self) -> _native.NcclPhase:
        """Return the messages that move; those to the rank itself are copied."""
        rank, own = self._group.rank, []
        messages = []
        for index, (array, peer, _) in enumerate((*self._sends, *self._recvs)):
            leaves = index < len(self._sends)
            if peer == rank:
                own.append((leaves, index))
            else:
                messages.append((leaves, index, 0, array.nbytes, peer))
        leaving = [index for leaves, index in own if leaves]
        coming = [index for leaves, index in own if not leaves]
        sizes = [[self.arrays[i].nbytes for i in each] for each in (leaving, coming)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"{self._here}: it sends itself {sizes[0]} bytes and receives "
                f"{sizes[1]} from itself: both must be the same"
            )
        pairs = zip(leaving, coming, sizes[0], strict=True)
        copies = [(x, 0, out, 0, nbytes) for x, out, nbytes in pairs]
        return _native.NcclPhase(messages=messages, copies=copies, packs=[], unpacks=[])

    def _words(self) -> str:
        """Return the words by which a rank that has refused such a call makes it."""
        moves = []
        for index, (array, peer, _) in enumerate((*self._sends, *self._recvs)):
            if peer != self._group.rank:
                box = Box(0, (0,), (array.nbytes,))
                ends = (box, None) if index < len(self._sends) else (None, box)
                moves.append(Move(0, index, peer, *ends))
        return words_of_moves(WHAT, BACKEND, [moves], coll=_CODE, dtype=_BYTE)

    def run(self, nonblocking: bool, timeout_s: float | None = None) -> Any:
        """Start it; return a request, or let the stream wait and return the output.

        Collective. Raises BackendError on all ranks where they have no NCCL.
        """
        group, devices = self._group, self._devices
        group.check_usable()
        limit = group.timeout_s if timeout_s is None else timeout_s
        try:
            device, stream = self._prepare(limit)
        except Exception as error:
            self._comparison.refuse(WHAT, error, limit, meets=True)
            raise
        first = self.arrays[0].array if self.arrays else None
        plan = self._plan
        addresses = [each.address for each in self.arrays]
        keep = tuple(each.owner for each in self.arrays)
        work = devices.runner(device, plan)
        started = devices.launch(
            lambda: work.start_arrays(
                plan, addresses, stream, not nonblocking, keep, limit
            )
        )
        request = DeviceRequest(
            *(group, started, self._result, WHAT, limit, device, stream, first)
        )
        if nonblocking:
            return request
        request.be_quiet()
        return self._result

    def bound(self) -> BoundCall:
        """Return the call that looks first whether its arrays are where they were."""
        places = places_of(each.array for each in self.arrays)

        def run(nonblocking: bool) -> Any:
            self._group.check_places(places, WHAT)
            return self.run(nonblocking)

        return BoundCall(WHAT, self.label, run)

    def _prepare(self, timeout_s: float) -> tuple[Any, int]:
        """Return the device and the stream, once all ranks are ready for NCCL."""
        group, devices = self._group, self._devices
        if group.checker is not None:
            self._compare(timeout_s)
        nccl = devices.attached[BACKEND]
        device = self._on or nccl.device
        if device is None:
            raise UsageError(
                f"{self._here}: it has no message in its first call by NCCL, so that "
                f"its device is not known: let all ranks make another collective call "
                f"on arrays on devices before"
            )
        if self._stream is None:
            first = self.arrays[0].array if self.arrays else None
            stream = current_stream_of(first, device)
        else:
            stream = as_stream(self._stream, device, self._here)
        if not devices.can_carry(BACKEND, device, WHAT, stream, timeout_s):
            raise BackendError(
                f"{self._here}: backend='nccl', and NCCL cannot be used: "
                f"{nccl.why_no_devices}; leave it out, on all ranks"
            )
        for index, array in enumerate(self.arrays[: len(self._sends)]):
            argument = f"sends[{index}]: x"
            check_finite_on_stream(group, WHAT, array, self._stream, argument)
        devices.order_exported(device, stream, self.arrays)
        return device, stream

    def _compare(self, timeout_s: float) -> None:
        """Raise the same MismatchError on all ranks unless both ends say the same."""
        rank = self._group.rank
        sent = [[rank, peer, each.nbytes] for each, peer, _ in self._sends]
        taken = [[peer, rank, each.nbytes] for each, peer, _ in self._recvs]
        leaving: dict[tuple[int, int], list[int]] = defaultdict(list)
        coming: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rows in self._comparison.meet(WHAT, [sent, taken], timeout_s):
            for found, ends in zip((leaving, coming), rows, strict=True):
                for source, dest, nbytes in ends:
                    found[source, dest].append(nbytes)
        for source, dest in sorted({*leaving, *coming}):
            left, came = leaving[source, dest], coming[source, dest]
            if left != came:
                raise MismatchError(
                    f"{WHAT} on {self._group.name}: rank {source} sends {left} bytes "
                    f"to rank {dest}, which receives {came} from it; nothing was sent; "
                    f"both must be the same"
                )
