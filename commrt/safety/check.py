# SPDX-License-Identifier: Apache-2.0
"""Check mode: compare every collective across ranks before its data moves.

Each rank describes its call; an internal allgather of fixed size, the same whatever was
called, shows every rank all descriptions. Where they differ, every rank raises the same
MismatchError, and nothing of the operation has been sent.
"""

from __future__ import annotations

import json
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import env
from commrt.errors import MismatchError

if TYPE_CHECKING:
    from commrt.calls import Bound, Call
    from commrt.comm import Communicator

__all__ = ["Checker", "describe"]

_NBYTES = 384
_COMPARED = ("operation", "elements", "dtype", "op", "root", "algorithm", "name", "table")


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
        "algorithm": json.dumps(asked) if any(asked) else None,
        "name": call.name,
        "table": None if table is None else table[:12],
    }


class Checker:
    """Compares calls of one communicator, through a duplicate of its own."""

    def __init__(self, comm: Communicator, *, call_sites: bool) -> None:
        self._comm = comm
        self._call_sites = call_sites
        self._mine = np.zeros(_NBYTES, np.uint8)
        self._all = np.zeros((comm.size, _NBYTES), np.uint8)
        self._seq = 0

    @classmethod
    def from_environment(cls, comm: Communicator) -> Checker | None:
        """Return the checker that COMMRT_DEBUG asks for, or None."""
        mode = env.read_str("COMMRT_DEBUG")
        if mode == "off" or comm.size == 1:
            return None
        return cls(comm, call_sites=True)

    def check(self, call: Call, bound: Bound) -> None:
        """Raise MismatchError on every rank unless all of them make the same call."""
        fields = describe(call, bound, self._comm.table_digest)
        fields["seq"] = self._seq
        fields["site"] = _call_site() if self._call_sites else ""
        self._seq += 1
        self._exchange(fields)
        said = [_decode(row) for row in self._all]
        first = said[0]
        differing = [
            key for key in (*_COMPARED, "seq") if any(s.get(key) != first.get(key) for s in said)
        ]
        if differing:
            raise MismatchError(_message(self._comm.name, said, differing))

    def _exchange(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, separators=(",", ":")).encode()
        if len(text) > _NBYTES:
            fields["site"] = fields["site"][-40:]
            fields["name"] = fields["name"] and fields["name"][:60]
            fields["algorithm"] = fields["algorithm"] and fields["algorithm"][:60]
            text = json.dumps(fields, separators=(",", ":")).encode()
        self._mine[:] = 0
        self._mine[: len(text)] = np.frombuffer(text, np.uint8)
        self._comm._gather_for_check(self._mine, self._all)


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
    for frame in reversed(traceback.extract_stack(limit=12)):
        if "/commrt/" not in frame.filename:
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "?"
