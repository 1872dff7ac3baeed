# SPDX-License-Identifier: Apache-2.0
"""A loop over steps that goes on when ranks die, and takes in those that come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from commrt.comm import Communicator, core_of
from commrt.elastic.members import Said, choose
from commrt.elastic.state import State
from commrt.elastic.states import Build, Built, Given
from commrt.errors import (
    CommError,
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
    state: State | Build,
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

    A step whose communicator fails is taken again: the ranks that live shrink the
    communicator, return to the last step that all of them completed, and go on from
    there. A rank that lacks its state gets it from one that has it. Processes that wait
    to join are taken in when a step begins, and get the state, too. Returns the last
    communicator.

    Args:
        step: one step of training. It calls at least one collective that all ranks
            wait in.
        state: all that steps change. Or a function, which is given the communicator and
            returns it: it is called before the first step, and again after each change,
            on all ranks. What it returns gets the state of before. Models that hold
            groups of ranks are made in it (DistributedDataParallel, FSDP, DTensors).
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
    for what, function in (("step", step), ("on_change", on_change)):
        if not callable(function) and not (function is None and what == "on_change"):
            raise UsageError(
                f"elastic.run: {what}={shown(function)} must be a function"
            )
    if not isinstance(comm, Communicator | None):
        raise UsageError(
            f"elastic.run: comm={shown(comm)} must be a communicator, as commrt.init() "
            f"returns it"
        )
    if not isinstance(state, State) and not callable(state):
        raise UsageError(
            f"elastic.run: state={shown(state)} must be a commrt.elastic.State, or a "
            f"function that returns one"
        )
    comm = init() if comm is None else comm
    if not comm.joined and comm.size % size:
        raise UsageError(
            f"elastic.run: {comm.size} ranks do not make replicas of replica_size="
            f"{shown(replica_size)}"
        )
    is_new = comm.rank in comm.joined
    where = _Where(None if is_new else 0, None if is_new else comm.rank % size)
    states = Given(state) if isinstance(state, State) else Built(state)
    loop = _Loop(step, states, wanted, comm, on_change, size, where)
    del comm  # others replace it, and its memory goes with it
    return loop.go()


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
        states: Given | Built,
        until: int,
        comm: Communicator,
        on_change: Callable[[Communicator], object] | None,
        replica_size: int,
        where: _Where,
    ) -> None:
        self._step, self._states, self._until = step, states, until
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
                self._states.state.remember(done)
                self._step(self._comm, done)
                self._where.done = done + 1
            except Exception as error:
                if not self._is_fault(error):
                    raise
                _LOG.warning("step %s is taken again: %s", self._where.done, error)
                if self._where.done is not None:
                    self._states.undo(self._where.done)
                self._move_to(self._comm.shrink())
                is_settled = False

    def _is_fault(self, error: Exception) -> bool:
        """Return whether the communicator has failed, and the step raised for that.

        torch makes a RuntimeError of any error in a callback, and its store raises one.
        """
        if isinstance(error, CommError):
            return isinstance(error, PeerFailedError | RevokedError)
        is_torchs = isinstance(error, RuntimeError)
        return is_torchs and core_of(self._comm).recovery.has_ended()

    def _take_in(self) -> bool:
        """Take in those who wait, if enough do; return whether the ranks changed.

        No rank begins a step before all have completed the one before: so each can
        return to the same one.
        """
        comm = self._comm
        waits = np.zeros(1, np.int8)
        if comm.rank == 0 and time.monotonic() - self._looked >= _LOOK_S:
            waits[0] = comm.num_waiting() >= self._replica_size
            self._looked = time.monotonic()
        comm.allreduce(waits, op="max")
        if waits[0]:
            grown = comm.grow()
            assert self._where.done is not None
            self._states.leave(self._where.done)
            self._move_to(grown)
        return bool(waits[0])

    def _settle(self) -> None:
        """Agree on who goes on, and from which step; give each its state."""
        where, states = self._where, self._states
        said = self._comm.allgather_object(
            Said(
                where.done,
                () if where.done is None else states.steps(where.done),
                where.part,
                states.arrays(),
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
            self._move_to(self._part_of(plan.members))
        states.make(self._comm, plan.step)
        if not plan.needs[mine]:
            where.done, where.part = plan.step, part
        source = plan.sources[mine]
        if any(plan.needs) and not self._are_alike(source, part, plan.needs):
            if where.done is not None:
                states.leave(where.done)
            return self._settle()
        where.done, where.part = plan.step, part
        if states.state.has_local(plan.step):
            states.state.load_local(plan.step)
        if self._on_change is not None:
            self._on_change(self._comm)

    def _are_alike(self, source: int, part: int, needs: Sequence[bool]) -> bool:
        """Give those who need it the state of a part from a rank that has it.

        Ranks whose models are others do not go on. Returns whether there were none.
        """
        comm, state = self._comm, self._states.state
        beside = comm.split(part)
        assert beside is not None
        with beside:
            # Ranks of a part keep their order.
            first = source // self._replica_size
            entries = state.entries() if comm.rank == source else None
            received = beside.bcast_object(entries, root=first)
        odd = state.differences(received) if needs[comm.rank] else ""
        if needs[comm.rank] and not odd:
            state.load(received)
        are_odd = comm.allgather_object(bool(odd))
        if not any(are_odd):
            return True
        if odd:
            raise RecoveryError(
                f"rank {comm.rank} of {comm.name} does not go on: its model is "
                f"another: {odd}"
            )
        left = [rank for rank in range(comm.size) if not are_odd[rank]]
        self._move_to(self._part_of(left))
        return False

    def _part_of(self, members: Sequence[int]) -> Communicator:
        """Return a communicator of some ranks, which takes the place of this one."""
        made = self._comm.create_group(members, name=self._comm.name)
        core_of(self._comm).replaced_by(core_of(made))
        return made

    def _move_to(self, made: Communicator) -> None:
        old, self._comm = self._comm, made
        if old is not made:
            with suppress(UsageError):  # calls in flight: it goes when they have ended
                old.free()
