# SPDX-License-Identifier: Apache-2.0
"""Running one algorithm as a part of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import lcm
from types import MappingProxyType

from commrt.algorithms._registry import get, names, param_choices, schedule
from commrt.schedule.builder import Builder
from commrt.schedule.ir import ParamValue, Slice
from commrt.schedule.nested import Nested
from commrt.vocabulary.operations import operation

__all__ = ["common_names", "cut", "run"]

_EVEN = 64
"""Most blocks for which all algorithms get blocks of equal length."""
_FINE = 4
"""Factor for more blocks than ``_EVEN``: their number over the most that one algorithm
asks for. A block is at most a fifth too long."""


def run(
    b: Builder,
    coll: str,
    name: str,
    ranks: Sequence[int],
    *,
    inp: Sequence[Slice],
    out: Sequence[Slice],
    root: int = 0,
) -> None:
    """Record operation ``coll`` by algorithm ``name`` among ``ranks`` of ``b``.

    Args:
        b: the builder of the whole.
        coll: the operation.
        name: its algorithm, with its default parameters.
        ranks: who takes part, this rank among them.
        inp: the send buffer: one slice, or one per rank where there is a block for
            each; empty where this rank has none.
        out: the receive buffer, likewise. Both may be the same.
        root: place of the root among ``ranks``.
    """
    if len(ranks) == 1:
        for dst, src in zip(out, inp, strict=False):
            if dst != src and dst.lo < dst.hi:
                b.copy(dst, src)
        return
    author, params = _by_default(coll, name, len(ranks))
    author(Nested.of(b, coll, ranks, inp=inp, out=out, root=root, params=params))


@lru_cache(maxsize=1024)
def _by_default(
    coll: str, name: str, size: int
) -> tuple[Callable[[Builder], None], Mapping[str, ParamValue]]:
    """Return an algorithm's function and the default values of its parameters."""
    choices = param_choices(coll, name, size)
    params = {key: values[0] for key, values in choices.items()}
    return get(coll, name).author, MappingProxyType(params)


@lru_cache(maxsize=1024)
def _blocks(coll: str, name: str, size: int) -> int:
    """Return into how many blocks an algorithm cuts the full vector."""
    if size == 1:
        return 1
    return max(space.nblk for space in schedule(coll, name, size).program(0).spaces[:2])


def cut(parts: Iterable[tuple[str, str, int]]) -> int:
    """Return the number of blocks that suits all (operation, algorithm, ranks)."""
    wanted = [_blocks(*part) for part in parts]
    even = lcm(*wanted)
    return even if even <= _EVEN else max(_FINE * max(wanted), _EVEN)


def common_names(colls: Iterable[str], sizes: Iterable[int]) -> list[str]:
    """Return the algorithms that all of ``colls`` have for all of ``sizes``."""
    several = [size for size in sizes if size > 1]
    found = [
        set(names(coll, size)) if size else _flat(coll)
        for coll in colls
        for size in (several or [0])
    ]
    return sorted(set.intersection(*found))


def _flat(coll: str) -> set[str]:
    """Return all algorithms that need not know the nodes."""
    operation(coll)
    return {name for name in names(coll) if not get(coll, name).spans_nodes}
