# SPDX-License-Identifier: Apache-2.0
"""A rank of a training under torchft: a replica of one process.

    python peer_torchft.py --backend torchft --rank 0 --size 4 FOLDER

The replicas are connected by torchft's own group, over gloo, or by a group of torch's
that can be reconfigured.
``--host`` runs the lighthouse. All limits are those of torchft's own example and of its
README.
"""

from __future__ import annotations

import argparse
import logging
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_training import Rounded, Training
from kill_loop import Diary
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer


class Quorums(logging.Handler):
    """Notes the number of the quorum that the manager has joined."""

    last = -1

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the manager's log of quorums."""
        self.last = vars(record)["quorum_id"]


class Replica:
    """This rank's model, as the manager sees it."""

    def __init__(self, first: int) -> None:
        self.training = Training(first)

    def state_dict(self) -> dict[str, Any]:
        """Return the model, without the noise that is each rank's own."""
        held = self.training
        arrays = {"counter": held.counter, "weights": held.weights}
        arrays["velocity"] = held.velocity
        return {name: torch.tensor(array) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another rank's model."""
        self.training.counter[...] = state["counter"].numpy()
        self.training.weights[...] = state["weights"].numpy()
        self.training.velocity[...] = state["velocity"].numpy()


def group_of(folder: Path, first: int, size: int, backend: str) -> Any:
    """Return torchft's own group, or torch's with a backend that reconfigures."""
    limit = timedelta(seconds=5)
    if backend == "torchft":
        return ProcessGroupGloo(timeout=limit)
    port = int((folder / "port").read_text())
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("job", store),
        rank=first,
        world_size=size,
        timeout=limit,
        enable_reconfigure=True,
    )
    return dist.group.WORLD


def train(folder: Path, first: int, size: int, backend: str) -> None:
    """Take steps for ever; keep those to which the manager says yes."""
    diary = Diary(folder, first)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    replica = Replica(first)
    quorums = Quorums()
    logger = logging.getLogger("torchft_quorums")
    logger.setLevel(logging.INFO)
    logger.addHandler(quorums)
    manager = Manager(
        pg=group_of(folder, first, size, backend),
        load_state_dict=replica.load_state_dict,
        state_dict=replica.state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(minutes=0.5),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=(folder / "address").read_text(),
        replica_id=f"replica_{first}",
    )

    def total(x: Any) -> Any:
        tensor = torch.from_numpy(x.copy())
        manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        return tensor.numpy()

    quorum = -1
    while True:
        manager.start_quorum()
        rank, size = manager.participating_rank(), manager.num_participants()
        number = manager.current_step()
        before = replica.training.dump()
        if quorums.last != quorum:
            quorum = quorums.last
            diary.enter(str(quorum), rank, size, replica.training)
        replica.training.step(Rounded(rank, size, total), number)
        error = manager.errored()
        if manager.should_commit():
            diary.step(number, replica.training)
        else:
            replica.training = Training.from_dump(before)
            diary.say(error=str(error)[:300])


def host(folder: Path) -> None:
    """Run the lighthouse, and a store for groups of torch's own, for ever."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (folder / "port").write_text(str(store.port))
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100
    )
    whole = folder / "address.new"
    whole.write_text(server.address())
    whole.rename(folder / "address")
    threading.Event().wait()


def main() -> None:
    """Train until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--backend", choices=["torchft", "commrt", "gloo"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    said = parser.parse_args()
    if said.host:
        host(said.folder)
    train(said.folder, said.rank, said.size, said.backend)


if __name__ == "__main__":
    main()
