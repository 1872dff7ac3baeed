# SPDX-License-Identifier: Apache-2.0
"""Mixed backends beside single ones, after Anthony and others: measured, in clusters.

"MCR-DL: Mix-and-Match Communication Runtime for Deep Learning" (IPDPS 2023) reports up
to 31 % more throughput for a mixture of experts and 25 % for DLRM, when each operation
takes the backend that is the quickest for it. ``study_mcrdl`` times steps of both
models on hosts that ``commrt.cluster`` makes on this machine. So its times are
measured, unlike those of the other studies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from commrt.errors import BackendError
from commrt.launch.mpiexec import child_environment, run_process

__all__ = ["study_mcrdl"]

_HOSTS, _RATE = 4, "500mbit"
_LIMIT_S = 900.0
_QUICK = ("--workload", "dlrm-small,experts-256", "--blocks", "5")
_LAUNCHERS = ("torchrun", "mpiexec")
_KNOWN = (
    "published (abstract): up to 31 % more throughput for DeepSpeed-MoE on 256 GPUs, "
    "25 % for DLRM on 32, by mixing NCCL and MPI libraries",
    f"chosen here: {_HOSTS} hosts of one rank at {_RATE}, namespaces of this machine; "
    f"backends are commrt's own connections, gloo and, under mpiexec, MPI",
    "measured here, not simulated; ratios below 1: mixing wins",
)


def study_mcrdl(quick: bool) -> Iterator[str]:
    """Yield the lines of the study.

    Args:
        quick: two small models, few blocks, torchrun alone.

    Raises BackendError where no cluster can be made (it needs root), or torch is
    missing.
    """
    yield from _KNOWN
    for launcher in _LAUNCHERS[:1] if quick else _LAUNCHERS:
        yield f"ranks of {launcher}:"
        yield from _measured(launcher, _QUICK if quick else ())


def _measured(launcher: str, options: tuple[str, ...]) -> Iterator[str]:
    hosts = ["run", "--hosts", str(_HOSTS), "--rate", _RATE, "--launcher", launcher]
    done = run_process(
        [
            *(sys.executable, "-m", "commrt.cluster", *hosts, "--"),
            *(sys.executable, "-m", "commrt.bench.mixed", *options),
        ],
        child_environment(sys.executable),
        timeout_s=_LIMIT_S,
    )
    if not done.ok:
        raise BackendError(f"study mcrdl: {done.describe_failure()}")
    yield from done.stdout.splitlines()
