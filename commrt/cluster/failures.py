# SPDX-License-Identifier: Apache-2.0
"""The error that the cluster raises where this machine cannot do what it is asked."""

from __future__ import annotations

from commrt.errors import BackendError

__all__ = ["ClusterError"]


class ClusterError(BackendError):
    """A cluster cannot be made, found, entered or ended on this machine."""
