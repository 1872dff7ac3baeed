# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks on the calls in a bucket, for buckets with a time limit.

A rank tells rank 0 how many calls it has made if its buckets are full or old, or if it
waits for one of their requests. Rank 0 sends the calls that all ranks have made, and
tells them. So no operation waits for calls that a rank has yet to make;
docs/internals/fusion.md shows why that cannot deadlock.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np

from commrt import _native
from commrt.calls.channel import Channel
from commrt.errors import MismatchError, RevokedError, TimeoutError_
from commrt.fusion.lost_count import LostCount
from commrt.vocabulary.limits import deadline_after

__all__ = ["Agreement", "Follower", "Leader"]

_TAG = -2
"""Tag of the messages; users' tags are not negative."""
_MORE, _LAST, _WRONG, _LOST = range(4)
"""Kinds of messages: another one will follow, this is the last one, a rank made other
calls, or has refused one. Each message also holds a number of calls and a digest of
them; for ``_WRONG`` and ``_LOST`` the number is that of the rank. The reason follows a
``_LOST`` one, which has its length in place of the digest."""
_MOST_WORDS = 500
"""Characters of a reason that other ranks are told."""
_LOOK_S = 0.1
"""Seconds of one wait, after which the rank looks at its own calls again."""


class _Peer:
    """Messages of three numbers to and from one rank."""

    def __init__(self, comm: Channel, rank: int) -> None:
        self._comm = comm
        self._rank = rank
        self._incoming = np.zeros(3, np.uint64)
        self._coming: _native.Request | None = None
        self._going: list[_native.Request] = []
        self._is_stopped = False

    def send(self, number: int, digest: int, kind: int) -> None:
        comm, message = self._comm, np.array([number, digest, kind], np.uint64)
        where = message.ctypes.data, message.nbytes, self._rank, _TAG, message
        started: _native.Request = comm.send_bytes(*where, "send", True, comm.timeout_s)
        started.be_quiet()  # where ranks disagree, nobody asks for it any more
        self._going.append(started)
        self._going = [each for each in self._going if not each.test()]

    def say_lost(self, rank: int, why: bytes) -> None:
        """Tell that a rank has refused a call, and why."""
        self.send(rank, len(why), _LOST)
        text = np.frombuffer(why, np.uint8)
        where = text.ctypes.data, text.nbytes, self._rank, _TAG, text
        started: _native.Request = self._comm.send_bytes(
            *where, "send", True, self._comm.timeout_s
        )
        started.be_quiet()
        self._going.append(started)

    def take_why(self, nbytes: int) -> str:
        """Return the reason that follows a message, and is on its way."""
        comm, text = self._comm, np.zeros(nbytes, np.uint8)
        where = text.ctypes.data, text.nbytes, self._rank, _TAG, text
        comm.recv_bytes(*where, text, "recv", False, comm.timeout_s)
        return text.tobytes().decode(errors="replace")

    def take(self) -> list[int] | None:
        """Return the next message, None if there is none yet."""
        comm, message = self._comm, self._incoming
        if self._is_stopped:
            return None
        if self._coming is None:
            where = message.ctypes.data, message.nbytes, self._rank, _TAG, message
            self._coming = comm.recv_bytes(
                *where, message, "recv", True, comm.timeout_s
            )
            self._coming.be_quiet()
            if self._is_stopped:  # by another thread meanwhile
                self.stop()
                return None
        if not self._coming.test():
            return None
        self._coming = None
        numbers: list[int] = message.tolist()
        return numbers

    def wait(self, seconds: float) -> None:
        """Wait for the next message, for so long at most."""
        coming = self._coming  # another thread may take it meanwhile
        if coming is not None:
            with contextlib.suppress(TimeoutError_):
                coming.wait(timeout_s=max(seconds, 1e-3))

    def close(self) -> None:
        for request in self._going:
            request.wait()

    def stop(self) -> None:
        """Take back what the other rank has not answered; it may never do so."""
        self._is_stopped = True
        coming, self._coming = self._coming, None
        for request in [*self._going, *([] if coming is None else [coming])]:
            request.take_back("the ranks no longer agree on buckets")


class Agreement(ABC):
    """This rank's part."""

    def __init__(self, comm: Channel, count: LostCount) -> None:
        """Agree on nothing yet; local.

        ``count`` is told where a rank has refused a call of which nobody knows what it
        was: nothing that is open then is sent.
        """
        self._comm = comm
        self._count = count
        self._refused = b""
        """Why this rank has refused such a call; empty: it has not."""
        self._is_looking = False
        self._is_over = False
        self._is_leaving = False

    def look(self) -> None:
        """Say to the others all that is due, and send the calls that may be sent.

        Any error ends the agreement: what was said or heard may be lost with it.
        """
        if self._is_looking or self._is_over:
            return
        self._is_looking = True
        try:
            self._comm.check_usable()
            self._look()
        except BaseException as error:
            self._end_by(error, error)
            raise
        finally:
            self._is_looking = False

    def refuse(self, why: str) -> None:
        """Tell the others that this rank has refused a call that has no place."""
        if not self._count.is_lost:
            said = why[:_MOST_WORDS] or "its error has no words"
            self._refused = said.encode(errors="backslashreplace")
            self._count.lose(self._comm.rank, self._refused.decode())
            self.look()

    def drain(self) -> None:
        """Send all calls that were made."""
        self._until(lambda: self._calls[0] == self._calls[1], self._comm.timeout_s)

    def leave(self, limit_s: float, because: BaseException | None) -> None:
        """The same, and agree that there will be no more of them.

        Where that fails, nobody is left to send them. ``because`` is the exception by
        which this rank leaves, if there is one.
        """
        self._is_leaving = True
        try:
            self._until(lambda: self._is_over, limit_s)
        except BaseException as error:
            self._end_by(because or error, error)
            raise

    def wait_for(self, call: int, seconds: float) -> None:
        """Have ``call`` sent, or wait so long for that."""
        self.look()
        if self._calls[1] <= call and seconds > 0:
            self._wait(min(seconds, _LOOK_S))
            self.look()

    def _end_by(self, why: BaseException, error: BaseException) -> None:
        """Fail all calls that are not sent, here and for ranks that wait for them."""
        if self._is_over:
            return
        self._is_over = True
        comm = self._comm
        revoked: Exception
        if isinstance(error, MismatchError):
            revoked = error
        else:
            said = f"{type(why).__name__}: {why}".removesuffix(": ")
            where = f"fused() on {comm.name}: rank {comm.rank}"
            revoked = RevokedError(f"{where} left the calls unsent by {said}")
            revoked.__cause__ = error
        try:
            comm.give_up(str(revoked))
        finally:
            _native.fail_fused(comm, revoked)
            for peer in self._peers():
                peer.stop()

    @abstractmethod
    def _peers(self) -> Iterable[_Peer]: ...

    @abstractmethod
    def _look(self) -> None: ...

    @abstractmethod
    def _wait(self, seconds: float) -> None:
        """Wait for what another rank says next."""

    @property
    def _calls(self) -> tuple[int, int]:
        """Number of calls that were made, and number of those that were sent."""
        calls: tuple[int, int] = _native.fused_calls(self._comm)
        return calls

    def _until(self, done: Callable[[], bool], limit_s: float) -> None:
        deadline = deadline_after(limit_s)
        while True:
            self.look()
            if done():
                return
            if self._is_leaving and self._count.is_lost:
                self._count.keep_up()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                comm, (calls, _) = self._comm, self._calls
                then = " and left the context" if self._is_leaving else ""
                raise TimeoutError_(
                    f"fused() on {comm.name}, rank {comm.rank}: not all ranks have "
                    f"made the same {calls} calls{then} within {limit_s:g} s"
                )
            self._wait(min(left_s, _LOOK_S))

    def _fail(self, rank: int) -> NoReturn:
        raise MismatchError(
            f"fused() on {self._comm.name}: rank {rank} did not make the calls of rank "
            f"0; all ranks must make equal calls within the context, in the same order "
            f"(COMMRT_DEBUG=check compares them one by one)"
        )


class Follower(Agreement):
    """The agreement on every rank but 0."""

    def __init__(self, comm: Channel, count: LostCount) -> None:
        super().__init__(comm, count)
        self._leader = _Peer(comm, 0)
        self._told = 0, False
        self._has_said_lost = False

    def _peers(self) -> Iterable[_Peer]:
        return [self._leader]

    def _look(self) -> None:
        comm, (calls, sent) = self._comm, self._calls
        if self._refused and not self._has_said_lost:
            self._has_said_lost = True
            self._leader.say_lost(comm.rank, self._refused)
        # A call that was refused is none of those that the others count.
        may_say = self._is_leaving or not self._count.is_lost
        if may_say and (calls, self._is_leaving) > self._told:
            self._told = calls, self._is_leaving
            kind = _LAST if self._is_leaving else _MORE
            self._leader.send(calls, _native.digest_fused(comm, calls), kind)
        while (said := self._leader.take()) is not None:
            number, digest, kind = said
            if kind == _WRONG:
                self._fail(number)
            if kind == _LOST:
                self._count.lose(number, self._leader.take_why(digest))
            elif not self._count.is_lost:
                if digest != _native.digest_fused(comm, number):
                    self._fail(comm.rank)
                if number > sent:
                    _native.send_fused(comm, number)
            if kind == _LAST:
                self._leader.close()
                self._is_over = True
                return

    def _wait(self, seconds: float) -> None:
        self._leader.wait(seconds)


class Leader(Agreement):
    """The agreement on rank 0."""

    def __init__(self, comm: Channel, count: LostCount) -> None:
        super().__init__(comm, count)
        self._has_said_lost = False
        self._others = {rank: _Peer(comm, rank) for rank in range(1, comm.size)}
        self._told = dict.fromkeys(self._others, (0, 0))
        self._left: set[int] = set()

    def _peers(self) -> Iterable[_Peer]:
        return self._others.values()

    def _look(self) -> None:
        for rank, other in self._others.items():
            while rank not in self._left and (said := other.take()) is not None:
                if said[2] == _LOST:
                    self._lose(rank, other.take_why(said[1]))
                    continue
                self._told[rank] = said[0], said[1]
                if said[2] == _LAST:
                    self._left.add(rank)
        if self._refused:
            self._lose(self._comm.rank, self._refused.decode())
        last = self._is_leaving and len(self._left) == len(self._others)
        if not self._count.is_lost:
            self._send_common(last)
        elif last:
            for other in self._others.values():
                other.send(0, 0, _LAST)
        if last:
            for other in self._others.values():
                other.close()
            self._is_over = True

    def _lose(self, rank: int, why: str) -> None:
        """Tell all that a rank has refused a call, once."""
        if not self._has_said_lost:
            self._has_said_lost = True
            for other in self._others.values():
                other.say_lost(rank, why.encode())
            self._count.lose(rank, why)

    def _send_common(self, last: bool) -> None:
        """Send the calls that all ranks have made, and tell the others."""
        comm, (calls, sent) = self._comm, self._calls
        for rank, (number, digest) in self._told.items():
            if sent <= number <= calls and digest != self._digest(number):
                self._refuse(rank)
            few = rank in self._left and number < calls
            if few or (self._is_leaving and number > calls):
                self._refuse(rank)
        common = min([calls, *(number for number, _ in self._told.values())])
        if common > sent or last:
            for other in self._others.values():
                digest = self._digest(common)
                other.send(common, digest, _LAST if last else _MORE)
        if common > sent:
            _native.send_fused(comm, common)

    def _digest(self, call: int) -> int:
        digest: int = _native.digest_fused(self._comm, call)
        return digest

    def _refuse(self, rank: int) -> NoReturn:
        for other in self._others.values():
            other.send(rank, 0, _WRONG)
        self._fail(rank)

    def _wait(self, seconds: float) -> None:
        behind = [r for r in self._others if r not in self._left]
        if behind:
            self._others[min(behind, key=self._told.__getitem__)].wait(seconds)
