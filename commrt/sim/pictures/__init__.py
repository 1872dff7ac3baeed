# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulated runs: SVG, and one page of HTML that moves."""
