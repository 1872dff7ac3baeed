# SPDX-License-Identifier: Apache-2.0
"""The halo benchmark: its slices are a halo's, its arguments are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.bench import cli, halo, halo_worker
from commrt.errors import UsageError


class Alone:
    """A periodic grid of one rank, as mpi4py has it."""

    def Shift(self, dim: int, disp: int) -> tuple[int, int]:  # noqa: N802
        return 0, 0

    def Sendrecv(  # noqa: N802
        self, out: Any, dest: int, tag: int, come: Any, source: int, back: int
    ) -> None:
        come[...] = out


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_slices_fill_the_halo_of_a_periodic_block(ndim: int, corners: bool) -> None:
    inner = np.arange(5**ndim).reshape((5,) * ndim)
    field = np.pad(inner, 2)
    faces = halo_worker.face_slices(ndim, 2, corners)
    halo_worker.exchange_slices(field, Alone(), faces)()
    right = np.pad(inner, 2, mode="wrap")
    cells = np.indices(field.shape)
    outside = ((cells < 2) | (cells >= 7)).sum(0)
    if not corners:
        right[outside > 1] = 0
    assert np.array_equal(field, right)
    copied = np.pad(inner, 2)
    halo_worker.copy_slices(copied, faces)()
    assert np.array_equal(copied, right)
    moved = int((outside > 0).sum() if corners else (outside == 1).sum())
    assert halo_worker.halo_nbytes(field, faces) == moved * field.itemsize


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_slices_add_the_halo_of_a_periodic_block(ndim: int, corners: bool) -> None:
    field = np.random.default_rng(ndim).integers(0, 9, (8,) * ndim)
    right = np.zeros((4,) * ndim, int)
    cells = np.indices(field.shape).reshape(ndim, -1).T
    for cell in cells:
        outside = ((cell < 2) | (cell >= 6)).sum()
        if corners or outside < 2:
            right[tuple((cell - 2) % 4)] += field[tuple(cell)]
    faces = halo_worker.face_slices(ndim, 2, corners)
    halo_worker.reduce_slices(field, Alone(), faces)()
    assert np.array_equal(field[(slice(2, -2),) * ndim], right)


def test_the_text_has_a_line_per_way() -> None:
    job = {
        "shape": [4, 4],
        "width": 1,
        "periodic": True,
        "corners": True,
        "direct": False,
        "reduce": False,
        "dtype": "float32",
        "fresh": False,
    }
    own = {
        "version": "1",
        "library": "Some MPI",
        "link_class": "near",
        "grid": [2, 1],
        "ranks": 2,
        "nbytes": 80,
        "valid": True,
        "samples_us": {"mpi4py": [4.0], "copy": [1.0], "commrt": [2.0]},
    }
    other = {**own, "library": "Other", "samples_us": {"mpi4py": [8.0], "copy": [1.0]}}
    lines = halo.text(job, [own, other]).splitlines()
    assert "2 ranks as 2x1, periodic, links near" in lines[0]
    assert "block 4x4 float32, width 1, corners, 80 bytes per rank" in lines[1]
    assert [line.split()[-1] for line in lines[4:]] == ["0.50", "0.25", "2.00"]
    assert "halo reduce" in halo.text({**job, "reduce": True}, [own])
    wrong = halo.text(job, [{**own, "valid": False}])
    assert "WRONG" in wrong


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "4xx4"], "--shape 4xx4: write 1 to 5 numbers"),
        (["--shape", "4x4", "--grid", "2"], "has 1 dimensions and --shape 2"),
        (
            ["--shape", "4x4", "--grid", "2x2", "--ranks", "2"],
            "has 4 places, expected 2",
        ),
        (["--shape", "4x4", "--width", "5"], "more than the 4 cells"),
        (["--shape", "4x4", "--width", "0"], "not a whole number from 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["halo", *argv]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_extents() -> None:
    assert halo.extents("--shape", "3X4") == [3, 4]
    with pytest.raises(UsageError):
        halo.extents("--shape", "")
