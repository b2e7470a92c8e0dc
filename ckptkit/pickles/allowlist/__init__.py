"""The allowlist: names that a checkpoint may call or hold, as data, and the one judgement of a step
by it.

In: names and the sorts of values. Out: a level for each step of a pickle. Uses the tree and nothing
below it. ``rows`` and ``classes`` are the data; ``names`` and ``calls`` judge. Others import
:mod:`ckptkit.pickles.trust`.
"""
