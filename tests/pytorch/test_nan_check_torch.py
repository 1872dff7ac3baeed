# SPDX-License-Identifier: Apache-2.0
"""Process groups that refuse tensors with NaN or infinity before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job

from commrt.errors import CommError
from commrt.torch import Options


def outcomes(by_options: bool) -> list[str]:
    """Rank 1's tensor has one or the other; all ranks are in step after each call."""
    found = []
    with job(**({"pg_options": Options(nan_check=True)} if by_options else {})):
        for value in ("nan", "inf"):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(5, dtype=dtype)
                if dist.get_rank() == 1:
                    x[3] = float(value)
                kind = "nothing"
                try:
                    dist.all_reduce(x)
                except CommError as error:
                    named = "at element 3 of 5" in str(error)
                    kind = type(error).__name__ if named else str(error)
                found.append(kind)
                total = torch.ones(2)
                dist.all_reduce(total)
                assert total.tolist() == [dist.get_world_size()] * 2
    return found


@pytest.mark.parametrize("by_options", [True, False])
def test_the_rank_names_its_element_and_the_others_hear_of_it(
    torchrun: Any, by_options: bool
) -> None:
    env = {} if by_options else {"COMMRT_NAN_CHECK": "1"}
    found = torchrun(3, outcomes, env=env, by_options=by_options)
    kinds = ["RefusedError", "NotFiniteError", "RefusedError"]
    assert found == [[kind] * 4 for kind in kinds]
