# SPDX-License-Identifier: Apache-2.0
"""The ``mpi`` backend: the library's own collectives, and schedules across nodes.

Where the ranks agree that the library takes device memory (``attached.py``), it runs
its collectives on arrays on devices too, if it keeps commrt's rules there; other
backends run all else. Its schedules are of host memory alone.
"""

from __future__ import annotations

from commrt import env
from commrt.backends.base import Availability, Capabilities, Surroundings
from commrt.backends.mpi.attached import AttachedMpi
from commrt.backends.mpi.collectives import NATIVE
from commrt.backends.parameters import schedule_parameters
from commrt.group.group import Group
from commrt.launch.detect import detect
from commrt.mpi import library
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Parameters

__all__ = ["MpiBackend"]


class MpiBackend:
    """Memory on any nodes, through the MPI that mpi4py has loaded."""

    name = "mpi"
    capabilities = Capabilities(
        devices=("host", "cuda"),
        native=True,
        only_native_on=("cuda",),
        limits="schedules: host memory, ranks on several nodes; native: on devices "
        "where the library says that it takes their memory; sum and prod of types of "
        "32 bits and more, min, max and bitwise of integers, logical of integers and "
        "bool, each where the library has the type; counts below 2^31",
    )

    def availability(self) -> Availability:
        """Look for mpi4py and its library without starting MPI."""
        launch = detect()
        if launch.kind in ("run", "torchrun"):
            # Not looked for either: there mpi4py is left alone.
            here = False
            program = {"run": "commrt.run", "torchrun": "torchrun"}[launch.kind]
            reason = f"{program} started these ranks, and then MPI is not used"
        else:
            here, reason = library.look()
            if here and launch.kind == "single":
                reason += ", for ranks that mpiexec or srun starts"
        return Availability(self.name, here, reason, self.capabilities)

    def attach(self, group: Group, beside: Surroundings) -> AttachedMpi:
        """Return its object on one communicator."""
        return AttachedMpi(self, group, beside)

    def parameters(
        self, coll: str, algorithm: str, ranks: int | None
    ) -> Parameters | None:
        """Return the parameters of one of its algorithms."""
        return schedule_parameters(coll, algorithm, ranks)

    def may_run(self, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
        """Return whether such ranks may be offered one of its algorithms.

        Ranks of one node may have MPI also where they have not met by it. Between
        nodes it runs schedules unless another carrier is asked for.
        """
        if facts.nodes > 1:
            is_carrier = env.read_str("COMMRT_CARRIER") in ("auto", self.name)
            return by_mpi and (is_carrier or algorithm == NATIVE.algorithm)
        return algorithm == NATIVE.algorithm and facts.size > 1

    def variants(self, candidate: Candidate, full_nbytes: int) -> None:
        """Return None: parameters of the transport matter."""
