# SPDX-License-Identifier: Apache-2.0
"""The one table of operations: a row for each method that moves data.

``OPERATIONS`` are the collectives. The public methods, the dispatcher in C++, the
tuner, the benchmarks, the tests, the traces and the reference page are driven from
them. ``OTHERS`` are the calls beside them: messages, sparse sums, redistribution and
calls among neighbours. ``ROWS`` are both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from commrt.errors import UsageError, shown, suggest
from commrt.vocabulary.checks import as_integer

__all__ = [
    "COLLECTIVES",
    "ELSEWHERE",
    "FUSED",
    "OPERATIONS",
    "OTHERS",
    "RECEIVED",
    "ROWS",
    "SCHEDULED",
    "SENT",
    "SPARSE_OF_TORCH",
    "CallSpec",
    "OpSpec",
    "by_name",
    "elements_of",
    "names_of",
    "operation",
    "other_call",
    "rule_nbytes",
]

Count = Literal["none", "same", "times_size", "div_size"]
RuleBytes = Literal["whole", "block", "pair", "any", "none"]
WaitsFor = Literal["all", "root", "root waits", "contributors"]
Kind = Literal["collective", "message", "object", "sparse", "boxes", "neighbors"]
Ends = Literal["none", "one", "two", "lists"]
Direction = Literal["none", "out", "in"]
Nccl = Literal["native", "pairs", "messages", "reductions", "allreduce", "none"]


@dataclass(frozen=True)
class OpSpec:
    """One operation: its arguments and results, independent of how it is run."""

    name: str
    """Public method name and ``coll`` name in schedules and tables."""
    code: int
    """The engine's code."""
    title: str
    """Name in benchmark headers, as OSU spells it."""
    x_count: Count
    """Elements of the send buffer relative to the operation's count."""
    out_count: Count
    """Elements of ``out`` relative to those of ``x``."""
    has_root: bool
    """True if the operation takes ``root=``."""
    reduces: bool
    """True if the operation takes ``op=``."""
    in_place: bool
    """True if a call without ``out`` works in place and returns ``x``."""
    output_on: Literal["all", "root", "all but rank 0", "none"]
    """Ranks that have an output."""
    rule_bytes: RuleBytes
    """Bytes that select a rule: those of the whole buffer, of a rank's block, or of one
    pair's. ``any``: no rank knows all lengths, so one rule serves all."""
    doc: str
    """One imperative line for the docstring and the reference page."""
    combines: tuple[int | None, int | None] = (None, None)
    """Ranks whose arrays a rank's reduction combines: the first one, and the one after
    the last, counted from the rank itself; None: from the first of all, to the last."""
    vector_of: str | None = None
    """The operation that this one is with blocks of different lengths: its schedules
    run."""
    count_arguments: tuple[str, ...] = ()
    """Arguments with a number of elements per rank."""
    compresses: bool = False
    """True if the operation takes ``compress=`` and ``residual=``."""
    input_on: Literal["all", "root"] = "all"
    """Ranks that have an input; elsewhere ``x`` is not read."""
    fuses: bool = False
    """True if small calls are joined into one (``fusion=``)."""
    mpi: str = ""
    """MPI's function that is this operation, without ``MPI_I``; empty: MPI has none."""
    nccl: Nccl = "none"
    """NCCL has a function of it; has one from a version on, and messages between pairs
    of ranks before; or it is composed of messages, of reductions or of an allreduce; or
    it cannot be had."""
    torch: str = ""
    """torch.distributed's name of it; empty: its own."""
    torch_calls: tuple[str, ...] = ()
    """Names of torch.distributed's functions that run it, where they are others."""
    flight: str = ""
    """Its name in flight records, whose analyser knows no other names; empty: none."""

    kind: Kind = "collective"

    def contributors(self, rank: int, size: int) -> range:
        """Return the ranks whose arrays a reduction combines on ``rank``."""
        first, end = self.combines
        return range(
            0 if first is None else rank + first, size if end is None else rank + end
        )

    def num_contributors(self, rank: int, size: int) -> int:
        """Return the number of ranks' arrays that a reduction combines on ``rank``."""
        return len(self.contributors(rank, size))

    @property
    def combines_some(self) -> bool:
        """True if ranks combine different ranks' arrays, as in a scan."""
        return self.combines != (None, None)

    @property
    def is_empty(self) -> bool:
        """True if it has no array: it only waits."""
        return self.x_count == "none"

    @property
    def by_pair(self) -> bool:
        """True if each pair of ranks has a block of its own."""
        return self.rule_bytes in ("pair", "any")

    @property
    def is_blocked(self) -> bool:
        """True if the whole vector has one block for each rank, or for each pair."""
        return self.out_count in ("times_size", "div_size") or self.by_pair

    @property
    def reduces_to_all(self) -> bool:
        """True if every rank gets the same reduction of whole arrays."""
        everywhere = self.output_on == "all" and not self.combines_some
        return self.reduces and everywhere and self.out_count == "same"

    @property
    def logged_bytes(self) -> str:
        """The arrays whose bytes a log counts: those of its logical buffer."""
        if self.is_empty:
            return "0"
        if self.by_pair:
            return "what this rank sends, its own part included"
        if self.out_count == "times_size":
            return "the gathered array"
        if self.out_count == "same":
            return "the array of one rank"
        scatters = self.input_on == "root"
        return (
            "the root's array"
            if scatters
            else "the array of one rank, before it is scattered"
        )

    @property
    def positional(self) -> tuple[str, ...]:
        """Arguments that may be passed by position, in this order.

        A root may stand in the place of ``op``: it is a number.
        """
        if self.is_empty:
            return ()
        return ("x", *("op",) * self.reduces, *("root",) * self.has_root)

    @property
    def reads(self) -> str:
        """Codes that tell the dispatcher in C++ how to read its arguments."""
        return "" if self.is_empty else "a" + "w" * (len(self.positional) - 1)

    def wire_share(self, size: int) -> float:
        """Return the least part of its bytes that a rank sends on average."""
        if self.reduces_to_all:
            return 2 * (size - 1) / size
        return (size - 1) / size if self.is_blocked else 1.0

    @property
    def waits_for(self) -> WaitsFor:
        """The ranks whose calls must begin before this rank's call can end.

        ``root waits``: the root waits for all, and the others for nobody.
        """
        if self.combines_some:
            return "contributors"
        if self.input_on == "root":
            return "root"
        return "root waits" if self.output_on == "root" else "all"


# fmt: off
OPERATIONS: tuple[OpSpec, ...] = (
    OpSpec("allreduce", 0, "Allreduce", "same", "same", False, True, True, "all",
           "whole", "Reduce elementwise over all ranks; every rank gets the result.",
           compresses=True,
           fuses=True, mpi="allreduce", nccl="native", torch="all_reduce",
           torch_calls=("all_reduce",), flight="all_reduce"),
    OpSpec("reduce", 1, "Reduce", "same", "same", True, True, True, "root",
           "whole", "Reduce elementwise over all ranks; the root gets the result.",
           mpi="reduce", nccl="native", flight="reduce"),
    OpSpec("bcast", 2, "Broadcast", "same", "same", True, False, True, "all",
           "whole", "Copy the root's array to every rank.",
           input_on="root", mpi="bcast", nccl="native", torch="broadcast",
           torch_calls=("broadcast",), flight="broadcast"),
    OpSpec("allgather", 3, "Allgather", "same", "times_size", False, False, False,
           "all", "block",
           "Concatenate every rank's array, in rank order, on every rank.",
           mpi="allgather", nccl="native", torch="all_gather", flight="all_gather",
           torch_calls=("all_gather", "all_gather_into_tensor", "all_gather_single")),
    OpSpec("reduce_scatter", 4, "Reduce_scatter", "same", "div_size", False, True,
           False, "all", "whole",
           "Reduce elementwise over all ranks; rank i gets the i-th of size equal "
           "blocks.",
           mpi="reduce_scatter_block", nccl="native", flight="reduce_scatter",
           torch_calls=("reduce_scatter_single", "reduce_scatter_tensor")),
    OpSpec("alltoall", 5, "All-to-All Personalized Exchange", "same", "same", False,
           False, True, "all", "pair",
           "Send the j-th block to rank j; receive rank i's block as the i-th.",
           compresses=True,
           mpi="alltoall", nccl="pairs", torch="all_to_all",
           torch_calls=("all_to_all_single",), flight="all_to_all"),
    OpSpec("gather", 6, "Gather", "same", "times_size", True, False, False, "root",
           "block", "Concatenate every rank's array, in rank order, on the root.",
           mpi="gather", nccl="pairs", flight="gather"),
    OpSpec("scatter", 7, "Scatter", "same", "div_size", True, False, False, "all",
           "block", "Give rank i the i-th of size equal blocks of the root's array.",
           input_on="root", mpi="scatter", nccl="pairs", flight="scatter"),
    OpSpec("barrier", 8, "Barrier", "none", "none", False, False, False, "none",
           "none", "Return once every rank has called it.",
           mpi="barrier", nccl="allreduce", flight="barrier"),
    OpSpec("scan", 9, "Scan", "same", "same", False, True, True, "all", "whole",
           "Reduce elementwise over the ranks up to this one, its own array included.",
           (None, 1), mpi="scan"),
    OpSpec("exscan", 10, "Exscan", "same", "same", False, True, True, "all but rank 0",
           "whole",
           "Reduce elementwise over the ranks below this one; rank 0's output is left "
           "untouched.", (None, 0), mpi="exscan"),
    OpSpec("allgatherv", 11, "Allgatherv", "same", "times_size", False, False, False,
           "all", "block",
           "Concatenate arrays of counts[rank] elements, by rank, on every rank.",
           (None, None), "allgather", ("counts",),
           mpi="allgatherv", nccl="messages", torch="all_gather",
           flight="all_gather_v"),
    OpSpec("alltoallv", 12, "All-to-Allv Personalized Exchange", "same", "same", False,
           False, False, "all", "any",
           "Send send_counts[j] elements to rank j; receive recv_counts[i] from i.",
           (None, None), "alltoall", ("send_counts", "recv_counts"), True,
           mpi="alltoallv", nccl="messages", torch="all_to_all",
           torch_calls=("all_to_all",), flight="all_to_all"),
    OpSpec("gatherv", 13, "Gatherv", "same", "times_size", True, False, False, "root",
           "block",
           "Concatenate arrays of counts[rank] elements, by rank, on the root.",
           (None, None), "gather", ("counts",),
           mpi="gatherv", nccl="messages"),
    OpSpec("scatterv", 14, "Scatterv", "same", "div_size", True, False, False, "all",
           "block", "Give rank i the i-th block, counts[i] elements, of the root's x.",
           (None, None), "scatter", ("counts",),
           input_on="root", mpi="scatterv", nccl="messages"),
    OpSpec("reduce_scatterv", 15, "Reduce_scatterv", "same", "div_size", False, True,
           False, "all", "whole",
           "Reduce elementwise over all ranks; rank i gets the i-th block, counts[i] "
           "elements.", (None, None), "reduce_scatter", ("counts",),
           mpi="reduce_scatter", nccl="reductions", torch="reduce_scatter",
           flight="reduce_scatter_v"),
)
# fmt: on
"""The collectives."""


@dataclass(frozen=True)
class CallSpec:
    """A method of communicators that is no collective with a schedule."""

    name: str
    """Public method name."""
    kind: Kind
    """Part of commrt that carries it out."""
    reads: str
    """Code for how the dispatcher in C++ reads its arguments
    (native/calls/recorded_method.hpp)."""
    logged_bytes: str
    """The arrays whose bytes a log counts; empty: its messages are logged."""
    doc: str
    """One imperative line."""
    ends: Ends = "none"
    """The messages of a call: one end, an end of two, or lists of them."""
    reduces_to_all: bool = False
    """True if every rank gets the same reduction, and waits for all others."""
    torch: str = ""
    """As in ``OpSpec``."""
    flight: str = ""
    """As in ``OpSpec``."""
    code: int = -1
    """The engine's code in its records; -1: it makes records of other operations."""
    direction: Direction = "none"
    """True if the array leaves this rank or comes to it, where only one of both does.
    """
    peer_argument: str = ""
    """The argument that names the other rank, where there is only one."""
    sends_whole: bool = False
    """True if every neighbour gets the whole array, and not a block of it."""
    count_arguments: tuple[str, ...] = ()
    """Arguments with a number of elements per neighbour."""
    positional: tuple[str, ...] = ()
    """Arguments of a message that may be passed by position, in this order."""

    @property
    def takes_number(self) -> bool:
        """True if it takes an integer behind its array, as a top-k sum does."""
        return "i" in self.reads

    def wire_share(self, size: int) -> float:
        """Return the least part of its bytes that a rank sends on average."""
        return 2 * (size - 1) / size if self.reduces_to_all else 1.0


_TO_OTHERS = "what this rank sends to others"
_PICKLED = "none: an object has no length before it is pickled"
OTHERS: tuple[CallSpec, ...] = (
    CallSpec(
        *("send", "message", "aww", "the message", "Send an array.", "one"),
        flight="send",
        direction="out",
        peer_argument="dest",
        positional=("x", "dest", "tag"),
    ),
    CallSpec(
        *("recv", "message", "aww", "the memory that it may fill"),
        *("Receive an array.", "one"),
        flight="recv",
        direction="in",
        peer_argument="source",
        positional=("out", "source", "tag"),
    ),
    CallSpec(
        *("sendrecv", "message", "awaw", ""),
        *("Send one array, receive another.", "two"),
        positional=("x", "dest", "out", "source"),
    ),
    CallSpec(
        *("multi_sendrecv", "message", "", ""),
        *("Send and receive any number of messages at once.", "lists"),
        code=87,
    ),
    CallSpec(
        *("bcast_object", "object", "--", _PICKLED),
        "Copy the root's object to every rank.",
    ),
    CallSpec(
        *("allgather_object", "object", "-", _PICKLED),
        "Bring every rank's object to every rank.",
    ),
    CallSpec(
        *("gather_object", "object", "--", _PICKLED),
        "Bring every rank's object to the root.",
    ),
    CallSpec(
        *("scatter_object", "object", "--", _PICKLED),
        "Give rank i the i-th object of the root's list.",
    ),
    CallSpec(
        *("send_object", "object", "---", _PICKLED), "Send an object to one rank."
    ),
    CallSpec(
        *("recv_object", "object", "--", _PICKLED), "Receive an object of one rank."
    ),
    CallSpec(
        *("sparse_allreduce", "sparse", "a"),
        "indices and values that this rank has",
        "Sum sparse vectors over all ranks.",
        reduces_to_all=True,
        torch="all_reduce_sparse",
    ),
    CallSpec(
        *("topk_allreduce", "sparse", "ai", "the array of one rank"),
        "Sum the largest elements of dense vectors over all ranks.",
        reduces_to_all=True,
    ),
    CallSpec(
        *("redistribute", "boxes", "a--", "the array of this rank"),
        "Move an array from one distribution to another.",
        code=82,
    ),
    CallSpec(
        *("halo_exchange", "neighbors", "sw", _TO_OTHERS),
        "Fill halos with the edges of neighbours.",
        code=80,
    ),
    CallSpec(
        *("halo_reduce", "neighbors", "sw", _TO_OTHERS),
        "Add halos to the edges of neighbours.",
        code=81,
    ),
    CallSpec(
        *("neighbor_allgather", "neighbors", "a", _TO_OTHERS),
        "Send the array to every neighbour.",
        code=83,
        sends_whole=True,
    ),
    CallSpec(
        *("neighbor_allgatherv", "neighbors", "a", _TO_OTHERS),
        "Send the array to every neighbour; arrays differ in length.",
        code=84,
        sends_whole=True,
        count_arguments=("recv_counts",),
    ),
    CallSpec(
        *("neighbor_alltoall", "neighbors", "a", _TO_OTHERS),
        "Send a block to every neighbour.",
        code=85,
    ),
    CallSpec(
        *("neighbor_alltoallv", "neighbors", "a", _TO_OTHERS),
        "Send a block to every neighbour; blocks differ in length.",
        code=86,
        count_arguments=("send_counts", "recv_counts"),
    ),
)
"""The calls beside the collectives. The position of a message is the engine's number
of its kind."""
ROWS: tuple[OpSpec | CallSpec, ...] = (*OPERATIONS, *OTHERS)
"""All of them, which communicators have methods of, and logs names."""

ELSEWHERE = {
    "broadcast": "bcast",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "all_to_all_single": "alltoall",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "all_gather_v": "allgatherv",
    "all_to_all_v": "alltoallv",
}
"""Names of the operations in torch and MPI."""
COLLECTIVES = tuple(spec.name for spec in OPERATIONS)
SCHEDULED = tuple(spec.name for spec in OPERATIONS if spec.vector_of is None)
"""Operations that schedules are written for; the others run them, too."""
FUSED = frozenset(spec.name for spec in OPERATIONS if spec.fuses)
"""Operations whose small calls are joined into one."""
_BY_NAME = {spec.name: spec for spec in OPERATIONS}
_OTHERS_BY_NAME = {row.name: row for row in OTHERS}
SENT = frozenset(row.name for row in OTHERS if row.direction == "out")
"""Calls whose array leaves this rank for one other."""
RECEIVED = frozenset(row.name for row in OTHERS if row.direction == "in")
"""Calls whose array comes from one other rank."""
[SPARSE_OF_TORCH] = [row.name for row in OTHERS if row.kind == "sparse" and row.torch]
"""The call that sums torch's sparse tensors."""


def names_of(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of all rows of these kinds, in the order of the table."""
    return tuple(row.name for row in ROWS if row.kind in kinds)


def operation(name: str) -> OpSpec:
    """Return the operation called ``name``, or raise UsageError with a suggestion."""
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise UsageError(
            f"unknown operation {shown(name)}{suggest(name, _BY_NAME, ELSEWHERE)}"
        )
    return found


def other_call(name: str) -> CallSpec:
    """Return the row of a call beside the collectives."""
    return _OTHERS_BY_NAME[name]


def by_name(
    row: OpSpec | CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by their names; TypeError where that cannot be."""
    if not args:
        return kwargs
    left, named = list(row.positional), dict(kwargs)
    for value in args:
        # A number where a reduction may stand is the root behind it.
        is_root = left == ["op", "root"] and as_integer(value) is not None
        if not left:
            words = ", ".join(row.positional) or "nothing"
            raise TypeError(
                f"{row.name}() takes {words} by position; everything else is passed by "
                f"keyword"
            )
        name = left.pop(1 if is_root else 0)
        if name in named:
            raise TypeError(f"{row.name}() got {name} twice")
        named[name] = value
    return named


def rule_nbytes(coll: str, nbytes: int, size: int) -> int:
    """Return the bytes that select a rule, as OSU prints them.

    Args:
        coll: the operation.
        nbytes: bytes of the *full* vector of the operation: of ``x`` for allreduce,
            reduce, bcast, reduce_scatter, alltoall, scan and exscan; of the gathered
            vector for allgather and gather; of the root's ``x`` for scatter. The
            vector operations are like those that they are named after.
        size: ranks in the communicator.

    The whole buffer for allreduce, reduce, bcast, reduce_scatter, scan and exscan;
    the per-rank block for allgather, gather and scatter, the average one where blocks
    differ; the block of one pair for alltoall; 0 for alltoallv.
    """
    kind = operation(coll).rule_bytes
    if kind == "whole":
        return nbytes
    if kind in ("none", "any"):
        return 0
    return nbytes // size


_NO_END = 2**63 - 1


def elements_of(
    coll: str, lo: int, hi: int | None, itemsize: int, size: int
) -> tuple[int, int]:
    """Return the lengths of full vectors whose ``rule_nbytes`` lie in [lo, hi).

    In elements: the first such length, and the first beyond.
    """
    kind = operation(coll).rule_bytes
    if kind in ("none", "any"):
        return 0, _NO_END
    times = 1 if kind == "whole" else size
    first = -(-lo * times // itemsize)
    end = _NO_END if hi is None else -(-hi * times // itemsize)
    return first, min(end, _NO_END)
