# SPDX-License-Identifier: Apache-2.0
"""Registration of the backend with torch, called at the end of ``import torch``.

An error in here would make ``import torch`` fail for every program of an environment
that has commrt. So every problem becomes a warning, and slow steps wait for the first
process group.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from functools import lru_cache
from typing import Any

from commrt.torch.names import BACKEND

__all__ = ["check_version", "register"]

TESTED = ("2.13", "2.14")
"""Versions of torch whose own tests were run on commrt."""
_NAN_CHECK = "TORCH_DIST_NAN_CHECK"
"""Has torch look for NaN in what calls send, by a hook; torch 2.14 and later."""
_TORCHCOMMS = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"


def register() -> None:
    """Make ``commrt`` a backend of torch.distributed; idempotent."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001  it would break `import torch`
        warnings.warn(
            f"commrt cannot register itself as a backend of this torch "
            f"({type(error).__name__}: {error}): init_process_group({BACKEND!r}) will "
            f"not work; it was tested with torch {', '.join(TESTED)}",
            RuntimeWarning,
            stacklevel=2,
        )


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(
        BACKEND, _create, extended_api=True, devices=["cpu", "cuda"]
    )
    _warn_of_torchcomms()
    from commrt.torch.launchers import serve_launchers

    serve_launchers()


def _warn_of_torchcomms() -> None:
    """Say why no group will be commrt's where torch asks torchcomms for all of them.

    torch 2.14 asks torchcomms only for those that torchcomms has.
    """
    from torch.distributed import distributed_c10d

    if hasattr(distributed_c10d, "_torchcomms_handles_backend"):
        return
    wanted = os.environ.get(_TORCHCOMMS, "0").lower() not in ("", "0", "false")
    if wanted and importlib.util.find_spec("torchcomms") is not None:
        warnings.warn(
            f"with {_TORCHCOMMS} torch asks torchcomms for every backend, and "
            f"{BACKEND} is none of torchcomms': init_process_group({BACKEND!r}) will "
            f"fail; unset {_TORCHCOMMS} to use it",
            RuntimeWarning,
            stacklevel=3,
        )


def _create(options: Any, pg_options: Any) -> Any:
    """Return a process group; torch calls this on every rank of it."""
    check_version()
    from commrt.torch.new_groups import make_process_group

    return make_process_group(options, pg_options, of_all_devices=_is_alone())


def _is_alone() -> bool:
    """Return whether torch's new group has this backend only, and no hooks.

    torch does not say it to who makes a backend. It is in the string that the program
    gave ("cpu:gloo,cuda:commrt"), an argument of the function that calls. Hooks see the
    calls of groups in C++ alone.
    """
    import torch.distributed as dist

    if os.environ.get(_NAN_CHECK) == "1":
        return False

    given = str(sys._getframe(2).f_locals.get("backend", BACKEND))
    backends = dist.BackendConfig(dist.Backend(given)).get_device_backend_map()
    return {*map(str, backends.values())} <= {BACKEND}


@lru_cache(maxsize=1)
def check_version() -> None:
    """Warn, once, where nobody has tried this version of torch."""
    import torch

    version: str = torch.__version__
    if not any(version.startswith(f"{tested}.") for tested in TESTED):
        warnings.warn(
            f"commrt's process groups were tested with torch {', '.join(TESTED)}, and "
            f"this is {version}: what that version calls otherwise may be missing",
            RuntimeWarning,
            stacklevel=3,
        )
