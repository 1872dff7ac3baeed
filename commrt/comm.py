# SPDX-License-Identifier: Apache-2.0
"""Communicator: a group of ranks and every operation among them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from commrt import _native, backends
from commrt.arrays.host import numpy_type
from commrt.bootstrap.lending import Lease
from commrt.calls import arguments
from commrt.calls.check_mode import Checker
from commrt.calls.counts import bind_call
from commrt.calls.forwarding import forwarded
from commrt.calls.methods import method_of
from commrt.calls.plan_cache import Choices, remember
from commrt.calls.plans import Plans
from commrt.calls.settings import Settings, make_policy
from commrt.device_calls.collectives import Staging
from commrt.devices.arrays import may_free
from commrt.errors import BackendError, UsageError
from commrt.fusion.fused import Fusing
from commrt.grids.grid import Cartesian
from commrt.grids.neighbors import Graph
from commrt.group.compare import Comparison
from commrt.job.links import (
    measure_between_nodes,
)
from commrt.job.memory_limit import check_fits
from commrt.job.symmetric import SymmetricHeap, as_array, parse_request
from commrt.job.world import FIRST_TAG, NATIVE, World
from commrt.messages.point_to_point import Messages
from commrt.mpi import library
from commrt.planning.spec import PlanSpec
from commrt.trace.methods import follow_communicator
from commrt.trace.nvtx import plans_with_ranges, ranges_around
from commrt.vocabulary.checks import check_timeout
from commrt.vocabulary.dtypes import engine_factor
from commrt.vocabulary.operations import OPERATIONS, operation
from commrt.vocabulary.reductions import BoundReduction

if TYPE_CHECKING:
    from commrt.vocabulary.signatures import Operations
else:
    Operations = object

__all__ = ["CartCommunicator", "CommStats", "Communicator", "GraphCommunicator"]

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


class Communicator(Fusing, Operations):
    """A group of ranks. Get one from ``commrt.init()``, ``split`` or ``create_group``.

    Collectives must be called by all ranks of the communicator in the same order.
    Calls from several threads are serialised; the order is then the caller's duty.
    """

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        name: str,
        identity: int,
        *,
        may_check: bool = True,
        deterministic: bool = False,
        native_comm: Any = None,
        timeout_s: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Collective over ``ranks`` (ranks of the world); users call ``commrt.init``.

        ``may_check`` is False for the communicator that check mode itself uses.
        ``native_comm``: an mpi4py communicator of these ranks where nobody else runs
        collectives. ``timeout_s``: limit of every wait in here, not of later ones.
        ``settings``: what this communicator has of its own, equal on all ranks.
        """
        super().__init__(
            world,
            ranks,
            name,
            identity,
            deterministic=deterministic,
            limit_s=timeout_s,
        )
        self._plans: dict[Any, Any] = {}
        self._native_comm: Any = None
        self._lease: Lease | None = None
        self._own_mpi: Any = None
        self._heap: SymmetricHeap | None = None
        self.devices = Staging(self)
        self.comparison = Comparison(self)
        self.messages = Messages(self, self.devices, self.comparison)
        limit = self.timeout_s if timeout_s is None else timeout_s
        mine = settings or Settings()
        self.table = mine.table or world.table
        wishes = mine.all_wishes(world.wishes)
        self._native_comm = native_comm
        picks = world.picks_native(self.facts, self.table, wishes)
        if native_comm is None and may_check and picks:
            self._lease_native_comm(limit)
        self._lease_gloo(may_check, limit)
        self._unasked_native = self._native_comm is not None
        self.policy = make_policy(self, self.table, wishes)
        self.choices = Choices(self.policy)
        self.checker: Checker | None = None
        checks = Checker.is_wanted() if mine.checks is None else mine.checks
        if may_check and self.size > 1 and checks:
            self.checker = Checker(self, self._private("check", limit))
            self._slow = True
        self._ranges = ranges_around(self)
        if world.gloo_groups is not None and world.between_nodes is None:
            world.between_nodes = measure_between_nodes(self, world)
        follow_communicator(self, is_users=may_check)

    # -- making ------------------------------------------------------------------

    def _private(
        self, purpose: str, timeout_s: float, *, deterministic: bool = False
    ) -> Communicator:
        """Return a communicator of the same ranks for commrt's own use; collective."""
        world, ranks = self.world, self.world_ranks
        label = f"comm{self.identity}/{purpose}"
        identity = world.agree_id(ranks, label, timeout_s=timeout_s)
        name = f"{self.name}.{purpose}"
        return Communicator(
            world,
            ranks,
            name,
            identity,
            may_check=False,
            deterministic=deterministic,
            timeout_s=timeout_s,
        )

    def free(self) -> None:
        """Release the communicator; local, idempotent. Wait for its requests first.

        In a forked process it does nothing: memory and messages are the parent's.
        Where it failed and operations hang in it, its memory stays for them.
        """
        if self.closed is not None or os.getpid() != self.pid:
            return
        if self._fused is not None:
            raise UsageError(
                f"{self.name} cannot be freed: a fused() of it is open; leave it first"
            )
        at_rest = self.comes_to_rest()
        if not at_rest and not self.failure:
            raise UsageError(
                f"{self.name} cannot be freed: operations are in flight; wait() for "
                f"their requests first"
            )
        self._free_sparse()
        self._free_compression()
        if self.checker is not None:
            self.checker.close()
        self.closed = "freed"
        self._slow = True
        self._forget_plans()
        self._plans.clear()
        if at_rest:
            self._release()
        else:
            self.devices.close()  # nobody looks at its devices any more

    def _release(self) -> None:
        lender = self.world.native_comms
        if lender is not None and self._lease is not None and not self.failure:
            lender.give_back(self._lease)
        self._give_gloo_back()
        self._lease = self._native_comm = None
        self.devices.close()
        if self.arena is not None:
            self._detach()
            self.arena.close()
            self.arena = None
        if self._heap is not None:
            self._heap.close()
            self._heap = None

    def __del__(self) -> None:
        # Nothing that was never made has an end; a forked process owns nothing.
        if getattr(self, "closed", "unmade") is None and os.getpid() == self.pid:
            self.let_go()

    def let_go(self) -> None:
        """Give memory back of a communicator that was dropped without ``free()``.

        Operations in flight, and with them the peers, need it to their end.
        """
        if sys.is_finalizing():
            return
        if not (self.idle and may_free()):
            self.world.lingering.append(self)
            return
        self.closed = "dropped"
        self._release()

    def give_up(self, why: str) -> None:
        """Make the communicator unusable, here and for ranks of this node that wait."""
        self.set_failure(why)
        self.devices.give_up(why)
        self._give_up_sparse(why)
        self._give_up_compression(why)
        if self.checker is not None:
            self.checker.give_up(why)

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
    def mpi(self) -> Any:
        """mpi4py's communicator over these ranks, or None without MPI.

        On the communicator of all ranks it is the one commrt was started on (MPI's
        world, or what ``init`` was given). A sub-communicator makes one when first
        asked: that first access is collective over its ranks. It is the caller's, who
        may ``Free()`` it; ``free()`` leaves it alone.
        """
        world = self.world
        if world.native_comms is None:
            return None
        if self.world_ranks == tuple(range(world.size)):
            return world.mpi_given
        if self._own_mpi is None:
            world.meet(self.world_ranks, f"comm{self.identity}/mpi", self.timeout_s)
            tag = FIRST_TAG + 2 * self.identity
            self._own_mpi = world.native_comms.create(self.world_ranks, tag)
        return self._own_mpi

    @property
    def mpi_library(self) -> str | None:
        """Name and version of the MPI library in use, None without MPI."""
        if self.world.mpi is None:
            return None
        return library.library_name(library.load())

    @property
    def table_digest(self) -> str | None:
        """Digest of the selection table in force, None without one."""
        return None if self.table is None else self.table.digest

    @property
    def plan(self) -> Plans:
        """Persistent plans: ``comm.plan.allreduce(x, ...)`` returns a bound call."""
        return plans_with_ranges(Plans(self), self)

    def stats(self) -> CommStats:
        """Return counters of this communicator."""
        self.check_process()
        return CommStats(self.name, self.next_seq, self.num_plans, not self.idle)

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job with exit status ``code``."""
        from commrt.job.abort import end_job

        end_job(self.world, code)

    def __repr__(self) -> str:
        state = f", {self.closed}" if self.closed else ""
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}{state}>"

    # -- symmetric memory --------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Return a zero-filled array that every rank of this node has mapped.

        Collectives of this communicator use such arrays in place, as ``x`` and as
        ``out``, whole or in contiguous parts; from 32 KiB on that saves copies. Ranks
        may mix them with ordinary arrays as they like. Elsewhere they are arrays like
        any other.

        Collective over the ranks of a node, in the order of all their calls; they must
        ask for the same number of bytes. Dropping the array is local, and its memory is
        given out again by a later ``empty`` once every rank has dropped its own. It
        stays valid after ``free()``.

        Args:
            shape: number of elements, or several.
            dtype: numpy's dtype or name; or a ``torch.dtype``, for a tensor.

        Raises:
            UsageError: shape or dtype are wrong; nothing was sent.
            MismatchError: ranks of a node asked for different numbers of bytes; on all
                of them.
            BackendError: there is no memory, or an earlier ``empty`` ended on some
                ranks only; on all ranks of the node.
            TimeoutError_: a rank did not come within the communicator's ``timeout_s``.
        """
        self.check_usable()
        sizes, plain, torch_dtype = parse_request(shape, dtype)
        nbytes = math.prod(sizes) * plain.itemsize
        if self.arena is None:
            check_fits(nbytes)
            memory = np.zeros(nbytes, np.uint8)
        else:
            memory = self._symmetric_heap().take(nbytes, self.timeout_s)
        return as_array(memory, sizes, plain, torch_dtype)

    @property
    def has_heap(self) -> bool:
        """Whether there is symmetric memory; the same on all ranks of a node."""
        return self._heap is not None

    def _symmetric_heap(self) -> SymmetricHeap:
        if self._heap is None:
            world = self.world
            on_node = [self.world_ranks[rank] for rank in sorted(self.node_members)]
            key = f"heap/{self.identity}/{world.node_of(world.rank)}"
            self._heap = SymmetricHeap(
                world.bootstrap,
                on_node,
                self.name,
                key,
                world.share_memory,
                self._attach_to_heap,
            )
        return self._heap

    def _attach_to_heap(self, arena: Any) -> None:
        self._attach_segment(arena.address, arena.region_nbytes)
        self._plans.clear()  # they do not know what peers may reach
        self.devices.forget_plans()

    # -- messages ----------------------------------------------------------------

    send = forwarded(Messages.send, "messages")
    recv = forwarded(Messages.recv, "messages")
    sendrecv = forwarded(Messages.sendrecv, "messages")
    multi_sendrecv = forwarded(Messages.multi_sendrecv, "messages")

    # -- running -----------------------------------------------------------------

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the dispatcher did not recognise at a glance."""
        self.check_usable()
        if self._fused is not None and kwargs.get("nonblocking") is True:
            fused = self.devices.buckets.again(name, args, kwargs)
            if fused is not None:
                return fused
        try:
            call = arguments.parse(operation(name), args, kwargs)
            bound = bind_call(self, call)
            if bound.device is not None or call.stream is not None:
                return self.devices.run(call, bound)
            compressed = self._bound_compressed(call, bound)
            fused = None
            plan: Any = None
            # Where rules may compress, by a length that a bucket would hide, none are
            # made.
            if compressed is None and not self._rules_may_compress:
                fused = self._fuse(call, bound)
            if compressed is None and fused is None:
                plan = self._agreed_plan(call, bound)
        except UsageError as error:
            self._tell_of_call(name, kwargs, error)
            raise
        if compressed is not None:
            request = compressed.start()
            return request if call.nonblocking else request.wait()
        if fused is not None:
            return fused
        x, out = bound.x, bound.out
        return self.run_plan(
            plan,
            0 if x is None else x.address,
            0 if out is None else out.address,
            None if x is None else x.owner,
            None if out is None else out.owner,
            bound.result,
            name,
            call.nonblocking,
            self.timeout_s if call.timeout_s is None else call.timeout_s,
        )

    def _tell_of_call(
        self, name: str, kwargs: dict[str, Any], error: UsageError
    ) -> None:
        """In check mode, raise what is wrong with this rank's call on all ranks."""
        timeout_s = kwargs.get("timeout_s")
        try:
            limit = None if timeout_s is None else check_timeout(name, timeout_s)
        except UsageError:
            limit = None
        self.comparison.tell(name, error, limit)

    def _agreed_plan(self, call: arguments.Call, bound: arguments.Bound) -> Any:
        """Return the plan; in check mode only where all ranks made the same call.

        A plan is made before the ranks are compared, so that a mistake of this rank
        is named as such. Only plans of the library's own collectives, which the ranks
        make together, come after.
        """
        if self.checker is None:
            return self._plan(call, bound)
        if self._choose(call, bound).algorithm != "native":
            self._plan(call, bound)
        self.checker.check(call, bound)
        return self._plan(call, bound)

    def _plan(self, call: arguments.Call, bound: arguments.Bound) -> Any:
        chosen = call.algorithm is not None or call.backend is not None
        params = tuple(sorted((call.params or {}).items()))
        key = (
            call.spec.code,
            bound.num_elements,
            bound.dtype.name,
            bound.device,
            call.reduction if call.user is None else call.user,
            call.root,
            call.backend,
            call.algorithm,
            params,
            bound.counts,
        )
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._make_plan(call, bound)
            self._plans[key] = plan
        if call.factor is not None:
            # One plan per key, of the latest factor: they may be new in every call.
            plan = plan.with_factor(self, *engine_factor(call.factor, bound.dtype))
            self._plans[key] = plan
        # What is asked for with compress="none" may be compressed without it.
        plain = not chosen and not params and call.compress is None
        if call.user is None and plain:
            remember(self, call, bound, plan)
        return plan

    def _make_plan(self, call: arguments.Call, bound: arguments.Bound) -> Any:
        candidate = self._choose(call, bound)
        user = None
        if call.user is not None and bound.x is not None:
            user = BoundReduction(call.user, numpy_type(bound.x))
        return backends.get(candidate.backend).plan(
            self,
            PlanSpec(
                op=call.spec,
                num_elements=bound.num_elements,
                dtype=bound.dtype,
                reduction=call.reduction,
                root=call.root,
                candidate=candidate,
                in_elements=bound.in_elements,
                out_elements=bound.out_elements,
                has_output=bound.result is not None,
                counts=bound.counts,
                factor=call.factor,
                user=user,
            ),
        )

    def native_mpi_handle(self) -> int:
        """Return the MPI communicator for the library's own collectives.

        Where unasked calls may need it, it was made with this communicator. Otherwise
        it is made for the first call that asks for it by name, which is then collective
        even if it is nonblocking.
        """
        if not self.has_native_mpi(self.timeout_s):
            raise BackendError(
                f"{self.name}: no MPI communicator can be had for {NATIVE}: the "
                f"library has no more of them, or commrt has made as many as it takes; "
                f"free() communicators that are not needed, or use a schedule"
            )
        return library.handle(self._native_comm)

    def has_native_mpi(self, timeout_s: float) -> bool:
        """Whether there is one, made now where there was none; collective then."""
        if self._native_comm is None:
            self._lease_native_comm(timeout_s)
        return self._native_comm is not None

    def _lease_native_comm(self, timeout_s: float) -> None:
        lender = self.world.native_comms
        if lender is None or self.size == 1:
            return
        tag = FIRST_TAG + 2 * self.identity + 1
        self._lease = lender.lend(self.world_ranks, self.identity, tag, timeout_s)
        self._native_comm = None if self._lease is None else self._lease.lent


class CartCommunicator(Cartesian, Communicator):
    """A communicator whose ranks lie in a grid; get one from ``comm.cart``."""


class GraphCommunicator(Graph, Communicator):
    """A communicator whose ranks know their neighbours; from ``comm.graph``."""


Communicator._plain, Communicator._cart = Communicator, CartCommunicator
Communicator._graph = GraphCommunicator


for _spec in OPERATIONS:
    setattr(Communicator, _spec.name, method_of(_spec))
for _kind, _name in enumerate(("send", "recv", "sendrecv", "multi_sendrecv")):
    _method = _native.make_message_method(_name, _kind, getattr(Communicator, _name))
    setattr(Communicator, _name, _method)
