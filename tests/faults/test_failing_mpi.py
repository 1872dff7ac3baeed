# SPDX-License-Identifier: Apache-2.0
"""Real MPI libraries of which a function fails: an error in the library's own words.

Which call fails, and what is then in flight, is gone through in
``ranks/engine/test_mpi_between_nodes.py``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from fake_mpi import prototype

import commrt
from commrt.mpi import library


def call_with_a_failure(name: str, coll: bool) -> list[str]:
    """Rank 0 calls, and from then on ``name`` fails; rank 1 does nothing."""
    from mpi4py import MPI

    table, fails = library.mpi_table(), [False]
    kind = prototype(name)
    original = kind(table[name])

    def call(*arguments: Any) -> int:
        return MPI.ERR_OTHER if fails[0] else int(original(*arguments))

    replaced = kind(call)
    address = ctypes.cast(replaced, ctypes.c_void_p).value
    assert address is not None
    library.mpi_table = lambda: {**table, name: address}
    comm = commrt.init()
    comm.keep_until_exit = replaced  # type: ignore[attr-defined]
    comm.barrier()
    said: list[str] = []
    if comm.rank == 1:
        return said
    fails[0] = True
    out = np.empty(3)
    for _ in range(2):
        try:
            if coll:
                comm.allgather(np.ones(3), algorithm="direct")
            else:
                comm.recv(out, source=1)
        except commrt.errors.CommError as error:
            said.append(f"{type(error).__name__}: {error}")
    return [*said, MPI.Get_error_string(MPI.ERR_OTHER).splitlines()[0]]


@pytest.mark.parametrize(
    ("function", "coll"),
    [("MPI_Isend", True), ("MPI_Test", True), ("MPI_Iprobe", False)],
)
def test_a_failing_library_is_quoted_and_the_communicator_given_up(
    mpirun: Any, function: str, coll: bool
) -> None:
    # Without a thread: it would call Python while a call of Python waits for it.
    env = {"COMMRT_NODES": "1,1", "COMMRT_PROGRESS": "off"}
    arguments = {"name": function, "coll": coll}
    (failed, revoked, text), nothing = mpirun(
        2, call_with_a_failure, env=env, **arguments
    )
    assert nothing == []
    assert failed.startswith("BackendError: " + ("allgather" if coll else "recv"))
    assert f"{function} failed: {text}" in failed
    assert failed.endswith("make a new communicator or end the job")
    assert revoked.startswith("RevokedError: world failed in an earlier operation (no ")
    assert function in revoked
