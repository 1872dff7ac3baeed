# SPDX-License-Identifier: Apache-2.0
"""Projections equal the papers' formulas, which stand here in full."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.oracle import AlphaBeta, Layer, LayerTable, Oracle, volume

RESNET_50 = LayerTable("ResNet-50", (Layer("all", 1, 1, 22_734_016),))
"""The weights of ParaDL's table: 90,936,064 bytes in float32."""

SIZES = st.integers(1, 10_000).map(float)
TIMES = st.floats(1e-9, 1e-3)


@st.composite
def chains(draw: Any) -> LayerTable:
    """Draw layers, each of which takes what the one before gave."""
    count = draw(st.integers(1, 6))
    sizes = [draw(SIZES) for _ in range(count + 1)]
    layers = [
        Layer(
            *(f"l{at}", sizes[at], sizes[at + 1], draw(SIZES)),
            *(draw(TIMES), draw(TIMES), draw(TIMES)),
            channels=64,
            filters=64,
            extent=(16, 16),
            halo_rows=(1.0, 1.0),
        )
        for at in range(count)
    ]
    return LayerTable("chain", tuple(layers))


class Paper:
    """The formulas of ParaDL as the paper has them, of a batch B of D samples."""

    def __init__(
        self, table: LayerTable, samples: int, batch: int, alpha: float, beta: float
    ) -> None:
        self.layers = table.layers
        self.samples, self.batch = samples, batch
        self.steps = math.ceil(samples / batch)
        self.alpha, self.beta, self.delta = alpha, beta, 4
        self.both = sum(one.forward_s + one.backward_s for one in table)
        self.update = sum(one.update_s for one in table)
        self.weights = sum(one.weight_elements for one in table)

    def memory(self, samples: float, cut: float = 1, of_weights: float = 1) -> float:
        """Return 2 gamma delta of the sum over layers, for a gamma of 1."""
        each = sum(one.input_elements + one.output_elements for one in self.layers)
        return 2 * self.delta * (samples * each / cut + self.weights / of_weights)

    def allreduce(self, ranks: int, share: float = 1) -> float:
        """Return the sum of gradients of a step over ranks, by a ring."""
        per_rank = self.weights * self.delta * self.beta / ranks / share
        return 2 * (ranks - 1) * (self.alpha + per_rank)

    def activations(self, ranks: int, samples: float) -> float:
        """Return three passes of a ring over the outputs of all layers but the last."""
        return (
            3
            * (ranks - 1)
            * sum(
                self.alpha
                + samples * one.output_elements * self.delta * self.beta / ranks
                for one in self.layers[:-1]
            )
        )


SHAPES = {"samples": st.integers(1, 2000), "batch": st.integers(16, 64)}
ALPHAS, BETAS = st.floats(0, 1e-3), st.floats(0, 1e-6)
RANKS = st.integers(1, 16)


def oracle_of(paper: Paper, table: LayerTable) -> Oracle:
    return Oracle(table, AlphaBeta(paper.alpha, paper.beta), paper.samples)


@pytest.mark.parametrize(
    ("ranks", "alpha_us", "seconds"),
    [(32, 30.31, 9.9839437), (1024, 30.98, 1.5584128)],
)
def test_resnet_50_has_the_published_communication(
    ranks: int, alpha_us: float, seconds: float
) -> None:
    """The figures are of the ParaDL authors' log of data parallelism on ABCI."""
    oracle = Oracle(RESNET_50, AlphaBeta(alpha_us * 1e-6, 8e-11), 1_280_000)
    projected = oracle.project("data", ranks, batch=64 * ranks)
    assert f"{projected.communication_s:.7f}" == f"{seconds:.7f}"


@given(chains(), RANKS, ALPHAS, BETAS, SHAPES["samples"], SHAPES["batch"])
def test_data_is_the_papers(
    table: LayerTable, ranks: int, alpha: float, beta: float, samples: int, batch: int
) -> None:
    paper = Paper(table, samples, batch, alpha, beta)
    got = oracle_of(paper, table).project("data", ranks, batch=batch)
    compute = samples / ranks * paper.both + paper.steps * paper.update
    assert got.compute_s == pytest.approx(compute)
    comm = paper.steps * paper.allreduce(ranks) if ranks > 1 else 0.0
    assert got.communication_s == pytest.approx(comm)
    assert got.memory_nbytes == pytest.approx(paper.memory(batch / ranks), abs=1)


@given(
    chains(),
    st.integers(1, 4),
    st.integers(1, 4),
    ALPHAS,
    BETAS,
    SHAPES["samples"],
    SHAPES["batch"],
)
def test_spatial_is_the_papers(
    table: LayerTable,
    height: int,
    width: int,
    alpha: float,
    beta: float,
    samples: int,
    batch: int,
) -> None:
    paper = Paper(table, samples, batch, alpha, beta)
    got = oracle_of(paper, table).project("spatial", (height, width), batch=batch)
    ranks = height * width
    compute = samples / ranks * paper.both + paper.steps * paper.update
    assert got.compute_s == pytest.approx(compute)
    comm = paper.allreduce(ranks) if ranks > 1 else 0.0
    for one in table:
        for ways, others in ((height, width), (width, height)):
            # One of 16 rows beyond each end, for the input and the gradient.
            rows = (one.input_elements + one.output_elements) / 16 / others
            halo = 2 * alpha + batch * rows * paper.delta * beta
            comm += 2 * halo if ways > 1 else 0.0
    assert got.communication_s == pytest.approx(paper.steps * comm)
    assert got.memory_nbytes == pytest.approx(paper.memory(batch, ranks), abs=1)


@pytest.mark.parametrize("name", ["filter", "channel"])
@given(chains(), RANKS, ALPHAS, BETAS, SHAPES["samples"], SHAPES["batch"])
def test_cuts_of_weights_are_the_papers(
    name: str,
    table: LayerTable,
    ranks: int,
    alpha: float,
    beta: float,
    samples: int,
    batch: int,
) -> None:
    paper = Paper(table, samples, batch, alpha, beta)
    got = oracle_of(paper, table).project(name, ranks, batch=batch)
    compute = samples / ranks * paper.both + paper.steps * paper.update / ranks
    assert got.compute_s == pytest.approx(compute)
    comm = paper.steps * paper.activations(ranks, batch)
    assert got.communication_s == pytest.approx(comm)
    memory = paper.memory(batch, of_weights=ranks)
    assert got.memory_nbytes == pytest.approx(memory, abs=1)


@given(
    chains(),
    st.integers(1, 16),
    RANKS,
    ALPHAS,
    BETAS,
    SHAPES["samples"],
    SHAPES["batch"],
)
def test_data_and_filter_is_the_papers(
    table: LayerTable,
    p1: int,
    p2: int,
    alpha: float,
    beta: float,
    samples: int,
    batch: int,
) -> None:
    paper = Paper(table, samples, batch, alpha, beta)
    got = oracle_of(paper, table).project("data+filter", (p1, p2), batch=batch)
    compute = samples / (p1 * p2) * paper.both + paper.steps * paper.update / p2
    assert got.compute_s == pytest.approx(compute)
    comm = paper.activations(p2, batch / p1)
    comm += paper.allreduce(p1, p2) if p1 > 1 else 0.0
    assert got.communication_s == pytest.approx(paper.steps * comm)
    memory = paper.memory(batch, p1, p2)
    assert got.memory_nbytes == pytest.approx(memory, abs=1)


@given(chains(), RANKS, ALPHAS, BETAS, SHAPES["samples"], st.integers(1, 8))
def test_data_and_spatial_has_the_papers_parts(
    table: LayerTable, p1: int, alpha: float, beta: float, samples: int, p2: int
) -> None:
    paper = Paper(table, samples, 32, alpha, beta)
    got = oracle_of(paper, table).project("data+spatial", (p1, p2, 1), batch=32)
    comm = paper.allreduce(p1 * p2) if p1 * p2 > 1 else 0.0
    for one in table if p2 > 1 else ():
        rows = (one.input_elements + one.output_elements) / 16
        comm += 2 * (2 * alpha + 32 / p1 * rows * paper.delta * beta)
    assert got.communication_s == pytest.approx(paper.steps * comm)
    compute = samples / (p1 * p2) * paper.both + paper.steps * paper.update
    assert got.compute_s == pytest.approx(compute)


@given(
    chains(),
    st.integers(1, 6),
    ALPHAS,
    BETAS,
    SHAPES["samples"],
    st.integers(1, 8),
)
def test_pipelines_are_the_papers(
    table: LayerTable,
    stages: int,
    alpha: float,
    beta: float,
    samples: int,
    segments: int,
) -> None:
    batch, stages = 32, min(stages, len(table))
    paper = Paper(table, samples, batch, alpha, beta)
    costs = AlphaBeta(alpha, beta)
    oracle = Oracle(table, costs, samples, segments=segments)
    got = oracle.project("pipeline", stages, batch=batch)
    candidates = []
    for runs in _cuts([*table], stages):
        slowest = max(sum(one.sample_s for one in run) for run in runs)
        forward = max(sum(one.forward_s for one in run) for run in runs)
        backward = max(sum(one.backward_s for one in run) for run in runs)
        update = max(sum(one.update_s for one in run) for run in runs)
        turns = stages + segments - 1
        compute = samples * turns / segments * (forward + backward)
        compute += paper.steps * update
        most = max((run[-1].output_elements for run in runs[:-1]), default=0.0)
        comm = alpha + batch / segments * most * paper.delta * beta
        comm *= 2 * paper.steps * (stages + segments - 2) if stages > 1 else 0
        memory = max(
            2
            * paper.delta
            * sum(
                batch * (one.input_elements + one.output_elements) + one.weight_elements
                for one in run
            )
            for run in runs
        )
        candidates.append((slowest, compute, comm, memory))
    best = min(each[0] for each in candidates)
    # Several cuts may be equally fast; one of them is taken.
    fastest = [each[1:] for each in candidates if each[0] == pytest.approx(best)]
    expected = got.compute_s, got.communication_s, got.memory_nbytes
    assert any(expected == pytest.approx(each, rel=1e-6, abs=1e-9) for each in fastest)


def _cuts(layers: list[Layer], parts: int) -> list[list[list[Layer]]]:
    """Return all ways to cut a list into runs that are not empty."""
    if parts == 1:
        return [[layers]]
    found = []
    for end in range(1, len(layers) - parts + 2):
        found += [[layers[:end], *rest] for rest in _cuts(layers[end:], parts - 1)]
    return found


# -- strategies of other papers --------------------------------------------------------


@given(chains(), st.integers(2, 16), st.sampled_from([0, 1, 2]))
def test_zero_keeps_and_sends_what_its_paper_says(
    table: LayerTable, ranks: int, kept: int
) -> None:
    oracle = Oracle(table, AlphaBeta(0, 1e-9), 64, optimizer_elements=kept)
    weights, part = table.weight_elements, (ranks - 1) / ranks
    each = sum(one.input_elements + one.output_elements for one in table)
    states = {
        "data": (2 + kept) * weights,
        "zero1": 2 * weights + kept * weights / ranks,
        "zero2": weights + (1 + kept) * weights / ranks,
        "zero3": (2 + kept) * weights / ranks
        + 2 * max(one.weight_elements for one in table),
    }
    for name, elements in states.items():
        got = oracle.project(name, ranks, batch=64)
        memory = 4 * (2 * 64 / ranks * each + elements)
        assert got.memory_nbytes == pytest.approx(memory, abs=1)
        factor = 3 if name == "zero3" else 2
        sent = factor * weights * 4 * part
        assert got.sent_nbytes == pytest.approx(sent)


def test_experts_send_tokens_four_times() -> None:
    layers = (Layer("dense", 8, 8, 100), Layer("moe", 8, 8, 1000, experts=4))
    table = LayerTable("moe", layers)
    got = Oracle(table, AlphaBeta(0, 0), 64).project("expert", 4, batch=64)
    # 16 samples of 8 elements a rank, three quarters of which go elsewhere.
    tokens = 4 * 16 * 8 * 4 * 3 / 4
    assert got.sent_nbytes == pytest.approx(tokens + 2 * 100 * 4 * 3 / 4)
    assert got.memory_nbytes == 4 * (2 * 16 * 32 + 2 * (100 + 1000 / 4))


def test_tensor_sums_once_forward_and_once_backward_for_a_pair() -> None:
    up = Layer("up", 16, 64, 16 * 64, channels=16, filters=64)
    act = Layer("act", 64, 64, is_product=False)
    down = Layer("down", 64, 16, 16 * 64, channels=64, filters=16)
    table = LayerTable("mlp", (up, act, down))
    got = Oracle(table, AlphaBeta(0, 0), 8).project("tensor", 4, batch=8)
    one = 8 * 16 * 4
    assert got.sent_nbytes == pytest.approx(2 * 2 * one * 3 / 4)
    activations = 16 + 64 / 4 + 2 * 64 / 4 + 64 / 4 + 16
    assert got.memory_nbytes == 4 * (2 * 8 * activations + 2 * 2 * 16 * 64 / 4)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_tensor3d_sends_as_axonn_does(z: int, y: int, x: int) -> None:
    k, n, m = 48, 96, 24
    first = Layer("first", k, n, k * n, channels=k, filters=n)
    table = LayerTable("one", (first,))
    sent = volume("tensor3d", table, (z, y, x), batch=m)
    ways = {"z": z, "y": y, "x": x}
    expected = {
        ("z", "allgather"): 2 * 4 * k * n / (x * y) * (z - 1) / z,
        ("z", "reduce_scatter"): 4 * k * n / (x * y) * (z - 1) / z,
        # Outputs are summed along the axis of the input, and gradients the other way.
        ("y", "allreduce"): 2 * 4 * m / z * n / x * (y - 1) / y,
        ("x", "allreduce"): 2 * 4 * m / z * k / y * (x - 1) / x,
    }
    for (axis, coll), nbytes in expected.items():
        got = sent.get((axis, coll), 0.0)
        assert got == pytest.approx(nbytes), ways


# -- limits and laws -------------------------------------------------------------------

SHARED = ["data", "pipeline", "filter", "channel", "zero1", "zero2", "tensor"]


@pytest.mark.parametrize("name", SHARED)
@given(chains())
def test_one_rank_is_serial(name: str, table: LayerTable) -> None:
    oracle = Oracle(table, AlphaBeta(1e-5, 1e-9), 100, segments=1)
    alone = oracle.project("serial", batch=16)
    got = oracle.project(name, 1, batch=16)
    assert got.compute_s == pytest.approx(alone.compute_s)
    assert got.communication_s == 0.0
    assert got.memory_nbytes == pytest.approx(alone.memory_nbytes, abs=1)


@pytest.mark.parametrize("name", SHARED)
@given(chains(), st.integers(1, 6))
def test_twice_the_bandwidth_halves_what_bytes_cost(
    name: str, table: LayerTable, ranks: int
) -> None:
    def costs(alpha: float, beta: float) -> float:
        oracle = Oracle(table, AlphaBeta(alpha, beta), 100)
        ways = min(ranks, len(table)) if name == "pipeline" else ranks
        return oracle.project(name, ways, batch=16).communication_s

    latencies = costs(1e-5, 0)
    slow, fast = costs(1e-5, 2e-8), costs(1e-5, 1e-8)
    assert slow - latencies == pytest.approx(2 * (fast - latencies), abs=1e-12)


@given(chains(), st.integers(2, 8))
@settings(max_examples=30)
def test_bytes_do_not_depend_on_the_costs(table: LayerTable, ranks: int) -> None:
    sent = volume("data", table, ranks, batch=16)
    expected = 2 * table.weight_elements * 4 * (ranks - 1) / ranks
    assert sent == {("data", "allreduce"): pytest.approx(expected)}


FOUR = Layer("four", 4, 4, 1000, channels=4, filters=4)


def test_a_contention_penalty_multiplies_what_bytes_cost() -> None:
    table = LayerTable("two", (FOUR, FOUR))
    plain = Oracle(table, AlphaBeta(0, 1e-9), 64)
    shared = Oracle(table, AlphaBeta(0, 1e-9, {"data": 2.0}), 64)
    one, two = (
        each.project("data+filter", (4, 2), batch=64) for each in (plain, shared)
    )
    gathers = 3 * (2 - 1) * 16 * 4 * 4 * 1e-9 / 2
    assert two.communication_s - gathers == pytest.approx(
        2 * (one.communication_s - gathers)
    )


def test_memory_of_a_network_that_is_counted_by_hand() -> None:
    # A convolution of 2 to 4 channels on 8 x 8, and a linear layer to 10 classes.
    conv = Layer("conv", 2 * 64, 4 * 64, 4 * 2 * 9 + 4, channels=2, filters=4)
    last = Layer("last", 4 * 64, 10, 10 * 256 + 10, channels=256, filters=10)
    table = LayerTable("small", (conv, last))
    oracle = Oracle(table, AlphaBeta(0, 0), 64)
    # 128 + 256 + 256 + 10 elements a sample, and 76 + 2570 weights; each twice.
    assert oracle.project("serial", batch=16).memory_nbytes == 8 * (16 * 650 + 2646)
    assert oracle.project("data", 4, batch=16).memory_nbytes == 8 * (4 * 650 + 2646)
    got = oracle.project("filter", 2, batch=16).memory_nbytes
    assert got == 8 * (16 * 650 + 1323)
    half = Oracle(table, AlphaBeta(0, 0), 64, reuse=0.5)
    assert half.project("serial", batch=16).memory_nbytes == 4 * (16 * 650 + 2646)
