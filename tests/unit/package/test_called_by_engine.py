# SPDX-License-Identifier: Apache-2.0
"""Objects and methods in Python that the engine asks for by name are there."""

from __future__ import annotations

import pytest

from commrt import _native, called_by_engine, errors
from commrt.core import Core
from commrt.fusion.fused import Fusion


def test_the_table_has_the_names_of_the_engine() -> None:
    assert list(called_by_engine.PLACES) == _native.callback_names()


@pytest.mark.parametrize("name", _native.callback_names())
def test_each_place_of_the_table_is_there(name: str) -> None:
    assert called_by_engine.find(name) is not None


def test_a_place_without_a_colon_part_is_the_module() -> None:
    assert called_by_engine.find("errors") is errors


@pytest.mark.parametrize("name", _native.fusion_method_names())
def test_the_service_of_buckets_has_what_the_engine_asks_it_for(name: str) -> None:
    assert callable(getattr(Fusion, name))


@pytest.mark.parametrize("name", _native.group_method_names())
def test_a_communicator_has_what_the_engine_asks_it_for(name: str) -> None:
    annotated = {
        each for base in Core.__mro__ for each in vars(base).get("__annotations__", {})
    }
    assert hasattr(Core, name) or name in annotated
