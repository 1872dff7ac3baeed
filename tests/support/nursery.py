# SPDX-License-Identifier: Apache-2.0
"""Processes that start at once: forks of one that has imported torch already.

Two cores take seconds to import torch in eight processes. The nursery imports the
modules of the ranks, and has neither threads nor anything of commrt's that is open.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from commrt.launch.mpiexec import child_environment

__all__ = ["Nursery"]

_PR_SET_PDEATHSIG = 1
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Nursery:
    """Starts functions of a module of tests, each in a process of its own.

    Processes that are left end with it.
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, module],
            env={**child_environment(sys.executable), **_ONE_THREAD},
            cwd=os.sep,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, function: str, environ: Mapping[str, str], log: Path, **arguments: Any
    ) -> int:
        """Call the function in a new process; return its number.

        ``log``: gets what it prints.
        """
        order = {
            "function": function,
            "environ": dict(environ),
            "log": str(log),
            "arguments": arguments,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def children(self) -> list[int]:
        """Return the processes that have not ended."""
        pid = self._process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _next_order() -> dict[str, Any] | None:
    """Fork for each order that comes; return the order, in the new process only."""
    # The kernel waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    me = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(1)
            order: dict[str, Any] = json.loads(line)
            return order
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    return None


def main() -> None:
    """Serve orders; in the process of one, carry it out and end as any program does."""
    module = importlib.import_module(sys.argv[1])
    order = _next_order()
    if order is None:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, to in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, to)
    os.close(nothing)
    os.close(log)
    os.environ.update(order["environ"])
    getattr(module, order["function"])(**order["arguments"])


if __name__ == "__main__":
    main()
