# SPDX-License-Identifier: Apache-2.0
"""commrt's errors as torch's programs expect them: also ``dist.DistBackendError``.

Programs over torch.distributed catch RuntimeError, whatever the backend. So what a call
raises is of commrt's class and of torch's: ``except commrt.errors.TimeoutError_`` and
``except RuntimeError`` both find it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from commrt.errors import CommError

__all__ = ["as_torch_error"]


def as_torch_error(error: CommError) -> CommError:
    """Return the same error, of a class that is torch's, too."""
    kind: Any = type(error)
    if issubclass(kind, dist.DistBackendError):
        return error
    made: CommError = _class_of(kind)(*error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    made.__traceback__ = error.__traceback__
    return made


@cache
def _class_of(kind: Any) -> Any:
    return type(kind.__name__, (kind, dist.DistBackendError), {})
