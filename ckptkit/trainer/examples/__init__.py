"""Examples beside the loop, each a table that answers a question of the articles.

``python -m ckptkit.trainer.examples.NAME``: ``segments`` (what checkpoint_sequential saves),
``recompute`` (what recomputing costs, and why dropout needs the random state), ``losses`` (where
DataParallel computes the loss), ``tensor_types`` (dtypes and the names of their tensors).
"""
