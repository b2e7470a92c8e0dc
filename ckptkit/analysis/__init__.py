"""Checkpoint -> facts: summary, diff, matching of names, statistics, verification, digests.

In: checkpoints or files. Out: small dataclasses, which commands and views turn into words, JSON or
pictures. Uses core, compute, pickles, quantized, formats, scanning, api and lora.
"""
