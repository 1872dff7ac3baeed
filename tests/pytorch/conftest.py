# SPDX-License-Identifier: Apache-2.0
"""Tests that need torch: ranks that torchrun starts, in an environment of their own.

``make test-torch`` runs them. The folder is not called torch: for tests that lie beside
it, ``import torch`` would find it.
"""

from __future__ import annotations

from mpi_ranks import mpirun
from torch_ranks import torchrun

__all__ = ["mpirun", "torchrun"]
