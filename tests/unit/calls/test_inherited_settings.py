# SPDX-License-Identifier: Apache-2.0
"""Communicators begin with the choices of the one that they were made of."""

from __future__ import annotations

from commrt.calls.settings import Settings
from commrt.select.fingerprint import this_machine
from commrt.select.table import Table
from commrt.select.wishes import parse_wishes


def test_a_choice_for_all_operations_is_inherited() -> None:
    table = Table(this_machine(), ())
    mine = Settings(parse_wishes("ring,bcast:direct"), table, checks=True)
    found = mine.inherited()
    assert found.wishes is not None
    assert str(found.wishes.others) == "ring"
    assert found.table is table
    assert found.checks is True


def test_a_choice_for_one_operation_stays_behind() -> None:
    found = Settings(parse_wishes("bcast:direct")).inherited()
    assert found.all_wishes(parse_wishes("chain")) == [parse_wishes("chain")]


def test_no_choice_is_none() -> None:
    assert Settings().inherited() == Settings()
