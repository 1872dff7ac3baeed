# SPDX-License-Identifier: Apache-2.0
"""Check mode: compare every collective across ranks before its data moves.

The ranks tell each other numbers of their calls, 16 bytes each. The engine does so by
itself for calls that it knows (``native/calls/call_check.hpp``). Where the numbers
differ, each rank describes its call, in an allgather of fixed size, the same whatever
was called. Every rank raises the same MismatchError then, and nothing of the operation
has been sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native, env
from commrt.calls.host_route import NO_DTYPE, count_unit
from commrt.errors import (
    BufferError_,
    MismatchError,
    TimeoutError_,
    UsageError,
)
from commrt.group import faults
from commrt.group.call_site import call_site

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call
    from commrt.calls.channel import Channel

__all__ = ["Checker", "Said", "describe", "shortened"]

_NBYTES = 640
_TEXT_NBYTES = 96
_ERROR_LENGTH = 300
_MOST_SHOWN = 400
"""Characters of a call that are shown whole."""
_MOST_KEPT = 256
"""Descriptions of calls that a communicator keeps."""
_COMPARED = (
    "operation",
    "shapes",
    "elements",
    "counts",
    "dtype",
    "memory",
    "op",
    "root",
    "splits",
    "algorithm",
    "compress",
    "result",
    "k",
    "name",
    "table",
)


def describe(call: Call, bound: Bound, table: str | None) -> dict[str, Any]:
    """Return the fields of a call that must be equal on all ranks."""
    spec = call.spec
    asked = [call.backend, call.algorithm, dict(call.params or {})]
    # The field is there where it says something: a message has little room.
    on_device = {} if bound.on is None else {"memory": "device"}
    return {
        **on_device,
        "operation": spec.name,
        # An alltoallv's number differs by rank; its counts are compared pair by pair.
        "elements": None if spec.rule_bytes == "any" else bound.num_elements,
        "counts": _counts(call, bound),
        "dtype": bound.dtype.name,
        "op": None if call.op is None else shortened(call.op),
        "root": call.root if spec.has_root else None,
        "algorithm": shortened(json.dumps(asked)) if any(asked) else None,
        "compress": call.compress,
        "name": None if call.name is None else shortened(call.name),
        "table": None if table is None else table[:12],
    }


def _counts(call: Call, bound: Bound) -> str | None:
    """Return the facts of the counts that the ranks must agree on."""
    if call.spec.rule_bytes == "any":
        return "recv_counts exchanged" if call.counts[1] is None else "all given"
    if not bound.counts:
        return None
    return shortened(" ".join(map(str, bound.counts[0])))


def shortened(text: str) -> str:
    """Return ``text``, or its beginning and a digest where it is long as JSON."""
    if len(json.dumps(text)) <= _TEXT_NBYTES:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{text[:8]}...{digest}"


class Said:
    """Fields of a call that are compared, and a number that stands for them."""

    __slots__ = ("fields", "number")

    def __init__(self, fields: dict[str, Any]) -> None:
        """``fields`` are short texts, and stay as they are."""
        self.fields = fields
        self.number = _number_of([fields.get(key) for key in _COMPARED])


class Checker:
    """Compares calls of one communicator, over another one of the same ranks."""

    def __init__(self, comm: Channel, channel: Channel, table: str | None) -> None:
        """Compare calls of ``comm`` over ``channel``; collective.

        ``table`` is the digest of the selection table; None without one.
        """
        self._comm, self._table = comm, table
        self.channel = channel
        """Another communicator of the same ranks."""
        self.numbers = _native.CallCheck(
            partial(_bound_exchange, channel), channel.size, _number_of(table)
        )
        """Tells numbers of calls, for the engine, too."""
        self._kept: dict[Hashable, Said] = {}

    @staticmethod
    def is_wanted() -> bool:
        """Return whether COMMRT_DEBUG asks for checks."""
        return env.read_str("COMMRT_DEBUG") != "off"

    def free(self) -> None:
        """Free the channel that the comparisons go over."""
        self.channel.free()

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one."""
        self.channel.set_failure(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End its comparisons in flight and all later ones, on all ranks."""
        self.channel.end_on_all_ranks(why)

    def check(self, call: Call, bound: Bound) -> None:
        """Raise MismatchError on every rank unless all of them make the same call."""
        if self._are_same(*self._numbers(call, bound), call.spec.name, call.timeout_s):
            return
        fields = describe(call, bound, self._table)
        said = self._exchange(fields, call.timeout_s)
        self._compare(said)
        if len(bound.counts) == 2:
            self._check_pairs(call, *bound.counts)

    def tell(self, what: str, error: UsageError, timeout_s: float | None) -> None:
        """Raise this error on every rank: the others compare their calls now.

        Where they do not, it stays this rank's own; they are told when they come.
        """
        text = str(error).encode("ascii", "replace").decode()
        if f"rank {self._comm.rank}" not in text:
            text = f"rank {self._comm.rank}: {text}"
        while len(json.dumps(text)) > _ERROR_LENGTH:
            text = text[:-8]
        kind = "BufferError_" if isinstance(error, BufferError_) else "UsageError"
        told = [kind, f"{text} (at {call_site()}; check mode: nothing was sent)"]
        fields = {"operation": what, "error": told}
        try:
            if not self.numbers.take_difference():
                self.numbers.are_same(0, 0, self._limit(timeout_s))
        except TimeoutError_:
            self._start(fields)[1].be_quiet()  # the others ask for it when they come
            raise error from None
        except UsageError as beside:
            raise self.failed(what, beside, self._limit(timeout_s)) from error
        try:
            self._said(fields, timeout_s)
        except TimeoutError_:
            raise error from None

    def compare(
        self,
        fields: dict[str, Any],
        timeout_s: float | None,
        call: Sequence[str] = (),
    ) -> None:
        """Raise MismatchError on every rank unless all of them say the same.

        Or the error that one of them tells.

        Args:
            fields: what is compared; short texts.
            timeout_s: limit, None for the communicator's.
            call: the call in words, of any length: its name, then its arguments. It is
                sent, and shown, only where the ranks do not say the same.
        """
        self.compare_said(Said(fields), timeout_s, lambda: call)

    def compare_said(
        self, said: Said, timeout_s: float | None, in_words: Callable[[], Sequence[str]]
    ) -> None:
        """Compare fields whose number is known, as ``compare`` does.

        Args:
            said: what is compared.
            timeout_s: limit, None for the communicator's.
            in_words: returns the call in words. It is asked only where the ranks do
                not say the same.
        """
        # Every rank hashes the same text, whether it has kept the number or not.
        number = _native.number_of_text(b"%d %d" % (said.number, self._comm.next_seq))
        if self._are_same(number, 0, said.fields["operation"], timeout_s):
            return
        fields, call = {**said.fields}, in_words()
        if call:
            fields["in_words"] = True
        self._compare(self._exchange(fields, timeout_s), call)

    def said(self, key: Hashable, describe: Callable[[], dict[str, Any]]) -> Said:
        """Return what ``describe`` says; it is asked once for each key.

        A call whose key is None is described each time.
        """
        found = self._kept.get(key)
        if found is None:
            found = Said(describe())
            if key is not None:
                self._keep(key, found)
        return found

    def _keep(self, key: Hashable, said: Said) -> None:
        if len(self._kept) >= _MOST_KEPT:
            # All at once: where slightly more calls repeat than fit, each one would
            # else be dropped just before it comes again.
            self._kept.clear()
        self._kept[key] = said

    def with_calls(self, error: MismatchError, call: Sequence[str]) -> MismatchError:
        """Return an error that was raised on all ranks with the calls of all of them.

        Collective, where ``error`` comes from a comparison.
        """
        if not error.on_all_ranks:
            return error
        texts = self._exchanged([call_site(), *call])
        sites, calls = [text[0] for text in texts], [text[1:] for text in texts]
        lines = _by_rank(shown_calls(calls, sites))
        return self._differs("\n".join([str(error), *lines]))

    def failed(
        self, what: str, error: BaseException, timeout_s: float
    ) -> BaseException:
        """Return the error of a call whose comparison failed with ``error``."""
        if type(error) is UsageError:  # of two threads; others are ClosedError
            return self._beside_another(what)
        if not isinstance(error, TimeoutError_):
            return error
        late = self._late(what, self.channel.next_seq - 1, timeout_s)
        late.__cause__ = error
        return late

    def _limit(self, timeout_s: float | None) -> float:
        return self._comm.timeout_s if timeout_s is None else timeout_s

    def _are_same(
        self, number: int, pairs: int, what: str, timeout_s: float | None
    ) -> bool:
        """Return whether all ranks tell the same number, unless they have met."""
        if self.numbers.take_difference():
            return False
        limit = self._limit(timeout_s)
        try:
            return self.numbers.are_same(number, pairs, limit)
        except (TimeoutError_, UsageError) as error:
            raise self.failed(what, error, limit) from error

    def _numbers(self, call: Call, bound: Bound) -> tuple[int, int]:
        """Return a call's fingerprint, and this rank's part of the sum over pairs.

        They are the engine's, where it knows such calls.
        """
        comm, spec, numbers = self._comm, call.spec, self.numbers
        equal: Sequence[int] = ()
        pairs = 0
        if spec.rule_bytes != "any":
            equal = bound.counts[0] if bound.counts else ()
        elif len(bound.counts) == 2:
            pairs = numbers.pairs(comm.rank, *bound.counts)
        number = numbers.fingerprint(
            spec.code,
            bound.dtype.code if spec.x_count != "none" else NO_DTYPE,
            int(call.reduction),
            call.root if spec.has_root else 0,
            0 if bound.counts else bound.num_elements // count_unit(spec, comm.size),
            equal,
            comm.next_seq,
            _number_of_name(call.name),
            _rest_of(call, bound),
        )
        return number, pairs

    def _compare(self, said: list[dict[str, Any]], call: Sequence[str] = ()) -> None:
        """Raise MismatchError where the ranks do not say the same."""
        first = said[0]
        differing = [
            key
            for key in (*_COMPARED, "seq")
            if any(each.get(key) != first.get(key) for each in said)
        ]
        if differing:
            calls = None
            if any("in_words" in each for each in said):
                calls = self._exchanged(call)
            text = _message(self._comm.name, said, differing, calls)
            raise self._differs(text)

    def _differs(self, text: str) -> MismatchError:
        """Return the error of calls that differ, which all ranks raise."""
        faults.failed(self._comm.world, "mismatch", text)
        return _of_all(MismatchError(text))

    def _exchanged(self, mine: Sequence[str]) -> list[list[str]]:
        """Return the texts of all ranks, of whatever length."""
        text = json.dumps(list(mine)).encode()
        channel = self.channel
        limit = self._comm.timeout_s
        lengths = channel.allgather(np.array([len(text)]), timeout_s=limit)
        row = np.zeros(int(lengths.max()), np.uint8)
        row[: len(text)] = np.frombuffer(text, np.uint8)
        rows = channel.allgather(row, timeout_s=limit)
        return [json.loads(each.tobytes().rstrip(b"\0")) for each in rows]

    def _check_pairs(
        self, call: Call, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> None:
        """Raise MismatchError on every rank where a pair disagrees on its length."""
        comm = self._comm
        limit = self._limit(call.timeout_s)
        told = self.channel.alltoall(
            np.array(sent, np.int64), out=np.empty(comm.size, np.int64), timeout_s=limit
        )
        wrong = np.flatnonzero(told != np.array(received))[:1]
        mine = np.full(3, -1, np.int64)
        for source in wrong:
            mine[:] = source, told[source], received[source]
        rows = self.channel.allgather(mine, timeout_s=limit)
        for rank, (source, gives, wants) in enumerate(rows.tolist()):
            if source >= 0:
                text = (
                    f"{call.spec.name} #{comm.next_seq} on {comm.name}: rank {source} "
                    f"sends {gives} elements to rank {rank} (send_counts[{rank}]), "
                    f"which expects {wants} (recv_counts[{source}]); nothing was "
                    f"sent; both must be equal"
                )
                raise self._differs(text)

    def _exchange(
        self, fields: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        try:
            return self._said(fields, timeout_s)
        except TimeoutError_ as error:
            limit = self._limit(timeout_s)
            raise self.failed(fields["operation"], error, limit) from error

    def _said(
        self, fields: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """Return the answers of all ranks; raise the error that one of them tells."""
        rows, request = self._start(fields)
        request.wait(timeout_s=self._limit(timeout_s))
        by_rank = [_decode(row) for row in rows]
        for each in by_rank:
            if "error" in each:
                kind, told = each["error"]
                error = {"BufferError_": BufferError_}.get(kind, UsageError)(told)
                error.on_all_ranks = True
                raise error
        return by_rank

    def _start(
        self, fields: dict[str, Any]
    ) -> tuple[np.ndarray[Any, Any], _native.Request]:
        """Start to tell all ranks a call in words; return where theirs will be."""
        fields["seq"] = self._comm.next_seq
        fields["site"] = call_site()
        # Letters of any script as they are: escaped, each would take six bytes.
        said = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
        text = said.encode("utf-8", "replace")
        # New arrays each time: after a timeout the old ones are still in flight.
        mine = np.zeros(_NBYTES, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        rows = np.empty((self._comm.size, _NBYTES), np.uint8)
        request = self.channel.allgather(mine, out=rows, nonblocking=True)
        return rows, request

    def _beside_another(self, operation: str) -> UsageError:
        """Give the communicator up: two threads call at once, in any order."""
        comm = self._comm
        what = f"{operation} #{comm.next_seq} on {comm.name}"
        comm.give_up(f"two threads called at once in check mode, one of them {what}")
        error = UsageError(
            f"{what}, rank {comm.rank}: another thread of this rank is making a call "
            f"on this communicator, so the ranks' calls have no common order; give "
            f"each thread a communicator of its own, by comm.dup() (check mode: "
            f"nothing of it was sent, and the communicator cannot be used any more)"
        )
        error.on_all_ranks = True  # the others raise RevokedError, and need no word
        return error

    def _late(self, operation: str, seq: int, limit: float) -> TimeoutError_:
        """Give the communicator up: the others may go on to the operation."""
        comm = self._comm
        what = f"{operation} #{comm.next_seq} on {comm.name}"
        comm.give_up(f"check mode waited in vain before {what}")
        return comm.with_ranks(
            TimeoutError_(
                f"{what}, rank {comm.rank}: not complete within {limit:g} s: "
                f"{self.channel.who_is_missing(seq)} (check mode: nothing of it was "
                f"sent, and the communicator cannot be used any more)"
            )
        )


def _bound_exchange(channel: Channel) -> _native.PersistentCall:
    """Return an allgather of two numbers of each rank, with memory of its own."""
    mine, told = np.zeros(2, np.int64), np.zeros((channel.size, 2), np.int64)
    bound = channel.collectives.binders["allgather"](mine, out=told)
    assert isinstance(bound, _native.PersistentCall)
    return bound


def _number_of(said: Any) -> int:
    """Return a number of 64 bits of what is said."""
    return _native.number_of_text(json.dumps(said).encode())


def _number_of_name(name: str | None) -> int:
    """Return the number that the engine makes of a call's name."""
    if name is None:
        return 0
    return _native.number_of_text(name.encode("utf-8", "surrogatepass"))


def _rest_of(call: Call, bound: Bound) -> int:
    """Return a number of what the engine does not know of a call; 0 for nothing."""
    is_exchanged = call.spec.rule_bytes == "any" and call.counts[1] is None
    said = (
        *(call.backend, call.algorithm, call.compress, dict(call.params or {})),
        *(call.user and call.user.label, bound.on is not None, is_exchanged),
    )
    return _number_of(said) if any(said) else 0


def _decode(row: np.ndarray[Any, Any]) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(row.tobytes().rstrip(b"\0"))
    return decoded


def _of_all(error: MismatchError) -> MismatchError:
    """Mark an error that every rank raises, at the same comparison."""
    error.on_all_ranks = True
    return error


def _message(
    comm: str,
    said: list[dict[str, Any]],
    differing: list[str],
    calls: list[list[str]] | None = None,
) -> str:
    sites = [fields["site"] for fields in said]
    if calls is None:
        values = [
            ", ".join(f"{key}={fields.get(key)}" for key in differing)
            for fields in said
        ]
        shown = [f"{v} (at {site})" for v, site in zip(values, sites, strict=True)]
    else:
        words = [
            call or [str(fields["operation"])]
            for call, fields in zip(calls, said, strict=True)
        ]
        shown = shown_calls(words, sites)
    operations = {fields["operation"] for fields in said}
    what = operations.pop() if len(operations) == 1 else "collective"
    return (
        f"{what} #{said[0]['seq']} on {comm}: the ranks disagree on "
        f"{', '.join(differing)}; nothing was sent; let all ranks make the same call:\n"
        + "\n".join(_by_rank(shown))
    )


def _by_rank(texts: Sequence[str]) -> list[str]:
    """Return a line for each text that is there, with the ranks that say it."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in groups.items()
    ]


def shown_calls(calls: Sequence[Sequence[str]], sites: Sequence[str]) -> list[str]:
    """Return calls as text; of long ones the arguments that differ.

    Args:
        calls: by rank: the name, then the arguments.
        sites: by rank, where they were made.
    """
    if max(len(", ".join(call)) for call in calls) > _MOST_SHOWN:
        calls = _without_equal(calls)
    return [
        f"{name}({', '.join(arguments)}) at {site}"
        for (name, *arguments), site in zip(calls, sites, strict=True)
    ]


def _without_equal(calls: Sequence[Sequence[str]]) -> list[list[str]]:
    """Leave out the arguments that all ranks have at the same place."""
    most = max(len(call) for call in calls)
    differs = [
        len({call[at] if at < len(call) else None for call in calls}) > 1
        for at in range(most)
    ]
    shown = []
    for name, *arguments in calls:
        kept: list[str] = []
        for argument, differing in zip(arguments, differs[1:], strict=False):
            if differing:
                kept.append(argument)
            elif kept[-1:] != ["..."]:
                kept.append("...")
        shown.append([name, *kept])
    return shown
