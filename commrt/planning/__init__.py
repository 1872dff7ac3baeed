# SPDX-License-Identifier: Apache-2.0
"""Plans that the engine runs, made of schedules."""
