# SPDX-License-Identifier: Apache-2.0
"""What is asked for beforehand: its text, and which names there are."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.backends.catalog import check_wishes
from commrt.errors import UsageError
from commrt.select.facts import Candidate
from commrt.select.wishes import Wish, Wishes, parse_wishes


def test_parameters_may_have_commas_between() -> None:
    found = parse_wishes("allreduce:shm/ring{chunk=1,store=plain}, bcast:native,")
    assert found.named == {
        "allreduce": Wish("shm", "ring", {"chunk": 1, "store": "plain"}),
        "bcast": Wish(None, "native"),
    }
    assert (found.others, found.who) == (None, "COMMRT_ALGORITHM")
    assert not parse_wishes(None)
    assert not parse_wishes(" ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ring", Wish(None, "ring")),
        ("shm/ring", Wish("shm", "ring")),
        ("ring{chunk=4,a=b}", Wish(None, "ring", {"a": "b", "chunk": 4})),
    ],
)
def test_what_is_for_all_operations_names_none(text: str, expected: Wish) -> None:
    found = parse_wishes(f"bcast:shm/direct,{text}")
    assert found.others == expected
    assert list(found) == [Wish("shm", "direct"), expected]
    assert Wish.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alreduce:mpi/native", "x: unknown operation .*did you mean 'allreduce'"),
        ("ring,direct", "'direct' and 'ring' are both for all operations: keep one"),
        ("bcast:mpi/native,bcast:shm/ring", "x names 'bcast' twice"),
        ("allreduce=ring", "x: .*write COLL:BACKEND/ALGORITHM"),
        ("bcast:", "write COLL:BACKEND/ALGORITHM"),
        ("a/b/c", "is not a candidate: .*write COLL:BACKEND/ALGORITHM"),
        ("ring{chunk}", "write NAME=VALUE"),
    ],
)
def test_bad_texts_say_what_to_write(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_wishes(text, "x")


def test_a_backend_and_another_one_contradict() -> None:
    assert Wish.parse("ring", "shm") == Wish.parse("shm/ring", "shm")
    with pytest.raises(UsageError, match="'mpi' contradicts algorithm='shm/ring'"):
        Wish.parse("shm/ring", "mpi")


def test_a_wish_fits_what_it_leaves_open() -> None:
    ring = Candidate("shm", "ring", {"chunk": 4})
    assert all(
        wish.fits(ring)
        for wish in (Wish(), Wish("shm"), Wish(None, "ring"), Wish("shm", "ring"))
    )
    assert not Wish("mpi").fits(ring)
    assert not Wish("shm", "direct").fits(ring)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rign", "x asks for 'rign', which no operation has; did you mean 'ring'"),
        ("shm/rign", "which no operation has; did you mean 'shm/ring'"),
        ("sm/ring", "which no operation has"),
        ("barrier:ring", "which barrier has not"),
        ("allreduce:shm/pairwise", "which allreduce has not"),
    ],
)
def test_names_that_nothing_has_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_wishes(parse_wishes(text, "x"), named=True)


@pytest.mark.parametrize(
    "wishes",
    [
        parse_wishes("ring,allreduce:mpi/native,bcast:shm/binomial"),
        parse_wishes("allreduce:shm/not_registered_yet"),
        Wishes("x", others=Wish("mpi")),
    ],
)
def test_names_that_something_has_are_kept(wishes: Any) -> None:
    assert check_wishes(wishes) is wishes
