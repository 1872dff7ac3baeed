# SPDX-License-Identifier: Apache-2.0
"""Records keep all samples while some leave, within the memory that is promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shuffle_cases import check_samples, samples_of

from commrt.errors import BufferError_, UsageError
from commrt.layers.samples import records as module
from commrt.layers.samples.columns import Columns
from commrt.layers.samples.records import Records


def records_of(ids: Any, room: int) -> Records:
    columns, number, arrays = Columns.of(samples_of(ids))
    return Records(columns, arrays, number, room)


@pytest.mark.parametrize("moved_at_once", [1, 200, 1 << 20])
@pytest.mark.parametrize(
    ("number", "leaving"),
    [(8, 0), (8, 3), (8, 8), (1, 1), (0, 0), (9, 5), (40, 20)],
)
def test_samples_that_leave_can_be_read_until_they_have_left(
    number: int, leaving: int, moved_at_once: int, monkeypatch: Any, seed: int
) -> None:
    monkeypatch.setattr(module, "_COPIED_NBYTES", moved_at_once)
    ids = np.arange(number)
    records = records_of(ids, leaving)
    assert records.nbytes == (number + leaving) * records.columns.nbytes
    for turn in range(3):
        who = np.random.default_rng([seed, turn]).permutation(number)[:leaving]
        places, message, into = records.move_out(who)
        assert check_samples(records.read(places)) == ids.tolist()
        assert not np.shares_memory(message, into)
        came = records_of(100 * (turn + 1) + np.arange(leaving), 0)
        _, others, _ = came.move_out(np.arange(0))
        others = came.read(np.arange(leaving))
        sent = message.copy()
        into[:] = records_of(others["id"], leaving).move_out(np.arange(leaving))[1]
        assert (message == sent).all()
        stays = places[places < number]
        coming = np.arange(number - leaving, number)
        assert sorted([*stays.tolist(), *coming.tolist()]) == [*range(number)]
        assert check_samples(records.read(coming)) == others["id"].tolist()
        assert check_samples(records.read(stays)) == np.delete(ids, who).tolist()
        ids = records.read(np.arange(number))["id"]


def test_the_message_has_samples_in_the_order_in_which_they_leave() -> None:
    records = records_of(np.arange(6), 3)
    _, message, _ = records.move_out(np.array([4, 0, 3]))
    width = records.columns.nbytes
    for place, each in enumerate((4, 0, 3)):
        alone = records_of(np.array([each]), 1).move_out(np.array([0]))[1]
        part = message[place * width : (place + 1) * width]
        np.testing.assert_array_equal(part, alone)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(4, 3),
        np.arange(24).reshape(4, 6)[:, ::2],
        np.arange(24, dtype=np.complex64).reshape(6, 4).T,
        np.array([(1, 2.5)] * 4, [("a", "i2"), ("b", "f8")]),
        np.zeros((4, 0, 3)),
        np.zeros((0, 5), np.float16),
        np.array(["2026-01-01"] * 4, "M8[D]"),
        np.broadcast_to(np.float32(3), (4, 2)),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_arrays_come_back_as_they_were(array: Any, alone: bool) -> None:
    samples = array if alone else {"x": array, "y": np.arange(len(array))}
    columns, number, arrays = Columns.of(samples)
    found = Records(columns, arrays, number, 0).read(np.arange(number)[::-1])
    one = next(iter(found.values()))
    assert one.dtype == array.dtype
    np.testing.assert_array_equal(one, array[::-1])
    assert one.flags.c_contiguous


def test_the_order_of_keys_is_no_matter() -> None:
    samples = samples_of(range(4))
    turned = dict(reversed(samples.items()))
    (columns, _, arrays), (others, _, more) = Columns.of(samples), Columns.of(turned)
    assert str(columns) == str(others)
    first, second = Records(columns, arrays, 4, 4), Records(others, more, 4, 4)
    everyone = np.arange(4)
    assert (first.move_out(everyone)[1] == second.move_out(everyone)[1]).all()


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ({}, "empty mapping"),
        (np.float64(3.0), "no dimension"),
        ([1, 2], "expected an array"),
        ("words", "expected an array"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "different numbers"),
        ({1: np.zeros(3)}, "expected names"),
        (np.array([None, 1]), "fixed number of bytes"),
        (np.array([(1, None)], [("a", "i4"), ("b", object)]), "fixed number of bytes"),
        (np.ma.masked_array([1, 2], [0, 1]), r"samples is a masked array.*x\.filled"),
        ({"x": np.ma.masked_array([1, 2])}, "x is a masked array"),
        (np.ma.masked_array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "masked"),
    ],
)
def test_samples_of_other_kinds_are_refused(samples: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Columns.of(samples)


def test_an_array_that_fails_is_named() -> None:
    class Broken:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no file")

    with pytest.raises(BufferError_, match=r"samples is a Broken.*no file"):
        Columns.of(Broken())


def test_a_mask_of_another_library_is_not_lost() -> None:
    class Variable:
        def __array__(self, *_: Any, **__: Any) -> Any:
            return np.ma.masked_array([1, 2], [0, 1])

    with pytest.raises(BufferError_, match="samples is a masked array"):
        Columns.of(Variable())


def test_subclasses_of_arrays_are_taken_by_their_memory() -> None:
    given = np.zeros((3, 2), [("a", "i2"), ("b", "f4")]).view(np.recarray)
    columns, number, arrays = Columns.of(given)
    (found,) = Records(columns, arrays, number, 0).read(np.arange(3)).values()
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found["b"], given["b"])
