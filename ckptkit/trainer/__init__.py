"""Train small models on real data to make checkpoints for tests. Start reading at ``loop.py``.

The input is a configuration. The output is checkpoints, which tests use as fixtures. No other
package imports the trainer. The trainer uses only ckptkit's public functions. ``ckptkit train`` and
``python -m ckptkit.trainer`` run the trainer.
"""
