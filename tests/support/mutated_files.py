# SPDX-License-Identifier: Apache-2.0
"""Mutations of files, for tests of readers: damaged bytes, hostile values."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 100_000_000_000, 2**63, -(2**63), 10**400, 1 << 62),
    *(0.0, -0.5, 1e308, 1e-308, 0.5, float("nan"), float("inf"), float("-inf")),
    *("", "x", "\x1b[31mPWN\x1b]0;title\x07", "\ud800", "\u202e", "near", "nan", "10"),
    *("shm/direct{chunk=1}", "a" * 5000, "\n", "$", "allreduce", "mpi/native"),
    *(None, True, False, [], {}, [[]], [0], {"x": 1}, [1, 2, 3, 4, 5], [None] * 5),
)
"""Values that a field may be given instead of its own."""
HOSTILE_WORDS = ("[", "{", "}", "]", '"', ",", "-", "9" * 30, "1e999", "NaN", "null")
Mutate = Callable[[str, random.Random], bytes]


def bytes_changed(text: str, draw: random.Random) -> bytes:
    """Cut, repeat, overwrite or insert some bytes."""
    raw = bytearray(text.encode())
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(raw) + 1)
        length = draw.choice((1, 1, 2, 10, 200))
        kind = draw.randrange(5)
        if kind == 0:
            del raw[at:]
        elif kind == 1:
            del raw[at : at + length]
        elif kind == 2:
            raw[at:at] = raw[at : at + length]
        elif kind == 3:
            raw[at : at + 1] = bytes([draw.randrange(256)])
        else:
            raw[at:at] = draw.choice(HOSTILE_WORDS).encode()
    return bytes(raw)


def lines_changed(text: str, draw: random.Random) -> bytes:
    """Drop, repeat or exchange lines."""
    lines = text.splitlines(keepends=True)
    for _ in range(draw.choice((1, 1, 3))):
        if not lines:
            break
        at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        kind = draw.randrange(3)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(other, lines[at])
        else:
            lines[at], lines[other] = lines[other], lines[at]
    return "".join(lines).encode()


def fields_changed(text: str, draw: random.Random) -> bytes:
    """Change fields of JSON, of one value or of one on each line."""
    try:
        whole = json.loads(text)
    except ValueError:
        lines = text.splitlines()
        for _ in range(draw.choice((1, 1, 3))):
            at = draw.randrange(len(lines))
            lines[at] = json.dumps(_changed(json.loads(lines[at]), draw))
        return "".join(f"{line}\n" for line in lines).encode()
    for _ in range(draw.choice((1, 1, 3))):
        whole = _changed(whole, draw)
    return json.dumps(whole).encode()


def _changed(value: Any, draw: random.Random) -> Any:
    """Return a value with a change somewhere in it."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        key = draw.choice(keys)
        kind = draw.randrange(12)
        copy: Any = value.copy()
        if kind == 0:
            del copy[key]
        elif kind == 1 and isinstance(copy, list):
            copy.insert(key, draw.choice(HOSTILE))
        elif kind == 1:
            copy[draw.choice(("odd", "\x1b[2J", "size", "rank"))] = copy[key]
        elif kind == 2 and isinstance(copy, list):
            copy.append(copy[draw.randrange(len(copy))])
        else:
            copy[key] = _changed(copy[key], draw)
        return copy
    number = isinstance(value, int) and not isinstance(value, bool)
    if number and draw.random() < 0.3:
        return value + draw.choice((-1, 1, 1000, -1000))
    return draw.choice(HOSTILE)
