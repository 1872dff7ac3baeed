# SPDX-License-Identifier: Apache-2.0
"""The algorithms that Open MPI's fixed rules choose, under commrt's names.

The thresholds are those of ``coll/tuned`` in Open MPI 5.0.9
(``coll_tuned_decision_fixed.c``), for 3 to 15 ranks, from 4 KiB, and commutative
reductions. Segments are commrt's own. Three of its algorithms have no like here: binary
and k-nomial trees are played as binomial ones, ``butterfly`` as halving-doubling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commrt.errors import UsageError

__all__ = ["fixed_rule"]

_Rules = Sequence[tuple[int, str]]
"""Least bytes, and the algorithm from there on."""
_MOST_RANKS = 15

# For each operation: least ranks, and the rules from there on.
_RULES: Mapping[str, Sequence[tuple[int, _Rules]]] = {
    "allreduce": (
        (3, ((0, "ring"), (8192, "recursive_doubling"), (16_384, "ring"),
             (262_144, "halving_doubling"))),
        (4, ((0, "recursive_doubling"), (8192, "halving_doubling"))),
    ),
    "reduce": (
        (3, ((0, "direct"), (262_144, "chain"))),
        (4, ((0, "chain"), (65_536, "binomial"), (262_144, "direct"),
             (524_288, "binomial"), (1_048_576, "direct"))),
        (8, ((0, "binomial"),)),
    ),
    "bcast": (
        (3, ((0, "direct"), (32_768, "binomial"), (131_072, "chain"),
             (262_144, "direct"), (524_288, "binomial"))),
        (4, ((0, "binomial"), (8192, "direct"), (1_048_576, "chain"))),
        (8, ((0, "binomial"), (32_768, "direct"))),
    ),
    "reduce_scatter": ((3, ((0, "halving_doubling"),)),),
    "allgather": ((3, ((0, "recursive_doubling"),)),),
    "alltoall": (
        (3, ((0, "direct"), (524_288, "pairwise"), (1_048_576, "direct"))),
        (8, ((0, "direct"),)),
    ),
}  # fmt: skip
_NO_POWER_OF_TWO: Mapping[str, Mapping[str, str]] = {
    "allgather": {"recursive_doubling": "dissemination"}
}
"""Algorithms that others stand in for on such numbers of ranks; here Bruck's."""
_BY_BLOCK = frozenset({"reduce_scatter", "allgather", "alltoall"})
"""Operations whose rules count the bytes of one rank's block."""


def fixed_rule(op: str, nbytes: int, ranks: int) -> str:
    """Return the algorithm for a full vector of ``nbytes``.

    Raises UsageError for ranks that the table has not.
    """
    if op not in _RULES or not 3 <= ranks <= _MOST_RANKS:
        raise UsageError(
            f"fixed_rule: {op} on {ranks} ranks; expected one of {', '.join(_RULES)} "
            f"on 3 to {_MOST_RANKS}"
        )
    block = nbytes // ranks if op in _BY_BLOCK else nbytes
    rules = [these for least, these in _RULES[op] if ranks >= least][-1]
    chosen = [name for least, name in rules if block >= least][-1]
    if ranks & (ranks - 1):
        chosen = _NO_POWER_OF_TWO.get(op, {}).get(chosen, chosen)
    return chosen
