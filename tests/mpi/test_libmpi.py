# SPDX-License-Identifier: Apache-2.0
"""The looked-up functions and constants work when called as C would call them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from commrt.vocabulary.dtypes import DTYPES


def allreduce_by_address() -> dict[str, Any]:
    """Sum an int32 on every rank by MPI_Iallreduce and MPI_Test, through ctypes."""
    from mpi4py import MPI

    from commrt.mpi import library

    table, constants = library.mpi_table(), library.mpi_constants()
    word = ctypes.c_uint64
    pointer = ctypes.c_void_p
    iallreduce = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, ctypes.c_int, word, word, word, pointer
    )(table["MPI_Iallreduce"])
    test = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer)(table["MPI_Test"])
    value = ctypes.c_int32(MPI.COMM_WORLD.rank + 1)
    request = ctypes.create_string_buffer(8)
    status = ctypes.create_string_buffer(256)
    flag = ctypes.c_int(0)
    iallreduce(
        constants["IN_PLACE"],
        ctypes.addressof(value),
        1,
        constants["dtype:int32"],
        constants["op:sum"],
        constants["COMM_WORLD"],
        ctypes.addressof(request),
    )
    while not flag.value:
        test(ctypes.addressof(request), ctypes.addressof(flag), status)
    size = constants["sizeof_Request"]
    return {
        "sum": value.value,
        "freed": int.from_bytes(request.raw[:size], "little")
        == constants["REQUEST_NULL"],
        "library": library.library_name(MPI),
        "path": library.library_path(),
        "constants": constants,
    }


def test_the_library_of_mpi4py_is_called_by_address(mpirun: Any) -> None:
    for found in mpirun(3, allreduce_by_address):
        assert found["sum"] == 1 + 2 + 3
        assert found["freed"] is True
        assert "libmpi" in found["path"]
        name = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel"}
        assert name.get(mpirun.flavour, "") in found["library"]


def constants_of_this_library() -> dict[str, int]:
    from commrt.mpi.library import mpi_constants

    return mpi_constants()


def test_every_dtype_but_the_short_floats_has_a_handle(mpirun: Any) -> None:
    (constants,) = mpirun(1, constants_of_this_library)
    names = {dtype.name for dtype in DTYPES if not dtype.is_short_float}
    assert names <= {key[6:] for key in constants if key.startswith("dtype:")}
    handles = [value for key, value in constants.items() if key.startswith("dtype:")]
    assert constants["DATATYPE_NULL"] not in handles


def test_status_fields_are_found_inside_the_status(mpirun: Any) -> None:
    (constants,) = mpirun(1, constants_of_this_library)
    offsets = [constants[f"status_{name}"] for name in ("source", "tag", "error")]
    assert len(set(offsets)) == 3
    assert max(offsets) + 4 <= constants["sizeof_Status"]
    assert constants["TAG_UB"] >= 32767


@pytest.mark.parametrize("size", ["Request", "Comm", "Datatype", "Op"])
def test_handles_fit_into_eight_bytes(mpirun: Any, size: str) -> None:
    (constants,) = mpirun(1, constants_of_this_library)
    assert constants[f"sizeof_{size}"] in (4, 8)


def ask_about_cuda() -> dict[str, Any]:
    """Return what the library says of CUDA memory, and whether it is PyPI's."""
    import sys

    from commrt.mpi import library
    from commrt.mpi.cuda_aware import mpi_takes_cuda

    found = mpi_takes_cuda()
    from_pypi = library.library_path().startswith(sys.prefix)
    return {"proved": found.proved, "why": found.why, "from_pypi": from_pypi}


def test_the_library_is_asked_whether_it_takes_cuda_memory(mpirun: Any) -> None:
    """Those from PyPI are built without: an address of a device would crash them."""
    for found in mpirun(2, ask_about_cuda):
        assert "MPIX_" in found["why"], found
        if found["from_pypi"]:
            assert not found["proved"]
            assert "says no" in found["why"]
