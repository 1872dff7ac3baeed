# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on commrt: ZeRO, mixtures of experts, pipelines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_training import (
    ROWS,
    STEPS,
    Expert,
    Mixture,
    alone,
    batch,
    gate,
    head,
    loss_of,
    net,
    optimizer_of,
    part,
)
from torch import nn

NAME = "deepspeed"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec(NAME) is None,
        reason=f"{NAME} is not installed; make test-clients installs it",
    ),
]
DEADLINE_S = 240.0
SETTINGS = {"DS_ACCELERATOR": "cpu"}


def version() -> str:
    return f"DeepSpeed {importlib.metadata.version(NAME)}"


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


STAGES = (0, 1, 2, 3)


def zero() -> list[list[float]]:
    """Train with each stage of ZeRO, one after the other."""
    deepspeed = started()
    found = []
    for stage in STAGES:
        model = net()
        config = configuration(
            dist.get_world_size(),
            zero_optimization={
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "overlap_comm": stage == 2,
            },
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(model.parameters()), config=config
        )
        found.append(trained(engine))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_zero(torchrun: Any, compare: Any, size: int) -> None:
    got = torchrun(size, zero, env=SETTINGS, deadline_s=DEADLINE_S)
    for stage, ranks in zip(STAGES, zip(*got, strict=True), strict=True):
        compare(f"{version()}, ZeRO-{stage}", alone(), ranks)


# -- mixtures of experts -------------------------------------------------------------


class Mixed(nn.Module):
    """A mixture of DeepSpeed's, with the layer behind it."""

    def __init__(self, experts: int, ep_size: int, k: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.mixture = MoE(
            hidden_size=Expert().up.in_features,
            expert=Expert(),
            num_experts=experts,
            ep_size=ep_size,
            k=k,
            min_capacity=0,
            drop_tokens=False,
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
        found: torch.Tensor = self.head(self.mixture(x)[0])
        return found


def mixtures(cases: list[dict[str, int]]) -> list[list[float]]:
    """Train each mixture, one after the other."""
    deepspeed = started()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    found = []
    for case in cases:
        model = Mixed(case["experts"], case["ep_size"], case["k"])
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        config = configuration(
            dist.get_world_size(), zero_optimization={"stage": case["stage"]}
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(groups), config=config
        )
        found.append(trained(engine))
    return found


MIXTURES = {
    2: [
        {"experts": 2, "ep_size": 2, "k": 1, "stage": 0},
        {"experts": 4, "ep_size": 2, "k": 2, "stage": 0},
        {"experts": 2, "ep_size": 2, "k": 2, "stage": 2},
    ],
    4: [
        {"experts": 4, "ep_size": 4, "k": 2, "stage": 0},
        {"experts": 4, "ep_size": 2, "k": 1, "stage": 0},
    ],
}


@pytest.mark.parametrize("size", [2, 4])
def test_mixtures_of_experts(torchrun: Any, compare: Any, size: int) -> None:
    cases = MIXTURES[size]
    got = torchrun(size, mixtures, env=SETTINGS, deadline_s=DEADLINE_S, cases=cases)
    for case, ranks in zip(cases, zip(*got, strict=True), strict=True):
        want = alone(nn.Sequential(Mixture(case["experts"], case["k"]), head()))
        how = ", ".join(f"{name} {value}" for name, value in case.items())
        compare(f"{version()}, MoE ({how})", want, ranks)


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


@pytest.mark.parametrize(("size", "stages"), [(2, 2), (4, 2)])
def test_pipeline(torchrun: Any, compare: Any, size: int, stages: int) -> None:
    got = torchrun(size, pipeline, env=SETTINGS, deadline_s=DEADLINE_S, stages=stages)
    want = alone()
    compare(f"{version()}, PipelineModule of {stages} stages", want, got)
    assert all(each == got[0] for each in got), "every rank is told the same loss"
