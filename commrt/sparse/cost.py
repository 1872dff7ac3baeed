# SPDX-License-Identifier: Apache-2.0
"""Predicted times of sparse allreduces, and the rules that follow.

The fill of the sum decides: 1-(1-d)^P for P ranks of density d whose entries lie
anywhere. The model walks through an algorithm with the fill that so many contributions
have, and counts messages, bytes and entries. Rules are made from it once per kind of
call: each says which algorithm is the cheapest from one estimated fill to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from commrt.select.facts import CommFacts
from commrt.select.model import constants

__all__ = [
    "ALGORITHMS",
    "Prices",
    "Question",
    "Rule",
    "choose",
    "density",
    "estimated_fill",
    "predicted_us",
    "prices_of",
    "rules",
]

ALGORITHMS = (
    "recursive_doubling",
    "split",
    "split_dense",
    "ring",
    "two_level_ring",
)
_GRID = 96
_LEAST = 1e-7
_CALL_US = 10.0


@dataclass(frozen=True)
class Prices:
    """The model's constants, in microseconds."""

    alpha_us: float
    """Time per message between cores that nobody else needs."""
    beta_us: float
    """Time per byte moved between two ranks of a node."""
    far_beta_us: float
    """Time per byte moved between nodes."""
    merge_us: float
    """Time per entry read by a merge."""
    add_us: float
    """Time per entry added to a dense range."""
    touch_us: float
    """Time per byte of a dense range made, or passed over."""
    crowd: float
    """Ranks that share a core."""


@dataclass(frozen=True)
class Question:
    """A kind of call."""

    size: int
    """Ranks."""
    nodes: int
    """Nodes."""
    length: int
    """Elements of the whole vector."""
    index_nbytes: int
    item_nbytes: int
    format: str
    """Form of the output: auto, sparse or dense."""
    prices: Prices
    even: bool = True
    """True if all nodes have equally many ranks."""
    shared: bool = False
    """True if ``split`` reads entries and sums where their ranks have written them."""
    algorithms: tuple[str, ...] = ALGORITHMS
    """Algorithms to choose among."""

    @property
    def entry_nbytes(self) -> int:
        """Bytes of an index and its value."""
        return self.index_nbytes + self.item_nbytes


@dataclass(frozen=True)
class Rule:
    """Algorithm for a fill from ``fill`` on, up to the next rule."""

    fill: float
    algorithm: str


def estimated_fill(counts: Sequence[int], length: int) -> float:
    """Return the part of all elements that the sum is expected to have.

    1-(1-d)^P where all densities are d; each rank's own where they differ.
    """
    if length == 0:
        return 0.0
    absent = 0.0
    for count in counts:
        if count >= length:
            return 1.0
        absent += math.log1p(-count / length)
    return abs(math.expm1(absent))


def density(fill: float, size: int) -> float:
    """Return the density d of which 1-(1-d)^P is ``fill``."""
    return 1.0 if fill >= 1 else -math.expm1(math.log1p(-fill) / size)


def prices_of(facts: CommFacts) -> Prices:
    """Return the prices on a communicator: those of the dense model, and own ones.

    Those of memory are of one core of an EPYC 9005, its caches cold; see
    docs/explanation/sparse-sums.md.
    """
    near = constants(facts.link_class, "memory")
    far = constants("network", "messages")
    return Prices(
        # Header, indices, values; started and waited for from Python.
        alpha_us=_CALL_US + 3 * near.alpha_us,
        beta_us=4 * near.beta_us,  # in and out of shared memory, by packets
        far_beta_us=far.beta_us,
        merge_us=2.2e-3,
        add_us=3e-3,
        touch_us=1.4e-4,
        crowd=facts.crowd,
    )


def _nbytes(q: Question, fill: float, length: float) -> float:
    """Return the bytes of a message with a range of that fill."""
    return length * min(fill * q.entry_nbytes, q.item_nbytes)


def _is_dense(q: Question, fill: float) -> bool:
    return fill * q.entry_nbytes >= q.item_nbytes


def _merged_us(q: Question, a: float, b: float, length: float) -> float:
    """Return the time to merge ranges of fills a and b."""
    if _is_dense(q, a):
        added = q.prices.touch_us * q.item_nbytes if _is_dense(q, b) else 0.0
        return length * (added or b * q.prices.add_us)
    if _is_dense(q, a + b):
        return length * ((a + b) * q.prices.add_us + q.prices.touch_us * q.item_nbytes)
    return length * (a + b) * q.prices.merge_us


def _output_us(q: Question, fill: float) -> float:
    """Return the time to have the output, once everything is there."""
    dense = q.format == "dense" or (q.format == "auto" and _is_dense(q, fill))
    if not dense:
        return 0.0
    return q.length * q.prices.touch_us * q.item_nbytes


def _gathered_us(q: Question, fill: float) -> float:
    """Return the time to gather the ranges of a sum of that fill."""
    beta = q.prices.beta_us if q.nodes == 1 else q.prices.far_beta_us
    rounds = q.prices.alpha_us * (q.size - 1)
    moved = _nbytes(q, fill, q.length) * (q.size - 1) / q.size * beta
    scattered = 0.0
    if q.format == "dense" and not _is_dense(q, fill):
        scattered = q.length * fill * q.prices.add_us
    return rounds + moved + scattered


def _recursive_doubling_us(q: Question, d: float) -> float:
    total = 0.0
    joined = 1
    even = 1 << (q.size.bit_length() - 1)
    extra = 2 if q.size > even else 0
    p = q.prices
    per_node = max(1, q.size // q.nodes)
    for step in range(even.bit_length() - 1 + extra):
        fill = -math.expm1(joined * math.log1p(-min(d, 1 - 1e-12)))
        beta = p.beta_us if joined < per_node else p.far_beta_us
        total += p.alpha_us + _nbytes(q, fill, q.length) * beta
        if not (extra and step == even.bit_length()):
            total += _merged_us(q, fill, fill, q.length)
            joined = min(2 * joined, q.size)
    return total


def _split_us(q: Question, d: float, dense: bool) -> float:
    p = q.prices
    beta = p.beta_us if q.nodes == 1 else p.far_beta_us
    part = q.length / q.size
    total = p.alpha_us * (q.size - 1) + _nbytes(q, d, q.length) * beta
    fill = -math.expm1(q.size * math.log1p(-min(d, 1 - 1e-12)))
    if dense or _is_dense(q, q.size * d):
        total += part * (p.touch_us * q.item_nbytes + q.size * d * p.add_us)
        fill = 1.0
    else:
        total += part * q.size * d * p.merge_us * max(1.0, math.log2(q.size))
    return total + _gathered_us(q, fill)


def _shared_split_us(q: Question, d: float, fill: float) -> float:
    """Return the time of split without messages, but for one that says what is there.

    All lists of a range are summed in one pass, and the sums copied out of shared
    memory: half of what it takes through a message.
    """
    p = q.prices
    copied = _nbytes(q, fill, q.length) * p.beta_us / 2
    return p.alpha_us + q.length * d * p.merge_us + copied


def _ring_us(q: Question, d: float, size: int, length: float, beta: float) -> float:
    total = 0.0
    for joined in range(1, size):
        fill = -math.expm1(joined * math.log1p(-min(d, 1 - 1e-12)))
        total += q.prices.alpha_us + _nbytes(q, fill, length / size) * beta
        total += _merged_us(q, fill, d, length / size)
    return total


def _two_level_us(q: Question, d: float, fill: float) -> float:
    p = q.prices
    inside = q.size // q.nodes
    total = _ring_us(q, d, inside, q.length, p.beta_us)
    node = -math.expm1(inside * math.log1p(-min(d, 1 - 1e-12)))
    part = q.length / inside
    total += _ring_us(q, node, q.nodes, part, p.far_beta_us)
    total += p.alpha_us * (q.nodes + inside - 2)
    total += _nbytes(q, fill, part) * p.far_beta_us
    # Gathered pieces are put together once more.
    return total + _nbytes(q, fill, q.length) * (p.beta_us + p.touch_us)


def predicted_us(q: Question, algorithm: str, fill: float) -> float:
    """Return the modelled time of an algorithm for an estimated fill."""
    if q.size == 1 or q.length == 0:
        return 0.0
    d = density(fill, q.size)
    if algorithm == "recursive_doubling":
        work = _recursive_doubling_us(q, d)
    elif algorithm == "split" and q.shared:
        work = _shared_split_us(q, d, fill)
    elif algorithm in ("split", "split_dense"):
        if algorithm == "split_dense" and q.format == "sparse":
            return math.inf
        work = _split_us(q, d, algorithm == "split_dense")
    elif algorithm == "ring":
        beta = q.prices.beta_us if q.nodes == 1 else q.prices.far_beta_us
        work = _ring_us(q, d, q.size, q.length, beta) + _gathered_us(q, fill)
    elif q.nodes == 1 or not q.even:
        return math.inf
    else:
        work = _two_level_us(q, d, fill)
    return (work + _output_us(q, fill)) * q.prices.crowd


@lru_cache(maxsize=256)
def rules(q: Question) -> tuple[Rule, ...]:
    """Return the rules of a kind of call, by ascending fill; the first begins at 0."""
    found: list[Rule] = []
    for step in range(_GRID + 1):
        fill = _LEAST ** (1 - step / _GRID)
        best = min(q.algorithms, key=lambda name: predicted_us(q, name, fill))
        if not found or found[-1].algorithm != best:
            found.append(Rule(0.0 if step == 0 else fill, best))
    return tuple(found)


def choose(found: Sequence[Rule], fill: float) -> str:
    """Return the algorithm of the rule for an estimated fill."""
    return next(rule.algorithm for rule in reversed(found) if rule.fill <= fill)
