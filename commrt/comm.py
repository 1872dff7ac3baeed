# SPDX-License-Identifier: Apache-2.0
"""Communicator: a group of ranks and every operation among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from commrt import _libmpi, _native, backends, calls
from commrt.arena import Arena
from commrt.arrays import view
from commrt.backends.base import PlanSpec
from commrt.backends.planning import LANE_NBYTES
from commrt.backends.prediction import predicted_us
from commrt.dtypes import dtype_by_name
from commrt.errors import (
    BufferError_,
    ClosedError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.links import agree_link_class, measure_links, spins_for
from commrt.operations import OPERATIONS, OpSpec, operation, rule_nbytes
from commrt.safety.check import Checker
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.policy import Explanation, Policy
from commrt.world import FIRST_TAG, World

if TYPE_CHECKING:
    from commrt.signatures import Operations
else:
    Operations = object

__all__ = ["CommStats", "Communicator"]


_NO_DTYPE = 11
"""What the dispatcher's key holds where there is no array."""
_MAX_PLANS = 4096


@dataclass(frozen=True)
class CommStats:
    """Counters of one communicator."""

    name: str
    """Its name in messages."""
    operations: int
    """Collectives started."""
    plans: int
    """Plans in the dispatcher's cache."""
    in_flight: bool
    """Whether operations are in flight."""


class Communicator(_native.Group, Operations):
    """A group of ranks. Get one from ``commrt.init()``, ``split`` or ``create_group``.

    Collectives must be called by all ranks of the communicator in the same order.
    Calls from several threads are serialised; the order is then the caller's duty.
    """

    def __init__(
        self, world: World, ranks: Sequence[int], name: str, identity: int
    ) -> None:
        """Collective over ``ranks`` (ranks of the world); users call ``commrt.init``."""
        self._world = world
        self._ranks = tuple(ranks)
        self._closed: str | None = None
        self._plans: dict[Any, Any] = {}
        self._native_comm: Any = None
        self._splits = 0
        super().__init__(world.engine, ranks.index(world.rank), len(ranks), name)
        self.timeout_s = world.timeout_s
        self._arena: Arena | None = None
        self._attach(identity)
        self.facts = self._agree_facts()
        self._set_spins(spins_for(self.facts))
        self._policy = Policy(
            self.facts, world.table, self._candidates, self._cost, world.overrides
        )
        self._checker = Checker.from_environment(self)
        self._slow = self._checker is not None

    # -- making ------------------------------------------------------------------

    def _attach(self, identity: int) -> None:
        world = self._world
        here = world.node_of(world.rank)
        members = [i for i, r in enumerate(self._ranks) if world.node_of(r) == here]
        if len(members) > 1:
            region = _native.region_nbytes(len(members), LANE_NBYTES)
            on_node = [self._ranks[i] for i in members]
            key = f"arena/{identity}/{here}"
            self._arena = world.share_memory(on_node, key, region)
            self._attach_arena(
                self._arena.address, self._arena.region_nbytes, LANE_NBYTES, members
            )
        self._members = frozenset(members)
        if world.mpi is not None and len(members) < len(self._ranks):
            tag = FIRST_TAG + 2 * identity
            self._attach_mpi(_libmpi.handle(world.mpi), tag, list(self._ranks))

    def _agree_facts(self) -> CommFacts:
        world = self._world
        per_node: dict[int, int] = {}
        for rank in self._ranks:
            node = world.node_of(rank)
            per_node[node] = per_node.get(node, 0) + 1
        if not world.links and len(self._ranks) == world.size:
            world.links = measure_links(self, world)
        ppn = max(per_node.values())
        link = agree_link_class(world, self._ranks, ppn)
        return CommFacts(self.size, len(per_node), ppn, world.cores, link)

    def _derive(self, ranks: Sequence[int], name: str, key: str) -> Communicator:
        world = self._world
        identity = world.agree_id(ranks, key)
        return Communicator(world, ranks, name, identity)

    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None
    ) -> Communicator | None:
        """Return the communicator of the ranks that passed the same ``color``.

        Collective over all ranks. Ranks are ordered by ``key``, then by rank here.
        With ``color=None`` a rank takes part and gets None.
        """
        self._check_usable()
        if color is not None and (isinstance(color, bool) or not isinstance(color, int)):
            raise UsageError(f"split: color={color!r} must be an integer or None")
        self._splits += 1
        label = f"{self.name}.split{self._splits}"
        mine = f"{'' if color is None else color}/{key}".encode()
        said = self._world.bootstrap.exchange(self._ranks, label, mine, self.timeout_s)
        chosen: list[tuple[int, int]] = []
        for rank, text in enumerate(said):
            other, other_key = text.decode().split("/")
            if color is not None and other == str(color):
                chosen.append((int(other_key), rank))
        if color is None:
            return None
        ranks = [self._ranks[rank] for _, rank in sorted(chosen)]
        return self._derive(ranks, name or f"{label}[{color}]", f"{label}[{color}]")

    def dup(self, *, name: str | None = None) -> Communicator:
        """Return a communicator of the same ranks with a sequence of its own."""
        self._check_usable()
        self._splits += 1
        label = f"{self.name}.dup{self._splits}"
        return self._derive(self._ranks, name or label, label)

    def create_group(
        self, ranks: Sequence[int], *, name: str | None = None
    ) -> Communicator:
        """Return the communicator of ``ranks`` (ranks of this one, in that order).

        Collective over ``ranks`` only: other ranks must not call it.
        """
        self._check_usable()
        ranks = list(ranks)
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise UsageError(
                f"create_group: ranks={ranks} must be distinct and contain the "
                f"caller's rank {self.rank}"
            )
        for rank in ranks:
            self._check_rank("create_group", "ranks", rank)
        label = f"{self.name}.group{ranks}"
        world_ranks = [self._ranks[rank] for rank in ranks]
        return self._derive(world_ranks, name or label, label)

    def free(self) -> None:
        """Release the communicator; local, idempotent. Wait for its requests first."""
        if self._closed is not None:
            return
        if not self._idle:
            self._world.engine.step()
        if not self._idle:
            raise UsageError(
                f"{self.name} cannot be freed: operations are in flight; wait() for "
                f"their requests first"
            )
        self._closed = "freed"
        self._slow = True
        self._forget_plans()
        self._plans.clear()
        if self._arena is not None:
            self._detach()
            self._arena.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()

    # -- what it is --------------------------------------------------------------

    @property
    def in_process(self) -> bool:
        """Whether the ranks are threads of this process."""
        return self._world.in_process

    @property
    def mpi(self) -> Any:
        """mpi4py's communicator over the ranks of the job, or None without MPI.

        It is commrt's own duplicate: use it for MPI calls beside commrt's, with tags
        of your own communicator obtained from its ``Dup()``.
        """
        return self._world.mpi

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks of this communicator on each node."""
        world = self._world
        groups: dict[int, list[int]] = {}
        for rank, world_rank in enumerate(self._ranks):
            groups.setdefault(world.node_of(world_rank), []).append(rank)
        return list(groups.values())

    @property
    def table_digest(self) -> str | None:
        """Digest of the selection table in force, None without one."""
        table = self._world.table
        return None if table is None else table.digest

    def shares_memory_with(self, rank: int) -> bool:
        """Return whether ``rank`` is reached over shared memory."""
        return rank in self._members

    def stats(self) -> CommStats:
        """Return counters of this communicator."""
        return CommStats(self.name, self.next_seq, self._num_plans, not self._idle)

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job with exit status ``code``."""
        from commrt.safety.abort import end_job

        end_job(self._world, code)

    def __repr__(self) -> str:
        state = f", {self._closed}" if self._closed else ""
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}{state}>"

    # -- choosing ----------------------------------------------------------------

    def _query(self, spec: OpSpec, nbytes: int, dtype: str, op: str | None, root: int) -> Query:
        return Query(
            coll=spec.name,
            nbytes=nbytes,
            dtype=dtype,
            op=op if spec.reduces else None,
            root=root if spec.has_root else None,
        )

    def _candidates(self, query: Query) -> list[Candidate]:
        found: list[Candidate] = []
        for backend in backends.all_backends().values():
            found.extend(backend.candidates(self, query))
        return found

    def _cost(self, query: Query, candidate: Candidate) -> float:
        return predicted_us(self.facts, query, candidate)

    def candidates(
        self, coll: str, nbytes: int, *, dtype: str = "float32", op: str = "sum"
    ) -> list[Candidate]:
        """Return everything that can run ``coll`` here, simplest first.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``).
        """
        spec = operation(coll)
        dtype_by_name(dtype)
        return self._policy.candidates(self._query(spec, nbytes, dtype, op, 0))

    def explain(
        self,
        coll: str,
        nbytes: int,
        *,
        dtype: str = "float32",
        op: str = "sum",
        root: int = 0,
    ) -> Explanation:
        """Return what a call would run, why, and what was rejected; print it.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``).
        """
        spec = operation(coll)
        dtype_by_name(dtype)
        return self._policy.explain(self._query(spec, nbytes, dtype, op, root))

    # -- running -----------------------------------------------------------------

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the dispatcher did not recognise at a glance."""
        self._check_usable()
        spec = operation(name)
        call = calls.parse(spec, args, kwargs)
        bound = calls.bind(call, self.rank, self.size)
        plan = self._plan(call, bound)
        if self._checker is not None:
            self._checker.check(call, bound)
        return self._run_plan(
            plan,
            0 if bound.x is None else bound.x.address,
            self._out_address(bound),
            call.x,
            bound.result,
            bound.result,
            name,
            call.nonblocking,
            self.timeout_s if call.timeout_s is None else call.timeout_s,
        )

    @staticmethod
    def _out_address(bound: calls.Bound) -> int:
        return 0 if bound.out is None else bound.out.address

    def _plan(self, call: calls.Call, bound: calls.Bound) -> Any:
        chosen = call.algorithm is not None or call.backend is not None
        params = tuple(sorted((call.params or {}).items()))
        key = (
            call.spec.code,
            bound.num_elements,
            bound.dtype.code,
            call.reduction,
            call.root,
            call.backend,
            call.algorithm,
            params,
        )
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._make_plan(call, bound)
            self._plans[key] = plan
        takes_x = call.spec.x_count != "none"
        if not chosen and not params and (call.x is not None or not takes_x):
            times_size = call.spec.out_count == "times_size"
            count = bound.num_elements // (self.size if times_size else 1)
            dtype = bound.dtype.code if takes_x else _NO_DTYPE
            reduction = int(call.reduction)
            self._remember_plan(
                count, call.spec.code, dtype, reduction, call.root, plan
            )
        return plan

    def _make_plan(self, call: calls.Call, bound: calls.Bound) -> Any:
        spec = call.spec
        nbytes = bound.num_elements * bound.dtype.itemsize
        op = call.reduction.name.lower()
        query = self._query(
            spec,
            rule_nbytes(spec.name, nbytes, self.size),
            bound.dtype.name,
            op,
            call.root,
        )
        choice = self._policy.choose(
            query, backend=call.backend, algorithm=call.algorithm, params=call.params
        )
        return backends.get(choice.candidate.backend).plan(
            self,
            PlanSpec(
                op=spec,
                num_elements=bound.num_elements,
                dtype=bound.dtype,
                reduction=call.reduction,
                root=call.root,
                candidate=choice.candidate,
                in_elements=bound.in_elements,
                out_elements=bound.out_elements,
                has_output=bound.result is not None,
            ),
        )

    def _gather_for_check(self, x: Any, out: Any) -> None:
        """Gather check mode's descriptions; the same operation whatever was called."""
        call = calls.parse(operation("allgather"), (x,), {"out": out})
        bound = calls.bind(call, self.rank, self.size)
        plan = self._plan(call, bound)
        assert bound.x is not None
        name, limit = "check", self.timeout_s
        self._run_plan(
            plan, bound.x.address, self._out_address(bound), x, out, out, name, False, limit
        )

    def native_mpi_handle(self) -> int:
        """Return the MPI communicator for the library's own collectives.

        Made when the first plan needs it: sub-communicators would otherwise use up
        the few thousand that MPI libraries have. The ranks first meet through the
        bootstrap, making progress meanwhile, so nobody waits inside MPI for a rank
        that is still busy elsewhere.
        """
        if self._native_comm is None:
            self._world.meet(self._ranks, f"native/{self.name}")
            mpi = self._world.mpi
            group = mpi.Get_group().Incl(list(self._ranks))
            self._native_comm = mpi.Create_group(group, tag=1)
            group.Free()
        return _libmpi.handle(self._native_comm)

    # -- point-to-point ----------------------------------------------------------

    def send(
        self,
        x: Any,
        *,
        dest: int,
        tag: int = 0,
        nonblocking: bool = False,
        timeout_s: float | None = None,
    ) -> _native.Request | None:
        """Send ``x`` to rank ``dest``; a receive there must ask for the same tag."""
        self._check_usable()
        self._check_rank("send", "dest", dest)
        _check_tag("send", tag)
        buffer = view(x, "send: x")
        limit = self.timeout_s if timeout_s is None else timeout_s
        return self._send(
            buffer.address, buffer.nbytes, dest, tag, x, "send", nonblocking, limit
        )

    def recv(
        self,
        out: Any,
        *,
        source: int,
        tag: int = 0,
        nonblocking: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Receive into ``out`` from rank ``source``; return ``out``.

        A message shorter than ``out`` fills its beginning; how much came stands in
        the request's ``received_nbytes``, so pass ``nonblocking=True`` where lengths
        vary. A longer message raises TruncationError.
        """
        self._check_usable()
        self._check_rank("recv", "source", source)
        _check_tag("recv", tag)
        buffer = view(out, "recv: out")
        if not buffer.writable:
            raise BufferError_("recv: out is read-only")
        limit = self.timeout_s if timeout_s is None else timeout_s
        request = self._recv(buffer.address, buffer.nbytes, source, tag, out, "recv", limit)
        if nonblocking:
            return request
        request.wait()
        return out

    def sendrecv(
        self,
        x: Any,
        *,
        dest: int,
        out: Any,
        source: int,
        sendtag: int = 0,
        recvtag: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """Send ``x`` to ``dest`` and receive ``out`` from ``source``; return ``out``."""
        receiving = self.recv(
            out, source=source, tag=recvtag, nonblocking=True, timeout_s=timeout_s
        )
        sending = self.send(
            x, dest=dest, tag=sendtag, nonblocking=True, timeout_s=timeout_s
        )
        receiving.wait()
        assert sending is not None
        sending.wait()
        return out

    def _check_rank(self, what: str, argument: str, rank: Any) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(
                f"{what}: {argument}={rank!r} is not a rank of {self.name}; expected "
                f"0..{self.size - 1}"
            )

    # -- going wrong -------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed is not None:
            raise ClosedError(f"{self.name} was {self._closed}: make a new communicator")
        if self._failure:
            raise RevokedError(
                f"{self.name} failed in an earlier operation ({self._failure}): its "
                f"ranks no longer agree; make a new communicator"
            )

    def _operation_error(self, what: str, error: str, is_p2p: bool) -> Exception:
        if is_p2p:
            return TruncationError(f"{what}, rank {self.rank}: {error}")
        self._slow = True
        return MismatchError(f"{what}, rank {self.rank}: {error}")

    def _stream_on_host(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what}: wait(stream=...) is for device arrays; this operation is on host "
            f"memory, call wait() without a stream"
        )

    def _timed_out(self, what: str, seq: int, seconds: float, is_p2p: bool) -> NoReturn:
        hint = "it stays in flight and its buffers stay alive; wait() again, or abort()"
        if is_p2p:
            raise TimeoutError_(
                f"{what}, rank {self.rank}: no matching message within {seconds:g} s; {hint}"
            )
        missing = self._not_started(seq) if self._arena is not None else []
        if missing:
            plural = "s" if len(missing) > 1 else ""
            who = f"rank{plural} {', '.join(map(str, missing))} on this node have not started it"
        elif len(self._members) < self.size:
            who = "all ranks of this node have started it; look at the other nodes"
        else:
            who = "all ranks have started it and one does not make progress"
        raise TimeoutError_(
            f"{what}, rank {self.rank}: not complete within {seconds:g} s: {who}; {hint}"
        )


def _check_tag(what: str, tag: Any) -> None:
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < 2**31:
        raise UsageError(f"{what}: tag={tag!r} must be an integer in 0..2147483647")


def _install_operations() -> None:
    """Give Communicator a method per row of the table of operations."""
    from commrt.signatures import docstring

    for spec in OPERATIONS:
        method = _native.make_operation(
            spec.name,
            docstring(spec),
            spec.code,
            spec.x_count != "none",
            spec.has_root,
            spec.reduces,
            spec.in_place,
        )
        setattr(Communicator, spec.name, method)


_install_operations()
