# SPDX-License-Identifier: Apache-2.0
"""Registry of algorithms, and the schedules they make.

Third parties register theirs with the same decorator as the built-in ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import product
from math import inf
from pkgutil import iter_modules
from typing import Any

from commrt.errors import UsageError, shown, suggest
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import ParamValue, RankProgram, RedopClass, Schedule
from commrt.schedule.nodes import Nodes, check_nodes
from commrt.schedule.parts import parts_of
from commrt.vocabulary.checks import as_integer, check_flag
from commrt.vocabulary.operations import operation

__all__ = [
    "Algorithm",
    "Params",
    "algorithm",
    "get",
    "names",
    "offered_params",
    "param_choices",
    "schedule",
    "simplest_first",
]

Author = Callable[[Builder], None]
Params = Mapping[str, ParamValue]
Choices = Mapping[str, tuple[ParamValue, ...]]
ChoicesOf = Callable[[int], Choices]
NodeChoices = Callable[[Nodes | None], Choices]

RESERVED = ("native", "auto", "none")
"""Names with another meaning where an algorithm is named."""


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One algorithm of one operation."""

    coll: str
    name: str
    author: Author
    """Records the steps of one rank."""
    choices: Choices | ChoicesOf | NodeChoices
    """Values of each parameter, the default first; or a function of the size, or of the
    nodes."""
    supports_size: Callable[[int], bool]
    """True if a number of ranks is supported."""
    latency: bool
    """Latency-optimal: few steps, for short messages."""
    bandwidth: bool
    """Bandwidth-optimal: few bytes, for long messages."""
    redop_class: RedopClass
    """``ordered`` if contributions are combined in rank order."""
    spans_nodes: bool = False
    """True if it must know which ranks share a node: without several, it is none."""
    offered: Callable[[int, Params], bool] | None = None
    """Predicate on the number of ranks and the parameters: True if these values are
    candidates for any call. Other values run only where a call names them. None: all
    are candidates."""
    complexity: int | None = None
    """Its place among its operation's, the simplest first; None: after all of them."""
    own_places: bool = False
    """True if it puts a rank's block elsewhere than at the rank's place on the way."""

    def supports(self, size: int, nodes: Nodes | None = None) -> bool:
        """Return whether it exists for so many ranks, on these nodes."""
        if self.spans_nodes and (nodes is None or not 1 < max(nodes) + 1 < size):
            return False
        return self.supports_size(size)

    @property
    def doc(self) -> str:
        """The first line of the author's docstring."""
        return (self.author.__doc__ or "").strip().partition("\n")[0]

    @property
    def built_in(self) -> bool:
        """True if it is part of this package, whose tests prove it right."""
        return self.author.__module__.startswith("commrt.algorithms.")


_ALGORITHMS: dict[tuple[str, str], Algorithm] = {}


def algorithm(
    coll: str,
    name: str,
    *,
    params: Choices | ChoicesOf | NodeChoices | None = None,
    supports: Callable[[int], bool] | None = None,
    latency: bool = False,
    bandwidth: bool = False,
    ordered: bool = False,
    spans_nodes: bool = False,
    offered: Callable[[int, Params], bool] | None = None,
    complexity: int | None = None,
    own_places: bool = False,
) -> Callable[[Author], Author]:
    """Register the decorated function as algorithm ``name`` of operation ``coll``.

    Args:
        coll: the operation, such as ``"allreduce"``.
        name: lower-case letters, digits and underscores; new for this operation.
        params: values of each parameter (integers or words), the default first, or a
            function that returns them for a number of ranks.
        supports: whether a number of ranks is supported; all are, if left out.
        latency: it has few steps: made for short messages. ``info`` shows it; the
            model counts the steps itself.
        bandwidth: it moves few bytes: made for long messages; likewise.
        ordered: contributions are combined in rank order.
        spans_nodes: it is made for ranks on several nodes, of which at least one has
            several ranks; ``b.nodes`` says which. A function given as ``params`` then
            gets the number of the node of each rank, or None for all that may be.
        offered: whether values of the parameters, for a number of ranks, are worth a
            try where nobody names them; all are, if left out.
        complexity: its place among the candidates, of which the simplest stands first.
            The built-in ones have 10, 20, ... and stand before all others; without a
            number it stands last.
        own_places: it keeps the ranks' blocks at places of its own on the way, so that
            it needs blocks of equal length.
    """
    spec = operation(coll)
    is_name = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)
    if not is_name or name in RESERVED:
        raise UsageError(
            f"algorithm name {shown(name)}: use lower-case letters, digits and "
            f"underscores, and none of {', '.join(RESERVED)}"
        )
    if spec.vector_of is not None:
        raise UsageError(
            f"{coll} runs the algorithms of {spec.vector_of}: register {shown(name)} "
            "there"
        )
    if (coll, name) in _ALGORITHMS:
        raise UsageError(
            f"{coll} already has an algorithm {shown(name)}; choose another name"
        )
    for what, flag in (
        ("latency", latency),
        ("bandwidth", bandwidth),
        ("ordered", ordered),
        ("spans_nodes", spans_nodes),
        ("own_places", own_places),
    ):
        check_flag(f"algorithm {name}", what, flag)
    for what, function in (("supports", supports), ("offered", offered)):
        if function is not None and not callable(function):
            raise UsageError(
                f"algorithm {name}: {what}={shown(function)} must be a function, or "
                f"None"
            )
    if params is not None and not (callable(params) or isinstance(params, Mapping)):
        raise UsageError(
            f"algorithm {name}: params={shown(params)} must be the values of each "
            f"parameter, or a function that returns them"
        )
    if complexity is not None and as_integer(complexity) is None:
        raise UsageError(
            f"algorithm {name}: complexity={shown(complexity)} must be an integer, or "
            f"None"
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
            spans_nodes,
            offered,
            complexity,
            own_places,
        )
        return author

    return register


def import_files(package: str, folders: Iterable[str]) -> None:
    """Import a package's files, by name, but those that begin with an underscore."""
    found = {module.name for module in iter_modules(folders)}
    for name in sorted(found):
        if not name.startswith("_"):
            import_module(f"{package}.{name}")


def names(
    coll: str, size: int | None = None, nodes: Nodes | None = None
) -> tuple[str, ...]:
    """Return the names of the algorithms of ``coll``, sorted.

    Args:
        coll: the operation.
        size: only those that exist for so many ranks.
        nodes: the number of the node of each rank; None: all are on one.
    """
    plain = operation(coll).vector_of
    return tuple(
        sorted(
            name
            for (which, name), one in _ALGORITHMS.items()
            if which == (plain or coll)
            and (size is None or one.supports(size, nodes))
            and (plain is None or carries_counts(one))
        )
    )


def exists(
    coll: str, name: str, size: int | None = None, nodes: Nodes | None = None
) -> bool:
    """Return whether ``names`` has a name; quicker."""
    plain = operation(coll).vector_of
    one = _ALGORITHMS.get((plain or coll, name))
    if one is None or not (size is None or one.supports(size, nodes)):
        return False
    return plain is None or carries_counts(one)


def simplest_first(coll: str, found: Iterable[str]) -> list[str]:
    """Return names of algorithms of ``coll``, this package's and the simplest first."""

    def place(name: str) -> tuple[bool, float, str]:
        one = get(coll, name)
        at = inf if one.complexity is None else one.complexity
        return not one.built_in, at, name

    return sorted(found, key=place)


_FEW_RANKS = range(2, 9)


@lru_cache(maxsize=256)
def carries_counts(one: Algorithm) -> bool:
    """Return whether an algorithm works where the ranks' blocks differ in length.

    The answer comes from a few numbers of ranks; a plan looks at its own again. An
    algorithm that spans nodes cuts its inner algorithms' blocks anew, and is left out.
    """
    if one.spans_nodes or operation(one.coll).out_count == "none":
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
            f"unknown {coll} algorithm {shown(name)}{suggest(name, names(coll))}"
        ) from None


def param_choices(
    coll: str, name: str, size: int, nodes: Nodes | None = None
) -> dict[str, tuple[ParamValue, ...]]:
    """Return the values of each parameter on ``size`` ranks, the default first.

    Without ``nodes``, an algorithm that spans nodes has all values that it may have.
    """
    one = get(coll, name)
    found: Any = one.choices
    if callable(found):
        found = found(nodes if one.spans_nodes else size)
    return {key: tuple(values) for key, values in found.items()}


def offered_params(
    coll: str, name: str, size: int, nodes: Nodes | None = None
) -> Iterator[dict[str, ParamValue]]:
    """Yield the values of all parameters that are candidates where nobody names any."""
    choices = param_choices(coll, name, size, nodes)
    offered = get(coll, name).offered
    for values in product(*choices.values()):
        params = dict(zip(choices, values, strict=True))
        if offered is None or offered(size, params):
            yield params


def schedule(
    coll: str,
    name: str,
    size: int,
    root: int = 0,
    params: Params | None = None,
    nodes: Nodes | None = None,
) -> Schedule:
    """Return the schedule of an algorithm; equal arguments give the same object.

    Args:
        coll: the operation.
        name: the algorithm.
        size: number of ranks.
        root: the root, where the operation has one.
        params: values of its parameters; the defaults, where left out.
        nodes: the number of the node of each rank, for algorithms that span nodes.
    """
    one = get(coll, name)
    if size < 1:
        raise UsageError(
            f"{coll} {name}: size={size} is not a number of ranks; expected 1 or more"
        )
    if not 0 <= root < size:
        raise UsageError(
            f"{coll} {name}: root={root} is not a rank below {size}; expected "
            f"0..{size - 1}"
        )
    nodes = check_nodes(nodes, size) if one.spans_nodes and nodes else None
    if not one.supports(size, nodes):
        where = f"{size} ranks"
        if one.spans_nodes and one.supports_size(size):
            where += " that are not on several nodes, two or more on one of them"
        raise UsageError(f"{coll} algorithm {shown(name)} does not support {where}")
    values = _check_params(coll, name, size, params or {}, nodes)
    root = root if operation(coll).has_root else 0
    return _schedule(one, size, root, tuple(sorted(values.items())), nodes)


def _check_params(
    coll: str, name: str, size: int, params: Params, nodes: Nodes | None
) -> dict[str, ParamValue]:
    choices = param_choices(coll, name, size, nodes)
    values = {key: allowed[0] for key, allowed in choices.items()}
    for key, value in params.items():
        if key not in choices:
            raise UsageError(
                f"{coll} {name}: unknown parameter {shown(key)}{suggest(key, choices)}"
            )
        if value not in choices[key]:
            raise UsageError(
                f"{coll} {name} on {size} ranks: {key}={shown(value)} is not one of "
                f"{', '.join(map(str, choices[key]))}"
            )
        values[key] = value
    return values


@lru_cache(maxsize=256)
def _schedule(
    what: Algorithm,
    size: int,
    root: int,
    params: tuple[tuple[str, ParamValue], ...],
    nodes: Nodes | None,
) -> Schedule:
    values = dict(params)

    def make(rank: int) -> RankProgram:
        return build_program(what.author, what.coll, rank, size, root, values, nodes)

    return Schedule(
        *(what.coll, what.name, size, root, make, values, what.redop_class, nodes)
    )
