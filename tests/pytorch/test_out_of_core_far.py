# SPDX-License-Identifier: Apache-2.0
"""Far memories keep bytes, end transfers in order, and say what fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from out_of_core_cases import ENOUGH, Ticks, blocks_of, results, same_bits

from commrt.errors import BackendError, ClosedError, MemoryError_, UsageError
from commrt.layers.out_of_core import FileFar, OutOfCore, PinnedMemory, ThrottledCopy
from commrt.layers.out_of_core.far import Lane


def bytes_of(number: int, count: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(number)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=draws)


def fars(path: Path) -> list[Any]:
    return [FileFar(path / "far"), ThrottledCopy(1e12)]


def test_bytes_come_back_whatever_is_freed_between(tmp_path: Path) -> None:
    for far in fars(tmp_path):
        with far:
            kept: dict[int, Any] = {}
            for number in range(40):
                source = bytes_of(number, 1 + 97 * number % 1000)
                kept[number] = far.store(source)[0]
                if number % 3 == 0:
                    far.drop(kept.pop(number // 2 if number // 2 in kept else number))
            for number, slot in kept.items():
                target = torch.zeros(1 + 97 * number % 1000, dtype=torch.uint8)
                far.load(slot, target).wait()
                assert torch.equal(target, bytes_of(number, len(target)))
            assert far.in_use == sum(1 + 97 * number % 1000 for number in kept)
            for slot in kept.values():
                far.drop(slot)
            assert far.in_use == 0


def test_a_file_uses_its_freed_parts_again(tmp_path: Path) -> None:
    path = tmp_path / "far"
    with FileFar(path) as far:
        for _ in range(5):
            slots = [far.store(bytes_of(n, 1000))[0] for n in range(3)]
            _, last = far.store(bytes_of(9, 500))
            last.wait()
            for slot in (slots[1], slots[0], slots[2]):
                far.drop(slot)
            far.drop(_)
        assert path.stat().st_size == 3500
    assert not path.exists()
    far.close()


@pytest.mark.parametrize("policy", ["swap", "auto"])
def test_a_file_trains_with_the_bits_of_plain_training(
    tmp_path: Path, policy: str
) -> None:
    for kind in ("mlp", "cnn", "views"):
        blocks, x = blocks_of(kind)
        right = results(blocks, x, blocks)
        blocks, x = blocks_of(kind)
        with FileFar(tmp_path / kind) as far:
            model = OutOfCore(
                blocks, x, budget_bytes=16000, far=far, policy=policy, repeats=1
            )
            assert same_bits(results(model, x, model.blocks), right)
            assert policy != "swap" or model.step.stored_nbytes > 0
            assert model.step.peak_nbytes <= 16000


def test_a_throttled_copy_takes_the_time_of_its_link() -> None:
    ticks = Ticks()
    with ThrottledCopy(100.0, 0.5, clock=ticks) as far:
        slot, out = far.store(bytes_of(1, 50))
        _, later = far.store(bytes_of(2, 50))
        target = torch.zeros(50, dtype=torch.uint8)
        back = far.load(slot, target)  # the other direction
        assert not out.is_done()
        ticks.at = 1.0
        assert out.is_done()
        assert back.is_done()
        assert not later.is_done()
        later.wait()
        assert ticks.at == 2.0
        assert torch.equal(target, bytes_of(1, 50))
        assert far.speeds().latency_s == 0.5


def test_links_are_measured(tmp_path: Path) -> None:
    with FileFar(tmp_path / "far") as far:
        link = far.speeds()
        assert link.out_bytes_per_s > 0
        assert link.in_bytes_per_s > 0
        assert far.in_use == 0


def test_links_are_measured_within_a_limit(tmp_path: Path) -> None:
    with FileFar(tmp_path / "far", limit_nbytes=5000) as far:
        assert far.speeds().out_bytes_per_s > 0
        far.store(bytes_of(1, 4999))
        assert far.speeds().in_bytes_per_s > 0
        assert far.in_use == 4999


def test_two_far_memories_do_not_share_a_file(tmp_path: Path) -> None:
    """Ranks would read what others have written."""
    path = tmp_path / "far"
    with FileFar(path) as far:
        slot, out = far.store(bytes_of(1, 100))
        with pytest.raises(UsageError, match="a file of its own"):
            FileFar(path)
        out.wait()
        target = torch.zeros(100, dtype=torch.uint8)
        far.load(slot, target).wait()
        assert torch.equal(target, bytes_of(1, 100))
    with FileFar(path):  # it is free again
        assert path.stat().st_size == 0


def test_devices_and_links_are_no_far_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(UsageError, match="no regular file"):
            FileFar(path)
        assert Path(path).exists()
    (tmp_path / "mine").write_text("bytes")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="link"):
        FileFar(tmp_path / "link")
    assert (tmp_path / "mine").read_text() == "bytes"


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_limits_that_are_none(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(UsageError, match="limit_nbytes"):
        FileFar(tmp_path / "far", limit_nbytes=limit)
    with pytest.raises(UsageError, match="limit_nbytes"):
        ThrottledCopy(1.0, limit_nbytes=limit)
    assert not (tmp_path / "far").exists()


def test_far_memory_that_is_full(tmp_path: Path) -> None:
    blocks, x = blocks_of("mlp")
    for far in (FileFar(tmp_path / "far", limit_nbytes=9 << 20), ThrottledCopy(1e9)):
        with far:
            far._limit_nbytes = None
            model = OutOfCore(blocks, x, budget_bytes=ENOUGH, far=far, policy="swap")
            far._limit_nbytes = 500
            with pytest.raises(MemoryError_, match="beyond limit_nbytes=500"):
                model(x)
            assert (model.near_nbytes, far.in_use) == (0, 0)
            far._limit_nbytes = None
            model(x).sum().backward()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, x = blocks_of("mlp")

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with FileFar(tmp_path / "far") as far:
        model = OutOfCore(blocks, x, budget_bytes=ENOUGH, far=far, policy="swap")
        model(x).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(BackendError, match="No space left"):
                _step_that_waits(model, x)
        assert (model.near_nbytes, far.in_use) == (0, 0)
        model.backward(model(x).sum())


def _step_that_waits(model: OutOfCore, x: torch.Tensor) -> None:
    """Do a step, whose tensors have left before they come back."""
    y = model(x)
    for transfers in [*model._near._leaving]:
        for entry in transfers:
            assert entry.leaving is not None
            entry.leaving._end.wait()  # well or not
    model.backward(y.sum())


def test_a_closed_far_memory_is_refused(tmp_path: Path) -> None:
    for far in fars(tmp_path):
        far.store(bytes_of(1, 4))
        far.close()
        with pytest.raises(ClosedError, match="closed"):
            far.store(bytes_of(1, 4))
        assert far.in_use == 4


def test_lanes_keep_the_order_and_the_error_of_jobs() -> None:
    order: list[int] = []
    lane, gate = Lane("test-lane"), threading.Event()
    first = lane.do(gate.wait, "first")
    jobs = [lane.do(lambda n=n: order.append(n), "job") for n in range(5)]
    assert not first.is_done()
    gate.set()
    jobs[-1].wait()
    assert order == [0, 1, 2, 3, 4]

    def fail() -> None:
        raise ValueError("torn")

    failed = lane.do(fail, "a copy")
    with pytest.raises(BackendError, match="a copy: torn"):
        failed.wait()
    lane.do(lambda: None, "after").wait()
    lane.close()


def test_pinned_memory_needs_a_device() -> None:
    if torch.cuda.is_available():
        return
    with pytest.raises(UsageError, match="there is no CUDA device"):
        PinnedMemory()
