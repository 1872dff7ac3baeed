# SPDX-License-Identifier: Apache-2.0
"""PyTorch on commrt: ``torch.distributed.init_process_group("commrt")``.

torch finds the backend by itself, through the entry point ``torch.backends``, so
programs need no import. Importing this package imports neither torch nor anything else
that is big; what a process group needs comes with the first one. For who chooses how
operations run there are ``Options``, ``using`` and ``explain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt.torch.registration import register

__all__ = ["Options", "explain", "init_process_group", "register", "using"]

_HOME = {
    "Options": "commrt.torch.group_options",
    "explain": "commrt.torch.explaining",
    "init_process_group": "commrt.torch.default_group",
    "using": "commrt.torch.per_call",
}

if TYPE_CHECKING:
    from commrt.torch.default_group import init_process_group as init_process_group
    from commrt.torch.explaining import explain as explain
    from commrt.torch.group_options import Options as Options
    from commrt.torch.per_call import using as using


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `import torch` imports this package."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'commrt.torch' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOME[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"commrt.torch.{name} needs torch, which is not installed here: "
            f"pip install 'commrt[torch]'; commrt itself works without",
            name=error.name,
        ) from error
    value = getattr(home, name)
    globals()[name] = value
    return value
