# SPDX-License-Identifier: Apache-2.0
"""MPI on one communicator: schedules between nodes, and the library's collectives.

The library's own collectives run on host memory; on device memory where the library
takes it. That is asked at run time (``cuda_aware``), and the ranks tell each other at
the first call on a device array; it is the same for all of them from then on. Then
MPI's own collectives are given the arrays as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from commrt import _native, env
from commrt.backends.base import Attached, Backend, Surroundings
from commrt.backends.mpi.collectives import (
    NATIVE,
    attach_library,
    library_plan,
    library_template,
    why_not,
)
from commrt.backends.mpi.measuring import measure
from commrt.backends.mpi.prediction import predicted_us
from commrt.backends.shm import schedule_candidates
from commrt.errors import CommError, DeviceError, UsageError
from commrt.group.deferred_release import defer
from commrt.group.group import Group
from commrt.mpi import cuda_aware
from commrt.nccl.orders import order_of
from commrt.planning.own_blocks import keeps_own_block
from commrt.planning.spec import PlanSpec
from commrt.planning.templates import plan_of, schedule_template
from commrt.select.facts import Candidate, Query
from commrt.select.model import BetweenNodes
from commrt.select.policy import Rejected
from commrt.select.schema import KEPT_APART

__all__ = ["KINDS", "AttachedMpi", "MpiFacts"]

KINDS: set[str] = {"cuda"}
"""Kinds of devices whose memory the library may be given; tests add pretended ones,
whose memory is the host's, so that every library takes it."""
_SWITCH = "COMMRT_CUDA_AWARE_MPI"
_TCP = "tcp"
"""The backend that runs schedules where MPI does not carry their messages."""
_ALL_OF_MPI = Candidate(NATIVE.backend, "*")
"""All schedules whose messages MPI would carry, in an explanation."""
_ask_library = lru_cache(maxsize=1)(cuda_aware.mpi_takes_cuda)


@dataclass(frozen=True)
class MpiFacts:
    """The facts about MPI on device memory; once agreed, equal on all ranks."""

    why: str
    """Reason why the MPI library gets no device memory; empty if it gets it."""


class AttachedMpi(Attached):
    """MPI on one communicator."""

    precedence = 10
    is_dispatched = True
    runs_in_a_library = frozenset({NATIVE.algorithm})
    stands_in_for = frozenset({_TCP})

    def __init__(self, backend: Backend, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._agreed: MpiFacts | None = None
        self._made: tuple[Any, _native.MpiWork] | None = None
        self.first_value = 0
        self._runs_unasked = False
        """True if the library's own collectives on host memory need no asking."""

    def join(self, timeout_s: float) -> None:
        """Get one of MPI's communicators, where calls may need it that do not ask."""
        native_mpi = self.beside.native_mpi
        if not native_mpi.is_there and self._may_be_picked():
            native_mpi.lease(timeout_s)
        self._runs_unasked = native_mpi.is_there
        if native_mpi.is_there:
            attach_library(self.group, native_mpi.handle())

    def measure(self) -> None:
        """Measure what MPI costs between nodes, where no table knows; once in a job.

        Where other connections carry messages, its collectives are compared with
        schedules over these.
        """
        group, world, table = self.group, self.group.world, self.beside.table
        if world.native_comms is None or world.mpi_between_nodes is not None:
            return
        if group.facts.nodes == 1 or group.in_process or group.size < world.size:
            return
        if table is None or not table.applies_to(group.facts):
            asked = group, self.beside.sendrecv, self.beside.private_calls
            if world.relay is None:
                world.mpi_between_nodes = measure(*asked)
                return
            found = measure(*asked, by=_TCP)
            world.mpi_between_nodes = found
            world.between_nodes = BetweenNodes(
                found.alpha_us, found.long_beta_us, 0.0, is_staged=False
            )

    def _may_be_picked(self) -> bool:
        """Return whether calls that do not ask may run the library's own collectives.

        The table, or a wish made beforehand, says so for such a communicator; between
        nodes the model may, too. The same on every rank.
        """
        facts, table, wishes = self.group.facts, self.beside.table, self.beside.wishes
        if self.group.world.mpi is None:
            return False
        if facts.nodes > 1:
            return True
        if any(wish.fits(NATIVE) for each in wishes for wish in each):
            return True
        return table is not None and table.may_pick(facts, NATIVE.name)

    # -- what it runs ------------------------------------------------------------

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return ``native`` where it keeps commrt's rules, and schedules off-node."""
        group = self.group
        if query.device == "cuda":
            can = query.order == "any" and self.why_not_on_device(query) is None
            return [NATIVE] if can else []
        found: list[Candidate] = []
        if query.device != "host" or self.group.world.native_comms is None:
            return found
        if group.size > 1 and why_not(query, group.size) is None:
            found.append(NATIVE)
        if group.facts.nodes > 1 and group.world.relay is None:
            found.extend(schedule_candidates(group, query, self.backend.name))
        return found

    def why_not_on_device(self, query: Query) -> str | None:
        """Return why MPI's own collective does not run ``query`` on devices.

        The order of a reduction is not looked at.
        """
        why = self.facts.why
        return why or why_not(replace(query, order="any"), self.group.size)

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return what MPI would run, but for a reason.

        Its own collective, where it does not run the query on devices; all schedules,
        where other connections carry their messages.
        """
        if query.device != "cuda":
            world = self.group.world
            is_carried = world.mpi is not None and self.group.is_relayed
            return [Rejected(_ALL_OF_MPI, world.why_carried)] if is_carried else ()
        why = self.why_not_on_device(query)
        return () if why is None else [Rejected(NATIVE, why, is_missing=True)]

    def claims(self, query: Query) -> str | None:
        """Return why MPI runs the query before it goes through pinned memory."""
        if query.device != "cuda" or query.order != "any":
            return None
        if self.why_not_on_device(query) is not None:
            return None
        return "MPI, which takes device memory, runs this"

    def is_meant(self, query: Query, algorithm: str | None) -> bool:
        """Return whether a wish for MPI speaks of the query.

        It speaks of host memory, and of devices' where the library takes that.
        """
        if query.device != "cuda":
            return super().is_meant(query, algorithm)
        return algorithm in (None, "native") and self.claims(query) is not None

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate needs asking: where MPI has no communicator yet."""
        if query.device == "cuda":
            return None
        if candidate.name != NATIVE.name or self._runs_unasked:
            return super().only_on_request(query, candidate)
        return "has no MPI communicator here until a call asks for it by name"

    def modelled_us(
        self, query: Query, candidate: Candidate, *, only_floor: bool = False
    ) -> float:
        """Return the model's time of a candidate, by what was measured."""
        group, between = self.group, self.group.world.mpi_between_nodes
        if group.is_relayed and query.device == "host":
            # A collective that nobody has timed may take many times what TCP takes.
            timed = () if between is None else between.native_us.get(query.coll, ())
            if not timed or query.nbytes > 2 * timed[-1][0]:
                return math.inf
        if between is None or group.facts.nodes == 1 or query.device != "host":
            return super().modelled_us(query, candidate, only_floor=only_floor)
        carried = None
        if group.is_relayed:
            carried = replace(between, beta_us=between.long_beta_us)
        return predicted_us(
            *(group.facts, query, candidate, between),
            carried=carried,
            only_floor=only_floor,
        )

    def keeps_own_block(self, spec: PlanSpec) -> bool:
        """Return whether a schedule's input may be a block of its output.

        MPI's own collectives must not be told of memory twice.
        """
        is_schedule = spec.candidate.algorithm != "native"
        return is_schedule and keeps_own_block(self.group, spec)

    def plan(self, spec: PlanSpec) -> Any:
        """Return the plan of this rank."""
        return self.sized(self.template(spec), spec)

    def template(self, spec: PlanSpec) -> _native.PlanTemplate:
        """Return what makes the plans of this rank, whatever their lengths."""
        if spec.candidate.algorithm != "native":
            return schedule_template(self.group, spec)
        return library_template(self.group, spec, self.beside.native_mpi.handle)

    def sized(self, template: _native.PlanTemplate, spec: PlanSpec) -> Any:
        """Return the plan for the lengths of ``spec``."""
        if spec.candidate.algorithm != "native":
            return plan_of(self.group, template, spec)
        runs = library_plan(self.group, template, spec)
        return runs if spec.device == "host" else self._on_device(runs, spec)

    def _on_device(self, runs: _native.Plan, spec: PlanSpec) -> _native.MpiDevicePlan:
        """Return the plan of a call on device arrays that is a collective of MPI's."""
        op, item = spec.op, spec.dtype.itemsize
        sends_out = op.input_on == "root" and op.in_place
        is_read = not sends_out or spec.root == self.group.rank
        return _native.mpi_device_plan(
            runs,
            in_nbytes=spec.in_elements * item if is_read else 0,
            out_nbytes=spec.out_elements * item,
            in_place=op.in_place and not op.by_pair,
            sends_out=sends_out and is_read,
        )

    # -- arrays on devices -------------------------------------------------------

    @property
    def facts(self) -> MpiFacts:
        """Facts that the ranks have agreed on; before that, those of this rank."""
        return self._agreed or MpiFacts(self._why_never() or _lacks("cuda"))

    @property
    def why_no_devices(self) -> str:
        """Reason why the MPI library gets no device memory; empty if it gets it."""
        return self.facts.why

    @property
    def is_agreed(self) -> bool:
        """True if the ranks have told each other."""
        return self._agreed is not None

    def tells(self, device: Any) -> str | None:
        """Return why this rank's library takes no device memory; empty where it does.

        For the other ranks (``agreement.py``); None where nothing is asked.
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
        if not why and not self.beside.native_mpi.ensure(timeout_s):
            why = "no MPI communicator is left for its collectives"
        self._agreed = MpiFacts(why)

    def _why_never(self) -> str:
        """Return the reason that keeps these ranks from it; equal on all of them."""
        comm = self.group
        if comm.world.mpi is None:
            return "these ranks were not started by MPI"
        if comm.size == 1:
            return "one rank needs no library"
        if env.read_str(_SWITCH) == "off":
            return f"{_SWITCH} is off"
        return ""

    def runner(self, device: Any) -> _native.MpiWork:
        """Return what gives MPI calls, made at the first one.

        Raises UsageError for another device than that of the first call, of this
        communicator or, as MPI knows one of a process, of another one.
        """
        comm = self.group
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
        table = self.beside.table
        together = table is not None and set(KEPT_APART) <= set(table.tested_together)
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

    def close(self, *, may_call: bool = True) -> None:
        """Give streams and memory back, where nothing is under way."""
        if self._made is None:
            return
        (_, made), self._made = self._made, None
        made.close()
        defer(self.group.world, [made])


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
