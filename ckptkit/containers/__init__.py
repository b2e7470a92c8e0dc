"""Zip, tar and strict JSON: what several formats are made of.

In: a byte source. Out: directories of members, each a range of bytes; and the plan of a zip file.
Uses core. The readers are strict: what two readers could understand differently is refused.
"""
