# SPDX-License-Identifier: Apache-2.0
"""The faults that COMMRT_CHAOS asks for: ``7:fail@rank=1,op=allreduce,number=100``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from commrt.errors import suggest
from commrt.vocabulary.limits import NO_LIMIT_S, parse_seconds
from commrt.vocabulary.operations import ROWS

__all__ = ["CODES", "KINDS", "Chaos", "Fault", "parse_chaos"]

KINDS = ("fail", "delay", "drop", "duplicate", "corrupt", "kill", "stop")
"""What may happen to an operation, in the engine's order (native/engine/chaos.hpp)."""

CODES: dict[str, int] = {
    **{row.name: row.code for row in ROWS if row.code >= 0},
    "send": 64,
    "recv": 65,
}
"""The engine's code of each operation that a fault may be for."""

DRAWN = (
    "delay=0.05@chance=0.01;fail@chance=0.0005;drop@chance=0.0002;kill@chance=0.0001"
)
"""The faults of a seed alone: late ranks, failing calls, lost messages, dead ranks."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and the operations that it is injected into."""

    kind: str
    """One of ``KINDS``."""
    text: str
    """As the user wrote it."""
    seconds: float = 0.0
    """How late a delayed operation starts."""
    ranks: tuple[int, ...] = ()
    """Ranks of the job; empty: all of them."""
    ops: tuple[str, ...] = ()
    """Names of operations; empty: all of them."""
    number: int = 0
    """Which of these operations of a rank, counted from 1; 0: not said."""
    every: int = 0
    """Every so many of them; 0: not said."""
    chance: float = 0.0
    """The chance of each of them; 0: not said."""
    most: int = 0
    """Most faults on a rank; 0: any number."""


@dataclass(frozen=True)
class Chaos:
    """What COMMRT_CHAOS says."""

    seed: int
    faults: tuple[Fault, ...]


@dataclass
class _Conditions:
    """The conditions of a fault as they are read."""

    found: dict[str, Any] = field(default_factory=dict)

    def add(self, text: str) -> None:
        name, equals, value = (part.strip() for part in text.partition("="))
        if name not in _CONDITIONS:
            raise ValueError(f"unknown condition {name!r}{suggest(name, _CONDITIONS)}")
        if not equals or not value:
            raise ValueError(f"{name} needs a value, as in {_EXAMPLES[name]}")
        attribute, read = _CONDITIONS[name]
        if attribute in self.found:
            raise ValueError(f"{name} is said twice")
        try:
            self.found[attribute] = read(value)
        except ValueError as error:
            raise ValueError(f"{name}={value}: {error}") from None


def parse_chaos(text: str) -> Chaos:
    """Return what a value of COMMRT_CHAOS asks for; ValueError with the reason."""
    seed, colon, faults = text.partition(":")
    if not seed.strip().isdecimal() or int(seed) >= 2**64:
        raise ValueError(
            f"begins with {seed.strip()!r}, and must begin with a seed, a whole number "
            f"below 2**64, and ':' before the faults"
        )
    if not colon:
        faults = DRAWN
    said = [part.strip() for part in faults.split(";") if part.strip()]
    if not said:
        raise ValueError(
            "has no fault behind the ':'; leave the ':' out to draw faults"
        )
    return Chaos(int(seed), tuple(_fault(part) for part in said))


def _fault(text: str) -> Fault:
    """Return one fault: ``KIND@CONDITION,CONDITION``, or ``delay=SECONDS@...``."""
    what, _, where = text.partition("@")
    kind, equals, amount = (part.strip() for part in what.partition("="))
    if kind not in KINDS:
        raise ValueError(f"unknown fault {kind!r}{suggest(kind, KINDS)}")
    seconds = 0.0
    if kind == "delay":
        if not equals:
            raise ValueError("delay needs seconds, as in delay=0.5")
        seconds = parse_seconds(amount)
        if seconds >= NO_LIMIT_S:
            raise ValueError("delay=inf would never end; write drop")
    elif equals:
        raise ValueError(f"{kind} takes no value: write {kind}@... ")
    conditions = _Conditions()
    for part in where.split(","):
        if part.strip():
            conditions.add(part)
    found = conditions.found
    picks = [name for name in ("number", "every", "chance") if name in found]
    if len(picks) > 1:
        raise ValueError(f"{text!r}: say only one of {' and '.join(picks)}")
    if not picks:
        found["number"] = 1
    return Fault(kind, text, seconds, **found)


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise ValueError("must be a whole number above 0")
    return int(text)


def _chance(text: str) -> float:
    try:
        chance = float(text)
    except ValueError:
        chance = -1.0
    if not 0 < chance <= 1:
        raise ValueError("must be a number above 0, at most 1")
    return chance


def _ranks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split("+")]
    if not all(part.isdecimal() and int(part) < 2**31 for part in parts):
        raise ValueError("must be a rank of the job, or several as in 1+3")
    return tuple(map(int, parts))


def _ops(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split("+"))
    for part in parts:
        if part not in CODES:
            raise ValueError(f"no such operation as {part!r}{suggest(part, CODES)}")
    return parts


_CONDITIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "rank": ("ranks", _ranks),
    "op": ("ops", _ops),
    "number": ("number", _whole),
    "every": ("every", _whole),
    "chance": ("chance", _chance),
    "most": ("most", _whole),
}
_EXAMPLES = {
    "rank": "rank=1 or rank=1+3",
    "op": "op=allreduce or op=send+recv",
    "number": "number=100",
    "every": "every=50",
    "chance": "chance=0.01",
    "most": "most=3",
}
