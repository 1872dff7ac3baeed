# SPDX-License-Identifier: Apache-2.0
"""Strategies that cut samples or space: serial, data, spatial, ZeRO, experts, pipeline.

The formulas of serial, data, spatial and pipeline are ParaDL's (Kahira et al., "An
Oracle for Guiding Large-Scale Model/Hybrid Parallel Training of Convolutional Neural
Networks", HPDC'21, section 4). Those of ZeRO are of Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC'20, sections 5 and 7.
Those of experts follow Lepikhin et al., "GShard", ICLR'21, section 2.2. These two are
written here in ParaDL's form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from commrt.oracle.layer_table import Layer, LayerTable, contiguous
from commrt.oracle.step import Limit, Parts, Step, group_of
from commrt.oracle.transfers import MESSAGE, Group, Transfer

__all__ = [
    "activations",
    "batch_limit",
    "data",
    "data_spatial",
    "depth_limit",
    "expert",
    "expert_limit",
    "gradients",
    "halos",
    "pipeline",
    "serial",
    "space_limit",
    "spatial_axes",
    "zero_1",
    "zero_2",
    "zero_3",
]

_SPACE = ("depth", "height", "width")


def activations(step: Step) -> float:
    """Return the elements of all inputs and outputs of the whole batch."""
    each = sum(layer.input_elements + layer.output_elements for layer in step.table)
    return step.batch * each


def gradients(step: Step, group: Group, share: float = 1.0) -> Iterator[Transfer]:
    """Yield the sums of the weights' gradients over a group.

    Args:
        step: the step.
        group: ranks that sum.
        share: ranks over which the weights are cut.
    """
    if group.ranks == 1:
        return
    sizes = [step.table.weight_elements]
    if step.gradients_by_layer:
        sizes = [layer.weight_elements for layer in step.table]
    for size in sizes:
        if size:
            nbytes = size * step.item_nbytes / share
            yield Transfer("allreduce", group, nbytes, 1, "gradients")


def serial(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts of one rank that computes all."""
    table = step.table
    memory = step.memory_nbytes(activations(step), table.weight_elements)
    return Parts(table.sample_s, table.call_s + table.update_s, (), memory)


def data(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where each rank has some samples and all weights."""
    table, ranks = step.table, ways[0]
    return Parts(
        table.sample_s / ranks,
        table.call_s + table.update_s,
        tuple(gradients(step, group_of(axes, ways, 0, 0))),
        step.memory_nbytes(activations(step) / ranks, table.weight_elements),
    )


def batch_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut of samples."""
    return Limit(step.batch, f"the batch of {step.batch} samples")


# -- space -----------------------------------------------------------------------------


def spatial_axes(table: LayerTable) -> tuple[str, ...]:
    """Return the names of the spatial dimensions that some layer has."""
    dims = max((len(layer.extent) for layer in table), default=0)
    return _SPACE[3 - dims :] if 0 < dims <= 3 else ("height", "width")


def space_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut of one spatial dimension, counted from the last."""
    found = [
        (layer.extent[axis], layer.name)
        for layer in step.table
        if -axis <= len(layer.extent)
    ]
    if not found:
        return Limit(1, "the table, in which no layer has a spatial extent")
    most, name = min(found, key=lambda each: each[0])
    return Limit(most, f"the {_SPACE[axis]} of {most} in {name}")


def halos(
    step: Step, axes: Sequence[str], ways: Sequence[int], first: int, samples: float
) -> Iterator[Transfer]:
    """Yield the messages between neighbours: two in each pass of a layer.

    Layers that read no halo send nothing; ParaDL counts a latency for them, too.

    Args:
        step: the step.
        axes: names of the grid's axes.
        ways: ranks along each.
        first: the first axis that cuts space; all later ones do.
        samples: those of a rank.
    """
    space = ways[first:]
    for layer in step.table:
        for number, places in enumerate(space):
            dim = len(layer.extent) - len(space) + number
            if places == 1 or dim < 0 or not layer.halo_rows:
                continue
            group = group_of(axes, ways, first + number, first + number)
            others = math.prod(space) / places
            for elements in (layer.input_elements, layer.output_elements):
                rows = layer.halo_elements(elements, dim) * samples / others
                if rows:
                    nbytes = rows * step.item_nbytes
                    yield Transfer(MESSAGE, group, nbytes, 2, "halos")


def _statistics(step: Step, group: Group) -> Iterator[Transfer]:
    """Yield the sums of normalizations' statistics, in both passes."""
    for layer in step.table:
        if layer.statistic_elements and group.ranks > 1:
            nbytes = layer.statistic_elements * step.item_nbytes
            yield Transfer("allreduce", group, nbytes, 2, "statistics")


def data_spatial(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where samples are cut, and each sample's space.

    The first axis cuts samples. Layers without space compute whole samples on each rank
    of theirs, so these are not divided by the cuts of space.
    """
    table = step.table
    first = len(axes) - len(spatial_axes(table))
    samples = math.prod(ways[:first])
    space = math.prod(ways[first:])
    everyone = group_of(axes, ways, 0, len(axes) - 1)
    sample_s = call_s = kept = 0.0
    for layer in table:
        share = samples * (space if layer.extent else 1)
        piece = layer.piece("space", space if layer.extent else 1)
        sample_s += piece.sample_s / samples
        call_s += piece.call_s
        elements = layer.input_elements + layer.output_elements
        kept += step.batch * elements / share
    sent = (
        *gradients(step, everyone),
        *_statistics(step, everyone),
        *halos(step, axes, ways, first, step.batch / samples),
    )
    memory = step.memory_nbytes(kept, table.weight_elements)
    return Parts(sample_s, call_s + table.update_s, sent, memory)


# -- ZeRO ------------------------------------------------------------------------------


def _scattered(step: Step, group: Group) -> Iterator[Transfer]:
    """Yield the sums of gradients to their owners, and the updated weights back."""
    if group.ranks == 1:
        return
    sizes = [step.table.weight_elements]
    if step.gradients_by_layer:
        sizes = [layer.weight_elements for layer in step.table]
    for size in sizes:
        if size:
            nbytes = size * step.item_nbytes
            yield Transfer("reduce_scatter", group, nbytes, 1, "gradients")
            yield Transfer("allgather", group, nbytes, 1, "weights")


def zero_1(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where a rank keeps the optimizer's elements of its weights."""
    return _zero(step, axes, ways, whole_gradients=True)


def zero_2(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where each rank keeps gradients of its weights, too."""
    return _zero(step, axes, ways, whole_gradients=False)


def _zero(
    step: Step, axes: Sequence[str], ways: Sequence[int], whole_gradients: bool
) -> Parts:
    table, ranks = step.table, ways[0]
    weights = table.weight_elements
    # ``memory_nbytes`` counts a weight, its gradient and the optimizer's elements.
    share = weights / ranks
    more = (weights - share) * (2 if whole_gradients else 1)
    return Parts(
        table.sample_s / ranks,
        table.call_s + table.update_s / ranks,
        tuple(_scattered(step, group_of(axes, ways, 0, 0))),
        step.memory_nbytes(activations(step) / ranks, share, more),
    )


def zero_3(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where each rank keeps its weights only, and gathers others'.

    A layer's weights are gathered in the forward and in the backward pass, and its
    gradients go to their owners. The largest layer is whole for a while.
    """
    table, ranks = step.table, ways[0]
    group = group_of(axes, ways, 0, 0)
    sent = []
    for layer in table if ranks > 1 else ():
        nbytes = layer.weight_elements * step.item_nbytes
        if nbytes:
            sent.append(Transfer("allgather", group, nbytes, 2, "weights"))
            sent.append(Transfer("reduce_scatter", group, nbytes, 1, "gradients"))
    largest = max(layer.weight_elements for layer in table) if ranks > 1 else 0.0
    memory = step.memory_nbytes(
        activations(step) / ranks, table.weight_elements / ranks, 2 * largest
    )
    step_s = table.call_s + table.update_s / ranks
    return Parts(table.sample_s / ranks, step_s, tuple(sent), memory)


# -- experts ---------------------------------------------------------------------------


def expert(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where ranks have samples and experts of their own.

    Tokens go to their experts and come back, in both passes: four alltoalls for each
    layer of experts. Load is taken to be even.
    """
    table, ranks = step.table, ways[0]
    group = group_of(axes, ways, 0, 0)
    common = [layer for layer in table if not layer.experts]
    own = [layer for layer in table if layer.experts]
    sent = []
    sizes = [layer.weight_elements for layer in common]
    for size in sizes if step.gradients_by_layer else [sum(sizes)]:
        if size and ranks > 1:
            nbytes = size * step.item_nbytes
            sent.append(Transfer("allreduce", group, nbytes, 1, "gradients"))
    for layer in own if ranks > 1 else ():
        copies = step.batch / ranks * layer.experts_of_token * step.item_nbytes
        for elements in (layer.input_elements, layer.output_elements):
            sent.append(Transfer("alltoall", group, copies * elements, 2, "tokens"))
    weights = _weights(common) + _weights(own) / ranks
    update_s = _updates(common) + _updates(own) / ranks
    memory = step.memory_nbytes(activations(step) / ranks, weights)
    step_s = table.call_s + update_s
    return Parts(table.sample_s / ranks, step_s, tuple(sent), memory)


def _weights(layers: Sequence[Layer]) -> float:
    return sum(layer.weight_elements for layer in layers)


def _updates(layers: Sequence[Layer]) -> float:
    return sum(layer.update_s for layer in layers)


def expert_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut of experts: experts, and samples."""
    found = [(layer.experts, layer.name) for layer in step.table if layer.experts]
    if not found:
        return Limit(1, "the table, in which no layer has experts")
    most, name = min(found)
    if step.batch < most:
        return batch_limit(step, axis)
    return Limit(most, f"the {most} experts of {name}")


# -- pipelines -------------------------------------------------------------------------


def pipeline(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where each rank has some layers, and micro-batches pass them.

    Layers are cut so that the slowest run is as fast as can be. A step lasts
    p + S - 1 turns of the slowest forward and the slowest backward run, and sends in
    2 (p + S - 2) turns the largest output between two runs.
    """
    runs = contiguous(step.table.layers, ways[0])
    segments = min(step.segments, step.batch)
    turns = len(runs) + segments - 1
    forward = [sum(layer.forward_s for layer in run) for run in runs]
    backward = [sum(layer.backward_s for layer in run) for run in runs]
    calls = max(sum(layer.forward_call_s for layer in run) for run in runs)
    calls += max(sum(layer.backward_call_s for layer in run) for run in runs)
    sent: tuple[Transfer, ...] = ()
    if len(runs) > 1:
        most = max(run[-1].output_elements for run in runs[:-1])
        nbytes = step.batch / segments * most * step.item_nbytes
        group = group_of(axes, ways, 0, 0)
        sent = (Transfer(MESSAGE, group, nbytes, 2 * (turns - 1), "activations"),)
    memory = max(
        step.memory_nbytes(
            step.batch * sum(one.input_elements + one.output_elements for one in run),
            _weights(run),
        )
        for run in runs
    )
    return Parts(
        turns / segments * (max(forward) + max(backward)),
        turns * calls + max(map(_updates, runs)),
        *(sent, memory),
    )


def depth_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut between layers."""
    return Limit(len(step.table), f"the {len(step.table)} layers of {step.table.name}")
