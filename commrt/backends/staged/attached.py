# SPDX-License-Identifier: Apache-2.0
"""Staged calls on one communicator, whose part on the host another backend runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from commrt import _native, algorithms
from commrt.backends.base import Attached, Backend, Surroundings
from commrt.backends.staged.collectives import (
    COPIES,
    ENGINE,
    NAME,
    PIECE,
    PIECE_NBYTES,
    check_copies,
    check_piece,
    is_cut,
    on_host,
    piece_nbytes,
)
from commrt.backends.staged.pieces import cut_blocks, cut_elements
from commrt.errors import UsageError
from commrt.group.group import Group
from commrt.planning.kept_plans import KeptPlans
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.operations import rule_nbytes

__all__ = ["AttachedStaged"]

_MOST_HOSTS = 256
"""Answers that it keeps to the question of who runs a part on the host."""


class AttachedStaged(Attached):
    """Arrays on devices of one communicator, through pinned memory."""

    is_dispatched = True

    def __init__(self, backend: Backend, group: Group, beside: Surroundings) -> None:
        super().__init__(backend, group, beside)
        self._templates: KeptPlans[_native.PlanTemplate] = KeptPlans(group)
        """Templates of the host's parts; calls of new lengths have the same."""
        self._hosts: dict[Any, Attached | None] = {}
        """Backends of the host by what they run; the last used last."""

    # -- what it runs ------------------------------------------------------------

    def candidates(self, query: Query) -> Sequence[Candidate]:
        """Return one for each of the host backends' candidates."""
        if query.device != "cuda":
            return ()
        host, _ = on_host(query, Candidate(NAME, "any"))
        found = [
            Candidate(NAME, each.algorithm, each.params)
            for backend in self._on_host()
            for each in backend.candidates(host)
            # The progress thread starts it, which never has the interpreter's lock.
            if each.algorithm not in backend.starts_in_python
        ]
        return list(dict.fromkeys(found))

    def _on_host(self) -> Iterator[Attached]:
        """Yield the backends that may run the part on the host."""
        for each in self.beside.attached.values():
            if "host" in each.backend.capabilities.devices:
                yield each

    def why_refused(self, query: Query, candidate: Candidate) -> str | None:
        """Return why the host's candidate must not run the query."""
        return super().why_refused(*on_host(query, candidate))

    def allows(self, query: Query, candidate: Candidate) -> bool:
        """Return whether the host's candidate may have these parameters."""
        return super().allows(*on_host(query, candidate))

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        """Return the predicted time of the part on the host."""
        return super().predicted_us(*on_host(query, candidate))

    def floor_us(self, query: Query, candidate: Candidate) -> float:
        """Return a lower bound of the time of the part on the host."""
        return super().floor_us(*on_host(query, candidate))

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why the host's candidate needs asking."""
        host_query, host = on_host(query, candidate)
        if algorithms.exists(query.coll, host.algorithm):
            return super().only_on_request(host_query, host)
        runs = self._runs_on_host(host_query, host.algorithm)
        if runs is None:
            return None
        name = runs.backend.name
        return runs.only_on_request(host_query, replace(host, backend=name))

    def _runs_on_host(self, query: Query, algorithm: str) -> Attached | None:
        """Return the host's backend that a staged algorithm stands for.

        Backends offer an algorithm for all lengths, however fast it is.
        """
        key = replace(query, nbytes=0), algorithm
        if key in self._hosts:
            found = self._hosts.pop(key)
        else:
            found = self._find_on_host(query, algorithm)
        self._hosts[key] = found
        if len(self._hosts) > _MOST_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        return found

    def _find_on_host(self, query: Query, algorithm: str) -> Attached | None:
        for each in self._on_host():
            if algorithm in each.starts_in_python:
                continue
            if any(one.algorithm == algorithm for one in each.candidates(query)):
                return each
        return None

    def host_part(self, candidate: Candidate) -> Candidate:
        """Return the host's algorithm, with its own parameters."""
        params = dict(candidate.params)
        check_piece(params.pop(PIECE, PIECE_NBYTES))
        check_copies(params.pop(COPIES, ENGINE))
        return replace(candidate, params=params)

    def plan(self, spec: PlanSpec) -> _native.StagedPlan:
        """Return the plan of this rank."""
        group = self.group
        own = dict(spec.candidate.params)
        nbytes = spec.num_elements * spec.dtype.itemsize
        most = check_piece(own.pop(PIECE, piece_nbytes(nbytes, group.size)))
        by_kernel = check_copies(own.pop(COPIES, ENGINE))
        name = spec.candidate.algorithm
        runs = self._runs_on_host(_host_query(spec, group.size), name)
        if runs is None:
            raise UsageError(
                f"{spec.candidate}: no host backend here runs {spec.op.name} by "
                f"{name!r}; choose another algorithm"
            )
        inner = Candidate(runs.backend.name, name, own)
        host = replace(spec, candidate=inner, device="host")
        plan = partial(self._host_plan, runs)
        if is_cut(spec.op.name):
            made = cut_elements(host, plan, group.rank, most)
        else:
            asked = PIECE in spec.candidate.params
            made = cut_blocks(host, plan, group.rank, group.size, most, asked)
        made.by_kernel = by_kernel
        return made

    def _host_plan(self, runs: Attached, spec: PlanSpec) -> Any:
        """Return the plan of a part on the host, by the template of other lengths."""
        if spec.user is not None or spec.factor is not None:
            return runs.plan(spec)  # these may be new in every call
        key = (
            spec.op.code,
            spec.dtype.name,
            spec.dtype.itemsize,
            spec.reduction,
            spec.root,
            spec.candidate,
            spec.has_output,
        )
        template = self._templates.find(key)
        if template is None:
            template = runs.template(spec)
            if template is None:
                return runs.plan(spec)
            self._templates.keep(key, template)
        return runs.sized(template, spec)

    # -- arrays on devices -------------------------------------------------------

    def runner(self, device: Any) -> _native.Stager:
        """Return the runner of staged calls on a device, made at the first one."""
        return self.beside.stager(device)


def _host_query(spec: PlanSpec, size: int) -> Query:
    """Return the question of whether a host backend runs a call's part there."""
    nbytes = spec.num_elements * spec.dtype.itemsize
    return Query(
        coll=spec.op.name,
        nbytes=rule_nbytes(spec.op.name, nbytes, size),
        dtype=spec.dtype.name,
        op=spec.reduction.name.lower() if spec.op.reduces else None,
        root=spec.root if spec.op.has_root else None,
    )
