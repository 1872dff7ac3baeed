# SPDX-License-Identifier: Apache-2.0
"""The backend ``nccl`` on one communicator: calls by NCCL.

Whether NCCL is there the ranks tell each other at the first call on a device array; it
is the same for all of them from then on. The NCCL communicator is made at the first
call that runs by NCCL. Both are collective, as all ranks make the same calls.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from commrt import _native, env, nccl
from commrt.backends.base import Attached, Backend, Surroundings
from commrt.backends.nccl.collectives import (
    NAME,
    NATIVE,
    NcclFacts,
    library_plan,
    schedule_plan,
    why_no_schedules,
    why_refused,
)
from commrt.backends.shm import schedule_candidates
from commrt.errors import (
    BackendError,
    CaptureError,
    CommError,
    UsageError,
)
from commrt.group.group import Group
from commrt.job.arena import machine_identity
from commrt.nccl.features import version_text
from commrt.nccl.orders import order_of
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.select.policy import Rejected

__all__ = ["AttachedNccl", "NcclFacts"]

_LOG = logging.getLogger("commrt")


class AttachedNccl(Attached):
    """NCCL on one communicator."""

    precedence = 20
    rounds_at_each_step = True
    prepares = True
    is_dispatched = True
    ends_by_itself = True
    carries_boxes = True

    def __init__(self, backend: Backend, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._agreed: NcclFacts | None = None
        self._made: tuple[Any, _native.NcclWork] | None = None
        self.first_value = 0

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return NCCL's own, where it does it as commrt promises it, and schedules."""
        if query.device != "cuda":
            return ()
        found = [NATIVE] if why_refused(self.facts, query) is None else []
        if why_no_schedules(self.facts, query) is None:
            found += schedule_candidates(self.group, query, NAME)
        return found

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return NCCL's own where it does not run the query."""
        why = why_refused(self.facts, query) if query.device == "cuda" else None
        return () if why is None else [Rejected(NATIVE, why, is_missing=True)]

    def claims(self, query: Query) -> str | None:
        """Return why NCCL runs the query before the host takes part in it."""
        if query.device != "cuda" or query.order != "any":
            return None
        return "NCCL runs this" if why_refused(self.facts, query) is None else None

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a schedule needs asking; NCCL's own collective does not."""
        if candidate != NATIVE:
            return "a schedule on NCCL runs where a table or the call names it"
        return super().only_on_request(query, candidate)

    def plan(self, spec: PlanSpec) -> _native.NcclPlan:
        """Return the plan of this rank."""
        group, facts = self.group, self.facts
        is_native = spec.candidate.algorithm == NATIVE.algorithm
        why = facts.why or ("" if is_native else facts.no_kernels)
        if why:
            raise BackendError(f"{spec.candidate} on {group.name}: {why}")
        if is_native:
            return library_plan(spec, group.size, facts.version)
        return schedule_plan(spec, group.rank, group.size, group.facts.layout)

    def boxes_phase(
        self,
        *,
        messages: Sequence[tuple[bool, int, int, int, int]],
        copies: Sequence[tuple[int, int, int, int, int]],
        packs: Sequence[_native.StagedLaunch],
        unpacks: Sequence[_native.StagedLaunch],
    ) -> _native.NcclPhase:
        """Return one phase of a call that moves boxes."""
        return _native.NcclPhase(
            messages=messages, copies=copies, packs=packs, unpacks=unpacks
        )

    def boxes_plan(
        self, what: str, phases: Sequence[Any], *, coll: int, **facts: int
    ) -> _native.NcclPlan:
        """Return the plan of a call that moves boxes in phases."""
        return _native.nccl_phases_plan(what, phases, coll=coll, **facts)

    @property
    def facts(self) -> NcclFacts:
        """Facts that the ranks have agreed on; before that, those of this rank."""
        return self._agreed or _seen_here()

    @property
    def why_no_devices(self) -> str:
        """Reason why NCCL cannot be used; empty if it can."""
        return self.facts.why

    @property
    def is_agreed(self) -> bool:
        """True if the ranks have told each other."""
        return self._agreed is not None

    @property
    def is_made(self) -> bool:
        """True if there is an NCCL communicator."""
        return self._made is not None

    @property
    def device(self) -> Any:
        """The device of the NCCL communicator; None where there is none."""
        return None if self._made is None else self._made[0]

    def tells(self, device: Any) -> dict[str, Any] | None:
        """Return whether this rank has NCCL, for the others (``agreement.py``).

        Devices of other kinds than the library serves are pretended ones, and so are
        those of all ranks: about them nothing is asked.
        """
        opened = nccl.taken()
        if device.kind != "cuda" and (
            opened is None or device.kind not in opened.serves
        ):
            self._agreed = NcclFacts(f"NCCL has no use of a {device.kind} device")
            return None
        place = [machine_identity(), os.getpid(), getattr(device, "ordinal", 0)]
        try:
            opened = nccl.library()
        except BackendError as error:
            return {"why": str(error), "place": place}
        if self.group.in_process:  # each thread's own device, whatever its number
            place.append(id(device))
        return {
            "why": "",
            "version": opened.version,
            "capability": getattr(device, "capability", None),
            "no_kernels": getattr(device, "why_no_kernels", None) or "",
            "place": place,
        }

    def settle(self, said: Sequence[dict[str, Any]], timeout_s: float) -> None:
        """Take the facts of all ranks."""
        self._agreed = _together(said)

    def runner(self, device: Any) -> _native.NcclWork:
        """Return what calls NCCL on a device; collective where it is the first call.

        Raises UsageError for another device than that of the first call, and
        BackendError on all ranks where NCCL made no communicator.
        """
        comm = self.group
        if self._made is not None:
            on, made = self._made
            if on is not device:
                raise UsageError(
                    f"{comm.name}: its NCCL communicator is on device "
                    f"{_number(on)}, and the array on device {_number(device)}: use a "
                    f"communicator for each device, or backend='staged'"
                )
            return made
        order = order_of(device, self.first_value)
        order.sweep()
        native = nccl.NcclComm.create(
            comm.world.bootstrap,
            list(comm.world_ranks),
            config=nccl.NcclConfig(blocking=env.read_bool("COMMRT_NCCL_BLOCKING")),
            taken=nccl.library(),
            timeout_s=comm.timeout_s,
            name=f"{comm.name}.comm{comm.identity}",
            device=device,
        ).hand_over()
        comm.world.drive(device)
        made = _native.NcclWork(comm, order, native)
        self._made = device, made
        return made

    def prepare(self, device: Any, stream: int) -> bool:
        """Make the communicator; False where NCCL could not, on all ranks alike.

        Then NCCL is not chosen any more, as if it were not there. ``stream`` is the
        call's: raises CaptureError where it is captured and the communicator is to be
        made yet.
        """
        if not self.is_made and device.is_capturing(stream):
            raise CaptureError(
                f"stream {stream} is being captured, and the NCCL communicator is not "
                f"made yet, which a capture would not survive: make a call like this "
                f"one before, on all ranks; nothing was given to the device",
                "capturing",
            )
        if not self.is_made:
            self.await_others()
        try:
            self.runner(device)
        except CommError as error:
            if not error.on_all_ranks:
                raise
            self._agreed = NcclFacts(str(error))
            _LOG.warning("%s: staged runs instead of NCCL: %s", self.group.name, error)
            return False
        return True

    @property
    def outstanding(self) -> int:
        """Calls whose end the host has not seen."""
        return 0 if self._made is None else self._made[1].outstanding

    def give_up(self, why: str) -> None:
        """Fail what is under way, and let its streams go."""
        if self._made is not None:
            self._made[1].give_up(why)

    def close(self, *, may_call: bool = True) -> None:
        """Leave the communicator to be ended with those of the other ranks.

        With ``may_call=False`` NCCL is not called here: the garbage collector may run
        anywhere, and the end comes with a later call, or with the process.
        """
        if self._made is None:
            return
        (device, made), self._made = self._made, None
        made.close()
        if may_call:
            order_of(device).sweep()


def _together(said: Sequence[dict[str, Any]]) -> NcclFacts:
    """Return the conclusion from all ranks' facts; the same on each of them."""
    for rank, each in enumerate(said):
        if each["why"]:
            return NcclFacts(f"rank {rank}: {each['why']}")
    versions = [each["version"] for each in said]
    if len({*versions}) > 1:
        texts = ", ".join(
            f"rank {rank} {version_text(one)}" for rank, one in enumerate(versions)
        )
        return NcclFacts(f"the ranks have different versions of NCCL: {texts}")
    places: dict[str, int] = {}
    for rank, each in enumerate(said):
        first = places.setdefault(json.dumps(each["place"]), rank)
        if first != rank:
            return NcclFacts(
                f"ranks {first} and {rank} are threads of one process and share a "
                f"device, where NCCL would wait for itself"
            )
    known = [each["capability"] for each in said if each["capability"] is not None]
    without = [
        f"rank {rank}: {each['no_kernels']}"
        for rank, each in enumerate(said)
        if each["no_kernels"]
    ]
    return NcclFacts("", versions[0], min(known, default=None), "; ".join(without))


def _seen_here() -> NcclFacts:
    """Return the facts of this rank, before all have told each other."""
    opened = nccl.taken()
    if opened is not None and "cuda" not in opened.serves:
        return NcclFacts("", opened.version)
    why = nccl.why_missing()
    if why is not None:
        return NcclFacts(why)
    try:
        return NcclFacts("", nccl.library().version)
    except CommError as error:
        return NcclFacts(str(error))


def _number(device: Any) -> int:
    return int(getattr(device, "ordinal", 0))
