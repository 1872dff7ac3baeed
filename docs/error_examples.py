# SPDX-License-Identifier: Apache-2.0
"""The entries of docs/reference/errors.md: ``python docs/error_examples.py``.

Each has a program that raises the error; its message is a real one.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import commrt
from commrt.comm import Communicator
from commrt.errors import CommError
from commrt.local import run

__all__ = ["ENTRIES", "Entry", "page_entries"]

_FILE = "train.py"
"""Messages of check mode name the file and line of a call."""
_FOLDERS = re.compile(r"/\S+/")
"""Paths differ by machine."""


@dataclass(frozen=True)
class Entry:
    """One error class on the page, and a program that raises it."""

    name: str
    """The class."""
    meaning: str
    """When it is raised."""
    cure: str
    """What the reader does then."""
    program: str = ""
    """Python, with ``comm`` and ``np``; empty for a class that is never raised."""
    ranks: int = 1
    """Every rank runs the program; the lowest rank that raises the class is shown."""
    debug: str = "off"
    """The value of COMMRT_DEBUG."""
    variables: tuple[tuple[str, str], ...] = ()
    """Other variables of the job, and their values."""
    where: str = "commrt.errors"
    """The module that has the class."""

    @property
    def text(self) -> str:
        """The program as the page shows it, with the lines that messages count."""
        said = [("COMMRT_DEBUG", "check")] * (self.debug == "check")
        said += self.variables
        debug = "".join(f", with {name}={value}" for name, value in said)
        head = f"# On {self.ranks} ranks{debug}:\n" if self.ranks > 1 else ""
        return head + self.program


ENTRIES = (
    Entry(
        "CommError",
        "The base of every error of commrt. It is never raised itself.",
        "Catch it to catch them all.",
    ),
    Entry(
        "UsageError",
        "An argument or a call is wrong. Nothing was sent.",
        "Correct the call and make it again. The other ranks wait for it meanwhile.",
        'comm.allreduce(np.ones(4), op="summ")',
    ),
    Entry(
        "BufferError_",
        "commrt cannot communicate from or into this array. Nothing was sent.",
        "Pass an array of the kind that the message names.",
        "comm.allreduce(np.ones((4, 4))[:, 1])",
    ),
    Entry(
        "NotFiniteError",
        "An array that was to be sent has NaN or infinity, and `comm.nan_check` "
        "(`COMMRT_NAN_CHECK=1`) asks to look for them. Nothing was sent.",
        "Look for what made it, at the index that the text names. All ranks are in "
        "step for their next call.",
        "comm.nan_check = True\ncomm.allreduce(np.array([1.0, np.nan]))",
    ),
    Entry(
        "ClosedError",
        "The communicator was freed, or the process forked after it was made.",
        "Make a new communicator. In a forked child, use none of the parent's.",
        "comm.free()\ncomm.barrier()",
    ),
    Entry(
        "MismatchError",
        "Ranks called different things. Check mode (`COMMRT_DEBUG=check`) and calls "
        "that make or plan something raise the same text on every rank, and nothing "
        "was sent. Without check mode, all ranks raise it, too, once one has found "
        "that calls differ, and the communicator has ended.",
        "Make the same calls in the same order on all ranks.",
        "if comm.rank == 0:\n    comm.allreduce(np.ones(4))\n"
        "else:\n    comm.allreduce(np.ones(5))",
        ranks=2,
        debug="check",
    ),
    Entry(
        "RefusedError",
        "Another rank's call was refused for its arguments, so this operation did not "
        "happen. All ranks are in step.",
        "Correct the call of the rank that the text names, and make the next call.",
        "comm.allreduce(np.ones(4), out=np.ones(5 if comm.rank == 0 else 4))",
        ranks=2,
    ),
    Entry(
        "TimeoutError_",
        "An operation did not end within `timeout_s`. It stays in flight.",
        "Wait for `error.request` again, or end the job with `comm.abort()`.",
        "if comm.rank == 0:\n    comm.allreduce(np.ones(4), timeout_s=0.1)",
        ranks=3,
    ),
    Entry(
        "PeerFailedError",
        "A peer's process has ended, or its network or device library reports that it "
        "is gone.",
        "Go on without it, with ``create_group`` of the ranks that remain, or restart "
        "the job from a checkpoint.",
        "if comm.rank == 0:\n    comm.dup()",
        ranks=2,
    ),
    Entry(
        "IntegrityError",
        "A message did not fit its checksum (`COMMRT_CHECKSUM=1`), here or on another "
        "rank of the operation.",
        "Look at the memory and the network of the ranks that the text names. Restart "
        "the job from a checkpoint.",
        "comm.allgather(np.ones(4))",
        ranks=2,
        variables=(("COMMRT_CHECKSUM", "1"), ("COMMRT_CHAOS", "7:corrupt@rank=1")),
    ),
    Entry(
        "ChangedInFlightError",
        "The program wrote to an array while a nonblocking call sent it. Check mode "
        "looks for this.",
        "Wait for the request before you write to the array.",
        "x = np.ones(100_000)\nrequest = comm.allreduce(x, nonblocking=True)\n"
        "x[0] = 2.0\n"
        "request.wait()",
        ranks=2,
        debug="check",
    ),
    Entry(
        "RevokedError",
        "The communicator failed in an earlier operation, on this rank or on a peer.",
        "Look for the first error of any rank. Call `shrink()` on all of them to go on "
        "with a new communicator, or end the job.",
        "@commrt.reduction\n"
        "def wrong(a, b):\n    return 1 / 0 if comm.rank == 0 else a + b\n\n\n"
        "try:\n    comm.allreduce(np.ones(4), op=wrong)\n"
        "except commrt.errors.ReductionError:\n    comm.barrier()",
        ranks=2,
    ),
    Entry(
        "RecoveryError",
        "The ranks that live cannot go on: nobody has a part of the model, or a step's "
        "state whole. Or they go on without this rank.",
        "Start the job again from a checkpoint; or, where only this rank is left out, "
        "end it, or let it join anew.",
        "from commrt import elastic\n\n\n"
        "def step(comm, number):\n    comm.barrier()\n\n\n"
        "x = np.zeros(3 + comm.rank)  # the ranks have different models\n"
        "elastic.run(step, elastic.State(x=x), until=1, comm=comm)",
        ranks=2,
    ),
    Entry(
        "ReductionError",
        "A function passed to `commrt.reduction` raised an exception, or returned "
        "another type or length than its arguments'.",
        "Look at the exception's cause (`__cause__`). Make a new communicator.",
        "@commrt.reduction\n"
        "def half(a, b):\n    return (a + b)[::2] if comm.rank == 0 else a + b\n\n\n"
        "comm.allreduce(np.ones(4), op=half)",
        ranks=2,
    ),
    Entry(
        "TruncationError",
        "A message was longer than the buffer of its receive. The communicator stays "
        "usable.",
        "Receive into an array that is long enough.",
        "if comm.rank == 0:\n    comm.recv(np.empty(4), source=1)\n"
        "else:\n    comm.send(np.ones(6), dest=0)",
        ranks=2,
    ),
    Entry(
        "ObjectError",
        "An object that another rank sent cannot be unpickled here. The other ranks "
        "have theirs, and the communicator stays usable.",
        "Look at the exception's cause (`__cause__`). Let the object's classes be "
        "importable on every rank.",
        "import operator\n\n\nclass Ratio:\n"
        "    def __reduce__(self):  # says how it is made again\n"
        "        return operator.truediv, (1, 0)\n\n\n"
        "comm.bcast_object(Ratio() if comm.rank == 0 else None)",
        ranks=2,
    ),
    Entry(
        "MemoryError_",
        "There is no memory for the array that a call was to return. Nothing was sent.",
        "Check the numbers of elements, or pass `out=`.",
        "grid = comm.cart((1,), periodic=False)\n"
        "grid.neighbor_allgatherv(np.ones(4), recv_counts=[2**50, 2**50])",
    ),
    Entry(
        "BackendError",
        "A backend, or a library that it needs, is missing or failed.",
        "Follow the message: install or select another library, or another backend.",
        "from commrt.nccl.libnccl import find\n\n"
        'find({"COMMRT_NCCL_LIB": "libnccl.so.none"})',
        ranks=0,
    ),
    Entry(
        "DeviceError",
        "A device, or a call of its driver, failed. `error.status` names the kind.",
        "Follow the message.",
        "from commrt.devices import SimWorld\n\nSimWorld().device().alloc(1 << 60)",
        ranks=0,
    ),
    Entry(
        "DeviceMissingError",
        "There is no driver, no such device, or the driver is too old.",
        "Install the driver that the message names, or use arrays on the host.",
        "from commrt.devices import CudaDevice\n\n"
        'CudaDevice(0, library="libcuda.so.none")',
        ranks=0,
    ),
    Entry(
        "KernelsMissingError",
        "commrt's GPU kernels cannot be compiled: NVRTC is missing, or does not fit.",
        "Install the package that the message names, or unset `COMMRT_NVRTC_LIB`.",
        "from commrt.kernels.nvrtc import find\n\n"
        'find(environ={"COMMRT_NVRTC_LIB": "libnvrtc.so.none"})',
        ranks=0,
    ),
    Entry(
        "DeviceFailedError",
        "The device failed earlier, for example by a wrong kernel. All later calls of "
        "this process on it fail, too.",
        "Find the first failure; restart the process.",
        "from commrt.devices import SimWorld\n\n"
        "device = SimWorld().device()\n"
        "device.fail_after(1)\n"
        "device.write_value32(0, device.pinned_alloc(4), 1)\n"
        "device.stream_synchronize(0)",
        ranks=0,
    ),
    Entry(
        "CaptureError",
        "The call is not allowed while a stream is captured into a graph.",
        "Make the call outside the capture.",
        "from commrt.devices import DeviceArray, DeviceStream, SimWorld\n\n"
        "device = SimWorld().device()\n"
        "with DeviceStream(device) as stream:\n"
        "    x = DeviceArray(device, 4)\n"
        "    comm.allreduce(x)\n"
        "    device.begin_capture(stream.handle)\n"
        "    comm.allreduce(x)",
    ),
    Entry(
        "OrderingError",
        "A simulated device found accesses to memory that nothing orders, or a "
        "deadlock. Real devices do not raise it.",
        "Order the two sides by one stream, or by an event between their streams.",
        "from commrt.devices import SimWorld\n\n"
        "world = SimWorld()\n"
        "device = world.device()\n"
        "flag = device.pinned_alloc(4)\n"
        "device.wait_value32_geq(device.stream_create(), flag, 1)\n"
        "world.run_until_idle()",
        ranks=0,
    ),
    Entry(
        "LaunchError",
        "The ranks of a benchmark or of a comparison ended without a result.",
        "Read the command and the end of its output, which the message quotes.",
        "from commrt.bench.launch import PeerSpec, launch, make_job\n\n"
        'job = make_job("allreduce", [8])\n'
        'launch(PeerSpec("gloo", "gloo", "false"), 2, job, timeout_s=30)',
        ranks=0,
        where="commrt.bench.launch",
    ),
    Entry(
        "ClusterError",
        "A cluster on this machine cannot be made, found, entered or ended.",
        "Do what the message says: run as root, install a program, take another name.",
        "from pathlib import Path\n\n"
        "from commrt.cluster.state import find_cluster\n\n"
        'find_cluster("demo", Path("clusters"))',
        ranks=0,
        where="commrt.cluster.failures",
    ),
    Entry(
        "TableError",
        "A selection table is malformed, hostile, or of another machine. It is the "
        "same on every rank.",
        "Correct the line, or delete the file and measure anew: `commrt-tune run`.",
        "from commrt.backends.catalog import catalog\n"
        "from commrt.select.table import load\n\n"
        'table = {"schema": "commrt-tune/1", "machine": {}, "rules": []}\n'
        'load(str(table), "table.yaml", catalog())',
        ranks=0,
    ),
    Entry(
        "ScheduleError",
        "The verifier proved a schedule wrong: malformed, a deadlock, a race, or a "
        "wrong result.",
        "Correct the algorithm.",
        "import commrt.algorithms\n"
        "from commrt.schedule.verify import verify\n\n\n"
        '@commrt.algorithm("bcast", "forgetful")\n'
        "def forgetful(b):\n"
        "    if b.rank == b.root:\n"
        "        b.copy(b.out[:], b.inp[:])\n\n\n"
        'verify(commrt.algorithms.schedule("bcast", "forgetful", 2))',
        ranks=0,
    ),
    Entry(
        "RequestErrors",
        "`commrt.wait_all` met several errors. `error.errors` lists them as `(index, "
        "error)`.",
        "Handle each error.",
        "if comm.rank == 0:\n"
        "    x = [np.empty(4), np.empty(2)]\n"
        "    requests = [comm.recv(each, source=1, nonblocking=True) for each in x]\n"
        "    commrt.wait_all(requests)\n"
        "else:\n"
        "    comm.send(np.ones(6), dest=0)\n"
        "    comm.send(np.ones(6), dest=0)",
        ranks=2,
        where="commrt.request",
    ),
)


def _message(entry: Entry) -> str:
    """Return what the program's lowest failing rank said, without its folders."""
    program = compile(entry.text, _FILE, "exec")
    raised: dict[int, CommError] = {}

    def main(comm: Communicator | None) -> None:
        try:
            exec(program, {"comm": comm, "np": np, "commrt": commrt})
        except CommError as error:
            raised[comm.rank if comm else 0] = error

    os.environ.update({"COMMRT_DEBUG": entry.debug, **dict(entry.variables)})
    if not entry.ranks:
        main(None)
    else:
        with suppress(RuntimeError):  # of the program itself
            run(entry.ranks, main)
    for name, _ in entry.variables:
        del os.environ[name]
    for _, error in sorted(raised.items()):
        if type(error).__name__ == entry.name:
            return _FOLDERS.sub(".../", str(error))
    raise SystemExit(f"{entry.name}: the program raised {raised}")


def page_entries() -> str:
    """Return the entries of the page; for a fresh process, whose state they change."""
    return "\n".join(_entry(entry) for entry in ENTRIES)


def _entry(entry: Entry) -> str:
    bases = ", ".join(f"`{name}`" for name in _parents(entry)) or "`Exception`"
    lines = [
        f"## `{entry.name}`",
        "",
        f"`{entry.where}.{entry.name}`, subclass of {bases}. {entry.meaning}",
        f"**What to do:** {entry.cure}",
        "",
    ]
    if entry.program:
        lines += [
            "```python3",
            entry.text,
            "```",
            "",
            "```text",
            _message(entry),
            "```",
            "",
        ]
    return "\n".join(lines)


def _parents(entry: Entry) -> list[str]:
    home = importlib.import_module(entry.where)
    return [
        base.__name__
        for base in getattr(home, entry.name).__bases__
        if base is not Exception
    ]


if __name__ == "__main__":
    sys.stdout.write(page_entries())
