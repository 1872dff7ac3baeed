# SPDX-License-Identifier: Apache-2.0
"""The data types of a schedule: spaces of blocks, steps on them, programs, goals.

A *schedule* says what every rank does in one collective operation. It knows blocks,
never bytes: block boundaries are computed from the element count when it is run, so one
schedule serves every message length.

    Schedule ── one RankProgram per rank ── spaces (in, out, tmp) of blocks
                                        └── steps (send, recv, rred, red, copy)

Serial form: canonical JSON (sorted keys, no blanks); ``digest()`` is its sha256.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from commrt import _native
from commrt.errors import ScheduleError
from commrt.vocabulary.operations import operation

__all__ = [
    "VERSION",
    "Op",
    "ParamValue",
    "RankProgram",
    "RedopClass",
    "Schedule",
    "Slice",
    "Space",
    "SpaceKind",
    "Step",
    "StepTable",
    "full_multiple",
]

VERSION = 1
"""Version of the serial form."""

ParamValue = int | str
"""Value of an algorithm's parameter."""
RedopClass = Literal["commutative", "ordered", "none"]
SpaceKind = Literal["in", "out", "tmp"]
Split = Literal["even", "counts", "boxes", "dyn"]


class Op(IntEnum):
    """The kinds of steps. Their numbers are part of the serial form."""

    SEND = 0
    """Send ``src`` to ``peer``."""
    RECV = 1
    """Receive into ``dst`` from ``peer``."""
    RRED = 2
    """``dst = src ⊕ received``; the operand of the lower rank comes first."""
    RED = 3
    """``dst = dst ⊕ src``."""
    COPY = 4
    """``dst = src``."""


class Slice(NamedTuple):
    """Blocks ``[lo, hi)`` of one space."""

    space: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Space:
    """One buffer of one rank, addressed by block."""

    name: str
    """``in``, ``out``, ``tmp0``, ``tmp1``…"""
    kind: SpaceKind
    """Spaces of memory: the caller's (``in``, ``out``) and the executor's (``tmp``)."""
    nblk: int
    """Number of blocks; 0 where this rank has no such buffer."""
    scale: tuple[int, int] = (1, 1)
    """Total length as a fraction (num, den) of the operation's full vector."""
    split: Split = "even"
    """``even``: block i is ``[i*T//nblk, (i+1)*T//nblk)``. ``counts``: block i has
    ``counts[i]`` elements. ``dyn``: at most ``cap[i]``, known at run time. ``boxes``:
    sub-boxes of an n-dimensional array."""
    counts: tuple[int, ...] | None = None
    """Elements per block of a ``counts`` space."""
    cap: tuple[int, ...] | None = None
    """Upper bound per block of a ``dyn`` space."""
    boxes: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """(start, stop) per dimension and block of a ``boxes`` space."""
    alias: str | None = None
    """The space that may be the same memory (``out`` of an in-place operation)."""

    def __post_init__(self) -> None:
        per_block = {"counts": self.counts, "dyn": self.cap, "boxes": self.boxes}
        for split, values in per_block.items():
            given = None if values is None else len(values)
            expected = self.nblk if self.split == split else None
            if given != expected:
                raise ScheduleError(
                    f"space {self.name!r} with split={self.split!r}, nblk={self.nblk} "
                    f"must have {'no' if expected is None else expected} {split}"
                )
        if self.nblk < 0 or self.scale[0] < 0 or self.scale[1] < 1:
            raise ScheduleError(
                f"space {self.name!r}: nblk={self.nblk}, scale={self.scale} are "
                f"invalid; expected nblk from 0, and a fraction (numerator from 0, "
                f"denominator from 1)"
            )

    def bounds(self, num_elements: int) -> list[int]:
        """Return the nblk+1 block boundaries, in elements.

        Args:
            num_elements: length of the operation's full vector.
        """
        if self.split == "even":
            total = num_elements * self.scale[0] // self.scale[1]
            return [i * total // max(self.nblk, 1) for i in range(self.nblk + 1)]
        sizes = self.counts if self.split == "counts" else self.cap
        if sizes is None:
            raise ScheduleError(
                f"space {self.name!r}: {self.split!r} blocks are not contiguous"
            )
        edges = [0]
        for size in sizes:
            edges.append(edges[-1] + size)
        return edges

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: only the fields that differ from their defaults."""
        data: dict[str, Any] = {"name": self.name, "kind": self.kind, "nblk": self.nblk}
        data["scale"] = list(self.scale)
        for key in ("split", "counts", "cap", "boxes", "alias"):
            value = getattr(self, key)
            if value is not None and value != "even":
                data[key] = value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Space:
        """Build a space from its JSON form."""
        fields = dict(data)
        fields["scale"] = tuple(fields["scale"])
        for key in ("counts", "cap"):
            if fields.get(key) is not None:
                fields[key] = tuple(fields[key])
        if fields.get("boxes") is not None:
            fields["boxes"] = tuple(
                tuple((a, b) for a, b in box) for box in fields["boxes"]
            )
        return cls(**fields)


class Step(NamedTuple):
    """One step of one rank."""

    op: Op
    src: Slice | None
    dst: Slice | None
    peer: int
    """Rank at the other end, or -1."""
    deps: tuple[int, ...]
    """Earlier steps of this rank that must be done first."""
    after: tuple[int, ...] = ()
    """The part of ``deps`` that the author asked for; data demands the rest."""


_OPS = tuple(Op)


class StepTable(Sequence[Step]):
    """The steps of a rank, stored in columns; indexing yields ``Step``."""

    __slots__ = ("columns",)

    def __init__(self) -> None:
        self.columns = _native.StepColumns()
        """The engine's form."""

    def append(self, step: Step) -> int:
        """Add a step and return its index."""
        return self.columns.append(*step)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        op, src, dst, peer, deps, after = self.columns.row(index)
        return Step(
            _OPS[op],
            None if src is None else Slice(*src),
            None if dst is None else Slice(*dst),
            peer,
            deps,
            after,
        )

    def __iter__(self) -> Iterator[Step]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass
class RankProgram:
    """The program of one rank: its steps in order."""

    rank: int
    spaces: tuple[Space, ...]
    steps: StepTable = field(default_factory=StepTable)

    def describe(self, where: Slice) -> str:
        """Return ``out[3]`` or ``tmp0[0:4]`` for messages."""
        if not 0 <= where.space < len(self.spaces):
            return f"space{where.space}[{where.lo}:{where.hi}]"
        name = self.spaces[where.space].name
        span = f"{where.lo}" if where.hi == where.lo + 1 else f"{where.lo}:{where.hi}"
        return f"{name}[{span}]"

    def describe_step(self, index: int) -> str:
        """Return ``rank 1 step 4 (send out[2] to 3)`` for messages."""
        step = self.steps[index]
        text = step.op.name.lower()
        if step.op is Op.SEND:
            text += f" {self.describe(step.src)} to {step.peer}"
        elif step.peer >= 0:
            text += f" {self.describe(step.dst)} from {step.peer}"
        else:
            text += f" {self.describe(step.dst)} from {self.describe(step.src)}"
        return f"rank {self.rank} step {index} ({text})"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "rank": self.rank,
            "spaces": [space.to_dict() for space in self.spaces],
            "steps": [list(step) for step in self.steps],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankProgram:
        """Build a program from its JSON form."""
        program = cls(data["rank"], tuple(map(Space.from_dict, data["spaces"])))
        for op, src, dst, peer, deps, after in data["steps"]:
            ends = [None if end is None else Slice(*end) for end in (src, dst)]
            program.steps.append(
                Step(Op(op), ends[0], ends[1], peer, tuple(deps), tuple(after))
            )
        return program

    def to_json(self) -> str:
        """Return the canonical JSON text."""
        return _canonical(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> RankProgram:
        """Build a program from its JSON text."""
        return cls.from_dict(json.loads(text))

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(eq=False)
class Schedule:
    """The programs of all ranks. Each is made when first asked for, and kept."""

    coll: str
    algorithm: str
    size: int
    root: int
    make_program: Callable[[int], RankProgram]
    """Return the program of a rank; called once per rank."""
    params: dict[str, ParamValue] = field(default_factory=dict)
    redop_class: RedopClass = "commutative"
    """``ordered``: contributions must also be combined in rank order."""
    nodes: tuple[int, ...] | None = None
    """The number of the node of each rank, where the algorithm asks for it."""
    divisor: int = 1
    """A number of elements of which every full vector's length is a multiple. 1: the
    schedule is for all lengths that the operation has."""
    _programs: dict[int, RankProgram] = field(default_factory=dict, repr=False)

    def program(self, rank: int) -> RankProgram:
        """Return the program of ``rank``."""
        if rank not in self._programs:
            self._programs[rank] = self.make_program(rank)
        return self._programs[rank]

    @property
    def length_unit(self) -> int:
        """The least length above 0 of the full vector: all others are multiples."""
        return math.lcm(self.divisor, full_multiple(self.coll, self.size))

    def programs(self) -> list[RankProgram]:
        """Return the programs of all ranks, in rank order."""
        return [self.program(rank) for rank in range(self.size)]

    def forget_programs(self) -> None:
        """Free the memory of all programs; they are made again when asked for."""
        self._programs.clear()

    def to_json(self) -> str:
        """Return the canonical JSON text, with the programs of all ranks."""
        where = {} if self.nodes is None else {"nodes": self.nodes}
        lengths = {} if self.divisor == 1 else {"divisor": self.divisor}
        return _canonical(
            {
                **where,
                **lengths,
                "version": VERSION,
                "coll": self.coll,
                "algorithm": self.algorithm,
                "size": self.size,
                "root": self.root,
                "params": self.params,
                "redop_class": self.redop_class,
                "programs": [program.to_dict() for program in self.programs()],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Build a schedule from its JSON text, or raise ScheduleError."""
        try:
            data = json.loads(text)
            version = data.pop("version")
            if version != VERSION:
                raise ScheduleError(
                    f"schedule version {version}, expected {VERSION}: another commrt "
                    f"wrote it, so let this one write it again"
                )
            programs = [RankProgram.from_dict(entry) for entry in data.pop("programs")]
            nodes = data.pop("nodes", None)
            nodes = None if nodes is None else tuple(nodes)
            return cls(make_program=programs.__getitem__, nodes=nodes, **data)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            if isinstance(exc, ScheduleError):
                raise
            raise ScheduleError(
                f"not a schedule: {type(exc).__name__}: {exc}; expected the text that "
                f"Schedule.to_json() returns"
            ) from exc

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def full_multiple(coll: str, size: int) -> int:
    """Return a divisor that the full vector's length always has: ``size`` or 1."""
    return size if operation(coll).is_blocked else 1


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))
