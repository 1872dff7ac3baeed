# SPDX-License-Identifier: Apache-2.0
"""Strategies that cut weights within layers: filter, channel, tensor, 3-d tensor.

Filter, channel and data+filter are ParaDL's (Kahira et al., HPDC'21, section 4): three
passes of a ring over each activation between two products. The tensor strategy is
Megatron-LM's (Shoeybi et al., arXiv 1909.08053, section 3). The 3-d one is AxoNN's
(Singh and Bhatele, "A 4D hybrid algorithm to scale parallel training to thousands of
GPUs", SC'24, section 3). Both are written here in ParaDL's form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from commrt.oracle.cut_batches import activations, gradients
from commrt.oracle.layer_table import Cut, Layer
from commrt.oracle.step import Limit, Parts, Step, group_of
from commrt.oracle.transfers import Group, Transfer

__all__ = [
    "channel",
    "channel_limit",
    "data_filter",
    "feature_limit",
    "filter_cut",
    "filter_limit",
    "tensor",
    "tensor_3d",
]

_Exchange: TypeAlias = Callable[[Step, Group, float], Iterator[Transfer]]


def filter_cut(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where each rank computes some filters of each product."""
    return _cut(step, axes, ways, "filter", _of_filters)


def channel(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where each rank sums over some channels of each product.

    Layers that sum over no channels are computed whole by each rank. ParaDL divides all
    layers.
    """
    return _cut(step, axes, ways, "channel", _of_channels)


def data_filter(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where samples are cut, and filters among ranks of a sample."""
    return _cut(step, axes, ways, "filter", _of_filters)


def _cut(
    step: Step, axes: Sequence[str], ways: Sequence[int], what: Cut, exchange: _Exchange
) -> Parts:
    """Return the parts of a cut of weights along the last axis, and of samples."""
    table, cut = step.table, ways[-1]
    samples = ways[0] if len(ways) > 1 else 1
    last = len(ways) - 1
    sent = [*exchange(step, group_of(axes, ways, last, last), step.batch / samples)]
    if samples > 1:
        sent += gradients(step, group_of(axes, ways, 0, 0), cut)
    memory = step.memory_nbytes(
        activations(step) / samples, table.weight_elements / cut
    )
    # Sums over channels are whole on each rank, and so is the work between them.
    between = 1 if what == "channel" else cut
    pieces = [
        layer.piece(what, cut if layer.is_product else between) for layer in table
    ]
    return Parts(
        sum(piece.sample_s for piece in pieces) / samples,
        sum(piece.call_s for piece in pieces) + table.update_s / cut,
        *(tuple(sent), memory),
    )


def _of_filters(step: Step, group: Group, samples: float) -> Iterator[Transfer]:
    """Yield for each product but the first: the input gathered, its gradient summed."""
    for layer in step.table.products[1:] if group.ranks > 1 else ():
        nbytes = samples * layer.input_elements * step.item_nbytes
        yield Transfer("allgather", group, nbytes, 1, "activations")
        yield Transfer("allreduce", group, nbytes, 1, "activation gradients")


def _of_channels(step: Step, group: Group, samples: float) -> Iterator[Transfer]:
    """Yield for each product: the output summed, the input's gradient gathered.

    The network's input has no gradient. ParaDL does not sum the last output. Where the
    first product has too few channels, it is not cut; then the last output is summed.
    """
    products = step.table.products if group.ranks > 1 else ()
    summed = products[:-1]
    if products and 0 < products[0].channels < group.ranks:
        summed = products[1:]
    for layer in summed:
        nbytes = samples * layer.output_elements * step.item_nbytes
        yield Transfer("allreduce", group, nbytes, 1, "activations")
    for layer in products[1:]:
        nbytes = samples * layer.input_elements * step.item_nbytes
        yield Transfer("allgather", group, nbytes, 1, "activation gradients")


def filter_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut of filters."""
    return _least(step.table.products, "filters")


def channel_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut of channels; the first product's may stay whole."""
    products = step.table.products
    return _least(products[1:] or products, "channels")


def _least(layers: Sequence[Layer], name: str) -> Limit:
    found = [(getattr(layer, name), layer.name) for layer in layers]
    found = [each for each in found if each[0]]
    if not found:
        return Limit(1, f"the table, in which no product has {name}")
    most, layer = min(found)
    return Limit(most, f"the {most} {name} of {layer}")


# -- tensor ----------------------------------------------------------------------------


def tensor(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where products are cut by columns and rows in turn.

    Between the two, activations are cut, and so is the work on them. The output of rows
    is summed forward, and the gradient of the columns' input is summed backward. A last
    product that is left over gathers its output.
    """
    group, ranks = group_of(axes, ways, 0, 0), ways[0]
    sent: list[Transfer] = []
    sample_s = update_s = kept = weights = 0.0
    inside = False
    last = step.table.products[-1] if step.table.products else None
    for layer in step.table:
        nbytes = step.batch * step.item_nbytes
        parts = ranks if inside or layer.is_product else 1
        kept += layer.input_elements / (ranks if inside else 1)
        if layer.is_product and ranks > 1:
            if inside:
                size = nbytes * layer.output_elements
                sent.append(Transfer("allreduce", group, size, 1, "activations"))
            else:
                size = nbytes * layer.input_elements
                about = "activation gradients"
                sent.append(Transfer("allreduce", group, size, 1, about))
                if layer is last:
                    size = nbytes * layer.output_elements
                    sent.append(Transfer("allgather", group, size, 1, "activations"))
        if layer.is_product:
            inside = not inside
        kept += layer.output_elements / (ranks if inside else 1)
        sample_s += layer.sample_s / parts
        update_s += layer.update_s / parts
        weights += layer.weight_elements / parts
    memory = step.memory_nbytes(step.batch * kept, weights)
    return Parts(sample_s, step.table.call_s + update_s, tuple(sent), memory)


def tensor_3d(step: Step, axes: Sequence[str], ways: Sequence[int]) -> Parts:
    """Return the parts where products are cut along rows, columns and samples.

    Axes are z, y and x. Ranks along z have samples of their own and a part of each
    tile of a weight. They gather the tile in both passes and scatter its gradient.
    Products take their input along y and give their output along x, and the next one
    the other way round. The output is summed along the input's axis, and the input's
    gradient along the output's.
    """
    groups = [group_of(axes, ways, each, each) for each in range(3)]
    depth = ways[0]
    taken, given = 1, 2
    sent: list[Transfer] = []
    sample_s = update_s = kept = weights = 0.0
    ranks = ways[0] * ways[1] * ways[2]
    for layer in step.table:
        samples = step.batch / depth
        if not layer.is_product:
            share = depth * ways[taken]
            sample_s += layer.sample_s / share
            kept += samples * layer.input_elements / ways[taken]
            kept += samples * layer.output_elements / ways[taken]
            update_s += layer.update_s / ways[taken]
            weights += layer.weight_elements / ways[taken]
            continue
        tile = layer.weight_elements * step.item_nbytes / (ways[1] * ways[2])
        if depth > 1 and tile:
            sent.append(Transfer("allgather", groups[0], tile, 2, "weights"))
            sent.append(Transfer("reduce_scatter", groups[0], tile, 1, "gradients"))
        made = samples * layer.output_elements / ways[given]
        read = samples * layer.input_elements / ways[taken]
        for axis, elements, about in (
            (taken, made, "activations"),
            (given, read, "activation gradients"),
        ):
            if ways[axis] > 1:
                nbytes = elements * step.item_nbytes
                sent.append(Transfer("allreduce", groups[axis], nbytes, 1, about))
        kept += made + read
        sample_s += layer.sample_s / ranks
        update_s += layer.update_s / ranks
        weights += layer.weight_elements / ranks
        taken, given = given, taken
    memory = step.memory_nbytes(kept, weights)
    return Parts(sample_s, step.table.call_s + update_s, tuple(sent), memory)


def feature_limit(step: Step, axis: int) -> Limit:
    """Return the limit of a cut of features on both sides of products."""
    filters, channels = filter_limit(step, axis), channel_limit(step, axis)
    return min(filters, channels, key=lambda limit: limit.most)
