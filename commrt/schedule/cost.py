# SPDX-License-Identifier: Apache-2.0
"""Cost of a schedule between nodes with one port each.

time = alpha rounds + beta (moved N + fill min(N, a fragment)) + gamma reduced N
       + beta taper far N + beta jam (gathered - 1) moved (N - a fragment)
       + busy (crowd - 1) ends

*Rounds* is how long the messages take, each one round from start to end, if a port can
start another one after a quarter of a round. Where the way is long, that is sooner: no
port is busy for more than 10 us with an empty message. *Moved* and *reduced* are bytes
of the busiest node and rank (what it sends or what it receives, whichever is more).
Further bytes lie on the path where nothing overlaps them, as on the way down a tree:
*fill*. Long vectors run in fragments that follow one another: of those bytes only one
fragment's count.

Ranks that share a node share its port. A message between them takes a part of a round,
and a part of beta on the core of either end. On a node all of that follows one another:
the time of the busiest core comes on top of the port's.

*Far* is the mean over the nodes of the bytes that each sends, a byte to the other side
of the ring of nodes counted once, and one to a nearer node by its part of that way. One
switch carries all alike. A larger network has fewer links between switches than to
nodes, and neighbours in number share a switch more often than not. How many is unknown
here, so the *taper* is small: it decides where all else is nearly alike. Up to four
nodes count as those of one switch: there nothing is far.

*Gathered* is from how many other nodes a rank receives before it may send on. Streams
to one port do not get equal parts of it, and the slowest one decides when the next
fragment goes on: four hosts took 1.1 to 1.3 times as long for a sum by direct messages
as by a ring. So where a long vector runs in fragments, each further stream costs the
*jam*. Ranks that send all they have before they receive do not suffer from that.

Ranks that share a core take turns, on one node or as containers of one machine. *Crowd*
is how many do. A core serves the *ends* of all messages of its ranks, and each keeps it
*busy* with system calls and copies. So few messages win there.

The counts do not depend on the message length and are kept per schedule. On one node
there are no ports, and cores move the data: `core_cost`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from commrt.schedule.execute import Execution, match
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice
from commrt.schedule.makespan import OnNode, play

__all__ = ["READER_SHARE", "Counts", "OnNode", "cost", "counts", "floor", "widths"]

MESSAGE_SHARE = 0.25
"""Part of alpha that a message costs its ranks even when others overlap it."""
_BUSY_US = 10.0
"""Longest such time: what system calls and copies of a short message take. The rest of
a long alpha is time on the way."""
CHUNK_NBYTES = 131072
"""Bytes of a fragment's largest message; the default of the transport's ``chunk``."""
READER_SHARE = 0.25
"""Cost of a further reader of a value to its writer, as a part of the copy: the cache
that holds the value serves its readers one after the other."""
TAPER = 0.02
"""Cost of a byte that crosses to the other side of all nodes, beyond that of its ports:
a guess, large enough to tell apart what takes as long on one switch."""
ONE_SWITCH = 4
"""Most nodes of which none is far from another one."""
JAM = 0.05
"""Cost of a byte for each further stream to a port whose rank waits for all of them."""
ROUNDING = 1e-9
"""Largest relative difference of sums of parts in floating point."""


@dataclass(frozen=True)
class Counts:
    """The amounts that the model multiplies; bytes as parts of the full vector."""

    steps: int
    """Messages on the longest chain."""
    moved: float
    """Bytes sent, or received, by the busiest node; and what its busiest core moves."""
    reduced: float
    """Bytes of operands that the busiest rank adds to others."""
    rounds: float
    """Time of the messages, were they empty, in times of one message."""
    fill: float
    """Time of the bytes beyond ``moved``, were messages free, in times of N bytes."""
    largest: float
    """Bytes of the largest message."""
    far: float
    """Mean of the bytes that a node sends, each in times of half the ring of nodes; 0
    on one switch."""
    gathered: int
    """Most nodes from which a rank receives, one after the other, before it sends to
    another node again; 1 where it always does so after one."""
    ends: float
    """Mean of the messages that a rank sends and receives, those on a node in times of
    one between nodes."""


_Setting = tuple[OnNode | None, float]
_COUNTS: WeakKeyDictionary[Schedule, dict[_Setting, Counts]] = WeakKeyDictionary()


def counts(
    schedule: Schedule, on_node: OnNode | None = None, share: float = MESSAGE_SHARE
) -> Counts:
    """Return the counts of ``schedule``; the first call runs it symbolically.

    Args:
        schedule: what to count.
        on_node: which ranks share nodes; None: no two do.
        share: how long an empty message keeps the ports busy, as part of its time.
    """
    known = _COUNTS.setdefault(schedule, {})
    setting = on_node, share
    if setting not in known:
        programs = schedule.programs()
        partners = match(programs)
        steps = [list(program.steps) for program in programs]
        width = [widths(program) for program in programs]
        nodes = on_node.nodes if on_node else tuple(range(schedule.size))
        num = max(nodes) + 1
        ranks = [_rank_counts(program, on_node, num) for program in programs]
        moved = _moved(ranks)
        ends = play(steps, partners, width, share, on_node)
        if not ends.complete:
            for _ in Execution(programs):
                pass  # says who waits for whom
        fill = ends.data - moved
        known[setting] = Counts(
            ends.steps,
            moved,
            max(one.reduced for one in ranks),
            ends.rounds,
            fill if fill > ROUNDING else 0.0,
            max(one.largest for one in ranks),
            sum(one.far for one in ranks) / num if num > ONE_SWITCH else 0.0,
            max(one.gathered for one in ranks),
            sum(one.ends for one in ranks) / len(ranks),
        )
    return known[setting]


def _share(alpha_us: float) -> float:
    """Return how long an empty message keeps the ports busy, as part of its time."""
    return min(MESSAGE_SHARE, _BUSY_US / alpha_us) if alpha_us else MESSAGE_SHARE


def widths(program: RankProgram) -> list[float]:
    """Return the part of the full vector in a block of each space."""
    return [
        space.scale[0] / space.scale[1] / max(space.nblk, 1) for space in program.spaces
    ]


class _RankCounts(NamedTuple):
    node: int
    messages: float
    ends: float
    sent: float
    """Between nodes."""
    received: float
    core: float
    """Moved on the node, in times of bytes between nodes."""
    reduced: float
    largest: float
    far: float
    """Sent, in times of half the ring of nodes."""
    gathered: int


def _rank_counts(program: RankProgram, on_node: OnNode | None, num: int) -> _RankCounts:
    """Return the work of one rank, from its program alone; ``num`` nodes there are."""
    width = widths(program)
    nodes = on_node.nodes if on_node else range(num)
    own = nodes[program.rank]
    sends = receives = sent = received = core = reduced = largest = way = 0.0
    before: Slice | None = None
    gathered, sources = 1, set[int]()
    for op, src, dst, peer, *_ in program.steps:
        where = src if op is Op.SEND else dst
        assert where is not None
        part = (where.hi - where.lo) * width[where.space]
        near = on_node if on_node and peer >= 0 and nodes[peer] == own else None
        length = near.alpha if near else 1
        if op is Op.SEND:
            sends += length
            largest = max(largest, part)
            if near:
                core += part * near.beta * (READER_SHARE if src == before else 1)
            else:
                sent += part
                gathered, sources = max(gathered, len(sources)), set()
                away = abs(nodes[peer] - own)
                way += part * min(away, num - away)
        elif op in (Op.RECV, Op.RRED):
            receives += length
            if near:
                core += part * near.beta
            else:
                received += part
                sources.add(nodes[peer])
        before = src if op is Op.SEND else None
        if op in (Op.RRED, Op.RED):
            reduced += part
    messages = max(sends, receives)
    far = way / max(1, num // 2)
    return _RankCounts(
        *(own, messages, sends + receives, sent, received, core, reduced, largest),
        *(far, gathered),
    )


def _moved(ranks: Iterable[_RankCounts]) -> float:
    """Return the traffic of the busiest node, in times of bytes between nodes."""
    nodes: dict[int, tuple[float, float, float]] = {}
    for one in ranks:
        sent, received, core = nodes.get(one.node, (0.0, 0.0, 0.0))
        nodes[one.node] = (
            *(sent + one.sent, received + one.received),
            max(core, one.core),
        )
    return max(max(sent, received) + core for sent, received, core in nodes.values())


def cost(
    schedule: Schedule,
    nbytes: int,
    alpha_us: float,
    beta_us_per_byte: float,
    gamma_us_per_byte: float,
    on_node: OnNode | None = None,
    crowd: float = 1.0,
) -> float:
    """Return the modelled time in microseconds.

    Args:
        schedule: what to cost.
        nbytes: bytes of the operation's *full vector*; docs/internals/schedules.md.
        alpha_us: time of an empty message.
        beta_us_per_byte: time per byte moved.
        gamma_us_per_byte: time per byte reduced.
        on_node: which ranks share nodes; None: no two do.
        crowd: ranks that share a core.
    """
    found = counts(schedule, on_node, _share(alpha_us))
    fragment = CHUNK_NBYTES / found.largest if found.largest else nbytes
    filling = found.fill * min(nbytes, fragment)
    jammed = JAM * (found.gathered - 1) * found.moved * max(0.0, nbytes - fragment)
    moved = (found.moved + TAPER * found.far) * nbytes + filling + jammed
    return (
        alpha_us * found.rounds
        + min(_BUSY_US, alpha_us / 2) * (crowd - 1) * found.ends
        + beta_us_per_byte * moved
        + gamma_us_per_byte * found.reduced * nbytes
    )


def floor(
    schedule: Schedule,
    ranks: Iterable[int],
    nbytes: int,
    alpha_us: float,
    beta_us_per_byte: float,
    gamma_us_per_byte: float,
    on_node: OnNode | None = None,
) -> float:
    """Return a lower bound of ``cost``, from the programs of some ranks alone."""
    num = max(on_node.nodes) + 1 if on_node else schedule.size
    found = [_rank_counts(schedule.program(rank), on_node, num) for rank in ranks]
    shortest = on_node.alpha if on_node else 1
    messages = max(one.messages for one in found)
    return (
        alpha_us * max(_share(alpha_us) * messages, min(messages, shortest))
        + beta_us_per_byte * _moved(found) * nbytes
        + gamma_us_per_byte * max(one.reduced for one in found) * nbytes
    )
