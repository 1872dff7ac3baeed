# SPDX-License-Identifier: Apache-2.0
"""Meeting of ranks: they exchange small blobs over a channel of the launcher's.

``connect`` picks MPI, torchrun's store or a world of one. Nothing here is fast and
nothing needs to be: it runs while communicators are created, never per operation.
"""

from __future__ import annotations

from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.connect import connect
from commrt.bootstrap.threads import ThreadWorld

__all__ = ["Bootstrap", "ThreadWorld", "connect"]
