# SPDX-License-Identifier: Apache-2.0
"""Reconfigure handles: texts by which ranks name each other to torch's reconfigure.

A handle names one member of one group: the group's job, the process, and the place that
the launcher gave it. It is the same for as long as the group exists, so programs may
keep those of ranks that come and go.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commrt.errors import UsageError, shown
from commrt.job.liveness import findable

__all__ = ["Handle", "in_order", "new_handle"]

_PREFIX = "commrt1:"
_HOW = "pass what dist._get_reconfigure_handle() returned on each rank"


@dataclass(frozen=True)
class Handle:
    """One member of one group."""

    job: str
    """Names the group; its members agree on it in their store."""
    member: str
    """Names the member; nobody else has it."""
    place: int
    """Rank that ``init_process_group`` or ``new_group`` was given."""
    machine: str
    """Names the machine."""
    process: str
    """The process there, by number and start."""
    space: str
    """Its space of process numbers."""
    host: str
    """Name of the machine, for messages."""

    def text(self) -> str:
        """Return it as programs pass it."""
        blob = json.dumps(asdict(self), sort_keys=True).encode()
        return _PREFIX + base64.urlsafe_b64encode(blob).decode()

    @classmethod
    def of(cls, text: str, where: str) -> Handle:
        """Return the one in a text; UsageError that says ``where`` it stands."""
        try:
            if not text.startswith(_PREFIX):
                raise ValueError
            blob = base64.b64decode(text[len(_PREFIX) :], "-_", validate=True)
            said = json.loads(blob)
            made = cls(**said)
            if not all(type(said[key]) is kind for key, kind in _KINDS.items()):
                raise ValueError
        except (ValueError, TypeError, binascii.Error):
            raise UsageError(
                f"reconfigure: {where} is {shown(text)}, which is no handle of commrt: "
                f"{_HOW}"
            ) from None
        return made

    @property
    def name(self) -> str:
        """What messages call its member."""
        pid = self.process.partition("-")[0]
        return f"process {pid} on {self.host} (rank {self.place} at the start)"

    def known(self) -> dict[str, str]:
        """Return how ranks of its machine can find the process."""
        said = asdict(self)
        return {key: said[key] for key in ("machine", "process", "space", "host")}


_KINDS = {key: int if key == "place" else str for key in Handle.__annotations__}


def new_handle(job: str, place: int) -> Handle:
    """Return a handle of this process."""
    return Handle(job=job, member=secrets.token_hex(8), place=place, **findable())


def in_order(given: Any, own: Handle) -> list[Handle]:
    """Return the members that handles name, by their new ranks; checked.

    A list gives the ranks by position. Of a set, the members of one machine come
    together, in the order of their places: all ranks find the same.
    """
    texts: Sequence[str] = list(given) if isinstance(given, Iterable) else []
    if not texts:
        raise UsageError(
            f"reconfigure: handles={shown(given)} must have at least one: {_HOW}"
        )
    is_set = isinstance(given, set | frozenset)
    found: list[Handle] = []
    for i, text in enumerate(texts):
        found.append(Handle.of(text, "a handle" if is_set else f"handles[{i}]"))
    for i, one in enumerate(found):
        if one.job != own.job:
            where = "a handle" if is_set else f"handles[{i}]"
            raise UsageError(
                f"reconfigure: {where} is that of {one.name}, of another job or "
                f"another group: the ranks of one reconfiguration share a store, and "
                f"the group has the same name on all of them"
            )
        first = next(j for j, other in enumerate(found) if other.member == one.member)
        if first != i:
            raise UsageError(
                f"reconfigure: handles[{first}] and handles[{i}] are equal, that of "
                f"{one.name}: each rank stands in the list once"
            )
    if own not in found:
        raise UsageError(
            f"reconfigure: this rank's own handle, that of {own.name}, is missing "
            f"among the {len(found)} given: a rank that is left out does not call"
        )
    return _by_machine(found) if is_set else found


def _by_machine(members: Sequence[Handle]) -> list[Handle]:
    first: dict[str, tuple[int, str]] = {}
    for one in sorted(members, key=lambda one: (one.place, one.member)):
        first.setdefault(one.machine, (one.place, one.member))
    return sorted(members, key=lambda one: (first[one.machine], one.place, one.member))
