# SPDX-License-Identifier: Apache-2.0
"""GPU-aware asynchronous communication runtime for deep learning.

    import commrt
    comm = commrt.init()                     # mpiexec, torchrun, srun or plain python
    comm.allreduce(grad, op="sum")           # numpy, torch, anything with DLPack

Importing commrt starts no MPI, no CUDA and no thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt.version import __version__ as __version__

__all__ = [
    "Block",
    "CartCommunicator",
    "Communicator",
    "Cyclic",
    "GraphCommunicator",
    "Layout",
    "Mesh",
    "Request",
    "SparseVector",
    "algorithm",
    "errors",
    "init",
    "reduction",
    "synchronize",
    "trace",
    "wait_all",
    "wait_any",
]

_HOME = {
    "Block": "commrt.boxes.layouts",
    "CartCommunicator": "commrt.comm",
    "Communicator": "commrt.comm",
    "Cyclic": "commrt.boxes.layouts",
    "GraphCommunicator": "commrt.comm",
    "Layout": "commrt.boxes.layouts",
    "Mesh": "commrt.grids.mesh",
    "Request": "commrt.request",
    "SparseVector": "commrt.sparse.vector",
    "algorithm": "commrt.algorithms",
    "init": "commrt.runtime",
    "reduction": "commrt.vocabulary.reductions",
    "synchronize": "commrt.runtime",
    "wait_all": "commrt.request",
    "wait_any": "commrt.request",
}

if TYPE_CHECKING:
    from commrt import errors as errors
    from commrt import trace as trace
    from commrt.algorithms import algorithm as algorithm
    from commrt.boxes.layouts import Block as Block
    from commrt.boxes.layouts import Cyclic as Cyclic
    from commrt.boxes.layouts import Layout as Layout
    from commrt.comm import CartCommunicator as CartCommunicator
    from commrt.comm import Communicator as Communicator
    from commrt.comm import GraphCommunicator as GraphCommunicator
    from commrt.grids.mesh import Mesh as Mesh
    from commrt.request import Request as Request
    from commrt.request import wait_all as wait_all
    from commrt.request import wait_any as wait_any
    from commrt.runtime import init as init
    from commrt.runtime import synchronize as synchronize
    from commrt.sparse.vector import SparseVector as SparseVector
    from commrt.vocabulary.reductions import reduction as reduction


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: importing commrt stays cheap."""
    import importlib

    if name in ("errors", "trace"):
        return importlib.import_module(f"commrt.{name}")
    if name not in _HOME:
        instead = ""
        if not name.startswith("_"):  # which Python asks for, and nobody types
            known = importlib.import_module("commrt.vocabulary.names_elsewhere")
            instead = known.instead_of(name)
        raise AttributeError(f"module 'commrt' has no attribute {name!r}{instead}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
