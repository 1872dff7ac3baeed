# SPDX-License-Identifier: Apache-2.0
"""Limits of tests are meant to be reached, or far away: they judge no machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from busy_machine import Moment, describe, now

TESTS = Path(__file__).parents[2]
# On machines with a GPU, and with programs of others that are given minutes anyway.
LEFT_OUT = {"gpu", "clients"}

SHORT_S, FAR_S = 5, 240
"""A wait that a test means to end by its limit is short. One that must not end so is
this far away: no machine is so slow, and only what hangs comes there."""

_LIMIT = re.compile(
    r"(^|_)(timeout(_s)?|deadline_s|limit_s|wait_s|start_s|long_s)$", re.IGNORECASE
)
# A bucket's own: calls are sent by then, and nothing fails.
_NO_LIMIT = {"time_limit_s"}
# Parts of a longer wait: what is printed or ended first.
_WAITS = {"join", "wait"}


def _number(node: ast.expr | None) -> float | None:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return None
    try:
        return float(node.value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _named(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield every name that is given a value, with the value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield getattr(target, "id", getattr(target, "attr", "")), node.value
        elif isinstance(node, ast.AnnAssign):
            yield getattr(node.target, "id", ""), node.value
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args][-len(node.defaults) :]
            pairs = [*zip(named, node.defaults, strict=False)]
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            yield from ((one.arg, value) for one, value in pairs)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                yield str(getattr(key, "value", "")), value
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name == "timedelta":
        yield from (("timeout", one.value) for one in node.keywords if one.arg)
    elif name in _WAITS and node.args:
        number = _number(node.args[0])
        if number is not None and number >= 10:  # else an index, as in wait(4)
            yield "timeout", node.args[0]


def near_limits(text: str) -> list[str]:
    """Return the limits that a slow machine could reach."""
    found = []
    for name, value in _named(ast.parse(text)):
        number = _number(value)
        if not _LIMIT.search(name) or name in _NO_LIMIT or number is None:
            continue
        if SHORT_S < number < FAR_S:
            found.append(f"line {value.lineno if value else 0}: {name} {number:g}")
    return found


def test_no_limit_of_a_test_is_one_that_a_slow_machine_reaches() -> None:
    found = [
        f"{path.relative_to(TESTS)} {one}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in LEFT_OUT
        for one in near_limits(path.read_text())
    ]
    assert found == [], f"expected at most {SHORT_S} s, or at least {FAR_S} s"


@pytest.mark.parametrize(
    "text",
    [
        "run(2, f, timeout_s=20)",
        "DEADLINE_S = 60.0",
        "_LIMIT_S: float = 30",
        "comm.timeout_s = 7",
        'env = {"COMMRT_TIMEOUT_S": "20"}',
        "def f(*, deadline_s: float = 40.0): ...",
        "def f(size, deadline_s=40.0): ...",
        "limit = timedelta(seconds=30)",
        "event.wait(30)",
    ],
)
def test_a_near_limit_is_seen(text: str) -> None:
    assert len(near_limits(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "run(2, f, timeout_s=300)",
        "request.wait(timeout_s=0.05)",
        "comm.fused(time_limit_s=60)",
        "reducer.wait(4)",
        "timeout_s = None",
        "size = 20",
    ],
)
def test_other_numbers_are_not(text: str) -> None:
    assert near_limits(text) == []


def test_the_summary_says_who_kept_the_machine_busy() -> None:
    begin = Moment(own=1.0, busy=100.0, stolen=0.0, load=0.5)
    quiet = describe(begin, Moment(91.0, 200.0, 1.0, 2.0), 2)
    assert quiet == (
        "machine: 2 cores, load 0.5 at the beginning and 2.0 at the end; nothing to "
        "speak of beside the tests"
    )
    busy = describe(begin, Moment(26.0, 200.0, 25.0, 14.2), 2)
    assert "load 0.5 at the beginning and 14.2 at the end" in busy
    assert "other work took 75% of the time that cores were busy" in busy
    assert "and the host 20% more" in busy


def test_time_only_grows() -> None:
    begin = now()
    end = now()
    assert 0 <= begin.own <= end.own
    assert 0 < begin.busy <= end.busy
    assert 0 <= begin.stolen <= end.stolen
