# SPDX-License-Identifier: Apache-2.0
"""Check mode: compare every collective across ranks before its data moves.

Each rank describes its call; an internal allgather of fixed size, the same whatever was
called, shows every rank all descriptions. Where they differ, every rank raises the same
MismatchError, and nothing of the operation has been sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import env
from commrt.errors import (
    BufferError_,
    MismatchError,
    TimeoutError_,
    UsageError,
)

if TYPE_CHECKING:
    from commrt.calls import Bound, Call
    from commrt.comm import Communicator

__all__ = ["Checker", "describe"]

_NBYTES = 640
_TEXT_NBYTES = 96
_ERROR_LENGTH = 300
_COMPARED = (
    "operation",
    "elements",
    "counts",
    "dtype",
    "memory",
    "op",
    "root",
    "algorithm",
    "compress",
    "result",
    "k",
    "name",
    "table",
)
_PACKAGE = str(Path(__file__).parents[1]) + "/"


def describe(call: Call, bound: Bound, table: str | None) -> dict[str, Any]:
    """Return the fields of a call that must be equal on all ranks."""
    spec = call.spec
    asked = [call.backend, call.algorithm, dict(call.params or {})]
    # The field is there where it says something: a message has little room.
    on_device = {} if bound.on is None else {"memory": "device"}
    return {
        **on_device,
        "operation": spec.name,
        # Of an alltoallv a rank's own; its counts are compared pair by pair.
        "elements": None if spec.rule_bytes == "any" else bound.num_elements,
        "counts": _counts(call, bound),
        "dtype": bound.dtype.name,
        "op": None if call.op is None else _shortened(call.op),
        "root": call.root if spec.has_root else None,
        "algorithm": _shortened(json.dumps(asked)) if any(asked) else None,
        "compress": call.compress,
        "name": None if call.name is None else _shortened(call.name),
        "table": None if table is None else table[:12],
    }


def _counts(call: Call, bound: Bound) -> str | None:
    """Return what the ranks must agree on of the counts."""
    if call.spec.rule_bytes == "any":
        return "recv_counts exchanged" if call.counts[1] is None else "all given"
    if not bound.counts:
        return None
    return _shortened(" ".join(map(str, bound.counts[0])))


def _shortened(text: str) -> str:
    """Return ``text``, or its beginning and a digest where it is long as JSON."""
    if len(json.dumps(text)) <= _TEXT_NBYTES:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{text[:8]}...{digest}"


class Checker:
    """Compares calls of one communicator, over another one of the same ranks."""

    def __init__(self, comm: Communicator, channel: Communicator) -> None:
        self._comm = comm
        self.channel = channel
        """Another communicator of the same ranks."""

    @staticmethod
    def is_wanted() -> bool:
        """Return whether COMMRT_DEBUG asks for checks."""
        return env.read_str("COMMRT_DEBUG") != "off"

    def close(self) -> None:
        """Free the communicator that the comparisons go over."""
        self.channel.free()

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one."""
        self.channel._set_failure(why)

    def check(self, call: Call, bound: Bound) -> None:
        """Raise MismatchError on every rank unless all of them make the same call."""
        fields = describe(call, bound, self._comm.table_digest)
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
        told = [kind, f"{text} (check mode: nothing was sent)"]
        try:
            self._said({"operation": what, "error": told}, timeout_s)
        except TimeoutError_:
            raise error from None

    def compare(self, fields: dict[str, Any], timeout_s: float | None) -> None:
        """Raise MismatchError on every rank unless all of them say the same.

        Or the error that one of them tells.
        """
        self._compare(self._exchange(fields, timeout_s))

    def _compare(self, said: list[dict[str, Any]]) -> None:
        """Raise MismatchError where the ranks do not say the same."""
        first = said[0]
        differing = [
            key
            for key in (*_COMPARED, "seq")
            if any(each.get(key) != first.get(key) for each in said)
        ]
        if differing:
            raise MismatchError(_message(self._comm.name, said, differing))

    def _check_pairs(
        self, call: Call, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> None:
        """Raise MismatchError on every rank where a pair disagrees on its length."""
        comm = self._comm
        limit = comm.timeout_s if call.timeout_s is None else call.timeout_s
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
                raise MismatchError(
                    f"{call.spec.name} #{comm.next_seq} on {comm.name}: rank {source} "
                    f"sends {gives} elements to rank {rank} (send_counts[{rank}]), "
                    f"which expects {wants} (recv_counts[{source}]); nothing was sent"
                )

    def _exchange(
        self, fields: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        seq = self.channel.next_seq
        try:
            return self._said(fields, timeout_s)
        except TimeoutError_ as error:
            limit = self._comm.timeout_s if timeout_s is None else timeout_s
            raise self._late(fields, seq, limit) from error

    def _said(
        self, fields: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """Return what all ranks say; raise what one of them tells."""
        fields["seq"] = self._comm.next_seq
        fields["site"] = _call_site()
        text = json.dumps(fields, separators=(",", ":")).encode()
        # New arrays each time: after a timeout the old ones are still in flight.
        mine = np.zeros(_NBYTES, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        rows = np.empty((self._comm.size, _NBYTES), np.uint8)
        limit = self._comm.timeout_s if timeout_s is None else timeout_s
        self.channel.allgather(mine, out=rows, timeout_s=limit)
        said = [_decode(row) for row in rows]
        for each in said:
            if "error" in each:
                kind, told = each["error"]
                error = {"BufferError_": BufferError_}.get(kind, UsageError)(told)
                error.is_told = True  # type: ignore[attr-defined]
                raise error
        return said

    def _late(self, fields: dict[str, Any], seq: int, limit: float) -> TimeoutError_:
        """Give the communicator up: the others may go on to the operation."""
        comm = self._comm
        what = f"{fields['operation']} #{fields['seq']} on {comm.name}"
        comm.give_up(f"check mode waited in vain before {what}")
        return TimeoutError_(
            f"{what}, rank {comm.rank}: not complete within {limit:g} s: "
            f"{self.channel.who_is_missing(seq)} (check mode: nothing of it was sent, "
            f"and the communicator cannot be used any more)"
        )


def _decode(row: np.ndarray[Any, Any]) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(row.tobytes().rstrip(b"\0"))
    return decoded


def _message(comm: str, said: list[dict[str, Any]], differing: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, fields in enumerate(said):
        values = ", ".join(f"{key}={fields.get(key)}" for key in differing)
        groups.setdefault(f"{values} (at {fields['site']})", []).append(rank)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {values}"
        for values, ranks in groups.items()
    ]
    operations = {fields["operation"] for fields in said}
    what = operations.pop() if len(operations) == 1 else "collective"
    return (
        f"{what} #{said[0]['seq']} on {comm}: the ranks disagree on "
        f"{', '.join(differing)}; nothing was sent:\n" + "\n".join(lines)
    )


def _call_site() -> str:
    """Return file and line of the innermost frame outside commrt.

    And outside torch.distributed, where calls of its process groups come from.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    between = [] if torch is None else [f"{os.path.dirname(torch)}/distributed/"]
    passed = (_PACKAGE, *between)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name[-40:]}:{frame.f_lineno}"
