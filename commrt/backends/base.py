# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend: what it can do, and its object on each communicator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from commrt import _native, algorithms
from commrt.errors import BackendError
from commrt.group.group import Group
from commrt.group.native_mpi import NativeMpi
from commrt.planning import host_plans, ordering, prediction
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.policy import Rejected
from commrt.select.schema import Parameters
from commrt.select.table import Table
from commrt.select.wishes import Wishes
from commrt.vocabulary.dtypes import DTYPES, ReduceOp
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["Attached", "Availability", "Backend", "Capabilities", "Surroundings"]


@dataclass(frozen=True)
class Capabilities:
    """The operations, types and memory that a backend can run; shown by ``info``."""

    devices: tuple[str, ...] = ("host",)
    """Kinds of memory: host, cuda."""
    operations: tuple[str, ...] = COLLECTIVES
    """Collectives it offers."""
    dtypes: tuple[str, ...] = tuple(dtype.name for dtype in DTYPES)
    """Element types it reduces; any type can be moved."""
    reductions: tuple[str, ...] = tuple(op.name.lower() for op in ReduceOp)
    """Reductions it offers on at least one of its types."""
    schedules: bool = True
    """True if it runs schedule algorithms."""
    native: bool = False
    """True if it offers the library's own collectives."""
    only_native_on: tuple[str, ...] = ()
    """Kinds of memory for which it has no schedules."""
    algorithms: tuple[str, ...] = ()
    """Algorithms of its own, beside schedules and ``native``."""
    can_recover: bool = False
    """True if a communicator can go on after a rank has died."""
    can_cancel: bool = False
    """True if a started operation can be taken back."""
    limits: str = ""
    """Other limits, in words."""


@dataclass(frozen=True)
class Availability:
    """One row of ``available()``."""

    name: str
    """The backend."""
    available: bool
    """True if it can be used in this process."""
    reason: str
    """The missing part, or the library that it runs on."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    """Its operations, types and memory."""


@dataclass(frozen=True)
class Surroundings:
    """The parts of a communicator that a backend may use, beside its ``Group``."""

    attached: Mapping[str, Attached]
    """All backends on the group, by name; complete once it is made."""
    table: Table | None
    """The selection table in force."""
    wishes: Sequence[Wishes]
    """Wishes of the group and of the job, made beforehand; the first one holds."""
    native_mpi: NativeMpi
    """MPI's communicators over the group's ranks."""
    stager: Callable[[Any], _native.Stager]
    """Returns what runs calls on a device through pinned memory."""
    sendrecv: Callable[..., Any]
    """Sends one message and receives one; as ``Communicator.sendrecv``."""
    private_calls: Callable[[], AbstractContextManager[Calls]]
    """Collectives of the same ranks, for measurements; collective to enter."""


class Calls(Protocol):
    """Collectives for private use."""

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one by its name."""
        ...

    @property
    def binders(self) -> Mapping[str, Callable[..., Callable[[], Any]]]:
        """Binders of the collectives, by name; what one returns runs at each call."""
        ...


class Backend(Protocol):
    """Runs collectives. Other packages register theirs in ``commrt.backends``.

    A package may leave out some methods. Without ``attach`` a backend has the methods
    ``candidates(comm, query)`` and ``plan(comm, spec)``, which are those of
    ``Attached`` with the communicator as first argument. Without ``parameters`` any
    parameter may be named.
    """

    name: str
    capabilities: Capabilities

    def availability(self) -> Availability:
        """Return whether it can be used here, and why not; must not start anything."""
        ...

    def attach(self, group: Group, beside: Surroundings) -> Attached:
        """Return its object on one communicator, which is being made.

        Local: the ranks may talk to each other in ``Attached.join``.
        """
        ...

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms, with a check of each value.

        ``ranks`` is the number of ranks, or None for any. None instead of parameters:
        any word may be one.
        """
        ...

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return whether such ranks may be offered one of its algorithms.

        ``by_mpi`` says whether the ranks have met by MPI. It is asked before they are
        started. A package may leave it out where the answer is always yes.
        """
        ...

    def variants(
        self, candidate: Candidate, full_nbytes: int
    ) -> Sequence[Candidate] | None:
        """Return a candidate with other values of the backend's own parameters.

        The tuner tries them. None where the parameters of the transport matter, for
        which the tuner knows what to try. A package may leave it out.
        """
        ...


class Attached:
    """A backend on one communicator. Derive from it and override what is different.

    Answers must be equal on all ranks, unless a method says otherwise: each rank
    chooses by itself what runs. A backend of the host needs ``candidates`` and
    ``plan``; one for arrays on devices also ``runner``.
    """

    precedence: ClassVar[int] = 0
    """Rank among backends that claim the same query (``claims``). If a call names no
    backend, the one with the largest number runs it."""
    stands_in_for: ClassVar[frozenset[str]] = frozenset()
    """Backends that run its schedules in other launches, or did in earlier versions:
    rules of tables that name them hold for this one where they run none."""
    rounds_at_each_step: ClassVar[bool] = False
    """True if its schedules round each sum of two operands to the element type."""
    starts_in_python: ClassVar[frozenset[str]] = frozenset()
    """Algorithms whose start needs the interpreter, so no other thread starts them."""
    runs_in_a_library: ClassVar[frozenset[str]] = frozenset()
    """Algorithms whose messages commrt does not see."""
    prepares: ClassVar[bool] = False
    """True if ``prepare`` is to be called before a plan runs on a device."""
    is_dispatched: ClassVar[bool] = False
    """True if plan and runner are C++ objects, which later calls start without Python.
    """
    ends_by_itself: ClassVar[bool] = False
    """True if a device ends its calls without progress of the host."""

    carries_boxes: ClassVar[bool] = False
    """True if it moves boxes, from device memory that a plan owns: it has
    ``boxes_phase`` and ``boxes_plan``, and its runner ``start_arrays``."""

    def __init__(self, backend: Backend, group: Group, beside: Surroundings) -> None:
        self.backend = backend
        self.group = group
        self.beside = beside

    # -- what it runs ------------------------------------------------------------

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return the candidates that can run ``query``, simplest first."""
        return ()

    def keeps_own_block(self, spec: PlanSpec) -> bool:
        """Return whether the plan of a gather leaves its own block of ``out`` as it is.

        Its input may then be that block, and need not be copied. Of host arrays only.
        Ranks may answer differently.
        """
        return False

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return candidates that it would have, but for a reason: a missing library."""
        return ()

    def why_refused(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate must not run ``query``; None where it may.

        By itself, it must not where it combines in another order than ``query`` needs,
        nor where messages are to have checksums and a library sends them.
        """
        if self.group.has_checksums and candidate.algorithm in self.runs_in_a_library:
            return (
                "COMMRT_CHECKSUM=1 asks for checksums, and a library's own collective "
                "has none"
            )
        return ordering.why_refused(
            self.group, query, candidate, rounds_at_each_step=self.rounds_at_each_step
        )

    def allows(self, query: Query, candidate: Candidate) -> bool:
        """Return whether a candidate may have parameters beyond those offered."""
        return host_plans.allows(self.group.facts.layout, query, candidate)

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        """Return the predicted microseconds of a candidate; ``inf`` means never."""
        coll, name = query.coll, candidate.algorithm
        if algorithms.exists(coll, name):
            root, (own, _) = query.root or 0, host_plans.split_params(candidate.params)
            if host_plans.why_not(self.group, coll, name, root, own) is not None:
                return math.inf
        return self.modelled_us(query, candidate)

    def floor_us(self, query: Query, candidate: Candidate) -> float:
        """Return a lower bound of ``predicted_us``, which is quicker to find."""
        return self.modelled_us(query, candidate, only_floor=True)

    def modelled_us(
        self, query: Query, candidate: Candidate, *, only_floor: bool = False
    ) -> float:
        """Return the model's time of a candidate that can run, or its lower bound."""
        model = prediction.floor_us if only_floor else prediction.predicted_us
        return model(self.group.facts, query, candidate)

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate runs only on request; None where it needs none.

        A call, a variable or a table's rule requests it.
        """
        layout = self.group.facts.layout
        return host_plans.only_by_name(layout, query.coll, candidate)

    def claims(self, query: Query) -> str | None:
        """Return why it runs ``query`` before all backends of less precedence.

        None where it leaves the choice to the table and the model.
        """
        return None

    def is_meant(self, query: Query, algorithm: str | None) -> bool:
        """Return whether a wish for it, made beforehand, speaks of such a query."""
        return query.device in self.backend.capabilities.devices

    def plan(self, spec: PlanSpec) -> Any:
        """Return the plan of this rank.

        For host memory it is a ``_native.Plan``. For arrays on devices it has an
        attribute ``backend``, the name of the backend whose ``runner`` starts it.
        """
        raise self._undefined("plan")

    def template(self, spec: PlanSpec) -> _native.PlanTemplate | None:
        """Return what makes the plans of all calls that differ from ``spec`` in length.

        For host memory. The engine then plans calls of new lengths by itself. By
        default there is none, and ``plan`` is asked for each length.
        """
        return None

    def sized(self, template: _native.PlanTemplate, spec: PlanSpec) -> Any:
        """Return the plan of ``template`` for the lengths of ``spec``.

        Raises the reason where there can be none.
        """
        raise self._undefined("sized")

    def _undefined(self, method: str) -> BackendError:
        return BackendError(
            f"backend {self.backend.name!r} was to run a call, and its "
            f"{type(self).__name__} defines no {method}(): define it, or offer no "
            f"candidates that need it"
        )

    # -- arrays on devices -------------------------------------------------------

    @property
    def why_no_devices(self) -> str:
        """Reason why these ranks' devices are not served; empty if they may be."""
        return ""

    @property
    def is_agreed(self) -> bool:
        """True if the ranks need not tell each other anything about it (any more)."""
        return True

    def tells(self, device: Any) -> Any:
        """Return this rank's facts for the others, for JSON.

        None where nothing is asked: what holds is settled then, by facts that all ranks
        know, so none of them asks.
        """
        return None

    def settle(self, said: Sequence[Any], timeout_s: float) -> None:
        """Settle what holds by what all ranks told; collective."""

    def await_others(self) -> None:
        """Let all ranks come, before they make what a first call uses; collective.

        It counts as an operation. Raises RefusedError where a rank has refused its
        call instead of coming.
        """
        group = self.group
        group.world.bootstrap.exchange(
            group.world_ranks,
            f"comm{group.identity}/{self.backend.name}/{group.next_seq}",
            b"",
            group.timeout_s,
            group.heed_others,
        )
        group.pass_over()

    def prepare(self, device: Any, stream: int) -> bool:
        """Make what ``runner`` returns; False where it failed on all ranks alike.

        Then the ranks choose once more. Collective, before the plan of a call.
        """
        return True

    def runner(self, device: Any) -> Any:
        """Return what starts plans on a device.

        Its method ``start(plan, in_address, out_address, stream, orders, in_owner,
        out_owner, timeout_s)`` returns a ``_native.DeviceCall``.
        """
        raise self._undefined("runner")

    def boxes_phase(
        self,
        *,
        messages: Sequence[tuple[bool, int, int, int, int]],
        copies: Sequence[tuple[int, int, int, int, int]],
        packs: Sequence[_native.StagedLaunch],
        unpacks: Sequence[_native.StagedLaunch],
    ) -> Any:
        """Return one phase of a call that moves boxes.

        Args:
            messages: whether this rank sends it; number of the array, offset, bytes;
                the other rank. Both ranks list them in the same order.
            copies: array, offset, array and offset to copy to, bytes.
            packs: kernels to launch before.
            unpacks: kernels to launch behind.
        """
        raise self._undefined("boxes_phase")

    def boxes_plan(
        self, what: str, phases: Sequence[Any], *, coll: int, **facts: int
    ) -> Any:
        """Return the plan of a call that moves boxes in phases."""
        raise self._undefined("boxes_plan")

    def host_part(self, candidate: Candidate) -> Candidate | None:
        """Return what the host runs for a candidate; None where a device runs it."""
        return None

    @property
    def device(self) -> Any:
        """The one device that its runner is bound to; None where there is none."""
        return None

    @property
    def detours(self) -> list[Any] | None:
        """A list that is empty while calls may start without Python; None: always."""
        return None

    @property
    def outstanding(self) -> int:
        """Calls whose end the host has not seen."""
        return 0

    # -- beginning and end -------------------------------------------------------

    def join(self, timeout_s: float) -> None:
        """Get what a communicator of the user needs; collective, as it is made."""

    def measure(self) -> None:
        """Measure what selection has to know; collective, once all else is made."""

    def give_up(self, why: str) -> None:
        """Fail what is under way, and let its streams go."""

    def close(self, *, may_call: bool = True) -> None:
        """Give everything back, where nothing is under way; local, idempotent.

        With ``may_call=False`` no device is called: the garbage collector runs this.
        """
