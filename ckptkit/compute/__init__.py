"""Arithmetic on tensor elements in byte ranges, and torch tensors of the results.

In: a Derived (an operation over byte ranges). Out: its bytes, in bounded pieces; statistics; torch
storages. Uses core. Functions import numpy and torch only when needed. A command that only copies
imports neither.
"""
