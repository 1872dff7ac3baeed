# SPDX-License-Identifier: Apache-2.0
"""Facts that ranks tell each other before a step, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commrt.errors import MismatchError, UsageError
from commrt.layers.all_or_none import check_equal, check_same
from commrt.layers.kfac.settings import Settings

__all__ = ["Agreed", "Facts", "check_facts", "started_in"]

_WHAT = "KFAC.step"


class Facts(NamedTuple):
    """Numbers that one rank tells the others."""

    steps: int = 0
    settings: int = 0
    present: int = 0
    """Equal where the same parameters have gradients; 0: gradients are local."""
    gradients: int = 0
    """Equal where gradients are; 0: nobody has looked, or one is not finite."""
    parameters: int = 0
    """Equal where parameters are; 0: nobody has looked."""
    samples: int = 0
    has_overflow: bool = False
    """True if a scaled gradient has an infinity or NaN."""
    has_gradients: bool = False

    def numbers(self, started: int) -> list[int]:
        """Return them as they travel.

        Args:
            started: layers whose sums have started; -1 in a step without sums.
        """
        state = (started + 1) * 4 + self.has_overflow * 2 + self.has_gradients
        return [*self[:6], state]


class Agreed(NamedTuple):
    """Facts of a step that all ranks know."""

    settings: Settings
    is_inverting: bool
    is_overflow: bool
    """True if a scaled gradient of any rank has an infinity or NaN."""
    samples: int
    """Of all ranks."""


def started_in(every: npt.NDArray[np.int64]) -> list[int]:
    """Return the layers whose sums each rank has started; -1: it sums none."""
    found: list[int] = (every[:, -1] // 4 - 1).tolist()
    return found


def check_facts(
    every: npt.NDArray[np.int64], settings: Settings, are_local: bool
) -> Agreed:
    """Return what all ranks know of a step; local.

    Args:
        every: the numbers of all ranks.
        settings: this rank's.
        are_local: True: each rank has gradients of its own samples.

    Raises an error, the same on all ranks, where ranks do not fit together.
    """
    steps, numbers, present, gradients, parameters, samples, states = every.T.tolist()
    if len({*steps}) > 1 or len({*started_in(every)}) > 1:
        raise MismatchError(
            f"{_WHAT}: the ranks have taken different numbers of steps, or sum "
            f"factors in different ones; load the same state on all of them"
        )
    check_same(_WHAT, numbers, "settings")
    check_same(_WHAT, parameters, "values of parameters")
    if any(each & 1 for each in states) and not sum(samples):
        raise UsageError(
            f"{_WHAT}: the model has gradients, but none of its calls was seen. Give "
            f"KFAC the module that the program calls, and let samples_of return the "
            f"number of samples of a call"
        )
    is_inverting = steps[0] % settings.inverse_every == 0
    is_overflow = any(each & 2 for each in states)
    if not is_overflow:  # gradients of such a step are not used
        _check_gradients(present, gradients, are_local, is_inverting)
    return Agreed(settings, is_inverting, is_overflow, sum(samples))


def _check_gradients(
    present: Sequence[int],
    gradients: Sequence[int],
    are_local: bool,
    is_inverting: bool,
) -> None:
    if are_local:
        are_equal = len({*gradients}) == 1 and gradients[0] != 0
        if is_inverting and len(gradients) > 1 and are_equal:
            raise UsageError(
                f"{_WHAT}: all ranks have the same gradients, bit for bit: they "
                f"have been summed already, or ranks have the same samples. Give "
                f'gradients="synchronised", or each rank samples of its own'
            )
        return
    advice = 'average them before step(), or give gradients="local"'
    first = [0] * len(present)
    check_equal(_WHAT, present, first, "parameters with gradients", advice)
    check_equal(_WHAT, gradients, first, "gradients", advice)
