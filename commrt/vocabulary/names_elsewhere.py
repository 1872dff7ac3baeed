# SPDX-License-Identifier: Apache-2.0
"""Names that other libraries have for what commrt does, and what to write instead.

A communicator has none of them. Who asks for one gets an AttributeError that says what
to write. The names of collectives follow from the table of operations.
"""

from __future__ import annotations

from typing import Any, NoReturn

from commrt.vocabulary.operations import OPERATIONS, OpSpec

__all__ = [
    "OF_COMMUNICATORS",
    "OF_MPI4PY",
    "OF_THE_MODULE",
    "OF_TORCH",
    "Elsewhere",
    "instead_of",
]


class Elsewhere:
    """A name that communicators do not have.

    It is an attribute of the class that raises when it is read. A ``__getattr__`` would
    make every call of every method a quarter slower.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead
        self.__doc__ = f"Not here: write {instead}."

    def __get__(self, held: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}: write "
            f"{self._instead}",
            name=self._name,
        )


def _call(spec: OpSpec, *more: str) -> str:
    """Return a call of an operation as a program writes it."""
    arguments = [*spec.positional, *(f"{name}=..." for name in spec.count_arguments)]
    return f"comm.{spec.name}({', '.join([*arguments, *more])})"


def _of_mpi(spec: OpSpec) -> dict[str, str]:
    """Return mpi4py's names of an operation: blocking, nonblocking, persistent."""
    upper = (spec.mpi or spec.name).capitalize()
    has_two_arrays = not spec.is_empty and (spec.input_on, spec.in_place) != (
        "root",
        True,
    )
    out = ["out=..."] if has_two_arrays else []
    later = _call(spec, *out, "nonblocking=True")
    return {
        upper: _call(spec, *out),
        f"I{upper.lower()}": later,
        f"i{upper.lower()}": later,
        f"{upper}_init": f"comm.plan.{spec.name}(...)",
    }


def _collectives_of_mpi() -> dict[str, str]:
    found: dict[str, str] = {}
    for spec in OPERATIONS:
        found |= _of_mpi(spec)
    return _without_own(found)


def _collectives_of_torch() -> dict[str, str]:
    found: dict[str, str] = {}
    for spec in OPERATIONS:
        for name in (spec.torch, *spec.torch_calls):
            if name:
                found.setdefault(name, _call(spec))
    return _without_own(found)


def _without_own(found: dict[str, str]) -> dict[str, str]:
    own = {spec.name for spec in OPERATIONS}
    return {name: instead for name, instead in found.items() if name not in own}


_SEND, _RECV = "comm.send(x, dest, tag)", "comm.recv(out, source, tag)"
_ISEND = "comm.send(x, dest, tag, nonblocking=True)"
_IRECV = "comm.recv(out, source, tag, nonblocking=True)"
_PROBE = "comm.probe(source, tag)"
_IPROBE = "comm.probe(source, tag, nonblocking=True)"
_BUFFERED = f"{_SEND}, which returns early for short messages"
_GROUP = "comm.create_group(ranks)"
_SYNCHRONOUS = f"{_SEND}, and comm.recv of an answer"
_MATCHED = f"{_PROBE}, and comm.recv of what it found"

OF_MPI4PY: dict[str, str] = {
    **_collectives_of_mpi(),
    "Get_rank": "comm.rank",
    "Get_size": "comm.size",
    "Get_name": "comm.name",
    "Get_group": "range(comm.size), and comm.create_group(ranks)",
    "Set_name": "name= of the call that makes the communicator",
    "Send": _SEND,
    "Recv": _RECV,
    "Isend": _ISEND,
    "Irecv": _IRECV,
    "isend": _ISEND,
    "irecv": _IRECV,
    "Bsend": _BUFFERED,
    "bsend": _BUFFERED,
    "ibsend": _ISEND,
    "Ibsend": _ISEND,
    "Rsend": _SEND,
    "Irsend": _ISEND,
    "Ssend": _SYNCHRONOUS,
    "ssend": _SYNCHRONOUS,
    "Issend": _SYNCHRONOUS,
    "issend": _SYNCHRONOUS,
    "Sendrecv": "comm.sendrecv(x, dest, out, source)",
    "Isendrecv": "comm.sendrecv(x, dest, out, source, nonblocking=True)",
    "Sendrecv_replace": "comm.multi_sendrecv(sends=..., recvs=..., in_place=True)",
    "Isendrecv_replace": "comm.multi_sendrecv(sends=..., recvs=..., in_place=True, "
    "nonblocking=True)",
    "Probe": _PROBE,
    "Iprobe": _IPROBE,
    "iprobe": _IPROBE,
    "Mprobe": _MATCHED,
    "mprobe": _MATCHED,
    "Improbe": _MATCHED,
    "improbe": _MATCHED,
    "Send_init": "comm.plan.send(x, dest, tag)",
    "Bsend_init": "comm.plan.send(x, dest, tag)",
    "Rsend_init": "comm.plan.send(x, dest, tag)",
    "Recv_init": "comm.plan.recv(out, source, tag)",
    "Alltoallw": "comm.multi_sendrecv(sends=..., recvs=...)",
    "Ialltoallw": "comm.multi_sendrecv(sends=..., recvs=..., nonblocking=True)",
    "Neighbor_allgather": "comm.graph(sources, destinations).neighbor_allgather(x)",
    "Neighbor_alltoall": "comm.graph(sources, destinations).neighbor_alltoall(x)",
    "Dup": "comm.dup()",
    "Idup": "comm.dup()",
    "Clone": "comm.dup()",
    "Split": "comm.split(color, key)",
    "Split_type": "comm.create_group(ranks), with the ranks of comm.nodes",
    "Create": _GROUP,
    "Create_group": _GROUP,
    "Create_cart": "comm.cart(dims, periodic)",
    "Create_graph": "comm.graph(sources, destinations)",
    "Create_dist_graph": "comm.graph(sources, destinations)",
    "Create_dist_graph_adjacent": "comm.graph(sources, destinations)",
    "Free": "comm.free()",
    "Disconnect": "comm.free()",
    "Abort": "comm.abort(code)",
    "Revoke": "comm.revoke()",
    "Agree": "comm.agree(flag)",
    "Shrink": "comm.shrink()",
    "Spawn": "comm.grow(count)",
    "Get_coords": "comm.coords_of(rank), of a comm.cart(dims)",
    "Get_cart_rank": "comm.rank_at(coords), of a comm.cart(dims)",
    "Get_topo": "comm.dims, comm.periodic and comm.coords, of a comm.cart(dims)",
    "Get_dim": "len(comm.dims), of a comm.cart(dims)",
    "Shift": "comm.shift(dim, disp), of a comm.cart(dims)",
    "Sub": "comm.sub(dims), of a comm.cart(dims)",
    "Is_inter": "nothing: every communicator has one group",
    "Is_intra": "nothing: every communicator has one group",
}
"""What to write instead of mpi4py's names."""

OF_TORCH: dict[str, str] = {
    **_collectives_of_torch(),
    "all_to_all_single": "comm.alltoall(x), or comm.alltoallv with splits",
    "get_rank": "comm.rank",
    "get_world_size": "comm.size",
    "world_size": "comm.size",
    "get_backend": "comm.explain(operation, nbytes)",
    "reduce_scatter_block": "comm.reduce_scatter(x, op)",
    "all_reduce_coalesced": "with comm.fused(): ...",
    "batch_isend_irecv": "comm.multi_sendrecv(sends=..., recvs=...)",
    "all_gather_object": "comm.allgather_object(x)",
    "broadcast_object_list": "comm.bcast_object(x, root)",
    "scatter_object_list": "comm.scatter_object(x, root)",
    "send_object_list": "comm.send_object(x, dest)",
    "recv_object_list": "comm.recv_object(source)",
    "new_group": _GROUP,
    "new_subgroups": "comm.split(color, key)",
    "destroy_process_group": "comm.free()",
    "monitored_barrier": "comm.barrier(timeout_s=...)",
    "init_device_mesh": "comm.mesh(axes)",
}
"""The same of torch.distributed's names."""

OF_COMMUNICATORS: dict[str, str] = {**OF_TORCH, **OF_MPI4PY}
"""What to write instead of each name."""

OF_THE_MODULE: dict[str, str] = {
    "COMM_WORLD": "comm = commrt.init()",
    "COMM_SELF": "a world of one: comm.split(color=comm.rank)",
    "MPI": "comm = commrt.init()",
    "Init": "comm = commrt.init()",
    "Finalize": "comm.free(), or nothing",
    "Comm": "commrt.Communicator",
    "init_process_group": "comm = commrt.init(); for programs of torch.distributed, "
    "import commrt.torch and init_process_group('commrt')",
    "destroy_process_group": "comm.free()",
    "is_initialized": "comm = commrt.init(), which returns the same one again",
    "get_rank": "commrt.init().rank",
    "get_world_size": "commrt.init().size",
    "new_group": "comm.create_group(ranks)",
    "ReduceOp": "op='sum'; torch's and mpi4py's own are taken, too",
    "SUM": "op='sum'",
    "barrier": "comm.barrier()",
    "waitall": "commrt.wait_all(requests)",
    "Waitall": "commrt.wait_all(requests)",
    "waitany": "commrt.wait_any(requests)",
}
"""The same of names that programs look for in ``commrt`` itself."""


def instead_of(name: str) -> str:
    """Return what to write for a name of the module; empty where that is not known."""
    told = OF_THE_MODULE.get(name)
    if told is None and (name in OF_COMMUNICATORS or _is_operation(name)):
        told = OF_COMMUNICATORS.get(name, f"comm.{name}(...)")
    return "" if told is None else f": write {told}"


def _is_operation(name: Any) -> bool:
    return any(spec.name == name for spec in OPERATIONS)
