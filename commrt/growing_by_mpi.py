# SPDX-License-Identifier: Apache-2.0
"""Ranks of MPI start newcomers, and take them into a communicator.

The ranks agree three times: on what they start, on whether all newcomers have come, and
on whether MPI has put them into one communicator. So all of them return the same, or
raise the same error, and the old communicator works on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from commrt import errors
from commrt.bootstrap.base import first_word, poll_until
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.mpi_mail import Mailbox
from commrt.bootstrap.mpi_newcomers import (
    Order,
    Says,
    Talk,
    in_time,
    merged,
    places_of,
)
from commrt.calls.channel import Channel
from commrt.errors import (
    BackendError,
    CommError,
    MismatchError,
    PeerFailedError,
    TimeoutError_,
    UsageError,
)
from commrt.job.liveness import findable, why_ended
from commrt.launch.python_program import own_program, program_of
from commrt.membership import (
    check_all_came,
    gone_of,
    newcomers_among,
    words_of,
)
from commrt.mpi import library
from commrt.mpi.spawning import finalize_without_disconnect, spawn, why_unreachable
from commrt.recovery import Recovery
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["grown_by_mpi"]

Plain = TypeVar("Plain", bound=Channel)

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))
_RUNNER = (
    "-c",
    f"import sys; sys.path[:1] = [{_FOLDER!r}]; "
    f"from commrt.running.newcomer import main; main()",
)
"""Starts MPI at once, and runs the program then: MPI waits for the former.

By ``-m`` it would find modules in the current folder that are in the way, and not where
these ranks have commrt from.
"""
_OF_ONE_PROCESS = ("COMMRT_RANK_PROCESS", "COMMRT_JOIN")
_PART, _MOST_S = 0.1, 1.0
"""Part of the limit, and seconds, that are left for the ranks to agree."""
_REFUSED: list[Talk] = []
"""Newcomers that the ranks go on without: they may hear of it much later."""


def grown_by_mpi(
    comm: Plain,
    recovery: Recovery[Plain],
    count: int,
    program: Sequence[str] | None,
    name: str,
    limit_s: float,
) -> Plain:
    """Return a communicator of these ranks and of ``count`` new processes.

    Collective, as ``Growth.grow``, which describes the arguments.
    """
    deadline = deadline_after(limit_s)
    facts = {"count": count, "process": findable(), **_program_to_run(comm, program)}
    peers, blobs = recovery.regroup("grow", json.dumps(facts).encode(), limit_s)
    check_all_came(comm, blobs)
    assert isinstance(peers, MpiBootstrap)
    said = [json.loads(blob) for blob in blobs.values()]
    counts = [each["count"] for each in said]
    if len({*counts}) > 1:
        raise MismatchError(
            f"grow on {comm.name}: the ranks ask for {counts} newcomers, by rank; pass "
            f"the same count on all ranks"
        )
    if "error" in said[0]:
        raise UsageError(f"grow on {comm.name}: {said[0]['error']}")
    if not count:
        peers.close()
        return comm
    founder = recovery.founder(name)
    intake = _Intake(comm.name, peers, said, count, founder.deterministic, limit_s)
    words = {**words_of(founder), "first": peers.size, "node": 0}
    grown = intake.run(words, deadline)
    made, living = founder.found(grown, deadline)
    made.joined = newcomers_among(living, comm.size)
    return made


def _program_to_run(comm: Channel, program: Sequence[str] | None) -> dict[str, Any]:
    """Return what newcomers run, as rank 0 has it; or why it knows of nothing."""
    if comm.rank:
        return {}
    try:
        found = own_program() if program is None else program_of(program)
    except UsageError as error:
        return {"error": str(error)}
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("COMMRT_") and name not in _OF_ONE_PROCESS
    }
    order = Order(found, variables)
    return {"options": found.options, "order": order.text().decode()}


class _Start:
    """A start of newcomers, which may end after the ranks have given it up."""

    def __init__(
        self, comm: MPI.Intracomm, arguments: Sequence[str], count: int
    ) -> None:
        self._comm, self._arguments, self._count = comm, arguments, count
        self._lock = threading.Lock()
        self._made: MPI.Intercomm | None = None
        self._is_given_up = False

    def run(self) -> MPI.Intercomm:
        """Start them; return the communicator with them."""
        made = spawn(self._comm, self._arguments, self._count)
        with self._lock:
            self._made = made
            if self._is_given_up:
                self._refuse(made)
        return made

    def give_up(self) -> None:
        """Tell the newcomers to end, also if they start later."""
        with self._lock:
            self._is_given_up = True
            if self._made is not None:
                self._refuse(self._made)

    @staticmethod
    def _refuse(made: MPI.Intercomm) -> None:
        talk = Talk(made)
        talk.tell_all(Says.NOT, b"they came after the time limit of grow()")
        _REFUSED.append(talk)


@dataclass
class _Intake:
    """One start of newcomers, as one rank sees it."""

    name: str
    """Of the communicator that grows."""
    peers: MpiBootstrap
    """Of its ranks, which have just met."""
    said: Sequence[Mapping[str, Any]]
    """The facts of each."""
    count: int
    deterministic: bool
    limit_s: float
    talk: Talk | None = None
    """With the newcomers; None until MPI has started them."""
    places: tuple[int, ...] = ()
    """The ranks' places in the communicator that starts them."""

    def run(self, words: Mapping[str, Any], deadline: float) -> MpiBootstrap:
        """Return the bootstrap of ranks and newcomers; collective over the ranks."""
        part_s = min(_MOST_S, _PART * self.limit_s)
        self._agree("come", lambda: self._start(deadline - 2 * part_s), deadline)
        talk = self.talk
        assert talk is not None
        processes = [each["process"] for each in self.said]
        processes += [
            json.loads(talk.heard[k][Says.HERE])["process"] for k in self._all
        ]
        places = places_of(self.places, self.count)
        text = json.dumps({**words, "processes": processes, "places": places})
        talk.tell_all(Says.COME, text.encode())
        made: list[Any] = []

        def merge() -> None:
            left_s = max(0.0, deadline - part_s - time.monotonic())
            made.append(merged(talk, is_new=False, timeout_s=left_s, heed=self._heed))

        self._agree("merged", merge, deadline)
        finalize_without_disconnect()
        mpi = library.load()
        grown = MpiBootstrap.of_places(mpi, Mailbox(mpi, made[0]), places)
        grown.idle = self.peers.idle
        grown.gone = gone_of(processes, first_word(grown.gone))
        return grown

    @property
    def _all(self) -> range:
        return range(self.count)

    def _agree(self, what: str, step: Any, deadline: float) -> None:
        """Make a step; raise on all ranks what it raises on the first of them."""
        mine: list[str] = []
        try:
            step()
        except CommError as error:
            mine = [type(error).__name__, str(error)]
        peers = self.peers
        left_s = max(0.0, deadline - time.monotonic())
        try:
            rest, blobs = peers.regroup(
                range(peers.size), what, json.dumps(mine).encode(), left_s
            )
            rest.close()
            if len(blobs) < peers.size:
                raise PeerFailedError(
                    f"grow on {self.name}: a rank has died meanwhile: call shrink(), "
                    f"and then grow() on what that returns"
                )
            wrong = [said for said in map(json.loads, blobs.values()) if said]
            if wrong:
                kind, text = wrong[0]
                raise getattr(errors, kind)(text)
        except CommError as error:
            if self.talk is not None and what == "come":
                self.talk.tell_all(Says.NOT, str(error).encode())
                self.talk.step()
                _REFUSED.append(self.talk)
            raise

    def _start(self, until: float) -> None:
        """Start newcomers, and wait until all of them have called init()."""
        if why := why_unreachable():
            raise BackendError(f"grow on {self.name}: {why}")
        own = self.peers.own_comm(max(0.0, until - time.monotonic()))
        if own is None:
            raise UsageError(
                f"grow on {self.name}: MPI starts newcomers for all ranks of the job "
                f"that live, and these are some of them: call grow() on the "
                f"communicator that commrt.init() returns"
            )
        comm, self.places = own
        self.talk = Talk(self._spawned(comm, until))
        comm.Free()
        if self.peers.rank == 0:
            self.talk.tell_all(Says.RUN, self.said[0]["order"].encode())
        self._wait_for_all(self.talk, until)

    def _spawned(self, comm: MPI.Intracomm, until: float) -> MPI.Intercomm:
        mpi: Any = library.load()
        arguments = [*self.said[0].get("options", ()), *_RUNNER]
        start = _Start(comm, arguments, self.count)
        try:
            return in_time(
                start.run,
                until - time.monotonic(),
                self._heed,
                late=f"grow on {self.name}: MPI has not started {self.count} newcomers "
                f"within {self.limit_s:g} s; its launcher may have said why",
                fails=lambda error: (
                    f"grow on {self.name}: MPI ({library.library_name(mpi)}) does not "
                    f"start {self.count} newcomers: {error}. Its launcher may have "
                    f"said why; ranks of srun and of a program without a launcher "
                    f"cannot start others: use mpiexec"
                ),
            )
        except TimeoutError_:
            start.give_up()
            raise

    def _heed(self) -> None:
        """Raise PeerFailedError where a rank has died: MPI may wait for it for ever."""
        mine = findable()
        for rank, each in enumerate(self.said):
            if why := why_ended(each["process"], mine):
                raise PeerFailedError(
                    f"grow on {self.name}: rank {rank} has died: {why}: call shrink(), "
                    f"and then grow() on what that returns"
                )

    def _wait_for_all(self, talk: Talk, until: float) -> None:
        def all_here() -> bool:
            talk.step()
            for number in self._all:
                self._check(talk, number)
            return all(Says.HERE in talk.heard[number] for number in self._all)

        if not poll_until(all_here, until - time.monotonic(), self.peers.idle):
            here = sum(Says.HERE in talk.heard[number] for number in self._all)
            raise TimeoutError_(
                f"grow on {self.name}: {here} of {self.count} newcomers have called "
                f"commrt.init() within {self.limit_s:g} s: look for what they wait "
                f"for, or give grow() a larger timeout_s"
            )

    def _check(self, talk: Talk, number: int) -> None:
        """Raise the error of a newcomer that does not become a rank."""
        heard = talk.heard[number]
        who = f"grow on {self.name}: newcomer {number} of {self.count}"
        again = "the communicator works as before; call grow() again"
        why = ""
        if number in talk.failed:
            why = "MPI says that its process has failed"
        if Says.LEFT in heard:
            why = heard[Says.LEFT].decode()
        if Says.HERE in heard:
            facts = json.loads(heard[Says.HERE])
            why = why or why_ended(facts["process"], findable())
            if facts["deterministic"] not in (None, self.deterministic):
                raise MismatchError(
                    f"{who} has deterministic={facts['deterministic']}, and the ranks "
                    f"have {self.deterministic}: let its program call commrt.init() "
                    f"as theirs does; {again}"
                )
        if why:
            raise BackendError(f"{who} has not come: {why}; {again}")
