# SPDX-License-Identifier: Apache-2.0
"""The MPI library that mpi4py loaded."""
