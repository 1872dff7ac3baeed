# SPDX-License-Identifier: Apache-2.0
"""Methods of science over collectives: Gaussian processes and matrix factorisation.

They need numpy alone, and run on the host. docs/reference/science.md says how to use
them.
"""
