# SPDX-License-Identifier: Apache-2.0
"""The one timing loop, the same text for commrt and for every peer.

The file needs only the standard library, numpy, and ``link_probe`` beside it. An
interpreter without commrt loads it by its path. One size is timed like this:

- the result of one call is compared, element by element, with the expected one before
  any time counts;
- warm-up calls follow, and give the number of back-to-back calls k of a repetition, so
  that a repetition lasts at least ``floor_us``: below that the clock and the barrier
  would be measured;
- a repetition is: barrier, clock, k calls, clock. Its time is the maximum over ranks,
  divided by k. The barrier is the loop's own (flags in shared memory) wherever the
  launcher provides the memory, so that no peer is helped or hurt by its own barrier;
- with ``fresh`` the inputs are rewritten before every call, outside the clock, as
  training does: the caches then hold the input of the writer, not of the last call;
- repetitions end when the 95 % interval of the median (order statistics, no normality
  assumed) is narrower than ``max_relative_ci``, or at ``iterations``, or at the budget.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING or __package__:
    from commrt.bench.link_probe import (
        PROBE_STEP,
        FlagBarrier,
        SharedFlags,
        link_class_of,
        probe_link,
    )
else:
    from link_probe import (  # beside this file
        PROBE_STEP,
        FlagBarrier,
        SharedFlags,
        link_class_of,
        probe_link,
    )

__all__ = [
    "PROBE_STEP",
    "Array",
    "FlagBarrier",
    "HostMemory",
    "Measure",
    "Memory",
    "Parts",
    "Peer",
    "SharedFlags",
    "Trial",
    "element_counts",
    "expected_chunk",
    "library_name",
    "link_class_of",
    "load_job",
    "median_interval",
    "memory_of",
    "numpy_dtype",
    "pattern",
    "pin_rank",
    "probe_link",
    "rank_and_size",
    "run_job",
    "save_result",
    "work",
    "worst_over_ranks",
]

Array = npt.NDArray[Any]
Parts = Sequence[tuple[Array, "Array | None"]]  # x and out, for operations in flight
Call = Callable[[], object]
Measure = Callable[["Peer", Mapping[str, Any], int, Call], "dict[str, Any] | None"]

_BATCH = 10
_CHUNK = 1 << 18


class Memory(Protocol):
    """The memory of the arrays, and how calls on them are timed."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Return an array of so many elements."""

    def split(self, array: Any, parts: int) -> list[Any]:
        """Return equal parts of an array, which share its memory."""

    def fill(self, array: Any, value: float) -> None:
        """Set all elements, before what is called next on the array."""

    def write(self, array: Any, low: int, values: Array) -> None:
        """Set the elements from ``low`` on."""

    def read(self, array: Any, low: int, high: int) -> Array:
        """Return elements [low, high), after all that was called on the array."""

    def timed(self, call: Call, calls: int) -> float:
        """Return the µs that so many calls take, to the end of their work."""

    def drain(self) -> None:
        """Return once all that was called is done."""


class HostMemory:
    """Ordinary memory, and the host's clock: a call that has returned is done."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return an array whose pages may not be mapped yet."""
        return np.empty(count, dtype)

    def split(self, array: Array, parts: int) -> list[Array]:
        """Return views."""
        return np.split(array, parts)

    def fill(self, array: Array, value: float) -> None:
        """Set all elements."""
        array.fill(value)

    def write(self, array: Array, low: int, values: Array) -> None:
        """Set the elements from ``low`` on."""
        array[low : low + len(values)] = values

    def read(self, array: Array, low: int, high: int) -> Array:
        """Return a view of elements [low, high)."""
        return array[low:high]

    def timed(self, call: Call, calls: int) -> float:
        """Return the µs from before the first call to after the last."""
        clock = time.perf_counter_ns
        start = clock()
        if calls == 1:  # without a loop in it
            call()
            return (clock() - start) / 1000.0
        for _ in range(calls):
            call()
        return (clock() - start) / 1000.0

    def drain(self) -> None:
        """Do nothing."""


_HOST = HostMemory()


def memory_of(peer: Peer) -> Memory:
    """Return where a peer's arrays lie: what it calls ``memory``, else the host's."""
    return getattr(peer, "memory", _HOST)


class Peer(Protocol):
    """The methods that a communication library must offer to be timed."""

    rank: int
    size: int

    def barrier(self) -> object:
        """Return once every rank has called."""

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return every rank's values on rank 0, None elsewhere."""

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a call of ``coll``; without ``out`` it works in place."""

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that submits ``coll`` for all parts, then waits for all."""


class SharesMemory(Peer, Protocol):
    """A peer with arrays that its ranks share."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return an array in shared memory; collective."""


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this process's rank and the job's size from the launcher's variables."""
    for rank, size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("RANK", "WORLD_SIZE"),
    ):
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    return 0, 1


def pin_rank(rank: int, size: int) -> list[int]:
    """Give this rank its equal, consecutive share of the CPUs; return the share.

    Nothing is pinned where ranks outnumber CPUs. Called before the library starts, so
    that its threads inherit the share.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if size > len(cpus):
        return cpus
    share = cpus[rank * len(cpus) // size : (rank + 1) * len(cpus) // size]
    os.sched_setaffinity(0, share)
    return share


def median_interval(samples: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by order statistics.

    The interval is the pair of order statistics that encloses the median with that
    probability whatever the distribution; below 6 samples it is the whole range.
    """
    ordered = sorted(samples)
    n = len(ordered)
    middle = n // 2
    median = ordered[middle] if n % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    if n < 6:
        return median, ordered[0], ordered[-1]
    half = 1.96 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half) - 1)
    high = min(n - 1, math.ceil(n / 2 + half))
    return median, ordered[low], ordered[high]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype called ``name``; some come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return cast("np.dtype[Any]", np.dtype(getattr(ml_dtypes, name)))


def element_counts(
    spec: Mapping[str, Any], nbytes: int, itemsize: int, size: int
) -> tuple[int, int]:
    """Return the elements of x and of out for a message of ``nbytes``.

    ``nbytes`` is what OSU prints: the whole buffer, one rank's block, or one pair's
    block. Where x must divide by the number of ranks it is rounded down.
    """
    count = nbytes // itemsize
    if spec["rule_bytes"] == "none":
        return 0, 0
    if spec["rule_bytes"] in ("pair", "any"):
        return count * size, count * size
    if spec["out_count"] == "times_size":
        return count, count * size
    if spec["out_count"] == "div_size":
        if spec["rule_bytes"] == "block":
            return count * size, count
        return count // size * size, count // size
    return count, count


def pattern(rank: int, low: int, high: int) -> npt.NDArray[np.int64]:
    """Return elements [low, high) of a rank's input: small, different on each rank."""
    index = np.arange(low, high, dtype=np.int64)
    result: npt.NDArray[np.int64] = index % 7 + (rank + 1)
    return result


def expected_chunk(
    spec: Mapping[str, Any],
    rank: int,
    size: int,
    root: int,
    x_elements: int,
    low: int,
    high: int,
) -> npt.NDArray[np.int64]:
    """Return elements [low, high) of what an operation must leave on ``rank``.

    Args:
        spec: the operation's row as data; of a vector operation with equal blocks.
        rank: whose output.
        size: number of ranks.
        root: the root, where there is one.
        x_elements: elements of this rank's x.
        low: the first element.
        high: the one after the last.
    """
    index = np.arange(low, high, dtype=np.int64)
    offset = rank * (x_elements // size) if spec["out_count"] == "div_size" else 0
    if spec["reduces"]:
        first, end = spec["combines"]
        ranks = range(
            0 if first is None else rank + first, size if end is None else rank + end
        )
        result: npt.NDArray[np.int64] = len(ranks) * ((index + offset) % 7)
        return result + sum(ranks) + len(ranks)
    if spec["input_on"] == "root":
        return pattern(root, low + offset, high + offset)
    if spec["out_count"] == "times_size":
        block, offset = max(x_elements, 1), 0
    else:  # a block for each pair
        block = max(x_elements // size, 1)
        offset = rank * block
    result = (index % block + offset) % 7 + index // block + 1
    return result


class Trial:
    """Buffers and call of one operation at one size."""

    def __init__(self, peer: Peer, job: Mapping[str, Any], nbytes: int) -> None:
        self.spec: Mapping[str, Any] = job["spec"]
        self.coll: str = self.spec["name"]
        self.waits = self.spec["rule_bytes"] == "none"  # and moves nothing
        self.peer = peer
        self.root: int = job["root"]
        dtype = numpy_dtype(job["dtype"])
        counts = element_counts(self.spec, nbytes, dtype.itemsize, peer.size)
        self.num_x, self.num_out = counts
        self.memory = memory_of(peer)
        allocate: Callable[..., Array] = self.memory.empty
        if job["symmetric"]:
            allocate = cast(SharesMemory, peer).empty
        outstanding: int = job.get("outstanding", 0)
        copies = max(1, outstanding)
        self.x = allocate(copies * self.num_x, dtype)
        # bcast has one buffer; the other operations that can work in place do if asked.
        has_one = self.spec["input_on"] == "root" and self.spec["in_place"]
        in_place = job["in_place"] or has_one or self.waits
        self.out = None if in_place else allocate(copies * self.num_out, dtype)
        self.fill_out()
        self.parts: Parts = [(self.x, self.out)]
        self.call = peer.bind(self.coll, self.x, self.out, self.root)
        if outstanding:
            split = self.memory.split
            xs = split(self.x, copies)
            outs = [None] * copies if self.out is None else split(self.out, copies)
            self.parts = list(zip(xs, outs, strict=True))
            self.call = peer.bind_outstanding(self.coll, self.parts, self.root)

    @property
    def empty(self) -> bool:
        """True if the size is below one element per rank."""
        return not self.waits and (self.num_x == 0 or self.num_out == 0)

    def fill_out(self) -> None:
        """Touch the output, so that no page is mapped while the clock runs."""
        if self.out is not None:
            self.memory.fill(self.out, 0)

    def rewrite(self, value: int) -> None:
        """Write the input as a training step would, with numbers that stay small."""
        self.memory.fill(self.x, value)

    def is_right(self) -> bool:
        """Run one call on known data; return whether this rank's result is right."""
        for x, _ in self.parts:
            for low in range(0, self.num_x, _CHUNK):
                high = min(low + _CHUNK, self.num_x)
                values = pattern(self.peer.rank, low, high).astype(self.x.dtype)
                self.memory.write(x, low, values)
        self.call()
        rank = self.peer.rank
        none_on = {"root": rank != self.root, "all but rank 0": rank == 0, "none": True}
        return none_on.get(self.spec["output_on"], False) or all(
            self._is_expected(x if out is None else out) for x, out in self.parts
        )

    def _is_expected(self, result: Array) -> bool:
        where = (self.spec, self.peer.rank, self.peer.size, self.root, self.num_x)
        for low in range(0, self.num_out, _CHUNK):
            high = min(low + _CHUNK, self.num_out)
            found = self.memory.read(result, low, high)
            expected = expected_chunk(*where, low, high).astype(found.dtype)
            if not np.array_equal(found, expected):
                return False
        return True


def _timed(trial: Trial, barrier: Call, calls: int, fresh: bool) -> float:
    """Return this rank's µs per call in one repetition."""
    timed, call = trial.memory.timed, trial.call
    if not fresh:
        barrier()
        return timed(call, calls) / calls
    elapsed_us = 0.0
    for index in range(calls):
        trial.rewrite(index & 1)
        if index == 0:
            barrier()
        elapsed_us += timed(call, 1)
    return elapsed_us / calls


def worst_over_ranks(peer: Peer, values: list[float]) -> list[float]:
    """Return, on rank 0, the maximum over ranks of each value."""
    rows = peer.gather(values)
    return [max(column) for column in zip(*rows, strict=True)] if rows else []


def _measure(
    trial: Trial, job: Mapping[str, Any], barrier: Call, row: dict[str, Any]
) -> None:
    """Warm up, choose the calls per repetition, repeat; fill ``row`` on rank 0."""
    peer, fresh = trial.peer, bool(job["fresh"])
    trial.rewrite(0)
    for _ in range(job["warmup"]):
        trial.call()
    # Repeated: the first estimates still hold cold caches, and ask for too few calls.
    calls = 3
    for _ in range(4):
        slowest = worst_over_ranks(peer, [_timed(trial, barrier, calls, fresh)])
        estimate_us = max(peer.agree(slowest[0] if slowest else 0.0), 1e-3)
        calls = max(1, math.ceil(job["floor_us"] / estimate_us))
    start_s = time.monotonic()
    samples: list[float] = []
    done = 0
    while done < job["iterations"]:
        # Few repetitions of a long call per round, so that the budget is kept.
        left = job["budget_s"] * 1e6 / (estimate_us * calls)
        batch = max(1, min(_BATCH, job["iterations"] - done, int(left)))
        times = [_timed(trial, barrier, calls, fresh) for _ in range(batch)]
        samples += worst_over_ranks(peer, times)
        done += batch
        if peer.agree(float(_enough(samples, job, time.monotonic() - start_s))):
            break
    row["calls"] = calls
    row["samples_us"] = [round(sample, 4) for sample in samples]


def _enough(samples: list[float], job: Mapping[str, Any], elapsed_s: float) -> bool:
    """Return whether rank 0 has seen enough; other ranks' answer is not used."""
    if not samples:
        return False
    if len(samples) >= 3 and elapsed_s >= job["budget_s"]:
        return True
    median, low, high = median_interval(samples)
    narrow = (high - low) / 2 <= float(job["max_relative_ci"]) * median
    long_enough = elapsed_s >= min(job["min_s"], job["budget_s"])
    return narrow and bool(long_enough) and len(samples) >= int(job["min_iterations"])


def _one_size(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Check and time one size; None where the size is below one element per rank."""
    trial = Trial(peer, job, nbytes)
    if trial.empty:
        return None
    row: dict[str, Any] = {"nbytes": nbytes, "elements": trial.num_x}
    if job["check"]:
        wrong = worst_over_ranks(peer, [0.0 if trial.is_right() else 1.0])
        failed = bool(peer.agree(wrong[0] if wrong else 0.0))
        row["valid"] = not failed
        if failed:
            row["error"] = "the result differs from the expected one; not timed"
            return row
    _measure(trial, job, barrier, row)
    if row["samples_us"]:
        row["median_us"], row["low_us"], row["high_us"] = median_interval(
            row["samples_us"]
        )
    return row


class _LinkWatch:
    """Measures the links between rows, so that each row knows its own state."""

    def __init__(self, peer: Peer, job: Mapping[str, Any]) -> None:
        self._ranks, self._cpus = peer.size, job["cpus"]
        oversubscribed = peer.size > job["cpus"]
        self._rank = peer.rank
        self._flags: SharedFlags | None = None
        self.barrier: Call = peer.barrier
        if job["flags"] and peer.size > 1:
            self._flags = SharedFlags(job["flags"], peer.size)
            self.barrier = FlagBarrier(self._flags, peer.rank, oversubscribed)
        self._probes = not oversubscribed and self._flags is not None
        self._count = 0

    def probe(self) -> float:
        """Return the flag latency in ns on rank 0; 0 where it cannot be measured."""
        if self._flags is None or not self._probes:
            return 0.0
        self._count += 1
        self.barrier()
        return probe_link(self._flags, self._rank, self._count * PROBE_STEP)

    def label(self, row: dict[str, Any], before_ns: float, after_ns: float) -> None:
        """Write both measurements and the class; mixed if the state changed."""
        row["link_ns"] = [round(before_ns, 1), round(after_ns, 1)]
        if self._flags is None:
            row["link_class"] = "single" if self._ranks == 1 else "unknown"
            return
        classes = {
            link_class_of(ns, self._ranks, self._cpus) for ns in (before_ns, after_ns)
        }
        if len(classes) == 2:
            classes.discard("unknown")  # what could not be seen contradicts nothing
        row["link_class"] = classes.pop() if len(classes) == 1 else "mixed"


def _core_ticks() -> tuple[int, int]:
    """Return the time that all cores have had, and the idle part of it."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def run_job(
    peer: Peer, job: Mapping[str, Any], measure: Measure | None = None
) -> list[dict[str, Any]]:
    """Run every size of the job; return the rows (complete on rank 0 only).

    A job: ``spec`` (a row of commrt's table of operations), ``sizes``, ``dtype``,
    ``root``, ``in_place``, ``symmetric``, ``outstanding``, ``fresh``, ``check``,
    ``warmup``, ``iterations``, ``min_iterations``, ``min_s``, ``floor_us``,
    ``max_relative_ci``, ``budget_s``, ``cpus`` and ``flags`` (path of the shared flags;
    None if ranks span machines). ``measure`` replaces the timing of one size (overlap,
    point-to-point).
    """
    watch = _LinkWatch(peer, job)
    rows: list[dict[str, Any]] = []
    before_ns = watch.probe()
    for nbytes in job["sizes"]:
        before = _core_ticks()
        row = (measure or _one_size)(peer, job, nbytes, watch.barrier)
        after = _core_ticks()
        after_ns = watch.probe()
        if row is not None:
            spent, idle = after[0] - before[0], after[1] - before[1]
            row["cores_idle"] = round(idle / spent, 3) if spent else None
            watch.label(row, before_ns, after_ns)
            rows.append(row)
        before_ns = after_ns
    return rows


def work(
    job_path: str,
    connect: Callable[[], tuple[Peer, dict[str, Any]]],
    measure: Measure | None = None,
) -> None:
    """Do one launch: pin, connect the library, run the job, save on rank 0.

    ``connect`` imports and starts the library; it is called after pinning, so that the
    library's threads stay within the rank's share of CPUs. It returns the peer and what
    is to be recorded about the library.
    """
    job = load_job(job_path)
    rank, size = rank_and_size()
    cpus = pin_rank(rank, size) if job["pin"] else sorted(os.sched_getaffinity(0))
    peer, about = connect()
    rows = run_job(peer, job, measure)
    placement = peer.gather([float(cpu) for cpu in cpus])
    if peer.rank == 0 and placement is not None:
        shares = [[int(cpu) for cpu in share] for share in placement]
        save_result(job["result"], {**about, "cpus": shares, "rows": rows})
    close = getattr(peer, "close", None)
    if close is not None:  # not after a failure: the others may never come to theirs
        close()


def library_name(version: str) -> str:
    """Return the part of MPI's version text that fits a line: library and version."""
    first = version.strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(first.split())


def load_job(path: str) -> dict[str, Any]:
    """Read the job that the launcher wrote."""
    with open(path, encoding="utf-8") as file:
        job: dict[str, Any] = json.load(file)
    return job


def save_result(path: str, result: Mapping[str, Any]) -> None:
    """Write the result so that the launcher never sees half of it."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(path + ".part", path)
