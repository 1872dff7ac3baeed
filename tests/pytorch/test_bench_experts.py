# SPDX-License-Identifier: Apache-2.0
"""The benchmark of mixtures of experts measures each way, of equal results."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from commrt.bench import experts, peer_deepspeed
from commrt.errors import UsageError
from commrt.layers.experts import MoE
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

DEADLINE_S = 300.0


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    wanted = experts.workloads([6], [8], [4], [2], experts.ROUTINGS)
    rows = experts.measure(wanted, 2, with_deepspeed=False, least_s=1e-3)
    dist.destroy_process_group()
    return [
        [row["workload"], [*row["us"]], all(us > 0 for us in row["us"]["commrt"])]
        for row in rows
    ]


def refused_alone() -> str:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    wanted = experts.workloads([6], [8], [4], [2], ["even"])
    with pytest.raises(UsageError, match="start two at least") as caught:
        experts.measure(wanted, 2)
    dist.destroy_process_group()
    return str(caught.value)


def test_a_mixture_of_experts_is_measured_beside_one_that_sends_nothing(
    torchrun: Any,
) -> None:
    expected = [
        [f"8x6, 12 hidden, 4 experts, top 2, {routing}", ["commrt", "alone"], True]
        for routing in experts.ROUTINGS
    ]
    assert torchrun(3, measured, deadline_s=DEADLINE_S) == [expected] * 3


def test_a_benchmark_of_experts_needs_two_ranks(torchrun: Any) -> None:
    (said,) = torchrun(1, refused_alone, deadline_s=DEADLINE_S)
    assert "one rank sends nothing" in said


@pytest.mark.parametrize("top_k", [1, 2])
def test_even_tokens_choose_evenly_on_every_rank(top_k: int) -> None:
    """So DeepSpeed, whose capacity is a rank's, drops nothing and pads nothing."""
    workload = experts.workloads([9], [12], [4], [top_k], ["even"])[0]

    def main(comm: Any) -> tuple[list[int], int]:
        with ProcessGrid(comm, {"expert": 0}) as grid:
            moe = MoE(9, 4, 3, grid=grid, top_k=top_k, capacity_factor=1.0)
            with torch.no_grad():
                moe.router.weight.copy_(experts._even_router(workload))
            x, _ = experts._tokens(workload, comm.rank)
            own = torch.bincount(moe.router(x).experts.reshape(-1), minlength=4)
            return own.tolist(), moe(x).num_dropped

    assert run(2, main) == [([3 * top_k] * 4, 0)] * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([6], [8], [4], [3], ["drawn"]), "top_k=3 of 4 experts; expected 1 or 2"),
        (([6], [8], [1], [2], ["drawn"]), "top_k=2 of 1 experts"),
        (([6], [9], [4], [2], ["even"]), "9 tokens of 6 features cannot choose 4"),
        (([3], [8], [4], [2], ["even"]), "8 tokens of 3 features cannot choose 4"),
    ],
)
def test_sizes_that_no_layer_has(sizes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        experts.workloads(*sizes)


def test_numbers_of_experts_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        experts.main(["--experts", "0"])
    assert "0: expected numbers from 1" in capsys.readouterr().err


def test_without_deepspeed_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UsageError, match="DS_BUILD_OPS=0 pip install") as caught:
        peer_deepspeed.begin()
    assert peer_deepspeed.REQUIREMENTS in str(caught.value)


def test_refused_workloads_have_a_table_of_their_own() -> None:
    us = {"commrt": [1.0], "alone": [2.0]}
    beside = {"workload": "a", "us": us | {"DeepSpeed, gloo": [4.0]}}
    refused = {"workload": "b", "us": us, "refusal": "7 experts"}
    first, _, second, third, last = experts._text([refused, beside]).splitlines()
    assert "DeepSpeed, gloo" in first
    assert "DeepSpeed, gloo" not in second
    assert third.split() == ["b", "1.0", "2.0", "0.500"]
    assert last == "DeepSpeed refuses these: 7 experts"
