# SPDX-License-Identifier: Apache-2.0
"""Ranks that MPI started: keyed messages on a private communicator.

Every member sends its blob to every other member, and then, when it has heard all,
that it has. That is 2 size² small messages in all, and in return each member knows
exactly who is missing when time runs out. Nothing blocks inside MPI: nonblocking calls,
polled from Python.

A member that gives up withdraws its attempt by another message. Those who still wait,
or come only then, go on to the next attempt; who has waited says its blob again once
somebody is there, so that many that give up together do not all talk to all. A
withdrawal may arrive long after the blob that it takes back. So a blob alone does not
mean that its sender still waits: only what it says after it has heard everybody does.

Ranks that regroup send messages on the same communicator: none has to be made, and so
nothing can block. Where all ranks that live take part, and MPI survives failures, the
new world then gets a communicator without the failed ones (``renewed``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from commrt.bootstrap.ballots import Vote, Voter
from commrt.bootstrap.base import (
    Keys,
    check_alive,
    poll_until,
    timed_out,
    with_heed,
)
from commrt.bootstrap.mpi_mail import Mailbox, Says
from commrt.bootstrap.survivors import check_in, not_all_came
from commrt.errors import BackendError, PeerFailedError, TimeoutError_
from commrt.mpi.ulfm import Beside, places_in
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiBootstrap"]


class MpiBootstrap:
    """Exchanges blobs over a private duplicate of an mpi4py communicator.

    ``comm`` is that duplicate: code below the public interface may send on it with
    other tags than the mailbox. After ``regroup`` it may have more ranks than this
    world: ``places`` says which are its own.
    """

    mpi_comm: MPI.Intracomm | None
    """The program's communicator of exactly these ranks; None where it has none."""

    def __init__(self, mpi_comm: MPI.Intracomm, timeout_s: float) -> None:
        """Collective over ``mpi_comm``."""
        from mpi4py import MPI

        self._mpi = MPI
        self._abandoned: list[tuple[Any, Any]] = []
        comm = self._duplicate(mpi_comm, timeout_s)
        self._set_up(Mailbox(MPI, comm), range(comm.Get_size()), "")
        self._is_owner = True
        self.mpi_comm = mpi_comm

    @classmethod
    def of_places(
        cls,
        mpi: Any,
        mail: Mailbox,
        places: Sequence[int],
        prefix: str = "",
        dead: frozenset[int] = frozenset(),
    ) -> MpiBootstrap:
        """Return the bootstrap of some ranks of a communicator; local.

        Args:
            mpi: the module ``mpi4py.MPI``.
            mail: the messages of the communicator.
            places: ranks there.
            prefix: begins the names of exchanges; empty: no other world shares it.
            dead: ranks there that have ended, as all of these ranks know.
        """
        made = cls.__new__(cls)
        made._mpi = mpi
        made._set_up(mail, places, prefix)
        made._dead = dead
        return made

    def _set_up(self, mail: Mailbox, places: Sequence[int], prefix: str) -> None:
        self.mail = mail
        self.comm = mail.comm
        self.mpi_comm = None
        self.places = tuple(places)
        """Ranks in ``comm``, by rank."""
        # A collective that a death ends may leave a gap in the order of the messages
        # of two ranks on its communicator: later ones then never arrive.
        has_all = self.places == tuple(range(self.comm.Get_size()))
        is_free = has_all and not prefix and not mail.survives
        self.comm_of_all = self.comm if is_free else None
        """``comm``, where no other world has it, and collectives may run on it."""
        self.rank: int = self.places.index(self.comm.Get_rank())
        self.size: int = len(self.places)
        self.identities = mail.identities
        """Of the communicators of all worlds that share ``comm``."""
        self.idle: Callable[[], object] | None = None
        self.gone: Callable[[int], str] | None = self._failed if mail.survives else None
        self._is_owner = False
        self._prefix = prefix
        self._keys = Keys(self.rank, self.size)
        self._dead: frozenset[int] = frozenset()
        """Ranks of ``comm`` that had ended before this world was made, as agreed."""

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order."""
        with self._keys.turn(members, self._prefix + key, timeout_s) as (name, left_s):
            others = [member for member in members if member != self.rank]
            at = self.places
            there = {at[member]: member for member in others}
            rendezvous = _Rendezvous(self.mail, name, [*there], bytes(blob))
            alive = check_alive(
                self.gone, key, others, lambda rank: rendezvous.has_come(at[rank])
            )
            try:
                idle = with_heed(self.idle, with_heed(heed, alive))
                met = poll_until(rendezvous.step, left_s, idle)
                blobs = rendezvous.result() if met else {}
            finally:
                rendezvous.end()
        if not met:
            missing = [there[place] for place in rendezvous.missing()]
            raise timed_out(self.rank, members, key, missing, timeout_s)
        return [blobs.get(at[member], bytes(blob)) for member in members]

    def regroup(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> tuple[MpiBootstrap, dict[int, bytes]]:
        """Return the bootstrap of the members that live, and what they said."""
        mail = self.mail
        with self._keys.turn(members, self._prefix + key, timeout_s) as (name, left_s):
            sends: list[tuple[Any, bytes]] = []

            def post(vote: Vote, body: bytes, member: int) -> None:
                sends.append(mail.send(vote, 0, name, body, self.places[member]))

            def step() -> bool:
                with mail.lock:
                    mail.progress()
                    return voter.step()

            with mail.lock:
                ballot = mail.ballots.of(name)
                voter = Voter(ballot, members, self.rank, post, self.gone)
                voter.come(bytes(blob))
            try:
                agreed = poll_until(step, left_s, self.idle)
            finally:
                with mail.lock:
                    mail.abandon(sends)
        if not agreed or voter.decision is None:
            raise not_all_came(self.rank, members, voter.missing(), timeout_s)
        decision = voter.decision
        check_in(decision, self.rank)
        ranks = [*decision.said]
        places = [self.places[rank] for rank in ranks]
        dead = self._dead | {self.places[rank] for rank in decision.gone}
        prefix = f"{decision.token}."
        made = MpiBootstrap.of_places(self._mpi, mail, places, prefix, dead)
        made.idle, gone = self.idle, self.gone
        if gone is not None:
            made.gone = lambda rank: gone(ranks[rank])
        return made, {**decision.said}

    def renewed(self, timeout_s: float) -> MpiBootstrap:
        """Return the bootstrap of these ranks over a communicator of theirs alone.

        Collective. Returns this one where MPI cannot make such a communicator: it
        makes one only of all ranks that live, and only where it survives failures.

        Raises TimeoutError_ where a rank does not come; all may call again. Raises
        PeerFailedError, on all ranks, where one has died meanwhile.
        """
        everybody = len(self.places) + len(self._dead) == self.comm.Get_size()
        if not self._prefix or not everybody or not self.mail.survives:
            return self
        shrunk = self._shrunk(timeout_s)
        shrunk.Set_errhandler(self._mpi.ERRORS_RETURN)
        shrunk.Set_name("commrt bootstrap")
        places = places_in(self._mpi, self.comm, self.places, shrunk)
        kept = [place for place in places if place is not None]
        if len(kept) != self.size or shrunk.Get_size() != self.size:
            raise PeerFailedError(
                f"rank {self.rank}: one of the {self.size} ranks that remained has "
                f"died while MPI made a communicator of them"
            )
        made = MpiBootstrap.of_places(self._mpi, Mailbox(self._mpi, shrunk), kept)
        made.idle, made.gone = self.idle, self.gone
        return made

    def own_comm(self, timeout_s: float) -> tuple[Any, tuple[int, ...]] | None:
        """Return a new MPI communicator of these ranks, and the place of each there.

        Collective over ranks that have regrouped. None where MPI makes no such
        communicator, since they are not all that live. Raises as ``renewed`` does.
        """
        if self.mail.survives:
            made = self.renewed(timeout_s)
            return None if made is self else (made.comm, made.places)
        if self.size != self.comm.Get_size():
            return None
        comm, request = self.comm.Idup()
        if not poll_until(request.Test, timeout_s, self.idle):
            with self.mail.lock:
                self.mail.abandon([(request, comm)])
            raise TimeoutError_(
                f"rank {self.rank}: MPI has not duplicated the communicator of "
                f"{self.size} ranks within {timeout_s:g} s: one of them is stopped"
            )
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm, self.places

    def _shrunk(self, timeout_s: float) -> Any:
        """Return a communicator of the ranks that live; collective over all of them."""
        mail, deadline = self.mail, deadline_after(timeout_s)

        def until(done: Callable[[], bool]) -> None:
            if not poll_until(done, deadline - time.monotonic(), self.idle):
                raise TimeoutError_(
                    f"rank {self.rank}: MPI has made no communicator of the "
                    f"{self.size} ranks that remain within {timeout_s:g} s: one of "
                    f"them does not come, or is stopped; call again"
                )

        # A process may have been found dead before MPI has heard of it.
        until(lambda: self._dead <= mail.failed.ranks())
        if mail.shrinking is not None:  # of a call that was given up, here
            until(mail.shrinking.is_done)
        by_thread = self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE
        mail.shrinking = Beside(self.comm.Shrink, by_thread=by_thread)
        until(mail.shrinking.is_done)
        call, mail.shrinking = mail.shrinking, None
        try:
            return call.result()
        except self._mpi.Exception as error:
            raise BackendError(
                f"MPI makes no communicator of the ranks that remain: {error}"
            ) from error

    def why_none(self) -> str:
        """Return why MPI makes no communicator of some ranks; empty: it does.

        Open MPI makes none from a communicator in which a rank has failed, and ranks
        that do not know of it wait for ever.
        """
        failed = self.mail.failed.ranks(anew=True)
        if not failed:
            return ""
        return (
            f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, sorted(failed)))} of "
            f"the job's MPI communicator failed: shrink() of the communicator of all "
            f"ranks makes another one"
        )

    def leave_word(self, key: str, blob: bytes) -> None:
        """Let the other ranks read ``blob`` under a key; local: they all get it."""
        mail, name = self.mail, self._prefix + key
        places = [place for rank, place in enumerate(self.places) if rank != self.rank]
        with mail.lock:
            mail.abandon([mail.send(Says.WORD, 0, name, blob, at) for at in places])

    def words(self, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the last words that ranks have left under a key; local."""
        mail = self.mail
        with mail.lock:
            mail.progress()
            said = mail.words.of(self._prefix + key)
            there = {rank: said.get(self.places[rank]) for rank in ranks}
        return {rank: word for rank, word in there.items() if word is not None}

    def forget(self, key: str) -> None:
        """Drop what is kept of exchanges that are over."""
        self.mail.forget(self._prefix + key)

    def close(self) -> None:
        """Free the private communicator, unless other worlds have it or MPI ended."""
        if self._is_owner and self.comm and not self._mpi.Is_finalized():
            self.comm.Free()

    def _duplicate(self, mpi_comm: MPI.Intracomm, timeout_s: float) -> Any:
        comm, request = mpi_comm.Idup()
        if not poll_until(request.Test, timeout_s):
            self._abandoned.append((request, comm))
            raise TimeoutError_(
                f"rank {mpi_comm.Get_rank()} of {mpi_comm.Get_size()}: not every rank "
                f"of {mpi_comm.Get_name() or 'the communicator'} called commrt.init() "
                f"within {timeout_s:g} s; it is collective. Look for an error or an "
                f"early exit on the other ranks."
            )
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        comm.Set_name("commrt bootstrap")
        return comm

    def _failed(self, rank: int) -> str:
        """Return why a rank comes no more, as far as MPI knows."""
        if self.places[rank] not in self.mail.failed.ranks():
            return ""
        return "MPI says that its process has failed"


class _Rendezvous:
    """One exchange of one rank; ranks are those of the communicator."""

    def __init__(
        self, mail: Mailbox, name: str, others: Sequence[int], blob: bytes
    ) -> None:
        self._mail = mail
        self._name = name
        self._others = others
        self._blob = blob
        self._sends: list[tuple[Any, bytes]] = []
        self._attempt: int | None = None
        """Number of the attempt that this rank has announced to all others."""
        self._has_heard = False
        """True if this rank has everybody's blob in this attempt, and has said so to
        all."""
        self._done = False
        self._came: set[int] = set()
        self._silent: list[int] = []
        """Ranks that came to this attempt and have not said that they have everybody's
        blob."""
        with mail.lock:
            self._topic = mail.topics.of(name)

    def step(self) -> bool:
        """Make some progress; return whether everybody is there."""
        mail, topic = self._mail, self._topic
        with mail.lock:
            mail.progress()
            self._came |= topic.came()
            if topic.skip_withdrawn():
                self._abandon_sends()
            had_told = self._attempt is not None
            if self._attempt != topic.attempt and (topic.said or not had_told):
                self._attempt = topic.attempt
                self._has_heard = False
                self._tell(Says.BLOB, self._blob)
            if not self._has_heard and not self._without(topic.said):
                self._has_heard = True
                self._tell(Says.HEARD)
            self._sends = [each for each in self._sends if not mail.has_ended(each[0])]
            self._silent = self._without(topic.heard) if self._has_heard else []
            self._done = self._has_heard and not self._silent and not self._sends
            return self._done

    def result(self) -> dict[int, bytes]:
        """Return the blobs of the others."""
        with self._mail.lock:
            attempt = self._topic.attempt
            return {peer: self._topic.said[attempt, peer] for peer in self._others}

    def end(self) -> None:
        """Leave the attempt; withdraw it if it was not complete."""
        mail, topic = self._mail, self._topic
        with mail.lock:
            self._abandon_sends()
            if self._attempt != topic.attempt:
                return  # somebody else has withdrawn it
            if not self._done:
                self._tell(Says.WITHDRAWN)
                self._abandon_sends()
            topic.withdrawn.add(topic.attempt)
            topic.skip_withdrawn()

    def has_come(self, rank: int) -> bool:
        """Return whether a rank has done its part in this attempt."""
        heard = not self._has_heard or rank not in self._silent
        return rank in self._topic.came() and heard

    def missing(self) -> list[int]:
        """Return the ranks that did not come, or if all came, those that gave up."""
        never = [peer for peer in self._others if peer not in self._came]
        now = self._topic.came()
        gone = [peer for peer in self._others if peer not in now]
        return never or self._silent or gone

    def _without(self, ranks: Container[tuple[int, int]]) -> list[int]:
        """Return the others that ``ranks``, by attempt and rank, lack in this one."""
        return [peer for peer in self._others if (self._attempt, peer) not in ranks]

    def _tell(self, says: Says, blob: bytes = b"") -> None:
        assert self._attempt is not None
        for peer in self._others:
            self._sends.append(
                self._mail.send(says, self._attempt, self._name, blob, peer)
            )

    def _abandon_sends(self) -> None:
        self._mail.abandon(self._sends)
        self._sends = []
