# SPDX-License-Identifier: Apache-2.0
"""Branches say how to copy them, and take the state that the advice names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from commrt.errors import UsageError
from commrt.layers.branches import Branches, load_state_dict, state_dict
from commrt.local import run


def test_a_copy_of_branches_is_refused_with_what_to_do() -> None:
    def main(comm: Any) -> None:
        makers = {"a": lambda: nn.Linear(2, 3), "b": lambda: nn.Linear(2, 3)}
        pair, other = (Branches(makers, comm) for _ in range(2))
        with pytest.raises(UsageError, match="make another Branches"):
            copy.deepcopy(nn.Sequential(pair))
        load_state_dict(other, state_dict(pair))
        x = torch.ones(4, 2)
        assert torch.equal(other(x), pair(x))

    run(2, main)
