# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries are errors that say what to write."""

from __future__ import annotations

import re
from typing import Any

import pytest

import commrt
from commrt.comm import CartCommunicator, Communicator, GraphCommunicator
from commrt.local import run
from commrt.vocabulary.names_elsewhere import OF_COMMUNICATORS, OF_THE_MODULE
from commrt.vocabulary.operations import OPERATIONS

KINDS = (Communicator, CartCommunicator, GraphCommunicator)
IN_TABLES = {
    "isend": "comm.send(x, dest, tag, nonblocking=True)",
    "Irecv": "comm.recv(out, source, tag, nonblocking=True)",
    "Allreduce": "comm.allreduce(x, op, out=...)",
    "Iallreduce": "comm.allreduce(x, op, out=..., nonblocking=True)",
    "Bcast": "comm.bcast(x, root)",
    "Barrier": "comm.barrier()",
    "Get_rank": "comm.rank",
    "Reduce_scatter": "comm.reduce_scatterv(x, op, counts=..., out=...)",
    "Reduce_scatter_block": "comm.reduce_scatter(x, op, out=...)",
    "all_reduce": "comm.allreduce(x, op)",
    "all_gather_into_tensor": "comm.allgather(x)",
    "all_gather_object": "comm.allgather_object(x)",
    "broadcast": "comm.bcast(x, root)",
}


@pytest.mark.parametrize("name", OF_COMMUNICATORS)
def test_no_communicator_has_a_name_of_another_library(name: str) -> None:
    instead = re.escape(OF_COMMUNICATORS[name])
    for kind in KINDS:
        with pytest.raises(
            AttributeError, match=f"no attribute '{name}': write {instead}"
        ):
            getattr(kind, name)


@pytest.mark.parametrize("name", OF_COMMUNICATORS)
def test_what_is_written_instead_exists(name: str) -> None:
    asked = re.findall(r"\bcomm\.(\w+)", OF_COMMUNICATORS[name])
    assert [each for each in asked if not hasattr(CartCommunicator, each)] == []


def test_the_names_that_people_type_first() -> None:
    assert {name: OF_COMMUNICATORS[name] for name in IN_TABLES} == IN_TABLES


@pytest.mark.parametrize("spec", OPERATIONS, ids=lambda spec: spec.name)
def test_every_operation_has_its_names_in_mpi_and_torch(spec: Any) -> None:
    upper = (spec.mpi or spec.name).capitalize()
    for name in (upper, f"I{upper.lower()}", f"{upper}_init", *spec.torch_calls):
        assert name in OF_COMMUNICATORS or hasattr(Communicator, name)


def test_an_object_does_not_show_them() -> None:
    def main(comm: Any) -> Any:
        shown = {*dir(comm)} & {*OF_COMMUNICATORS}
        with pytest.raises(AttributeError, match=r"'isend': write comm.send"):
            comm.isend(1, 0)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = comm.nonsense
        return shown, hasattr(comm, "Get_rank"), getattr(comm, "Get_size", None)

    assert run(1, main) == [(set(), False, None)]


def test_a_program_may_have_its_own_method_of_that_name() -> None:
    class Own(Communicator):
        def Get_rank(self) -> int:  # noqa: N802
            return self.rank

    assert Own.Get_rank.__name__ == "Get_rank"


@pytest.mark.parametrize("name", OF_THE_MODULE)
def test_names_of_the_module(name: str) -> None:
    instead = re.escape(OF_THE_MODULE[name])
    with pytest.raises(AttributeError, match=f"no attribute '{name}': write {instead}"):
        getattr(commrt, name)


def test_operations_asked_of_the_module() -> None:
    for name, instead in (
        ("allreduce", r"comm\.allreduce\(\.\.\.\)"),
        ("all_reduce", r"comm\.allreduce\(x, op\)"),
        ("Send", r"comm\.send\(x, dest, tag\)"),
    ):
        with pytest.raises(AttributeError, match=f"write {instead}$"):
            getattr(commrt, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = commrt.nonsense


def test_the_module_lists_each_name_once() -> None:
    listed = commrt.__dir__()
    assert sorted({*listed}) == listed
    assert {*commrt.__all__} <= {*listed}
