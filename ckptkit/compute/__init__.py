"""Arithmetic on the elements of byte ranges, and torch tensors made of them.

In: a Derived (an operation over byte ranges). Out: its bytes, in bounded pieces; statistics; torch
storages. Uses core. numpy and torch are imported inside functions, so that commands that only copy
pay for neither.
"""
