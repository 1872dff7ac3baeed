# SPDX-License-Identifier: Apache-2.0
"""A vision transformer adds detail to a field: from one process to ranks in a grid.

    python -m commrt.examples.field serial
    python -m commrt.run -n 2 -m commrt.examples.field data
    python -m commrt.run -n 4 -m commrt.examples.field data-tensor

torchrun and mpiexec start the ranks, too. docs/tutorial-training.md goes through the
rungs. One model and one function that trains serve all of them.
"""
