# SPDX-License-Identifier: Apache-2.0
"""Which cases a run of a matrix has: drawn from all there are, by the run's seed.

Cases come in visits. A visit is to one algorithm of one operation, with one root: what
is worked out for a schedule serves all of its cases. It makes some plans, of different
types, reductions, lengths and ways across memory, and calls each in every form, in
place and out of place. So a sample that visits every algorithm has it in every form.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cases import SPREADS, TRANSPORTS, Case, legal_pairs, ways
from matrix_cases import FORMS, MEMORIES, MESSAGES, Trial
from matrix_values import KINDS, user_reduction
from rounding import TYPES as TELLING

from commrt import algorithms
from commrt.comm import core_of
from commrt.vocabulary.dtypes import DTYPES, dtype_by_name
from commrt.vocabulary.operations import COLLECTIVES, operation

Way = tuple[str | None, dict[str, int | str]]
"""An algorithm and its own parameters; None: the automatic choice."""

SIZES = range(1, 17)
COUNTS = (0, 1, 2, 3, 5, 7, 64, 257, 1021, 5000, 40_000)
_WEIGHTS = (3, 3, 2, 2, 2, 2, 4, 8, 6, 2, 1)
"""Long cases take the same paths as short ones, and more time."""
_CUTTING = (*TRANSPORTS, *[each for each in TRANSPORTS if "chunk" in each] * 2)
_LONG_NBYTES = 512
_CUTS = (2, 3, 4, 8)
_LEAST_CHUNK = 64
"""A line: fragments are multiples of it."""
_MOST_NBYTES = 3 << 19
"""Of all arrays of a case, about."""
_HEAP_SHARE = 0.25


@dataclass(frozen=True)
class Visit:
    """What a visit goes to."""

    coll: str
    way: Way
    kind: str = "plain"


class Where:
    """The ranks that a run is for, and what may run there.

    ``allowed(coll, kind, dtype, root)`` returns the ways of a reduction whose order
    matters; ``also(coll, dtype, op)`` those that are no schedules.
    """

    def __init__(
        self,
        size: int,
        nodes: str = "",
        allowed: Callable[[str, str, str, int], Sequence[Way]] = lambda *_: [
            (None, {})
        ],
        also: Callable[[str, str, str], Sequence[Way]] = lambda *_: [],
    ) -> None:
        self.size = size
        self.nodes = nodes
        self.allowed = allowed
        self.also = also

    @property
    def layout(self) -> tuple[int, ...] | None:
        """The number of the node of each rank, None if there is one."""
        if not self.nodes:
            return None
        numbers = map(int, self.nodes.split(","))
        return tuple(i for i, ranks in enumerate(numbers) for _ in range(ranks))

    def ways(self, coll: str) -> list[Way]:
        """Return every schedule of an operation, and the automatic choice."""
        if coll in MESSAGES:
            return [(None, {})]
        return ways(coll, self.size, self.layout)

    def visits(self) -> list[Visit]:
        """Return all that there is to visit."""
        found = [
            Visit(coll, way)
            for coll in (*COLLECTIVES, *MESSAGES)
            for way in self.ways(coll)
        ]
        # Their ways depend on the type, too, and are drawn when they are visited.
        reducing = [coll for coll in COLLECTIVES if operation(coll).reduces]
        for kind in KINDS[1:]:
            for coll in reducing:
                found.append(Visit(coll, (None, {}), kind))
        return found


def candidates_of(comm: Any, coll: str, kind: str, dtype: str, root: int) -> list[Way]:
    """Return the ways that a communicator has for a reduction whose order matters."""
    op = "sum" if kind == "deterministic" else user_reduction(kind)
    query = core_of(comm).selection.question("candidates", coll, 4096, dtype, op, root)
    found = core_of(comm).policy.candidates(query)
    return [(None, {}), *((each.algorithm, dict(each.params)) for each in found)]


@dataclass
class Drawing:
    """Draws ``number`` different cases for some ranks."""

    where: Where
    number: int
    seed: str
    first: Sequence[Visit] = ()
    """What must be visited, however few cases there are."""
    forms: Iterable[str] = tuple(FORMS)
    heap: bool = True
    """Whether there is symmetric memory."""
    plans: int = 5
    """How many a visit makes; of the automatic choice, which costs many algorithms, two
    at most."""
    _seen: set[str] = field(default_factory=set)
    _decks: tuple[list[tuple[str, str]], ...] = field(default_factory=lambda: ([], []))
    """Types with reductions that are still to come, so that none is left out; without
    averages and with them."""

    def visits(self) -> Iterator[list[Trial]]:
        """Yield the cases of each visit; as many as there are, if these are fewer."""
        rng = random.Random(f"{self.seed} {self.where.size} {self.where.nodes}")
        every = self.where.visits()
        for visit in self.first:
            if fresh := self._fresh(self._trials(visit, rng), must=True):
                yield fresh
        todo: list[Visit] = []
        in_vain = 0
        while len(self._seen) < self.number and in_vain <= 2 * len(every):
            if not todo:
                todo = rng.sample(every, len(every))
            fresh = self._fresh(self._trials(todo.pop(0), rng))
            in_vain = 0 if fresh else in_vain + 1
            if fresh:
                yield fresh

    def _fresh(self, trials: Iterable[Trial], *, must: bool = False) -> list[Trial]:
        found = []
        for trial in trials:
            line = trial.line()
            has_room = must or len(self._seen) < self.number
            if line not in self._seen and has_room:
                self._seen.add(line)
                found.append(trial)
        return found

    def _trials(self, visit: Visit, rng: random.Random) -> Iterator[Trial]:
        size, coll = self.where.size, visit.coll
        is_message = coll in MESSAGES
        spec = None if is_message else operation(coll)
        root = rng.randrange(size) if spec is None or spec.has_root else 0
        memories = MEMORIES[:1]
        if self.heap and rng.random() < _HEAP_SHARE:
            memories = MEMORIES[1:]
        spreads = SPREADS if spec is not None and spec.count_arguments else SPREADS[:1]
        automatic = visit.way[0] is None and visit.kind == "plain"
        plans = min(2, self.plans) if automatic else self.plans
        for _ in range(1 if coll == "barrier" else plans):
            dtype, op = self._type(visit, rng)
            way = visit.way
            if visit.kind != "plain":
                way = rng.choice(self.where.allowed(coll, visit.kind, dtype, root))
            else:
                way = rng.choice([way, *self.where.also(coll, dtype, op)])
            spread = rng.choice(spreads)
            # What is no schedule takes no parameters.
            plain = way[0] is not None and "/" in way[0]
            count = self._count(coll, dtype, visit.kind, rng)
            nbytes = count * self._itemsize(dtype, visit.kind)
            # Python combines a fragment in a call: many of them only take time.
            cutting = nbytes > _LONG_NBYTES and visit.kind != "python"
            some = _CUTTING if cutting else TRANSPORTS
            transport = {} if plain or is_message else dict(rng.choice(some))
            if "chunk" in transport and visit.kind != "python":
                transport["chunk"] = self._chunk(coll, nbytes, rng)
            case = Case(
                coll,
                size,
                way[0],
                {**way[1], **transport},
                dtype,
                op,
                root,
                count,
                False,
                spread,
            )
            yield from self._forms(case, visit.kind, memories, rng)

    def _forms(
        self, case: Case, kind: str, memories: Sequence[str], rng: random.Random
    ) -> Iterator[Trial]:
        fields = vars(case)
        for name in self.forms:
            if case.coll in MESSAGES and not FORMS[name].messages:
                continue
            for in_place in (False, True):
                if in_place and case.coll in ("barrier", *MESSAGES):
                    continue
                one = Case(**{**fields, "in_place": in_place})
                yield Trial(one, name, kind, rng.choice(memories), self.where.nodes)

    def _type(self, visit: Visit, rng: random.Random) -> tuple[str, str]:
        if visit.kind == "deterministic":
            averages = not operation(visit.coll).combines_some
            ops = ["sum", "prod", "premul_sum", *["avg"] * averages]
            return rng.choice(TELLING), rng.choice(ops)
        if visit.kind != "plain":
            return "float32", "sum"  # says nothing: the reduction has its own type
        if visit.coll in MESSAGES or not operation(visit.coll).reduces:
            return rng.choice(DTYPES).name, "sum"
        deck = self._decks[not operation(visit.coll).combines_some]
        if not deck:
            deck += _pairs(visit.coll)
            rng.shuffle(deck)
        return deck.pop()

    def _count(self, coll: str, dtype: str, kind: str, rng: random.Random) -> int:
        size = self.where.size
        item = self._itemsize(dtype, kind)
        spec = None if coll in MESSAGES else operation(coll)
        whole = spec is None or (spec.rule_bytes, spec.out_count) == ("whole", "same")
        nbytes = item * size * (2 if whole else size + 1)
        few = sum(count * nbytes <= _MOST_NBYTES for count in COUNTS)
        return rng.choices(COUNTS[:few], _WEIGHTS[:few])[0]

    @staticmethod
    def _itemsize(dtype: str, kind: str) -> int:
        return 16 if kind in ("python", "c") else dtype_by_name(dtype).itemsize

    def _chunk(self, coll: str, nbytes: int, rng: random.Random) -> int:
        """Return a chunk that cuts most messages of a call, into a few fragments.

        Of a vector that algorithms deal with as a whole, or in a block for each rank.
        """
        spec = operation(coll)
        if (spec.rule_bytes, spec.out_count) == ("whole", "same"):
            nbytes //= rng.choice((1, self.where.size, self.where.size))
        return max(_LEAST_CHUNK, nbytes // rng.choice(_CUTS))


@lru_cache(maxsize=32)
def _pairs(coll: str) -> list[tuple[str, str]]:
    return legal_pairs(coll)


def must_visit(seed: str, wheres: Sequence[Where]) -> list[list[Visit]]:
    """Return for each place what it must visit, so that all of them miss nothing.

    Every algorithm of every operation, and every kind of reduction, is visited at one
    place that has it, at least.
    """
    rng = random.Random(f"{seed} all")
    found: list[list[Visit]] = [[] for _ in wheres]
    places: dict[tuple[str, str | None, str], list[tuple[int, Visit]]] = {}
    for place, where in enumerate(wheres):
        for visit in where.visits():
            key = visit.coll, visit.way[0], visit.kind
            places.setdefault(key, []).append((place, visit))
    for options in places.values():
        place, visit = rng.choice(options)
        found[place].append(visit)
    return found


def all_algorithms(sizes: Iterable[int] = SIZES) -> set[tuple[str, str]]:
    """Return every (operation, algorithm) that one node has on some number of ranks."""
    return {
        (coll, name)
        for size in sizes
        for coll in COLLECTIVES
        for name in algorithms.names(coll, size)
    }
