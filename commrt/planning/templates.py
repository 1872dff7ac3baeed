# SPDX-License-Identifier: Apache-2.0
"""Plans that the engine runs on the host, made of schedules.

A schedule depends on no length. So the engine gets a *template*: the lowered program,
and the rules by which offsets, fragments and stores follow from the number of elements.
It makes the plans of all lengths by itself (native/engine/plan_template.hpp).

The number of fragments must be equal on all ranks, because messages are matched by
their position in fragments. It therefore follows from the *footprint* of the whole
schedule, over all ranks, never from one rank's program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from commrt import _native
from commrt.errors import UsageError
from commrt.planning import host_plans, vectors
from commrt.planning.compared import facts_of
from commrt.planning.footprint import (
    DIRECT_CHUNK_NBYTES,
    LANE_NBYTES,
    Own,
    footprint,
)
from commrt.planning.host_plans import (
    check_params,
    lowered_program,
    lowered_programs,
    node_numbers,
    scaling,
    split_params,
    why_not,
)
from commrt.planning.spec import PlanSpec, Ranks
from commrt.schedule.engine_model import LINES
from commrt.schedule.exposure import Reach, reaches
from commrt.schedule.ir import Space
from commrt.schedule.lower import LOCAL, Lowered
from commrt.schedule.nodes import Nodes
from commrt.schedule.parts import NOTHING, Parts

__all__ = ["call_shape", "plan_of", "schedule_plan", "schedule_template"]

_BY_LINK_CLASS = -1
"""Code that tells the engine ``spins=auto``."""
_NEVER = 2**63 - 1
"""More bytes than there are."""
_KINDS = {"in": 0, "out": 1, "tmp": 2}
_REACHED_RANKS = 64
"""Most ranks for which it pays to find out which memory peers may reach."""


@lru_cache(maxsize=256)
def _reaches(
    coll: str, algorithm: str, root: int, params: Own, nodes: Nodes
) -> tuple[tuple[Reach, ...], tuple[Lowered, ...]]:
    def share_memory(rank: int, peer: int) -> bool:
        return nodes[rank] == nodes[peer]

    programs = lowered_programs(coll, algorithm, root, params, nodes)
    return tuple(reaches(programs, share_memory)), tuple(programs)


def _reach(comm: Ranks, spec: PlanSpec) -> dict[str, Any]:
    """Return the engine's arguments about buffers in the symmetric heap."""
    own, _ = split_params(spec.candidate.params)
    parts = vectors.parts_for(comm.size, spec, own)
    found, programs = _reaches(
        spec.op.name,
        spec.candidate.algorithm,
        spec.root,
        tuple(sorted(own.items())),
        node_numbers(comm),
    )
    mine = found[comm.rank]
    rows = np.flatnonzero(programs[comm.rank].outputs[:, 0] != LOCAL)
    spaces: dict[tuple[int, int], int] = {}
    landings = []
    for message, row in enumerate(rows):
        landing = mine.landings[row]
        if landing is not None:
            peer, (space, lo, _) = landing
            number = spaces.setdefault((peer, space), len(spaces))
            landings.append((message, number, lo))
    return {
        "exposable": mine.exposable,
        "operand_exposable": mine.operand_exposable,
        "deliverable": mine.deliverable[rows],
        "spaces": [
            _blocks(programs[peer].spaces[space], parts, peer, space)
            for peer, space in spaces
        ],
        "landings": landings,
    }


_DIRECT_CHUNK = DIRECT_CHUNK_NBYTES
"""Bytes per message of connections of commrt's own: such messages leave at once, long
ones wait until their receiver has said yes, behind data on the same way. On 4 hosts at
500 Mbit/s a sum of 16 MiB took 414 ms so, and 725 in messages of 1 MiB; 403 is what the
rate allows. Half as long ones took 408, and a third more of the cores."""
_RELAYED_CHUNK = 262144
_RELAYED_LONG_NBYTES, _RELAYED_LONG_CHUNK = 1 << 20, 4 << 20
_RELAYED_LONG_SUM_NBYTES, _RELAYED_LONG_SUM_CHUNK = 2 << 20, 1 << 20


def schedule_plan(comm: Ranks, spec: PlanSpec) -> Any:
    """Return the engine's plan of this rank for a schedule algorithm."""
    return plan_of(comm, schedule_template(comm, spec), spec)


def plan_of(comm: Ranks, template: _native.PlanTemplate, spec: PlanSpec) -> Any:
    """Return the plan for the lengths of ``spec``, of the template of its program."""
    assert isinstance(comm, _native.Group), "the engine runs plans of its own groups"
    if template.lacks_reach(spec.num_elements):
        template.set_reach(**_reach(comm, spec))
    flat = [count for counts in spec.counts for count in counts]
    plan = template.plan(comm, spec.num_elements, flat)
    if plan is None:
        raise UsageError(
            f"{spec.candidate} cannot run {spec.op.name} of {spec.num_elements} "
            f"elements: the payloads of one rank do not fit into a lane of "
            f"{LANE_NBYTES} bytes; choose another algorithm for {comm.size} ranks"
        )
    assert (plan.in_elems, plan.out_elems) == (spec.in_elements, spec.out_elements)
    return plan


def call_shape(comm: Ranks, spec: PlanSpec) -> _native.CallShape:
    """Return how the lengths of a call's arrays follow, for the engine."""
    op, size = spec.op, comm.size
    gathers, scatters = op.out_count == "times_size", op.out_count == "div_size"
    has_array = op.x_count != "none"
    is_root = comm.rank == spec.root
    return _native.CallShape(
        coll=op.code,
        dtype=spec.dtype.code,
        redop=int(spec.reduction),
        root=spec.root,
        label=str(spec.candidate),
        facts=facts_of(spec),
        returns_out=spec.has_output,
        counts=len(op.count_arguments),
        x_part=(1, size if gathers else 1),
        out_part=(1, size if scatters else 1),
        x_is_own=gathers,
        out_is_own=scatters,
        has_in=has_array and (op.input_on == "all" or is_root),
        has_out=has_array and (op.output_on != "root" or is_root),
        divides=not op.count_arguments and (scatters or op.by_pair),
    )


def schedule_template(comm: Ranks, spec: PlanSpec) -> _native.PlanTemplate:
    """Return what makes the plans of this rank for a schedule, whatever the lengths.

    Of the lengths in ``spec`` nothing is kept.
    """
    assert isinstance(comm, _native.Group), "the engine runs plans of its own groups"
    coll, name = spec.op.name, spec.candidate.algorithm
    check_params(coll, name, comm.size, spec.candidate.params)
    own, transport = split_params(spec.candidate.params)
    reason = why_not(comm, coll, name, spec.root, own)
    if reason is not None:
        raise UsageError(
            f"{spec.candidate} cannot run {coll} on these {comm.size} ranks, because "
            f"it needs more than {LINES} messages on their way from one rank to "
            f"another: {reason}; send fewer, or receive them as they are sent"
        )
    params, nodes = tuple(sorted(own.items())), node_numbers(comm)
    lowered = lowered_program(coll, name, spec.root, params, nodes, comm.rank)
    bound = footprint(coll, name, comm.size, spec.root, params, nodes)
    parts = vectors.parts_for(comm.size, spec, own)
    by_pair = parts is not None and spec.op.by_pair
    chunk = bound.chunk_nbytes(transport.chunk)
    long_from, long_chunk = _NEVER, chunk
    if comm.is_relayed and transport.chunk == "auto":
        chunk, long_from, long_chunk = _relayed_chunks(spec, comm.is_staged)
    factor, integer_factor, divisor = scaling(spec, comm.size)
    # Nobody knows an alltoallv's whole length: its buffers are ordinary ones.
    shows = spec.op.rule_bytes != "any"
    return _native.make_schedule_template(
        comm,
        call_shape(comm, spec),
        spaces=_spaces(lowered, parts),
        share=1 if parts is None else parts.share,
        peers=_peers(lowered),
        inputs=lowered.inputs,
        input_ptr=lowered.input_ptr,
        outputs=lowered.outputs,
        output_ptr=lowered.output_ptr,
        deps=lowered.deps,
        dep_ptr=lowered.dep_ptr,
        messages=[(width, nblk, *scale) for width, nblk, scale in bound.slices],
        publishes=bound.publishes,
        chunk_nbytes=chunk,
        long_from_nbytes=long_from,
        long_chunk_nbytes=long_chunk,
        lane_nbytes=LANE_NBYTES,
        depth=transport.depth,
        slot_reuse=bound.slot_reuse(transport.reuse, spec.op.reduces),
        most_inline=transport.most_inline(spec.op.reduces),
        spins=transport.spins if isinstance(transport.spins, int) else _BY_LINK_CLASS,
        stores=transport.store_rule(comm.facts.link_class, spec.op.reduces).plain(),
        on_node=max(len(ranks) for ranks in comm.nodes),
        factor=factor,
        integer_factor=integer_factor,
        divisor=divisor,
        alone=spec.op.reduces and spec.op.num_contributors(comm.rank, comm.size) == 1,
        itemsize=spec.dtype.itemsize,
        user_function=0 if spec.user is None else spec.user.address,
        user_owner=spec.user,
        # Ranks that add the same numbers must get the same, whose ever they are.
        rounds_scaled=spec.dtype.is_short_float
        and (comm.deterministic or spec.op.reduces_to_all),
        shows_from_nbytes=host_plans.SYMMETRIC_NBYTES if shows else _NEVER,
        wants_reach=shows and comm.has_heap and comm.size <= _REACHED_RANKS,
        instr_pairs=(
            [parts.holder_of(lowered, index) for index in range(len(lowered))]
            if parts is not None and by_pair
            else []
        ),
    )


def _relayed_chunks(spec: PlanSpec, staged: bool) -> tuple[int, int, int]:
    """Return the bytes per message where no MPI carries some: equal on all ranks.

    Then the bytes of the full vector beyond which messages are longer, and how long.
    Messages of gloo (``staged``) are dear, and those that it carries with their
    announcement (native/engine/relay.hpp) save a round. On two pretended nodes a sum
    of 64 MiB in messages of 1 MiB took 0.8 of the time of such ones, a reduce-scatter
    of 8 MiB in messages of 4 MiB 0.7, an all-gather and an all-to-all 0.5 to 0.6.
    """
    if not staged:
        return _DIRECT_CHUNK, _NEVER, _DIRECT_CHUNK
    if spec.op.count_arguments:
        return _RELAYED_CHUNK, _NEVER, _RELAYED_CHUNK
    if spec.op.reduces_to_all:
        return _RELAYED_CHUNK, _RELAYED_LONG_SUM_NBYTES, _RELAYED_LONG_SUM_CHUNK
    return _RELAYED_CHUNK, _RELAYED_LONG_NBYTES, _RELAYED_LONG_CHUNK


_Blocks = tuple[int, int, int, list[int], list[int]]


def _blocks(
    space: Space,
    parts: Parts | None,
    rank: int,
    number: int,
    used: Sequence[bool] = (),
) -> _Blocks:
    """Return how the blocks of a space follow from the lengths, for the engine."""
    held: list[int] = []
    if parts is not None:
        nothing = (NOTHING,) * space.nblk
        held = [*(parts.held[rank][number] if space.scale[0] else nothing)]
    marks = [] if all(used) else [*map(int, used)]
    return *space.scale, space.nblk, marks, held


def _spaces(lowered: Lowered, parts: Parts | None) -> list[tuple[int, _Blocks]]:
    touched: list[set[int]] = [set() for _ in lowered.spaces]
    for kind, where, lo, hi in (*lowered.inputs.tolist(), *lowered.outputs.tolist()):
        if kind == LOCAL:
            touched[where].update(range(lo, hi))
    spaces = []
    for number, space in enumerate(lowered.spaces):
        used: list[bool] = []
        if space.kind == "tmp":
            # Scratch of an inner algorithm is as long as the whole vector, and holds a
            # part of it: what nothing touches takes no memory.
            used = [block in touched[number] for block in range(space.nblk)]
        blocks = _blocks(space, parts, lowered.rank, number, used)
        spaces.append((_KINDS[space.kind], blocks))
    return spaces


def _peers(lowered: Lowered) -> list[tuple[int, int, int]]:
    peers = sorted(set(lowered.messages_in) | set(lowered.messages_out))
    return [
        (peer, lowered.messages_out.get(peer, 0), lowered.messages_in.get(peer, 0))
        for peer in peers
    ]
