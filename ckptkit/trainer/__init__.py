"""The reference trainer: how checkpoints come to be what they are.

Small models, real data, one loop (:mod:`ckptkit.trainer.loop`). It saves with plain ``torch.save`` and loads through
ckptkit's public names, as any user would. ``ckptkit train`` and ``python -m ckptkit.trainer`` are the same command.
"""
