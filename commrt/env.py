# SPDX-License-Identifier: Apache-2.0
"""Every ``COMMRT_*`` variable: the one place where the environment is read.

``VARIABLES`` drives reading, checking, ``python -m commrt info`` and the table in
``docs/reference/environment.md``. Values are read when they are used, never at import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commrt.errors import UsageError, suggest
from commrt.vocabulary.chaos import parse_chaos
from commrt.vocabulary.limits import parse_seconds

__all__ = [
    "VARIABLES",
    "Value",
    "Variable",
    "agreement",
    "check_names",
    "markdown_table",
    "read",
    "read_bool",
    "read_float",
    "read_nodes",
    "read_str",
    "value",
]

Value = str | float | bool | tuple[int, ...] | None
"""Value of a variable once read; None: not set, and there is no default."""

_PREFIX = "COMMRT_"


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    """Full name, ``COMMRT_...``."""
    values: str
    """The values that may be set, for people; choices are separated by ``|``."""
    default: str | None
    """The text that stands for an unset variable; None: the feature is not used."""
    doc: str
    """One line for ``info`` and the reference page."""
    must_agree: bool
    """True if a different value on another rank is an error at ``init``."""
    parse: Callable[[str], Value]
    """Text to value; raises ValueError with a reason."""


def _text(raw: str) -> str:
    return raw


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw not in allowed:
            raise ValueError(f"not one of the allowed values{suggest(raw, allowed)}")
        return raw

    return parse


def _flag(raw: str) -> bool:
    if raw not in ("0", "1"):
        raise ValueError("write 1 or 0")
    return raw == "1"


def _count(raw: str) -> float:
    """Parse a whole number above 0."""
    if not raw.isdecimal() or int(raw) == 0:
        raise ValueError("must be a whole number above 0")
    return float(raw)


def _number(raw: str) -> float:
    """Parse a whole number of at most 9 digits."""
    if not raw.isdecimal() or not raw.isascii() or len(raw) > 9:
        raise ValueError("must be a whole number from 0 to 999999999")
    return float(raw)


def _chaos(raw: str) -> str:
    parse_chaos(raw)
    return raw


def _nodes(raw: str) -> tuple[int, ...]:
    """Parse ``2,3``: ranks per pretended node."""
    try:
        counts = tuple(int(part) for part in raw.split(","))
    except ValueError:
        raise ValueError("not whole numbers with commas between") from None
    if min(counts) < 1:
        raise ValueError("every node needs at least one rank, so no number below 1")
    return counts


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "COMMRT_ALGORITHM",
        "COLL:BACKEND/ALGORITHM or ALGORITHM, comma separated",
        None,
        "Override the selection: of one operation, as in allreduce:mpi/native, or of "
        "all that have it, as in ring.",
        True,
        _text,
    ),
    Variable(
        "COMMRT_TABLE",
        "path",
        None,
        "Selection table to use instead of the searched ones.",
        True,
        _text,
    ),
    Variable(
        "COMMRT_TABLE_ANY_MACHINE",
        "0|1",
        "0",
        "Accept a COMMRT_TABLE that was measured on another machine.",
        True,
        _flag,
    ),
    Variable(
        "COMMRT_CHAOS",
        "SEED or SEED:FAULT;FAULT, as in 7:fail@rank=1,op=allreduce,number=100",
        None,
        "Inject faults into operations, to try a program against them; a seed alone "
        "draws them.",
        True,
        _chaos,
    ),
    Variable(
        "COMMRT_CHECKSUM",
        "0|1",
        "0",
        "Checksums of messages, so that one that is damaged on its way is found.",
        True,
        _flag,
    ),
    Variable(
        "COMMRT_COMPARE_EVERY",
        "whole number",
        "128",
        "After so many of its collectives that an MPI library, NCCL or kernels over "
        "peers' memory ran, a rank compares them with the others' ones; 0: never.",
        True,
        _number,
    ),
    Variable(
        "COMMRT_CUDA_AWARE_MPI",
        "events|flags|off",
        "events",
        "Whether an MPI library that says it takes CUDA memory is given device arrays, "
        "and what waits until it is done: who waits for the call, or a stream.",
        True,
        _choice("events", "flags", "off"),
    ),
    Variable(
        "COMMRT_DEBUG",
        "off|check",
        "off",
        "check compares every operation across ranks before data moves, and names "
        "the calls that differ.",
        True,
        _choice("off", "check"),
    ),
    Variable(
        "COMMRT_DETERMINISTIC",
        "0|1",
        "0",
        "Bitwise the same results whatever algorithm runs, at a given number of ranks; "
        "init and the makers of communicators take deterministic=, too.",
        True,
        _flag,
    ),
    Variable(
        "COMMRT_NAN_CHECK",
        "0|1",
        "0",
        "Refuse calls whose arrays have NaN or infinity, before anything is sent; "
        "comm.nan_check is the same for one communicator.",
        False,
        _flag,
    ),
    Variable(
        "COMMRT_LAUNCH",
        "mpi|run|torchrun|slurm|single",
        None,
        "Who started the ranks, instead of detecting it.",
        True,
        _choice("mpi", "run", "torchrun", "slurm", "single"),
    ),
    Variable(
        "COMMRT_MEETING",
        "path",
        None,
        "Folder in which the ranks meet that python -m commrt.run has started, or in "
        "which they reach its launcher; it sets the variable.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_JOIN",
        "0|1",
        "0",
        "init joins a running job: it waits until its ranks call grow(); python -m "
        "commrt.run --restarts sets it.",
        False,
        _flag,
    ),
    Variable(
        "COMMRT_RANK_PROCESS",
        "process and names of a rank",
        None,
        "Which process is the rank, so that those that it starts do not take its "
        "place; init sets it, nobody else.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_NCCL_LIB",
        "path",
        None,
        "The libnccl.so.2 to use, unless the process has one loaded already.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_NCCL_BLOCKING",
        "0|1",
        "1",
        "Communicators of NCCL whose calls may block; 0: calls never wait for peers, "
        "and each costs a thread of NCCL's, some 80 us.",
        False,
        _flag,
    ),
    Variable(
        "COMMRT_NVTX",
        "0|1",
        "0",
        "Ranges of NVTX around each call, for NVIDIA's profilers.",
        False,
        _flag,
    ),
    Variable(
        "COMMRT_NVTX_LIB",
        "path",
        None,
        "The NVTX library that takes the ranges of COMMRT_NVTX.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_NVRTC_LIB",
        "path",
        None,
        "The libnvrtc.so to compile GPU kernels with, unless the process has one "
        "loaded already.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_CARRIER",
        "auto|tcp|gloo|mpi",
        "auto",
        "Carries messages between nodes: tcp, connections of commrt's own; gloo, "
        "torch's, where ranks meet without MPI; mpi, where MPI started them. auto: "
        "tcp, or mpi where its messages are quicker.",
        True,
        _choice("auto", "tcp", "gloo", "mpi"),
    ),
    Variable(
        "COMMRT_KERNEL_CACHE",
        "path",
        None,
        "Folder for compiled GPU kernels instead of commrt/kernels in the user's "
        "cache folder.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_NODES",
        "ranks per node, as in 2,3; one number repeats",
        None,
        "Pretend that consecutive ranks lie on different nodes (tests).",
        True,
        _nodes,
    ),
    Variable(
        "COMMRT_PROGRESS",
        "off|on|auto",
        "auto",
        "Progress thread, which goes on with operations while the program computes; on "
        "needs MPI with THREAD_MULTIPLE; auto starts one only where at least 2 cores "
        "per on-node rank are available, and elsewhere lets the thread that receives "
        "by TCP go on with operations between nodes (it needs the same of MPI); off: "
        "they move only in calls.",
        True,
        _choice("off", "on", "auto"),
    ),
    Variable(
        "COMMRT_TRACE",
        "path of a folder",
        None,
        "Log every call of every rank into files in this folder, which is made.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_TRACE_RECORDS",
        "number",
        "100000",
        "How many calls of a rank its log keeps, the latest ones; 40 bytes each.",
        False,
        _count,
    ),
    Variable(
        "COMMRT_DUMP",
        "path of a folder",
        None,
        "Write each rank's last operations into this folder, which is made, when one "
        "times out, ranks' calls differ, a rank dies, or an exception or a signal ends "
        "the process.",
        False,
        _text,
    ),
    Variable(
        "COMMRT_PLAN_CACHE_NBYTES",
        "bytes",
        "1048576",
        "Most memory that a communicator keeps plans in, and for each kind of calls on "
        "devices as much again; those that were not used for longest go first, and "
        "the last one stays.",
        False,
        _count,
    ),
    Variable(
        "COMMRT_TIMEOUT_S",
        "seconds",
        "600",
        "Deadline of every operation that names none; inf: no limit.",
        False,
        parse_seconds,
    ),
    Variable(
        "COMMRT_ABORT_ON_EXCEPTION",
        "0|1",
        "1",
        "An uncaught exception on one rank ends the whole job.",
        False,
        _flag,
    ),
    Variable(
        "COMMRT_LINK_CLASS",
        "near|far|oversubscribed|network",
        None,
        "Force the measured link class (tests, comparisons).",
        True,
        _choice("near", "far", "oversubscribed", "network"),
    ),
    Variable(
        "COMMRT_SHM",
        "memfd|devshm|off",
        "memfd",
        "Where on-node shared memory comes from; off: MPI point-to-point only.",
        True,
        _choice("memfd", "devshm", "off"),
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read(name: str, environ: Mapping[str, str] | None = None) -> Value:
    """Return the value of ``name``, or its default; an empty value means unset.

    Raises UsageError for a value that the variable does not allow.
    """
    variable = _BY_NAME[name]
    raw = value(name, environ)
    text = variable.default if raw is None else raw
    if text is None:
        return None
    try:
        return variable.parse(text)
    except ValueError as error:
        raise UsageError(
            f"environment variable {name}={text!r}: {str(error).rstrip('.')}. "
            f"Expected {variable.values}; unset it for the default "
            f"({variable.default or 'none'})."
        ) from None


def read_str(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return a text or choice variable."""
    value = read(name, environ)
    assert value is None or isinstance(value, str), name
    return value


def read_bool(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return a 0|1 variable."""
    value = read(name, environ)
    assert isinstance(value, bool), name
    return value


def read_float(name: str, environ: Mapping[str, str] | None = None) -> float:
    """Return a number variable."""
    value = read(name, environ)
    assert isinstance(value, float), name
    return value


def read_nodes(environ: Mapping[str, str] | None = None) -> tuple[int, ...] | None:
    """Return COMMRT_NODES: ranks per pretended node, or None.

    One number stands for nodes of that many ranks each.
    """
    value = read("COMMRT_NODES", environ)
    assert value is None or isinstance(value, tuple)
    return value


def value(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the text that the user set for ``name``, None if unset or empty."""
    environ = os.environ if environ is None else environ
    return environ.get(name) or None


def check_names(environ: Mapping[str, str] | None = None) -> None:
    """Raise UsageError for an unknown ``COMMRT_`` name or a value not allowed."""
    environ = os.environ if environ is None else environ
    for name in sorted(environ):
        if not name.startswith(_PREFIX):
            continue
        if name not in _BY_NAME:
            raise UsageError(
                f"unknown environment variable {name}{suggest(name, _BY_NAME)}"
            )
        read(name, environ)


def agreement(environ: Mapping[str, str] | None = None) -> str:
    """Return the text that must be equal on all ranks: variables that select."""
    return "\n".join(
        f"{variable.name}={value(variable.name, environ) or ''}"
        for variable in VARIABLES
        if variable.must_agree
    )


def markdown_table() -> str:
    """Return the variables as the table of ``docs/reference/environment.md``."""
    rows = ["| variable | values | default | equal on all ranks | meaning |"]
    rows.append("|---|---|---|---|---|")
    for variable in VARIABLES:
        values = variable.values.replace("|", " \\| ")
        default = "" if variable.default is None else f"`{variable.default}`"
        agree = "yes" if variable.must_agree else ""
        rows.append(
            f"| `{variable.name}` | {values} | {default} | {agree} | {variable.doc} |"
        )
    return "\n".join(rows) + "\n"
