# SPDX-License-Identifier: Apache-2.0
"""Steps whose operations may take different backends, beside steps of one backend.

    python -m commrt.cluster run --hosts 4 --rate 500mbit --launcher torchrun -- \
        python -m commrt.bench.mixed

MCR-DL (Anthony and others, IPDPS 2023) lets each operation and length of a training
step take the backend that is the quickest for it. Here one way lets commrt choose, by
its model or by the table that COMMRT_TABLE names. Each other way asks one backend for
all that it can run. The steps are those of ``commrt.bench.dlrm`` and
``commrt.bench.experts``. All ways take turns, block by block, and their results are
compared before. Behind the times stands what each operation took in each way.
``ratio`` is the time of that way to each other one's, the median over blocks; below 1
mixing wins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from commrt.bench import dlrm, experts
from commrt.bench.in_process_group import measure_models
from commrt.bench.step_turns import Step, in_turns, table
from commrt.errors import UsageError

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["BACKENDS", "WORKLOADS", "main", "measure"]

BACKENDS = ("tcp", "gloo", "mpi", "shm")
"""Those that carry what is on the host; of these the ones that the ranks have."""
_MIXED = "mixed"
_EXPERTS = {
    "experts-256": experts.Workload(256, 512, 8, 2, 256, "drawn"),
    "experts-1024": experts.Workload(256, 512, 8, 2, 1024, "drawn"),
}
WORKLOADS = (*(f"dlrm-{name}" for name in dlrm.WORKLOADS), *_EXPERTS)
"""Steps, by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table, on the ranks that a launcher started."""
    return measure_models("commrt.bench.mixed", WORKLOADS, measure, _text, argv)


def measure(
    wanted: Sequence[str], blocks: int, *, least_s: float = 0.2
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by workload and way.

    Args:
        wanted: names of workloads.
        blocks: turns of each way.
        least_s: how long a block is to last about.

    Raises UsageError on one rank, which sends nothing.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if dist.get_world_size() == 1:
        raise UsageError("mixed: 1 rank; start two at least: one rank sends nothing")
    everyone: Any = dist.group.WORLD
    comms = {_MIXED: everyone.communicator, **_of_one_backend(everyone.communicator)}
    rows = []
    for name in wanted:
        with ExitStack() as open_:
            steps = {way: _step(name, comm, open_) for way, comm in comms.items()}
            right, *others = [step() for step in steps.values()]
            for other in others:
                torch.testing.assert_close(other, right, rtol=1e-4, atol=1e-5)
            took = {way: _taken(step) for way, step in steps.items()}
            times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"workload": name, "us": times, "took": took})
    return rows


def _of_one_backend(comm: Communicator) -> dict[str, Communicator]:
    """Return a communicator for each backend that can run both steps' operations."""
    import torch.distributed as dist

    from commrt.torch.group_options import Options

    found: dict[str, Communicator] = {}
    for backend in BACKENDS:
        runs = [
            any(one.backend == backend for one in comm.candidates(op, 1 << 16))
            for op in ("allreduce", "alltoall")
        ]
        if all(runs):
            made: Any = dist.new_group(
                backend="commrt", pg_options=Options(backend=backend)
            )
            found[backend] = made.communicator
    return found


def _step(name: str, comm: Communicator, open_: ExitStack) -> Step:
    from commrt.layers.process_grid import ProcessGrid

    if name in _EXPERTS:
        grid = open_.enter_context(ProcessGrid(comm, {"expert": 0}))
        return experts.step_on(_EXPERTS[name], grid)
    return dlrm.step_on(dlrm.WORKLOADS[name.removeprefix("dlrm-")], comm)


def _taken(step: Step) -> list[str]:
    """Return what each operation of a step took, as this rank's log has it."""
    import commrt.trace

    with commrt.trace.record() as recording:
        step()
    found = []
    for log in recording.logs():
        for (op, took), volume in log.volume(("op", "algorithm")).items():
            found.append(f"{op}: {took}, {volume.calls} calls, {volume.nbytes:,} bytes")
    return sorted(found)


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([table(rows, "workload"), *_lines(rows)])


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for way, took in row["took"].items():
            yield f"{row['workload']}, {way}:"
            yield from (f"  {line}" for line in took)


if __name__ == "__main__":
    sys.exit(main())
