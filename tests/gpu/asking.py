# SPDX-License-Identifier: Apache-2.0
"""How a GPU is asked: each question is a function in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "QUESTIONS",
    "TIMED",
    "ask",
    "driver",
    "flag_of",
    "opened",
    "question",
    "spread",
]

_SCRIPT = Path(__file__).with_name("questions.py")
LIMIT_S = 40.0
QUESTIONS: dict[str, Callable[[], Any]] = {}
TIMED: set[str] = set()
ENVIRONMENT: dict[str, dict[str, str]] = {}


def question(
    *, timed: bool = False, **environment: str
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a question; timed ones run alone."""

    def registered(function: Callable[[], Any]) -> Callable[[], Any]:
        name = function.__name__
        QUESTIONS[name] = function
        ENVIRONMENT[name] = environment
        if timed:
            TIMED.add(name)
        return function

    return registered


def opened() -> Any:
    """Return the first GPU, with its kernels."""
    from commrt.devices.registry import cuda_device

    return cuda_device(0)


def driver() -> Any:
    """Return libcuda with a context of the first GPU current."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuInit(0)
    context = ctypes.c_void_p()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    return cuda


def flag_of(gpu: Any) -> int:
    """Return pinned memory that is 0."""
    address: int = gpu.pinned_alloc(4096)
    gpu.write(address, bytes(64))
    return address


def spread(samples_us: list[float]) -> dict[str, float]:
    """Return the quantiles of samples."""
    ordered = sorted(samples_us)
    return {
        "p1": round(ordered[len(ordered) // 100], 2),
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[len(ordered) * 99 // 100], 2),
    }


def ask(name: str) -> str:
    """Ask in a process of its own; return a line of JSON."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), "--here", name],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=os.sep,
            env={**os.environ, **ENVIRONMENT[name]},
            check=False,
        )
        said: Any = done.stdout.splitlines()[-1] if done.returncode == 0 else ""
        answer = json.loads(said) if said else f"failed: {done.stderr[-600:]}"
    except subprocess.TimeoutExpired:
        answer = f"no answer in {LIMIT_S} s"
    took = round(time.monotonic() - start, 1)
    return json.dumps({"question": name, "answer": answer, "seconds": took})
