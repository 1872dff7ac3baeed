# SPDX-License-Identifier: Apache-2.0
"""What the engine keeps of Python's objects can be let go without Python's lock.

nanobind gives C++ a ``shared_ptr`` to an object of Python that takes Python's lock when
the last one ends. It may end in a thread that holds the engine's lock, and who holds
Python's lock may wait for the engine's. Objects that C++ itself made and shares have no
such end (``std::enable_shared_from_this``).
"""

from __future__ import annotations

import re
from pathlib import Path

NATIVE = Path(__file__).parents[3] / "commrt" / "native"
HOLD_PYTHON = {"CallCheck", "CallSites", "Places", "RecordRing"}
"""They hold objects of Python, and only objects of Python keep them."""
BOUND = re.compile(r"nb::class_<(?:\w+::)?(\w+)[,>].*?;\n", re.DOTALL)
KEPT = re.compile(r"std::shared_ptr<(?:const )?(?:\w+::)?(\w+)>")
SHARES = re.compile(r"std::enable_shared_from_this<(\w+)>")
INSIDE = ("nb::init<", '"__init__"')
"""Constructors by which an object lives inside of its object of Python."""


def wrong_owners(text: str) -> set[str]:
    """Return the bound classes that C++ keeps, and that need Python's lock to end."""
    kept, shares = set(KEPT.findall(text)), set(SHARES.findall(text))
    found = set()
    for bound in BOUND.finditer(text):
        is_inside = any(way in bound[0] for way in INSIDE)
        if bound[1] in kept and (is_inside or bound[1] not in shares):
            found.add(bound[1])
    return found


def test_the_engine_keeps_nothing_that_needs_pythons_lock_to_end() -> None:
    files = [*NATIVE.rglob("*.hpp"), *NATIVE.rglob("*.cpp")]
    found = wrong_owners("\n".join(path.read_text() for path in files))
    assert found == HOLD_PYTHON


def test_such_an_owner_would_be_found() -> None:
    kept = "struct A {}; std::shared_ptr<const A> kept;"
    shares = "struct A : std::enable_shared_from_this<A> {}; std::shared_ptr<A> kept;"
    bound = 'nb::class_<A>(m, "A").def(nb::new_(&make));\n'
    inside = 'nb::class_<A>(m, "A").def(nb::init<int>());\n'
    assert wrong_owners(kept + bound) == {"A"}
    assert wrong_owners(shares + inside) == {"A"}
    assert wrong_owners(shares + bound) == set()
