# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of torch's reconfigure: each error says which, and nothing hangs."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from reconfigured_groups import Changing, changing
from run_ranks import RunRanks

from commrt.errors import (
    ClosedError,
    MismatchError,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.torch import Options
from commrt.torch.backend import can_be_made
from commrt.torch.handles import Handle, in_order, new_handle

DEADLINE_S = 300.0
SHORT = timedelta(seconds=1)
needs_reconfigure = pytest.mark.skipif(
    not can_be_made(), reason="torch has reconfiguration from 2.14 on"
)


# -- handles, without ranks ----------------------------------------------------------


def handles(count: int, job: str = "job") -> list[Handle]:
    return [new_handle(job, place) for place in range(count)]


def texts(some: list[Handle]) -> list[str]:
    return [one.text() for one in some]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_list_gives_the_ranks(count: int) -> None:
    some = handles(count)[::-1]
    assert in_order(texts(some), some[0]) == some


def test_of_a_set_the_members_of_a_machine_come_together() -> None:
    some = [
        replace(one, machine=machine)
        for one, machine in zip(handles(5), ["b", "a", "b", "a", "b"], strict=True)
    ]
    found = in_order({*texts(some)}, some[3])
    assert [one.place for one in found] == [0, 2, 4, 1, 3]


def encoded(said: Any) -> str:
    return "commrt1:" + base64.urlsafe_b64encode(json.dumps(said).encode()).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "gloo:0:-1:0:", "commrt1:", "commrt1:%%%", "commrt1:é"),
        *(encoded(said) for said in ([], 1, {}, {"job": "a"}, {"more": 1})),
        encoded(
            {**json.loads(base64.b64decode(handles(1)[0].text()[8:])), "place": "0"}
        ),
        handles(1)[0].text()[:-9],
    ],
)
def test_what_is_no_handle(text: str) -> None:
    own = handles(1)[0]
    with pytest.raises(UsageError, match=r"handles\[1\] is .*no handle of commrt"):
        in_order([own.text(), text], own)


@given(st.text())
def test_any_text_is_refused(text: str) -> None:
    for each in (text, f"commrt1:{text}"):
        with pytest.raises(UsageError, match="no handle"):
            Handle.of(each, "it")


@pytest.mark.parametrize("nothing", [[], set(), None, 3])
def test_no_handles_at_all(nothing: Any) -> None:
    with pytest.raises(UsageError, match="must have at least one"):
        in_order(nothing, handles(1)[0])


def test_which_handle_is_wrong() -> None:
    own, other = handles(2)
    for given_, said in [
        ([own, other, other], r"handles\[1\] and handles\[2\] are equal"),
        ([own, own], r"handles\[0\] and handles\[1\] are equal, that of process"),
        ([other], "this rank's own handle, that of process .* is missing"),
        ([own, replace(other, job="x")], r"handles\[1\] .* of another job"),
    ]:
        with pytest.raises(UsageError, match=said):
            in_order(texts(given_), own)


# -- ranks ---------------------------------------------------------------------------


def not_connected(it: Changing) -> None:
    x = torch.ones(2)
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True),
        lambda: dist.send(x, group_dst=0),
        lambda: dist.broadcast(x, group_src=0),
        lambda: it.group.barrier(),
        lambda: it.group.communicator,
        lambda: it.backend.allreduce([x]),
    ):
        with pytest.raises(UsageError, match="is not connected") as raised:
            call()
        assert isinstance(raised.value, RuntimeError)
    assert "not connected" in repr(it.group)
    assert it.backend.get_error().name == "SUCCESS"
    it.group.abort()
    it.connect("later", 1)
    assert it.is_right()


def own_is_missing(it: Changing) -> None:
    """A rank that is left out calls all the same; the others do not mind."""
    some = it.connect("own", 10)[:-1]
    if it.rank == it.size - 1:
        with pytest.raises(UsageError, match=r"own handle, .* is missing among the"):
            it.reconfigure(11, some)
    else:
        it.reconfigure(11, some)
        assert it.is_right()
    it.meet("own_done")


def equal_handles(it: Changing) -> None:
    """On all ranks, and then on one of them."""
    good = it.connect("equal", 20)
    wrong = [*good, good[1]]
    said = rf"handles\[1\] and handles\[{it.size}\] are equal"
    with pytest.raises(UsageError, match=said):
        it.reconfigure(21, wrong)
    assert it.is_right()
    kind = UsageError if it.rank == 1 else RefusedError
    with pytest.raises(kind, match=said):
        it.reconfigure(22, wrong if it.rank == 1 else good)
    assert it.is_right()
    it.reconfigure(23, good)
    assert it.is_right()


def no_handle(it: Changing) -> None:
    good = it.connect("no", 30)
    kind = UsageError if it.rank == 0 else RefusedError
    with pytest.raises(kind, match=rf"handles\[{it.size}\] is 'nonsense'"):
        it.reconfigure(31, [*good, "nonsense"] if it.rank == 0 else good)
    with pytest.raises(UsageError, match="at least one"):
        it.reconfigure(32, [])
    assert it.is_right()


def another_job(it: Changing) -> None:
    """A handle of another group of the same processes."""
    good = it.connect("job", 40)
    other = dist.new_group(pg_options=Options(enable_reconfigure=True))
    foreign = dist._get_reconfigure_handle(other)
    with pytest.raises(UsageError, match=r"handles\[\d+\] is that of .* another job"):
        it.reconfigure(41, [*good, foreign])
    assert it.is_right()


def used_uuid(it: Changing) -> None:
    good = it.connect("used", 50)
    for handles_ in (good, good[::-1], {*good}):
        with pytest.raises(UsageError, match="uuid 50 was already used"):
            it.reconfigure(50, handles_)
    assert it.is_right()
    it.meet("used_done")
    it.reconfigure(51, good[::-1])
    assert it.group.rank() == it.size - 1 - it.rank
    assert it.is_right()


def one_never_comes(it: Changing) -> None:
    """The others say who, their group goes on, and a fresh uuid connects all."""
    good = it.connect("never", 60)
    some = range(it.size - 1)
    if it.rank in some:
        with pytest.raises(TimeoutError_, match=rf"rank {it.size - 1} did not arrive"):
            it.reconfigure(61, good, SHORT)
    it.meet("never_late")
    assert it.is_right()
    if it.rank not in some:
        with pytest.raises(TimeoutError_, match=r"a rank has given up, .* uuid 61: "):
            it.reconfigure(61, good)
    with pytest.raises(UsageError, match=r"uuid 61 was already used \(.*arrive"):
        it.reconfigure(61, good)
    it.reconfigure(62, good)
    assert it.is_right()


def one_is_late_in_a_first_one(it: Changing) -> None:
    """A group that was never connected can be, after an attempt in vain."""
    good = it.handles("first")
    if it.rank == 0:
        with pytest.raises(TimeoutError_):
            it.reconfigure(71, good, SHORT)
        assert dist.get_rank() == -1
    it.meet("first_late")
    it.reconfigure(72, good)
    assert it.is_right()


def other_handles(it: Changing) -> None:
    """Ranks that pass different handles hear of it, all of them."""
    good = it.connect("other", 80)
    with pytest.raises(MismatchError, match=r"uuid 81 pass different handles: .* and"):
        it.reconfigure(81, good[::-1] if it.rank == 0 else good)
    assert it.is_right()


def other_options(it: Changing) -> None:
    own = Options(enable_reconfigure=True, deterministic=it.rank == 0)
    it.connect("options", 90)
    group = dist.new_group(pg_options=own)
    inner = Changing(it.store, it.rank, it.size, group)
    good = inner.handles("options_inner")
    with pytest.raises(MismatchError, match="deterministic=True"):
        inner.reconfigure(91, good)
    assert group.rank() == -1
    assert it.is_right()


def small_mistakes(it: Changing) -> None:
    good = it.connect("small", 100)
    for limit in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(UsageError, match=r"timeout=.* must be above 0"):
            it.reconfigure(101, good, limit)
    with pytest.warns(RuntimeWarning, match="knows no hints, and passes over {'a': "):
        dist._reconfigure(102, good, hints={"a": "b"}).wait()
    plain = dist.new_group()
    assert not dist._supports_reconfigure(plain)
    with pytest.raises(RuntimeError, match="does not support"):
        dist._get_reconfigure_handle(plain)
    with pytest.raises(UsageError, match="enable_reconfigure=3 must be"):
        dist.new_group(pg_options=Options(enable_reconfigure=3))  # type: ignore[arg-type]
    assert it.is_right()


def two_threads(it: Changing) -> None:
    """A second thread is refused while the first one waits."""
    good = it.connect("threads", 110)
    if it.rank == 0:
        failed: list[BaseException] = []

        def first() -> None:
            try:
                it.reconfigure(111, good)
            except BaseException as error:  # noqa: BLE001  the test looks at it
                failed.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        key = "commrt/reconfigure/111/order"
        it.group.get_group_store().get(key)  # the first one is in it
        with pytest.raises(UsageError, match="another thread reconfigures"):
            it.reconfigure(112, good)
        it.store.set("threads_go", "1")
        thread.join()
        assert failed == []
    else:
        it.store.get("threads_go")
        it.reconfigure(111, good)
    assert it.is_right()


def after_the_end(it: Changing) -> None:
    it.connect("end", 120)
    group, handle = it.group, it.handle()
    dist.destroy_process_group()
    with pytest.raises(ClosedError, match="was destroyed"):
        group.get_reconfigure_handle()
    again = dist.distributed_c10d.ReconfigureOptions()
    again.uuid, again.handles = 121, [handle]
    with pytest.raises(ClosedError, match="was destroyed"):
        group.reconfigure(again)


def two_backends(it: Changing) -> None:
    """torch reconfigures groups of one backend only."""
    dist.destroy_process_group()
    where = {"rank": 0, "world_size": 1, "enable_reconfigure": True}
    with pytest.raises(UsageError, match="groups of one backend only"):
        dist.init_process_group("cpu:gloo,cuda:commrt", store=dist.HashStore(), **where)


Scenario = Callable[[Changing], None]
SCENARIOS: tuple[Scenario, ...] = (
    *(not_connected, own_is_missing, equal_handles, no_handle, another_job, used_uuid),
    *(one_never_comes, one_is_late_in_a_first_one, other_handles, other_options),
    *(small_mistakes, two_threads, after_the_end, two_backends),
)


def run_all() -> str:
    for scenario in SCENARIOS:
        with changing(scenario.__name__) as it:
            scenario(it)
    return "right"


@needs_reconfigure
@pytest.mark.parametrize("size", [2, 3])
def test_wrong_calls_of_ranks(tmp_path: Path, size: int) -> None:
    found = RunRanks(tmp_path)(size, run_all, deadline_s=DEADLINE_S)
    assert found == ["right"] * size


@pytest.mark.skipif(can_be_made(), reason="for torch before 2.14")
def test_an_older_torch_says_so() -> None:
    with pytest.raises(UsageError, match=r"torch has reconfiguration from 2\.14 on"):
        dist.init_process_group(
            "commrt",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            pg_options=Options(enable_reconfigure=True),
        )
