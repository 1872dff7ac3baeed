# SPDX-License-Identifier: Apache-2.0
"""One launch of one library in a cluster, and the cluster itself."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commrt import bench
from commrt.bench.cluster.placements import Placement
from commrt.bench.launch import PeerSpec
from commrt.bench.timing_loop import SharedFlags
from commrt.errors import BackendError
from commrt.files.write import write_file
from commrt.launch.mpiexec import Completed, child_environment, run_process

__all__ = ["Hosts", "Launcher", "hosts_of", "script_of"]

Launcher = str
"""``mpiexec`` or ``torchrun``."""
_BUILD_S = 240.0
_HERE = Path(bench.__file__ or "").resolve().parent


@dataclass(frozen=True)
class Hosts:
    """A cluster that runs, of one placement."""

    name: str
    folder: str
    """Where its state is noted."""
    placement: Placement

    def launch(
        self,
        peer: PeerSpec,
        launcher: Launcher,
        job: Mapping[str, Any],
        *,
        timeout_s: float,
        algorithm: str = "",
    ) -> dict[str, Any]:
        """Run a job on all hosts; return its result.

        Args:
            peer: the library, and its interpreter.
            launcher: who starts the ranks.
            job: as ``make_job`` makes it.
            timeout_s: limit of the launch.
            algorithm: for COMMRT_ALGORITHM; empty: none.

        Raises:
            BackendError: the launch failed, or was killed at its deadline.
        """
        with tempfile.TemporaryDirectory(prefix="commrt-bench-") as folder:
            flags, result = f"{folder}/flags", Path(folder, "result.json")
            SharedFlags.create(flags, self.placement.size)
            path = Path(folder, "job.json")
            own = {"flags": flags, "result": str(result)}
            write_file(path, json.dumps({**job, **own}))
            environ = child_environment(peer.python)
            if algorithm:
                environ["COMMRT_ALGORITHM"] = algorithm
            ranks = ",".join(map(str, self.placement.ranks))
            done = _cluster(
                [
                    *("run", self.name, "--folder", self.folder),
                    *("--launcher", launcher, "--ranks", ranks, "--"),
                    *(peer.python, *script_of(peer), str(path)),
                ],
                environ,
                timeout_s,
            )
            if not done.ok or not result.exists():
                raise BackendError(f"{peer.name}: {done.describe_failure()}")
            measured: dict[str, Any] = json.loads(result.read_text())
        return {"peer": peer.name, "elapsed_s": done.elapsed_s, **measured}


def script_of(peer: PeerSpec) -> list[str]:
    """Return the words that run a peer's rank; the job's file follows."""
    if peer.kind in ("gloo", "mpi4py"):
        return [str(_HERE / f"peer_{peer.kind}.py")]
    return ["-m", "commrt.bench.worker"]


@contextmanager
def hosts_of(placement: Placement, network: Sequence[str]) -> Iterator[Hosts]:
    """Yield a cluster for a placement; end it.

    Args:
        placement: the ranks of each host.
        network: options of the network, without the number of hosts.

    Raises:
        BackendError: it cannot be made here.
    """
    environ = child_environment(sys.executable)
    with tempfile.TemporaryDirectory(prefix="commrt-hosts-") as folder:
        hosts = Hosts("bench", folder, placement)
        where = (hosts.name, "--folder", folder)
        num = str(len(placement.ranks))
        up = _cluster(["up", *where, "--hosts", num, *network], environ, _BUILD_S)
        if not up.ok:
            raise BackendError(up.stderr.strip() or up.describe_failure())
        try:
            yield hosts
        finally:
            _cluster(["down", *where], environ, _BUILD_S)


def _cluster(
    words: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> Completed:
    argv = [sys.executable, "-m", "commrt.cluster", *words]
    return run_process(argv, environ, timeout_s=timeout_s)
