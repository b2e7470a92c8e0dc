"""Summarize, compare, verify and digest checkpoints, and compute statistics of their values.

The functions take checkpoints or files, and return small dataclasses. Commands and the
package `ckptkit.views` print the results as text, JSON or pictures. This package uses core,
compute, pickles, quantized, formats, scanning, api and lora.
"""
