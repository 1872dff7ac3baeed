# SPDX-License-Identifier: Apache-2.0
"""The backend ``ipc`` on one communicator: calls over memory of peers (CUDA IPC).

Whether the ranks could share memory of their devices they tell each other at the first
call on a device array; it is the same for all of them from then on. That they can is
tried at the first call that runs so, when each opens what the others have. Both are
collective, as all ranks make the same calls.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.backends.base import Attached, Backend, Surroundings
from commrt.backends.ipc.collectives import (
    DIRECT,
    NAME,
    IpcFacts,
    predicted_us,
    why_refused,
)
from commrt.backends.ipc.memory import HALF_NBYTES
from commrt.backends.ipc.programs import peer_program
from commrt.backends.ipc.sharing import ENDING, Shared, connect, sweep
from commrt.backends.shm import schedule_candidates
from commrt.devices.cuda import why_no_card
from commrt.errors import BackendError, CommError, UsageError
from commrt.group.group import Group
from commrt.job.arena import machine_identity
from commrt.planning.compared import common_length, facts_of
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.select.policy import Rejected

__all__ = ["KINDS", "AttachedIpc", "IpcFacts"]

_LOG = logging.getLogger("commrt")

KINDS: set[str] = {"cuda"}
"""Kinds of devices whose memory processes share; tests add pretended ones."""


class AttachedIpc(Attached):
    """Memory of peers on one communicator."""

    precedence = 20
    rounds_at_each_step = True
    prepares = True
    is_dispatched = True
    ends_by_itself = True

    def __init__(self, backend: Backend, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._agreed: IpcFacts | None = None
        self._shared: Shared | None = None
        self.half_nbytes = HALF_NBYTES
        self.first_value = 0

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return every schedule, where the ranks can share memory."""
        if query.device != "cuda" or why_refused(self.facts, query) is not None:
            return ()
        return tuple(schedule_candidates(self.group, query, NAME))

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return ``direct`` where memory of peers does not serve the query."""
        why = why_refused(self.facts, query) if query.device == "cuda" else None
        return () if why is None else [Rejected(DIRECT, why, is_missing=True)]

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        """Return the time of ``direct`` if all ranks share a device."""
        return predicted_us(self.group.facts, query, candidate)

    def floor_us(self, query: Query, candidate: Candidate) -> float:
        """Return 0: the prediction itself takes no time."""
        return 0.0

    def claims(self, query: Query) -> str | None:
        """Return why it runs the query before the host takes part in it.

        That is so where ranks share a device and no library serves devices here: each
        rank reads what it wants where it lies, and nothing goes to the host and back.
        """
        if query.device != "cuda":
            return None
        facts = self.facts
        if not facts.shares_device:
            return None
        if self._has_library or why_refused(facts, query) is not None:
            return None
        if self.why_refused(query, DIRECT) is not None:
            return None
        return "memory of peers serves"

    @property
    def _has_library(self) -> bool:
        """True if another backend of no less precedence serves devices here."""
        return any(
            each.precedence >= self.precedence and not each.why_no_devices
            for each in self.beside.attached.values()
            if each is not self
        )

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a schedule needs asking; ``direct`` does not where it claims."""
        if self.claims(query) is None:
            return "memory of peers serves where a table or the call names it"
        if candidate.algorithm == DIRECT.algorithm:
            return None
        return "another schedule runs there where a table or the call names it"

    def plan(self, spec: PlanSpec) -> _native.PeerPlan:
        """Return the plan of this rank."""
        group, why = self.group, self.facts.why
        if why:
            raise BackendError(f"{spec.candidate} on {group.name}: {why}")
        made = peer_program(
            spec, group.rank, group.size, group.facts.layout, self.half_nbytes
        )
        item = spec.dtype.itemsize
        return _native.peer_plan(
            made.program,
            scratch_nbytes=made.scratch_nbytes,
            in_nbytes=spec.in_elements * item,
            out_nbytes=spec.out_elements * item,
            in_place=spec.op.in_place,
            coll=spec.op.code,
            root=spec.root,
            elements=spec.num_elements,
            element_type=spec.dtype.code,
            reduction=int(spec.reduction),
            facts=facts_of(spec),
            length=common_length(spec),
        )

    @property
    def detours(self) -> list[Any]:
        """Memory that is ending: calls that are looked at in full go on with it."""
        return ENDING

    @property
    def facts(self) -> IpcFacts:
        """Facts that the ranks have agreed on; before that, those of this rank."""
        if self._agreed is not None:
            return self._agreed
        why = self._why_never()
        if not why and {"cuda"} == KINDS:
            why = why_no_card() or ""
        return IpcFacts(why)

    @property
    def why_no_devices(self) -> str:
        """Reason why these ranks cannot share memory of devices; empty if they can."""
        return self.facts.why

    @property
    def is_agreed(self) -> bool:
        """True if the ranks have told each other."""
        return self._agreed is not None

    def tells(self, device: Any) -> dict[str, str] | None:
        """Return the abilities of this device, for the others (``agreement.py``).

        Devices that stand for none are of one kind on all ranks: about them nothing
        is asked.
        """
        comm = self.group
        if device.kind not in KINDS:
            self._agreed = IpcFacts(f"processes share no memory of a {device.kind} one")
            return None
        why = self._why_never()
        if not why and device.kind == "cuda" and comm.in_process and comm.size > 1:
            why = "CUDA IPC needs one process per rank; these ranks are threads of one "
            why += "process. Use backend='staged'"
        if why:
            self._agreed = IpcFacts(why)
            return None
        return {"why": _lacks(device), "device": _identity(device)}

    def settle(self, said: Sequence[dict[str, str]], timeout_s: float) -> None:
        """Take the facts of all ranks."""
        self._agreed = _together(said)

    def _why_never(self) -> str:
        """Return the reason that keeps these ranks from it; equal on all of them."""
        nodes = self.group.facts.nodes
        return f"the ranks lie on {nodes} nodes" if nodes > 1 else ""

    def runner(self, device: Any) -> _native.PeerWork:
        """Return what gives a device calls; collective where it is the first one.

        Raises UsageError for another device than that of the first call, and an error
        on all ranks where they cannot share memory.
        """
        self._sweep(device)
        shared = self._shared or self._connect(device)
        if shared.device is not device:
            here, there = (
                getattr(one, "ordinal", 0) for one in (shared.device, device)
            )
            raise UsageError(
                f"{self.group.name}: its memory of peers is on device {here}, and the "
                f"array on device {there}: use a communicator for each device, or "
                f"backend='staged'"
            )
        assert shared.work is not None
        return shared.work

    def _connect(self, device: Any) -> Shared:
        comm, world = self.group, self.group.world
        memory = connect(
            world.bootstrap,
            list(comm.world_ranks),
            device,
            world.share_memory,
            self.half_nbytes,
            timeout_s=comm.timeout_s,
            name=f"{comm.name}.comm{comm.identity}",
            first_value=self.first_value,
        )
        world.drive(device)
        try:
            work = _native.PeerWork(comm, memory.exchange, self.first_value)
        except BaseException:
            Shared(memory, None).end_later()
            raise
        self._shared = Shared(memory, work)
        return self._shared

    def prepare(self, device: Any, stream: int) -> bool:
        """Let the ranks connect; False where they cannot, on all ranks alike.

        Then memory of peers is not chosen any more, as if it could not be had.
        """
        if self._shared is None:
            self.await_others()
        try:
            self.runner(device)
        except CommError as error:
            if not error.on_all_ranks:
                raise
            self._agreed = IpcFacts(str(error), self.facts.shares_device)
            _LOG.warning(
                "%s: staged runs instead of memory of peers: %s", self.group.name, error
            )
            return False
        return True

    @property
    def outstanding(self) -> int:
        """Calls whose end the host has not seen."""
        shared = self._shared
        if shared is None or shared.work is None:
            return 0
        return shared.work.outstanding

    def give_up(self, why: str) -> None:
        """Fail what is under way, and let its streams go."""
        if self._shared is not None and self._shared.work is not None:
            self._shared.work.give_up(why)

    def close(self, *, may_call: bool = True) -> None:
        """Leave the memory to be ended as the other ranks leave it, too.

        With ``may_call=False`` the device is not called here: the garbage collector may
        run anywhere, and the end comes with a later call, or with the process.
        """
        if self._shared is None:
            return
        shared, self._shared = self._shared, None
        shared.end_later()
        if may_call:
            self._sweep(shared.device)

    def _sweep(self, device: Any) -> None:
        """Go on with what ends there.

        To free memory may wait for the device, and this for progress that only this
        thread could make: then it is put off.
        """
        engine = self.group.world.engine
        if engine.has_thread or engine.idle:
            sweep(device)


def _lacks(device: Any) -> str:
    """Return the abilities that a device lacks, in words; empty if it lacks nothing."""
    if not device.memory_flags:
        return "its device's streams do not write flags or wait for them"
    return str(getattr(device, "why_no_kernels", None) or "")


def _identity(device: Any) -> str:
    """Return an identity of the device, different from all others of the machine."""
    uuid = getattr(device, "uuid", None)
    if uuid:
        return str(uuid)
    place = device.kind, getattr(device, "ordinal", 0)
    return json.dumps([machine_identity(), os.getpid(), *place])


def _together(said: Sequence[dict[str, str]]) -> IpcFacts:
    """Return the conclusion from the facts of all ranks; the same on each of them."""
    devices = [each["device"] for each in said]
    shares = len({*devices}) < len(devices)
    for rank, each in enumerate(said):
        if each["why"]:
            return IpcFacts(f"rank {rank}: {each['why']}", shares)
    return IpcFacts("", shares)
