# SPDX-License-Identifier: Apache-2.0
"""Non-negative matrix factorisation with graphs, of rows on different ranks.

docs/reference/science.md says how to use it.
"""

from commrt.science.nmf.factorization import Factorization, GraphNMF
from commrt.science.nmf.kernels import GraphKernel

__all__ = ["Factorization", "GraphKernel", "GraphNMF"]
