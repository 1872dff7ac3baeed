# SPDX-License-Identifier: Apache-2.0
"""Communicators over grids and meshes: who is in them, and what they own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from started_operations import past_refusals

import commrt
from commrt.errors import ClosedError, MismatchError, UsageError
from commrt.local import run


@pytest.mark.parametrize("size", [1, 4, 6, 9])
def test_every_neighbor_gets_what_it_is_sent(size: int) -> None:
    def rank_main(comm: Any) -> bool:
        with comm.cart((0, 0), periodic=(True, False)) as cart:
            assert isinstance(cart, commrt.CartCommunicator)
            assert (cart.rank, cart.size) == (comm.rank, comm.size)
            assert cart.rank_at(cart.coords) == cart.rank
            assert cart.coords_of(cart.rank) == cart.coords
            pairs = [cart.shift(dim) for dim in range(2)]
            assert cart.neighbors == tuple(rank for pair in pairs for rank in pair)
            for dim, (source, dest) in enumerate(pairs):
                got = np.full(2, -1)
                requests = []
                if source is not None and source != cart.rank:
                    requests.append(cart.recv(got, source=source, nonblocking=True))
                if dest is not None and dest != cart.rank:
                    cart.send(np.array(cart.coords), dest=dest)
                commrt.wait_all(requests)
                if requests:
                    before = list(cart.coords)
                    before[dim] = (before[dim] - 1) % cart.dims[dim]
                    assert got.tolist() == before
        return True

    assert run(size, rank_main, timeout_s=300) == [True] * size


def test_a_sub_grid_has_the_other_coordinates_in_common() -> None:
    def rank_main(comm: Any) -> list[Any]:
        cart = comm.cart((2, 3), periodic=(False, True))
        row, column, turned = cart.sub(1), cart.sub([0]), cart.sub((1, 0))
        found = [
            (part.dims, part.periodic, part.coords, part.allgather(np.array(comm.rank)))
            for part in (row, column, turned)
        ]
        plain = cart.split(cart.coords[0])
        copy = cart.dup(name="copy")
        kinds = [type(each).__name__ for each in (row.sub(0), plain, copy)]
        assert (copy.dims, copy.coords, copy.name) == (cart.dims, cart.coords, "copy")
        return [[(d, p, c, x.tolist()) for d, p, c, x in found], kinds, repr(cart)]

    found = run(6, rank_main, timeout_s=300)
    assert found[4][0] == [
        ((3,), (True,), (1,), [3, 4, 5]),
        ((2,), (False,), (1,), [1, 4]),
        ((3, 2), (True, False), (1, 1), [0, 3, 1, 4, 2, 5]),
    ]
    assert found[0][1] == ["CartCommunicator", "Communicator", "CartCommunicator"]
    assert found[4][2].endswith("rank 4 of 6, at (1, 1) of 2x3>")


def test_a_mesh_has_a_communicator_along_each_axis() -> None:
    def rank_main(comm: Any) -> list[Any]:
        with comm.mesh({"data": 2, "pipe": 0, "tensor": 2}) as mesh:
            assert mesh.comm is comm
            assert mesh.axes == ("data", "pipe", "tensor")
            assert mesh.shape == {"data": 2, "pipe": 3, "tensor": 2}
            assert mesh.size("pipe") == mesh["pipe"].size == 3
            assert mesh.rank_at(mesh.coords) == comm.rank
            assert mesh["data", "pipe", "tensor"] is comm
            assert mesh["data"] is mesh["data"]
            assert mesh["data", "tensor"] is mesh["data", "tensor"]
            asked = ["data", "pipe", "tensor", ("data", "tensor"), ("tensor", "data")]
            return [
                mesh.coords,
                *(mesh[axes].allgather(np.array(comm.rank)).tolist() for axes in asked),
                [mesh[axes].rank for axes in asked],
            ]

    found = run(12, rank_main, timeout_s=300)
    # Rank 9 of 2 x 3 x 2: (1, 1, 1).
    assert found[9] == [
        {"data": 1, "pipe": 1, "tensor": 1},
        [3, 9],
        [7, 9, 11],
        [8, 9],
        [2, 3, 8, 9],
        [2, 8, 3, 9],
        [1, 1, 1, 3, 3],
    ]


def test_several_axes_are_collective_over_their_own_ranks_only() -> None:
    def rank_main(comm: Any) -> int:
        mesh = comm.mesh({"a": 2, "b": 2, "c": 2})
        total = 0
        if mesh.coords["a"] == 0:  # the others never ask
            total = int(mesh["b", "c"].allreduce(np.array([comm.rank]))[0])
        comm.barrier()
        mesh.free()
        return total

    assert run(8, rank_main, timeout_s=300) == [6, 6, 6, 6, 0, 0, 0, 0]


def test_free_releases_what_a_mesh_made_and_nothing_else() -> None:
    def rank_main(comm: Any) -> float:
        mesh = comm.mesh([("data", 2), ("tensor", 1)])
        data, both = mesh["data"], mesh["tensor", "data"]
        mesh.free()
        mesh.free()
        for closed in (data, both):
            with pytest.raises(ClosedError):
                closed.barrier()
        with pytest.raises(ClosedError, match="make another mesh"):
            mesh["data"]
        assert "freed" in repr(mesh)
        return float(comm.allreduce(np.ones(1))[0])

    assert run(2, rank_main) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("tensr", "unknown axis 'tensr'; did you mean 'tensor'"),
        (("data", "data"), "name one or more different axes"),
        ((), "name one or more different axes"),
        (0, "unknown axis 0"),
    ],
)
def test_wrong_axes_are_named(axes: Any, message: str) -> None:
    def rank_main(comm: Any) -> str:
        with comm.mesh({"data": 1, "tensor": 1}) as mesh:
            with pytest.raises(UsageError) as raised:
                mesh[axes]
            with pytest.raises(UsageError, match="lacks tensor"):
                mesh.rank_at({"data": 0})
            return str(raised.value)

    assert message in run(1, rank_main)[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.cart((2, 1) if c.rank else (1, 2)),
        lambda c: c.cart((2,), periodic=c.rank == 1),
        lambda c: c.mesh({"a": 2, "b": 1} if c.rank else {"b": 2, "a": 1}),
    ],
)
def test_ranks_that_differ_all_get_the_same_error(call: Any) -> None:
    def rank_main(comm: Any) -> str:
        with pytest.raises(MismatchError, match="the ranks disagree") as raised:
            call(comm)
        assert float(comm.allreduce(np.ones(1))[0]) == 2.0
        return str(raised.value)

    first, second = run(2, rank_main, timeout_s=300)
    assert first == second
    assert "rank 0: " in first
    assert "rank 1: " in first


def test_a_wrong_grid_is_refused_before_anything_is_said() -> None:
    def rank_main(comm: Any) -> int:
        if comm.rank == 0:
            with pytest.raises(UsageError, match="have 3 places, expected 2"):
                comm.cart((3,))
            with pytest.raises(UsageError, match="have 3 places, expected 2"):
                comm.mesh({"data": 3})
        cart = past_refusals(lambda: comm.cart((2,)))
        if comm.rank == 1:
            for wrong in ((), (0, 0), 1, "x"):
                with pytest.raises(UsageError, match="sub: dim"):
                    cart.sub(wrong)
            with pytest.raises(UsageError, match="must be an integer"):
                cart.shift(0, 0.5)
        return past_refusals(lambda: cart.sub(0)).size

    assert run(2, rank_main, timeout_s=300) == [2, 2]


def test_a_freed_communicator_makes_no_grids() -> None:
    def rank_main(comm: Any) -> bool:
        copy = comm.dup()
        copy.free()
        with pytest.raises(ClosedError):
            copy.cart((0,))
        with pytest.raises(ClosedError):
            copy.mesh({"data": 1})
        return True

    assert run(1, rank_main) == [True]
