"""The reference trainer: small models, real data, one loop; its checkpoints are the fixtures.

Start at :mod:`loop`, which reads from top to bottom: batches, gradients, steps, checkpoints.

In: a configuration. Out: checkpoints as plain ``torch.save`` writes them. A leaf: uses ckptkit's
public names, as any user would. ``ckptkit train`` is ``python -m ckptkit.trainer``.
"""
