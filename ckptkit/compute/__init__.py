"""Arithmetic on the elements of byte ranges, and torch tensors made of them.

In: a Derived (an operation over byte ranges). Out: its bytes, in bounded pieces; statistics; torch
storages. Uses core. Functions import numpy and torch when they need them, so that commands that
only copy import neither.
"""
