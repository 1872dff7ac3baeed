# SPDX-License-Identifier: Apache-2.0
"""What a communicator shows is what the reference pages list, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commrt import _native
from commrt.comm import CartCommunicator, Communicator, GraphCommunicator, core_of
from commrt.core import Core
from commrt.local import run
from commrt.vocabulary.operations import ROWS, names_of

PAGES = Path(__file__).parents[3] / "docs" / "reference"
TEXT = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
NEIGHBORS = set(names_of("neighbors"))
CALLS = {row.name for row in ROWS} - NEIGHBORS
"""Calls of the generated tables, which name them without a communicator."""


def public(held: object) -> set[str]:
    """Return the names that an object or class shows, and that can be read."""
    return {
        name for name in dir(held) if not name.startswith("_") and hasattr(held, name)
    }


def written(variable: str) -> set[str]:
    """Return the attributes of a variable on the pages."""
    return set(re.findall(rf"\b{variable}\.(\w+)", TEXT))


def test_communicators_have_what_the_pages_list() -> None:
    assert public(Communicator) == written("comm") | CALLS


def test_grids_have_what_the_pages_list_besides() -> None:
    besides = public(CartCommunicator) - public(Communicator)
    again = {"dup", "plan"}  # which are another's there
    assert besides == written("cart") - again - CALLS | NEIGHBORS


def test_graphs_have_what_the_pages_list_besides() -> None:
    besides = public(GraphCommunicator) - public(Communicator)
    halos = {name for name in NEIGHBORS if name.startswith("halo_")}
    assert besides == written("graph") - CALLS | NEIGHBORS - halos


def test_an_object_shows_no_more_than_its_class() -> None:
    def main(comm: Communicator) -> list[set[str]]:
        cart, graph = comm.cart((1,)), comm.graph([0], [0])
        held = comm, cart, graph
        found = [public(each) - public(type(each)) for each in held]
        cart.free()
        graph.free()
        return found

    assert run(1, main) == [[set()] * 3]


@pytest.mark.parametrize("kind", [Communicator, CartCommunicator, GraphCommunicator])
def test_every_name_has_help(kind: type) -> None:
    assert [name for name in public(kind) if not getattr(kind, name).__doc__] == []


def test_the_core_has_what_is_not_for_programs() -> None:
    inner = {
        "give_up",
        "let_go",
        "who_is_missing",
        "run_plan",
        "check_rank",
        "next_seq",
    }
    assert inner <= public(Core)
    assert not inner & public(Communicator)

    def main(comm: Communicator) -> bool:
        return core_of(comm).size == comm.size

    assert run(1, main) == [True]


def test_a_front_stands_for_groups_only() -> None:
    with pytest.raises(TypeError, match="group"):
        _native.Front(object())
