# SPDX-License-Identifier: Apache-2.0
"""MPI as a backend, for host memory and for devices."""
