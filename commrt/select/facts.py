# SPDX-License-Identifier: Apache-2.0
"""The words of selection: facts of a communicator, a query, a candidate, a choice.

Every field of CommFacts and Query is equal on all ranks. Facts of one rank (in place,
alignment, symmetric memory) never select: two ranks that chose differently would
deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from commrt.errors import UsageError, shown
from commrt.schedule.order import Order
from commrt.select.network import Network
from commrt.vocabulary.wire_formats import COMPRESS

__all__ = [
    "LINK_CLASSES",
    "Candidate",
    "Choice",
    "CommFacts",
    "LinkClass",
    "ParamValue",
    "Query",
    "Source",
    "without_compression",
]

LinkClass = Literal["near", "far", "oversubscribed", "network", "single"]
LINK_CLASSES: tuple[LinkClass, ...] = get_args(LinkClass)
Source = Literal["call", "group", "override", "table", "model", "only"]
ParamValue = int | str

_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_CANDIDATE = re.compile(rf"({_NAME})/({_NAME})(?:\{{(.*)\}})?")
_PARAM = re.compile(rf"({_NAME})=(.+)")
_INT = re.compile(r"-?(0|[1-9][0-9]{0,18})")


@dataclass(frozen=True)
class CommFacts:
    """Facts of a communicator that selection uses; equal on all of its ranks."""

    size: int
    """Ranks."""
    nodes: int
    """Nodes that the ranks lie on."""
    ppn: int
    """Ranks on the fullest node."""
    cores: float
    """Cores available to the ranks of the poorest node: a whole number, or a part of
    one where nodes are containers of one machine."""
    link_class: LinkClass
    """Distance of the ranks, agreed as that of the worst pair."""
    layout: tuple[int, ...] = ()
    """The number of the node of each rank; by itself, as many on each as there can be,
    one node after the other."""
    network: Network | None = None
    """The network between its nodes; None on one node, and before it was measured."""

    @property
    def crowd(self) -> float:
        """Ranks that share a core, 1 where each has one."""
        return max(1.0, self.ppn / self.cores)

    def __post_init__(self) -> None:
        per_node = -(-self.size // self.nodes)
        numbers = self.layout or (rank // per_node for rank in range(self.size))
        object.__setattr__(self, "layout", tuple(numbers))


@dataclass(frozen=True)
class Query:
    """One operation to choose an algorithm for; equal on all ranks."""

    coll: str
    """Operation."""
    nbytes: int
    """Bytes that select a rule, as ``operations.rule_nbytes`` defines them."""
    dtype: str = "float32"
    """Element type."""
    device: str = "host"
    """Kind of memory: host or cuda."""
    op: str | None = None
    """Reduction, where the operation has one."""
    root: int | None = None
    """Root, where the operation has one."""
    order: Order = "any"
    """Order in which the reduction's operands must meet (schedule/order.py)."""

    def __str__(self) -> str:
        extra = "".join(
            f", {name}={value}"
            for name, value in (("op", self.op), ("root", self.root))
            if value is not None
        )
        if self.order != "any":
            extra += f", order={self.order}"
        return f"{self.coll}({self.nbytes} B, {self.dtype}, {self.device}{extra})"


@dataclass(frozen=True)
class Candidate:
    """One way to run an operation, written ``shm/ring{chunk=131072,store=stream}``."""

    backend: str
    """Name of the backend."""
    algorithm: str
    """Name of the schedule, or ``native``."""
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    """Parameters of the algorithm and of the transport, sorted by name, read-only."""

    def __post_init__(self) -> None:
        ordered = {name: self.params[name] for name in sorted(self.params)}
        object.__setattr__(self, "params", MappingProxyType(ordered))

    def __hash__(self) -> int:
        return hash((self.backend, self.algorithm, tuple(self.params.items())))

    def __reduce__(
        self,
    ) -> tuple[type[Candidate], tuple[str, str, dict[str, ParamValue]]]:
        return Candidate, (self.backend, self.algorithm, dict(self.params))

    @property
    def name(self) -> str:
        """``backend/algorithm`` without parameters."""
        return f"{self.backend}/{self.algorithm}"

    @property
    def has_two_levels(self) -> bool:
        """True if it works inside nodes first and then among them."""
        return self.algorithm == "two_level"

    def __str__(self) -> str:
        if not self.params:
            return self.name
        params = ",".join(f"{name}={value}" for name, value in self.params.items())
        return f"{self.name}{{{params}}}"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Return the candidate written as ``text``; UsageError if it is not one."""
        found = _CANDIDATE.fullmatch(text.strip())
        if found is None:
            raise UsageError(
                f"{shown(text.strip())} is not a candidate: write BACKEND/ALGORITHM or "
                f"BACKEND/ALGORITHM{{NAME=VALUE,...}}, as in shm/ring{{chunk=131072}}"
            )
        backend, algorithm, params = found.groups()
        return cls(backend, algorithm, _parse_params(params or "", text))


def without_compression(candidate: Candidate) -> Candidate:
    """Return the candidate without ``compress``, which is no part of a program."""
    if COMPRESS not in candidate.params:
        return candidate
    params = {name: v for name, v in candidate.params.items() if name != COMPRESS}
    return Candidate(candidate.backend, candidate.algorithm, params)


def _parse_params(text: str, whole: str) -> dict[str, ParamValue]:
    params: dict[str, ParamValue] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _PARAM.fullmatch(part)
        if found is None or set("{}=") & set(found[2]):
            raise UsageError(
                f"parameter {shown(part)} in {shown(whole)}: write NAME=VALUE"
            )
        name, value = found.groups()
        if name in params:
            raise UsageError(
                f"parameter {shown(name)} is given twice in {shown(whole)}: keep one"
            )
        params[name] = int(value) if _INT.fullmatch(value) else value
    return params


@dataclass(frozen=True)
class Choice:
    """The policy's choice, and its reason."""

    candidate: Candidate
    """The candidate that runs."""
    source: Source
    """Source of the choice: the call, the options of the group, COMMRT_ALGORITHM, the
    table, the model, or the fact that there was no choice."""
    reason: str
    """One sentence for people."""
    rule: int | None = None
    """Index of the table's rule, where a table decided."""
