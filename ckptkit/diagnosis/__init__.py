"""Causes why a checkpoint does not load, and for each the command that fixes it.

In: a path, and a model if there is one. Out: causes with their fixes; ``diagnose.cure`` carries
them out in one plan. Uses core, quantized, edits, formats, scanning, api, analysis,
loading and lora.
"""
