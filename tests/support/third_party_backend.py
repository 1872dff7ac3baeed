# SPDX-License-Identifier: Apache-2.0
"""A backend for arrays on devices, as another package would write it: one file.

It runs allreduce of float32 by letting the host do it: its plan holds a staged one, and
its runner hands that to what copies through pinned memory. The package names the class
in its entry points:

    [project.entry-points."commrt.backends"]
    theirs = "third_party_backend:Theirs"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from commrt.backends import Attached, Availability, Capabilities, Surroundings
from commrt.errors import BackendError
from commrt.group.group import Group
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.select.policy import Rejected
from commrt.select.schema import Parameters

__all__ = ["AttachedTheirs", "Theirs"]

MAGIC = Candidate("theirs", "magic")


class Theirs:
    """Allreduce on devices."""

    name = "theirs"
    capabilities = Capabilities(
        devices=("cuda",),
        operations=("allreduce",),
        dtypes=("float32",),
        schedules=False,
        algorithms=("magic",),
        limits="float32 alone",
    )
    version = 1

    def availability(self) -> Availability:
        """Return that it can be used."""
        return Availability(self.name, True, "an example", self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedTheirs:
        """Return its object on one communicator."""
        return AttachedTheirs(self, group, beside)

    def parameters(self, coll: str, algorithm: str, ranks: int | None) -> Parameters:
        """Return the one parameter that there is."""
        return {"piece": lambda value: None if value in (64, 4096) else "64 or 4096"}


@dataclass(frozen=True)
class TheirPlan:
    """A call of this rank."""

    inner: Any
    """A plan of staged calls."""
    backend: str = "theirs"
    """Says whose runner starts it."""


class TheirRunner:
    """Starts calls on one device."""

    def __init__(self, stager: Any) -> None:
        self._stager = stager
        self.num_started = 0

    def start(self, plan: TheirPlan, *arguments: Any) -> Any:
        """Start a call; return it."""
        self.num_started += 1
        return self._stager.start(plan.inner, *arguments)


class AttachedTheirs(Attached):
    """The backend on one communicator."""

    def __init__(self, backend: Theirs, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._agreed: str | None = None
        self.runners: dict[int, TheirRunner] = {}
        self.is_closed = False
        self.given_up = ""

    def _why_not(self, query: Query) -> str | None:
        if query.coll != "allreduce":
            return f"it has no {query.coll}"
        if query.dtype != "float32" or query.op not in ("sum", "max"):
            return "it knows sum and max of float32 alone"
        return self._agreed or None

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return the one candidate, where it runs the query."""
        can = query.device == "cuda" and self._why_not(query) is None
        return [MAGIC] if can else []

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return the same, where it does not."""
        why = self._why_not(query) if query.device == "cuda" else None
        return [] if why is None else [Rejected(MAGIC, why, is_missing=True)]

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return that it runs on request; with a precedence, that it needs none."""
        return None if self.precedence else "theirs runs where it is asked for"

    def claims(self, query: Query) -> str | None:
        """Return why it runs the query before backends of less precedence."""
        can = query.device == "cuda" and self._why_not(query) is None
        return "theirs runs this" if can else None

    def plan(self, spec: PlanSpec) -> TheirPlan:
        """Return the plan: the host's ring, on pinned memory."""
        if self._agreed:
            raise BackendError(f"{spec.candidate}: {self._agreed}")
        ring = Candidate("staged", "ring", spec.candidate.params)
        return TheirPlan(
            self.beside.attached["staged"].plan(replace(spec, candidate=ring))
        )

    @property
    def is_agreed(self) -> bool:
        """True once the ranks have compared their versions."""
        return self._agreed is not None

    def tells(self, device: Any) -> int:
        """Return this rank's version."""
        return getattr(device, "version_of_theirs", Theirs.version)

    def settle(self, said: Sequence[int], timeout_s: float) -> None:
        """See whether all ranks have the same version."""
        self._agreed = "" if len({*said}) == 1 else f"the ranks have versions {said}"

    def runner(self, device: Any) -> TheirRunner:
        """Return what starts calls on a device, made at the first one."""
        found = self.runners.get(id(device))
        if found is None:
            made = TheirRunner(self.beside.stager(device))
            found = self.runners[id(device)] = made
        return found

    def give_up(self, why: str) -> None:
        """Keep the reason."""
        self.given_up = why

    def close(self, *, may_call: bool = True) -> None:
        """Drop the runners."""
        self.is_closed = True
        self.runners.clear()
