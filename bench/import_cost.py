# SPDX-License-Identifier: Apache-2.0
"""The cost of ``import commrt`` beyond ``import numpy``, and what it must not start."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from commrt.bench.timing_loop import median_interval
from commrt.errors import BackendError

__all__ = ["ImportCost", "measure_import"]

# Runs in fresh interpreters. numpy's own threads (its BLAS) are counted before.
_PROGRAM = """
import json, os, sys, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
threads = len(os.listdir("/proc/self/task"))
if sys.argv[1] == "commrt":
    import commrt
end = time.perf_counter()
with open("/proc/self/maps") as maps:
    mapped = {line.split("/")[-1].strip() for line in maps if "/" in line}
words = ("libmpi", "libcuda", "libnccl", "libtorch")
started = sorted(name for name in mapped if name.startswith(words))
modules = ("mpi4py", "cupy", "torch", "mpi4py.MPI")
started += sorted(name for name in modules if name in sys.modules)
more = len(os.listdir("/proc/self/task")) - threads
started += [f"{more} thread(s)"] if more else []
print(json.dumps([(end - start) * 1e3, (end - middle) * 1e3, started]))
"""


@dataclass(frozen=True)
class ImportCost:
    """Import times of fresh interpreters, alternating with and without commrt."""

    beyond_numpy_ms: tuple[float, float, float]
    """Median and 95 % interval of ``import commrt`` after numpy."""
    numpy_ms: tuple[float, float, float]
    """Median and 95 % interval of ``import numpy`` alone."""
    both_ms: tuple[float, float, float]
    """Median and 95 % interval of numpy and commrt together."""
    started: tuple[str, ...]
    """Libraries, modules and threads that the import must not start, but did."""
    samples_ms: tuple[float, ...]
    """Raw samples of ``beyond_numpy_ms``."""

    def describe(self) -> str:
        """Return the report, two or three lines."""
        median, low, high = self.beyond_numpy_ms
        lines = [
            f"import commrt beyond numpy: {median:.1f} ms "
            f"(95 % interval of the median {low:.1f} to {high:.1f}, "
            f"{len(self.samples_ms)} fresh interpreters)",
            f"import numpy alone: {self.numpy_ms[0]:.1f} ms; "
            f"with commrt: {self.both_ms[0]:.1f} ms",
        ]
        found = ", ".join(self.started) or "nothing"
        lines.append(f"MPI, CUDA, torch or threads started by the import: {found}")
        return "\n".join(lines)


def measure_import(pairs: int, python: str = sys.executable) -> ImportCost:
    """Import in ``pairs`` of fresh interpreters, after one pair that warms the disk."""
    _once(python, "numpy")
    _once(python, "commrt")
    numpy_ms: list[float] = []
    both_ms: list[float] = []
    beyond_ms: list[float] = []
    started: set[str] = set()
    for _ in range(pairs):
        numpy_ms.append(_once(python, "numpy")[0])
        total, beyond, found = _once(python, "commrt")
        both_ms.append(total)
        beyond_ms.append(beyond)
        started.update(found)
    return ImportCost(
        median_interval(beyond_ms),
        median_interval(numpy_ms),
        median_interval(both_ms),
        tuple(sorted(started)),
        tuple(beyond_ms),
    )


def _once(python: str, what: str) -> tuple[float, float, list[str]]:
    # -P: the folder that the benchmark is started in must not be what is imported.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    try:
        answer = subprocess.run(
            [python, *safe, "-c", _PROGRAM, what],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"import {what} did not end within {error.timeout:g} s in {python}"
        ) from error
    if answer.returncode != 0:
        raise BackendError(
            f"import {what} failed in {python}:\n{answer.stderr[-2000:]}"
        )
    total, beyond, started = json.loads(answer.stdout)
    return float(total), float(beyond), list(started)
