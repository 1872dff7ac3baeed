# SPDX-License-Identifier: Apache-2.0
"""Measure how soon survivors notice a SIGKILL, on one node and on pretended ones.

    .venv-torch/bin/python tests/pytorch/time_to_notice.py --deaths 20
    .venv-torch/bin/python tests/pytorch/time_to_notice.py --deaths 20 --ulfm

A rank dies while all others wait for it. The last survivor counts: from just before the
kill to its PeerFailedError. Then the survivors shrink, and the next one dies.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 6
NODES = {"one node": str(RANKS), "between nodes": "2,2,2"}
WAITS: dict[str, Callable[[Any, int], Any]] = {
    "allreduce": lambda comm, _: comm.allreduce(_ones(5)),
    "gloo/native": lambda comm, _: comm.allreduce(_ones(5), algorithm="gloo/native"),
    "recv": lambda comm, dies: comm.recv(_ones(5), source=dies),
    "split": lambda comm, _: comm.split(0),
    "torch": lambda comm, _: _torch_waits(comm),
    "mpi/native": lambda comm, _: comm.allreduce(_ones(5), algorithm="mpi/native"),
}


def _is_there(what: str, where: str, ulfm: bool) -> bool:
    """Return whether ranks that are started so can wait in this."""
    if what == "gloo/native":
        return where == "between nodes" and not ulfm
    return ulfm if what == "mpi/native" else True


def _ones(count: int) -> Any:
    import numpy as np

    return np.ones(count)


def _torch_waits(comm: Any) -> None:
    import torch
    import torch.distributed as dist

    x = torch.ones(5)
    dist.all_reduce(x)


def run_rank(what: str, folder: Path) -> None:
    """Die when it is this rank's turn; else write how late each death was noticed."""
    import commrt
    from commrt.errors import PeerFailedError

    if "gloo" in what:  # with torch, the ranks make groups of gloo as they meet
        import torch.distributed  # noqa: F401
    comm = commrt.init()
    first, found = comm.rank, []
    for dies in range(RANKS - 1, 0, -1):
        if what == "torch":
            import commrt.torch

            commrt.torch.init_process_group(comm)
        comm.barrier()
        if first == dies:
            time.sleep(0.3)  # the others wait by then
            (folder / str(dies)).write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            WAITS[what](comm, dies)
        except PeerFailedError:
            noticed = time.monotonic()
        found.append(noticed - float((folder / str(dies)).read_text()))
        (folder / f"{dies}-{first}").write_text(json.dumps(found[-1]))
        if "gloo" in what and dies <= 2:
            break  # the others lie on one node
        old, comm = comm, comm.shrink()
        old.free()


def launched(ulfm: bool) -> list[str]:
    """Return the words that start the ranks, before their program."""
    count = str(RANKS)
    if not ulfm:
        return [sys.executable, "-m", "commrt.run", "-n", count, "--keep-going"]
    here = str(Path(sys.executable).with_name("mpiexec"))
    words = ["--with-ft", "ulfm", "--oversubscribe", "--allow-run-as-root"]
    return [here, *words, "-n", count, sys.executable]


def measured(what: str, nodes: str, deaths: int, ulfm: bool) -> list[float]:
    """Return, for each death, the seconds until the last survivor noticed it."""
    late: list[float] = []
    while len(late) < deaths:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [*launched(ulfm), __file__, "--rank", what, folder],
                env={**os.environ, "COMMRT_NODES": nodes},
                cwd=os.sep,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=300,
                check=True,
            )
            for dies in range(1, RANKS):
                files = list(Path(folder).glob(f"{dies}-*"))
                if files:
                    late.append(max(float(each.read_text()) for each in files))
    return late[:deaths]


def main() -> None:
    """Measure each kind of wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=20, help="of each kind of wait")
    parser.add_argument("--waits", nargs="*", default=list(WAITS), choices=list(WAITS))
    parser.add_argument("--ulfm", action="store_true", help="under Open MPI's mpiexec")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.rank:
        return run_rank(said.rank[0], Path(said.rank[1]))
    print(f"seconds, of {said.deaths} deaths each")
    for where, nodes in NODES.items():
        for what in said.waits:
            if not _is_there(what, where, said.ulfm):
                continue
            late = measured(what, nodes, said.deaths, said.ulfm)
            print(
                f"{where:14}{what:12} median {statistics.median(late):.3f}  "
                f"maximum {max(late):.3f}",
                flush=True,
            )
    return None


if __name__ == "__main__":
    main()
