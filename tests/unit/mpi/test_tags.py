# SPDX-License-Identifier: Apache-2.0
"""Tags of MPI messages: nobody shares one."""

from __future__ import annotations

from commrt.bootstrap.mpi_mail import TAG
from commrt.mpi import tags


def test_no_use_of_no_communicator_has_the_tag_of_another() -> None:
    taken = [TAG]
    for identity in range(50):
        steps = tags.of_steps(identity)
        messages = steps + 1  # by the engine
        made = [tags.for_library(identity), tags.for_caller(identity)]
        taken += [steps, messages, *made]
        assert max(taken) == tags.last(identity)
    assert len({*taken}) == len(taken)
