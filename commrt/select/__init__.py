# SPDX-License-Identifier: Apache-2.0
"""Selection: facts, tables, the default model and the policy.

Nothing here imports algorithms or backends: names and candidates are passed in. Nothing
is re-exported either: ``commrt.select.facts`` is cheap and needed at import, the policy
and the tables are needed at ``init`` only.
"""
