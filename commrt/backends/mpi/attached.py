# SPDX-License-Identifier: Apache-2.0
"""What a communicator does with an MPI library that takes device memory.

Whether the library does is asked at run time (``cuda_aware``), and the ranks tell each
other at the first call on a device array; it is the same for all of them from then on.
Then MPI's own collectives are given the arrays as they lie; what they cannot do runs
staged, by rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from commrt import _native, env
from commrt.errors import CommError, DeviceError, UsageError
from commrt.group.deferred_release import leave
from commrt.mpi import cuda_aware
from commrt.nccl.orders import order_of

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call
    from commrt.comm import Communicator

__all__ = ["KINDS", "MpiCalls", "MpiFacts"]

KINDS: set[str] = {"cuda"}
"""Kinds of devices whose memory the library may be given; tests add pretended ones,
whose memory is the host's, so that every library takes it."""
_SWITCH = "COMMRT_CUDA_AWARE_MPI"
_ask_library = lru_cache(maxsize=1)(cuda_aware.mpi_takes_cuda)


@dataclass(frozen=True)
class MpiFacts:
    """What selection knows of MPI on device memory; once agreed, on all ranks."""

    why: str
    """Why the library is not given device memory; empty where it is."""


class MpiCalls:
    """A communicator's operations of MPI on device memory."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._agreed: MpiFacts | None = None
        self._made: tuple[Any, _native.MpiWork] | None = None
        self.first_value = 0

    @property
    def facts(self) -> MpiFacts:
        """What the ranks have agreed upon, or until then what this rank sees."""
        return self._agreed or MpiFacts(self._why_never() or _lacks("cuda"))

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks have told each other."""
        return self._agreed is not None

    def tells(self, device: Any) -> str | None:
        """Return why this rank's library takes no device memory; empty where it does.

        For the other ranks (``device_calls.agreement``); None where nothing is asked.
        """
        why = self._why_never()
        if not why and device.kind not in KINDS:
            why = f"no MPI library takes memory of a {device.kind} device"
        if why:
            self._agreed = MpiFacts(why)
            return None
        return _lacks(device.kind)

    def settle(self, said: Sequence[str], timeout_s: float) -> None:
        """Take what all ranks told.

        Where all take device memory, they get a communicator of MPI's own for it.
        """
        why = _together(said)
        if not why and not self._comm.native_mpi.ensure(timeout_s):
            why = "no MPI communicator is left for its collectives"
        self._agreed = MpiFacts(why)

    def _why_never(self) -> str:
        """Return what keeps these ranks from it anyway; equal on all of them."""
        comm = self._comm
        if comm.world.mpi is None:
            return "these ranks were not started by MPI"
        if comm.size == 1:
            return "one rank needs no library"
        if env.read_str(_SWITCH) == "off":
            return f"{_SWITCH} is off"
        return ""

    def planned(
        self, runs: _native.Plan, call: Call, bound: Bound
    ) -> _native.MpiDevicePlan:
        """Return the plan of a call on device arrays that is a collective of MPI's."""
        item = bound.dtype.itemsize
        sends_out = call.spec.input_on == "root" and call.spec.in_place
        is_read = not sends_out or call.root == self._comm.rank
        return _native.mpi_device_plan(
            runs,
            in_nbytes=bound.in_elements * item if is_read else 0,
            out_nbytes=bound.out_elements * item,
            in_place=call.spec.in_place and not call.spec.by_pair,
            sends_out=sends_out and is_read,
        )

    def work(self, device: Any) -> _native.MpiWork:
        """Return what gives MPI calls, made at the first one.

        Raises UsageError for another device than that of the first call, of this
        communicator or, as MPI knows one of a process, of another one.
        """
        comm = self._comm
        if self._made is not None:
            on, made = self._made
            if on is not device:
                raise UsageError(
                    f"{comm.name}: its calls of MPI are on device {_number(on)}, and "
                    f"the array on device {_number(device)}: use a communicator for "
                    f"each device, or backend='staged'"
                )
            return made
        flags = comm.world.drive(device) and env.read_str(_SWITCH) == "flags"
        table = comm.table
        together = table is not None and ("mpi", "nccl") in table.tested_together
        order = None if together else order_of(device, self.first_value)
        try:
            made = _native.MpiWork(comm, device, order, flags, self.first_value)
        except DeviceError as error:
            if error.status != "invalid":
                raise
            raise UsageError(
                f"{comm.name}, device {_number(device)}: {error}: use "
                f"backend='staged', or a process for each device"
            ) from error
        self._made = device, made
        return made

    @property
    def outstanding(self) -> int:
        """Calls whose end the host has not seen."""
        return 0 if self._made is None else self._made[1].outstanding

    def give_up(self, why: str) -> None:
        """Fail what is under way, and let its streams go."""
        if self._made is not None:
            self._made[1].give_up(why)

    def close(self) -> None:
        """Give streams and memory back, where nothing is under way."""
        if self._made is None:
            return
        (_, made), self._made = self._made, None
        made.close()
        leave(self._comm.world, [made])


def _lacks(kind: str) -> str:
    """Return why this process's library does not take such memory; empty: it does."""
    if kind != "cuda" or {"cuda"} != KINDS:
        return ""
    try:
        found = _ask_library()
    except CommError as error:
        return str(error)
    return "" if found.proved else f"the MPI library takes no CUDA memory: {found.why}"


def _together(said: Sequence[str]) -> str:
    """Return why not, by what all ranks say; the same on each of them."""
    for rank, why in enumerate(said):
        if why:
            return f"rank {rank}: {why}"
    return ""


def _number(device: Any) -> int:
    return int(getattr(device, "ordinal", 0))
