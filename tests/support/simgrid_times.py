# SPDX-License-Identifier: Apache-2.0
"""Compares simulated times with SimGrid's, where SimGrid's Python module is installed.

    python tests/support/simgrid_times.py

Each network is written as a platform file, which SimGrid reads. One actor starts the
messages of a schedule as their dependencies allow, with the network model CM02. The
program prints both times of each case, and ends with 1 if two differ by more than one
part in a million.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from simulated_by_hand import messages_of

from commrt import algorithms
from commrt.sim.platform_files import platform_xml
from commrt.sim.simulate import simulate
from commrt.sim.topologies.crossbars import Star
from commrt.sim.topologies.dragonflies import Dragonfly
from commrt.sim.topologies.fat_trees import FatTree
from commrt.sim.topologies.loop_networks import LoopNetwork
from commrt.sim.topologies.network import Cable
from commrt.sim.topologies.tori import Mesh, Torus

# SimGrid gives flows with a shorter round trip more of a link; commrt shares evenly. So
# all ways of a network are equally long here: only cables of hosts have a latency.
FAR, NEAR = Cable(12.5, 1.0), Cable(12.5, 0.0)
PAIR = Cable(12.5, 0.0, bundle=2)
STAR, UNEVEN_STAR = Star(16, FAR), Star(13, FAR)
TORUS, MESH = Torus((4, 3), NEAR, FAR), Mesh((2, 2, 3), NEAR, FAR)
TREE = FatTree((4, 4), (1, 2), (FAR, NEAR))
LOOP = LoopNetwork(8, 4, PAIR, FAR)
DRAGONFLY = Dragonfly(5, 2, 2, 2, NEAR, NEAR, FAR)
CASES = (
    (STAR, "halving_doubling", 1 << 20),
    (UNEVEN_STAR, "direct", 1_000_000),
    (TORUS, "halving_doubling", 600_000),
    (MESH, "recursive_doubling", 600_000),
    (TREE, "halving_doubling", 1 << 20),
    (TREE, "double_tree", 1 << 20),
    (LOOP, "halving_doubling", 1 << 20),
    (LOOP, "shifted_halving_doubling", 1 << 20),
    (DRAGONFLY, "ring", 999_960),
    (DRAGONFLY, "direct", 999_960),
)
TOLERANCE = 1e-6


def main() -> int:
    """Compare all cases; return 0 if all agree."""
    if len(sys.argv) > 1:
        _play(int(sys.argv[1]), sys.argv[2])
        return 0
    worst = 0.0
    for number, (shape, name, nbytes) in enumerate(CASES):
        network = shape.network()
        schedule = algorithms.schedule("allreduce", name, network.num_hosts)
        ours_us = simulate(schedule, network, nbytes).time_us
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "platform.xml"
            path.write_text(platform_xml(network))
            # SimGrid has one engine a process.
            command = [sys.executable, __file__, str(number), str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        theirs_us = float(done.stdout.split()[-1]) * 1e6
        worst = max(worst, abs(ours_us / theirs_us - 1))
        text = f"{type(shape).__name__} of {network.num_hosts}, {name}"
        print(f"{text:44} {ours_us:14.6f} us, SimGrid {theirs_us:14.6f} us")
    print(f"largest difference: {worst:.2g}")
    return int(worst > TOLERANCE)


def _play(number: int, platform: str) -> None:
    """Let SimGrid play a case; print its time in seconds."""
    import simgrid  # type: ignore[import-not-found]

    shape, name, nbytes = CASES[number]
    network = shape.network()
    size = network.num_hosts
    schedule = algorithms.schedule("allreduce", name, size)
    programs = schedule.programs()
    messages = messages_of(schedule, nbytes // 4, 4)
    by_recv = {recv: send for send, (recv, _) in messages.items()}
    waiting = {
        (rank, index): len(step.deps)
        for rank, program in enumerate(programs)
        for index, step in enumerate(program.steps)
    }
    followers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, program in enumerate(programs):
        for index, step in enumerate(program.steps):
            for dep in step.deps:
                followers.setdefault((rank, dep), []).append((rank, index))
    options = ["sim", "--cfg=network/model:CM02", "--log=root.thresh:error"]
    options += ["--cfg=network/crosstraffic:0", "--cfg=network/TCP-gamma:0"]
    options += ["--cfg=surf/precision:1e-12"]
    engine = simgrid.Engine(options)
    engine.load_platform(platform)
    hosts = [simgrid.Host.by_name(network.node_name(rank)) for rank in range(size)]

    def coordinator() -> None:
        under_way: list[object] = []
        ends: list[tuple[int, int]] = []
        arrived: set[tuple[int, int]] = set()
        todo = [place for place, count in waiting.items() if not count]
        while todo or under_way:
            while todo:
                place = todo.pop()
                if place in by_recv and by_recv[place] not in arrived:
                    continue
                if place in messages:
                    recv, length = messages[place]
                    source, target = hosts[place[0]], hosts[recv[0]]
                    comm = simgrid.Comm.sendto_async(source, target, length)
                    under_way.append(comm)
                    ends.append(place)
                for after in followers.get(place, ()):
                    waiting[after] -= 1
                    if not waiting[after]:
                        todo.append(after)
            if not under_way:
                break
            index = simgrid.Comm.wait_any(under_way)
            under_way.pop(index)
            send = ends.pop(index)
            arrived.add(send)
            recv = messages[send][0]
            if not waiting[recv]:
                todo.append(recv)

    simgrid.Actor.create("coordinator", hosts[0], coordinator)
    engine.run()
    print(f"{simgrid.Engine.clock:.12g}")


if __name__ == "__main__":
    sys.exit(main())
