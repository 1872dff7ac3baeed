# SPDX-License-Identifier: Apache-2.0
"""Python objects of a group of ranks: bcast_object, send_object and the like.

Nothing is unpickled but by these methods, and only what another rank passed to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from commrt.calls.channel import Channel
from commrt.errors import UsageError
from commrt.group.compare import Comparison
from commrt.group.group import Group
from commrt.group.stepped import SteppedRequest, Steps
from commrt.objects import exchange
from commrt.objects.exchange import Talk
from commrt.objects.messages import IN_STEP, ObjectMessages, check_object_tag
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.request import Request

__all__ = ["Objects"]

_StepsOf = Callable[[Talk, Any], Steps[Any]]


class Objects:
    """Moves Python objects between the ranks of one group.

    Args:
        group: the ranks.
        comparison: compares the calls of all ranks in check mode.
        make_channel: returns a channel of the same ranks, given its purpose; local.
    """

    def __init__(
        self,
        group: Group,
        comparison: Comparison,
        make_channel: Callable[[str], Channel],
    ) -> None:
        self._group, self._comparison = group, comparison
        self._make_channel = make_channel
        self._channel: Channel | None = None
        self._unfinished: SteppedRequest | None = None
        """A call that was given up in time; it ends before the next one begins."""
        self._lock = threading.RLock()
        """Held while a call runs."""
        self._opening = threading.RLock()
        self._messages = ObjectMessages(group)

    # -- collectives -------------------------------------------------------------

    def bcast_object(
        self, x: Any = None, root: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """Return the root's object on every rank.

            config = comm.bcast_object(config if comm.rank == 0 else None)

        It is pickled, with protocol 5; the memory of large arrays in it is sent from
        where it is. Only the root's ``x`` is looked at, and returned there as it is.

        Raises:
            UsageError: it cannot be pickled, on every rank.
            ObjectError: it cannot be unpickled, on the ranks where it cannot.
            MemoryError_: this rank has no memory for it; other ranks, RefusedError.
        """
        return self._run("bcast_object", exchange.bcast, x, timeout_s, root)

    def allgather_object(self, x: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object, in rank order; objects as in ``bcast_object``.

        The one of this rank is ``x`` itself.
        """
        found: list[Any] = self._run(
            "allgather_object", exchange.allgather, x, timeout_s
        )
        return found

    def gather_object(
        self, x: Any, root: int = 0, *, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Return every rank's object on the root, in rank order; None elsewhere.

        Objects are as in ``bcast_object``.
        """
        found: list[Any] | None = self._run(
            "gather_object", exchange.gather, x, timeout_s, root
        )
        return found

    def scatter_object(
        self, x: Any = None, root: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """Return this rank's object of the root's list, which has one for each rank.

        Only the root's ``x`` is looked at. Objects are as in ``bcast_object``.
        """
        return self._run("scatter_object", exchange.scatter, x, timeout_s, root)

    # -- messages ----------------------------------------------------------------

    def send_object(
        self,
        x: Any,
        dest: int,
        tag: int = 0,
        *,
        nonblocking: bool = False,
        timeout_s: float | None = None,
    ) -> Request | None:
        """Send an object to rank ``dest``, for a ``recv_object`` with the same tag.

        It is pickled at once; its large arrays may be changed when the call returns, or
        the request of a nonblocking one is complete. If it cannot be pickled, both
        ranks raise UsageError; without memory for that, MemoryError_ and RefusedError.
        """
        what = "send_object"
        self._group.check_usable()
        nonblocking = check_flag(what, "nonblocking", nonblocking)
        limit = self._group.limit(what, timeout_s)
        rank = self._group.check_rank(what, "dest", dest)
        request = self._messages.send(x, rank, check_object_tag(what, tag), limit)
        if nonblocking:
            return request
        request.wait()
        return None

    def recv_object(
        self,
        source: int | None = None,
        tag: int = 0,
        *,
        with_source: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Return an object that rank ``source`` sends with ``send_object``.

        Without a source it is of whichever rank sends one with this tag; with
        ``with_source=True`` a pair of the object and that rank is returned.

        Raises:
            MemoryError_: there is no memory for it; the next call can receive it.
        """
        what = "recv_object"
        self._group.check_usable()
        limit = self._group.limit(what, timeout_s)
        with_source = check_flag(what, "with_source", with_source)
        number = check_object_tag(what, tag)
        if source is not None:
            source = self._group.check_rank(what, "source", source)
        found, sender = self._messages.recv(source, number, limit)
        return (found, sender) if with_source else found

    # -- running -----------------------------------------------------------------

    def _run(
        self, call: str, steps: _StepsOf, x: Any, timeout_s: float | None, *root: Any
    ) -> Any:
        """Run a collective, with a root or without one, to its end."""
        group = self._group
        group.check_usable()
        channel = self._open()
        limit = self._comparison.limit(call, timeout_s, channel)

        def check() -> int:
            return group.check_rank(call, "root", *root) if root else -1

        number = self._comparison.together(
            call,
            check,
            timeout_s=limit,
            describe=lambda rank: {"root": rank},
            carrier=channel,
        )
        with self._lock:
            if self._unfinished is not None:
                with suppress(*IN_STEP):  # which its own call has raised
                    self._finish(self._unfinished, limit)
            channel.check_usable()
            what = f"{call} on {group.name}"
            talk = Talk(channel, call, what, number, limit)
            here = f"{what}, rank {group.rank}"
            started = SteppedRequest(
                steps(talk, x), here, call, limit, self._ended(channel, here)
            )
            self._unfinished = started
            return self._finish(started, limit)

    def _finish(self, started: SteppedRequest, limit: float) -> Any:
        try:
            return started.wait(timeout_s=limit)
        finally:
            if started.done:
                self._unfinished = None

    def _ended(
        self, channel: Channel, what: str
    ) -> Callable[[BaseException | None], None]:
        def ended(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, IN_STEP):
                # The others must not wait for messages that never come.
                channel.set_failure(f"{what}: {error}")

        return ended

    def _open(self) -> Channel:
        """Return the channel of objects; the first call makes it."""
        with self._opening:
            if self._channel is None:
                self._channel = self._make_channel("objects")
            return self._channel

    # -- ending ------------------------------------------------------------------

    def free(self) -> None:
        """Free what calls with objects use; UsageError while one has not ended."""
        channel = self._channel
        if channel is None:
            return
        if self._unfinished is not None and not channel.failure:
            raise UsageError(
                f"{self._group.name} cannot be freed: a call with objects has not "
                f"ended; wait() for the request in its error first"
            )
        channel.free()

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one, which may have come first."""
        self._open().set_failure(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End its calls in flight and all later ones, on all ranks.

        Ranks that wait in a channel that this rank has not made end, too: that ends
        with its communicator.
        """
        if self._channel is not None:
            self._channel.end_on_all_ranks(why)
