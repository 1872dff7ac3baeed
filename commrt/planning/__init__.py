# SPDX-License-Identifier: Apache-2.0
"""From a schedule to the plan that the engine runs."""
