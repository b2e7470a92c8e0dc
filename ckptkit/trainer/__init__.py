"""Train small models on real data, to make checkpoints for tests; start reading at ``loop.py``.

Input: a configuration. Output: checkpoints of plain ``torch.save``, which are the fixtures. Nothing
else imports this package. It uses ckptkit's public functions, as a user would. ``ckptkit train``
and ``python -m ckptkit.trainer`` run it.
"""
