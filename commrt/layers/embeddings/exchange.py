# SPDX-License-Identifier: Apache-2.0
"""Indices that travel to the ranks that have their rows, and rows that come back.

A forward pass sends integers to the owners of rows, which sum the rows of each piece of
a bag and send one row back. The backward pass sends a gradient for each piece to the
owner, which adds it to the gradients of the piece's rows (Naumov et al., "Deep learning
recommendation model for personalization and recommendation systems", section 4.2). The
rows start to travel in one function of torch and are waited for in another one, forward
and backward, so that a program computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.embeddings.layout import Layout
from commrt.layers.embeddings.lookups import gradient_of_rows, sums_of_rows
from commrt.layers.embeddings.route import Counts, Route, message_sizes, weights_sizes
from commrt.layers.embeddings.sorting import stable_sort
from commrt.layers.experts.trips import Trip, arrived, sent

__all__ = ["Arrivals", "Flags", "meet", "start", "wait"]

Tensor: TypeAlias = torch.Tensor


class Flags(NamedTuple):
    """Facts of one rank's call that others must know."""

    is_refused: bool
    """True: its bags do not fit, and no rank goes on."""
    has_gradients: bool
    """True: there will be a backward pass."""
    trains_weights: bool
    """True: the weights of bags get a gradient."""

    def number(self) -> int:
        """Return the flags as one integer."""
        return sum(int(flag) << bit for bit, flag in enumerate(self))

    @classmethod
    def of(cls, number: int) -> Flags:
        """Return the flags of an integer."""
        return cls(*(bool(number >> bit & 1) for bit in range(3)))


def meet(
    comm: Communicator | None, flags: Flags, counts: Counts | None, layout: Layout
) -> tuple[Counts, bool]:
    """Exchange counts; return those of what comes, and whether weights are trained.

    Raises UsageError on all ranks where one has refused its bags, or where some expect
    a backward pass and others do not. Bytes: an ``alltoall`` of 8 for each rank, and of
    16 for each rank and class.
    """
    ranks, classes = layout.num_ranks, len(layout.classes)
    leaving = np.zeros((ranks, 1 + 2 * classes), np.int64)
    leaving[:, 0] = flags.number()
    if counts is not None:
        leaving[:, 1:] = np.array(counts, np.int64).reshape(ranks, -1)
    coming = leaving
    if comm is not None:
        coming = np.empty_like(leaving)
        comm.alltoall(leaving, out=coming)
    numbers = coming.tolist()
    every = [Flags.of(row[0]) for row in numbers]
    refused = [rank for rank, each in enumerate(every) if each.is_refused]
    if refused:
        raise UsageError(
            f"ShardedEmbeddingBags: the bags of rank {refused[0]} do not fit its "
            f"tables, so no rank looks rows up; that rank's own error says why"
        )
    modes = [each.has_gradients for each in every]
    if len({*modes}) > 1:
        raise UsageError(
            f"ShardedEmbeddingBags: rank {modes.index(True)} calls the layer with "
            f"gradients, and rank {modes.index(False)} without; use torch.no_grad() "
            f"on all ranks or on none"
        )
    pairs = tuple(tuple(zip(row[1::2], row[2::2], strict=True)) for row in numbers)
    return pairs, any(each.trains_weights for each in every)


class Arrivals:
    """Pieces of bags that have come to the rank that has their rows; collective.

    Args:
        comm: the ranks; None: one rank.
        route: of what leaves.
        coming: counts of what comes.

    Bytes: an ``alltoallv`` of the message of integers.
    """

    def __init__(self, comm: Communicator | None, route: Route, coming: Counts) -> None:
        self.layout, self.coming = route.layout, coming
        message = route.message
        sizes = message_sizes(coming)
        if comm is not None:
            leaving = message_sizes(route.counts)
            message = message.new_empty(sum(sizes))
            comm.alltoallv(
                route.message,
                send_counts=leaving,
                recv_counts=sizes,
                out=message,
            )
        self.rows, self.lengths = _unpacked(message, coming)
        elements = _elements(route.counts, self.layout), _elements(coming, self.layout)
        self.trip = Trip(comm, elements[1], elements[0])
        """The way of looked-up rows to the bags' ranks."""
        self.weights_trip = Trip(
            comm,
            weights_sizes(route.counts, self.layout),
            weights_sizes(coming, self.layout),
        )
        """The way of weights to the rows' ranks."""

    def by_class(self, flat: Tensor) -> list[Tensor]:
        """Return rows of each class, (pieces, width), from those of a message."""
        classes = self.layout.classes
        sizes = _class_elements(self.coming, self.layout)
        return [
            part.view(-1, row_class.width)
            for part, row_class in zip(
                _regrouped(flat, sizes, len(classes)), classes, strict=True
            )
        ]

    def factors(self, flat: Tensor | None) -> list[Tensor | None]:
        """Return the weights of each class from those of a message."""
        classes = self.layout.classes
        if flat is None:
            return [None] * len(classes)
        numbers = self.weights_of(self.coming)
        sizes = [number for rank in zip(*numbers, strict=True) for number in rank]
        parts = iter(_regrouped(flat, sizes, len(numbers)))
        return [next(parts) if each.is_weighted else None for each in classes]

    def weights_of(self, counts: Counts) -> list[list[int]]:
        """Return the weights of each class that has some, by rank."""
        return [
            [rank[number][1] for rank in counts]
            for number, each in enumerate(self.layout.classes)
            if each.is_weighted
        ]


def start(
    route: Route,
    arrivals: Arrivals,
    parameters: Sequence[Tensor],
    anchor: Tensor,
    *,
    trains_weights: bool,
    is_sparse: bool,
) -> Tensor:
    """Look rows up and start to send them; return where they land; differentiable.

    Args:
        route: of this rank's bags.
        arrivals: the pieces that have come.
        parameters: this rank's rows of each class.
        anchor: needs a gradient, so that the backward pass runs on all ranks, also
            where no parameter is trained.
        trains_weights: True: some rank's weights get a gradient.
        is_sparse: True: gradients have the touched rows only.
    """
    weights = route.weights
    if weights is not None:
        if not torch.is_grad_enabled():
            trains_weights = False
        if trains_weights and not weights.requires_grad:
            weights = weights.detach().requires_grad_()
        elif not trains_weights:
            weights = weights.detach()
        trip = arrivals.weights_trip
        weights = arrived(sent(weights, trip), trip)
    landing: Tensor = _Start.apply(arrivals, is_sparse, anchor, weights, *parameters)
    return landing


def wait(route: Route, trip: Trip, landing: Tensor) -> tuple[Tensor, ...]:
    """Return the row of each sample and unit, (samples, width); differentiable."""
    rows: tuple[Tensor, ...] = _Wait.apply(route, trip, landing)
    return rows


class _Start(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        arrivals: Arrivals,
        is_sparse: bool,
        _: Tensor,
        weights: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.arrivals, ctx.is_sparse = arrivals, is_sparse
        ctx.num_rows = [len(each) for each in parameters]
        # Gradients of weights need rows. Others may change before the backward pass.
        needs_weights, classes = ctx.needs_input_grad[3], arrivals.layout.classes
        needed = [
            parameter
            for parameter, each in zip(parameters, classes, strict=True)
            if needs_weights and each.is_weighted
        ]
        ctx.save_for_backward(weights, *needed)
        factors = arrivals.factors(weights)
        sums = [
            sums_of_rows(*each)
            for each in zip(
                parameters, arrivals.rows, arrivals.lengths, factors, strict=True
            )
        ]
        flat = _packed(sums, _pieces_of(arrivals.coming))
        trip = arrivals.trip
        return flat if trip.comm is None else trip.start(flat)

    @staticmethod
    @differentiable_once("a distributed embedding")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        arrivals: Arrivals = ctx.arrivals
        trip = arrivals.trip
        # On several ranks the buffer's own gradient is no message.
        flat = gradient if trip.comm is None else trip.wait()
        weights, *needed = ctx.saved_tensors
        tables = iter(needed)
        needs_weights, *needs = ctx.needs_input_grad[3:]
        factors = arrivals.factors(weights)
        found: list[Tensor | None] = []
        for_factors = []
        for number, grads in enumerate(arrivals.by_class(flat)):
            rows, lengths = arrivals.rows[number], arrivals.lengths[number]
            factor = factors[number]
            own = None
            if needs[number]:
                own = gradient_of_rows(
                    ctx.num_rows[number],
                    *(rows, lengths, factor, grads),
                    is_sparse=ctx.is_sparse,
                )
            found.append(own)
            if factor is not None and needs_weights:
                if lengths is not None:
                    grads = grads.repeat_interleave(lengths, 0)
                found_rows = next(tables).index_select(0, rows)
                for_factors.append((found_rows * grads).sum(1))
        to_weights = None
        if for_factors:
            to_weights = _packed(for_factors, arrivals.weights_of(arrivals.coming))
        return None, None, None, to_weights, *found


class _Wait(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, route: Route, trip: Trip, landing: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.trip, ctx.like = route, trip, landing.new_empty(0)
        ctx.set_materialize_grads(False)
        flat = landing.detach() if trip.comm is None else trip.wait()
        layout = route.layout
        sizes = _class_elements(route.counts, layout)
        rows: list[Tensor] = []
        for number, part in enumerate(_regrouped(flat, sizes, len(layout.classes))):
            width, slots = layout.classes[number].width, layout.slots[number]
            part = part.view(-1, width)
            targets = route.targets[number]
            if targets is not None:
                whole = slots * route.num_bags
                _, order = stable_sort(targets)
                counts = torch.bincount(targets, minlength=whole)
                part = sums_of_rows(part, order, counts, None)
            rows += part.view(slots, route.num_bags, width).unbind(0)
        return tuple(rows)

    @staticmethod
    @differentiable_once("a distributed embedding")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        route: Route = ctx.route
        layout, trip, samples = route.layout, ctx.trip, route.num_bags
        given = iter(gradients)
        parts = []
        for number, row_class in enumerate(layout.classes):
            own = [next(given) for _ in range(layout.slots[number])]
            zeros = ctx.like.new_zeros((samples, row_class.width))
            whole = torch.cat([zeros if each is None else each for each in own])
            targets = route.targets[number]
            parts.append(whole if targets is None else whole[targets])
        flat = _packed(parts, _pieces_of(route.counts))
        if trip.comm is not None:
            trip.start(flat, back=True)
        return None, None, flat


def _pieces_of(counts: Counts) -> list[list[int]]:
    """Return the pieces of each class, by rank."""
    return [[pieces for pieces, _ in rank] for rank in zip(*counts, strict=True)]


def _class_elements(counts: Counts, layout: Layout) -> list[int]:
    """Return the elements of each class of each rank, ranks first."""
    return [
        pieces * row_class.width
        for rank in counts
        for (pieces, _), row_class in zip(rank, layout.classes, strict=True)
    ]


def _elements(counts: Counts, layout: Layout) -> tuple[int, ...]:
    """Return the elements of each rank's rows."""
    number = len(layout.classes)
    sizes = _class_elements(counts, layout)
    return tuple(sum(sizes[at : at + number]) for at in range(0, len(sizes), number))


def _packed(parts: Sequence[Tensor], numbers: Sequence[Sequence[int]]) -> Tensor:
    """Return a message, flat: ranks first, then classes.

    Args:
        parts: of each class.
        numbers: how much of each is of each rank.
    """
    if len(parts) == 1:
        return parts[0].reshape(-1)
    split = [part.split([*own]) for part, own in zip(parts, numbers, strict=True)]
    return torch.cat(
        [part.reshape(-1) for rank in zip(*split, strict=True) for part in rank]
    )


def _regrouped(flat: Tensor, sizes: Sequence[int], number: int) -> list[Tensor]:
    """Return the part of each of some classes, from a message with ranks first."""
    if number == 1:
        return [flat]
    parts = flat.split([*sizes])
    return [torch.cat(parts[each::number]) for each in range(number)]


def _unpacked(
    message: Tensor, counts: Counts
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return rows and lengths of each class; None: one row for each piece."""
    number = len(counts[0])
    is_single = [
        all(rank[each][0] == rank[each][1] for rank in counts) for each in range(number)
    ]
    if number == 1 and is_single[0]:
        return [message], [None]
    rows: list[list[Tensor]] = [[] for _ in range(number)]
    lengths: list[list[Tensor]] = [[] for _ in range(number)]
    at = 0
    for rank in counts:
        for each, (pieces, named) in enumerate(rank):
            if pieces != named:
                lengths[each].append(message[at : at + pieces])
                at += pieces
            elif not is_single[each]:
                lengths[each].append(message.new_ones(pieces))
            rows[each].append(message[at : at + named])
            at += named
    return (
        [torch.cat(each) for each in rows],
        [
            None if single else torch.cat(each)
            for single, each in zip(is_single, lengths, strict=True)
        ],
    )
