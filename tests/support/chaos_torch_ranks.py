# SPDX-License-Identifier: Apache-2.0
"""Ranks of ``chaos_torch.py`` train, and take steps again from dumps."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import logging
import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from elastic_torch_training import Kind, TorchTraining, Undo
from kill_loop import AFTER, Diary

import commrt
from commrt import elastic
from commrt.comm import Communicator
from commrt.errors import CommError, RecoveryError

__all__ = ["replay", "train"]

_LOOK = 20
"""Steps between two looks at whether it is enough."""


def _digest(training: TorchTraining) -> str:
    """Return a digest of the state of this rank, with its random numbers."""
    noise = torch.get_rng_state().numpy().tobytes()
    return hashlib.sha256(training.bits().encode() + noise).hexdigest()


class _Notes(logging.Handler):
    """Writes the errors that the loop has caught."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self._diary = diary

    def emit(self, record: logging.LogRecord) -> None:
        self._diary.say(error=record.getMessage(), at=time.monotonic())


class _Rank:
    """One rank's training, and what it writes."""

    def __init__(self, folder: Path, number: int, kind: Kind, undo: Undo) -> None:
        self._folder, self._number = folder, number
        self.diary = Diary(folder, number)
        self.training = TorchTraining(kind, undo)
        self._worlds = 0
        self._world, self._left = "", 0

    def changed(self, comm: Communicator) -> None:
        """Write the world that this rank is in now, and its state."""
        self._worlds += 1
        file = f"state{self._number}.{self._worlds}"
        self.training.dump(self._folder / file)
        self._world, self._left = comm.name, AFTER
        self.diary.say(
            world=comm.name,
            rank=comm.rank,
            size=comm.size,
            begin=int(self.training.counter),
            state=file,
            bits=_digest(self.training),
            at=time.monotonic(),
        )

    def step(self, comm: Communicator, number: int) -> None:
        """Take a step, and write of the first ones what they gave."""
        # Before the update, which not all ways to undo a step could take back.
        if number and number % _LOOK == 0:
            is_enough = comm.rank == 0 and (self._folder / "enough").exists()
            if comm.allreduce(np.array([float(is_enough)]))[0]:
                raise StopIteration
        self.training.step(comm, number)
        if self._left:
            at = time.monotonic()
            bits = _digest(self.training)
            self._left -= 1
            self.diary.say(step=number, world=self._world, bits=bits, at=at)
            if not self._left:
                self.diary.say(held=_held(), world=self._world, open=_open())


def _held() -> dict[str, int]:
    """Return how much of the system's this process holds."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "/memfd:" in line or "/dev/shm" in line]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": len(shared),
    }


def _open() -> dict[str, int]:
    """Return of what kind the descriptors of this process are."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists
            what = os.readlink(f"/proc/self/fd/{name}")
            found[re.sub(r"[\d.]+", "N", what)] += 1
    return dict(found)


def train(folder: str, number: int, kind: Kind, undo: Undo) -> None:
    """Train until a file says that it is enough."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(number)
    rank = _Rank(Path(folder), number, kind, undo)
    diary, training = rank.diary, rank.training
    logging.getLogger("commrt.elastic").addHandler(_Notes(diary))
    try:
        commrt.init(deterministic=True)
    except CommError as error:
        diary.say(refused=str(error))
        return
    try:
        elastic.run(
            *(rank.step, training.build),
            until=10**9,
            on_change=rank.changed,
            replica_size=training.replica_size,
        )
    except StopIteration:
        diary.say(end=True)
    except RecoveryError as error:
        diary.say(left=str(error))
    finally:
        diary.close()


def replay(folder: str, kind: Kind, orders: list[dict[str, Any]]) -> None:
    """Take the steps of some worlds again, as ranks that have only the dumps.

    Each order has the files of its ranks and the numbers of its steps. Writes a list
    for each order: the bits at its begin, and after each step.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    everybody = commrt.init(deterministic=True)
    found: list[list[str]] = []
    for order in orders:
        size = len(order["states"])
        bits: list[str] = []
        found.append(bits)
        if everybody.rank >= size:
            continue
        comm = everybody.create_group(range(size))
        training = TorchTraining(kind)
        training.build(comm)
        training.load(Path(folder) / order["states"][comm.rank])
        bits.append(_digest(training))
        for number in range(order["begin"], order["end"]):
            training.step(comm, number)
            bits.append(_digest(training))
    file = Path(folder) / f"replay{everybody.rank}"
    file.with_suffix(".new").write_text(json.dumps(found))
    file.with_suffix(".new").rename(file)
