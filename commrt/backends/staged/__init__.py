# SPDX-License-Identifier: Apache-2.0
"""Device arrays through pinned host memory, as a backend."""
