# SPDX-License-Identifier: Apache-2.0
"""Check mode: compare every collective across ranks before its data moves.

Each rank describes its call; an internal allgather of fixed size, the same whatever was
called, shows every rank all descriptions. Where they differ, every rank raises the same
MismatchError, and nothing of the operation has been sent.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import env
from commrt.errors import MismatchError, TimeoutError_, UsageError

if TYPE_CHECKING:
    from commrt.calls import Bound, Call
    from commrt.comm import Communicator

__all__ = ["Checker", "describe"]

_NBYTES = 640
_TEXT_NBYTES = 96
_ERROR_CHARS = 240
_COMPARED = (
    "operation",
    "elements",
    "dtype",
    "op",
    "root",
    "algorithm",
    "name",
    "table",
)
_PACKAGE = str(Path(__file__).parents[1]) + "/"


def describe(call: Call, bound: Bound, table: str | None) -> dict[str, Any]:
    """Return the fields of a call that must be equal on all ranks."""
    spec = call.spec
    asked = [call.backend, call.algorithm, dict(call.params or {})]
    return {
        "operation": spec.name,
        "elements": bound.num_elements,
        "dtype": bound.dtype.name,
        "op": call.reduction.name.lower() if spec.reduces else None,
        "root": call.root if spec.has_root else None,
        "algorithm": _shortened(json.dumps(asked)) if any(asked) else None,
        "name": None if call.name is None else _shortened(call.name),
        "table": None if table is None else table[:12],
    }


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
        self._channel = channel

    @staticmethod
    def is_wanted() -> bool:
        """Return whether COMMRT_DEBUG asks for checks."""
        return env.read_str("COMMRT_DEBUG") != "off"

    def close(self) -> None:
        """Free the communicator that the comparisons go over."""
        self._channel.free()

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one."""
        self._channel._set_failure(why)

    def check(self, call: Call, bound: Bound) -> None:
        """Raise MismatchError on every rank unless all of them make the same call."""
        self._compare(describe(call, bound, self._comm.table_digest), call.timeout_s)

    def compare_with_errors(
        self, fields: dict[str, Any], error: str, timeout_s: float | None
    ) -> None:
        """Compare a call whose arguments may be wrong on some ranks: ``error`` says so.

        Then every rank raises the same UsageError.
        """
        if error:
            fields = {**fields, "error": error[:_ERROR_CHARS]}
        said = self._compare(fields, timeout_s)
        found = [
            (rank, each["error"]) for rank, each in enumerate(said) if "error" in each
        ]
        if found:
            lines = [f"rank {rank}: {text}" for rank, text in found]
            raise UsageError("; ".join(lines) + " (check mode: nothing was sent)")

    def _compare(
        self, fields: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """Return what every rank said; MismatchError where they do not say the same."""
        fields["seq"] = self._comm.next_seq
        fields["site"] = _call_site()
        said = self._exchange(fields, timeout_s)
        first = said[0]
        wrong = any("error" in each for each in said)
        differing = [
            key
            for key in (("operation",) if wrong else (*_COMPARED, "seq"))
            if any(each.get(key) != first.get(key) for each in said)
        ]
        if differing:
            raise MismatchError(_message(self._comm.name, said, differing))
        return said

    def _exchange(
        self, fields: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        text = json.dumps(fields, separators=(",", ":")).encode()
        # New arrays each time: after a timeout the old ones are still in flight.
        mine = np.zeros(_NBYTES, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        rows = np.empty((self._comm.size, _NBYTES), np.uint8)
        limit = self._comm.timeout_s if timeout_s is None else timeout_s
        seq = self._channel.next_seq
        try:
            self._channel.allgather(mine, out=rows, timeout_s=limit)
        except TimeoutError_ as error:
            raise self._late(fields, seq, limit) from error
        return [_decode(row) for row in rows]

    def _late(self, fields: dict[str, Any], seq: int, limit: float) -> TimeoutError_:
        """Give the communicator up: the others may go on to the operation."""
        comm = self._comm
        what = f"{fields['operation']} #{fields['seq']} on {comm.name}"
        comm.give_up(f"check mode waited in vain before {what}")
        return TimeoutError_(
            f"{what}, rank {comm.rank}: not complete within {limit:g} s: "
            f"{self._channel.who_is_missing(seq)} (check mode: nothing of it was sent, "
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
    """Return file and line of the innermost frame outside commrt."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name[-40:]}:{frame.f_lineno}"
