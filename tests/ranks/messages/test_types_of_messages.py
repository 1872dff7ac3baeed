# SPDX-License-Identifier: Apache-2.0
"""Messages with tags: a receive takes a message of its own element type only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.errors import MismatchError
from commrt.local import run

LENGTHS = [0, 1, 7, 4000, 200_000]
"""Elements: within a line, within a packet, announced."""


def receive(comm: Any, how: str, out: Any) -> Any:
    """Receive into ``out`` from rank 0, in one of the ways there are."""
    if how == "recv":
        return comm.recv(out, source=0)
    if how == "irecv":
        return comm.recv(out, source=0, nonblocking=True).wait()
    if how == "sendrecv":
        return comm.sendrecv(np.ones(1), dest=0, out=out, source=0)
    if how == "multi_sendrecv":
        return comm.multi_sendrecv(recvs=[(out, 0)])
    return comm.plan.recv(out, source=0)()


@pytest.mark.parametrize("how", ["recv", "irecv", "sendrecv", "multi_sendrecv", "plan"])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_message_of_another_type_is_refused_where_it_comes(
    how: str, first: str
) -> None:
    def rank_main(comm: Any) -> None:
        for number in LENGTHS:
            if first == "receive" and comm.rank == 0:
                comm.recv(np.empty(1), source=1, tag=9)  # the other rank begins
            if comm.rank == 0:
                comm.send(np.ones(number, np.float32), dest=1)
                comm.send(np.full(number, 7, np.int32), dest=1)
                if how == "sendrecv":
                    comm.recv(np.empty(1), source=1)
                continue
            if first == "receive":
                comm.send(np.empty(1), dest=0, tag=9)
            out = np.full(number, -1, np.int32)
            with pytest.raises(MismatchError, match=r"float32 elements.*has int32"):
                receive(comm, how, out)
            assert (out == -1).all()
            comm.recv(out, source=0)
            assert (out == 7).all()

    run(2, rank_main, timeout_s=300)


def test_a_message_to_oneself_has_a_type_too() -> None:
    def rank_main(comm: Any) -> None:
        sent = comm.send(np.ones(3), dest=0, nonblocking=True)
        out = np.zeros(3, np.int64)
        with pytest.raises(MismatchError, match="one type"):
            comm.recv(out, source=0)
        sent.wait()
        assert not out.any()

    run(1, rank_main, timeout_s=300)


def test_the_error_of_a_list_names_the_message() -> None:
    def rank_main(comm: Any) -> None:
        if comm.rank == 0:
            comm.multi_sendrecv(sends=[(np.ones(2), 1, 5), (np.ones(2, "i8"), 1, 6)])
            return
        outs = np.zeros(2, np.int64), np.zeros(2, np.int64)
        with pytest.raises(MismatchError, match="recv from rank 0, tag 5"):
            comm.multi_sendrecv(recvs=[(outs[0], 0, 5), (outs[1], 0, 6)])
        assert not outs[0].any()
        assert outs[1].all()

    run(2, rank_main, timeout_s=300)
