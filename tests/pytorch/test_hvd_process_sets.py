# SPDX-License-Identifier: Apache-2.0
"""Process sets of commrt.hvd, and who a process is among the others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hvd_cases import drawn, on_ranks

import commrt.hvd as hvd
from commrt.comm import Communicator
from commrt.errors import CommError, MismatchError, RefusedError, UsageError
from commrt.local import run


def test_a_set_runs_operations_of_its_ranks() -> None:
    def main() -> None:
        rank = hvd.rank()
        evens = hvd.add_process_set(hvd.ProcessSet([2, 0]))
        odds = hvd.add_process_set([1, 3])
        own, other = (odds, evens) if rank % 2 else (evens, odds)
        assert own.ranks == [rank % 2, rank % 2 + 2]
        assert (own.size(), own.rank(), own.included()) == (2, rank // 2, True)
        assert (other.size(), other.rank(), other.included()) == (2, None, False)
        x = drawn(rank, 4)
        both = torch.stack([drawn(r, 4) for r in own.ranks])
        assert torch.equal(hvd.allreduce(x, process_set=own), both.sum(0) / 2)
        assert torch.equal(hvd.allgather(x, process_set=own), both.view(-1))
        root = own.ranks[1]
        assert torch.equal(hvd.broadcast(x, root, process_set=own), both[1])
        half = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        moved = hvd.alltoall(x, process_set=own)
        assert torch.equal(moved, both[:, half].reshape(-1))
        part = hvd.reducescatter(x, op=hvd.Sum, process_set=own)
        assert torch.equal(part, both.sum(0)[half])
        assert hvd.broadcast_object(rank, root, process_set=own) == root
        assert hvd.allgather_object(rank, process_set=own) == own.ranks
        hvd.barrier(own)
        with pytest.raises(UsageError, match=f"rank {rank} is not in process set"):
            hvd.allreduce(x, process_set=other)
        with pytest.raises(UsageError, match=r"root_rank=.* must be one of the ranks"):
            hvd.broadcast(x, (rank + 1) % 4, process_set=own)

    on_ranks(4, main)


def test_ranks_wait_for_operations_of_sets_in_any_order() -> None:
    """Each wait takes part in the rounds of all sets."""

    def main() -> None:
        rank = hvd.rank()
        sets = [hvd.global_process_set]
        sets += [hvd.add_process_set(each) for each in ([0, 1], [1, 2], [0, 2])]
        mine = [each for each in sets if each.included()]
        draws = random.Random(rank)
        for step in range(10):
            starts = [(each, n) for each in mine for n in range(3)]
            draws.shuffle(starts)
            handles: list[tuple[Any, int, hvd.Handle]] = []
            for each, n in starts:
                x = torch.tensor([float(10 * rank + n)])
                name = f"{n}.{step % 2}"
                handle = hvd.allreduce_async(x, name=name, op=hvd.Sum, process_set=each)
                handles.append((each, n, handle))
            draws.shuffle(handles)
            for each, n, handle in handles:
                right = sum(10 * r + n for r in each.ranks)
                assert hvd.synchronize(handle).item() == right

    on_ranks(3, main)


def test_sets_are_removed() -> None:
    def main() -> None:
        first = hvd.add_process_set([0, 1])
        number = first.process_set_id
        with pytest.raises(UsageError, match=f"process set {number} has the ranks"):
            hvd.add_process_set([1, 0])
        handle = None
        if hvd.rank() == 1:
            handle = hvd.allreduce_async(torch.ones(1), name="x", process_set=first)
        with pytest.raises(UsageError, match=r"not over: \{1: \['x'\]\}"):
            hvd.remove_process_set(first)
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="x", process_set=first)
        if handle is not None:
            hvd.synchronize(handle)
        assert hvd.remove_process_set(first)
        assert first.process_set_id is None
        assert (first.size(), first.rank()) == (None, None)
        assert not hvd.remove_process_set(first)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(UsageError, match=r"not added since hvd\.init\(\), or is"):
            hvd.allreduce(torch.ones(1), process_set=first)
        again = hvd.add_process_set([0, 1])
        assert again.process_set_id == 2

    on_ranks(3, main)


def test_wrong_sets_are_refused_on_all_ranks() -> None:
    def main() -> None:
        with pytest.raises(MismatchError, match="gave different process sets"):
            hvd.add_process_set([0, hvd.rank()])
        for ranks in ([0, 2], [-1], [0, 0], []):
            with pytest.raises(UsageError, match="add_process_set: ranks="):
                hvd.add_process_set(ranks)
        for wrong in (3, ["a"], None):
            with pytest.raises(UsageError, match="must be a list of ranks"):
                hvd.ProcessSet(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="must be a ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=[0, 1])  # type: ignore[arg-type]
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    on_ranks(2, main)


def test_init_adds_sets_and_may_come_again() -> None:
    def main(comm: Communicator) -> None:
        assert not hvd.is_initialized()
        with pytest.raises(UsageError, match=r"call hvd\.init\(\) first"):
            hvd.size()
        assert hvd.global_process_set.ranks is None
        assert hvd.ProcessSet([0]).included() is None
        pair = hvd.ProcessSet([0, 1])
        hvd.init(comm, [pair])
        hvd.init(comm)
        assert hvd.is_initialized()
        assert pair.size() == 2
        assert hvd.global_process_set.ranks == [0, 1, 2]
        assert hvd.global_process_set.included()
        hvd.shutdown()
        hvd.shutdown()
        with pytest.raises(UsageError, match="process set 0 has the ranks"):
            hvd.init(comm, [hvd.ProcessSet([2, 1, 0])])
        assert not hvd.is_initialized()
        hvd.init(comm)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
        hvd.shutdown()

    run(3, main)


def test_init_refuses_what_does_not_fit() -> None:
    def main(comm: Communicator) -> None:
        for options, match in (
            ({"fusion_nbytes": -1}, "fusion_nbytes=-1 must be a whole number"),
            ({"fusion_nbytes": 1.5}, "fusion_nbytes=1.5 must be"),
            ({"cache_capacity": None}, "cache_capacity=None must be"),
            ({"stall_warning_s": 0}, "must be a number of seconds"),
        ):
            with pytest.raises(UsageError, match=match):
                hvd.init(comm, **options)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is a list of ranks"):
            hvd.init([0, 1])  # type: ignore[arg-type]
        with pytest.raises(MismatchError, match="different fusion_nbytes"):
            hvd.init(comm, fusion_nbytes=comm.rank)
        with hvd.Session(comm, fusion_nbytes=64) as session:
            assert "1 sets" in repr(session)
        assert "closed" in repr(session)

    run(2, main)


def test_ranks_of_one_node_count_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "nodes", [[0, 1], [2]])

    def main() -> tuple[int, ...]:
        assert not hvd.is_homogeneous()
        local = hvd.local_rank(), hvd.local_size()
        return (hvd.rank(), hvd.size(), *local, hvd.cross_rank(), hvd.cross_size())

    assert on_ranks(3, main) == [
        (0, 3, 0, 2, 0, 2),
        (1, 3, 1, 2, 0, 1),
        (2, 3, 0, 1, 1, 2),
    ]


def test_scripts_may_ask_what_is_there() -> None:
    def main() -> None:
        assert not hvd.mpi_enabled()
        assert not hvd.mpi_threads_supported()
        assert hvd.gloo_enabled() == hvd.gloo_built()
        assert hvd.mpi_built() in (True, False)
        assert hvd.nccl_built() >= 0
        assert hvd.cuda_built() == (torch.version.cuda is not None)
        assert not any(built() for built in (hvd.rocm_built, hvd.ddl_built))
        assert not hvd.ccl_built()
        for call in (lambda: hvd.start_timeline("x.json"), hvd.stop_timeline):
            with pytest.raises(UsageError, match="COMMRT_TRACE"):
                call()

    on_ranks(1, main)


def test_sets_are_added_and_removed_while_others_wait() -> None:
    def main() -> None:
        rank = hvd.rank()
        for step in range(2):
            for name in ("add", "remove"):
                handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
                if rank == step:
                    assert hvd.synchronize(handle).tolist() == [3, 3]
                if name == "add":
                    pair = hvd.add_process_set([0, 1])
                else:
                    assert hvd.remove_process_set(pair)
                assert hvd.synchronize(handle).tolist() == [3, 3]

    on_ranks(3, main, limit_s=240)


def test_a_set_that_one_rank_refuses_is_refused_on_all() -> None:
    def main() -> None:
        rank = hvd.rank()
        wrong: Any = [0, 1] if rank else ["a"]
        with pytest.raises(CommError, match="must be a list of ranks"):
            hvd.add_process_set(wrong)
        pair = hvd.ProcessSet([0, 1])
        change: Any = hvd.remove_process_set if rank else hvd.add_process_set
        with pytest.raises(MismatchError, match="op: add on rank 0; remove on ranks 1"):
            change(pair)
        assert hvd.add_process_set(pair).process_set_id == 1

    on_ranks(3, main, limit_s=240)


def test_a_set_belongs_to_its_session() -> None:
    def main(comm: Communicator) -> None:
        hvd.init(comm, fusion_nbytes=64)
        pair = hvd.add_process_set([0, 1])
        assert pair.process_set_id == 1
        hvd.shutdown()
        assert pair.process_set_id is None
        hvd.init(comm, [[1, 2]], fusion_nbytes=64)  # type: ignore[list-item]
        assert pair.process_set_id is None
        with pytest.raises(UsageError, match="was not added since"):
            hvd.allreduce(torch.ones(1), process_set=pair)
        assert not hvd.remove_process_set(pair)
        assert hvd.add_process_set(pair).process_set_id == 2
        hvd.shutdown()

    run(3, main)


def test_init_refuses_on_all_ranks_what_one_cannot_use() -> None:
    def main(comm: Communicator) -> None:
        wrong = comm.rank == 1
        options: list[tuple[dict[str, Any], str]] = [
            ({"fusion_nbytes": -1 if wrong else 8}, "fusion_nbytes=-1 must be"),
            ({"cache_capacity": 1.5 if wrong else 8}, "cache_capacity=1.5 must be"),
            ({"stall_warning_s": 0 if wrong else 8}, "must be a number of seconds"),
            ({"process_sets": [[0]] if wrong else None}, "numbers of process_sets"),
            ({"process_sets": 3 if wrong else None}, "numbers of process_sets"),
            ({"process_sets": 3}, "process_sets=3 must be a list"),
            ({"process_sets": [["a" if wrong else 0]]}, "must be a list of ranks"),
        ]
        for each, match in options:
            kind: type[CommError] = CommError
            if "process_sets" not in each:
                kind = UsageError if wrong else RefusedError
            with pytest.raises(kind, match=match):
                hvd.init(comm, **{"fusion_nbytes": 8, **each})
            assert not hvd.is_initialized()

    run(2, main)
