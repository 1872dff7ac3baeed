# SPDX-License-Identifier: Apache-2.0
"""The ``ipc`` backend: arrays on GPUs, over memory that processes share (CUDA IPC)."""

from __future__ import annotations

from commrt.backends.base import Availability, Capabilities, Surroundings
from commrt.backends.ipc.attached import AttachedIpc
from commrt.backends.ipc.collectives import NAME
from commrt.backends.parameters import schedule_parameters
from commrt.devices.cuda import why_no_card
from commrt.group.group import Group
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Parameters
from commrt.vocabulary.operations import OPERATIONS

__all__ = ["IpcBackend"]


class IpcBackend:
    """Arrays on GPUs, over memory that processes have opened of each other's."""

    name = NAME
    capabilities = Capabilities(
        devices=("cuda",),
        operations=tuple(spec.name for spec in OPERATIONS if spec.rule_bytes != "any"),
        limits="stream-ordered; ranks that are processes of one node, with kernels and "
        "stream memory operations; no alltoallv",
    )

    def availability(self) -> Availability:
        """Return whether this process has a GPU; the ranks try if they share it."""
        why = why_no_card()
        reason = why or "CUDA IPC between processes of a node, tried at the first call"
        return Availability(self.name, why is None, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedIpc:
        """Return its object on one communicator."""
        return AttachedIpc(self, group, beside)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return True: how the ranks have met does not matter."""
        return True

    def variants(self, candidate: Candidate, full_nbytes: int) -> None:
        """Return None: parameters of the transport matter."""
