# SPDX-License-Identifier: Apache-2.0
"""gloo, which carries messages between nodes where there is no MPI."""
