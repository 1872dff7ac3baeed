# SPDX-License-Identifier: Apache-2.0
"""The ``mpi`` backend: the library's own collectives, and schedules across nodes.

Where the ranks agree that the library takes device memory (``attached.py``), it runs
its collectives on arrays on devices too, if it keeps commrt's rules there; ``staged``
runs all else. Its schedules are of host memory alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from commrt import _native
from commrt.backends.base import Availability, Capabilities
from commrt.backends.shm import schedule_candidates
from commrt.errors import BackendError
from commrt.launch.detect import detect
from commrt.mpi import library
from commrt.planning.host_plans import check_params, schedule_plan
from commrt.planning.spec import PlanSpec, serves
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name, is_known
from commrt.vocabulary.operations import operation

__all__ = ["NATIVE", "MpiBackend", "why_not", "why_refused"]

NATIVE = Candidate("mpi", "native")

_INT_MAX = 2**31 - 1
_constants = lru_cache(maxsize=1)(library.mpi_constants)
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PROD})
_LOGICAL = frozenset({ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_INTEGER = _ORDERED | _ARITHMETIC | _LOGICAL | _BITWISE
# MPI 3.1, section 5.9.2; commrt allows more, such as min of bool.
_DEFINED_BY_MPI = {
    "bool": _LOGICAL,
    "int": _INTEGER,
    "uint": _INTEGER,
    "float": _ORDERED | _ARITHMETIC,
    "complex": _ARITHMETIC,
}


class MpiBackend:
    """Memory on any nodes, through the MPI that mpi4py has loaded."""

    name = "mpi"
    capabilities = Capabilities(
        devices=("host", "cuda"),
        native=True,
        limits="schedules: host memory, ranks on several nodes; native: on devices "
        "where the library says that it takes their memory; sum and prod of types of "
        "32 bits and more, min, max and bitwise of integers, logical of integers and "
        "bool, each where the library has the type; counts below 2^31",
    )

    def availability(self) -> Availability:
        """Look for mpi4py and its library without starting MPI."""
        launch = detect()
        if launch.kind in ("run", "torchrun"):
            # Not looked for either: there mpi4py is left alone.
            here = False
            program = {"run": "commrt.run", "torchrun": "torchrun"}[launch.kind]
            reason = f"{program} started these ranks, and then MPI is not used"
        else:
            here, reason = library.look()
            if here and launch.kind == "single":
                reason += ", for ranks that mpiexec or srun starts"
        return Availability(self.name, here, reason, self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return ``native`` where it keeps commrt's rules, and schedules off-node."""
        if query.device == "cuda":
            can = query.order == "any" and why_refused(comm, query) is None
            return [NATIVE] if can else []
        found: list[Candidate] = []
        if query.device != "host" or comm.mpi is None:
            return found
        if comm.size > 1 and why_not(query, comm.size) is None:
            found.append(NATIVE)
        if serves(comm.facts, self.name):
            found.extend(schedule_candidates(comm, query, self.name))
        return found

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the native plan of this rank."""
        if spec.candidate.algorithm != "native":
            return schedule_plan(comm, spec)
        check_params(spec.op.name, "native", comm.size, spec.candidate.params)
        constants = _constants()
        # What only moves is bytes; what is reduced needs its type and operation.
        if spec.op.reduces:
            datatype = constants[f"dtype:{spec.dtype.name}"]
            reduction = constants[f"op:{spec.reduction.name.lower()}"]
            count = spec.num_elements
        else:
            datatype, reduction = constants["BYTE"], 0
            count = spec.num_elements * spec.dtype.itemsize
        if spec.counts:
            return self._plan_counted(comm, spec, datatype, reduction)
        if spec.op.is_blocked:
            count //= comm.size
        self._check_count(spec, count)
        return self._make(comm, spec, datatype, reduction, count)

    def _plan_counted(
        self, comm: Any, spec: PlanSpec, datatype: int, reduction: int
    ) -> Any:
        """Return the plan where blocks differ in length."""
        unit = 1 if spec.op.reduces else spec.dtype.itemsize
        counts = [[unit * one for one in each] for each in spec.counts]
        own = counts[0][comm.rank]
        largest = max(map(sum, counts))
        self._check_count(spec, largest)
        first = [[0, *accumulate(each[:-1])] for each in counts]
        # Where there is one list, an operation has one use for it.
        return self._make(
            comm,
            spec,
            datatype,
            reduction,
            own,
            send_counts=counts[0],
            send_at=first[0],
            recv_counts=counts[-1],
            recv_at=first[-1],
        )

    def _check_count(self, spec: PlanSpec, count: int) -> None:
        if count > _INT_MAX:
            raise BackendError(
                f"{spec.op.name} of {spec.num_elements} {spec.dtype.name}: the MPI "
                f"library's own collectives count in 32 bits; use a schedule"
            )

    def _make(
        self,
        comm: Any,
        spec: PlanSpec,
        datatype: int,
        reduction: int,
        count: int,
        **counts: list[int],
    ) -> Any:
        return _native.make_native_plan(
            coll=spec.op.code,
            dtype=spec.dtype.code,
            redop=int(spec.reduction),
            root=spec.root,
            in_elems=spec.in_elements,
            out_elems=spec.out_elements,
            label=str(spec.candidate),
            datatype=datatype,
            op=reduction,
            comm=comm.native_mpi.handle(),
            count=count,
            returns_out=spec.has_output,
            **counts,
        )


def why_refused(comm: Any, query: Query) -> str | None:
    """Return why MPI's own collective does not run ``query`` on devices; equal on all.

    The order of a reduction is not looked at.
    """
    facts = comm.mpi_facts
    if facts.why:
        return str(facts.why)
    return why_not(replace(query, order="any"), comm.size)


def why_not(query: Query, size: int) -> str | None:
    """Return why the library's own collective would not keep commrt's rules."""
    if not operation(query.coll).mpi:
        return f"MPI has no {query.coll}"
    constants = _constants()
    dtype = dtype_by_name(query.dtype)
    # What only moves is counted in bytes.
    unit = 1 if query.op is None else dtype.itemsize
    # Blocks of different lengths are counted together.
    blocks = size if operation(query.coll).count_arguments else 1
    if blocks * query.nbytes // unit > _INT_MAX:
        return "the library counts in 32 bits"
    if query.op is None:
        return None
    if query.order != "any":
        return "the library combines in any order"
    if not is_known(query.op):
        return "knows no reduction of yours"
    reduction = ReduceOp[query.op.upper()]
    if reduction in _ORDERED and dtype.kind == "float":
        return "libraries differ in what the least and the largest of NaN are"
    if dtype.is_short_float:
        return "short floats would be rounded at every step"
    if reduction not in _DEFINED_BY_MPI[dtype.kind]:
        return f"MPI defines no {query.op} of {dtype.name}"
    if dtype.itemsize < 4 and reduction in _ARITHMETIC:
        # Open MPI's vectorised sums of short integers.
        return "sums of short integers saturate instead of wrapping"
    is_prefix = operation(query.coll).combines_some
    if is_prefix and reduction in _LOGICAL and dtype.kind != "bool":
        # It would not be 0 or 1.
        return "the first rank's contribution would come as it is"
    for constant in (f"op:{query.op}", f"dtype:{dtype.name}"):
        if constant not in constants:
            return f"the library has no {constant.partition(':')[2]}"
    return None
