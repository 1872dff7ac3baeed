# SPDX-License-Identifier: Apache-2.0
"""Factors in an optimizer's state, which is that of one process on any number of ranks.

The state of a weight has its layer's averages, and those averages that its inverses
are of. The inverses themselves are not saved: they are computed again, wherever the
placement of the next run has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commrt.errors import UsageError, shown
from commrt.layers.kfac.factors import Averages, Pair
from commrt.layers.kfac.inverses import Task
from commrt.layers.kfac.model_layers import Layer
from commrt.layers.kfac.triangles import packed_length

__all__ = ["averages_in", "check_state", "inverted_in", "keep_types", "write_factors"]

_AVERAGES = ("factor_inputs", "factor_gradients")
_INVERTED = ("inverted_inputs", "inverted_gradients")
_UPDATES, _DAMPING = "factor_updates", "inverted_damping"


def averages_in(state: Mapping[str, Any]) -> Averages | None:
    """Return the averages in the state of a weight; None: there are none yet."""
    if _UPDATES not in state:
        return None
    return Averages(Pair(*(state[name] for name in _AVERAGES)), state[_UPDATES])


def inverted_in(state: Mapping[str, Any]) -> Task | None:
    """Return what the inverses of a layer are of; None: there are none yet."""
    if _DAMPING not in state:
        return None
    return Task(Pair(*(state[name] for name in _INVERTED)), state[_DAMPING])


def write_factors(
    state: dict[str, Any], averages: Averages, inverted: Task | None
) -> None:
    """Put averages into the state of a weight, and what has been inverted now."""
    state.update(zip(_AVERAGES, averages.factors, strict=True))
    state[_UPDATES] = averages.updates
    if inverted is not None:
        state.update(zip(_INVERTED, inverted.factors, strict=True))
        state[_DAMPING] = inverted.damping


def check_state(given: Any, layers: Sequence[Layer | None]) -> None:
    """Raise UsageError for what is no state of these layers' factors.

    Args:
        given: as ``state_dict()`` returns it.
        layers: for each parameter, the layer whose weight it is.
    """
    what = "KFAC.load_state_dict"
    is_state = isinstance(given, Mapping) and {"state", "param_groups"} <= {*given}
    groups = given["param_groups"] if is_state else []
    if len(groups) != 1 or "steps" not in groups[0]:
        raise UsageError(
            f"{what}: {shown(given)} is no state of KFAC, as state_dict() returns it"
        )
    numbers = groups[0]["params"]
    if len(numbers) != len(layers):
        raise UsageError(
            f"{what}: the state is of {len(numbers)} parameters; the model has "
            f"{len(layers)} that need a gradient"
        )
    for number, layer in zip(numbers, layers, strict=True):
        state = given["state"].get(number, {})
        for names in (_AVERAGES, _INVERTED):
            if names[0] not in state:
                continue
            if layer is None:
                raise UsageError(
                    f"{what}: the state has factors of parameter {number}, which is no "
                    f"weight of a preconditioned layer here; give the same skip"
                )
            for name, side in zip(names, layer.rows.sides, strict=True):
                if len(state[name]) != packed_length(side):
                    raise UsageError(
                        f"{what}: {name} of {layer.name} has {len(state[name])} "
                        f"elements; expected {packed_length(side)}"
                    )


def keep_types(states: Sequence[dict[str, Any]], given: Mapping[str, Any]) -> None:
    """Restore factors that torch has converted to the type of a narrower weight."""
    numbers = given["param_groups"][0]["params"]
    for number, state in zip(numbers, states, strict=True):
        for name in (*_AVERAGES, *_INVERTED):
            if name in state:
                saved = given["state"][number][name]
                like = state[name]
                kept = torch.float64 if like.dtype == torch.float64 else torch.float32
                state[name] = saved.to(like.device, kept, copy=True)
