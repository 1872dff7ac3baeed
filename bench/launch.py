# SPDX-License-Identifier: Apache-2.0
"""Start one benchmark launch of any peer and read back what it measured."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from commrt.bench.bench_operations import bench_operation
from commrt.bench.timing_loop import SharedFlags
from commrt.errors import BackendError, UsageError, suggest
from commrt.files.write import write_file
from commrt.launch.mpiexec import (
    Completed,
    available_cpus,
    child_environment,
    last_words,
    run_process,
    run_ranks,
)

__all__ = [
    "DEVICE_KINDS",
    "HOST_KINDS",
    "LaunchError",
    "PeerSpec",
    "launch",
    "make_job",
    "parse_peer",
]

Kind = Literal[
    "commrt", "symmetric", "mpi4py", "gloo", "copy", "nccl", "torch_nccl", "cupyx"
]
DEVICE_KINDS: tuple[Kind, ...] = ("nccl", "torch_nccl", "cupyx")
"""Peers whose arrays are on GPUs."""
HOST_KINDS: tuple[Kind, ...] = ("symmetric", "mpi4py", "gloo", "copy")
KINDS: tuple[Kind, ...] = ("commrt", *HOST_KINDS, *DEVICE_KINDS)
_MODULES: dict[Kind, str] = {
    "copy": "commrt.bench.peer_copy",
    "nccl": "commrt.bench.peer_nccl",
    "torch_nccl": "commrt.bench.peer_torch_nccl",
    "cupyx": "commrt.bench.peer_cupyx",
}
_REFUSED = re.compile(
    r"commrt\.errors\.(?:Usage|Backend|DeviceMissing|KernelsMissing)Error: (.*)"
)
_HERE = Path(__file__).resolve().parent


class LaunchError(BackendError):
    """A launch that ended without a result."""

    refusal: str | None = None
    """Message of the ranks, if they refused the request."""


@dataclass(frozen=True)
class PeerSpec:
    """One competitor: a library in an interpreter."""

    name: str
    """Its column in the tables."""
    kind: Kind
    """Worker that drives it."""
    python: str
    """The interpreter."""


def parse_peer(text: str) -> PeerSpec:
    """Parse ``--peer``: ``gloo``, ``NAME=PATH/python`` or ``NAME=KIND:PATH/python``.

    The kind is mpi4py unless given, or gloo for the name gloo; symmetric is commrt with
    its symmetric buffers, and copy no library but the bound (peer_copy.py). nccl,
    torch_nccl and cupyx are for arrays on GPUs.
    """
    name, equals, rest = text.partition("=")
    if not equals:
        if name not in KINDS:
            raise UsageError(
                f"--peer {text}: not a library that is known by name"
                f"{suggest(name, KINDS)} Another interpreter is NAME=PATH/python."
            )
        return PeerSpec(name, _kind(name), sys.executable)
    kind, colon, path = rest.partition(":")
    if not colon:
        kind, path = ("gloo" if name == "gloo" else "mpi4py"), rest
    if shutil.which(path) is None:
        raise UsageError(
            f"--peer {text}: {path!r} is not a program that can be run; expected the "
            f"path of a Python interpreter"
        )
    return PeerSpec(name, _kind(kind), path)


def _kind(text: str) -> Kind:
    for kind in KINDS:
        if kind == text:
            return kind
    raise UsageError(f"unknown kind of peer {text!r}{suggest(text, KINDS)}")


def torch_is_installed() -> bool:
    """Return whether this interpreter has torch, without importing it."""
    # A mere folder called torch, somewhere on the path, has no origin.
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None


def make_job(coll: str, sizes: list[int], **settings: Any) -> dict[str, Any]:
    """Return a job for ``timing_loop.run_job``; settings replace the defaults."""
    job: dict[str, Any] = {
        "spec": asdict(bench_operation(coll)),
        "sizes": [0] if bench_operation(coll).is_empty else sizes,
        "dtype": "float32",
        "root": 0,
        "in_place": False,
        "symmetric": False,
        "outstanding": 0,
        "fresh": False,
        "check": True,
        "warmup": 10,
        "iterations": 1000,
        "min_iterations": 20,
        "min_s": 0.02,
        "floor_us": 50.0,
        "max_relative_ci": 0.05,
        "budget_s": 1.0,
        "cpus": len(available_cpus()),
        "pin": True,
        "flags": None,
        "mode": "blocking",
        "num_tests": 0,
        "window": 64,
        "device": "cpu",
        "timing": "events",
    }
    unknown = set(settings) - set(job)
    if unknown:
        raise UsageError(f"unknown settings of a job: {', '.join(sorted(unknown))}")
    return {**job, **settings}


def launch(
    peer: PeerSpec,
    ranks: int,
    job: Mapping[str, Any],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a job on ``ranks`` ranks of ``peer``; return its result.

    Raises LaunchError, with the end of what was printed, if the launch failed or was
    killed at its deadline.
    """
    with tempfile.TemporaryDirectory(prefix="commrt-bench-") as folder:
        flags, result = f"{folder}/flags", Path(folder, "result.json")
        SharedFlags.create(flags, ranks)
        path = Path(folder, "job.json")
        own = {"flags": flags, "result": str(result)}
        own_arrays = {"symmetric": True} if peer.kind == "symmetric" else {}
        write_file(path, json.dumps({**job, **own_arrays, **own}))
        done = _run(peer, ranks, str(path), timeout_s, env)
        if not done.ok or not result.exists():
            raise _failure(peer, done)
        measured: dict[str, Any] = json.loads(result.read_text())
    return {"peer": peer.name, "ranks": ranks, "elapsed_s": done.elapsed_s, **measured}


def _failure(peer: PeerSpec, done: Completed) -> LaunchError:
    error = LaunchError(f"{peer.name}: {done.describe_failure()}")
    said = last_words(done.stderr)
    refused = _REFUSED.match(said)
    if refused is not None:
        error.refusal = refused[1]
    return error


def _run(
    peer: PeerSpec,
    ranks: int,
    job: str,
    timeout_s: float,
    env: Mapping[str, str] | None,
) -> Completed:
    if peer.kind == "gloo":
        argv = [peer.python, str(_HERE / "peer_gloo.py"), job, str(ranks)]
        environ = {**child_environment(peer.python), **(env or {})}
        return run_process(argv, environ, timeout_s=timeout_s)
    args = ["-m", _MODULES.get(peer.kind, "commrt.bench.worker"), job]
    if peer.kind == "mpi4py":
        args = [str(_HERE / "peer_mpi4py.py"), job]
    return run_ranks(peer.python, ranks, args, timeout_s=timeout_s, env=env)
