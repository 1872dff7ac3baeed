# SPDX-License-Identifier: Apache-2.0
"""What a backend is: a name, a table of what it can do, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import DTYPES, ReduceOp
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["Availability", "Backend", "Capabilities"]


@dataclass(frozen=True)
class Capabilities:
    """What a backend can run; ``python -m commrt info`` prints it."""

    devices: tuple[str, ...] = ("host",)
    """Kinds of memory: host, cuda."""
    operations: tuple[str, ...] = COLLECTIVES
    """Collectives it offers."""
    dtypes: tuple[str, ...] = tuple(dtype.name for dtype in DTYPES)
    """Element types it reduces; any type can be moved."""
    reductions: tuple[str, ...] = tuple(op.name.lower() for op in ReduceOp)
    """Reductions it offers on at least one of its types."""
    schedules: bool = True
    """Whether it runs schedule algorithms."""
    native: bool = False
    """Whether it offers the library's own collectives."""
    algorithms: tuple[str, ...] = ()
    """Algorithms of its own, beside schedules and ``native``."""
    can_recover: bool = False
    """Whether a communicator can go on after a rank has died."""
    can_cancel: bool = False
    """Whether a started operation can be taken back."""
    limits: str = ""
    """What else bounds it, in words."""


@dataclass(frozen=True)
class Availability:
    """One row of ``available()``."""

    name: str
    """The backend."""
    available: bool
    """Whether it can be used in this process."""
    reason: str
    """What is missing, or what it runs on."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    """What it can do."""


class Backend(Protocol):
    """Who can run plans. Third parties register theirs in ``commrt.backends``."""

    name: str
    capabilities: Capabilities

    def availability(self) -> Availability:
        """Return whether it can be used here, and why not; must not start anything."""
        ...

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return what it can run for ``query`` on ``comm``, simplest first."""
        ...

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the native plan of this rank."""
        ...
