# SPDX-License-Identifier: Apache-2.0
"""Collectives of processes that share a GPU: staged, by memory of peers, by NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import OWN_HOST, draw, say_own_host, wrong_results
from run_ranks import RunRanks

DEADLINE_S = 300.0


def collectives(algorithm: str | None, seed: int, number: int) -> dict[str, Any]:
    """Run cases of every operation that has the algorithm on this rank."""
    import commrt
    from commrt import algorithms
    from commrt.devices import DeviceStream
    from commrt.devices.registry import cuda_device

    say_own_host()
    comm = commrt.init()
    gpu = cuda_device(0)
    with DeviceStream(gpu) as stream:
        name = (algorithm or "").partition("/")[2]
        cases = [
            case
            for case in draw(comm.size, seed, number)
            if name in ("", "native") or name in algorithms.names(case.coll, comm.size)
        ]
        found = wrong_results(comm, gpu, cases, stream, algorithm)
        told = comm.explain("allreduce", 4096, device="cuda")
        found["choice"] = str(told.choice.candidate)
        found["told"] = str(told)
    comm.barrier()
    comm.free()
    return found


def check(found: list[dict[str, Any]], least_made: int) -> None:
    assert [line for each in found for line in each["wrong"]] == []
    assert all(each["made"] >= least_made for each in found), found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_staged_calls(size: int, seed: int, ranks: RunRanks) -> None:
    found = ranks(
        *(size, collectives),
        deadline_s=DEADLINE_S,
        algorithm="staged/direct",
        seed=seed,
        number=3,
    )
    check(found, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_memory_of_peers_is_taken_unasked(
    size: int, seed: int, ranks: RunRanks
) -> None:
    found = ranks(
        *(size, collectives),
        deadline_s=DEADLINE_S,
        algorithm=None,
        seed=seed,
        number=4,
    )
    check(found, 4)
    assert all(each["choice"].startswith("ipc/direct") for each in found), found[0]


@pytest.mark.parametrize("algorithm", ["ipc/direct", "ipc/ring"])
def test_memory_of_peers(algorithm: str, seed: int, ranks: RunRanks) -> None:
    found = ranks(
        *(2, collectives),
        deadline_s=DEADLINE_S,
        algorithm=algorithm,
        seed=seed,
        number=4,
    )
    check(found, 4)


def test_nccl_with_one_rank(seed: int, nccl_ranks: RunRanks) -> None:
    found = nccl_ranks(
        *(1, collectives),
        deadline_s=DEADLINE_S,
        algorithm="nccl/native",
        seed=seed,
        number=4,
    )
    check(found, 4)


@pytest.mark.parametrize("algorithm", ["nccl/native", "nccl/direct", "nccl/ring"])
def test_nccl_with_two_ranks_that_say_they_are_two_hosts(
    algorithm: str, seed: int, nccl_ranks: RunRanks
) -> None:
    found = nccl_ranks(
        *(2, collectives),
        env=OWN_HOST,
        deadline_s=DEADLINE_S,
        algorithm=algorithm,
        seed=seed,
        number=2,
    )
    check(found, 4)


def messages() -> list[str]:
    """Send every rank arrays of different lengths in one list, twice."""
    import commrt
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device

    say_own_host()
    comm = commrt.init()
    gpu = cuda_device(0)
    lengths = [1, 20_001, 7]
    wrong = []
    with DeviceStream(gpu) as stream:
        for again in range(2):
            sends, recvs = [], []
            for peer in range(comm.size):
                for length in lengths:
                    x = DeviceArray(gpu, length, "float32")
                    value = 100 * again + 10 * comm.rank + peer
                    x.put(np.full(length, value, "float32"))
                    sends.append((x, peer))
                    recvs.append((DeviceArray(gpu, length, "float32"), peer))
            comm.multi_sendrecv(sends=sends, recvs=recvs, backend="nccl")
            stream.synchronize()
            wrong += [
                f"{out.get()[:3]} on rank {comm.rank} from {peer}"
                for out, peer in recvs
                if (out.get() != 100 * again + 10 * peer + comm.rank).any()
            ]
    comm.barrier()
    comm.free()
    return wrong


def test_messages_by_nccl(nccl_ranks: RunRanks) -> None:
    found = nccl_ranks(2, messages, env=OWN_HOST, deadline_s=DEADLINE_S)
    assert found == [[], []]


def test_nccl_with_two_ranks_on_a_gpu(seed: int, nccl_ranks: RunRanks) -> None:
    from commrt.nccl import libnccl

    found_library = libnccl.find()
    if found_library.version < 23000:
        pytest.skip(f"NCCL {found_library.version} takes one rank on a GPU")
    found = nccl_ranks(
        *(2, collectives),
        env={"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"},
        deadline_s=DEADLINE_S,
        algorithm="nccl/native",
        seed=seed,
        number=2,
    )
    check(found, 4)
