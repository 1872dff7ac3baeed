# SPDX-License-Identifier: Apache-2.0
"""Processes that MPI starts for a running job meet its ranks.

MPI connects both sides as it starts the new ones. From then on they talk by messages on
that intercommunicator. Rank 0 tells each newcomer its program. When that calls
``init()``, the newcomer tells each rank that it is here; where the program ends before,
that it has left. Once the ranks have agreed, each of them says to come, or why not. All
of them say the same. So it is said, too, where some of them die meanwhile.

Only then both sides merge into one MPI communicator, which blocks. All are in MPI by
then, so it takes no time; still a thread calls it, and the callers have their limits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from commrt.bootstrap.base import poll_until
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.mpi_mail import Mailbox
from commrt.errors import (
    BackendError,
    CommError,
    PeerFailedError,
    TimeoutError_,
    UsageError,
)
from commrt.launch.detect import LaunchInfo
from commrt.launch.python_program import PythonProgram
from commrt.mpi import library
from commrt.mpi.spawning import finalize_without_disconnect
from commrt.mpi.ulfm import Beside, is_failure
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "UNENDED",
    "Guest",
    "Order",
    "Says",
    "Talk",
    "become_guest",
    "end_where_mpi_cannot",
    "guest_here",
    "in_time",
    "merged",
    "places_of",
]

T = TypeVar("T")

_TAG = 7
_SOURCE = "MPI, as comm.grow() asked for it"
_GOODBYE_S = 10.0
"""Longest wait of a process that leaves, for the ranks to say that they know."""


UNENDED: list[Beside] = []
"""Calls of MPI that have not ended in time, and may never end."""


class Says(IntEnum):
    """A kind of message between ranks and newcomers."""

    RUN = 0
    """A rank: the newcomer's program."""
    HERE = 1
    """A newcomer: it has called init()."""
    LEFT = 2
    """A newcomer: it comes no more, and why."""
    COME = 3
    """A rank: all come together now; with the words of the invitation."""
    NOT = 4
    """A rank: the ranks go on without the newcomer, and why."""


class Talk:
    """Messages with the processes on the other side of an intercommunicator."""

    def __init__(self, inter: MPI.Intercomm) -> None:
        self._mpi: Any = library.load()
        self.inter = inter
        self.size: int = inter.Get_remote_size()
        """Processes on the other side."""
        self.heard: dict[int, dict[Says, bytes]] = {
            rank: {} for rank in range(self.size)
        }
        """The words of each of them."""
        self.failed: set[int] = set()
        """Those of which MPI says that they have failed."""
        self._sends: list[tuple[Any, bytes]] = []
        self._receiving: list[tuple[int, Any, bytearray]] = []

    def tell(self, says: Says, body: bytes, rank: int) -> None:
        """Say something to a process on the other side; local."""
        message = bytes([says]) + body
        request = self._asked(rank, lambda: self._send(message, rank))
        if request is not None:
            self._sends.append((request, message))

    def tell_all(self, says: Says, body: bytes = b"") -> None:
        """Say something to each process on the other side; local."""
        for rank in range(self.size):
            self.tell(says, body, rank)

    def step(self) -> None:
        """Take what has come, and let go of what has left; local."""
        for rank in range(self.size):
            if rank not in self.failed:
                self._look(rank)
        waiting = []
        for rank, request, buffer in self._receiving:
            done = self._asked(rank, request.Test)
            if done:
                self.heard[rank][Says(buffer[0])] = bytes(buffer[1:])
            elif done is not None:
                waiting.append((rank, request, buffer))
        self._receiving = waiting
        self._sends = [each for each in self._sends if not self._has_left(each[0])]

    def has_sent_all(self) -> bool:
        """Return whether all that was said has left."""
        self.step()
        return not self._sends

    def _look(self, rank: int) -> None:
        while (found := self._asked(rank, lambda: self._next(rank))) is not None:
            message, length = found
            buffer = bytearray(length)
            request = message.Irecv([buffer, self._mpi.BYTE])
            self._receiving.append((rank, request, buffer))

    def _next(self, rank: int) -> tuple[Any, int] | None:
        status = self._mpi.Status()
        message = self.inter.Improbe(source=rank, tag=_TAG, status=status)
        return None if message is None else (message, status.Get_count(self._mpi.BYTE))

    def _send(self, message: bytes, rank: int) -> Any:
        return self.inter.Isend([message, self._mpi.BYTE], dest=rank, tag=_TAG)

    def _has_left(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            if not is_failure(self._mpi, error):
                raise
            return True

    def _asked(self, rank: int, call: Callable[[], Any]) -> Any:
        """Return what a call of MPI returns; None where ``rank`` has failed."""
        try:
            return call()
        except self._mpi.Exception as error:
            if not is_failure(self._mpi, error):
                raise
            self.failed.add(rank)
            return None


@dataclass(frozen=True)
class Order:
    """The program of a newcomer."""

    program: PythonProgram
    variables: Mapping[str, str]
    """Variables that its environment gets."""

    def text(self) -> bytes:
        """Return it as a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, text: bytes) -> Order:
        """Return the one of a message."""
        said = json.loads(text)
        options, words = (tuple(said["program"][key]) for key in ("options", "words"))
        return cls(PythonProgram(options, words), said["variables"])


def in_time(
    step: Callable[[], T],
    timeout_s: float,
    heed: Callable[[], object] | None,
    *,
    late: str,
    fails: Callable[[Exception], str],
) -> T:
    """Return the result of a call of MPI that may never end; collective.

    Raises TimeoutError_ with the words ``late``, BackendError with those that ``fails``
    returns for MPI's error, and what ``heed`` raises.
    """
    mpi: Any = library.load()
    call = Beside(step, by_thread=mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
    if not poll_until(call.is_done, timeout_s, heed):
        UNENDED.append(call)
        raise TimeoutError_(late)
    try:
        made: T = call.result()
    except mpi.Exception as error:
        raise BackendError(fails(error)) from error
    return made


def merged(
    talk: Talk,
    *,
    is_new: bool,
    timeout_s: float,
    heed: Callable[[], object] | None = None,
) -> MPI.Intracomm:
    """Return a communicator of both sides, ranks before newcomers; collective.

    Raises TimeoutError_ where one of them does not come in time, BackendError where MPI
    makes none.
    """
    mpi: Any = library.load()
    made: MPI.Intracomm = in_time(
        lambda: talk.inter.Merge(high=is_new),
        timeout_s,
        heed,
        late=f"MPI has not put the ranks and the newcomers into one communicator "
        f"within {timeout_s:g} s: one of them has died or is stopped; call grow() "
        f"again",
        fails=lambda error: (
            f"MPI makes no communicator of the ranks and the newcomers: {error}"
        ),
    )
    made.Set_errhandler(mpi.ERRORS_RETURN)
    made.Set_name("commrt bootstrap")
    # The intercommunicator is never freed: where it is, Open MPI 5.0.11 fails with a
    # segmentation fault at the next death of one of its processes.
    return made


class Guest:
    """This process as a newcomer that MPI has started."""

    def __init__(self, parent: MPI.Intercomm) -> None:
        mpi: Any = library.load()
        finalize_without_disconnect()
        parent.Set_errhandler(mpi.ERRORS_RETURN)
        self._mpi, self._talk = mpi, Talk(parent)
        self.pid = os.getpid()
        self.launch = LaunchInfo("mpi", parent.Get_rank(), parent.Get_size(), _SOURCE)
        """Ranks are those among the newcomers of one start."""
        self.is_member = False
        """True once it is a rank."""
        self.refusal: CommError | None = None
        """The error of ``join``, once the ranks go on without this process."""

    def order(self, timeout_s: float) -> Order:
        """Return the program that this process is to run; raise as ``join`` does."""
        try:
            return Order.of(self._wait_for(Says.RUN, timeout_s))
        except CommError as error:
            self.refusal = error
            raise

    def join(
        self, facts: Mapping[str, Any], timeout_s: float
    ) -> tuple[MpiBootstrap, str]:
        """Return how this process meets the others, and the words of its invitation.

        ``facts``: what the ranks are told of this process. Raises TimeoutError_,
        PeerFailedError or BackendError where they go on without it.
        """
        if self.refusal is not None:
            raise self.refusal
        deadline = deadline_after(timeout_s)
        self._talk.tell_all(Says.HERE, json.dumps(dict(facts)).encode())
        try:
            text = self._wait_for(Says.COME, timeout_s).decode()
            left_s = max(0.0, deadline - time.monotonic())
            comm = merged(self._talk, is_new=True, timeout_s=left_s)
        except CommError as error:
            self.refusal = error
            self._say_goodbye(f"{type(error).__name__}: {error}")
            raise
        self.is_member = True
        words = json.loads(text)
        mail = Mailbox(self._mpi, comm)
        return MpiBootstrap.of_places(self._mpi, mail, words["places"]), text

    def leave(self, why: str) -> None:
        """Tell the ranks that this process comes no more, unless it is one of them."""
        if not self.is_member and self.refusal is None:
            self._say_goodbye(why)

    def _say_goodbye(self, why: str) -> None:
        talk = self._talk
        talk.tell_all(Says.LEFT, why.encode())

        def knows(rank: int) -> bool:
            heard = talk.heard[rank]
            return rank in talk.failed or Says.COME in heard or Says.NOT in heard

        def done() -> bool:
            # MPICH ends the job of a process that leaves a message untaken.
            return talk.has_sent_all() and all(map(knows, range(talk.size)))

        poll_until(done, _GOODBYE_S)

    def _wait_for(self, says: Says, timeout_s: float) -> bytes:
        """Return the ranks' word of that kind; raise what another one means."""
        talk = self._talk
        answers = {says, Says.NOT}
        speakers = range(1) if says is Says.RUN else range(talk.size)

        def answered() -> bool:
            talk.step()  # all answers are taken: MPICH warns of messages that are left
            return all(
                answers & talk.heard[rank].keys() or rank in talk.failed
                for rank in speakers
            )

        if not poll_until(answered, timeout_s):
            raise TimeoutError_(
                f"commrt.init: this process was started to join a running job, and its "
                f"ranks have not taken it in within {timeout_s:g} s (COMMRT_TIMEOUT_S)"
            )
        for words in talk.heard.values():
            if says in words:
                return words[says]
        refusals = [w[Says.NOT] for w in talk.heard.values() if Says.NOT in w]
        if refusals:
            raise BackendError(
                f"commrt.init: this process was started to join a running job, and its "
                f"ranks go on without it: {refusals[0].decode()}"
            )
        raise PeerFailedError(
            "commrt.init: this process was started to join a running job, and the "
            "ranks that started it have failed"
        )


_GUESTS: list[Guest] = []


def become_guest() -> Guest:
    """Return this process as a newcomer; UsageError where grow() has not started it.

    Starts MPI.
    """
    mpi: Any = library.load()
    parent = mpi.Comm.Get_parent()
    if parent == mpi.COMM_NULL:
        raise UsageError(
            "comm.grow() starts commrt.running.newcomer by MPI: run the program itself "
            "instead"
        )
    _GUESTS.append(Guest(parent))
    return _GUESTS[0]


def guest_here() -> Guest | None:
    """Return this process as a newcomer that MPI has started; None: it is none."""
    here = [each for each in _GUESTS if each.pid == os.getpid()]
    return here[0] if here else None


def end_where_mpi_cannot() -> None:
    """End this process where a thread of it still waits in MPI for the other side.

    That has died, or has not started MPI, for which MPI waits for ever. MPI_Finalize
    beside that thread would fail with a segmentation fault.
    """
    if all(call.is_done() for call in UNENDED):
        return
    sys.stderr.write(
        "commrt: this process ends without MPI_Finalize: a thread still waits in MPI "
        "for processes that grow() has given up\n"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(hasattr(sys, "last_value")))


def places_of(old: Sequence[int], count: int) -> list[int]:
    """Return the places of all ranks in a merged communicator, by rank.

    Args:
        old: the places of the ranks that were there before.
        count: newcomers, which follow.
    """
    return [*old, *range(len(old), len(old) + count)]
