# SPDX-License-Identifier: Apache-2.0
"""All kinds of request are a ``commrt.Request``, and answer the same questions."""

from __future__ import annotations

import subprocess
import sys

import pytest

import commrt
from commrt import _native
from commrt.device_calls.host_work import HostRequest, HostResultRequest
from commrt.device_calls.requests import DeviceMessageRequest
from commrt.fusion.device_requests import FusedDeviceRequest
from commrt.group.stepped import SteppedRequest
from commrt.request import Request
from commrt.vocabulary import request as vocabulary

KINDS = (
    _native.Request,
    _native.FusedRequest,
    _native.DeviceRequest,
    DeviceMessageRequest,
    FusedDeviceRequest,
    HostRequest,
    HostResultRequest,
    SteppedRequest,
)
NAMES = [name for name in vars(vocabulary.Request) if not name.startswith("_")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_is_a_request(kind: type) -> None:
    assert issubclass(kind, commrt.Request)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*NAMES, "__bool__"])
def test_each_kind_answers_each_question(kind: type, name: str) -> None:
    assert callable(getattr(kind, name)) == callable(getattr(vocabulary.Request, name))


def test_nothing_else_is_a_request() -> None:
    assert not issubclass(object, Request)
    assert not issubclass(_native.DeviceCall, Request)


def test_waiting_knows_no_feature() -> None:
    """Features derive from the base class, so waiting has not to import them."""
    program = (
        "import sys, commrt.request\n"
        "rooms = ('device_calls', 'fusion', 'group')\n"
        "print([m for m in sys.modules if m.split('.')[1:2] and "
        "m.startswith('commrt.') and m.split('.')[1] in rooms])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
