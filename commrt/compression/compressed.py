# SPDX-License-Identifier: Apache-2.0
"""Compressed calls of a communicator, by ``compress=`` or by a rule of a table."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

from commrt import _native
from commrt.arrays.residual import check_residual
from commrt.calls.arguments import Bound, Call, parse
from commrt.calls.channel import Channel
from commrt.compression.exchange import Exchange
from commrt.compression.turns import Place, Turn
from commrt.errors import BufferError_, MismatchError, UsageError, shown
from commrt.group.compare import Refusing
from commrt.group.stepped import SteppedRequest
from commrt.select.facts import Query
from commrt.select.policy import Explanation, Policy, Span
from commrt.sparse.memory import Pool
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation
from commrt.vocabulary.wire_formats import (
    COMPRESS,
    COMPRESSED_DTYPES,
    EXACT,
    WireFormat,
    check_compress,
    why_not_compressed,
    wire_format,
)

__all__ = ["CompressedCall", "Compression"]

_DECIDING = ("op", "algorithm", "params")
"""Arguments that decide beside the array whether a rule compresses a call."""


class Chooser(Protocol):
    """Says what a call would run."""

    @property
    def policy(self) -> Policy:
        """Tables, and what is asked for beforehand."""
        ...

    def asked(self, call: Call, bound: Bound) -> tuple[Query, Span]:
        """Return a call as a question, and the policy's answer to it."""
        ...


class _Request(SteppedRequest):
    """Dropped before its end, it leaves the second exchange out that others make."""

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and not sys.is_finalizing():
            self._ended(UsageError("its request was dropped before it was complete"))
        super().__del__()


@dataclass
class _Channels:
    """Channels and state of a communicator's compressed operations.

    Two communicators of the same ranks, as each has an order of its own.
    """

    shares: Channel
    sums: Channel
    alone: bool
    """True if there is one rank, and both are the communicator itself."""
    seq: int = 0
    pending: set[int] = field(default_factory=set)
    """Numbers of the operations that have not ended."""
    place: Place = field(default_factory=lambda: Place(passed=True))
    """Place of the latest allreduce in the order."""
    latest: Callable[[], SteppedRequest | None] = field(default=lambda: None)

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused, here and on its first channel."""
        self.seq += 1
        self.shares.refuse(error)

    def fail(self, why: str) -> None:
        """Let nobody wait for what will not come."""
        if not self.alone:
            self.shares.set_failure(why)
            self.sums.set_failure(why)

    def end(self, why: str) -> None:
        """End all that is under way, here and on the other ranks."""
        if not self.alone:
            self.shares.end_on_all_ranks(why)
            self.sums.end_on_all_ranks(why)


@dataclass(frozen=True, eq=False)
class CompressedCall:
    """A compressed operation bound to its arrays; call it, or start() it."""

    compression: Compression
    call: Call
    bound: Bound
    wire: WireFormat
    places: _native.Places | None = None
    """Where its arrays lie, if it runs more than once."""

    def __call__(self) -> Any:
        """Run the operation and return its output."""
        return self._begun().wait()

    def start(self) -> SteppedRequest:
        """Start the operation and return its request; wait before starting again."""
        return self.compression.keep(self._begun())

    def _begun(self) -> SteppedRequest:
        if self.places is not None:
            self.compression.check_places(self.places, self.operation)
        return self.compression.start(self.call, self.bound, self.wire)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.call.spec.name

    @property
    def label(self) -> str:
        """Name of what runs it."""
        return f"compressed{{{COMPRESS}={self.wire.name}}}"

    def __repr__(self) -> str:
        return f"<commrt.CompressedCall {self.operation} by {self.label}>"


class Compression:
    """Compresses calls of one channel.

    Args:
        channel: the ranks.
        choices: says what a call would run, and by which rules.
        make_channel: returns another channel of the same ranks, given its purpose;
            local.
    """

    asked_by: ClassVar[tuple[str, ...]] = ("compress", "algorithm", "params")
    again = None
    """No compressed call is started without a look at it."""

    def __init__(
        self,
        channel: Channel,
        choices: Chooser,
        make_channel: Callable[[str], Channel],
    ) -> None:
        self._channel, self._choices = channel, choices
        self._make_channel = make_channel
        self._channels: _Channels | None = None
        self._lock = threading.RLock()
        self.is_open = self._rules_may_compress()
        """True if calls are compressed that do not ask for it."""

    # -- whether -----------------------------------------------------------------

    def _compression(self, call: Call, bound: Bound) -> WireFormat | None:
        """Return the wire format of a call, None if it is not compressed.

        Raises UsageError where the call asks for what cannot be; what a table's rule
        asks for, and cannot be, is left out.
        """
        spec = call.spec
        if call.compress == EXACT or not spec.compresses:
            return None
        users = call.user is not None
        reason = why_not_compressed(bound.dtype, spec.reduces, call.reduction, users)
        if call.compress is None:
            wanted = None if reason is not None else self._asked_by_rule(call, bound)
            return None if wanted is None else wire_format(wanted)
        what = f"{spec.name}: compress={shown(call.compress)}"
        if reason is not None:
            fits = bound.dtype.name in COMPRESSED_DTYPES
            raise (UsageError if fits else BufferError_)(f"{what}: {reason}")
        given = [
            name
            for name in ("algorithm", "backend", "params")
            if getattr(call, name) is not None
        ]
        if given:
            raise UsageError(
                f"{what}: {given[0]} is for what is not compressed; leave it out: the "
                f"parts go by alltoall and allgather, which are chosen as ever"
            )
        return wire_format(call.compress)

    def _asked_by_rule(self, call: Call, bound: Bound) -> str | None:
        """Return the wire format that a table's rule or a named candidate asks for."""
        named = COMPRESS in (call.algorithm or "") or COMPRESS in (call.params or {})
        if self._channel.deterministic or not (named or self.is_open):
            return None
        _, span = self._choices.asked(call, bound)
        params = span.candidate.params
        if COMPRESS not in params:
            return None
        found = check_compress(params[COMPRESS])
        return None if found == EXACT else found

    def _rules_may_compress(self) -> bool:
        """Return whether a rule, or a wish of before, names a wire format."""
        policy = self._choices.policy
        rules = () if policy.table is None else policy.table.rules
        asked = [wish for wishes in policy.wishes for wish in wishes]
        params = [wish.params for wish in asked] + [rule.use.params for rule in rules]
        return any(COMPRESS in each for each in params)

    def explained(self, found: Explanation, users: bool) -> Explanation:
        """Return an explanation that says if the call would be compressed.

        ``users`` is True if the reduction is a user's own.
        """
        wanted = found.choice.candidate.params.get(COMPRESS)
        if wanted is None or wanted == EXACT:
            return found
        reason = self._why_rule_is_not_followed(found.query, users)
        if reason is None:
            more = " and allgather" if operation(found.query.coll).reduces else ""
            said = f"compressed: {wanted} by alltoall{more}, so not exact"
        else:
            said = f"not compressed, as {reason}"
        choice = replace(found.choice, reason=f"{found.choice.reason}; {said}")
        return replace(found, choice=choice)

    def _why_rule_is_not_followed(self, query: Query, users: bool) -> str | None:
        if self._channel.deterministic:
            return "deterministic=True leaves out what a table asks for"
        if self._channel.size == 1:
            return "there is one rank"
        reduces = operation(query.coll).reduces
        op = ReduceOp.SUM
        if reduces and not users and query.op is not None:
            op = ReduceOp[query.op.upper()]
        return why_not_compressed(dtype_by_name(query.dtype), reduces, op, users)

    # -- running -----------------------------------------------------------------

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any] | None:
        """Return what starts the call; None where it is not compressed."""
        compressed = self._compressed(call, bound)
        if compressed is None:
            return None
        return compressed.start if call.nonblocking else compressed

    def bind(self, call: Call, bound: Bound) -> CompressedCall | None:
        """Return the call, checked; None where it is not compressed.

        In check mode all ranks are compared here.
        """
        compressed = self._compressed(call, bound)
        return compressed and replace(compressed, places=bound.places)

    def _compressed(self, call: Call, bound: Bound) -> CompressedCall | None:
        wire = self._compression(call, bound)
        if wire is None:
            return None
        what = call.spec.name
        assert bound.x is not None
        if call.residual is not None:
            check_residual(what, bound.x, call.residual, bound.out)
        call = replace(call, compress=wire.name)
        if self._channel.checker is not None:
            self._channel.checker.check(call, bound)
        return CompressedCall(self, call, bound, wire)

    def open(self) -> _Channels:
        """Return the state of compressed operations; the first call makes it."""
        with self._lock:
            if self._channels is None:
                one = self._channel
                alone = one.size == 1
                names = ("compress.shares", "compress.sums")
                pair = [one if alone else self._make_channel(name) for name in names]
                self._channels = _Channels(pair[0], pair[1], alone)
            return self._channels

    def carrier(
        self, name: str, args: tuple[Any, ...], arguments: Mapping[str, Any]
    ) -> Refusing | None:
        """Return what a refused call began on, as far as its arguments tell.

        None: the channel itself. Other ranks' calls are right, and a rule may compress
        them though they do not ask for it.
        """
        asked = arguments.get(COMPRESS)
        if asked is not None:
            is_exact = isinstance(asked, str) and asked == EXACT
            return None if is_exact else self.open()
        what = operation(name)
        named = any(COMPRESS in str(arguments.get(each, "")) for each in self.asked_by)
        if not what.compresses or not (named or self.is_open):
            return None
        x = args[:1] or (arguments.get("x"),)
        said = {key: arguments[key] for key in _DECIDING if key in arguments}
        for more in (said, {}):  # one of them may be what is wrong
            with suppress(Exception):
                call = parse(what, x, more)
                view = call.view(call.x, "x")
                bound = Bound(view, None, None, view.dtype, view.count)
                is_compressed = self._compression(call, bound) is not None
                return self.open() if is_compressed else None
        return None

    def check_places(self, places: _native.Places, what: str) -> None:
        """Raise UsageError where an array of a bound call has other memory."""
        try:
            places.check(what)
        except Exception as error:
            self.open().refuse(error)
            raise

    def start(self, call: Call, bound: Bound, wire: WireFormat) -> SteppedRequest:
        """Start a compressed call; return its request."""
        self._channel.check_usable()
        limit = self._channel.timeout_s if call.timeout_s is None else call.timeout_s
        channels = self.open()
        channels.shares.check_usable()
        seq = channels.seq
        title = (
            f"{call.spec.name} #{seq} (compress={wire.name!r}) on {self._channel.name}"
        )
        residual = None
        if call.residual is not None:
            assert bound.x is not None
            residual = check_residual(call.spec.name, bound.x, call.residual)
        place = Place()
        exchange = Exchange(
            call,
            bound,
            wire,
            residual,
            title,
            seq,
            self._compression_pool,
            channels.shares,
            channels.sums,
            Turn(channels.latest(), channels.place),
            place,
        )
        channels.seq += 1
        channels.pending.add(seq)

        def ended(error: BaseException | None) -> None:
            place.passed = True
            channels.pending.discard(seq)
            if error is not None and not isinstance(error, MismatchError):
                # The others must not wait for messages that never come.
                channels.fail(f"{title}: {error}")

        request = _Request(
            exchange.steps(),
            f"{title}, rank {self._channel.rank}",
            call.spec.name,
            limit,
            ended,
        )
        if call.spec.reduces:  # the others have one exchange only
            channels.place, channels.latest = place, weakref.ref(request)
        return request

    def keep(self, request: SteppedRequest) -> SteppedRequest:
        """Go on with a request that the program may wait for later; return it."""
        return self._channel.keep(request)

    @cached_property
    def _compression_pool(self) -> Pool:
        return Pool()

    # -- ending ------------------------------------------------------------------

    def free(self) -> None:
        """Free what compressed operations use; UsageError while one has not ended."""
        channels = self._channels
        if channels is None:
            return
        if channels.pending and not channels.shares.failure:
            raise UsageError(
                f"{self._channel.name} cannot be freed: {len(channels.pending)} "
                f"compressed operations have not ended; wait() for their requests first"
            )
        if not channels.alone:
            channels.shares.free()
            channels.sums.free()

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one, which may have come first."""
        self.open().fail(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End its calls in flight and all later ones, on all ranks.

        Ranks that wait in a channel that this rank has not made end, too: that ends
        with its communicator.
        """
        if self._channels is not None:
            self._channels.end(why)
