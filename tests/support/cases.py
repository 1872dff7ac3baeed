# SPDX-License-Identifier: Apache-2.0
"""Calls of collectives as data: inputs, numpy's result, the call, the comparison.

Used with ranks as threads and with MPI ranks alike. A reference is computed in float64,
complex128 or exact integers, never in the type under test.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from commrt import algorithms
from commrt.errors import CommError, UsageError
from commrt.vocabulary.dtypes import DTYPES, ReduceOp, check_reduction, dtype_by_name
from commrt.vocabulary.operations import operation

Array = np.ndarray[Any, Any]

CANARY = 8
"""Elements around every output that must stay untouched."""
FRAGMENTED = 4096
"""A chunk so small that a few thousand elements make several fragments."""
COUNTS = (0, 1, 3, 5, 64, 257, 5000)
SPREADS = ("even", "ragged", "one")
REDUCTIONS = tuple(op.name.lower() for op in ReduceOp)


@dataclass(frozen=True)
class Case:
    """One call on every rank."""

    coll: str
    size: int
    algorithm: str | None = None
    """``NAME`` or ``BACKEND/NAME``; None: the automatic choice."""
    params: dict[str, int | str] = field(default_factory=dict)
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    count: int = 5
    """Elements of ``x``, or of one block where ``x`` has a block per rank."""
    in_place: bool = False
    spread: str = "even"
    """How a vector operation's blocks differ: ``even``, ``ragged``, or ``one`` has all
    there is."""

    def describe(self) -> dict[str, Any]:
        """Return the case as plain data, for messages and for other processes."""
        return asdict(self)

    def length(self, source: int, dest: int = 0) -> int:
        """Return the elements of one block; ``dest`` differs in an alltoallv only."""
        if self.spread == "ragged":
            return self.count * ((source * 5 + dest * 3 + 1) % 4) // 2
        if self.spread == "one":
            full = (source, dest % self.size) == (self.count % self.size, 0)
            return self.count * self.size if full else 0
        return self.count

    def counts(self) -> list[int]:
        """Return the elements of each rank's block."""
        return [self.length(rank) for rank in range(self.size)]

    def pairs(self) -> list[list[int]]:
        """Return what each rank of an alltoallv sends to each."""
        ranks = range(self.size)
        return [[self.length(source, dest) for dest in ranks] for source in ranks]

    def x_elements(self, rank: int) -> int:
        """Return the elements of ``x`` on ``rank``."""
        if self.coll == "alltoallv":
            return sum(self.pairs()[rank])
        if self.coll in ("reduce_scatterv", "scatterv"):
            return sum(self.counts())
        if self.coll in ("allgatherv", "gatherv"):
            return self.length(rank)
        per_rank = self.coll in ("reduce_scatter", "alltoall", "scatter")
        return self.count * self.size if per_rank else self.count

    def factor(self, rank: int) -> int | float:
        """Return what ``rank`` multiplies its input by in premul_sum."""
        kind = dtype_by_name(self.dtype).kind
        if kind in ("int", "uint"):
            return (3, 2 if kind == "uint" else -2, 1, 7)[rank % 4]
        return (0.3, -1.25, 1.0, 3.0)[rank % 4]

    def arguments(self, rank: int) -> dict[str, Any]:
        """Return the keyword arguments of the call on ``rank``, without ``out``."""
        spec = operation(self.coll)
        found: dict[str, Any] = {}
        if spec.reduces:
            found["op"] = self.op
        if spec.reduces and self.op == "premul_sum":
            found["factor"] = self.factor(rank)
        if spec.has_root:
            found["root"] = self.root
        if self.coll == "alltoallv":
            found["send_counts"] = self.pairs()[rank]
            found["recv_counts"] = tuple(row[rank] for row in self.pairs())
        elif spec.count_arguments:
            found["counts"] = self.counts()
        if self.algorithm is not None:
            found["algorithm"] = self.algorithm
        if self.params:
            found["params"] = dict(self.params)
        return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's type; those that numpy lacks come from ml_dtypes."""
    owner: Any = ml_dtypes if dtype_by_name(name).needs_ml_dtypes else np
    return np.dtype(getattr(owner, "bool_" if name == "bool" else name))


def legal_pairs(coll: str = "allreduce") -> list[tuple[str, str]]:
    """Return every (dtype, reduction) that the Contract allows in ``coll``."""
    pairs = []
    prefix = operation(coll).combines_some
    for dtype in DTYPES:
        for op in REDUCTIONS:
            if prefix and op == "avg":
                continue
            try:
                check_reduction(ReduceOp[op.upper()], dtype)
            except UsageError:
                continue
            pairs.append((dtype.name, op))
    return pairs


def ways(
    coll: str, size: int, nodes: tuple[int, ...] | None = None
) -> list[tuple[str | None, dict[str, int | str]]]:
    """Return (algorithm, parameters) of every schedule for ``coll``, and automatic."""
    found: list[tuple[str | None, dict[str, int | str]]] = [(None, {})]
    for name in algorithms.names(coll, size, nodes):
        found.append((name, {}))
        for param, values in algorithms.param_choices(coll, name, size, nodes).items():
            found.extend((name, {param: value}) for value in values[1:])
    return found


OWN_BLOCK = ("allgather", "allgatherv", "reduce_scatter", "reduce_scatterv")
"""Where one array may be this rank's block of the other."""

TRANSPORTS: tuple[dict[str, int | str], ...] = (
    {},
    {"chunk": FRAGMENTED},
    {"chunk": FRAGMENTED, "depth": 1, "reuse": 1},
    {"spins": 0, "inline": 48},
    {"chunk": FRAGMENTED, "depth": 8, "store": "stream"},
    {"chunk": 512, "reuse": 8, "store": "stream_both"},
)


def sample(coll: str, size: int, seed: int, number: int) -> list[Case]:
    """Return ``number`` random cases; the same for the same arguments."""
    rng = random.Random(f"{coll}/{size}/{seed}")
    pairs, found = legal_pairs(coll), ways(coll, size)
    return [_draw(coll, size, rng, pairs, found) for _ in range(number)]


def _draw(
    coll: str,
    size: int,
    rng: random.Random,
    pairs: list[tuple[str, str]],
    found: list[tuple[str | None, dict[str, int | str]]],
) -> Case:
    dtype, op = rng.choice(pairs)
    algorithm, own = rng.choice(found)
    spreads = SPREADS if operation(coll).count_arguments else SPREADS[:1]
    # The automatic choice is not to be told parameters of one algorithm.
    transport = rng.choice(TRANSPORTS)
    return Case(
        coll=coll,
        size=size,
        algorithm=algorithm,
        params={**own, **transport},
        dtype=dtype,
        op=op,
        root=rng.randrange(size),
        count=rng.choice(COUNTS),
        in_place=rng.random() < 0.5,
        spread=rng.choice(spreads),
    )


# -- inputs and results -----------------------------------------------------------


def inputs(case: Case) -> list[Array]:
    """Return every rank's ``x``; the placement is each rank's own business."""
    seed = zlib.crc32(repr(replace(case, in_place=False)).encode())
    rng = np.random.default_rng(seed)
    return [_values(case, case.x_elements(rank), rng) for rank in range(case.size)]


def _values(case: Case, number: int, rng: np.random.Generator) -> Array:
    dtype = dtype_by_name(case.dtype)
    if dtype.kind == "bool":
        return rng.random(number) < 0.7
    if dtype.kind in ("int", "uint"):
        limits = np.iinfo(dtype.name)
        values = rng.integers(
            limits.min, limits.max, number, dtype=dtype.name, endpoint=True
        )
        if case.op in ("land", "lor", "lxor"):
            values[rng.random(number) < 0.4] = 0
        return values
    values = rng.uniform(0.5, 2.0, number) * rng.choice([-1.0, 1.0], number)
    if dtype.kind == "complex":
        values = values + 1j * rng.uniform(-1.0, 1.0, number)
    if case.op in ("land", "lor", "lxor"):
        values[rng.random(number) < 0.4] = 0
    if case.op in ("min", "max"):
        values[rng.random(number) < 0.1] = np.nan
        values[rng.random(number) < 0.1] = np.inf
    return values.astype(numpy_dtype(case.dtype))


def expected(case: Case, xs: list[Array]) -> list[Array | None]:
    """Return the output of every rank, None where it has none; reductions exact."""
    size, coll = case.size, case.coll
    if coll == "barrier":
        return [None] * size
    edges = np.cumsum(case.counts())[:-1]
    if coll in ("allreduce", "reduce", "reduce_scatter", "reduce_scatterv"):
        total = _reduced(case, xs)
        if coll == "reduce_scatterv":
            return list(np.split(total, edges))
        if coll == "reduce_scatter":
            return list(np.split(total, size))
        everywhere = coll == "allreduce"
        return [total if everywhere or r == case.root else None for r in range(size)]
    spec = operation(coll)
    if spec.combines_some:
        chosen = [spec.contributors(rank, size) for rank in range(size)]
        return [_reduced(case, xs, each) if each else None for each in chosen]
    if coll == "bcast":
        return [xs[case.root]] * size
    if coll in ("allgather", "gather", "allgatherv", "gatherv"):
        joined = np.concatenate(xs)
        everywhere = coll.startswith("all")
        return [joined if everywhere or r == case.root else None for r in range(size)]
    if coll == "scatter":
        return list(np.split(xs[case.root], size))
    if coll == "scatterv":
        return list(np.split(xs[case.root], edges))
    if coll == "alltoallv":
        pairs = zip(xs, case.pairs(), strict=True)
        blocks = [np.split(x, np.cumsum(sent)[:-1]) for x, sent in pairs]
    else:
        assert coll == "alltoall"
        blocks = [np.split(x, size) for x in xs]
    return [np.concatenate([row[rank] for row in blocks]) for rank in range(size)]


OF_BOOLS: dict[str, Callable[..., Any]] = {
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "band": np.logical_and,
    "bor": np.logical_or,
    "bxor": np.logical_xor,
    "sum": np.logical_or,
    "prod": np.logical_and,
    "min": np.logical_and,
    "max": np.logical_or,
}
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def _reduced(case: Case, xs: list[Array], ranks: range | None = None) -> Array:
    """Return the reduction of all arrays, or of those of some ranks."""
    dtype = dtype_by_name(case.dtype)
    some = slice(None) if ranks is None else slice(ranks.start, ranks.stop)
    if dtype.kind == "bool":
        return reduce(OF_BOOLS[case.op], xs[some])
    if case.op in ("land", "lor", "lxor"):
        found = [x != 0 for x in xs[some]]
        return reduce(OF_BOOLS[case.op], found).astype(xs[0].dtype)
    if dtype.kind in ("int", "uint"):
        with np.errstate(over="ignore"):
            xs = _scaled(case, xs)[some]
            total = reduce(OF_NUMBERS[case.op], xs)  # wraps, as the Contract says
        return _toward_zero(total, case.size) if case.op == "avg" else total
    wide = np.complex128 if dtype.kind == "complex" else np.float64
    scaled = _scaled(case, [x.astype(wide) for x in xs])[some]
    exact = reduce(OF_NUMBERS[case.op], scaled)
    return exact / case.size if case.op == "avg" else exact


def _scaled(case: Case, xs: list[Array]) -> list[Array]:
    if case.op != "premul_sum":
        return xs
    return [x * x.dtype.type(case.factor(rank)) for rank, x in enumerate(xs)]


def _toward_zero(total: Array, size: int) -> Array:
    quotients = [
        abs(int(value)) // size * (1 if value >= 0 else -1) for value in total.tolist()
    ]
    return np.array(quotients, dtype=total.dtype)


INEXACT = ("sum", "avg", "prod", "premul_sum")


def difference(case: Case, xs: list[Array], got: Array, want: Array) -> str | None:
    """Return what is wrong with a result, None if it is right."""
    if got.dtype != numpy_dtype(case.dtype) or got.size != want.size:
        return f"{got.size} elements of {got.dtype}, expected {want.size}"
    got = got.reshape(-1)
    reduces = operation(case.coll).reduces
    inexact = dtype_by_name(case.dtype).kind in ("float", "complex")
    if not (reduces and inexact and case.op in INEXACT):
        same = (got == want) | ((got != got) & (want != want))
        return None if same.all() else _first(~same, got, want)
    wide = got.astype(want.dtype)
    # NaN compares false, so it never passes.
    wrong = ~(np.abs(wide - want) <= _tolerance(case, xs, want))
    return _first(wrong, got, want) if wrong.any() else None


def _tolerance(case: Case, xs: list[Array], want: Array) -> Array:
    """Every addition or product may round once; complex products round four times."""
    itemtype = numpy_dtype(case.dtype)
    needs_ml_dtypes = dtype_by_name(case.dtype).needs_ml_dtypes
    finfo = ml_dtypes.finfo if needs_ml_dtypes else np.finfo
    steps = (case.size + 2) * (4 if itemtype.kind == "c" else 1)
    eps = float(finfo(itemtype).eps) * steps
    if case.op == "prod":
        return np.abs(want) * eps
    wide = np.complex128 if itemtype.kind == "c" else np.float64
    total = sum(np.abs(x) for x in _scaled(case, [x.astype(wide) for x in xs]))
    scale = case.size if case.op == "avg" else 1
    magnitude = total / scale
    if case.coll in ("reduce_scatter", "reduce_scatterv"):
        # The caller compares one block; the largest sum bounds all of them.
        return np.full(want.shape, magnitude.max(initial=0.0) * eps)
    return magnitude * eps


def _first(wrong: Array, got: Array, want: Array) -> str:
    at = int(np.flatnonzero(wrong)[0])
    return f"element {at} is {got[at]!r}, expected {want[at]!r}; {wrong.sum()} wrong"


# -- the call ---------------------------------------------------------------------


def plain_memory(nbytes: int) -> Array:
    """Return ordinary memory."""
    return np.empty(nbytes, np.uint8)


class Attempt:
    """One rank's part of a case: buffers with canaries, the call, the verdict.

    ``memory(nbytes)`` gives the bytes that a buffer and its canaries lie in.
    """

    def __init__(
        self, case: Case, rank: int, memory: Callable[[int], Array] = plain_memory
    ) -> None:
        self.case = case
        self.rank = rank
        self.memory = memory
        self.guarded: list[Array] = []
        self.xs = inputs(case)
        self.want = expected(case, self.xs)[rank]
        self.x = self._guarded(self.xs[rank].size)
        self.x[:] = self.xs[rank]
        if case.coll == "bcast" and rank != case.root:
            self.x[:] = np.zeros(1, self.x.dtype)
        self.before = self.x.copy()
        self.out = self._output()
        self.result: Any = None

    def _output(self) -> Array | None:
        spec = operation(self.case.coll)
        if self.want is None and spec.output_on != "all but rank 0":
            return None
        if self.case.in_place and spec.in_place:
            return self.x
        if self.case.in_place and spec.name in OWN_BLOCK:
            return self._own_block()
        if self.case.in_place and spec.name == "alltoallv" and self._swaps():
            return self.x
        out = self._guarded(self.x.size if self.want is None else self.want.size)
        out[:] = np.ones(1, out.dtype)
        return out

    def _own_block(self) -> Array:
        """NCCL's form: one array is this rank's block of the other."""
        assert self.want is not None
        gathers = self.case.coll.startswith("all")
        one = self.x.size if gathers else self.want.size
        vector = operation(self.case.coll).count_arguments
        start = sum(self.case.counts()[: self.rank]) if vector else self.rank * one
        mine = slice(start, start + one)
        if gathers:
            out = self._guarded(self.want.size)
            out[mine] = self.x
            self.x = out[mine]
            return out
        return self.x[mine]

    def _swaps(self) -> bool:
        """Whether this rank sends each other as much as it gets."""
        pairs = self.case.pairs()
        return pairs[self.rank] == [row[self.rank] for row in pairs]

    def _guarded(self, number: int) -> Array:
        """Return an array that lies between canaries."""
        dtype = numpy_dtype(self.case.dtype)
        raw = self.memory((number + 2 * CANARY) * dtype.itemsize)
        raw[:] = 0xA5
        self.guarded.append(raw)
        return raw.view(dtype)[CANARY : CANARY + number]

    def _canaries_live(self, raw: Array) -> bool:
        edge = CANARY * numpy_dtype(self.case.dtype).itemsize
        return bool((raw[:edge] == 0xA5).all() and (raw[-edge:] == 0xA5).all())

    def start(self, comm: Any, *, nonblocking: bool = False, **more: Any) -> Any:
        """Make the call, with more arguments; return what it returned."""
        arguments = self.case.arguments(self.rank) | more
        if nonblocking:
            arguments["nonblocking"] = True
        method = getattr(comm, self.case.coll)
        if self.case.coll == "barrier":
            returned = method(**arguments)
        elif self.out is None or (self.out is self.x and self._out_is_x()):
            returned = method(self.x, **arguments)
        else:
            returned = method(self.x, out=self.out, **arguments)
        if not nonblocking:
            self.result = returned
        return returned

    def _out_is_x(self) -> bool:
        return operation(self.case.coll).in_place

    def verdict(self) -> str | None:
        """Return what is wrong, None if all is right."""
        if self.result is not self.out:
            return f"returned {type(self.result).__name__}, not the output"
        if self.out is None or self.want is None:
            return self._untouched()
        wrong = difference(self.case, self.xs, self.out, self.want)
        if wrong is None and not all(map(self._canaries_live, self.guarded)):
            wrong = "wrote beside the output"
        separate = not self.case.in_place
        if wrong is None and separate and self.out is not self.x:
            wrong = self._unchanged(self.x, self.before)
        return wrong

    def _untouched(self) -> str | None:
        """Of a rank without a result: what it gave is as it was."""
        if self.out is not None and self.out is not self.x and (self.out != 1).any():
            return "changed an output that has no result"
        return self._unchanged(self.x, self.before)

    def _unchanged(self, now: Array, before: Array) -> str | None:
        return None if now.tobytes() == before.tobytes() else "changed its input"


def run_cases(
    comm: Any,
    cases: Iterable[Case],
    memory: Callable[[int], Array] = plain_memory,
) -> list[str]:
    """Run cases on one rank, one after the other; return what was wrong."""
    wrong = []
    for case in cases:
        attempt = Attempt(case, comm.rank, memory)
        try:
            attempt.start(comm)
        except CommError as error:
            raise AssertionError(f"{case}: {error}") from error
        if (verdict := attempt.verdict()) is not None:
            wrong.append(f"rank {comm.rank}: {verdict} ({case})")
    return wrong
