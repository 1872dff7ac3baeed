# SPDX-License-Identifier: Apache-2.0
"""A rank of a training whose group is reconfigured by torch when a rank dies.

    python peer_reconfigure.py --backend gloo --way word --rank 0 --size 4 FOLDER

The controller of the job writes the ranks that live into ``word<generation>.json``. By
the way "word", a thread of each rank reconfigures when it finds the file, and that ends
the calls that wait in the old group. By the way "error", a rank reconfigures once its
own call has failed; a limit ends calls that wait for a rank that does not come. The
way "default" is the same with torch's own limit of half an hour.
``--host`` runs the store, so that no rank has it.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from elastic_training import Rounded, Training
from kill_loop import Diary

LIMIT_OF_CALLS = timedelta(seconds=5)
"""torchft's example gives gloo as much."""
LIMIT_OF_RECONFIGURE = timedelta(seconds=240)


class LeftError(RuntimeError):
    """The group has been reconfigured since this rank looked."""


class Member:
    """This rank's group, which changes."""

    def __init__(self, folder: Path, first: int, store: Any) -> None:
        self._folder, self._first, self._store = folder, first, store
        self._changed = threading.Condition()
        self.generation = 0
        self._publish()

    def _publish(self) -> None:
        key = f"handle/{self.generation}/{self._first}"
        self._store.set(key, dist._get_reconfigure_handle())

    def reconfigure(self) -> None:
        """Wait for the controller's next word, and connect the ranks that live."""
        path = self._folder / f"word{self.generation + 1}.json"
        while not path.exists():
            time.sleep(0.01)
        living = json.loads(path.read_text())
        keys = [f"handle/{self.generation}/{each}" for each in living]
        handles = [self._store.get(key).decode() for key in keys]
        with self._changed:
            limit = LIMIT_OF_RECONFIGURE
            dist._reconfigure(self.generation + 1, handles, timeout=limit).wait()
            self.generation += 1
            self._publish()
            self._changed.notify_all()

    def wait_until_after(self, generation: int) -> None:
        """Wait until the group is another one."""
        with self._changed:
            self._changed.wait_for(lambda: self.generation > generation)

    def total(self, x: Any, generation: int) -> Any:
        """Return the sum over the ranks of this generation of the group."""
        tensor = torch.from_numpy(x.copy())
        with self._changed:
            if self.generation != generation:
                raise LeftError("the group has been reconfigured")
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        return tensor.numpy()


def train(member: Member, diary: Diary, first: int, way: str) -> None:
    """Take steps for ever; after a death go on from the last one that all completed."""
    training = Training(first)
    kept = {0: training.dump()}
    done = 0
    member.wait_until_after(0)
    while True:
        generation = member.generation
        try:

            def total(x: Any, now: int = generation) -> Any:
                return member.total(x, now)

            rank, size = dist.get_rank(), dist.get_world_size()
            steps = np.zeros(size)
            steps[rank] = done
            done = int(total(steps).min())
            training = Training.from_dump(kept[done])
            ranks = Rounded(rank, size, total)
            diary.enter(str(generation), rank, size, training)
            while True:
                kept = {done - 1: kept.get(done - 1), done: training.dump()}
                training.step(ranks, done)
                diary.step(done, training)
                done += 1
        except RuntimeError as error:
            diary.say(error=f"{type(error).__name__}: {error}"[:300])
            if way == "word":
                member.wait_until_after(generation)
            else:
                member.reconfigure()


def host(folder: Path) -> None:
    """Run the store for ever."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    whole = folder / "address.new"
    whole.write_text(str(store.port))
    whole.rename(folder / "address")
    threading.Event().wait()


def main() -> None:
    """Train until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--backend", choices=["commrt", "gloo"])
    parser.add_argument("--way", choices=["word", "error", "default"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    said = parser.parse_args()
    if said.host:
        host(said.folder)
    diary = Diary(said.folder, said.rank)
    port = int((said.folder / "address").read_text())
    store = dist.TCPStore("localhost", port, is_master=False)
    limits = {"timeout": LIMIT_OF_CALLS} if said.way == "error" else {}
    dist.init_process_group(
        said.backend,
        store=dist.PrefixStore("job", store),
        rank=said.rank,
        world_size=said.size,
        enable_reconfigure=True,
        **limits,
    )
    member = Member(said.folder, said.rank, store)
    member.reconfigure()
    if said.way == "word":

        def listen() -> None:
            try:
                while True:
                    member.reconfigure()
            except BaseException as error:
                diary.say(error=f"{type(error).__name__}: {error}"[:300])
                raise

        threading.Thread(target=listen, daemon=True).start()
    train(member, diary, said.rank, said.way)


if __name__ == "__main__":
    main()
