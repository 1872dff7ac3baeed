# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on commrt: ZeRO, mixtures of experts, pipelines."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_calls import Calls, calls, nbytes_of
from client_programs import DEADLINE_S, Program
from client_training import (
    ROWS,
    STEPS,
    WIDTH,
    Expert,
    Mixture,
    alone,
    batch,
    front,
    gate,
    head,
    loss_of,
    net,
    optimizer_of,
    part,
)
from torch import nn

import commrt

PROGRAM = Program("DeepSpeed", "deepspeed")
pytestmark = PROGRAM.marks
SETTINGS = {"DS_ACCELERATOR": "cpu"}
E = 4
"""Bytes of an element."""


def started() -> Any:
    """Start the default group of all ranks, and return DeepSpeed."""
    import deepspeed

    # It would compile an allreduce of its own, which only inference calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("commrt")
    assert dist.get_backend() == "commrt"
    return deepspeed


def configuration(size: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // size,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by itself it clips at 1
        "wall_clock_breakdown": False,
        **more,
    }


def trained(engine: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        x, y = part(step, dist.get_rank(), dist.get_world_size())
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- ZeRO ----------------------------------------------------------------------------


OWNERS = {"use_multi_rank_bucket_allreduce": False}
AT_ONCE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
KINDS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"stage": 0},
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2, "overlap_comm": True},
    "ZeRO-2, reduced to owners": {"stage": 2, "overlap_comm": False, **OWNERS},
    "ZeRO-3, parameters kept for the backward pass": {"stage": 3},
    "ZeRO-3, parameters freed at once": {"stage": 3, **AT_ONCE},
}


PASSES = dict(
    zip(
        KINDS,
        [
            *((STEPS, 0), (STEPS, STEPS), (STEPS, STEPS), (STEPS, STEPS)),
            *((0, 2 * STEPS + 1), (0, 3 * STEPS)),
        ],
        strict=True,
    )
)
"""How often all parameters' bytes pass in the training: as they are, and padded."""


def zero(folder: str) -> list[list[float]]:
    """Train with each kind of ZeRO, one after the other."""
    deepspeed = started()
    found = []
    for kind, options in KINDS.items():
        model = net()
        given = {"stage3_param_persistence_threshold": 0, **options}
        config = configuration(dist.get_world_size(), zero_optimization=given)
        with commrt.trace.record(f"{folder}/{kind}"):
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer_of(model.parameters()), config=config
            )
            found.append(trained(engine))
    return found


def rounded(count: int, multiple: int) -> int:
    """Return the bytes of so many float32, with what makes them a multiple."""
    return E * multiple * math.ceil(count / multiple)


def zero_formula(kind: str, size: int) -> Calls:
    """Return what all steps call by the formulas.

    With P bytes of parameters a step of ZeRO-0 has an allreduce of P; ZeRO-1 and 2 an
    allreduce of P, or what is a reduce_scatter of P in pieces, and an allgather of P;
    ZeRO-3 two allgathers of P and a reduce_scatter of P, or one allgather where it may
    keep what it has gathered. What it gathers and scatters it pads: ZeRO-1 and 2 all of
    it to two elements per rank, ZeRO-3 each parameter to one.
    """
    ranks, counts = range(size), [p.numel() for p in net().parameters()]
    each = [rounded(count, size) for count in counts]
    whole, padded = E * sum(counts), rounded(sum(counts), 2 * size)
    place = "engine" if kind == "ZeRO-0" else "stage_1_and_2"
    summed = calls(f"{place}.allreduce_bucket", "allreduce", ranks, whole, times=STEPS)
    again = ("utils.all_gather_into_tensor_dp_groups", "allgather", ranks)
    gather = ("partition_parameters._dist_allgather_fn", "allgather", ranks)
    scatter = (
        "coalesced_collectives._torch_reduce_scatter_fn",
        "reduce_scatter",
        ranks,
    )
    if kind == "ZeRO-0":
        return summed
    if not kind.startswith("ZeRO-3"):
        if "owners" in kind:
            parts = [padded // size] * (size - 1)
            parts.append(whole - sum(parts))
            summed = calls(
                *("stage_1_and_2.allreduce_bucket", "reduce", ranks),
                *parts,
                times=STEPS,
            )
        return summed + calls(*again, padded, times=STEPS)
    # A layer's weight and bias are gathered together, forwards and again backwards.
    layers = [sum(each[at : at + 2]) for at in range(0, len(each), 2)]
    twice, once = [*layers, *layers], [sum(layers)]
    gathered = calls(*gather, *twice, times=STEPS)
    if "kept" in kind:  # in the first step it learns when they are needed
        gathered = calls(*gather, *twice) + calls(*gather, *once, times=STEPS - 1)
    return gathered + calls(*scatter, sum(each), times=STEPS)


def zero_beside(kind: str, size: int) -> Calls:
    """Return what is called beside: to begin with, for norms, to agree on the order."""
    ranks, counts = range(size), [p.numel() for p in net().parameters()]
    all_equal = calls(
        *("engine._broadcast_model", "bcast", ranks), *(E * count for count in counts)
    )
    if kind == "ZeRO-0":
        return all_equal
    if not kind.startswith("ZeRO-3"):
        norm = ("stage_1_and_2.get_grad_norm_direct", "allreduce", ranks, E)
        return all_equal + calls(*norm, times=STEPS)
    cut = calls(
        "partition_parameters._zero_init_param",
        *("bcast", ranks),
        *(E * count for count in counts),
    )
    barrier = ("barrier", ranks, 0)
    cut += calls("stage3._create_fp16_partitions_with_defragmentation", *barrier)
    cut += calls("stage3._setup_for_real_optimizer", *barrier, times=2)
    cut += calls(
        "partition_parameters._allgather_params_sequential",
        *("allgather", ranks),
        *(rounded(count, size) for count in counts),
    )
    norms = calls("stage3.get_grad_norm_direct", "allreduce", ranks, 8, times=STEPS)
    # Ranks agree on the order of modules, at first none; then on that of a step, in
    # which each is met twice, and on the parameters, and when each was last used.
    modules, fetched = 2 * len(list(net().modules())), 2 * len(counts)
    lengths = ("utils.assert_lst_len_same_as_other_ranks", "bcast", ranks, 8)
    lists = ("utils.get_lst_from_rank0", "bcast", ranks)
    order = calls(*lengths, times=4)
    order += calls(*lists, 0, 8 * modules, 8 * fetched, 8 * fetched)
    return all_equal + cut + norms + order


@pytest.mark.parametrize("size", [2, 4])
def test_zero(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, size: int
) -> None:
    got = torchrun(
        size, zero, env=SETTINGS, deadline_s=DEADLINE_S, folder=str(tmp_path)
    )
    for kind, ranks in zip(KINDS, zip(*got, strict=True), strict=True):
        compare(f"{PROGRAM}, {kind}", alone(), ranks)
        formula = zero_formula(kind, size)
        account(f"{PROGRAM}, {kind}", tmp_path / kind, formula, zero_beside(kind, size))
        plain, padded = PASSES[kind]
        counts = [p.numel() for p in net().parameters()]
        padding = sum(rounded(count, size) - E * count for count in counts)
        if not kind.startswith("ZeRO-3"):
            padding = rounded(sum(counts), 2 * size) - E * sum(counts)
        textbook = (plain + padded) * E * sum(counts)
        assert nbytes_of(formula) == textbook + padded * padding


# -- mixtures of experts -------------------------------------------------------------


class Mixed(nn.Module):
    """A mixture of DeepSpeed's, between a layer before it and one behind it."""

    def __init__(self, experts: int, ep_size: int, k: int, drops: bool) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.front = front()
        self.mixture = MoE(
            hidden_size=Expert().up.in_features,
            expert=Expert(),
            num_experts=experts,
            ep_size=ep_size,
            k=k,
            # Room for all rows at each expert, so that none is dropped.
            capacity_factor=experts / k,
            min_capacity=0,
            drop_tokens=drops,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self.head = head()
        layer = self.mixture.deepspeed_moe
        layer.gate.wg.load_state_dict(gate(experts).state_dict())
        mine = dist.get_rank() % ep_size
        each = layer.experts.deepspeed_experts
        for at, expert in enumerate(each):
            expert.load_state_dict(Expert(mine * len(each) + at).state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return five numbers for each row."""
        found: torch.Tensor = self.head(self.mixture(self.front(x))[0])
        return found


def mixtures(cases: list[dict[str, int]], folder: str) -> list[list[float]]:
    """Train each mixture, one after the other."""
    deepspeed = started()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    found = []
    for number, case in enumerate(cases):
        model = Mixed(case["experts"], case["ep_size"], case["k"], bool(case["drops"]))
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        config = configuration(
            dist.get_world_size(), zero_optimization={"stage": case["stage"]}
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(groups), config=config
        )
        with commrt.trace.record(f"{folder}/{number}"):
            found.append(trained(engine))
    return found


MIXTURES = {
    2: [
        {"experts": 2, "ep_size": 2, "k": 1, "drops": 0, "stage": 0},
        {"experts": 4, "ep_size": 2, "k": 2, "drops": 1, "stage": 0},
        {"experts": 2, "ep_size": 2, "k": 2, "drops": 0, "stage": 2},
    ],
    4: [
        {"experts": 4, "ep_size": 4, "k": 2, "drops": 0, "stage": 0},
        {"experts": 4, "ep_size": 2, "k": 1, "drops": 0, "stage": 0},
        {"experts": 4, "ep_size": 4, "k": 1, "drops": 1, "stage": 0},
    ],
}


def mixture_formula(
    case: dict[str, int], size: int, chosen: list[torch.Tensor], rank: int
) -> Calls:
    """Return four all-to-alls a step, and what gradients are summed in.

    Rows go to their experts and come back, forwards and backwards, each time with an
    expert's capacity for every expert: rows times k, over the experts, times the
    capacity factor; where nothing may be dropped, what goes to the most wanted expert
    from any rank. Gradients of experts are summed by the ranks that have the same ones.
    """
    mine = sharing(case, rank)
    found: Calls = Calls()
    for step in chosen:
        capacity = ROWS // size
        if not case["drops"]:
            parts = step.chunk(size)
            capacity = max(int(parts[member].sum(dim=0).max()) for member in mine)
        block = E * case["experts"] * capacity * WIDTH
        found += calls("sharded_moe.forward", "alltoall", mine, block, times=4)
    place = "stage_1_and_2" if case["stage"] else "engine"
    summed = (f"{place}.allreduce_bucket", "allreduce")
    replicas = range(rank % case["ep_size"], size, case["ep_size"])
    dense, experts = mixture_counts(case)
    found += calls(*summed, range(size), E * dense, times=STEPS)
    found += calls(*summed, replicas, E * experts, times=STEPS)
    if case["stage"]:
        again = ("utils.all_gather_into_tensor_dp_groups", "allgather", range(size))
        found += calls(*again, rounded(dense, 2 * size), times=STEPS)
    return found


def mixture_beside(case: dict[str, int], size: int, rank: int) -> Calls:
    """Return what is called to agree on the capacity, and for norms."""
    found: Calls = Calls()
    if not case["drops"]:
        place = f"sharded_moe.top{case['k']}gating"
        found += calls(place, "allreduce", sharing(case, rank), 8, times=STEPS)
    if case["stage"]:
        norm = ("stage_1_and_2.get_grad_norm_direct", "allreduce", range(size))
        found += calls(*norm, E, times=2 * STEPS)  # of experts apart from others
        replicas = range(rank % case["ep_size"], size, case["ep_size"])
        mean = ("stage_1_and_2._average_expert_grad_norms", "allreduce", replicas)
        found += calls(*mean, E, times=STEPS)
    return found


def sharing(case: dict[str, int], rank: int) -> range:
    """Return the ranks among which a rank's experts are distributed."""
    first = rank - rank % case["ep_size"]
    return range(first, first + case["ep_size"])


def mixture_counts(case: dict[str, int]) -> tuple[int, int]:
    """Return the parameters of what all ranks have, and of a rank's experts."""
    common = (front(), gate(case["experts"]), head())
    dense = sum(p.numel() for layer in common for p in layer.parameters())
    one = sum(p.numel() for p in Expert().parameters())
    return dense, one * case["experts"] // case["ep_size"]


@pytest.mark.parametrize("size", [2, 4])
def test_mixtures_of_experts(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, size: int
) -> None:
    cases = MIXTURES[size]
    got = torchrun(
        *(size, mixtures),
        env=SETTINGS,
        deadline_s=DEADLINE_S,
        cases=cases,
        folder=str(tmp_path),
    )
    for number, (case, *ranks) in enumerate(zip(cases, *got, strict=True)):
        mixture = Mixture(case["experts"], case["k"])
        want = alone(nn.Sequential(front(), mixture, head()))
        how = ", ".join(f"{name} {value}" for name, value in case.items())
        what = f"{PROGRAM}, MoE ({how})"
        compare(what, want, ranks)
        formula = partial(mixture_formula, case, size, mixture.chosen)
        beside = partial(mixture_beside, case, size)
        account(what, tmp_path / str(number), formula, beside)


# -- pipelines -----------------------------------------------------------------------

MICROBATCHES = 4


def layers() -> list[nn.Module]:
    model = net()
    return [
        nn.Sequential(model.first, nn.Tanh()),
        nn.Sequential(model.second, nn.Tanh()),
        model.third,
    ]


def pipeline(stages: int) -> list[float]:
    """Train, with a log of the whole process: COMMRT_TRACE is set."""
    deepspeed = started()
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(
        layers=layers(), num_stages=stages, loss_fn=loss_of, partition_method="uniform"
    )
    replicas = dist.get_world_size() // stages
    config = configuration(replicas * MICROBATCHES, train_batch_size=ROWS)
    config["gradient_accumulation_steps"] = MICROBATCHES
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model.parameters()), config=config
    )
    replica = engine.grid.get_data_parallel_id()
    losses = []
    for step in range(STEPS):
        x, y = (each.chunk(replicas)[replica] for each in batch(step))
        rows = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        losses.append(float(engine.train_batch(rows)))
    return losses


def stage_counts() -> list[list[int]]:
    """Return the parameters of each stage: the first of two has two layers."""
    one, two, three = ([p.numel() for p in layer.parameters()] for layer in layers())
    return [[*one, *two], three]


def place_of(size: int, rank: int) -> tuple[int, int, range]:
    """Return a rank's stage of two, the rank it talks to, and those of its stage."""
    replicas = size // 2
    stage, replica = divmod(rank, replicas)
    other = (1 - stage) * replicas + replica
    return stage, other, range(stage * replicas, (stage + 1) * replicas)


def pipeline_formula(size: int, rank: int) -> Calls:
    """Return a message per micro-batch, boundary and direction, and gradients' sums."""
    stage, other, peers = place_of(size, rank)
    rows = ROWS // len(peers) // MICROBATCHES
    block = E * rows * net().third.in_features
    sends, receives = "_exec_send_activations", "_exec_recv_grads"
    if stage:
        sends, receives = "_exec_send_grads", "_exec_recv_activations"
    times = STEPS * MICROBATCHES
    found = calls(f"engine.{sends}", "send", (rank, other), block, times=times)
    found += calls(f"engine.{receives}", "recv", (other, rank), block, times=times)
    nbytes = E * sum(stage_counts()[stage])
    return found + calls(
        *("engine.allreduce_bucket", "allreduce", peers, nbytes), times=STEPS
    )


def pipeline_beside(size: int, rank: int) -> Calls:
    """Return what is called to begin with, and to tell all ranks the loss."""
    stage, other, peers = place_of(size, rank)
    ends = first, _ = min(rank, other), max(rank, other)
    found = calls(
        *("engine._broadcast_model", "bcast", peers),
        *(E * count for count in stage_counts()[stage]),
    )
    # How many parameters there are in all, and how many are the same in several stages.
    found += calls("engine.__init__", "allreduce", ends, 16)
    # A message so that there is a connection, and one with types and shapes.
    way = "send" if rank == first else "recv"
    found += calls("engine.__init__", way, ends, 4)
    found += calls(f"engine._{way}_tensor_meta", way, ends, 1024)
    total = "engine._aggregate_total_loss"
    if stage and len(peers) > 1:
        found += calls(total, "allreduce", peers, E, times=STEPS)
    return found + calls(total, "bcast", ends, 2 * E, times=STEPS)


@pytest.mark.parametrize("size", [2, 4])
def test_pipeline(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, size: int
) -> None:
    settings = {**SETTINGS, "COMMRT_TRACE": str(tmp_path / "log")}
    got = torchrun(size, pipeline, env=settings, deadline_s=DEADLINE_S, stages=2)
    what = f"{PROGRAM}, PipelineModule of 2 stages"
    compare(what, alone(), got)
    assert all(each == got[0] for each in got), "every rank is told the same loss"
    formula, beside = partial(pipeline_formula, size), partial(pipeline_beside, size)
    account(what, tmp_path / "log", formula, beside)
