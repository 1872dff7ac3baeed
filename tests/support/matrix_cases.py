# SPDX-License-Identifier: Apache-2.0
"""Cases of the two matrices, how one rank takes part, and how its result is compared.

A rank's arrays lie in memory whose every byte is known before a call and afterwards:
what must come is written into a picture of it, which also shows the space around the
arrays and the inputs. One comparison tells a wrong result, a byte written beside it, a
changed input and an output that should have been left alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from cases import OWN_BLOCK, Case
from matrix_values import AFFINE, MESSAGES, Drawn, Problem

from commrt.vocabulary.operations import operation

Array = np.ndarray[Any, Any]

MEMORIES = ("plain", "heap", "mixed")
"""Ordinary arrays, symmetric ones, or ``x`` of one kind and ``out`` of the other."""
_EDGE = 64
_FILL = 0xA5


@dataclass(frozen=True)
class Trial:
    """One case of a matrix: one call on every rank."""

    case: Case
    form: str = "nonblocking"
    kind: str = "plain"
    memory: str = "plain"
    nodes: str = ""
    """How many ranks are on each node, as COMMRT_NODES says it; empty: one node."""

    def line(self) -> str:
        """Return the case as text, which ``read`` reads: it repeats the case alone."""
        return json.dumps({**vars(self.case), **_without_case(self)})

    def needs(self) -> tuple[Any, ...]:
        """Return what trials that share a problem have in common."""
        case = self.case
        named = case.coll, case.size, case.algorithm, str(case.params), self.kind
        return *named, case.dtype, case.op, case.root, case.count, case.spread

    @property
    def shape(self) -> tuple[str, str, str]:
        """Operation, algorithm and form."""
        return self.case.coll, self.case.algorithm or "automatic", self.form


def _without_case(trial: Trial) -> dict[str, str]:
    return {
        "form": trial.form,
        "kind": trial.kind,
        "memory": trial.memory,
        "nodes": trial.nodes,
    }


def read(line: str) -> Trial:
    """Return the case that ``line`` says."""
    fields = json.loads(line)
    own = {name: fields.pop(name) for name in _without_case(Trial(Case("", 1)))}
    return Trial(Case(**fields), **own)


# -- forms --------------------------------------------------------------------------

Go = Callable[[bool], Any]
"""Makes the call; the argument says whether it returns a request."""


@dataclass(frozen=True)
class Form:
    """A way to call."""

    name: str
    prepare: Callable[[Any, Side], Go]
    """What to do on a rank, before any rank calls."""
    blocks: tuple[bool, ...]
    """For each time that it is run, with new numbers: whether it blocks."""
    messages: bool = True
    """Whether point-to-point has it, too."""


class _Both:
    """A send and a receive, as one request."""

    def __init__(self, sent: Any, received: Any) -> None:
        self._sent, self._received = sent, received

    @property
    def done(self) -> bool:
        return bool(self._sent.done and self._received.done)

    def wait(self) -> Any:
        self._sent.wait()
        return self._received.wait()


def _call(comm: Any, side: Side) -> Go:
    if side.coll == "send":
        return partial(_send, comm, side)
    ready = partial(getattr(comm, side.coll), *side.given, **side.keywords)
    return lambda nonblocking: ready(nonblocking=nonblocking)


def _send(comm: Any, side: Side, nonblocking: bool) -> Any:
    dest, source = side.keywords["dest"], side.keywords["source"]
    received = comm.recv(side.out, source=source, nonblocking=True)
    sent = comm.send(side.x, dest=dest, nonblocking=nonblocking)
    return _Both(sent, received) if nonblocking else received.wait()


def _plan(comm: Any, side: Side) -> Go:
    plan = getattr(comm.plan, side.coll)(*side.given, **side.keywords)
    return lambda nonblocking: plan.start() if nonblocking else plan()


FORMS = {
    form.name: form
    for form in (
        Form("blocking", _call, (True,)),
        Form("nonblocking", _call, (False,)),
        Form("persistent", _plan, (False, True), messages=False),
    )
}


# -- one rank's part ----------------------------------------------------------------


class Side:
    """One rank's arrays in one trial.

    ``memory`` and ``other`` are bytes to lie in; ``other`` holds ``out`` where that is
    an array of its own.
    """

    def __init__(
        self, problem: Problem, trial: Trial, rank: int, memory: Array, other: Array
    ) -> None:
        self.problem, self.rank = problem, rank
        self.coll = problem.coll
        num_x, num_out = problem.x_counts[rank], problem.out_counts[rank]
        joined = None
        if trial.case.in_place and num_out is not None:
            joined = self._joined(num_x, num_out)
        x_at, out_at, length = joined or (0, None, num_x)
        # Elements are aligned, lines of the cache are not.
        start = _EDGE + 16 * (rank % 4)
        values, end = self._array(memory, start, length)
        self._raws = [memory[: end + _EDGE]]
        self._pictures: list[Array] = []
        self.x = values[x_at : x_at + num_x]
        self.out: Array | None = None
        self.given: tuple[Any, ...] = () if self.coll == "barrier" else (self.x,)
        self.keywords = dict(problem.arguments[rank])
        if out_at is not None and self._in_place_is_usual():
            self.out = self.x
        elif num_out is not None:
            if out_at is not None:
                self.out = values[out_at : out_at + num_out]
            else:
                self.out = self._apart(memory, other, end, num_out)
            self.keywords["out"] = self.out
        self._want: Array | None = None
        self._slack: Array | None = None

    def _array(self, memory: Array, start: int, count: int) -> tuple[Array, int]:
        """Return an array that begins at a byte, and where it ends."""
        end = start + count * self.problem.dtype.itemsize
        return memory[start:end].view(self.problem.dtype), end

    def _apart(self, memory: Array, other: Array, x_end: int, count: int) -> Array:
        """Return an output of its own, behind x if both lie in one piece of memory."""
        if other is memory:
            start = x_end + _EDGE + -(x_end + _EDGE) % 16
            out, end = self._array(memory, start, count)
            self._raws = [memory[: end + _EDGE]]
        else:
            out, end = self._array(other, _EDGE, count)
            self._raws.append(other[: end + _EDGE])
        return out

    def _in_place_is_usual(self) -> bool:
        return not self.problem.is_message and operation(self.coll).in_place

    def _joined(self, num_x: int, num_out: int) -> tuple[int, int, int] | None:
        """Return where x and out begin in what holds both, and how long that is.

        None where the operation has no such form on this rank.
        """
        problem, rank, coll = self.problem, self.rank, self.coll
        if problem.is_message:
            return None
        if operation(coll).in_place:
            return 0, 0, num_x
        if coll == "alltoallv":
            column = [row[rank] for row in problem.pairs]
            return (0, 0, num_x) if problem.pairs[rank] == column else None
        start = problem.block_start(rank)
        if coll in OWN_BLOCK or rank == problem.case.root:
            if coll in ("allgather", "allgatherv", "gather", "gatherv"):
                return start, 0, num_out
            return 0, start, num_x
        return None

    def load(self, drawn: Drawn) -> None:
        """Write this rank's numbers, and the picture of what must come of them."""
        for raw in self._raws:
            raw.fill(_FILL)
        problem, rank = self.problem, self.rank
        receives_only = self.coll == "bcast" and rank != problem.case.root
        if not receives_only:
            self.x[...] = drawn.xs[rank]
        self._want = drawn.wants[rank]
        self._slack = None if drawn.slack is None else drawn.slack[rank]
        self._pictures = [raw.copy() for raw in self._raws]
        if self.out is not None and self._want is not None and self._slack is None:
            self._in_picture(self.out)[...] = self._want

    def _in_picture(self, array: Array) -> Array:
        """Return the part of a picture that shows ``array``."""
        address = array.__array_interface__["data"][0]
        for raw, picture in zip(self._raws, self._pictures, strict=True):
            at = address - raw.__array_interface__["data"][0]
            if 0 <= at <= raw.size - array.nbytes:
                return picture[at : at + array.nbytes].view(array.dtype)
        raise AssertionError("an array outside of its memory")

    def pretend(self) -> Array:
        """Make the memory as it must become, of a trial without slack; return it."""
        for raw, picture in zip(self._raws, self._pictures, strict=True):
            raw[...] = picture
        return self._raws[0]

    def verdict(self, result: Any) -> str | None:
        """Return what is wrong with what came, None if it is right."""
        if result is not self.out:
            return f"returned {type(result).__name__}, not the output"
        if self._slack is not None and self.out is not None:
            wrong = self._beyond_slack(self.out)
            if wrong is not None:
                return wrong
            self._in_picture(self.out)[...] = self.out
        for raw, picture in zip(self._raws, self._pictures, strict=True):
            if not np.array_equal(raw, picture):
                return self._difference()
        return None

    def _beyond_slack(self, out: Array) -> str | None:
        want = self._want
        assert want is not None
        # NaN compares false, so it never passes.
        wrong = ~(np.abs(out.astype(want.dtype) - want) <= self._slack)
        return _first(wrong, out, want) if wrong.any() else None

    def _difference(self) -> str | None:
        """Return the difference in words; None if only bits of equal numbers differ."""
        out, want = self.out, self._want
        if out is not None and want is not None:
            with np.errstate(invalid="ignore"):
                wrong = out != want
                if out.dtype.names is None:
                    wrong &= ~((out != out) & (want != want))
            if wrong.any():
                return _first(wrong, out, want)
            bits_count = not self.problem.rounds or self.problem.kind != "plain"
            if bits_count and not self._only_nans_differ(out, want):
                return "other bits of equal numbers"
            self._in_picture(out)[...] = out
        for raw, picture in zip(self._raws, self._pictures, strict=True):
            if not np.array_equal(raw, picture):
                return self._place(raw, picture)
        return None

    def _only_nans_differ(self, out: Array, want: Array) -> bool:
        """Whether all but NaNs have the same bits, of an operation that computes."""
        if not self.problem.rounds:
            return out.tobytes() == want.tobytes()
        numbers = out == out
        return out[numbers].tobytes() == want[numbers].tobytes()

    def _place(self, raw: Array, picture: Array) -> str:
        at = int(np.flatnonzero(raw != picture)[0])
        address = raw.__array_interface__["data"][0] + at
        for name, array in (("x", self.x), ("out", self.out)):
            if array is None:
                continue
            first = array.__array_interface__["data"][0]
            if first <= address < first + array.nbytes:
                index = (address - first) // array.dtype.itemsize
                return f"changed {name}[{index}], which was to be left alone"
        return f"wrote beside its arrays, at byte {at} of {raw.size}"


def _first(wrong: Array, got: Array, want: Array) -> str:
    at = int(np.flatnonzero(wrong)[0])
    return f"element {at} is {got[at]!r}, expected {want[at]!r}; {wrong.sum()} wrong"


def nbytes_needed(problem: Problem) -> int:
    """Return the bytes that both arrays of any rank can lie in, one after the other."""
    longest = max(
        x + (out or 0)
        for x, out in zip(problem.x_counts, problem.out_counts, strict=True)
    )
    return longest * problem.dtype.itemsize + 6 * _EDGE


def numbers_of(trial: Trial, run: int) -> random.Random:
    """Return what draws the numbers of a trial, the same on all ranks."""
    return random.Random(f"{trial.line()} {run}")


__all__ = [
    "AFFINE",
    "FORMS",
    "MEMORIES",
    "MESSAGES",
    "Form",
    "Go",
    "Side",
    "Trial",
    "nbytes_needed",
    "numbers_of",
    "read",
]
