# SPDX-License-Identifier: Apache-2.0
"""PyTorch on commrt: ``torch.distributed.init_process_group("commrt")``.

torch finds the backend by itself, through the entry point ``torch.backends``, so
programs need no import. Importing this package imports neither torch nor anything else
that is big; what a process group needs comes with the first one.
"""

from __future__ import annotations

from commrt.torch.registration import register

__all__ = ["register"]
