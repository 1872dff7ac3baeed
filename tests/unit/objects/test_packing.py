# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes: what is copied, and what is said of objects that cannot be."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from commrt.errors import ObjectError
from commrt.objects.packing import (
    LARGE_NBYTES,
    Packed,
    Refusal,
    memory_for_large,
    pack,
    unpack,
)


class Raising:
    """An object that raises when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class UnshowableError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def breaks() -> None:
    """Raise, where an object is unpickled."""
    raise LookupError("not here")


class Breaking:
    """An object that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return breaks, ()


def packed(x: Any) -> Packed:
    """Return an object as bytes."""
    found = pack(x)
    assert isinstance(found, Packed)
    return found


def there_and_back(x: Any) -> Any:
    """Return an object after its bytes have been copied, as messages do."""
    sent = packed(x)
    large = memory_for_large(sent.head)
    for into, of in zip(large, sent.large, strict=True):
        into[...] = of
    return unpack("test", sent.head.copy(), large)


@pytest.mark.parametrize(
    "x",
    [
        None,
        0,
        "text",
        {"a": [1, 2.5, (True, None)]},
        b"",
        b"x" * (LARGE_NBYTES + 1),
        list(range(50_000)),
        np.float32(1.5),
    ],
    ids=lambda x: str(type(x).__name__),
)
def test_an_object_comes_back(x: Any) -> None:
    assert there_and_back(x) == x


@pytest.mark.parametrize(
    "nbytes", [0, 1, LARGE_NBYTES - 1, LARGE_NBYTES, LARGE_NBYTES + 1, 5_000_003]
)
def test_arrays_come_back_and_can_be_written(nbytes: int) -> None:
    x = {"a": np.arange(nbytes, dtype=np.uint8), "b": np.arange(3.0), "c": [nbytes]}
    found = there_and_back(x)
    assert found["c"] == [nbytes]
    for name in ("a", "b"):
        assert np.array_equal(found[name], x[name])
        assert found[name].flags.writeable
        found[name][...] = 0


def test_large_arrays_are_not_copied() -> None:
    x = np.zeros(LARGE_NBYTES)
    sent = packed([x, x.T, 5])
    [memory] = [each for each in sent.large if each.size == x.nbytes][:1]
    assert memory.ctypes.data == x.ctypes.data
    assert sent.head.size < 1000
    large = memory_for_large(sent.head)
    found = unpack("test", sent.head, large)
    assert found[0].ctypes.data == large[0].ctypes.data


def test_a_large_pickle_is_a_part_of_its_own() -> None:
    text = "x" * (3 * LARGE_NBYTES)
    sent = packed([text, np.zeros(LARGE_NBYTES)])
    assert [each.size > 3 * LARGE_NBYTES for each in sent.large] == [True, True]
    assert sent.head.size < 100
    assert there_and_back([text])[0] == text


def test_arrays_that_are_not_contiguous_come_back() -> None:
    whole = np.arange(200_000.0).reshape(400, 500)
    for x in (whole[::2, ::3], whole.T, np.asfortranarray(whole)):
        assert np.array_equal(there_and_back(x), x)


def test_a_small_array_keeps_no_other_memory() -> None:
    found = there_and_back([np.zeros(10), np.zeros(5000)])[0]
    held = found
    while isinstance(held, np.ndarray) and held.base is not None:
        held = held.base
    assert len(held) == 80


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (lambda: 0, "x cannot be pickled"),
        (Raising(ValueError("no")), r"x cannot be pickled \(ValueError: no\)"),
        (Raising(UnshowableError()), "an error that cannot be shown"),
        (Raising(RecursionError("deep")), "RecursionError: deep"),
        (Raising(ValueError("é" * 9000)), "é{100}"),
        (Raising(ValueError("\ud800")), "ValueError"),
        ((each for each in ()), "generator"),
    ],
)
def test_the_reason_is_told(x: Any, text: str) -> None:
    found = pack(x)
    assert isinstance(found, Refusal)
    assert found.cause is not None
    said = bytes(found.head).decode()
    assert 0 < found.head.size <= 4000
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(said)


def test_what_ends_a_program_is_no_reason() -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(Raising(KeyboardInterrupt()))


def test_an_object_that_cannot_be_unpickled_has_its_error_as_cause() -> None:
    sent = packed(Breaking())
    with pytest.raises(ObjectError, match=r"the object.*LookupError.*not here") as e:
        unpack("here", sent.head, ())
    assert isinstance(e.value.__cause__, LookupError)


def test_pickles_are_of_protocol_5() -> None:
    head = packed([1, 2]).head
    pickled = bytes(head[16:])
    assert pickled[:2] == pickle.PROTO + bytes([5])
