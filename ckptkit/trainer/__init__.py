"""The reference trainer: small models, real data, one loop; start at ``loop.py``.

In: a configuration. Out: checkpoints as plain ``torch.save`` writes them, which are the fixtures. A
leaf: uses ckptkit's public names, as any user would. ``ckptkit train`` is ``-m ckptkit.trainer``.
"""
