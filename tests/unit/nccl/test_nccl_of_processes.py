# SPDX-License-Identifier: Apache-2.0
"""The pretended libnccl for processes does what NCCL does, with host arrays.

It has no streams here: a call does all at once. Each job has five ranks, of which the
first one, two, ... make communicators.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import COUNTS, SPREADS, Case, legal_pairs, numpy_dtype, run_cases
from nccl_of_processes import NcclOfProcesses, OverNccl, error_of, here
from run_ranks import RunRanks

import commrt
from commrt.comm import core_of
from commrt.launch.detect import detect
from commrt.nccl import NcclComm, NcclConfig, libnccl, support
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import OPERATIONS, operation

DEADLINE_S = 300.0
SIZE = 5
LONG = 9001
"""More bytes than a channel holds, and an odd number."""
COLLS = [s.name for s in OPERATIONS if s.nccl != "none" and not s.is_empty]
FLOATS = ("float16", "float32", "float64", "bfloat16")


def runs(coll: str, dtype: str, op: str, version: int) -> bool:
    """Whether NCCL has it, and means by it what commrt does."""
    reduction = ReduceOp[op.upper()] if operation(coll).reduces else None
    found = support(coll, dtype_by_name(dtype), reduction, version)
    return found.runs and not found.reason.startswith("NCCL's min")


def drawn(size: int, version: int, seed: int) -> list[Case]:
    """Return cases: each count of each operation, and each reduction of each type."""
    rng = random.Random(f"{size}/{version}/{seed}")

    def case(coll: str, count: int, dtype: str, op: str) -> Case:
        counted = operation(coll).count_arguments
        return Case(
            coll,
            size,
            dtype=dtype,
            op=op,
            root=rng.randrange(size),
            count=count,
            in_place=not operation(coll).by_pair and rng.random() < 0.5,
            spread=rng.choice(SPREADS) if counted else "even",
        )

    cases = []
    for coll in COLLS:
        pairs = [pair for pair in legal_pairs(coll) if runs(coll, *pair, version)]
        cases += [case(coll, count, *rng.choice(pairs)) for count in (*COUNTS, LONG)]
    for pair in legal_pairs():
        if runs("allreduce", *pair, version):
            cases += [case(rng.choice(REDUCES), rng.choice((1, 7, 64)), *pair)]
    return cases


REDUCES = [coll for coll in COLLS if operation(coll).reduces]


def joined(members: int, *, blocking: bool = False) -> NcclComm | None:
    """Return this rank's communicator of the first ranks; None where it is not one."""
    world = commrt.init()
    if world.rank >= members:
        return None
    return NcclComm.create(
        core_of(world).world.bootstrap,
        list(range(members)),
        config=NcclConfig(blocking=blocking),
        taken=libnccl.find(),
        name=f"of {members}",
    )


def joined_all(size: int) -> NcclComm:
    """Return this rank's communicator of all ranks."""
    made = joined(size)
    assert made is not None
    return made


def say_own_host() -> None:
    """Let this rank say that it is a host of its own."""
    os.environ["NCCL_HOSTID"] = f"host{detect().rank}"


def every_operation(version: int, seed: int) -> list[str]:
    """Run all cases of each size on this rank; return what was wrong."""
    say_own_host()
    wrong = []
    for size in range(1, SIZE + 1):
        comm = joined(size, blocking=size == SIZE - 1)
        if comm is None:
            continue
        with comm:
            wrong += run_cases(OverNccl(comm), drawn(size, version, seed))
            wrong += least_and_largest(comm)
            wrong += messages(comm)
    return wrong


def least_and_largest(comm: NcclComm) -> list[str]:
    """NCCL's min and max of floats pass NaN over."""
    wrong = []
    for name in FLOATS:
        dtype = numpy_dtype(name)
        rng = np.random.default_rng(len(name))
        xs = rng.normal(size=(comm.size, 40))
        xs[rng.random(xs.shape) < 0.3] = np.nan
        xs = xs.astype(dtype)
        for op, combine in (("min", np.fmin), ("max", np.fmax)):
            out = OverNccl(comm).allreduce(
                xs[comm.rank], out=np.empty(40, dtype), op=op
            )
            want = combine.reduce(xs.astype("float64"))
            if not np.array_equal(out.astype("float64"), want, equal_nan=True):
                wrong.append(f"{op} of {name}: {out}, not {want}")
    return wrong


def messages(comm: NcclComm) -> list[str]:
    """Send each rank, this one too, messages of different lengths in one group."""
    size, rank = comm.size, comm.rank
    byte = dtype_by_name("uint8")
    lengths = [1, 40_001, 3]
    sent = [
        np.full(n, 10 * rank + peer + k, "uint8")
        for peer in range(size)
        for k, n in enumerate(lengths)
    ]
    got = [np.zeros(x.size, "uint8") for x in sent]
    peers = [peer for peer in range(size) for _ in lengths]
    comm.exchange(
        *(
            [(x.ctypes.data, x.size, peer) for x, peer in zip(xs, peers, strict=True)]
            for xs in (sent, got)
        ),
        dtype=byte,
        stream=0,
    )
    return [
        f"message {i} on rank {rank}"
        for i, (x, peer) in enumerate(zip(got, peers, strict=True))
        if (x != np.uint8(10 * peer + rank + i % len(lengths))).any()
    ]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """See that the files by which ranks meet are gone."""
    before = set(Path("/dev/shm").glob("nccl-*"))
    yield
    assert set(Path("/dev/shm").glob("nccl-*")) <= before


@pytest.mark.parametrize("version", [21805, 23203])
def test_every_operation_type_and_reduction(
    version: int, seed: int, tmp_path: Path
) -> None:
    nccl = NcclOfProcesses(tmp_path, version, has_streams=False)
    found = RunRanks(tmp_path)(
        *(SIZE, every_operation),
        env=nccl.environment,
        deadline_s=DEADLINE_S,
        version=version,
        seed=seed,
    )
    assert [line for each in found for line in each] == []
    assert nccl.complaints() == []


def lives(size: int) -> dict[str, Any]:
    """Split, fail and abort on ranks that share a machine; return what was seen."""
    say_own_host()
    seen: dict[str, Any] = {}
    comm = joined_all(size)
    x = np.array([comm.rank + 1.0])
    child = comm.split(comm.rank % 2, -comm.rank)
    assert child is not None
    seen["child"] = [child.rank, child.size]
    OverNccl(child).allreduce(x, op="sum")
    seen["sum of child"] = float(x[0])
    child.close()
    lonely = comm.split(None if comm.rank else 0)
    seen["no child"] = lonely is None
    if lonely is not None:
        lonely.close()

    # Nothing but a copy where a rank is alone, and that only to another place.
    alone = comm.split(comm.rank)
    assert alone is not None
    library = here()
    before = library.counter("kernels"), library.counter("copies")
    OverNccl(alone).allreduce(x, op="sum")
    OverNccl(alone).allreduce(x, out=np.empty(1), op="sum")
    after = library.counter("kernels"), library.counter("copies")
    seen["alone"] = [after[0] - before[0], after[1] - before[1]]
    alone.close()

    library.fail("ncclAllReduce", INTERNAL_ERROR)
    seen["injected"] = error_of(lambda: OverNccl(comm).allreduce(x, op="sum"))
    comm.abort()
    seen["made"] = library.counter("made") - library.counter("destroyed")
    seen["aborted"] = library.counter("aborted")
    return seen


INTERNAL_ERROR = 3


def test_communicators_split_fail_and_end(tmp_path: Path) -> None:
    nccl = NcclOfProcesses(tmp_path, has_streams=False, polls=3)
    found = RunRanks(tmp_path)(
        *(3, lives), env=nccl.environment, deadline_s=DEADLINE_S, size=3
    )
    # By key: rank 2 before rank 0.
    assert [each["child"] for each in found] == [[1, 2], [0, 1], [0, 2]]
    assert [each["sum of child"] for each in found] == [4.0, 2.0, 4.0]
    assert [each["no child"] for each in found] == [False, True, True]
    assert all(each["alone"] == [0, 1] for each in found)
    assert all("internal error (3)" in each["injected"] for each in found)
    assert all(each["aborted"] == each["made"] for each in found)
    assert nccl.complaints() == []


def why_not_joined(size: int) -> str:
    """Return why ranks that are on one GPU cannot join, or a result of them."""

    def sums() -> None:
        with joined_all(size) as comm:
            x = np.ones(1)
            OverNccl(comm).allreduce(x, op="sum")
            assert x[0] == size

    return error_of(sums)


SHARES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("version", "env", "joins"),
    [(22809, SHARES, False), (23003, {}, False), (23003, SHARES, True)],
)
def test_ranks_on_one_gpu(
    version: int, env: dict[str, str], joins: bool, tmp_path: Path
) -> None:
    nccl = NcclOfProcesses(tmp_path, version, has_streams=False)
    said = RunRanks(tmp_path)(
        *(2, why_not_joined),
        env={**nccl.environment, **env},
        deadline_s=DEADLINE_S,
        size=2,
    )
    for rank, each in enumerate(said):
        refused = (
            f"invalid usage (5): Duplicate GPU detected : rank {rank} and rank "
            f"{1 - rank} both on CUDA device 60"
        )
        assert each == "none" if joins else refused in each


def left_alone(size: int) -> list[str]:
    """Wait for a rank that is killed, or that never calls; abort, and say what was."""
    say_own_host()
    comm = joined_all(size)
    OverNccl(comm).allreduce(np.ones(1), op="sum")
    if comm.rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return aborted(comm, "sum", lambda: here().counter("kernels") == 2)


def aborted(comm: NcclComm, op: str, is_time: Callable[[], bool]) -> list[str]:
    """Begin a call that does not end, abort it, and return what it said."""
    said = []

    def waits() -> None:
        said.append(error_of(lambda: OverNccl(comm).allreduce(np.ones(1), op=op)))

    waiting = threading.Thread(target=waits)
    waiting.start()
    deadline = time.monotonic() + DEADLINE_S
    while not is_time() and time.monotonic() < deadline:
        os.sched_yield()
    assert comm.abort(DEADLINE_S)
    waiting.join(DEADLINE_S)
    return said


def test_a_killed_rank_leaves_the_others_waiting_until_they_abort(
    tmp_path: Path,
) -> None:
    nccl = NcclOfProcesses(tmp_path, has_streams=False)
    said = RunRanks(tmp_path).survivors(
        *(3, left_alone), env=nccl.environment, deadline_s=DEADLINE_S, size=3
    )
    assert sorted(said) == [0, 1]
    assert all(len(each) == 1 for each in said.values()), said
    assert nccl.complaints() == []


def differs(complaints: str) -> list[str]:
    """Call another reduction than the other rank does."""
    say_own_host()
    comm = joined_all(2)
    op = "sum" if comm.rank else "max"
    return aborted(comm, op, Path(complaints).exists)


def test_ranks_that_call_different_things_are_told(tmp_path: Path) -> None:
    """And wait for each other, as with the real library, until they abort."""
    nccl = NcclOfProcesses(tmp_path, has_streams=False)
    found = RunRanks(tmp_path)(
        *(2, differs),
        env=nccl.environment,
        deadline_s=DEADLINE_S,
        complaints=str(tmp_path / "complaints of NCCL"),
    )
    assert [len(each) for each in found] == [1, 1]
    complaints = nccl.complaints()
    assert complaints
    assert all("ranks differ: rank" in each for each in complaints), complaints
