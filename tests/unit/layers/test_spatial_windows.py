# SPDX-License-Identifier: Apache-2.0
"""Which elements of a cut dimension outputs read, and which messages bring them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from commrt.errors import UsageError
from commrt.layers.spatial import Cut
from commrt.layers.spatial.linear_sources import linear_sources, span_of
from commrt.layers.spatial.windows import (
    Sliding,
    Spreading,
    Window,
    adaptive_outputs,
    adaptive_window,
    clipped,
    even_ranges,
    even_sizes,
    meet,
    source_of,
    transfers,
    wrapped,
)
from commrt.local import run


def draw_sliding(rng: random.Random) -> Sliding:
    return Sliding(
        kernel=rng.randint(1, 5),
        stride=rng.randint(1, 4),
        low=rng.randint(0, 4),
        high=rng.randint(0, 4),
        dilation=rng.randint(1, 3),
    )


def read_by(sliding: Sliding, output: int) -> set[int]:
    """Return the elements that one output reads."""
    first = output * sliding.stride - sliding.low
    return {first + number * sliding.dilation for number in range(sliding.kernel)}


def pieces_of(rng: random.Random, extent: int, ranks: int) -> list[tuple[int, int]]:
    ends = [0, *sorted(rng.randint(0, extent) for _ in range(ranks - 1)), extent]
    return [*pairwise(ends)]


def test_even_pieces() -> None:
    assert even_ranges(7, 3) == ((0, 2), (2, 4), (4, 7))
    assert even_sizes(2, 4) == (0, 1, 0, 1)


def test_outputs_are_all_windows_that_fit(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        sliding, extent = draw_sliding(rng), rng.randint(0, 20)
        outputs = sliding.outputs(extent)
        end = extent + sliding.high
        if outputs > 0:
            assert max(read_by(sliding, outputs - 1)) < end
        assert max(read_by(sliding, max(0, outputs))) >= end


def test_outputs_read_from_the_first_to_the_last(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        sliding = draw_sliding(rng)
        low = rng.randint(0, 10)
        high = low + rng.randint(0, 5)
        reads = set().union(*(read_by(sliding, out) for out in range(low, high)))
        first, last = sliding.reads(low, high)
        if reads:
            assert (first, last) == (min(reads), max(reads) + 1)
        else:
            assert first == last


def test_the_interior_reads_the_own_piece_and_padding_only(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(1000):
        sliding, extent = draw_sliding(rng), rng.randint(1, 30)
        own = rng.choice(pieces_of(rng, extent, 3))
        outputs = (rng.randint(0, 9), rng.randint(9, 30))
        low, high = sliding.within(own, extent, outputs)
        foreign = {*range(extent)} - {*range(*own)}
        # The elements between those of a dilated kernel count as read.
        inside = [
            out
            for out in range(*outputs)
            if not foreign & {*range(*sliding.reads(out, out + 1))}
            and not (own[0] > 0 and sliding.reads(out, out + 1)[0] < own[0])
            and not (own[1] < extent and sliding.reads(out, out + 1)[1] > own[1])
        ]
        assert [*range(low, high)] == inside
        found += bool(inside)
    assert found > 100


def test_transposed_outputs_come_from_the_inputs_that_contribute(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        spreading = Spreading(
            kernel=rng.randint(1, 5),
            stride=rng.randint(1, 4),
            padding=rng.randint(0, 4),
            dilation=rng.randint(1, 3),
        )
        extent = rng.randint(1, 10)
        low = rng.randint(0, 20)
        high = low + rng.randint(1, 6)
        contribute = {
            place
            for place in range(extent)
            for number in range(spreading.kernel)
            if low <= spreading.first(place) + number * spreading.dilation < high
        }
        assert contribute <= {*range(*spreading.reads(low, high))}
        last = spreading.first(extent - 1) + spreading.reach
        assert spreading.outputs(extent) == last + 1 - spreading.padding
        assert spreading.reads(low, low) == (0, 0)


def test_adaptive_windows_share_at_most_one_output_across_a_boundary(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        extent, outputs = rng.randint(1, 20), rng.randint(1, 20)
        windows = [adaptive_window(out, extent, outputs) for out in range(outputs)]
        assert windows[0][0] == 0
        assert windows[-1][1] == extent
        pieces = pieces_of(rng, extent, 3)
        last = -1
        for piece in pieces:
            touched = range(*adaptive_outputs(piece, extent, outputs))
            assert [*touched] == [
                out
                for out, window in enumerate(windows)
                if meet(piece, window)[0] < meet(piece, window)[1]
            ]
            if touched:
                assert touched[0] >= last
                last = touched[-1]


def test_linear_outputs_lie_between_neighbours(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        extent, outputs = rng.randint(1, 20), rng.randint(1, 40)
        aligned = rng.random() < 0.5
        found = linear_sources(extent, outputs, None, aligned, np.float64)
        values = found.low * (1 - found.part) + found.high * found.part
        if aligned:
            expected = np.linspace(0, extent - 1, outputs)
        else:
            expected = (np.arange(outputs) + 0.5) * extent / outputs - 0.5
            expected = np.clip(expected, 0, extent - 1)
        assert np.abs(values - expected).max() < 1e-12
        assert (found.low >= 0).all()
        assert (found.high < extent).all()
    assert span_of([], []) == (0, 0)
    assert span_of([2, 3], [3, 4]) == (2, 5)


def test_windows_leave_room_where_they_leave_the_dimension() -> None:
    assert clipped(-2, 3, 10) == Window(5, ((0, 3, 2),))
    assert clipped(8, 12, 10) == Window(4, ((8, 10, 0),))
    assert clipped(-5, -2, 10) == Window(3, ())
    assert clipped(4, 4, 10) == Window(0, ())
    assert wrapped(-2, 3, 4) == Window(5, ((2, 4, 0), (0, 3, 2)))
    assert wrapped(3, 9, 4) == Window(6, ((3, 4, 0), (0, 4, 1), (0, 1, 5)))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("reflect", [2, 1, 0, 1, 2, 3, 2, 1]),
        ("replicate", [0, 0, 0, 1, 2, 3, 3, 3]),
        ("circular", [2, 3, 0, 1, 2, 3, 0, 1]),
    ],
)
def test_padding_by_own_elements(mode: str, expected: list[int]) -> None:
    assert [source_of(place, 4, mode) for place in range(-2, 6)] == expected


def test_messages_fill_every_window(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        ranks, extent = rng.randint(1, 5), rng.randint(1, 12)
        pieces = pieces_of(rng, extent, ranks)
        windows = []
        for _ in range(ranks):
            low = rng.randint(-3, extent)
            high = low + rng.randint(0, extent + 4)
            make = clipped if rng.random() < 0.5 else wrapped
            windows.append(make(low, high, extent))
        every = [transfers(pieces, rank, windows) for rank in range(ranks)]
        on_way: dict[tuple[int, int], list[range]] = {}
        for rank, (sends, _, _) in enumerate(every):
            for peer, low, high in sends:
                first = pieces[rank][0]
                strip = range(first + low, first + high)
                on_way.setdefault((rank, peer), []).append(strip)
        for rank, (_, recvs, kept) in enumerate(every):
            filled: dict[int, int] = {}
            for low, high, at in kept:
                first = pieces[rank][0]
                filled |= {at + n: first + low + n for n in range(high - low)}
            for peer, low, high in recvs:
                strip = on_way[peer, rank].pop(0)
                assert len(strip) == high - low
                filled |= dict(zip(range(low, high), strip, strict=True))
            expected = {
                at + n: low + n
                for low, high, at in windows[rank].parts
                for n in range(high - low)
            }
            assert filled == expected
        assert not any(on_way.values())


def test_ranges_that_share_nothing_meet_in_an_empty_one() -> None:
    assert meet((0, 4), (2, 9)) == (2, 4)
    low, high = meet((0, 2), (5, 9))
    assert low == high


def test_cuts() -> None:
    def main(comm: object) -> None:
        cut = Cut.even(comm, 5)  # type: ignore[arg-type]
        assert cut.sizes == (2, 3)
        assert cut.pieces == ((0, 2), (2, 5))
        assert cut.own == cut.bounds(cut.comm.rank)
        assert cut.extent == 5
        with pytest.raises(UsageError, match=r"sizes=\(1, 2, 3\) has 3 pieces"):
            Cut(comm, (1, 2, 3))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="none below 0"):
            Cut(comm, (1, -1))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="comm=7"):
            Cut(7, (1,))  # type: ignore[arg-type]

    run(2, main)
