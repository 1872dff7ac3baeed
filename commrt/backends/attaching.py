# SPDX-License-Identifier: Apache-2.0
"""Every backend's object on one communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from commrt import _native, backends
from commrt.backends.base import Attached, Calls, Surroundings
from commrt.group.group import Group
from commrt.group.native_mpi import NativeMpi
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.select.table import Table
from commrt.select.wishes import Wishes

__all__ = ["attach_all"]


def attach_all(
    group: Group,
    table: Table | None,
    wishes: Sequence[Wishes],
    native_mpi: NativeMpi,
    stager: Callable[[Any], _native.Stager],
    sendrecv: Callable[..., Any],
    private_calls: Callable[[], AbstractContextManager[Calls]],
) -> dict[str, Attached]:
    """Return all backends by name, each attached to a communicator."""
    attached: dict[str, Attached] = {}
    beside = Surroundings(
        *(attached, table, wishes, native_mpi, stager, sendrecv, private_calls)
    )
    for name, backend in backends.all_backends().items():
        attach = getattr(backend, "attach", None)
        if attach is None:
            attached[name] = _TwoMethods(backend, group, beside)
        else:
            attached[name] = attach(group, beside)
    return attached


class _TwoMethods(Attached):
    """A backend that keeps nothing for a communicator, and is passed it each time."""

    def __init__(self, backend: Any, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._methods = backend

    def candidates(self, query: Query) -> Sequence[Candidate]:
        found: Sequence[Candidate] = self._methods.candidates(self.group, query)
        return found

    def plan(self, spec: PlanSpec) -> Any:
        return self._methods.plan(self.group, spec)
