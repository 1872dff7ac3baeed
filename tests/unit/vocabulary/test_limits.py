# SPDX-License-Identifier: Apache-2.0
"""Limits: all that people write for "no limit" is one, and nothing overflows."""

from __future__ import annotations

import math
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from commrt.errors import UsageError
from commrt.vocabulary.limits import (
    NO_LIMIT_S,
    as_timedelta,
    check_timeout,
    deadline_after,
    parse_seconds,
    socket_seconds,
    timedelta_seconds,
)

YEARS_300_S = 300 * 365.25 * 86400


@pytest.mark.parametrize(
    "written",
    [
        *(math.inf, 1e300, 10**400, 2**63, np.float32(np.inf), np.uint64(2**64 - 1)),
        *(YEARS_300_S, 2**31, np.int64(2**62)),
        *(timedelta.max, timedelta(seconds=YEARS_300_S)),
    ],
)
def test_what_means_no_limit(written: Any) -> None:
    assert check_timeout("f", written) == NO_LIMIT_S


@pytest.mark.parametrize("text", ["inf", "Infinity", "1e300", "none", "2147483648"])
def test_what_means_no_limit_as_text(text: str) -> None:
    assert parse_seconds(text) == NO_LIMIT_S


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (timedelta.max, NO_LIMIT_S),
        (timedelta(seconds=YEARS_300_S), NO_LIMIT_S),
        (timedelta(milliseconds=-5833720368547758), NO_LIMIT_S),  # torch's own overflow
        (timedelta(seconds=2.5), 2.5),
        (timedelta(milliseconds=-1), -1e-3),
    ],
)
def test_limits_of_torch(limit: timedelta, seconds: float) -> None:
    assert timedelta_seconds(limit) == seconds


@pytest.mark.parametrize(
    "wrong",
    [math.nan, -math.inf, -1, 0, True, "1", None, [], 1j, timedelta(0), timedelta(-1)],
)
def test_what_is_no_limit_is_an_error(wrong: Any) -> None:
    with pytest.raises(UsageError, match="must be a number of seconds above 0"):
        check_timeout("f", wrong)


@pytest.mark.parametrize("text", ["nan", "-1", "0", "-inf", "soon", "", "1 s"])
def test_text_that_is_no_limit_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        parse_seconds(text)


def test_short_limits_stay_as_they_are() -> None:
    assert check_timeout("f", np.float32(0.5)) == 0.5
    assert check_timeout("f", 10**6) == 1e6
    assert check_timeout("f", timedelta(minutes=2)) == 120.0
    assert parse_seconds("1e-3") == 1e-3


def test_clocks_and_locks_count_to_no_limit() -> None:
    assert deadline_after(NO_LIMIT_S) - time.monotonic() > NO_LIMIT_S - 60
    assert NO_LIMIT_S < threading.TIMEOUT_MAX
    lock = threading.Lock()
    assert lock.acquire(timeout=NO_LIMIT_S)
    lock.release()
    with socket.socket() as one:
        one.settimeout(socket_seconds(NO_LIMIT_S))
    # torch's stores count in milliseconds, and polls of sockets in 31 bits.
    assert as_timedelta(NO_LIMIT_S) / timedelta(milliseconds=1) < 2**31
