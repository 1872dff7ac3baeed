# SPDX-License-Identifier: Apache-2.0
"""commrt's errors as torch's programs expect them: also ``dist.DistBackendError``.

Programs over torch.distributed catch RuntimeError, whatever the backend. So what a call
raises is of commrt's class and of torch's: ``except commrt.errors.TimeoutError_`` and
``except RuntimeError`` both find it.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from commrt.errors import CommError

__all__ = ["as_torch_error"]


def as_torch_error(error: CommError) -> CommError:
    """Return the same error, of a class that is torch's, too."""
    if isinstance(error, dist.DistBackendError):
        return error
    made = _class_of(type(error))(*error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


@cache
def _class_of(kind: type[CommError]) -> type[CommError]:
    if not issubclass(kind, CommError):
        raise TypeError(f"{kind!r} is not an error of commrt")
    return type(kind.__name__, (kind, dist.DistBackendError), {})
