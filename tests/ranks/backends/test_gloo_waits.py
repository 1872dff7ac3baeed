# SPDX-License-Identifier: Apache-2.0
"""How the engine waits for what gloo runs, with a Work that only pretends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.comm import Communicator, core_of
from commrt.errors import BackendError
from commrt.local import run
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import operation


class Work:
    """Ends as the time of the first wait is up: what is asked afterwards knows it."""

    def __init__(self, failure: str | None) -> None:
        self.failure = failure
        self.waits = 0

    def wait(self, timeout: timedelta) -> bool:
        """Wait; torch's own says nothing of the end where time was up before."""
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self.waits > 0


def call_of(comm: Communicator, work: Work, x: np.ndarray[Any, Any]) -> Any:
    """Return an allreduce of a communicator of one, whose work is this one."""
    plan = _native.make_gloo_plan(
        _native.GlooGroup(),
        coll=operation("allreduce").code,
        dtype=dtype_by_name("float32").code,
        redop=0,
        root=0,
        in_elems=x.size,
        out_elems=x.size,
        label="gloo/native",
        returns_out=True,
        factor=1.0,
        method=lambda: work,
        arguments=lambda x, out: (),
        agreement=None,
        digest=0,
    )
    at = x.ctypes.data
    return _native.PersistentCall(core_of(comm), plan, at, at, x, x, x, "allreduce")


def test_an_end_just_as_time_is_up_is_no_failure() -> None:
    def main(comm: Communicator) -> int:
        work = Work(None)
        call_of(comm, work, np.ones(4, np.float32))()
        comm.allreduce(np.ones(3))  # nothing is broken
        return work.waits

    assert run(1, main) == [2]


def test_what_has_failed_says_why_and_not_that_time_was_up() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(BackendError, match="Connection reset by peer"):
            call_of(comm, Work("Connection reset by peer"), np.ones(4, np.float32))()

    run(1, main)
