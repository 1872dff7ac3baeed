# SPDX-License-Identifier: Apache-2.0
"""Every public argument with awkward values: only errors of commrt's tree come out.

A call may work, or raise a ``CommError`` whose text names the argument. It may not
crash, hang, lose the communicator, or raise anything in a finaliser. A keyword that
does not exist and an argument that is missing are Python's ``TypeError``, as ever.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from awkward_values import AWKWARD
from public_calls import CALLS, FUNCTIONS, Place, PublicCall
from started_operations import past_refusals

from commrt.comm import Communicator, core_of
from commrt.errors import (
    CommError,
    DeviceError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.local import run

Case = tuple[PublicCall, str, str]
"""The call, the argument, the name of the value."""


def cases_of(calls: Sequence[PublicCall]) -> list[Case]:
    return [
        (call, argument, name)
        for call in calls
        for argument in call.arguments
        for name in AWKWARD
    ]


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect what is raised where nobody can catch it: "Exception ignored in"."""
    found: list[str] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda said: found.append(f"{said.exc_value!r}")
    )
    return found


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Let threads take turns often: ranks of a drawn case wait for each other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@dataclass(frozen=True)
class End:
    """The end of a call on one rank."""

    raised: bool = False
    wrong: str = ""
    """What is not allowed about it."""
    is_lost: bool = False
    """True if the communicator cannot go on, as after ranks that do not fit."""


def end_of(call: PublicCall, place: Place, argument: str, name: str) -> End:
    """Make a call, and return how it ends."""
    try:
        call.make(place, argument, AWKWARD[name]())
    except TimeoutError_ as error:
        waits = argument in WAITS_FOR_NOBODY or "timeout_s" in argument
        return End(True, "" if waits else f"{error!r}", is_lost=True)
    except CommError as error:
        words = (argument, *SAID_AS.get(argument, ()), *SAID_BY.get(call.name, ()))
        named = any(word in str(error) for word in words)
        elsewhere = isinstance(error, ELSEWHERE)
        is_lost = isinstance(error, RevokedError) or bool(
            place and core_of(place.comm).failure
        )
        wrong = "" if named or elsewhere else f"does not name it: {error!r}"
        return End(True, wrong, is_lost)
    except Exception as error:  # noqa: BLE001  the very thing that is looked for
        if (call.name, argument) in FUNCTIONS_OF_THE_PROGRAM and callable(
            AWKWARD[name]()
        ):
            return End(True)  # as it came out of that function
        return End(True, f"{type(error).__name__}: {str(error)[:200]}")
    return End()


PARTS, CASES = 8, 100
"""Parts of the test, and cases of each in an ordinary run; a full run has all."""
ELSEWHERE = MismatchError, TruncationError, DeviceError
"""Errors of ranks that do not fit together, and of this machine."""
SAID_AS = {
    # In place, x is the output. A number is no array.
    "x": ("output array", "shape=", "the integer of rank"),
    "op": ("root=",),  # an integer in its place is the root
    "out": ("on a device",),
    "params": ("parameter",),
    "algorithm": ("asks for",),
    "backend": ("asks for",),
    "coll": ("operation",),
    "axes": ("axis", "mesh: dims="),
    "coords": ("axis",),
    "dims": ("dim=",),
    "width": ("halo",),
    "shape": ("asks for",),  # so many bytes
    "residual": ("on a device",),
    "recv_counts": ("numbers of elements",),
    "dim": ("dims[", "grid"),
    "requests": ("wait_a",),
    "timeout_s": ("wait_any: expected a list",),  # it has none here
    "dimension": ("group=",),
    "grid": ("dimension",),
    "fn": ("reduction",),
    "indices": ("index",),
    "__getitem__": ("mesh[",),
}
"""Other words for an argument in messages."""
FUNCTIONS_OF_THE_PROGRAM = [
    ("elastic.run", name) for name in ("step", "state", "on_change")
]
SAID_BY = {"grow": ("cannot take in others",)}
"""Calls that refuse all arguments, as these ranks are threads, and their words."""
WAITS_FOR_NOBODY = ("tag", "sendtag", "recvtag")
"""Arguments that may ask for a message that nobody sends."""


def place_of(comm: Communicator) -> Place:
    """Return what a rank makes its calls on; collective."""
    alone = comm.create_group([comm.rank])
    alone.timeout_s = 0.3
    cart, mesh = comm.cart((comm.size,)), comm.mesh({"data": comm.size})
    everyone = [*range(comm.size)]
    graph = comm.graph(everyone, everyone)
    for each in (comm, cart, graph):
        each.timeout_s = 300
    return Place(comm, alone, cart, graph, mesh)


def tried(cases: Sequence[Case], found: list[str]) -> int:
    """Try cases on two ranks until a communicator is lost; return how many."""
    together = threading.Barrier(2, timeout=300)
    ends: list[list[End]] = [[], []]

    def main(comm: Communicator) -> int:
        place = place_of(comm)
        for number, (call, argument, name) in enumerate(cases, 1):
            what = f"{call.name}({argument}={name}), rank {comm.rank}"
            end = end_of(call, place, argument, name)
            ends[comm.rank].append(end)
            together.wait()
            if end.wrong:
                found.append(f"{what}: {end.wrong}")
            if ends[0][-1].raised != ends[1][-1].raised or end.is_lost:
                # Only the root looks at some arguments; the others have gone on.
                if not (call.is_rooted or end.is_lost):
                    found.append(f"{what}: the ranks end differently: {ends!r}")
                give_up(place)
                return number
            try:
                for each in (comm, place.cart, place.graph):
                    assert each.allreduce(np.ones(2))[0] == 2
            except (CommError, AssertionError) as error:
                ended = isinstance(error, MismatchError | RevokedError)
                if not (ended and call.states_lengths):
                    found.append(f"after {what}: {error!r}")
                give_up(place)
                return number
            together.wait()
        return len(cases)

    return min(run(2, main, timeout_s=300))


def give_up(place: Place) -> None:
    """Leave what is out of step, so that nobody waits at its end."""
    for each in (place.comm, place.cart, place.graph):
        core_of(each).give_up("out of step")


@pytest.mark.usefixtures("quick_turns")
@pytest.mark.parametrize("part", range(PARTS))
def test_awkward_arguments_of_communicators(
    part: int, seed: int, full: bool, unraisable: list[str]
) -> None:
    cases = cases_of(CALLS)
    random.Random(f"{seed} awkward").shuffle(cases)
    drawn = cases[part::PARTS] if full else cases[part::PARTS][:CASES]
    found: list[str] = []
    at = 0
    while at < len(drawn):
        at += tried(drawn[at:], found)
    assert found == []
    assert unraisable == []


FOUND = {
    "compress": ("array", "void", "stubborn", "no elements", "huge broadcast"),
    "fields": ("asked", "dlpack of None"),
    "out": ("asked", "dlpack of None"),
    "residual": ("asked", "dlpack of None"),
    "x": ("asked", "dlpack of None", "2**64"),
    "stream": ("asked",),
    "nbytes": ("10**5000",),
    "op": ("5",),
    "recv_counts": ("range",),
}
"""Values that a full run has found an argument to take badly."""


@pytest.mark.usefixtures("quick_turns")
def test_values_that_a_full_run_found(unraisable: list[str]) -> None:
    cases = [
        (call, argument, name)
        for call in CALLS
        for argument in call.arguments
        for name in FOUND.get(argument, ())
    ]
    found: list[str] = []
    at = 0
    while at < len(cases):
        at += tried(cases[at:], found)
    assert found == []
    assert unraisable == []


@pytest.mark.parametrize("call", FUNCTIONS, ids=lambda call: call.name)
def test_awkward_arguments_of_functions(
    call: PublicCall, unraisable: list[str]
) -> None:
    nowhere: Any = None
    ends = [
        (argument, name, end_of(call, nowhere, argument, name).wrong)
        for argument in call.arguments
        for name in AWKWARD
    ]
    assert [end for end in ends if end[2]] == []
    assert unraisable == []


KNOW_THEIR_KEYWORDS = [
    call
    for call in (*CALLS, *FUNCTIONS)
    if all(
        each.kind is not each.VAR_KEYWORD for each in call.signature.parameters.values()
    )
]


@pytest.mark.parametrize("call", KNOW_THEIR_KEYWORDS, ids=lambda call: call.name)
def test_unknown_keywords_and_missing_arguments_are_type_errors(
    call: PublicCall,
) -> None:
    def main(comm: Communicator) -> None:
        place = place_of(comm)
        with pytest.raises(TypeError) as caught:
            call.make(place, "frobnicate", 1)
        assert not isinstance(caught.value, CommError)
        parameters = call.signature.parameters.values()
        if any(each.default is each.empty for each in parameters):
            with pytest.raises(TypeError):
                call.function(place)()

    run(1, main)


@pytest.mark.parametrize("make", ["split", "dup", "create_group", "cart", "graph"])
def test_a_wrong_name_is_refused_before_the_ranks_meet(
    make: str, unraisable: list[str]
) -> None:
    """The rank in error calls again, and meets what the others have called."""
    given = {
        "split": (0,),
        "dup": (),
        "create_group": ([0, 1],),
        "cart": ((2,),),
        "graph": ([0, 1], [0, 1]),
    }[make]

    def main(comm: Communicator) -> str:
        if comm.rank == 1:
            for wrong in (5, b"name", "\ud800", object()):
                with pytest.raises(UsageError, match=f"{make}: name=.* a string"):
                    getattr(comm, make)(*given, name=wrong)
        with past_refusals(lambda: getattr(comm, make)(*given, name="twin")) as made:
            made.barrier()
            name: str = made.name
            return name

    assert run(2, main, timeout_s=300) == ["twin"] * 2
    assert unraisable == []
