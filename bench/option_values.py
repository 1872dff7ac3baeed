# SPDX-License-Identifier: Apache-2.0
"""Values on the command lines of benchmarks: sizes, ranks, element types, seconds."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Collection
from typing import TypeVar

from commrt.errors import UsageError, suggest
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.limits import parse_seconds

__all__ = [
    "argument",
    "check_dtype",
    "count",
    "densities",
    "doubling_sizes",
    "dtype_name",
    "names_among",
    "osu_range",
    "rank_list",
    "seconds",
    "size_list",
]

# OSU spells MPI's names, in any case, with or without the prefix.
_OSU_DTYPES = {
    "char": "int8",
    "int": "int32",
    "float": "float32",
    "double": "float64",
}

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse show the parser's own words instead of the function's name."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def count(smallest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``smallest`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise UsageError(f"{text!r} is not a whole number from {smallest} on")
        return number

    return argument(parse)


def _positive_seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from None


seconds = argument(_positive_seconds)
"""Parses a number of seconds above 0; inf is no limit."""


def doubling_sizes(low: int, high: int, factor: int = 2) -> list[int]:
    """Return low, low·factor, … up to high."""
    if not (1 <= low <= high and factor >= 2):
        raise UsageError(
            f"sizes {low}:{high}:{factor}: 1 <= MIN <= MAX and FACTOR >= 2 are needed, "
            f"in bytes"
        )
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= factor
    return sizes


def osu_range(text: str, smallest: int) -> list[int]:
    """Parse OSU's ``-m [MIN:]MAX``; MIN is one element unless given."""
    low, colon, high = text.partition(":")
    try:
        bounds = (int(low), int(high)) if colon else (smallest, int(low))
    except ValueError:
        raise UsageError(
            f"-m {text}: write bytes, as in 1048576 or 8:1048576"
        ) from None
    return doubling_sizes(*bounds)


def size_list(text: str) -> list[int]:
    """Parse ``MIN:MAX``, ``MIN:MAX:FACTOR`` or a list ``8,1000,65536``."""
    try:
        if ":" in text:
            return doubling_sizes(*(int(part) for part in text.split(":")))
        sizes = [int(part) for part in text.split(",")]
    except (ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"sizes {text!r}: write MIN:MAX[:FACTOR] or a list such as 8,1000,65536"
        ) from None
    if min(sizes) < 1:
        raise UsageError(f"sizes {text!r}: a size is at least 1 byte")
    return sizes


def dtype_name(text: str) -> str:
    """Parse an element type by commrt's name or by OSU's."""
    name = text.lower().removeprefix("mpi_")
    return dtype_by_name(_OSU_DTYPES.get(name, name)).name


def check_dtype(name: str) -> None:
    """Raise UsageError where numpy needs a package for ``name`` that is not here."""
    needed = dtype_by_name(name).needs_ml_dtypes
    if needed and importlib.util.find_spec("ml_dtypes") is None:
        raise UsageError(
            f"-T {name}: numpy has it from the package ml_dtypes, which is not "
            "installed: pip install ml_dtypes"
        )


def rank_list(text: str) -> list[int]:
    """Parse numbers of ranks, as in ``2,4``."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--ranks {text!r}: write numbers, as in 2,4") from None
    if min(counts) < 1:
        raise UsageError(f"--ranks {text!r}: at least one rank is needed")
    return counts


def densities(text: str) -> list[float]:
    """Parse parts of a vector's elements, as in ``0.001,0.01``."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= density <= 1 for density in found):
        raise UsageError(
            f"--densities {text!r}: write numbers in 0..1, as in 0.001,0.01"
        )
    return found


def names_among(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of some of these names, with commas between them."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise UsageError(f"{name!r} is unknown{suggest(name, known)}")
        return names

    return argument(parse)
