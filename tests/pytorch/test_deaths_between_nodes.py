# SPDX-License-Identifier: Apache-2.0
"""A rank of another node ends: those that gloo connects with it learn it, and which.

Nodes are pretended, and nobody ends the survivors. Their deadline is far away (600 s):
each test ends by the notice or not at all.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deaths_in_init import begins, check_heard
from run_ranks import RunRanks
from store_ranks import StoreRanks

import commrt
from commrt.comm import Communicator, core_of
from commrt.errors import CommError, PeerFailedError, RevokedError
from commrt.job import liveness
from commrt.launch.detect import detect

FAILED = (PeerFailedError, RevokedError)
ENDED = r"rank {} .*process \d+ on \S+ has ended"

Call = Callable[[Communicator, int], Any]


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def on_nodes(nodes: str) -> dict[str, str]:
    return {"COMMRT_NODES": nodes}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sum_of(comm: Communicator) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]))[0])


def until_tested(request: Any) -> None:
    while not request.test():
        os.sched_yield()


def begun(comm: Communicator, count: int = 5, **how: Any) -> Any:
    return comm.allreduce(np.ones(count), nonblocking=True, **how)


# Each call waits for the rank that dies, which makes none of them.
CALLS: dict[str, Call] = {
    "allreduce": lambda comm, _: comm.allreduce(np.ones(5)),
    "long allreduce": lambda comm, _: comm.allreduce(np.ones(300_001)),
    "empty allgather": lambda comm, _: comm.allgather(np.empty(0)),
    "of gloo": lambda comm, _: comm.allreduce(np.ones(5), algorithm="gloo/native"),
    "bcast": lambda comm, dies: comm.bcast(np.ones(3), root=dies),
    "nonblocking": lambda comm, _: begun(comm).wait(),
    "tested": lambda comm, _: until_tested(begun(comm, 300_001)),
    "alltoallv": lambda comm, _: comm.alltoallv(
        np.ones(comm.size), send_counts=[1] * comm.size
    ),
    "recv": lambda comm, dies: comm.recv(np.empty(3), source=dies),
    "recv from anyone": lambda comm, _: comm.recv(np.empty(3)),
    "long send": lambda comm, dies: comm.send(np.ones(300_001), dest=dies),
    "sendrecv": lambda comm, dies: comm.sendrecv(
        np.ones(5), dest=dies, source=dies, out=np.empty(5)
    ),
    "multi_sendrecv": lambda comm, dies: comm.multi_sendrecv(
        sends=[(np.ones(5), dies)], recvs=[(np.empty(5), dies)]
    ),
    "probe": lambda comm, dies: comm.probe(dies),
    "split": lambda comm, _: comm.split(0),
    "dup": lambda comm, _: comm.dup(),
    "create_group": lambda comm, _: comm.create_group(range(comm.size)),
    "wait_any": lambda comm, _: commrt.wait_any([begun(comm)]),
    "object": lambda comm, _: comm.allgather_object([comm.rank]),
    "number": lambda comm, _: comm.allreduce(3),
    "sparse": lambda comm, _: comm.sparse_allreduce((np.array([1]), np.ones(1), (8,))),
}


def error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except CommError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def makes_every_call(dies: list[int]) -> dict[str, list[list[str]]]:
    """Return, by call, its error and that of the next one on the same communicator."""
    comm = commrt.init()
    sum_of(comm)
    comms = {what: comm.dup() for what in CALLS}
    others = [comm.dup() for _ in range(3)]
    if comm.rank in dies:
        die()
    pending = [begun(*each) for each in zip(others, (1, 5, 70_001), strict=True)]
    said = {
        what: [
            error_of(partial(call, comms[what], dies[0])),
            error_of(partial(sum_of, comms[what])),
        ]
        for what, call in CALLS.items()
    }
    said |= {f"pending {i}": [error_of(one.wait)] for i, one in enumerate(pending)}
    return said


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(
    ("nodes", "dies"),
    [
        ("1,1", [1]),
        ("2,1", [2]),
        ("1,2", [0]),
        ("2,2", [1]),
        ("2,2", [2, 3]),
        ("1,1,1", [1]),
        ("3,2", [0, 4]),
    ],
)
def test_every_call_names_a_rank_that_was_killed(
    ranks: RunRanks, nodes: str, dies: list[int]
) -> None:
    size = sum(map(int, nodes.split(",")))
    said = ranks.survivors(size, makes_every_call, env=on_nodes(nodes), dies=dies)
    assert sorted(said) == [rank for rank in range(size) if rank not in dies]
    named = "|".join(ENDED.format(rank) for rank in dies)
    for rank, calls in said.items():
        for what, errors in calls.items():
            for kind, text in errors:
                where = (rank, what, kind, text)
                assert kind == "PeerFailedError", where
                assert re.search(named, text), where


# -- each kind of wait, with nothing before it ----------------------------------------


def makes_one_call(what: str, how: str, dies: int) -> list[list[str]]:
    comm = commrt.init()
    sum_of(comm)
    if comm.rank == dies and how == "leaves":
        return []
    if comm.rank == dies:
        die()
    call = CALLS[what]
    return [error_of(lambda: call(comm, dies)), error_of(lambda: sum_of(comm))]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("what", ["allreduce", "of gloo", "recv", "split", "tested"])
def test_a_first_call_names_it(ranks: RunRanks, what: str) -> None:
    said = ranks.survivors(
        *(3, makes_one_call), env=on_nodes("2,1"), what=what, how="dies", dies=2
    )
    for first, later in said.values():
        assert first[0] == later[0] == "PeerFailedError"
        assert re.search(ENDED.format(2), first[1]), first


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("what", ["allreduce", "recv", "long send", "split"])
def test_a_rank_that_leaves_is_named(ranks: RunRanks, what: str) -> None:
    said = ranks.survivors(
        *(3, makes_one_call), env=on_nodes("2,1"), what=what, how="leaves", dies=2
    )
    for rank in (0, 1):
        first, later = said[rank]
        assert first[0] == later[0] == "PeerFailedError", said
        assert re.search(r"rank 2 (has left|does not arrive.*has left)", first[1]), (
            first
        )


def takes_part_and_ends() -> list[float]:
    """Rank 2 ends as soon as it has done its part, which others still wait for."""
    comm = commrt.init()
    sums = [sum_of(comm)]
    if comm.rank == 2:
        comm.send(np.full(100_003, 3.5), dest=0, nonblocking=True)
        comm.bcast(np.full(300_001, 2.5), root=2)
        return sums
    core_of(comm).world.meet([0, 1], "late")
    x = comm.bcast(np.empty(300_001), root=2)
    sums.append(float(x.sum()))
    if comm.rank == 0:
        out = comm.recv(np.empty(100_003), source=2)
        sums.append(float(out.sum()))
    return sums


def test_what_was_sent_before_arrives(ranks: RunRanks) -> None:
    found = ranks.survivors(3, takes_part_and_ends, env=on_nodes("2,1"))
    first, second = 2.5 * 300_001, 3.5 * 100_003
    assert found == {0: [7.0, first, second], 1: [7.0, first], 2: [7.0]}


def has_done_its_part_in_short_calls() -> list[float]:
    """Rank 1 gives its part to rank 0, and leaves; rank 2 waits for rank 0."""
    comm = commrt.init()
    core, lengths = core_of(comm), (1, 1, 9, 500)
    sum_of(comm)  # connects the nodes
    if comm.rank == 1:
        for length in lengths:
            comm.reduce(np.ones(length), root=2)
        return []
    while not core.who_died(1):
        core.world.engine.step()
    if comm.rank == 0:
        core.world.meet([0, 2], "late")
        for length in lengths:
            comm.reduce(np.ones(length), root=2)
        return []
    requests = [
        comm.reduce(np.ones(length), root=2, nonblocking=True) for length in lengths
    ]
    assert not any(request.test() for request in requests)
    core.world.meet([0, 2], "late")
    return [float(request.wait().sum()) for request in requests]


def test_short_calls_of_a_rank_that_has_left_count(ranks: RunRanks) -> None:
    found = ranks.survivors(3, has_done_its_part_in_short_calls, env=on_nodes("2,1"))
    assert found == {0: [], 1: [], 2: [3.0, 3.0, 27.0, 1500.0]}


def refuses_its_last_call_and_leaves(algorithm: str | None) -> list[str]:
    """Rank 1 has left before the others call, and had refused its call before."""
    comm = commrt.init()
    core = core_of(comm)
    sum_of(comm)  # connects the nodes
    out = np.empty(5 + (comm.rank == 1))
    while comm.rank != 1 and not core.who_died(1):
        core.world.engine.step()
    with pytest.raises(CommError, match="out has 6 elements") as raised:
        comm.allreduce(np.ones(5), out=out, algorithm=algorithm)
    assert core.comes_to_rest()
    return [type(raised.value).__name__]


@pytest.mark.parametrize("nodes", ["2,1", "1,1,1"])
@pytest.mark.parametrize("algorithm", ["ring", None])
def test_a_rank_that_leaves_after_a_refused_call_has_said_so(
    ranks: RunRanks, nodes: str, algorithm: str | None
) -> None:
    found = ranks.survivors(
        3,
        refuses_its_last_call_and_leaves,
        env=on_nodes(nodes),
        algorithm=algorithm,
    )
    assert found == {0: ["RefusedError"], 1: ["UsageError"], 2: ["RefusedError"]}


def meets_on_machines(dies: int, number: int) -> str:
    """Die in ``init``, where ranks of the other node do not see this process."""
    rank = detect().rank
    liveness.machine_identity = lambda: f"node {int(rank > 1)}"
    return begins(dies, number)


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("dies", [1, 3])
def test_other_nodes_hear_of_a_death_in_init(
    ranks: RunRanks, dies: int, number: int
) -> None:
    arguments = {"dies": dies, "number": number, "env": on_nodes("2,2")}
    heard = ranks.survivors(4, meets_on_machines, **arguments)
    check_heard(heard, 4, dies)


# -- late ranks -----------------------------------------------------------------------


def is_stopped() -> list[Any]:
    comm = commrt.init()
    sum_of(comm)
    world = core_of(comm).world
    assert world.liveness is not None
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ["none", sum_of(comm)]
    request = comm.allreduce(np.array([2.0**comm.rank]), nonblocking=True)
    error = error_of(lambda: request.wait(timeout_s=1.0))
    world.meet([0, 1], "given up")
    if comm.rank == 0:
        process = world.liveness.native.name(2).split()[1]
        os.kill(int(process), signal.SIGCONT)
    return [error[0], float(request.wait()[0])]


def test_a_stopped_rank_is_late_and_not_dead(ranks: RunRanks) -> None:
    assert ranks.survivors(3, is_stopped, env=on_nodes("2,1")) == {
        0: ["TimeoutError_", 7.0],
        1: ["TimeoutError_", 7.0],
        2: ["none", 7.0],
    }


# -- going on -------------------------------------------------------------------------


def last_error(comm: Communicator) -> CommError:
    """Return the error that ends the calls of a rank whose peer dies."""
    while True:
        try:
            comm.allreduce(np.ones(1000))
        except FAILED as error:
            return error


def goes_on(dies: list[int]) -> list[Any]:
    comm = commrt.init()
    sum_of(comm)
    part = comm.split(int(comm.rank in dies))
    core_of(comm).world.meet(range(comm.size), "made")
    if comm.rank in dies:
        die()
    error = last_error(comm)
    left = [rank for rank in range(comm.size) if rank not in dies]
    sums = [sum_of(part), sum_of(comm.create_group(left))]
    flag = comm.agree(7 if comm.rank == left[0] else 5)
    made = comm.shrink()
    comm.free()
    sums += [sum_of(made), sum_of(made.dup())]
    return [type(error).__name__, flag, made.rank, core_of(made).nodes, sums]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(
    ("nodes", "dies", "left"),
    [
        ("2,1", [2], [[0, 1]]),
        ("1,2", [0], [[0, 1]]),
        ("2,2", [1], [[0], [1, 2]]),
        ("2,2", [2, 3], [[0, 1]]),
        ("3,2", [0, 4], [[0, 1], [2]]),
        ("1,1,1", [1], [[0], [1]]),
        ("1,1", [0], [[0]]),
    ],
)
@pytest.mark.parametrize("kind", [RunRanks, StoreRanks])
def test_the_others_go_on(
    tmp_path: Path,
    kind: Callable[[Path], RunRanks],
    nodes: str,
    dies: list[int],
    left: list[list[int]],
) -> None:
    size = sum(map(int, nodes.split(",")))
    found = kind(tmp_path).survivors(size, goes_on, env=on_nodes(nodes), dies=dies)
    old = [rank for rank in range(size) if rank not in dies]
    total = 2.0 ** len(old) - 1
    flag = 5 if len(old) > 1 else 7
    assert found == {
        rank: ["PeerFailedError", flag, number, left, [total] * 4]
        for number, rank in enumerate(old)
    }


def one_after_the_other() -> list[Any]:
    comm = commrt.init()
    first = comm.rank
    sums = [sum_of(comm)]
    for turn in range(comm.size - 1):
        if turn == first:
            die()
        last_error(comm)
        old, comm = comm, comm.shrink()
        old.free()
        sums.append(sum_of(comm))
    return sums


def test_ranks_die_until_one_is_left(ranks: RunRanks) -> None:
    found = ranks.survivors(4, one_after_the_other, env=on_nodes("1,2,1"))
    assert found == {3: [15.0, 7.0, 3.0, 1.0]}


# -- groups of torch ------------------------------------------------------------------


def trains_with_torch(dies: int) -> list[list[str]]:
    dist.init_process_group("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()
    left = [each for each in range(size) if each != dies]
    pair = dist.new_group(left)
    whole = dist.new_group(range(size))
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=whole)
    if rank == dies:
        die()
    pending = dist.all_reduce(torch.ones(70_001), async_op=True)
    said = [
        error_of(lambda: dist.all_reduce(torch.ones(3), group=whole)),
        error_of(pending.wait),
        error_of(lambda: dist.recv(torch.ones(3), dies)),
        error_of(dist.barrier),
    ]
    total = torch.ones(3)
    dist.all_reduce(total, group=pair)
    said.append(["sum", str(total.sum().item())])
    sys.stdout.flush()
    return said


def test_groups_of_torch_name_it(tmp_path: Path) -> None:
    found = StoreRanks(tmp_path).survivors(
        3, trains_with_torch, env=on_nodes("2,1"), dies=2
    )
    assert sorted(found) == [0, 1]
    for *errors, last in found.values():
        assert last == ["sum", "6.0"]
        for kind, text in errors:
            assert kind == "PeerFailedError", errors
            assert re.search(ENDED.format(2), text), errors


# -- the store in which the ranks meet ------------------------------------------------


def loses_the_store() -> list[list[str]]:
    comm = commrt.init()
    sum_of(comm)
    part = comm.split(int(comm.rank == 0))
    comm.barrier()
    if comm.rank == 0:
        die()
    said = [error_of(lambda: sum_of(comm)), error_of(lambda: comm.split(0))]
    said.append(error_of(lambda: part.split(0)))
    total = sum_of(part)
    return [*said, error_of(comm.shrink), ["sum", str(total)]]


@pytest.mark.parametrize("nodes", ["1,2", "3"])
def test_without_the_store_the_survivors_do_not_wait(
    tmp_path: Path, nodes: str
) -> None:
    found = StoreRanks(tmp_path, hosts=False).survivors(
        3, loses_the_store, env=on_nodes(nodes)
    )
    assert sorted(found) == [1, 2]
    for call, split, other, shrink, last in found.values():
        assert last == ["sum", "3.0"]
        for kind, text in (call, split, other, shrink):
            assert kind == "PeerFailedError", found
            assert re.search(ENDED.format(0), text), found
        for _, text in (shrink, other):
            assert "the store in which the ranks meet" in text
            assert "rank 0 may have hosted it" in text


# -- children of the rank ------------------------------------------------------------


def leaves_a_child(how: str) -> list[str]:
    """Rank 1 is killed, and a child of it lives on, which could hold connections."""
    comm = commrt.init()
    sum_of(comm)
    if comm.rank == 1:
        if how == "forked":
            if os.fork() == 0:
                signal.alarm(300)
                signal.pause()
        else:
            subprocess.Popen(["sleep", "300"], close_fds=False)
        die()
    return error_of(lambda: sum_of(comm))


@pytest.mark.parametrize("how", ["forked", "started"])
@pytest.mark.parametrize("nodes", ["1,1,1", "1,2"])
@pytest.mark.full(sample=2)
def test_a_child_of_the_rank_keeps_no_connection_open(
    ranks: RunRanks, how: str, nodes: str
) -> None:
    found = ranks.survivors(3, leaves_a_child, env=on_nodes(nodes), how=how)
    assert sorted(found) == [0, 2]
    for kind, text in found.values():
        assert kind == "PeerFailedError"
        assert re.search(ENDED.format(1), text)


# -- the end of a process, of which a thread waits ------------------------------------


def exits_while_threads_wait() -> str:
    comm = commrt.init()
    sum_of(comm)
    other = comm.dup()
    calls: list[Callable[[], Any]] = [
        lambda: comm.recv(np.empty(3), source=1 - comm.rank),
        lambda: other.recv(np.empty(3), source=1 - comm.rank),
    ]
    for call in calls:
        begun = threading.Event()

        def wait(call: Callable[[], Any] = call, begun: Any = begun) -> None:
            begun.set()
            error_of(call)

        threading.Thread(target=wait, daemon=True).start()
        begun.wait()
    return "leaves"


@pytest.mark.parametrize("nodes", ["2", "1,1"])
def test_a_process_ends_while_its_daemon_threads_wait(
    ranks: RunRanks, nodes: str
) -> None:
    assert ranks(2, exits_while_threads_wait, env=on_nodes(nodes)) == ["leaves"] * 2
