# SPDX-License-Identifier: Apache-2.0
"""A loop over steps that goes on when ranks die, and takes in those that come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from commrt.comm import Communicator
from commrt.elastic.members import Said, choose
from commrt.elastic.state import State
from commrt.errors import (
    PeerFailedError,
    RecoveryError,
    RevokedError,
    UsageError,
    shown,
)
from commrt.runtime import init
from commrt.vocabulary.checks import as_integer

__all__ = ["run"]

_LOG = logging.getLogger("commrt.elastic")
_LOOK_S = 0.5
"""Seconds between two looks for processes that wait to join."""


def run(
    step: Callable[[Communicator, int], object],
    state: State,
    *,
    until: int,
    comm: Communicator | None = None,
    on_change: Callable[[Communicator], object] | None = None,
    replica_size: int = 1,
) -> Communicator:
    """Call ``step(comm, number)`` for each number below ``until``.

        def step(comm, number):
            loss_of(batch(number, comm.rank, comm.size)).backward()
            reducer.average(comm)
            optimizer.step()

        commrt.elastic.run(step, State(model=model, optimizer=optimizer), until=1000)

    A step whose calls raise PeerFailedError or RevokedError is taken again: the ranks
    that live shrink the communicator, return to the last step that all of them
    completed, and go on from there. A rank that lacks its state gets it from one that
    has it. Processes that wait to join are taken in when a step begins, and get the
    state, too. Returns the last communicator.

    Args:
        step: one step of training. It calls at least one collective that all ranks
            wait in.
        state: all that steps change.
        until: number of steps.
        comm: the ranks; None: ``commrt.init()``.
        on_change: is called with the communicator before the first step, and whenever
            it has been replaced: make there what hangs on it, such as a Reducer.
        replica_size: ranks that have the model together, as with tensor parallelism.
            Consecutive ranks have one replica. As many whole replicas go on as the
            ranks that live can make.

    Raises:
        RecoveryError: no rank has a part of the model, or none has it whole; or this
            rank is not needed, since its replica lacks others; or its model has other
            arrays than that of the others.
        UsageError: a wrong argument.
    """
    wanted = as_integer(until)
    size = as_integer(replica_size)
    if wanted is None or wanted < 0:
        raise UsageError(
            f"elastic.run: until={shown(until)} must be a number from 0 on"
        )
    if size is None or size < 1:
        raise UsageError(
            f"elastic.run: replica_size={shown(replica_size)} must be a number from 1"
        )
    if not isinstance(state, State):
        raise UsageError(
            f"elastic.run: state={shown(state)} must be a commrt.elastic.State"
        )
    comm = init() if comm is None else comm
    if not comm.joined and comm.size % size:
        raise UsageError(
            f"elastic.run: {comm.size} ranks cannot be divided into replicas of {size}"
        )
    is_new = comm.rank in comm.joined
    where = _Where(None if is_new else 0, None if is_new else comm.rank % size)
    return _Loop(step, state, wanted, comm, on_change, size, where).go()


@dataclass
class _Where:
    """This rank's progress, and its part of the model."""

    done: int | None
    """Steps completed; None where it has the state of none."""
    part: int | None
    """Its part of the model; None where it has none yet."""


class _Loop:
    """One run, on one rank."""

    def __init__(
        self,
        step: Callable[[Communicator, int], object],
        state: State,
        until: int,
        comm: Communicator,
        on_change: Callable[[Communicator], object] | None,
        replica_size: int,
        where: _Where,
    ) -> None:
        self._step, self._state, self._until = step, state, until
        self._comm, self._on_change = comm, on_change
        self._replica_size, self._where = replica_size, where
        self._looked = time.monotonic()

    def go(self) -> Communicator:
        """Take all steps."""
        is_settled = False
        while True:
            try:
                if not is_settled:
                    self._settle()
                    is_settled = True
                done = self._where.done
                assert done is not None
                if done >= self._until and self._comm.agree():
                    return self._comm
                if self._take_in():
                    is_settled = False
                    continue
                self._state.remember(done)
                self._step(self._comm, done)
                self._where.done = done + 1
            except (PeerFailedError, RevokedError) as error:
                _LOG.warning("step %s is taken again: %s", self._where.done, error)
                self._state.undo()
                self._move_to(self._comm.shrink())
                is_settled = False

    def _take_in(self) -> bool:
        """Take in those who wait, if enough do; return whether the ranks changed."""
        comm = self._comm
        waits = np.zeros(1, np.int8)
        if comm.rank == 0 and time.monotonic() - self._looked >= _LOOK_S:
            waits[0] = comm.num_waiting() >= self._replica_size
            self._looked = time.monotonic()
        comm.bcast(waits, root=0)
        if waits[0]:
            self._move_to(comm.grow())
        return bool(waits[0])

    def _settle(self) -> None:
        """Agree on who goes on, and from which step; give each its state."""
        where, state = self._where, self._state
        said = self._comm.allgather_object(
            Said(
                where.done if state.is_whole else None,
                where.part,
                tuple(state.descriptions()),
            )
        )
        plan = choose(said, self._replica_size)
        if self._comm.rank in plan.leavers:
            raise RecoveryError(
                f"rank {self._comm.rank} of {self._comm.name} does not go on: "
                f"{plan.leavers[self._comm.rank]}"
            )
        part = plan.parts[self._comm.rank]
        mine = plan.members.index(self._comm.rank)
        if plan.members != list(range(self._comm.size)):
            self._move_to(self._comm.create_group(plan.members))
        self._share(plan.sources[mine], part, plan.needs, plan.step)
        where.done, where.part = plan.step, part
        if state.has_local(plan.step):
            state.load_local(plan.step)
        if self._on_change is not None:
            self._on_change(self._comm)

    def _share(self, source: int, part: int, needs: Sequence[bool], step: int) -> None:
        """Give those who need it the state of a part from a rank that has it."""
        comm, state = self._comm, self._state
        if not any(needs):
            return
        beside = comm.split(part)
        assert beside is not None
        with beside:
            # Ranks of a part keep their order.
            first = source // self._replica_size
            entries = state.entries() if comm.rank == source else None
            received = beside.bcast_object(entries, root=first)
        if needs[comm.rank]:
            state.load(received)

    def _move_to(self, made: Communicator) -> None:
        old, self._comm = self._comm, made
        if old is not made:
            with suppress(UsageError):  # calls in flight: it goes when they have ended
                old.free()
