"""Train small models on real data to make checkpoints for tests. Start reading at ``loop.py``.

Input: a configuration. Output: ``torch.save`` checkpoints, the fixtures of tests. No other package
imports the trainer. The trainer uses only ckptkit's public functions. ``ckptkit train`` and
``python -m ckptkit.trainer`` run the trainer.
"""
