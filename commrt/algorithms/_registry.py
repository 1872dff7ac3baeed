# SPDX-License-Identifier: Apache-2.0
"""Which algorithms exist, and the schedules they make.

Third parties register theirs with the same decorator as the built-in ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from commrt.errors import UsageError, suggest
from commrt.operations import operation
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import RankProgram, RedopClass, Schedule
from commrt.schedule.parts import parts_of

__all__ = ["Algorithm", "algorithm", "get", "names", "param_choices", "schedule"]

Author = Callable[[Builder], None]
Choices = Mapping[str, tuple[int, ...]]
ChoicesOf = Callable[[int], Choices]

RESERVED = ("native", "auto", "none")
"""Names with another meaning where an algorithm is named."""


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One algorithm of one operation."""

    coll: str
    name: str
    author: Author
    """Records the steps of one rank."""
    choices: Choices | ChoicesOf
    """Values of each parameter, the default first; or a function of the size."""
    supports: Callable[[int], bool]
    """Whether a number of ranks is supported."""
    latency: bool
    """Latency-optimal: few steps, for short messages."""
    bandwidth: bool
    """Bandwidth-optimal: few bytes, for long messages."""
    redop_class: RedopClass
    """``ordered`` if contributions are combined in rank order."""

    @property
    def doc(self) -> str:
        """The first line of the author's docstring."""
        return (self.author.__doc__ or "").strip().partition("\n")[0]

    @property
    def built_in(self) -> bool:
        """Whether it is one of this package's, which its tests prove right."""
        return self.author.__module__.startswith("commrt.algorithms.")


_ALGORITHMS: dict[tuple[str, str], Algorithm] = {}


def algorithm(
    coll: str,
    name: str,
    *,
    params: Choices | ChoicesOf | None = None,
    supports: Callable[[int], bool] | None = None,
    latency: bool = False,
    bandwidth: bool = False,
    ordered: bool = False,
) -> Callable[[Author], Author]:
    """Register the decorated function as algorithm ``name`` of operation ``coll``.

    Args:
        coll: the operation, such as ``"allreduce"``.
        name: lower-case letters, digits and underscores; new for this operation.
        params: values of each integer parameter, the default first, or a function
            that returns them for a number of ranks.
        supports: whether a number of ranks is supported; all are, if left out.
        latency: it has few steps: made for short messages. ``info`` shows it; the
            model counts the steps itself.
        bandwidth: it moves few bytes: made for long messages; likewise.
        ordered: contributions are combined in rank order.
    """
    spec = operation(coll)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in RESERVED:
        raise UsageError(
            f"algorithm name {name!r}: use lower-case letters, digits and underscores, "
            f"and none of {', '.join(RESERVED)}"
        )
    if spec.vector_of is not None:
        raise UsageError(
            f"{coll} runs the algorithms of {spec.vector_of}: register {name!r} there"
        )
    if (coll, name) in _ALGORITHMS:
        raise UsageError(
            f"{coll} already has an algorithm {name!r}; choose another name"
        )
    redop_class: RedopClass = "none"
    if spec.reduces:
        redop_class = "ordered" if ordered else "commutative"

    def register(author: Author) -> Author:
        _ALGORITHMS[coll, name] = Algorithm(
            coll,
            name,
            author,
            params or {},
            supports or (lambda size: True),
            latency,
            bandwidth,
            redop_class,
        )
        return author

    return register


def names(coll: str, size: int | None = None) -> tuple[str, ...]:
    """Return the names of the algorithms of ``coll``, sorted.

    Args:
        coll: the operation.
        size: only those that exist for so many ranks.
    """
    plain = operation(coll).vector_of
    return tuple(
        sorted(
            name
            for (which, name), one in _ALGORITHMS.items()
            if which == (plain or coll)
            and (size is None or one.supports(size))
            and (plain is None or carries_counts(one))
        )
    )


_FEW_RANKS = range(2, 9)


@lru_cache(maxsize=256)
def carries_counts(one: Algorithm) -> bool:
    """Return whether an algorithm works where the ranks' blocks differ in length.

    Found out on a few numbers of ranks; a plan looks at its own again.
    """
    if operation(one.coll).out_count == "none":
        return False
    for size in filter(one.supports, _FEW_RANKS):
        own = schedule(one.coll, one.name, size, root=size // 2)
        found = parts_of(own)
        if found is None or not found.stays_in_pairs(own):
            return False
        if not found.one_pair_at_a_time(own):
            return False
    return True


def get(coll: str, name: str) -> Algorithm:
    """Return algorithm ``name`` of ``coll``, or raise UsageError with a suggestion."""
    try:
        return _ALGORITHMS[operation(coll).vector_of or coll, name]
    except KeyError:
        raise UsageError(
            f"unknown {coll} algorithm {name!r}{suggest(name, names(coll))}"
        ) from None


def param_choices(coll: str, name: str, size: int) -> dict[str, tuple[int, ...]]:
    """Return the values of each parameter on ``size`` ranks, the default first."""
    choices = get(coll, name).choices
    found = choices(size) if callable(choices) else choices
    return {key: tuple(values) for key, values in found.items()}


def schedule(
    coll: str,
    name: str,
    size: int,
    root: int = 0,
    params: Mapping[str, int] | None = None,
) -> Schedule:
    """Return the schedule of an algorithm; equal arguments give the same object."""
    if size < 1:
        raise UsageError(f"{coll} {name}: size={size} is not a number of ranks")
    if not 0 <= root < size:
        raise UsageError(f"{coll} {name}: root={root} is not a rank below {size}")
    if not get(coll, name).supports(size):
        raise UsageError(f"{coll} algorithm {name!r} does not support {size} ranks")
    values = _check_params(coll, name, size, params or {})
    root = root if operation(coll).has_root else 0
    return _schedule(get(coll, name), size, root, tuple(sorted(values.items())))


def _check_params(
    coll: str, name: str, size: int, params: Mapping[str, int]
) -> dict[str, int]:
    choices = param_choices(coll, name, size)
    values = {key: allowed[0] for key, allowed in choices.items()}
    for key, value in params.items():
        if key not in choices:
            raise UsageError(
                f"{coll} {name}: unknown parameter {key!r}{suggest(key, choices)}"
            )
        if value not in choices[key]:
            raise UsageError(
                f"{coll} {name} on {size} ranks: {key}={value!r} is not one of "
                f"{', '.join(map(str, choices[key]))}"
            )
        values[key] = value
    return values


@lru_cache(maxsize=256)
def _schedule(
    what: Algorithm, size: int, root: int, params: tuple[tuple[str, int], ...]
) -> Schedule:
    values = dict(params)

    def make(rank: int) -> RankProgram:
        return build_program(what.author, what.coll, rank, size, root, values)

    return Schedule(what.coll, what.name, size, root, make, values, what.redop_class)
