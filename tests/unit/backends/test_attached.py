# SPDX-License-Identifier: Apache-2.0
"""A backend that lacks a method it needs is named by a typed error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commrt.backends import Attached
from commrt.errors import BackendError


class Half(Attached):
    """A backend whose author forgot everything that runs a call."""


@pytest.mark.parametrize(
    ("method", "arguments", "more"),
    [
        ("plan", [None], {}),
        ("runner", [None], {}),
        (
            "boxes_phase",
            [],
            {"messages": [], "copies": [], "packs": [], "unpacks": []},
        ),
        ("boxes_plan", ["halo_exchange", []], {"coll": 0}),
    ],
)
def test_a_method_that_is_not_defined_is_named(
    method: str, arguments: list[Any], more: dict[str, Any]
) -> None:
    backend: Any = SimpleNamespace(name="theirs")
    nobody: Any = None
    half = Half(backend, nobody, nobody)
    with pytest.raises(BackendError, match=rf"'theirs' .* Half defines no {method}\("):
        getattr(half, method)(*arguments, **more)
